//! kill -9 of the server under load: every acknowledged write is there afterwards, and no block is
//! torn. With a DRAM tier, every write is there that was acknowledged before a flush began which
//! was acknowledged too.
//!
//! Two connections of our own keep eight writes in flight each, while fio loads another part of the
//! device. The server is killed by the thread that receives a chosen acknowledgement, so always in
//! the middle of writes. Rounds go on with the same pool: `TIDEGATE_KILL_ROUNDS` of them, 3 unless
//! set. A failure prints the seed; `TIDEGATE_SEED` runs it again with the same choices.

#[path = "support/nbd.rs"]
mod nbd;
mod support;

use std::ops::Range;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Pid, Signal, kill_process};

use nbd::Client;
use support::random::Random;
use support::{Server, ok, scratch, setting, tool};

/// Bytes of a block unless a pool is made with others.
const BLOCK_BYTES: usize = 4096;
const CONNECTIONS: usize = 2;
const DEPTH: usize = 8;
/// Blocks that one slot of one connection writes, and nobody else: so each has at most one write in
/// flight. Many, so that the last write of most blocks is not long ago.
const BLOCKS_A_SLOT: usize = 512;
const BLOCKS_A_CONNECTION: usize = DEPTH * BLOCKS_A_SLOT;
/// Most blocks of one request.
const BLOCKS_A_WRITE: usize = 4;

/// Cookie of flushes: no slot has it.
const FLUSH: u64 = DEPTH as u64;
/// Acknowledged writes of a connection after which it sends a flush, while others go on.
const WRITES_A_FLUSH: usize = 100;
/// More than the writes of a round: what a kill undid never gets its number back.
const SEQUENCES_A_ROUND: u64 = 1 << 20;

#[test]
fn acknowledged_writes_survive_kill_9() {
    kill_again_and_again("none");
}

/// Caches of an eighth of the blocks in use: they overrun.
#[test]
fn flushed_writes_survive_kill_9_of_transit() {
    kill_again_and_again("transit:4M");
}

#[test]
fn flushed_writes_survive_kill_9_of_transit_no_eager() {
    kill_again_and_again("transit-no-eager:16M");
}

#[test]
fn flushed_writes_survive_kill_9_of_lru() {
    kill_again_and_again("lru:4M");
}

/// A log of an eighth of what is written, on a backing: it is cleaned all the while.
#[test]
fn acknowledged_writes_survive_kill_9_of_a_log() {
    kill_log("4M", "none");
}

/// A log that holds all that is written: recovery finds it there.
#[test]
fn acknowledged_writes_survive_kill_9_of_a_log_that_is_never_full() {
    kill_log("512M", "none");
}

/// A tier is a layer over any device: here over a log before a slower disk.
#[test]
fn flushed_writes_survive_kill_9_of_transit_over_a_log() {
    kill_log("4M", "transit:4M");
}

/// A cache of an eighth of what is written: it is cleaned and evicted all the while.
#[test]
fn acknowledged_writes_survive_kill_9_of_a_cache() {
    kill_before_backing(&Made::new("cache", "4M"), "none", &["--mode=wb"]);
}

/// Blocks smaller than a page: records, which share slots, in a cache that is too small for them.
#[test]
fn acknowledged_writes_survive_kill_9_of_a_cache_of_records() {
    let made = Made { block_bytes: 512, ..Made::new("cache", "2M") };
    kill_before_backing(&made, "none", &["--mode=wb"]);
}

/// A cache that holds all that is written, in the mode that keeps nothing of what it reads.
#[test]
fn acknowledged_writes_survive_kill_9_of_a_cache_for_writes() {
    kill_before_backing(&Made::new("cache", "128M"), "none", &["--mode=wo"]);
}

fn kill_log(size: &'static str, dram: &str) {
    kill_before_backing(&Made::new("log", size), dram, &[]);
}

fn kill_before_backing(made: &Made, dram: &str, more: &[&str]) {
    let dir = scratch();
    let backing = dir.path().join("backing");
    std::fs::File::create_new(&backing).unwrap().set_len(64 << 20).unwrap();
    let backing = format!("--backing={}", backing.display());
    let args = [&[backing.as_str()], more].concat();
    kill_in(dir.path(), made, dram, &args);
}

/// What a tier holds when SIGTERM arrives is in the pool when the server has ended.
#[test]
fn writes_survive_sigterm_without_a_flush() {
    let dir = scratch();
    let (pool, socket) = (dir.path().join("pool"), dir.path().join("socket"));
    ok(["create".as_ref(), pool.as_os_str(), "--engine=btt".as_ref(), "--size=64M".as_ref()]);
    let server = Server::start(&pool, &socket, &["--dram=transit-no-eager:8M"]);
    let banner = server.banner.join("\n");
    assert!(
        banner.contains("dram tier") && banner.contains("bytes of metadata a slot"),
        "{banner}"
    );
    let mut client = Client::connect(&socket).expect("the server is ready");
    for lba in 0..100 {
        client.send_write(0, (lba * BLOCK_BYTES) as u64, &stamped(lba, 1, BLOCK_BYTES)).unwrap();
        assert_eq!(client.receive().unwrap(), (0, 0));
    }
    let (status, summary) = server.stop(Signal::TERM);
    assert!(status.success(), "{status}");
    assert!(summary.contains("cache write"), "{summary}");
    let server = Server::start(&pool, &socket, &[]);
    let mut client = Client::connect(&socket).expect("the server is ready");
    for lba in 0..100 {
        let found = client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
        assert!(found == stamped(lba, 1, BLOCK_BYTES), "block {lba} was lost");
    }
    assert!(server.stop(Signal::TERM).0.success());
}

/// How the pool is made.
struct Made {
    engine: &'static str,
    size: &'static str,
    block_bytes: usize,
}

impl Made {
    fn new(engine: &'static str, size: &'static str) -> Self {
        Self { engine, size, block_bytes: BLOCK_BYTES }
    }
}

fn kill_again_and_again(dram: &str) {
    let dir = scratch();
    kill_in(dir.path(), &Made::new("btt", "64M"), dram, &[]);
}

fn kill_in(dir: &Path, made: &Made, dram: &str, more: &[&str]) {
    let dram_arg = format!("--dram={dram}");
    let volatile = dram != "none";
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    let (pool, socket) = (dir.join("pool"), dir.join("socket"));
    let Made { engine, size, block_bytes } = *made;
    let block_size = format!("--block-size={block_bytes}");
    // The log has blocks of one size, and no option for them.
    let blocks = (block_bytes != BLOCK_BYTES).then_some(block_size.as_str());
    let made = ["create", pool.to_str().unwrap(), "--engine", engine, "--size", size];
    ok(made.into_iter().chain(blocks));
    let mode = Mode { volatile, block_bytes };
    let mut random = Random(seed);
    let mut model = vec![Block::default(); CONNECTIONS * BLOCKS_A_CONNECTION];
    let least = if engine == "cache" { 5 } else { 3 };
    let (rounds, mut acknowledged) = (setting("TIDEGATE_KILL_ROUNDS", least), 0);
    for round in 0..rounds {
        // Every other round the device is slow, so that requests run in parallel on the server's
        // workers.
        let delay = if round % 2 == 1 { "--delay-us=100" } else { "--delay-us=0" };
        let args = [&[&dram_arg, delay], more].concat();
        let server = Server::start(&pool, &socket, &args);
        let fio = fio_in_another_region(dir, &socket);
        let kill_at = 200 + random.below(4000);
        acknowledged +=
            load_and_kill(&socket, server.pid(), kill_at, mode, &mut model, &mut random);
        server.wait_killed();
        assert_died_with_server(fio);
        ok(["check".as_ref(), pool.as_os_str()]);
        let server = Server::start(&pool, &socket, more);
        let (kept, older) = verify(&socket, block_bytes, &mut model);
        println!(
            "{engine}, {dram}, round {round}: killed at acknowledgement {kill_at}; {kept} blocks as acknowledged, {older} otherwise"
        );
        let (status, _) = server.stop(Signal::TERM);
        assert!(status.success(), "{status}");
    }
    println!("abuse: {rounds} kills");
    println!("abuse: {acknowledged} acknowledged writes before kills");
}

/// What a block of the device may hold: any write from the durable one on.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// Sequence number of the last write that must survive; 0: none, the block is zero.
    durable: u64,
    /// The one that was acknowledged last when the flush in flight was sent.
    flushing: u64,
    /// Sequence number of the last acknowledged write.
    acknowledged: u64,
    /// Sequence number of the write in flight when the server died, if any.
    in_flight: Option<u64>,
}

/// How the device is written.
#[derive(Debug, Clone, Copy)]
struct Mode {
    /// Acknowledged writes are durable only with the next flush.
    volatile: bool,
    block_bytes: usize,
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
    mode: Mode,
    acknowledged_since_flush: usize,
}

/// Returns how many writes were acknowledged.
fn load_and_kill(
    socket: &Path,
    server: Pid,
    kill_at: usize,
    mode: Mode,
    model: &mut [Block],
    random: &mut Random,
) -> usize {
    let count = AtomicUsize::new(0);
    let acknowledged = || {
        if count.fetch_add(1, Ordering::Relaxed) + 1 == kill_at {
            kill_process(server, Signal::KILL).expect("the server is alive");
        }
    };
    // All of them before the first may have written so much that the server is killed.
    let connections = model.len().div_ceil(BLOCKS_A_CONNECTION);
    let connect = |_| Client::connect(socket).expect("the server is ready");
    let clients: Vec<_> = (0..connections).map(connect).collect();
    std::thread::scope(|scope| {
        for ((number, blocks), client) in
            model.chunks_mut(BLOCKS_A_CONNECTION).enumerate().zip(clients)
        {
            let mut writer = Writer {
                client,
                first_lba: number * BLOCKS_A_CONNECTION,
                sequence: first_sequence(blocks),
                blocks,
                slots: Default::default(),
                random: Random(random.next()),
                mode,
                acknowledged_since_flush: 0,
            };
            scope.spawn(move || writer.run(acknowledged));
        }
    });
    let count = count.into_inner();
    assert!(count >= kill_at, "a connection broke before the server was killed");
    count
}

/// A number above all that earlier rounds gave out.
fn first_sequence(blocks: &[Block]) -> u64 {
    let last = blocks.iter().map(|block| block.acknowledged).max().unwrap_or(0);
    (last / SEQUENCES_A_ROUND + 1) * SEQUENCES_A_ROUND
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
            assert_eq!(error, 0, "the server refused a write or a flush");
            if cookie == FLUSH {
                self.blocks.iter_mut().for_each(|block| block.durable = block.flushing);
                self.acknowledged_since_flush = 0;
                continue;
            }
            let slot = usize::try_from(cookie).expect("the cookie is one of ours");
            self.note(slot);
            acknowledged();
            if self.issue(slot).and_then(|()| self.maybe_flush()).is_err() {
                return;
            }
        }
    }

    /// The write of `slot` was acknowledged.
    fn note(&mut self, slot: usize) {
        for block in &mut self.blocks[self.slots[slot].clone()] {
            block.acknowledged = block.in_flight.take().expect("the block was in flight");
            if !self.mode.volatile {
                block.durable = block.acknowledged;
            }
        }
    }

    /// Sends a flush, one at a time, where a cache needs it: it covers what is acknowledged by now.
    fn maybe_flush(&mut self) -> std::io::Result<()> {
        self.acknowledged_since_flush += 1;
        if !self.mode.volatile || self.acknowledged_since_flush != WRITES_A_FLUSH {
            return Ok(());
        }
        self.blocks.iter_mut().for_each(|block| block.flushing = block.acknowledged);
        self.client.send_flush(FLUSH)
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
        let block_bytes = self.mode.block_bytes;
        let stamp = |lba| stamped(lba, sequence, block_bytes);
        let data: Vec<u8> = (lba..lba + count).flat_map(stamp).collect();
        self.client.send_write(slot as u64, (lba * block_bytes) as u64, &data)
    }
}

/// Reads every block back: it must hold, whole, the durable write or one that came later. From here
/// on the model holds what was found. Returns how many blocks held the last acknowledged write and
/// how many another one.
fn verify(socket: &Path, block_bytes: usize, model: &mut [Block]) -> (usize, usize) {
    let mut client = Client::connect(socket).expect("the server is ready");
    let (mut kept, mut others) = (0, 0);
    for (lba, block) in model.iter_mut().enumerate() {
        let data =
            client.read((lba * block_bytes) as u64, block_bytes).expect("the server is there");
        let found = sequence_of(&data);
        let last = block.in_flight.unwrap_or(block.acknowledged);
        assert!(
            data == stamped(lba, found, block_bytes) && (block.durable..=last).contains(&found),
            "block {lba} is lost or torn: it should hold {block:?}, but starts with sequence {found}"
        );
        *if found == block.acknowledged { &mut kept } else { &mut others } += 1;
        *block = Block { durable: found, flushing: found, acknowledged: found, in_flight: None };
    }
    (kept, others)
}

/// The bytes of write number `sequence` to block `lba`: both numbers, a body that depends on both,
/// and a checksum. Zeroes for number 0, a block never written.
fn stamped(lba: usize, sequence: u64, block_bytes: usize) -> Vec<u8> {
    if sequence == 0 {
        return vec![0; block_bytes];
    }
    let lba = lba as u64;
    let mut body = Random(lba << 32 ^ sequence);
    let mut words = vec![lba, sequence];
    words.extend((words.len()..block_bytes / 8 - 1).map(|_| body.next()));
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
