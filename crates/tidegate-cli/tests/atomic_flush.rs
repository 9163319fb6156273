//! A cache pool with `--atomic-flush` as a block device: kill -9 of the server leaves the export as
//! it was at a flush, and `serve` refuses what would break that.
//!
//! A client writes 64 random blocks, eight at once, and flushes, again and again, until the server
//! is killed at a chosen answer, or when a flush was sent. Or ext4 with a journal is the client, by
//! nbdfuse and a loop device, and a program that replaces files. `TIDEGATE_KILL_ROUNDS` times, 5
//! unless set, with the same pool. A failure prints the seed; `TIDEGATE_SEED` runs it again with
//! the same choices. In `power_cuts` the disk behind the cache loses its power, too, in every mode.

#[path = "support/behind.rs"]
mod behind;
#[path = "support/nbd.rs"]
mod nbd;
#[path = "atomic_flush/power_cuts.rs"]
mod power_cuts;
#[path = "atomic_flush/replaced_files.rs"]
mod replaced_files;
mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use behind::{Scene, kill, read, write};
use nbd::Client;
use replaced_files::{FILES, ReplacedFiles};
use support::file_system::FileSystem;
use support::random::Random;
use support::{ok, run, setting, succeed, tool};

const BLOCK_BYTES: usize = 4096;
/// More than the pool has slots, so that it is cleaned and evicted beside the groups.
const BLOCKS: usize = 3000;
const BLOCKS_A_FLUSH: usize = 64;
const DEPTH: usize = 8;
/// Groups of a round, unless the server is killed before.
const GROUPS: usize = 12;

#[test]
fn kill_9_leaves_all_or_nothing_of_what_a_flush_covers() {
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    let scene = Scene::new("cache");
    let mut random = Random(seed);
    let mut export = Export { flushed: vec![0; BLOCKS], flushing: None, sequence: 0 };
    for round in 0..setting("TIDEGATE_KILL_ROUNDS", 5) {
        let server = scene.serve("disk", &["--mode=wb", "--atomic-flush"]);
        let answers_a_group = BLOCKS_A_FLUSH + 1;
        // Every other time while a flush is under way.
        let kill_at = match random.below(2) {
            0 => random.below(GROUPS * answers_a_group),
            _ => random.below(GROUPS) * answers_a_group + BLOCKS_A_FLUSH,
        };
        export.write_until_killed(&mut scene.client(), server.pid(), kill_at, &mut random);
        server.wait_killed();
        ok(["check".as_ref(), scene.pool().as_os_str()]);
        let server = scene.serve("disk", &["--atomic-flush"]);
        let kept = export.verify(&mut scene.client());
        println!("round {round}: killed at answer {kill_at}; {kept}");
        if random.below(2) == 0 {
            kill(server);
        } else {
            assert!(server.stop(Signal::TERM).0.success());
        }
    }
}

/// What the export may hold after a kill: a sequence number of a write for each block.
struct Export {
    /// As at the last flush that was answered.
    flushed: Vec<u64>,
    /// As at the flush that was sent and not answered.
    flushing: Option<Vec<u64>>,
    sequence: u64,
}

impl Export {
    /// Writes groups and flushes them until the server is killed: after `kill_at` answers, or in
    /// place of the answer to a flush when the flush was sent.
    fn write_until_killed(
        &mut self,
        client: &mut Client,
        server: Pid,
        kill_at: usize,
        random: &mut Random,
    ) {
        let mut answers_left = kill_at;
        loop {
            let group = self.choose(random);
            let blocks: Vec<(usize, u64)> = group.iter().map(|(lba, it)| (*lba, *it)).collect();
            for part in blocks.chunks(DEPTH) {
                for (lba, sequence) in part {
                    let offset = (lba * BLOCK_BYTES) as u64;
                    client.send_write(0, offset, &stamped(*lba, *sequence)).unwrap();
                }
                for _ in part {
                    if answers_left == 0 {
                        kill_process(server, Signal::KILL).unwrap();
                        return;
                    }
                    answers_left -= 1;
                    assert_eq!(client.receive().unwrap(), (0, 0));
                }
            }
            let mut all = self.flushed.clone();
            for (lba, sequence) in &group {
                all[*lba] = *sequence;
            }
            client.send_flush(0).unwrap();
            if answers_left == 0 {
                // Some moment of the flush: before it is read, in the commit, or behind it.
                spin_for_a_moment(random);
                kill_process(server, Signal::KILL).unwrap();
                self.flushing = Some(all);
                return;
            }
            answers_left -= 1;
            assert_eq!(client.receive().unwrap(), (0, 0));
            self.flushed = all;
        }
    }

    /// Random blocks, with the sequence numbers of their writes.
    fn choose(&mut self, random: &mut Random) -> BTreeMap<usize, u64> {
        let mut group = BTreeMap::new();
        while group.len() < BLOCKS_A_FLUSH {
            self.sequence += 1;
            group.insert(random.below(BLOCKS), self.sequence);
        }
        group
    }

    /// Reads all blocks, which are as at the last flush, or at the one under way. From here on that
    /// is what they hold. Returns which of them it was, in words.
    fn verify(&mut self, client: &mut Client) -> &'static str {
        let found: Vec<u64> = (0..BLOCKS)
            .map(|lba| {
                let data = client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
                let sequence = u64::from_le_bytes(data[..8].try_into().unwrap());
                assert!(data == stamped(lba, sequence), "block {lba} is torn");
                sequence
            })
            .collect();
        if self.flushing.take().is_some_and(|flushing| flushing == found) {
            self.flushed = found;
            return "the flush under way is there";
        }
        let differs = |lba: &usize| found[*lba] != self.flushed[*lba];
        let differ: Vec<usize> = (0..BLOCKS).filter(differs).collect();
        assert!(differ.is_empty(), "blocks {differ:?} are of no flush, or were lost");
        "all is as at the last flush"
    }
}

/// Returns at some moment of the next three milliseconds.
fn spin_for_a_moment(random: &mut Random) {
    let moment = Instant::now() + Duration::from_micros(random.below(3000) as u64);
    while Instant::now() < moment {
        std::hint::spin_loop();
    }
}

/// The bytes of write `sequence` to block `lba`: zeroes for 0.
fn stamped(lba: usize, sequence: u64) -> Vec<u8> {
    let tag = if sequence == 0 { 0 } else { lba as u64 };
    let words = (0..BLOCK_BYTES / 8).map(|word| if word % 2 == 0 { sequence } else { tag });
    words.flat_map(u64::to_le_bytes).collect()
}

#[test]
fn ext4_is_clean_after_kill_9_and_has_what_was_synced() {
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    let (scene, mut random) = (Scene::new("cache"), Random(seed));
    let serve = || scene.serve("disk", &["--mode=wb", "--atomic-flush"]);
    let dir = scene.path("ext4");
    let uri = format!("nbd+unix:///?socket={}", scene.path("socket").display());
    let server = serve();
    let file_system = FileSystem::make(&dir, &uri);
    let features = succeed(tool("dumpe2fs", "e2fsprogs").arg("-h").arg(file_system.device()));
    assert!(features.contains("has_journal"), "{features}");
    drop(file_system);
    assert!(server.stop(Signal::TERM).0.success());
    let mut files = ReplacedFiles::new();
    for _ in 0..setting("TIDEGATE_KILL_ROUNDS", 5) {
        let server = serve();
        let mut file_system = FileSystem::mount(&dir, &uri, None);
        let program = files.replace_in(&file_system.mount_point);
        files.wait_for(&program, 1 + random.below(2 * FILES));
        spin_for_a_moment(&mut random);
        kill(server);
        file_system.break_off();
        files.collect(program);
        drop(file_system);
        ok(["check".as_ref(), scene.pool().as_os_str()]);

        let server = serve();
        let file_system = FileSystem::mount(&dir, &uri, None);
        files.assert_in(&file_system.mount_point);
        // The mount has replayed the journal.
        let device = file_system.unmount();
        succeed(tool("e2fsck", "e2fsprogs").arg("-fn").arg(device));
        drop(file_system);
        assert!(server.stop(Signal::TERM).0.success());
    }
}

#[test]
fn atomic_flush_is_shown_and_ends_with_the_server() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &["--atomic-flush"]);
    let mut client = scene.client();
    (0..10).for_each(|lba| write(&mut client, lba, 7));
    let stat = || {
        let output = run(["stat".as_ref(), scene.pool().as_os_str()]);
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let text = stat();
    assert!(text.contains("0 groups committed, 0 of them early; 40K uncommitted"), "{text}");
    client.send_flush(0).unwrap();
    assert_eq!(client.receive().unwrap(), (0, 0));
    write(&mut client, 0, 8);
    let text = stat();
    assert!(text.contains("1 groups committed, 0 of them early; 4K uncommitted"), "{text}");
    kill(server);
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("10 dirty") || banner.contains("10 of them dirty"), "{banner}");
    assert!(banner.contains("1 not flushed"), "{banner}");
    assert_eq!(read(&mut scene.client(), 0), 7);
    assert!(server.stop(Signal::TERM).0.success());
    let server = scene.serve("disk", &["--atomic-flush"]);
    write(&mut scene.client(), 0, 9);
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!(scene.in_file("disk", 0), 9, "a server that is stopped is no crash");
}

#[test]
fn what_would_break_atomic_flush_is_refused() {
    let scene = Scene::new("cache");
    let disk = scene.backing("disk");
    let error = scene.refusal(&[&disk, "--atomic-flush", "--dram=transit:1M"]);
    assert!(error.contains("--dram") && error.lines().count() == 1, "{error}");
    let error = scene.refusal(&[&disk, "--atomic-flush", "--mode=wt"]);
    assert!(error.contains("wb or wo"), "{error}");
    let server = scene.serve("disk", &["--mode=wt"]);
    assert!(server.stop(Signal::TERM).0.success());
    let error = scene.refusal(&[&disk, "--atomic-flush"]);
    assert!(error.contains("found wt") || error.contains("has wt"), "{error}");
    let log = Scene::new("log");
    let error = log.refusal(&[&log.backing("disk"), "--atomic-flush"]);
    assert!(error.contains("needs a cache pool"), "{error}");
}
