//! kill -9 of the server under load: every acknowledged write is there afterwards, and no block is torn.
//!
//! Two connections of our own keep eight writes in flight each, while fio loads another part of the device.
//! The server is killed by the thread that receives a chosen acknowledgement, so always in the middle of
//! writes. Rounds go on with the same pool: `TIDEGATE_KILL_ROUNDS` of them, 3 unless set. A failure prints
//! the seed; `TIDEGATE_SEED` runs it again with the same choices.

#[path = "support/nbd.rs"]
mod nbd;
mod support;

use std::ops::Range;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Pid, Signal, kill_process};

use nbd::Client;
use support::{Server, ok, scratch, setting, tool};

const BLOCK_BYTES: usize = 4096;
const CONNECTIONS: usize = 2;
const DEPTH: usize = 8;
/// Blocks that one slot of one connection writes, and nobody else: so each has at most one write in flight. Many,
/// so that the last write of most blocks is not long ago.
const BLOCKS_A_SLOT: usize = 512;
const BLOCKS_A_CONNECTION: usize = DEPTH * BLOCKS_A_SLOT;
/// Most blocks of one request.
const BLOCKS_A_WRITE: usize = 4;

#[test]
fn acknowledged_writes_survive_kill_9() {
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    let dir = scratch();
    let (pool, socket) = (dir.path().join("pool"), dir.path().join("socket"));
    ok(["create".as_ref(), pool.as_os_str(), "--engine=btt".as_ref(), "--size=64M".as_ref()]);
    let mut random = Random(seed);
    let mut model = vec![Block::default(); CONNECTIONS * BLOCKS_A_CONNECTION];
    for round in 0..setting("TIDEGATE_KILL_ROUNDS", 3) {
        // Every other round the device is slow, so that requests run in parallel on the server's workers.
        let slow: &[&str] = if round % 2 == 1 { &["--delay-us=100"] } else { &[] };
        let server = Server::start(&pool, &socket, slow);
        let fio = fio_in_another_region(dir.path(), &socket);
        let kill_at = 200 + random.below(4000);
        load_and_kill(&socket, server.pid(), kill_at, &mut model, &mut random);
        server.wait_killed();
        assert_died_with_server(fio);
        ok(["check".as_ref(), pool.as_os_str()]);
        let server = Server::start(&pool, &socket, &[]);
        let (kept, finished) = verify(&socket, &mut model);
        println!(
            "round {round}: killed at acknowledgement {kill_at}; {kept} blocks as acknowledged, {finished} of writes in flight"
        );
        let (status, _) = server.stop(Signal::TERM);
        assert!(status.success(), "{status}");
    }
}

/// What a block of the device may hold.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// Sequence number of the last acknowledged write; 0: none, the block is zero.
    acknowledged: u64,
    /// Sequence number of the write in flight when the server died, if any.
    in_flight: Option<u64>,
}

/// One connection and its part of the model.
struct Writer<'a> {
    client: Client,
    first_lba: usize,
    blocks: &'a mut [Block],
    /// The write in flight of each slot: its range of `blocks`.
    slots: [Range<usize>; DEPTH],
    sequence: u64,
    random: Random,
}

fn load_and_kill(
    socket: &Path,
    server: Pid,
    kill_at: usize,
    model: &mut [Block],
    random: &mut Random,
) {
    let count = AtomicUsize::new(0);
    let acknowledged = || {
        if count.fetch_add(1, Ordering::Relaxed) + 1 == kill_at {
            kill_process(server, Signal::KILL).expect("the server is alive");
        }
    };
    std::thread::scope(|scope| {
        for (number, blocks) in model.chunks_mut(BLOCKS_A_CONNECTION).enumerate() {
            let mut writer = Writer {
                client: Client::connect(socket).expect("the server is ready"),
                first_lba: number * BLOCKS_A_CONNECTION,
                sequence: blocks.iter().map(|block| block.acknowledged).max().unwrap_or(0),
                blocks,
                slots: Default::default(),
                random: Random(random.next()),
            };
            scope.spawn(move || writer.run(acknowledged));
        }
    });
    assert!(count.into_inner() >= kill_at, "a connection broke before the server was killed");
}

impl Writer<'_> {
    /// Writes until the connection breaks, calling `acknowledged` after each answer.
    fn run(&mut self, acknowledged: impl Fn()) {
        for slot in 0..DEPTH {
            if self.issue(slot).is_err() {
                return;
            }
        }
        while let Ok((cookie, error)) = self.client.receive() {
            assert_eq!(error, 0, "the server refused a write");
            let slot = usize::try_from(cookie).expect("the cookie is one of ours");
            for block in &mut self.blocks[self.slots[slot].clone()] {
                block.acknowledged = block.in_flight.take().expect("the block was in flight");
            }
            acknowledged();
            if self.issue(slot).is_err() {
                return;
            }
        }
    }

    /// Sends a write of 1 to 4 blocks of `slot`, all stamped with a new sequence number.
    fn issue(&mut self, slot: usize) -> std::io::Result<()> {
        self.sequence += 1;
        let sequence = self.sequence;
        let count = 1 + self.random.below(BLOCKS_A_WRITE);
        let first = slot * BLOCKS_A_SLOT + self.random.below(BLOCKS_A_SLOT - count + 1);
        self.slots[slot] = first..first + count;
        for block in &mut self.blocks[first..first + count] {
            block.in_flight = Some(sequence);
        }
        let lba = self.first_lba + first;
        let data: Vec<u8> = (lba..lba + count).flat_map(|lba| stamped(lba, sequence)).collect();
        self.client.send_write(slot as u64, (lba * BLOCK_BYTES) as u64, &data)
    }
}

/// Reads every block back: it must hold the last acknowledged write or the one in flight, whole. From here
/// on the model holds what was found. Returns how many blocks held which.
fn verify(socket: &Path, model: &mut [Block]) -> (usize, usize) {
    let mut client = Client::connect(socket).expect("the server is ready");
    let (mut kept, mut finished) = (0, 0);
    for (lba, block) in model.iter_mut().enumerate() {
        let data =
            client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).expect("the server is there");
        if data == stamped(lba, block.acknowledged) {
            kept += 1;
        } else if block.in_flight.is_some_and(|sequence| data == stamped(lba, sequence)) {
            block.acknowledged = block.in_flight.unwrap_or_default();
            finished += 1;
        } else {
            let found = sequence_of(&data);
            panic!(
                "block {lba} is lost or torn: it should hold {block:?}, but starts with sequence {found}"
            );
        }
        block.in_flight = None;
    }
    (kept, finished)
}

/// The bytes of write number `sequence` to block `lba`: both numbers, a body that depends on both, and a
/// checksum. Zeroes for number 0, a block never written.
fn stamped(lba: usize, sequence: u64) -> Vec<u8> {
    if sequence == 0 {
        return vec![0; BLOCK_BYTES];
    }
    let lba = lba as u64;
    let mut body = Random(lba << 32 ^ sequence);
    let mut words = vec![lba, sequence];
    words.extend((words.len()..BLOCK_BYTES / 8 - 1).map(|_| body.next()));
    words.push(words.iter().fold(0, |sum: u64, word| sum.rotate_left(1) ^ word));
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn sequence_of(data: &[u8]) -> u64 {
    data[8..16].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// fio with random writes and reads behind our blocks; returns once its job has started.
fn fio_in_another_region(dir: &Path, socket: &Path) -> Child {
    let started = dir.join("fio-started");
    let _ = std::fs::remove_file(&started);
    rustix::fs::mknodat(rustix::fs::CWD, &started, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let child = tool("fio", "fio")
        .args(["--name=load", "--ioengine=nbd", "--rw=randrw", "--bs=4k", "--iodepth=16"])
        .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
        .arg(format!("--exec_prerun=echo > {}", started.display()))
        .args(["--offset=32M", "--size=24M", "--time_based", "--runtime=3600"])
        .current_dir(dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("fio starts");
    // Opening the pipe waits for the other end.
    std::fs::read(&started).expect("fio says that it has started");
    child
}

/// fio would run for an hour: it must have ended because its server was killed.
fn assert_died_with_server(mut fio: Child) {
    let status = fio.wait().expect("fio can be waited for");
    assert!(!status.success(), "fio ended before the server was killed");
}

/// splitmix64: small, seeded, good enough to choose blocks and moments.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }
}
