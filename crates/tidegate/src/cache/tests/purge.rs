//! A cache that is purged: what it gives up, and what it keeps whatever happens.

use std::sync::Arc;
use std::sync::atomic::AtomicBool as StdAtomicBool;

use super::part::{open_with, read_block, write_block};
use super::*;
use super::{
    NO_THREAD, PAGES, SHARDED, binding, memory, memory_of, open, pool, pool_of, pool_of_lines,
    read, work, write,
};
use crate::cache::check::check;
use crate::cache::pages::index::Stored;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::{DeviceErrorKind, Op};
use crate::tier::{Purged, Tier};

fn bytes_of(pages: u64) -> u64 {
    pages * PAGE_BYTES
}

fn purged(freed: u64, left: u64) -> Purged {
    Purged { freed_bytes: bytes_of(freed), left_bytes: bytes_of(left) }
}

/// Slots that can be taken, in all shards.
fn available(device: &CacheDevice) -> u64 {
    let shards = 0..device.core.pages.shards.count();
    shards
        .map(|number| u64::from(device.core.pages.shards.lock(number).allocator.available()))
        .sum()
}

#[test]
fn a_purged_cache_is_empty_and_the_backing_has_all() {
    let (region, backing) = (pool(SHARDED), memory());
    let device = open(&region, &backing);
    (0..PAGES).for_each(|page| write(&device, page, 1));
    device.clean_all().unwrap();
    (0..PAGES).step_by(2).for_each(|page| write(&device, page, 2));
    device.write_zeroes(0, 4 * PAGE_BYTES, ZeroFlags::default()).unwrap();
    assert_eq!(device.purge().unwrap(), purged(PAGES, 0));
    let expected = |page: u64| match page {
        0..4 => 0,
        _ => 2 - u8::try_from(page % 2).unwrap(),
    };
    assert_eq!((device.core.pages.usage(), available(&device)), (Usage::default(), SHARDED));
    assert_eq!(
        device.core.pages.counters.get(Counter::Evictions),
        0,
        "none made place for another"
    );
    (0..PAGES).for_each(|page| assert_eq!(read(&*backing, page), expected(page)));
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), expected(page)));
    drop(device);
    let device = open(&region, &backing);
    assert_eq!(device.recovered().pages, 0, "no older version comes back");
    assert_eq!(device.purge().unwrap(), purged(0, 0));
}

/// Records in slots of their own, in parts of slots, and over pages.
#[test]
fn records_and_the_pages_under_them_leave_and_their_slots_are_whole_again() {
    let (region, backing) = (pool_of(300, 512), memory_of(512));
    let device = open_with(&region, &backing, NO_THREAD);
    device.set("by-content", "off").unwrap();
    (0..40).for_each(|page| {
        device.write(page * PAGE_BYTES, &[1; PAGE], WriteFlags::default()).unwrap();
    });
    // Twice, so that parts are dead.
    for byte in [2, 3] {
        (0..60).for_each(|page| write_block(&device, page * 8 + 1, byte, false));
    }
    let usage = device.core.pages.usage();
    assert!(usage.parts > 0 && usage.splits > 0 && usage.bases > 0, "{usage:?}");
    assert_eq!(device.purge().unwrap(), purged(60, 0));
    assert_eq!((device.core.pages.usage(), available(&device)), (Usage::default(), 300));
    for page in 0..60 {
        let first = u8::from(page < 40);
        assert_eq!([0, 1].map(|at| read_block(&*backing, page * 8 + at)), [first, 3]);
    }
    drop(device);
    let report = check(&region).unwrap();
    assert_eq!((report.findings, report.used_slots, report.split_slots), (vec![], 0, 0));
}

/// What was read before the purge waits to be kept, with the rest of its cluster: a worker finds
/// it afterwards.
#[test]
fn what_was_read_before_a_purge_is_not_kept_after_it() {
    for line_bytes in [4 << 10, 16 << 10] {
        let device = open(&pool_of_lines(64, line_bytes), &memory());
        device.flush().unwrap();
        (0..20).for_each(|page| assert_eq!(read(&device, page), 0));
        assert!(device.core.background.fills.are_waiting());
        assert_eq!(device.purge().unwrap(), purged(0, 0));
        work(&device);
        assert_eq!(device.core.pages.usage(), Usage::default(), "lines of {line_bytes}");
        assert_eq!(read(&device, 3), 0);
        work(&device);
        assert!(device.core.pages.find(3).is_some(), "what is read later is kept");
    }
}

#[test]
fn a_backing_that_fails_keeps_all_pages_in_the_cache() {
    for op in [Op::Write, Op::Flush] {
        let fault = Arc::new(Fault::new(memory(), 1));
        let device = open(&pool(300), &fault);
        (0..60).for_each(|page| write(&device, page, 1));
        device.clean_all().unwrap();
        (0..20).for_each(|page| write(&device, page, 2));
        fault.add(Rule::new(&[op], When::Always, Effect::Fail(DeviceErrorKind::Io)));
        assert_eq!(device.purge().unwrap_err().kind(), DeviceErrorKind::Io);
        let usage = device.core.pages.usage();
        assert_eq!((usage.live, usage.dirty), (60, 20), "{op:?}");
        fault.heal();
        assert_eq!(device.purge().unwrap(), purged(60, 0));
        (0..60).for_each(|page| assert_eq!(read(&*fault, page), 1 + u8::from(page < 20)));
    }
}

#[test]
fn a_dirty_page_that_is_damaged_stays_and_is_told_and_all_others_leave() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    (0..10).for_each(|page| write(&device, page, 1));
    let data = device.core.store.places.data(device.core.pages.find(4).unwrap().slot);
    region.write(data + 100, &[0xFF]).unwrap();
    drop(device);
    let device = open(&region, &backing);
    assert_eq!(device.purge().unwrap_err().kind(), DeviceErrorKind::Corrupt);
    assert_eq!((device.core.pages.usage().live, device.core.pages.usage().dirty), (1, 1));
    let error = device.read(4 * PAGE_BYTES, &mut [0; PAGE]).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Corrupt, "not the backing's older bytes");
}

#[test]
fn pages_that_wait_for_a_commit_stay_with_the_versions_that_they_replace() {
    let (region, backing) = (pool(300), memory());
    let options = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let open =
        || CacheDevice::open(Arc::clone(&region), backing.clone(), binding(), options).unwrap();
    let device = open();
    (0..40).for_each(|page| write(&device, page, 1));
    device.flush().unwrap();
    (0..10).for_each(|page| write(&device, page, 2));
    assert_eq!(device.purge().unwrap(), purged(30, 10));
    (0..10).for_each(|page| assert_eq!((read(&device, page), read(&*backing, page)), (2, 0)));
    drop(device);
    // As after a crash: the last flush covered the version before.
    let device = open();
    (0..40).for_each(|page| assert_eq!(read(&device, page), 1));
    assert_eq!(device.purge().unwrap(), purged(10, 0));
    (0..40).for_each(|page| assert_eq!(read(&*backing, page), 1));
}

/// A writer that writes over an older version of a page holds the page: it leaves when the writer
/// is done.
#[test]
fn a_page_that_a_writer_holds_leaves_once_it_is_not_held() {
    let device = open(&pool(64), &memory());
    (0..4).for_each(|page| write(&device, page, 1));
    write(&device, 2, 2);
    device.clean_all().unwrap();
    let taken = device.core.pages.shards.lock(0).allocator.take().unwrap();
    assert_eq!(taken.dead_page, Some(2));
    std::thread::scope(|scope| {
        let purge = scope.spawn(|| device.purge());
        while device.core.pages.usage().live > 1 {
            std::thread::yield_now();
        }
        assert!(device.core.pages.find(2).is_some() && !purge.is_finished());
        let stored =
            Stored { dirty: true, zero: true, record: false, over: false, group: 0, class: 0 };
        device.core.pages.shards.lock(0).publish(9, &taken, stored);
        assert_eq!(purge.join().unwrap().unwrap(), purged(4, 1));
    });
    assert!(device.core.pages.find(2).is_none());
}

/// Ends clients when it is dropped, also where the test fails.
struct Over<'a>(&'a StdAtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A purge ends while clients go on, loses nothing, and leaves pages of theirs only.
#[test]
fn a_purge_beside_readers_and_writers_ends_and_loses_nothing() {
    let backing = memory();
    let options = CacheDeviceOptions { clean_from_pct: Some(30), ..Default::default() };
    let device = CacheDevice::open(pool(200), backing.clone(), binding(), options).unwrap();
    (0..PAGES).for_each(|page| write(&device, page, 1));
    let is_over = StdAtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let over = Over(&is_over);
        let clients: Vec<_> = (0..2)
            .map(|own| {
                let (device, is_over) = (&device, &is_over);
                scope.spawn(move || {
                    let mut byte = 1_u8;
                    while !is_over.load(Ordering::Relaxed) {
                        byte = byte.wrapping_add(1);
                        (own..64).step_by(2).for_each(|page| write(device, page, byte));
                        (own..64).step_by(2).for_each(|page| assert_eq!(read(device, page), byte));
                    }
                    byte
                })
            })
            .collect();
        for _ in 0..20 {
            device.purge().unwrap();
            assert!((64..PAGES).all(|page| device.core.pages.find(page).is_none()));
            assert!((64..PAGES).all(|page| read(&device, page) == 1));
        }
        drop(over);
        clients.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
    });
    let expected = |page: u64| match page {
        0..64 => last[usize::try_from(page % 2).unwrap()],
        _ => 1,
    };
    assert_eq!(device.purge().unwrap().left_bytes, 0);
    (0..PAGES).for_each(|page| assert_eq!(read(&*backing, page), expected(page)));
}
