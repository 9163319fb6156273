//! Tests of the threaded runtime for staging only; `dram::suite` has the tests of all policies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::super::phases::Phase;
use super::super::suite::{BLOCK_BYTES, SLOTS, TestDevice, read, start_read, tier_of, write};
use super::super::{DramTier, Make, Policy};
use super::cache::Activity;
use super::coactive::Coactive;
use super::lru::Lru;
use super::pmbd::Pmbd;
use super::pmbd70::Pmbd70;
use super::replacement::Replacement;
use super::runtime::Staging;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{BlockDeviceExt, DeviceErrorKind, ZeroFlags};
use crate::tier::Tier;

const POLICIES: [Policy; 4] = [Policy::Pmbd, Policy::Pmbd70, Policy::Lru, Policy::Coactive];
/// Blocks of the test device.
const BLOCKS: u64 = 64;

fn staging<R: Replacement>(policy: Policy, device: &Arc<TestDevice>) -> Staging<R> {
    Staging::open(policy, SLOTS * BLOCK_BYTES as u64, device.clone()).unwrap()
}

/// Returns the lbas of the test device in set `number`.
fn lbas_of<R: Replacement>(tier: &Staging<R>, number: usize) -> Vec<u64> {
    (0..BLOCKS).filter(|&lba| tier.core.set_of(lba) == number).collect()
}

#[test]
fn metadata_is_less_than_in_the_paper() {
    for (policy, papers_bytes) in POLICIES.into_iter().zip([84.0, 84.0, 84.0, 102.0]) {
        for blocks in [16_384_u64, 16_385, 131_072] {
            let below = Arc::new(MemoryDevice::new(512, 64).unwrap());
            let tier = super::super::open(policy, blocks * 512, below).unwrap();
            let bytes = tier.summary().metadata_bytes_per_slot;
            assert!((40.0..=64.0).contains(&bytes) && bytes < papers_bytes, "{policy}: {bytes}");
        }
    }
}

#[test]
fn tiers_open_by_their_policy() {
    for policy in POLICIES {
        let summary = tier_of(policy)(TestDevice::new(1)).summary();
        let (sets, threads) = match policy {
            Policy::Pmbd => (6, 0),
            Policy::Pmbd70 => (6, summary.threads.clamp(1, 6)),
            Policy::Lru => (1, 0),
            _ => (1, 1),
        };
        assert_eq!((summary.policy, summary.slots), (policy, SLOTS));
        assert_eq!((summary.sets, summary.threads), (sets, threads), "{policy}");
    }
    let none = super::maker(Policy::Transit).err().unwrap();
    assert_eq!(none.kind(), DeviceErrorKind::Unsupported);
}

#[test]
fn pmbd_stalls_a_full_sub_buffer_and_no_other() {
    let device = TestDevice::new(1);
    let tier = staging::<Pmbd>(Policy::Pmbd, &device);
    let (mine, others) = (lbas_of(&tier, 0), lbas_of(&tier, 1));
    mine[..4].iter().for_each(|&lba| write(&tier, lba, 1, false).unwrap());
    assert_eq!(device.writes(), 0);
    device.hold([mine[0]]);
    std::thread::scope(|scope| {
        let stalled = scope.spawn(|| write(&tier, mine[4], 2, false).unwrap());
        device.await_held(mine[0]);
        others[..4].iter().for_each(|&lba| write(&tier, lba, 3, false).unwrap());
        assert_eq!((read(&tier, mine[0]), read(&tier, mine[3])), (1, 1));
        write(&tier, mine[3], 4, false).unwrap();
        device.hold([]);
        stalled.join().unwrap();
    });
    assert_eq!(device.writes(), 4, "all of the sub-buffer and nothing else");
    assert_eq!(tier.summary().dirty_slots, 5);
    assert_eq!(tier.phases().count(Phase::StalledWrite), 1);
}

#[test]
fn pmbd70_drains_at_its_watermark_without_being_asked() {
    let device = TestDevice::new(1);
    let tier = staging::<Pmbd70>(Policy::Pmbd70, &device);
    let mine = lbas_of(&tier, 0);
    device.hold([mine[0]]);
    mine[..2].iter().for_each(|&lba| write(&tier, lba, 1, false).unwrap());
    assert_eq!(device.writes(), 0, "half of it is used");
    write(&tier, mine[2], 1, false).unwrap();
    device.await_held(mine[0]);
    write(&tier, mine[3], 1, false).unwrap();
    assert_eq!(tier.phases().count(Phase::StalledWrite), 0);
    device.hold([]);
    tier.flush().unwrap();
    assert!(mine[..4].iter().all(|&lba| device.durable(lba) == 1));
}

#[test]
fn lru_writes_the_block_back_that_was_used_longest_ago() {
    let device = TestDevice::new(1);
    let tier = staging::<Lru>(Policy::Lru, &device);
    (0..SLOTS).for_each(|lba| write(&tier, lba, 1, false).unwrap());
    assert_eq!(read(&tier, 0), 1);
    device.hold([1]);
    std::thread::scope(|scope| {
        let stalled = scope.spawn(|| write(&tier, SLOTS, 2, false).unwrap());
        device.await_held(1);
        // No lock is held meanwhile: another write evicts another block.
        write(&tier, SLOTS + 1, 3, false).unwrap();
        write(&tier, 0, 4, false).unwrap();
        assert_eq!(read(&tier, 1), 1);
        device.hold([]);
        stalled.join().unwrap();
    });
    assert_eq!((device.writes(), tier.phases().count(Phase::StalledWrite)), (2, 2));
}

#[test]
fn clean_copies_serve_reads_and_go_without_a_write() {
    for policy in [Policy::Lru, Policy::Coactive] {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        (0..SLOTS).for_each(|lba| write(&*tier, lba, 1, false).unwrap());
        tier.drain().unwrap();
        assert_eq!((device.writes(), tier.summary().dirty_slots), (SLOTS, 0), "{policy}");
        (0..SLOTS).for_each(|lba| assert_eq!(read(&*tier, lba), 1));
        assert_eq!(tier.phases().count(Phase::ReadHit), SLOTS);
        (SLOTS..2 * SLOTS).for_each(|lba| write(&*tier, lba, 2, false).unwrap());
        assert_eq!((device.writes(), tier.phases().count(Phase::StalledWrite)), (SLOTS, 0));
        assert_eq!((read(&*tier, 0), tier.phases().count(Phase::ReadMiss)), (1, 1));
        assert_eq!(
            (read(&*tier, 0), tier.phases().count(Phase::ReadMiss)),
            (1, 2),
            "reads do not fill"
        );
    }
}

#[test]
fn coactive_cleans_cold_blocks_when_the_device_is_idle() {
    let device = TestDevice::new(1);
    let tier = staging::<Coactive>(Policy::Coactive, &device);
    device.hold([5]);
    write(&tier, 5, 1, false).unwrap();
    device.await_held(5);
    // The tier goes on meanwhile.
    write(&tier, 6, 1, false).unwrap();
    assert_eq!(read(&tier, 5), 1);
    device.hold([]);
    tier.drain().unwrap();
    assert_eq!((device.durable(5), device.writes()), (1, 2));
}

/// A read in flight, or ended since the last look, keeps the device below from being idle.
#[test]
fn started_reads_are_activity_until_they_end() {
    let memory = MemoryDevice::new(512, BLOCKS).unwrap();
    let device = Arc::new(Fault::new(Arc::new(memory), 1));
    let bytes = SLOTS * BLOCK_BYTES as u64;
    let tier = Staging::<Coactive>::open(Policy::Coactive, bytes, device.clone()).unwrap();
    let tier = Arc::new(tier);
    device.add(Rule::new(&[], When::Always, Effect::Hang));
    let read = start_read(&tier, 0, 1);
    device.wait_until_hung(1);
    assert_eq!(tier.core.below.activity(), Activity { begun: 1, ended: 0 });
    device.heal();
    device.release();
    assert!(read.recv().unwrap().is_ok());
    assert_eq!(tier.core.below.activity(), Activity { begun: 1, ended: 1 });
}

#[test]
fn a_write_of_a_block_on_its_way_down_goes_after_it() {
    for policy in POLICIES {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        // Before a worker may find it.
        device.hold([5]);
        write(&*tier, 5, 1, false).unwrap();
        std::thread::scope(|scope| {
            let flush = scope.spawn(|| tier.flush().unwrap());
            device.await_held(5);
            let second = scope.spawn(|| write(&*tier, 5, 2, false).unwrap());
            assert_eq!(read(&*tier, 5), 1, "{policy}: not before the first is below");
            device.hold([]);
            flush.join().unwrap();
            second.join().unwrap();
        });
        assert_eq!(read(&*tier, 5), 2);
        tier.flush().unwrap();
        assert_eq!(device.durable(5), 2, "{policy}");
    }
}

#[test]
fn a_flush_does_not_wait_for_later_writes() {
    flush_then_write::<Pmbd>(Policy::Pmbd);
    flush_then_write::<Pmbd70>(Policy::Pmbd70);
    flush_then_write::<Lru>(Policy::Lru);
    flush_then_write::<Coactive>(Policy::Coactive);
}

fn flush_then_write<R: Replacement>(policy: Policy) {
    let device = TestDevice::new(1);
    let tier = staging::<R>(policy, &device);
    device.hold([1, 5]);
    write(&tier, 1, 1, false).unwrap();
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| tier.flush().unwrap());
        // A worker may hold block 1 before the flush begins: the flush has begun with its epoch.
        while tier.core.epoch.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        device.await_held(1);
        write(&tier, 5, 2, false).unwrap();
        device.hold([5]);
        flush.join().unwrap();
        assert_eq!((device.durable(1), device.durable(5)), (1, 0), "{policy}");
        device.hold([]);
    });
}

#[test]
fn a_failed_eviction_is_reported_by_the_next_flush_though_a_retry_succeeds() {
    for policy in POLICIES {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        // Without workers, so that none is at block 0 now.
        tier.drain().unwrap();
        device.fail([0]);
        (0..BLOCKS).for_each(|lba| write(&*tier, lba, 1, false).unwrap());
        assert_eq!((read(&*tier, 0), tier.summary().failed_slots), (1, 1), "{policy}");
        device.fail([]);
        assert_eq!(tier.flush().unwrap_err().kind(), DeviceErrorKind::NoSpace, "{policy}");
        assert_eq!((device.durable(0), tier.summary().failed_slots), (1, 0));
        tier.flush().unwrap();
    }
}

#[test]
fn a_fua_write_is_durable_and_reports_earlier_failures() {
    for policy in POLICIES {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        device.fail([0]);
        write(&*tier, 0, 1, false).unwrap();
        assert_eq!(write(&*tier, 0, 2, true).unwrap_err().kind(), DeviceErrorKind::NoSpace);
        assert_eq!((read(&*tier, 0), device.durable(0)), (2, 0), "{policy}");
        write(&*tier, 9, 3, true).unwrap();
        assert_eq!(device.durable(9), 3);
        assert!(tier.flush().is_err(), "{policy}: block 0 is still not below");
        assert_eq!(write(&*tier, 0, 4, true).unwrap_err().kind(), DeviceErrorKind::NoSpace);
        device.fail([]);
        write(&*tier, 0, 5, true).unwrap();
        assert_eq!(device.durable(0), 5);
        tier.flush().unwrap();
    }
}

#[test]
fn a_full_cache_that_cannot_be_written_back_fails_writes_and_loses_nothing() {
    for policy in POLICIES {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        device.fail(0..BLOCKS);
        let taken: Vec<bool> =
            (0..BLOCKS).map(|lba| write(&*tier, lba, lba + 1, false).is_ok()).collect();
        assert_eq!(taken.iter().filter(|&&ok| ok).count() as u64, SLOTS, "{policy}");
        assert!(tier.flush().is_err());
        // A block that is cached can still be written.
        write(&*tier, 0, 1, false).unwrap();
        device.fail([]);
        write(&*tier, BLOCKS - 1, BLOCKS, false).unwrap();
        let _ = tier.flush();
        tier.flush().unwrap();
        for (lba, taken) in (0..BLOCKS - 1).zip(taken) {
            let expected = if taken { lba + 1 } else { 0 };
            assert_eq!(device.durable(lba), expected, "{policy}: block {lba}");
        }
    }
}

#[test]
fn neighbours_go_down_in_one_write_and_a_bad_block_among_them_fails_alone() {
    for policy in [Policy::Pmbd, Policy::Lru] {
        let device = TestDevice::new(4);
        let tier = tier_of(policy)(device.clone());
        for lba in [7, 4, 6, 5] {
            write(&*tier, lba, lba, false).unwrap();
        }
        tier.flush().unwrap();
        assert_eq!(device.writes(), 1, "{policy}");
        for lba in [5, 4, 6] {
            write(&*tier, lba, lba + 10, false).unwrap();
        }
        device.fail([6]);
        assert!(tier.flush().is_err());
        assert_eq!([4, 5, 6, 7].map(|lba| device.durable(lba)), [14, 15, 6, 7], "{policy}");
        assert_eq!(tier.summary().failed_slots, 1);
    }
}

#[test]
fn zeroes_forget_copies_and_keep_what_could_not_be_written_back() {
    for policy in POLICIES {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        // Without workers, so that none writes block 6 before the write can fail.
        tier.drain().unwrap();
        (3..7).for_each(|lba| write(&*tier, lba, 1, false).unwrap());
        let bytes = BLOCK_BYTES as u64;
        tier.write_zeroes(4 * bytes, 2 * bytes, ZeroFlags::default()).unwrap();
        assert_eq!([3, 4, 5, 6].map(|lba| read(&*tier, lba)), [1, 0, 0, 1], "{policy}");
        device.fail([6]);
        assert!(tier.discard(0, BLOCKS * bytes).is_err());
        assert_eq!((read(&*tier, 6), read(&*tier, 4)), (1, 0), "{policy}");
        device.fail([]);
        tier.discard(0, BLOCKS * bytes).unwrap();
        assert_eq!(read(&*tier, 6), 0);
        write(&*tier, 6, 2, false).unwrap();
        assert_eq!(tier.status(0, BLOCKS * bytes, 9).unwrap().len(), 1);
        assert_eq!((read(&*tier, 6), tier.summary().dirty_slots), (2, 0));
    }
}

/// Writes and zeroes the same blocks by several threads: the cache then equals the device below.
#[test]
fn copies_agree_with_the_device_after_writes_and_zeroes_of_the_same_blocks() {
    const ROUNDS: u64 = 1500;
    for policy in POLICIES {
        let device = TestDevice::new(2);
        let tier = tier_of(policy)(device.clone());
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let tier = &*tier;
                scope.spawn(move || {
                    (1..ROUNDS)
                        .for_each(|n| write(tier, n % 3, n * 2 + writer, n % 64 == 0).unwrap());
                });
            }
            scope.spawn(|| {
                for lba in 0..ROUNDS {
                    let zeroed = (lba % 3 * BLOCK_BYTES as u64, BLOCK_BYTES as u64);
                    tier.write_zeroes(zeroed.0, zeroed.1, ZeroFlags::default()).unwrap();
                }
            });
            scope.spawn(|| (0..ROUNDS / 4).for_each(|_| tier.flush().unwrap()));
        });
        let seen = [0, 1, 2].map(|lba| read(&*tier, lba));
        tier.flush().unwrap();
        assert_eq!([0, 1, 2].map(|lba| device.durable(lba)), seen, "{policy}");
    }
}

/// P3 and P4 while the device below stalls on one block after another.
#[test]
fn order_holds_while_the_device_below_stalls() {
    const STAMPS: u64 = 1500;
    for policy in POLICIES {
        let device = TestDevice::new(1);
        let tier = tier_of(policy)(device.clone());
        let acknowledged: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers = [0, 1].map(|writer| {
                let (tier, acknowledged) = (&*tier, &acknowledged);
                scope.spawn(move || {
                    for stamp in 1..=STAMPS {
                        let lba = stamp * stamp % 31 * 2 + writer;
                        write(tier, lba, stamp, false).unwrap();
                        acknowledged[usize::try_from(lba).unwrap()].store(stamp, Ordering::Release);
                        let mine = (stamp * 7 % 31) * 2 + writer;
                        let least =
                            acknowledged[usize::try_from(mine).unwrap()].load(Ordering::Acquire);
                        assert_eq!(read(tier, mine), least, "{policy}: block {mine}");
                    }
                })
            });
            scope.spawn(|| {
                for lba in (0..BLOCKS).cycle().take_while(|_| !is_over.load(Ordering::Acquire)) {
                    device.hold([lba]);
                    std::thread::yield_now();
                    device.hold([]);
                }
            });
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    let before: Vec<u64> =
                        acknowledged.iter().map(|stamp| stamp.load(Ordering::Acquire)).collect();
                    tier.flush().unwrap();
                    for (lba, before) in (0..).zip(before) {
                        assert!(device.durable(lba) >= before, "{policy}: block {lba}");
                    }
                }
            });
            let ended = writers.map(std::thread::ScopedJoinHandle::join);
            is_over.store(true, Ordering::Release);
            for writer in ended {
                writer.unwrap();
            }
        });
        tier.drain().unwrap();
        for (lba, stamp) in (0..).zip(&acknowledged) {
            assert_eq!(device.durable(lba), stamp.load(Ordering::Acquire), "{policy}");
        }
    }
}
