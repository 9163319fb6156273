//! Tests of the threaded runtime for transit only; `dram::suite` has the tests of all policies.

use std::sync::Arc;

use super::super::suite::{BLOCK_BYTES, SLOTS, TestDevice, read, tier_of, write};
use super::write_mode::WriteMode;
use super::*;
use crate::device::DeviceErrorKind;
use crate::tier::background::Step;
use crate::tier::clock::now_ns;

fn transit(policy: Policy, device: &Arc<TestDevice>, evictors: u32) -> Transit {
    let bytes = SLOTS * BLOCK_BYTES as u64;
    Transit::start(policy, bytes, device.clone(), evictors, None).unwrap()
}

#[test]
fn a_slot_costs_at_most_64_bytes_of_metadata() {
    // The number of buckets is a power of two, so the worst case is just below and just above one.
    for slots in [1_u64, 15, 16, 1000, 16_383, 16_384, 16_385] {
        let below = TestDevice::new(1);
        let bytes = slots * BLOCK_BYTES as u64;
        let slots_of_it = Slots::reserve(bytes, below.geometry().block_bytes).unwrap();
        let core = Core::new(Policy::Transit, slots_of_it, below, 0, None);
        let bytes = core.metadata_bytes_per_slot();
        // The sets' own size matters only with few slots.
        let sets = f64::from(u32::try_from(core.sets.bytes()).unwrap());
        let bytes_of_slots = bytes - sets / f64::from(core.slots.count());
        assert!(bytes_of_slots <= MOST_METADATA_BYTES, "{slots} slots: {bytes_of_slots}");
        assert!(slots < 16_383 || bytes <= MOST_METADATA_BYTES, "{slots} slots: {bytes}");
    }
}

#[test]
fn evictors_write_back_without_being_asked() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 1);
    device.hold([5]);
    write(&tier, 5, 1, false).unwrap();
    device.await_held(5);
    device.hold([]);
}

#[test]
fn without_eager_eviction_nothing_goes_below_before_a_flush() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::TransitNoEager, &device, 0);
    for lba in 0..SLOTS {
        write(&tier, lba, 1, false).unwrap();
    }
    assert_eq!((device.writes(), tier.summary().dirty_slots), (0, SLOTS));
    // The cache is full: the next block bypasses it, and a hit does not.
    write(&tier, SLOTS, 2, false).unwrap();
    write(&tier, 0, 3, false).unwrap();
    assert_eq!((device.writes(), read(&tier, SLOTS), read(&tier, 0)), (1, 2, 3));
    assert_eq!(tier.phases().count(Phase::Bypass), 1);
    tier.flush().unwrap();
    assert_eq!((device.durable(0), tier.summary().dirty_slots), (3, 0));
}

#[test]
fn a_write_beside_an_eviction_does_not_wait_for_it() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 1);
    device.hold([5]);
    write(&tier, 5, 1, false).unwrap();
    device.await_held(5);
    write(&tier, 5, 2, false).unwrap();
    assert_eq!(read(&tier, 5), 2);
    assert_eq!(tier.phases().count(Phase::StalledWrite), 0);
    device.hold([]);
    tier.flush().unwrap();
    assert_eq!(device.durable(5), 2);
}

/// P3: if the later write were cached meanwhile, it could go below before the one in flight, and a
/// read after both would see first the later and then the earlier data.
#[test]
fn p3_a_write_waits_for_a_bypass_of_its_block() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::TransitNoEager, &device, 0);
    (0..SLOTS).for_each(|lba| write(&tier, lba, 1, false).unwrap());
    let lba = SLOTS;
    let number = tier.core.table.set_of(lba);
    device.hold([lba]);
    std::thread::scope(|scope| {
        let bypass = scope.spawn(|| write(&tier, lba, 2, false).unwrap());
        device.await_held(lba);
        // Now slots are free.
        tier.flush().unwrap();
        let later = scope.spawn(|| write(&tier, lba, 3, false).unwrap());
        while tier.core.sets.lock(number).waiters() == 0 && !later.is_finished() {
            std::thread::yield_now();
        }
        let overtook = later.is_finished();
        device.hold([]);
        assert!(!overtook, "the later write overtook the bypass");
        bypass.join().unwrap();
        later.join().unwrap();
    });
    assert_eq!(read(&tier, lba), 3);
    tier.flush().unwrap();
    assert_eq!(device.durable(lba), 3);
}

#[test]
fn a_flush_does_not_wait_for_the_eviction_of_a_later_write() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 1);
    write(&tier, 1, 1, false).unwrap();
    tier.flush().unwrap();
    device.hold([5]);
    let upto = tier.core.end_epoch();
    write(&tier, 5, 2, false).unwrap();
    device.await_held(5);
    // The rest of a flush that began before the write of block 5.
    tier.core.drain_sets(0..tier.core.sets.count(), upto).unwrap();
    assert_eq!(device.durable(5), 0);
    device.hold([]);
}

#[test]
fn a_flush_waits_for_the_eviction_of_an_earlier_write() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 1);
    device.hold([5]);
    write(&tier, 5, 2, false).unwrap();
    device.await_held(5);
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| {
            tier.flush().unwrap();
            assert_eq!(device.durable(5), 2);
        });
        device.hold([]);
        flush.join().unwrap();
    });
}

#[test]
fn a_fua_write_reports_an_earlier_failure_once() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::TransitNoEager, &device, 0);
    write(&tier, 3, 1, false).unwrap();
    device.fail([3]);
    assert_eq!(
        tier.discard(3 * BLOCK_BYTES as u64, 512).unwrap_err().kind(),
        DeviceErrorKind::NoSpace
    );
    assert_eq!(write(&tier, 9, 5, true).unwrap_err().kind(), DeviceErrorKind::NoSpace);
    assert_eq!(device.durable(9), 5);
    write(&tier, 9, 6, true).unwrap();
    assert!(tier.flush().is_err());
    device.fail([]);
    tier.flush().unwrap();
    assert_eq!((device.durable(3), device.durable(9)), (1, 6));
}

#[test]
fn a_full_cache_that_cannot_be_written_back_fails_writes_instead_of_hanging() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::TransitNoBypass, &device, 1);
    device.fail(0..SLOTS);
    for lba in 0..SLOTS {
        write(&tier, lba, 1, false).unwrap();
    }
    assert_eq!(write(&tier, SLOTS, 2, false).unwrap_err().kind(), DeviceErrorKind::NoSpace);
    device.fail([]);
    write(&tier, SLOTS, 2, false).unwrap();
    assert_eq!(read(&tier, SLOTS), 2);
    let _ = tier.flush();
    tier.flush().unwrap();
    assert_eq!((device.durable(0), device.durable(SLOTS)), (1, 2));
}

#[test]
fn neighbours_reach_a_device_that_likes_runs_in_one_write() {
    let device = TestDevice::new(4);
    let tier = transit(Policy::TransitNoEager, &device, 0);
    for lba in [7, 4, 6, 5, 8] {
        write(&tier, lba, lba, false).unwrap();
    }
    tier.flush().unwrap();
    assert_eq!(device.writes(), 2);
    assert!((4..=8).all(|lba| device.durable(lba) == lba));
}

#[test]
fn a_bad_block_in_a_run_fails_alone() {
    let device = TestDevice::new(4);
    let tier = transit(Policy::TransitNoEager, &device, 0);
    for lba in 4..8 {
        write(&tier, lba, lba, false).unwrap();
    }
    device.fail([6]);
    assert!(tier.flush().is_err());
    assert_eq!([4, 5, 6, 7].map(|lba| device.durable(lba)), [4, 5, 0, 7]);
    assert_eq!(tier.summary().failed_slots, 1);
}

#[test]
fn evictors_turn_idle_and_the_next_write_wakes_one() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 3);
    for round in 1..4 {
        tier.core.waker.await_all_idle();
        device.hold([5]);
        write(&tier, 5, round, false).unwrap();
        device.await_held(5);
        device.hold([]);
    }
}

/// Makes writes measured to take this long, and one of them adapt the write mode.
fn adapt_to(tier: &Transit, cached_ns: u64, bypass_ns: u64) {
    let now_ns = now_ns();
    (0..500).for_each(|_| tier.core.costs.sample_cached(cached_ns, now_ns));
    (0..500).for_each(|_| tier.core.costs.sample_bypass(bypass_ns, now_ns));
    tier.core.adapt_mode();
}

#[test]
fn before_a_device_as_fast_as_the_cache_writes_bypass_it_but_for_hits() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 0);
    write(&tier, 1, 1, false).unwrap();
    adapt_to(&tier, 500, 700);
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Switching);
    tier.core.adapt_mode();
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Bypassing);
    let looked_up = tier.phases().count(Phase::Metadata);
    write(&tier, 2, 2, false).unwrap();
    assert_eq!((device.writes(), tier.phases().count(Phase::Metadata)), (1, looked_up));
    write(&tier, 1, 3, false).unwrap();
    assert_eq!((device.writes(), read(&tier, 1), read(&tier, 2)), (1, 3, 2));
    tier.flush().unwrap();
    assert_eq!((device.durable(1), device.durable(2)), (3, 2));
    write(&tier, 1, 4, true).unwrap();
    assert_eq!((device.durable(1), tier.summary().dirty_slots), (4, 0));
}

/// P3: if a later write of its block were cached meanwhile, it could go below before the one in
/// flight.
#[test]
fn p3_nothing_is_cached_while_a_write_bypasses_without_a_lock() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 0);
    adapt_to(&tier, 500, 500);
    tier.core.adapt_mode();
    device.hold([3]);
    std::thread::scope(|scope| {
        let bypass = scope.spawn(|| write(&tier, 3, 1, false).unwrap());
        device.await_held(3);
        for _ in 0..3 {
            adapt_to(&tier, 500, 5000);
            assert_eq!(tier.core.mode_switch.mode(), WriteMode::Switching);
        }
        write(&tier, 4, 2, false).unwrap();
        assert_eq!(tier.summary().dirty_slots, 0);
        device.hold([]);
        bypass.join().unwrap();
    });
    tier.core.adapt_mode();
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Cached);
    write(&tier, 3, 5, false).unwrap();
    assert_eq!((read(&tier, 3), tier.summary().dirty_slots), (5, 1));
}

#[test]
fn a_failure_is_reported_by_a_fua_write_that_bypasses_the_cache() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 0);
    write(&tier, 3, 1, false).unwrap();
    device.fail([3]);
    assert!(tier.core.drain_sets(0..tier.core.sets.count(), u64::MAX).is_err());
    adapt_to(&tier, 500, 500);
    tier.core.adapt_mode();
    assert_eq!(write(&tier, 9, 5, true).unwrap_err().kind(), DeviceErrorKind::NoSpace);
    assert_eq!((device.durable(9), read(&tier, 3)), (5, 1));
}

#[test]
fn writers_that_keep_all_cpus_and_a_full_cache_busy_bypass_it_until_slots_are_free() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 0);
    (0..SLOTS).for_each(|lba| write(&tier, lba, 1, false).unwrap());
    tier.core.adapt_mode();
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Cached);
    let writers: Vec<_> = (0..cpus()).map(|_| tier.core.busy.enter()).collect();
    tier.core.adapt_mode();
    tier.core.adapt_mode();
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Bypassing);
    drop(writers);
    tier.core.adapt_mode();
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Bypassing, "nothing was written back yet");
    tier.flush().unwrap();
    tier.core.adapt_mode();
    tier.core.adapt_mode();
    assert_eq!(tier.core.mode_switch.mode(), WriteMode::Cached);
}

#[test]
fn an_evictor_leaves_the_cpus_to_writers() {
    let device = TestDevice::new(1);
    let tier = transit(Policy::Transit, &device, 1);
    tier.core.waker.await_all_idle();
    let writers: Vec<_> = (0..cpus()).map(|_| tier.core.busy.enter()).collect();
    write(&tier, 5, 1, false).unwrap();
    tier.core.waker.await_resting();
    assert_eq!(device.writes(), 0);
    device.hold([5]);
    drop(writers);
    tier.core.waker.wake_all();
    device.await_held(5);
    device.hold([]);
}

#[test]
fn a_pause_ends_when_no_writer_is_active() {
    const DAY_NS: u64 = 86_400_000_000_000;
    let device = TestDevice::new(1);
    let tier = transit(Policy::TransitNoEager, &device, 0);
    write(&tier, 5, 1, false).unwrap();
    let mut evictor = Evictor::new(Arc::clone(&tier.core), 0);
    let writer = tier.core.busy.enter();
    assert_ne!(evictor.begin_pause(DAY_NS), Step::Again);
    assert_ne!(evictor.step(), Step::Again);
    assert_eq!(device.writes(), 0);
    drop(writer);
    evictor.step();
    assert_eq!(device.writes(), 1);
}

#[test]
fn a_tier_opens_by_its_policy() {
    let tier = tier_of(Policy::TransitNoBypass)(TestDevice::new(1));
    let summary = tier.summary();
    assert_eq!((summary.policy, summary.slots), (Policy::TransitNoBypass, SLOTS));
    assert_eq!(summary.capacity_bytes, SLOTS * BLOCK_BYTES as u64);
}
