//! Clients of the real server that send whatever they like, beside one that does everything right:
//! the server never panics, keeps what the good client wrote, and stops in good order.
//!
//! `TIDEGATE_HOSTILE_REQUESTS` says how many requests are sent, 20,000 unless set. A failure prints
//! the seed; `TIDEGATE_SEED` runs it again with the same choices.
#![expect(clippy::big_endian_bytes, reason = "NBD's wire format is big-endian")]

#[path = "support/nbd.rs"]
mod nbd;
mod support;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;

use nbd::Client;
use support::random::Random;
use support::{Server, ok, scratch, setting, tidegate};

const BLOCK_BYTES: usize = 4096;
/// The good client's blocks begin the device. No sound request of the others goes there.
const GOOD_BLOCKS: usize = 2048;
const GOOD_BYTES: u64 = (GOOD_BLOCKS * BLOCK_BYTES) as u64;
const DEVICE_BYTES: u64 = 60 << 20;
/// Clients that send what they like, at a time.
const HOSTILE: u64 = 4;
/// Requests of one connection, at most.
const BURST: usize = 64;
/// The server's memory for requests.
const REQUEST_MEMORY_KIB: u64 = 64 << 10;
/// Bytes that are sent behind a request at most, whatever length it claims.
const DATA_BYTES: usize = 64 << 10;

/// Writes blocks and reads others back, until it is told to stop; returns how many.
fn behave(mut client: Client, mut random: Random, stop: &AtomicBool) -> u64 {
    let mut written = vec![0_u64; GOOD_BLOCKS];
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let [to, from] = [0, 0].map(|_: u8| random.below(GOOD_BLOCKS));
        count += 1;
        written[to] = count;
        let data = count.to_le_bytes().repeat(BLOCK_BYTES / 8);
        client.send_write(count, (to * BLOCK_BYTES) as u64, &data).unwrap();
        assert_eq!(client.receive().unwrap(), (count, 0));
        let found = client.read((from * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
        assert!(found == written[from].to_le_bytes().repeat(BLOCK_BYTES / 8), "block {from}");
    }
    count
}

/// A number that a program that counts bytes may get wrong.
fn extreme(random: &mut Random) -> u64 {
    let near = [GOOD_BYTES, DEVICE_BYTES, 1 << 31, 1 << 32, 1 << 63, u64::MAX];
    let near = near[random.below(near.len())];
    near.saturating_sub(4096).saturating_add(random.next() % 8193).max(GOOD_BYTES)
}

/// A request of any command, flags, offset and length, and some of its data.
fn request(random: &mut Random) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    let one_in = |random: &mut Random, count| random.below(count) == 0;
    if one_in(random, 50) {
        bytes[random.below(4)] ^= 1 << random.below(8);
    }
    let flags = if one_in(random, 4) { random.next() } else { 0 };
    let command = if one_in(random, 20) { random.next() } else { random.next() % 8 };
    let offset = if one_in(random, 2) {
        GOOD_BYTES + random.next() % (DEVICE_BYTES - GOOD_BYTES) / 4096 * 4096
    } else {
        extreme(random)
    };
    let len = match random.below(4) {
        0 => extreme(random),
        1 => random.next() % 100_000,
        _ => random.next() % 16 * 4096,
    };
    bytes.extend(&flags.to_be_bytes()[6..]);
    bytes.extend(&command.to_be_bytes()[6..]);
    bytes.extend(random.next().to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(&len.to_be_bytes()[4..]);
    if command & 0xffff == 1 {
        // Mostly as much as it says.
        let len = usize::try_from(len & 0xffff_ffff).unwrap().min(DATA_BYTES);
        let sent = if one_in(random, 8) { random.below(len + 1) } else { len };
        bytes.resize(bytes.len() + sent, 0xEE);
    }
    bytes
}

/// Anything, of up to `most` bytes.
fn garbage(random: &mut Random, most: usize) -> Vec<u8> {
    let len = random.below(most);
    std::iter::repeat_with(|| random.next().to_le_bytes()).flatten().take(len).collect()
}

/// One connection of a client that means harm. Returns how many requests it sent.
fn attack(socket: &Path, random: &mut Random) -> u64 {
    let (mut stream, mut count) = match random.below(8) {
        // Not even a handshake.
        0 => (UnixStream::connect(socket).unwrap(), 0),
        _ => match Client::connect(socket) {
            Ok(client) => (client.into_stream(), 1 + random.below(BURST)),
            // Refused at the limit of connections.
            Err(_) => return 0,
        },
    };
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut sent = 0;
    let send = |stream: &mut UnixStream, bytes: &[u8]| match stream.write_all(bytes) {
        // The server has closed it, or does not read it while its answers are not taken.
        Err(error) if error.kind() != ErrorKind::Interrupted => false,
        _ => true,
    };
    if count == 0 {
        send(&mut stream, &garbage(random, 4096));
        sent += 1;
    }
    let reads_answers = random.below(4) != 0;
    if reads_answers {
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    }
    let mut answers = vec![0; 1 << 20];
    while count > 0 && send(&mut stream, &request(random)) {
        (count, sent) = (count - 1, sent + 1);
        if reads_answers && stream.read(&mut answers).is_ok_and(|len| len == 0) {
            break;
        }
    }
    if random.below(2) == 0 {
        send(&mut stream, &garbage(random, 4096));
        sent += 1;
    }
    sent
}

fn peak_kib(server: &Server) -> u64 {
    let status = format!("/proc/{}/status", server.pid().as_raw_nonzero());
    let status = std::fs::read_to_string(status).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn withstand(engine: &str, more: &[&str]) {
    let dir = scratch();
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    let requests = setting("TIDEGATE_HOSTILE_REQUESTS", 20_000);
    let path = |name: &str| dir.path().join(name);
    let (pool, socket, stderr) = (path("pool"), path("socket"), path("stderr"));
    ok(["create", pool.to_str().unwrap(), "--engine", engine, "--size=64M"]);
    let backing = format!("--backing={}", path("backing").display());
    std::fs::File::create(path("backing")).unwrap().set_len(DEVICE_BYTES).unwrap();
    let mut command = tidegate();
    command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{}", socket.display())).args(more);
    command.args((engine != "btt").then_some(&backing));
    command.arg(format!("--request-memory={REQUEST_MEMORY_KIB}K"));
    let server = Server::spawn(command.stderr(std::fs::File::create(&stderr).unwrap()));
    let (sent, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let good = Client::connect(&socket).unwrap();
    let written = std::thread::scope(|scope| {
        let good = scope.spawn(|| behave(good, Random(seed), &stop));
        let attackers: Vec<_> = (1..=HOSTILE)
            .map(|number| {
                let (sent, socket) = (&sent, &socket);
                scope.spawn(move || {
                    let mut random = Random(seed ^ number << 32);
                    while sent.load(Ordering::Relaxed) < requests {
                        sent.fetch_add(attack(socket, &mut random), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for attacker in attackers {
            attacker.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        good.join().unwrap()
    });
    let peak_kib = peak_kib(&server);
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success(), "{status}");
    let said = std::fs::read_to_string(&stderr).unwrap();
    assert!(!said.contains("panicked"), "{said}");
    // Beside requests: the pool, which is mapped, and buffers of connections.
    assert!(peak_kib < REQUEST_MEMORY_KIB + (192 << 10), "{peak_kib} KiB");
    assert!(written > 0, "the good client was not served");
    ok(["check".as_ref(), pool.as_os_str()]);
    println!("abuse: {} hostile requests", sent.into_inner());
    println!("abuse: {written} writes of good clients beside hostile ones");
}

#[test]
fn a_btt_withstands_hostile_clients() {
    withstand("btt", &[]);
}

#[test]
fn a_dram_tier_withstands_hostile_clients() {
    withstand("btt", &["--dram=transit:4M"]);
}

#[test]
fn a_log_withstands_hostile_clients() {
    withstand("log", &[]);
}

#[test]
fn a_cache_withstands_hostile_clients() {
    withstand("cache", &[]);
}
