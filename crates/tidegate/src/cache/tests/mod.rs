//! The cache as a device: what it promises, what it costs, what it refuses; and each mode against a
//! map of blocks, over reopens, damage and a backing that fails.

mod by_cost;
mod class;
mod cluster;
mod content;
mod counter;
mod flip;
mod flush;
mod group;
mod keep;
mod part;
mod policy;
mod purge;
mod record;
mod resize;
mod split;
mod start;
mod vanish;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as StdAtomicBool, AtomicU64 as StdAtomicU64};
use std::sync::mpsc::channel;
use std::time::Duration;

use proptest::prelude::*;

use super::check::check;
use super::counters::Counter;
use super::pages::cluster::Sharding;
use super::pages::index::{Shard, Usage};
use super::router::mode::Mode;
use super::store::layout::{HEADER_BYTES, PAGE_BYTES, PAGES_MAX, Places};
use super::*;
use crate::device::conformance::{self, Model, Promises};
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::null::NullDevice;
use crate::device::{AsyncRequest, DeviceErrorKind, Op, Operation, WriteFlags};
use crate::pmem::{Counters as Stores, RegionOptions};
use crate::sync::{AtomicBool, AtomicU64};
use crate::tier::Tier;
use crate::tier::background::Step as Progress;

pub(super) const PAGES: u64 = 128;
/// Slots of a pool with several shards.
pub(super) const SHARDED: u64 = 5 * 2048;
pub(super) const NO_THREAD: CacheDeviceOptions = CacheDeviceOptions {
    no_thread: true,
    is_scheduled: false,
    clean_from_pct: None,
    keep_free: None,
    adopt_foreign: false,
    backing_changed: false,
    backing_share_pct: None,
    atomic_flush: false,
};

/// A pool of `slots` slots.
pub(super) fn pool(slots: u64) -> Arc<Region> {
    pool_of(slots, 4096)
}

/// A pool of `slots` slots for a device with blocks of `block_bytes`.
pub(super) fn pool_of(slots: u64, block_bytes: u32) -> Arc<Region> {
    pool_with(slots, block_bytes, &RegionOptions::default())
}

/// A pool of `slots` slots for blocks of `block_bytes`, in memory with `options`.
pub(super) fn pool_with(slots: u64, block_bytes: u32, options: &RegionOptions) -> Arc<Region> {
    pool_as(slots, &CacheOptions { block_bytes, ..Default::default() }, options)
}

/// A pool of `slots` slots with clusters of `line_bytes`.
pub(super) fn pool_of_lines(slots: u64, line_bytes: u32) -> Arc<Region> {
    let options = CacheOptions { line_bytes, ..Default::default() };
    pool_as(slots, &options, &RegionOptions::default())
}

fn pool_as(slots: u64, options: &CacheOptions, memory: &RegionOptions) -> Arc<Region> {
    let header_pages = slots.div_ceil(64);
    let len_bytes = (6 + 4 + header_pages + slots) * 4096;
    let region = Region::anonymous_with(len_bytes, memory).unwrap();
    let header = create(&region, options).unwrap();
    assert_eq!(u64::from(header.places.slots()), slots);
    Arc::new(region)
}

pub(super) fn memory() -> Arc<MemoryDevice> {
    memory_of(4096)
}

/// A backing with blocks of `block_bytes`.
pub(super) fn memory_of(block_bytes: u32) -> Arc<MemoryDevice> {
    let blocks = PAGES * PAGE_BYTES / u64::from(block_bytes);
    Arc::new(MemoryDevice::new(block_bytes, blocks).unwrap())
}

pub(super) fn binding() -> Binding {
    Binding { identity: 1, name: "memory".into(), pages: PAGES }
}

pub(super) fn open(region: &Arc<Region>, backing: &Arc<impl BlockDevice + 'static>) -> CacheDevice {
    CacheDevice::open(Arc::clone(region), Arc::clone(backing) as _, binding(), NO_THREAD).unwrap()
}

pub(super) fn write(device: &CacheDevice, page: u64, byte: u8) {
    device.write(page * PAGE_BYTES, &[byte; 4096], WriteFlags::default()).unwrap();
}

pub(super) fn read(device: &dyn BlockDevice, page: u64) -> u8 {
    let mut data = [0; 4096];
    device.read(page * PAGE_BYTES, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == data[0]), "page {page} is torn");
    data[0]
}

/// Background steps until nothing is to do.
pub(super) fn work(device: &CacheDevice) {
    let mut background = device.background();
    while background.step() == Progress::Again {}
}

pub(super) fn cost(device: &CacheDevice, act: impl FnOnce(&CacheDevice)) -> Stores {
    let before = device.core.store.region.counters();
    act(device);
    device.core.store.region.counters() - before
}

fn places(region: &Region) -> Places {
    CacheHeader::read(region).unwrap().places
}

/// The slot that holds the newest version of `page`.
fn slot_of(device: &CacheDevice, page: u64) -> u32 {
    device.core.pages.find(page).unwrap().slot
}

#[test]
fn discarded_pages_leave_before_pages_with_data() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    (0..20).for_each(|page| write(&device, page, 1));
    (20..60).for_each(|page| write(&device, page, 2));
    device.discard(20 * PAGE_BYTES, 40 * PAGE_BYTES).unwrap();
    (60..100).for_each(|page| write(&device, page, 3));
    // Each page has a slot as long as no discarded one has.
    assert!((0..100).all(|page| read(&*backing, page) == 0));
    let expected = |page| match page {
        0..20 => 1,
        20..60 => 0,
        _ => 3,
    };
    assert!((0..100).all(|page| read(&device, page) == expected(page)));
}

#[test]
fn every_mode_conforms_with_slots_for_all_and_for_few() {
    for &mode in Mode::ALL {
        for slots in [24, 2 * PAGES] {
            let device = open(&pool(slots), &memory());
            device.set_mode(mode).unwrap();
            conformance::check(&device, Promises::default());
        }
    }
}

#[test]
fn every_mode_conforms_with_a_thread_and_started_requests() {
    for &mode in Mode::ALL {
        let options = CacheDeviceOptions { clean_from_pct: Some(30), ..Default::default() };
        let device = CacheDevice::open(pool(40), memory(), binding(), options).unwrap();
        device.set_mode(mode).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        conformance::check(&*device, Promises::default());
        conformance::check_started(&device, Promises::default());
    }
}

#[test]
fn a_write_streams_its_page_and_64_bytes_with_one_fence() {
    let device = open(&pool(64), &memory());
    let of = |pages: u64| Stores {
        stores: 2 * pages,
        bytes_streamed: (4096 + 64) * pages,
        fences: 1,
        ..Stores::default()
    };
    assert_eq!(cost(&device, |it| write(it, 3, 1)), of(1), "a miss");
    assert_eq!(cost(&device, |it| write(it, 3, 2)), of(1), "a hit");
    assert_eq!(cost(&device, |it| write(it, 3, 3)), of(1), "a hit over a dead slot");
    let sixteen = vec![4; 16 * 4096];
    let large = |it: &CacheDevice| it.write(0, &sixteen, WriteFlags { fua: true }).unwrap();
    assert_eq!(cost(&device, large), of(16), "one batch");
    let zeroes = |it: &CacheDevice| it.discard(0, 4096).unwrap();
    let expected = Stores { stores: 1, bytes_streamed: 64, fences: 1, ..Stores::default() };
    assert_eq!(cost(&device, zeroes), expected, "a header without data");
    assert_eq!(cost(&device, |it| it.flush().unwrap()), Stores::default());
    let expected = Stores { bytes_read: 4096, ..Stores::default() };
    assert_eq!(cost(&device, |it| assert_eq!(read(it, 3), 4)), expected);
}

#[test]
fn evictions_write_at_most_a_twentieth_more_than_the_client() {
    let device = open(&pool(640), &Arc::new(MemoryDevice::new(4096, 5000).unwrap()));
    let fill = |from: u64, to: u64| {
        move |it: &CacheDevice| {
            for page in from..to {
                write(it, page * 7919 % 5000, 1);
                work(it);
            }
        }
    };
    fill(0, 1000)(&device);
    let found = cost(&device, fill(1000, 3000));
    let written = found.bytes_streamed + 64 * found.lines_written_back;
    let ratio_pct = written * 100 / (2000 * 4096);
    assert!(ratio_pct <= 105, "{ratio_pct} %: {found:?}");
    assert!(device.core.pages.usage().live > 600, "{:?}", device.core.pages.usage());
}

#[test]
fn pages_that_are_cached_are_there_after_a_crash_without_the_backing() {
    let (region, backing) = (pool(64), memory());
    let fault = Arc::new(Fault::new(backing, 1));
    let device = open(&region, &fault);
    (0..30).for_each(|page| write(&device, page, 7));
    device.clean_all().unwrap();
    (20..40).for_each(|page| write(&device, page, 8));
    drop(device);
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    let device = open(&region, &fault);
    let expected = Recovered { pages: 40, dirty_pages: 20, older: 10, ..Recovered::default() };
    let found = device.recovered();
    // Older versions are as many as were not written over.
    assert_eq!(Recovered { older: 10, ..found }, expected);
    (0..40).for_each(|page| assert_eq!(read(&device, page), if page < 20 { 7 } else { 8 }));
    assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
}

/// Without a background one thread opens, else one for each CPU.
#[test]
fn threads_find_what_one_finds() {
    let (region, backing) = (pool(SHARDED), memory());
    let device = open(&region, &backing);
    assert!(device.core.pages.shards.count() > 2, "each thread has shards of its own");
    for (step, byte) in [(1, 10), (2, 11), (3, 12)] {
        (0..PAGES).step_by(step).for_each(|page| write(&device, page, byte));
    }
    drop(device);
    let by_one = open(&region, &backing).recovered();
    let options = CacheDeviceOptions::default();
    let device = CacheDevice::open(region, backing, binding(), options).unwrap();
    // The first one has voided the older versions.
    assert_eq!(device.recovered(), Recovered { older: 0, ..by_one });
    assert_eq!(by_one.pages, PAGES);
    for page in 0..PAGES {
        let last = [(3, 12), (2, 11), (1, 10)].into_iter().find(|(step, _)| page % step == 0);
        assert_eq!(Some(read(&device, page)), last.map(|(_, byte)| byte));
    }
}

#[test]
fn what_is_read_is_kept_after_the_answer() {
    let backing = memory();
    backing.write(0, &vec![5; 8 * 4096], WriteFlags::default()).unwrap();
    let fault = Arc::new(Fault::new(backing, 1));
    let device = open(&pool(64), &fault);
    let first = cost(&device, |it| assert_eq!(read(it, 3), 5));
    assert_eq!(first, Stores::default(), "nothing is stored before the answer");
    work(&device);
    assert_eq!(device.core.pages.usage(), Usage { live: 1, ..Usage::default() });
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    assert_eq!(read(&device, 3), 5);
    device.read(4 * PAGE_BYTES, &mut [0; 4096]).unwrap_err();
}

#[test]
fn a_worker_that_kept_pages_rests_so_that_the_next_misses_wake_none() {
    let (region, backing) = (pool(1024), memory());
    let device = open(&region, &backing);
    device.core.pages.flush_backing_recorded().unwrap();
    // The policies of cleaning are asked once.
    work(&device);
    let mut background = device.background();
    let rests = |step| matches!(step, Progress::Sleep { wake_at_ns: Some(_) });
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 0));
    assert_eq!(background.step(), Progress::Again, "more than a batch waits");
    assert!(rests(background.step()), "all are kept");
    assert_eq!(device.core.pages.usage().live, PAGES);
    assert_eq!(background.step(), Progress::IDLE, "none missed meanwhile");
}

#[test]
fn what_is_read_is_not_kept_where_it_was_written_meanwhile_or_may_be_lost() {
    let device = open(&pool(64), &memory());
    read(&device, 3);
    write(&device, 3, 9);
    work(&device);
    assert_eq!(
        (read(&device, 3), device.core.pages.usage()),
        (9, Usage { live: 1, dirty: 1, dirty_units: layout::UNITS.into(), ..Usage::default() })
    );
    device.set_mode(Mode::WriteInvalidate).unwrap();
    write(&device, 4, 1);
    read(&device, 4);
    work(&device);
    assert_eq!(device.core.pages.find(4), None, "the backing has not flushed it");
    device.flush().unwrap();
    read(&device, 4);
    work(&device);
    assert!(device.core.pages.find(4).is_some_and(|found| !found.dirty));
    device.set_mode(Mode::WriteOnly).unwrap();
    read(&device, 5);
    work(&device);
    assert_eq!(device.core.pages.find(5), None, "write-only keeps nothing that it reads");
}

#[test]
fn a_backing_that_fails_loses_nothing_and_is_tried_again() {
    for mode in [Mode::WriteBack, Mode::WriteOnly] {
        let (region, backing) = (pool(16), memory());
        let fault = Arc::new(Fault::new(Arc::clone(&backing) as _, 1));
        let device = open(&region, &fault);
        device.set_mode(mode).unwrap();
        device.flush().unwrap();
        fault.add(Rule::new(&[Op::Write], When::Always, Effect::Fail(DeviceErrorKind::NoSpace)));
        let mut written = 0;
        let error = loop {
            let data = [7; 4096];
            match device.write(written * PAGE_BYTES, &data, WriteFlags::default()) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert!(written >= 15, "{written}");
        assert_eq!(error.kind(), DeviceErrorKind::NoSpace);
        device.flush().expect("all is durable in the cache");
        drop(device);
        let device = open(&region, &fault);
        (0..written).for_each(|page| assert_eq!(read(&device, page), 7));
        device.clean_all().unwrap_err();
        fault.heal();
        device.clean_all().unwrap();
        (0..written).for_each(|page| assert_eq!(read(&*backing, page), 7));
        write(&device, 100, 7);
    }
}

#[test]
fn a_writer_that_waits_for_the_thread_hears_of_its_failure_and_goes_on_when_it_is_over() {
    let fault = Arc::new(Fault::new(memory(), 1));
    let options = CacheDeviceOptions::default();
    let device = CacheDevice::open(pool(16), Arc::clone(&fault) as _, binding(), options).unwrap();
    fault.add(Rule::new(&[Op::Write], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    let all = vec![3; 64 * 4096];
    let error = device.write(0, &all, WriteFlags::default()).unwrap_err();
    assert!(error.to_string().contains("cannot be written back"), "{error}");
    fault.heal();
    // Each thread may be about to tell of what failed before.
    let write = |_| device.write(0, &all, WriteFlags::default()).ok();
    (0..=background::clean::CLEANERS).find_map(write).expect("it goes on");
    (0..64).for_each(|page| assert_eq!(read(&device, page), 3));
}

#[test]
fn another_backing_is_refused_while_pages_of_the_first_are_dirty() {
    let (region, first, second) = (pool(16), memory(), memory());
    let device = open(&region, &first);
    write(&device, 1, 1);
    device.clean_all().unwrap();
    write(&device, 2, 2);
    drop(device);
    let other = || Binding { identity: 2, name: "other".into(), pages: PAGES };
    let open_other = |options| {
        CacheDevice::open(Arc::clone(&region), Arc::clone(&second) as _, other(), options)
    };
    let refused = open_other(NO_THREAD).map(drop).unwrap_err();
    assert!(matches!(refused, CacheError::OtherBacking { dirty: 1, .. }), "{refused}");
    let forced = CacheDeviceOptions { adopt_foreign: true, ..NO_THREAD };
    let device = open_other(forced).unwrap();
    assert_eq!((read(&device, 1), read(&device, 2)), (0, 2), "clean pages mean nothing here");
    device.shutdown().unwrap();
    assert_eq!(read(&*second, 2), 2);
    drop(device);
    let device = open(&region, &first);
    assert_eq!(device.recovered().pages, 0, "all was clean");
}

/// Writes pages 0 to 9 to the backing.
fn write_below(backing: &MemoryDevice, byte: u8) {
    backing.write(0, &vec![byte; 10 * 4096], WriteFlags::default()).unwrap();
}

/// Pages 0 to 9 clean in a cache, and in a backing that was changed since.
fn changed_backing() -> (Arc<Region>, Arc<MemoryDevice>) {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    (0..10).for_each(|page| write(&device, page, 1));
    device.clean_all().unwrap();
    drop(device);
    write_below(&backing, 2);
    (region, backing)
}

#[test]
fn clean_pages_of_a_backing_that_was_changed_elsewhere_are_given_up() {
    let (region, backing) = changed_backing();
    let device = open(&region, &backing);
    assert_eq!((device.recovered().pages, device.recovered().forgotten), (0, 10));
    (0..10).for_each(|page| assert_eq!(read(&device, page), 2));
    drop(device);
    assert_eq!(open(&region, &backing).recovered().pages, 0, "for good");
}

#[test]
fn dirty_pages_of_a_backing_that_was_changed_elsewhere_are_refused() {
    let (region, backing) = changed_backing();
    write_below(&backing, 1);
    let device = open(&region, &backing);
    assert_eq!((device.recovered().pages, device.recovered().forgotten), (10, 0));
    write(&device, 20, 5);
    drop(device);
    write_below(&backing, 2);
    let open_with = |options| {
        CacheDevice::open(Arc::clone(&region), Arc::clone(&backing) as _, binding(), options)
    };
    let refused = open_with(NO_THREAD).map(drop).unwrap_err();
    assert!(matches!(refused, CacheError::ChangedBacking { dirty: 1 }), "{refused}");
    let device = open_with(CacheDeviceOptions { adopt_foreign: true, ..NO_THREAD }).unwrap();
    assert_eq!((read(&device, 3), read(&device, 20)), (2, 5));
}

#[test]
fn a_backing_that_is_said_to_be_changed_is_not_looked_at() {
    let (region, backing) = changed_backing();
    write_below(&backing, 1);
    let options = CacheDeviceOptions { backing_changed: true, ..NO_THREAD };
    let device = CacheDevice::open(region, backing, binding(), options).unwrap();
    assert_eq!((device.recovered().pages, device.recovered().forgotten), (0, 10));
}

#[test]
fn a_backing_that_does_not_fit_is_refused() {
    let region = pool(16);
    write(&open(&region, &memory()), 100, 1);
    let small = Arc::new(MemoryDevice::new(4096, 100).unwrap());
    let refused = CacheDevice::open(Arc::clone(&region), small, binding(), NO_THREAD);
    assert!(matches!(refused.map(drop), Err(CacheError::Misfit { .. })));
    let partial = Arc::new(MemoryDevice::new(512, 9).unwrap());
    let refused = CacheDevice::open(region, partial, binding(), NO_THREAD);
    assert!(matches!(refused.map(drop), Err(CacheError::PartialPage { bytes: 4608 })));
}

/// A larger page number would lose its upper bits: the page would be another one.
#[test]
fn a_backing_with_more_pages_than_numbers_is_refused() {
    let region = pool(16);
    let open_over = |pages| {
        let backing = Arc::new(NullDevice::new(4096, pages).unwrap());
        CacheDevice::open(Arc::clone(&region), backing, binding(), NO_THREAD)
    };
    let device = open_over(PAGES_MAX).unwrap();
    write(&device, PAGES_MAX - 1, 7);
    assert_eq!((read(&device, PAGES_MAX - 1), read(&device, 0)), (7, 0));
    drop(device);
    let refused = open_over(PAGES_MAX + 1).map(drop).unwrap_err();
    assert!(matches!(refused, CacheError::TooLarge { .. }));
    let words = refused.to_string();
    for part in ["1152921504606851072 bytes", "at most 1152921504606846976", "--engine log"] {
        assert!(words.contains(part), "{words}");
    }
    assert_eq!(read(&open_over(PAGES_MAX).unwrap(), PAGES_MAX - 1), 7, "the pool is as it was");
}

#[test]
fn damage_is_a_miss_of_a_clean_page_and_an_error_of_a_dirty_one() {
    let (region, backing) = (pool(32), memory());
    let device = open(&region, &backing);
    (1..=3).for_each(|page| write(&device, page, 1));
    device.clean_all().unwrap();
    (2..=3).for_each(|page| write(&device, page, 2));
    let slots = [1, 2].map(|page| slot_of(&device, page));
    drop(device);
    let places = places(&region);
    for slot in slots {
        region.write(places.data(slot) + 100, &[0xFF]).unwrap();
    }
    assert_eq!(check(&region).unwrap().faults, 2);
    let device = open(&region, &backing);
    assert_eq!((read(&device, 1), read(&device, 3)), (1, 2), "the backing has page 1");
    let error = device.read(2 * PAGE_BYTES, &mut [0; 4096]).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Corrupt);
    let error = device.clean_all().unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Corrupt);
    assert_eq!((read(&*backing, 2), read(&*backing, 3)), (1, 2), "what is whole is cleaned");
    write(&device, 2, 5);
    assert_eq!(read(&device, 2), 5);
    device.clean_all().unwrap();
}

#[test]
fn a_torn_write_leaves_the_version_before_it() {
    let (region, backing) = (pool(32), memory());
    let device = open(&region, &backing);
    write(&device, 4, 1);
    write(&device, 4, 2);
    let slot = slot_of(&device, 4);
    drop(device);
    // The data of the newest batch did not reach the medium, its header did.
    region.write(places(&region).data(slot) + 64, &[0; 64]).unwrap();
    let device = open(&region, &backing);
    assert_eq!((read(&device, 4), device.recovered().unfinished), (1, 1));
    drop(device);
    let device = open(&region, &backing);
    assert_eq!((read(&device, 4), device.recovered().unfinished), (1, 0));
}

#[test]
fn a_mode_is_kept_and_changed_with_and_without_a_flush() {
    let (region, backing) = (pool(32), memory());
    let device = open(&region, &backing);
    write(&device, 1, 1);
    device.set("mode", "wt").unwrap();
    assert_eq!((read(&*backing, 1), device.state().pending_bytes), (0, 4096));
    write(&device, 2, 2);
    assert_eq!(read(&*backing, 2), 2);
    device.set("mode", "pt+flush").unwrap();
    assert_eq!((read(&*backing, 1), device.state().pending_bytes), (1, 0));
    for (key, value) in [("mode", "wx"), ("mode", "wb+"), ("clean-from-pct", "101"), ("x", "1")] {
        device.set(key, value).unwrap_err();
    }
    drop(device);
    assert_eq!(open(&region, &backing).mode(), Mode::PassThrough);
}

#[test]
fn each_mode_leaves_its_writes_where_it_says() {
    let cases = [
        // Mode, a page that is cached before: is the write in the backing, is it in the cache?
        (Mode::WriteBack, false, (false, true)),
        (Mode::WriteOnly, false, (false, true)),
        (Mode::WriteThrough, false, (true, true)),
        (Mode::WriteAround, false, (true, false)),
        (Mode::WriteAround, true, (true, true)),
        (Mode::WriteInvalidate, true, (true, false)),
        (Mode::PassThrough, true, (true, false)),
    ];
    for (mode, cached, expected) in cases {
        let backing = memory();
        let device = open(&pool(32), &backing);
        if cached {
            write(&device, 3, 1);
            device.clean_all().unwrap();
        }
        device.set_mode(mode).unwrap();
        write(&device, 3, 2);
        let found = (read(&*backing, 3) == 2, device.core.pages.find(3).is_some());
        assert_eq!(found, expected, "{mode}, cached before: {cached}");
        assert_eq!(read(&device, 3), 2);
        device.flush().unwrap();
        let is_dirty = device.core.pages.usage().dirty > 0;
        assert_eq!(is_dirty, matches!(mode, Mode::WriteBack | Mode::WriteOnly), "{mode}");
    }
}

#[test]
fn zeroes_of_many_pages_are_in_the_backing_and_of_cached_ones_in_the_cache() {
    let backing = Arc::new(MemoryDevice::new(4096, 1000).unwrap());
    backing.write(0, &vec![9; 1000 * 4096], WriteFlags::default()).unwrap();
    for &mode in Mode::ALL {
        let device = open(&pool(32), &backing);
        device.set_mode(mode).unwrap();
        write(&device, 3, 1);
        write(&device, 600, 1);
        let flags = ZeroFlags::default();
        device.write_zeroes(PAGE_BYTES, 999 * PAGE_BYTES, flags).unwrap();
        (0..1000).step_by(100).for_each(|page| {
            assert_eq!(read(&device, page), if page == 0 { 9 } else { 0 }, "{mode}");
        });
        assert_eq!((read(&device, 3), read(&device, 999)), (0, 0), "{mode}");
    }
}

#[test]
fn impossible_pools_are_refused_before_anything_changes() {
    let region = Region::anonymous(store::header::POOL_BYTES_MIN - 4096).unwrap();
    region.write(0, b"precious").unwrap();
    create(&region, &CacheOptions::default()).unwrap_err();
    let mut start = [0; 8];
    region.read(0, &mut start).unwrap();
    assert_eq!(&start, b"precious");
    create(&Region::anonymous(store::header::POOL_BYTES_MIN).unwrap(), &CacheOptions::default())
        .unwrap();
}

#[test]
fn a_damaged_copy_of_the_header_is_restored() {
    for damaged in [0, 4096] {
        let region = pool(16);
        let at = CacheHeader::read(&region).unwrap().superblock.data_offset;
        region.write(at + damaged + 100, &[0xFF]).unwrap();
        let mut header = CacheHeader::read(&region).unwrap();
        assert!(!header.is_whole);
        let other = at + 4096 - damaged;
        let (mut before, mut after) = ([0; 4096], [0; 4096]);
        region.read(other, &mut before).unwrap();
        header.restore(&region).unwrap();
        assert!(CacheHeader::read(&region).unwrap().is_whole);
        region.read(other, &mut after).unwrap();
        assert_ne!(before, after, "the sequence grew");
    }
}

/// Any part of an update may be durable when it is cut off.
#[test]
fn a_copy_of_the_header_whose_update_was_cut_off_is_no_damage() {
    let page_at = |region: &Region, at| {
        let mut page = [0; 4096];
        region.read(at, &mut page).unwrap();
        page
    };
    let region = pool(16);
    let mut header = CacheHeader::read(&region).unwrap();
    let at = header.superblock.data_offset;
    let old = page_at(&region, at);
    header.settings = "granularity=record\n".into();
    header.write(&region).unwrap();
    let new = page_at(&region, at);
    for words in 0..=512 {
        let mut torn = new;
        torn[words * 8..].copy_from_slice(&old[words * 8..]);
        for (first, second) in [(&old, &torn), (&torn, &new)] {
            region.write(at, first).unwrap();
            region.write(at + 4096, second).unwrap();
            let found = CacheHeader::read(&region).unwrap().damaged_copy;
            assert_eq!(found, None, "{words} words");
        }
    }
    for bit in [12 * 8, 24 * 8 + 5, 1024 * 8 + 3, 4095 * 8] {
        let mut flipped = new;
        flipped[bit / 8] ^= 1 << (bit % 8);
        region.write(at, &flipped).unwrap();
        assert_eq!(check(&region).unwrap().faults, 1, "bit {bit}");
    }
}

/// Copies `region`, so that a case may spoil it.
pub(super) fn copy_of(region: &Region) -> Arc<Region> {
    let mut image = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut image).unwrap();
    let copy = Region::anonymous(region.len_bytes()).unwrap();
    copy.write(0, &image).unwrap();
    Arc::new(copy)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// P7: any bytes give an error or a device that works.
    #[test]
    fn any_pool_bytes_are_refused_or_served(
        spoils in prop::collection::vec((0_u64..29 * 4096 - 16, any::<[u8; 16]>()), 1..12),
        headers in prop::collection::vec((0_u32..18, 0_u64..56, any::<u8>()), 0..6),
    ) {
        let region = pool(18);
        let device = open(&region, &memory());
        (0..24).for_each(|page| write(&device, page % 12, 3));
        drop(device);
        let region = copy_of(&region);
        let places = places(&region);
        for (offset, bytes) in spoils {
            region.write(offset.min(region.len_bytes() - 16), &bytes).unwrap();
        }
        for (slot, at, byte) in headers {
            region.write(places.header(slot) + at, &[byte]).unwrap();
        }
        let _ = check(&region);
        let opened =
            CacheDevice::open(Arc::clone(&region), memory() as _, binding(), NO_THREAD);
        if let Ok(device) = opened {
            let mut data = [0; 4096];
            (0..12).for_each(|page| drop(device.read(page * PAGE_BYTES, &mut data)));
            let _ = device.clean_all();
            drop(device.write(0, &[1; 4096], WriteFlags::default()));
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write { first: u64, count: u64, seed: u64, fua: bool },
    Read { first: u64, count: u64 },
    Zero { first: u64, count: u64 },
    Discard { first: u64, count: u64 },
    Flush,
    Background,
    Clean,
    Purge,
    SetMode(Mode),
    Set(&'static str, &'static str),
    Reopen,
    Heal,
    Break,
}

/// Settings that change what is done and when, and never what is read.
const SETTINGS: &[(&str, &str)] = &[
    ("granularity", "page"),
    ("granularity", "record"),
    ("eviction", "s3fifo"),
    ("eviction", "lru"),
    ("eviction", "lrw"),
    ("eviction", "sieve"),
    ("cleaning", "watermark"),
    ("cleaning", "alru"),
    ("cleaning", "acp"),
    ("cleaning", "nop"),
    ("alru.wake-up-s", "0"),
    ("acp.wake-up-ms", "0"),
    ("clean-from-pct", "10"),
    ("promotion", "always"),
    ("promotion", "nhit"),
    ("nhit.trigger-pct", "0"),
    ("cutoff", "never"),
    ("cutoff", "always"),
    ("cutoff.threshold", "16K"),
];

fn steps(modes: &'static [Mode]) -> impl Strategy<Value = Vec<Step>> {
    let run = || (0..PAGES).prop_flat_map(|first| (Just(first), 1..=(PAGES - first).min(20)));
    let step = prop_oneof![
        8 => (run(), any::<u64>(), any::<bool>())
            .prop_map(|((first, count), seed, fua)| Step::Write { first, count, seed, fua }),
        8 => run().prop_map(|(first, count)| Step::Read { first, count }),
        1 => run().prop_map(|(first, count)| Step::Zero { first, count }),
        1 => run().prop_map(|(first, count)| Step::Discard { first, count }),
        2 => Just(Step::Flush),
        4 => Just(Step::Background),
        1 => Just(Step::Clean),
        1 => Just(Step::Purge),
        2 => prop::sample::select(modes).prop_map(Step::SetMode),
        1 => prop::sample::select(SETTINGS).prop_map(|(key, value)| Step::Set(key, value)),
        2 => Just(Step::Reopen),
        1 => Just(Step::Heal),
        1 => Just(Step::Break),
    ];
    prop::collection::vec(step, 1..80)
}

/// What a pool of a scene is like.
#[derive(Debug, Clone, Copy)]
struct Shape {
    slots: u64,
    line_bytes: u32,
    /// The backing's share by cost.
    backing_share_pct: Option<u32>,
}

impl Shape {
    fn open(&self, region: &Arc<Region>, fault: &Arc<Fault>) -> CacheDevice {
        let backing_share_pct = self.backing_share_pct;
        let options = CacheDeviceOptions { backing_share_pct, ..NO_THREAD };
        CacheDevice::open(Arc::clone(region), Arc::clone(fault) as _, binding(), options).unwrap()
    }
}

/// A device with all that a step may change. Steps count its blocks.
struct Scene {
    shape: Shape,
    block_bytes: u64,
    region: Arc<Region>,
    fault: Arc<Fault>,
    device: CacheDevice,
    model: Model,
}

impl Scene {
    /// With blocks of the size `blocks.0`, before a backing with blocks of the size `blocks.1`.
    fn new(shape: Shape, mode: Mode, blocks: (u32, u32)) -> Self {
        let Shape { slots, line_bytes, .. } = shape;
        let options = CacheOptions { block_bytes: blocks.0, line_bytes, ..Default::default() };
        let region = pool_as(slots, &options, &RegionOptions::default());
        let fault = Arc::new(Fault::new(memory_of(blocks.1), 7));
        let device = shape.open(&region, &fault);
        device.set_mode(mode).unwrap();
        let model = Model::of(&device);
        Self { shape, block_bytes: blocks.0.into(), region, fault, device, model }
    }

    fn take(&mut self, step: &Step) {
        let (device, block) = (&self.device, self.block_bytes);
        let bytes = |blocks: u64| usize::try_from(blocks * block).unwrap();
        match *step {
            Step::Write { first, count, seed, fua } => {
                let mut data = vec![0; bytes(count)];
                conformance::fill(&mut data, seed);
                let result = device.write(first * block, &data, WriteFlags { fua });
                self.model.wrote(first * block, &data, &result);
            }
            Step::Read { first, count } => {
                let mut found = vec![0; bytes(count)];
                if device.read(first * block, &mut found).is_ok() {
                    self.model.read(first * block, &found);
                }
            }
            Step::Zero { first, count } => {
                let (offset, len) = (first * block, count * block);
                let result = device.write_zeroes(offset, len, ZeroFlags::default());
                self.model.wrote(offset, &vec![0; bytes(count)], &result);
            }
            Step::Discard { first, count } => {
                let (offset, len) = (first * block, count * block);
                let _ = device.discard(offset, len);
                self.model.discarded(offset, len);
            }
            Step::Flush => drop(device.flush()),
            Step::Background => {
                device.background().step();
            }
            Step::Clean => drop(device.clean_all()),
            Step::Purge => {
                let is_purged = device.purge().is_ok();
                assert!(!is_purged || device.core.pages.usage() == Usage::default());
            }
            Step::SetMode(mode) => device.set_mode(mode).unwrap(),
            Step::Set(key, value) => device.set(key, value).unwrap(),
            Step::Reopen => self.device = self.shape.open(&self.region, &self.fault),
            Step::Heal => self.fault.heal(),
            Step::Break => {
                for effect in [
                    Effect::Fail(DeviceErrorKind::Io),
                    Effect::Short { blocks: 1, kind: DeviceErrorKind::Io },
                ] {
                    self.fault.add(Rule::new(&[], When::Chance(200_000), effect));
                }
            }
        }
    }

    /// All that was acknowledged is there, before and after the cache is emptied.
    fn finish(mut self) {
        self.fault.heal();
        let all = Step::Read { first: 0, count: PAGES * PAGE_BYTES / self.block_bytes };
        self.take(&all);
        self.device.clean_all().unwrap();
        self.take(&all);
        self.take(&Step::Reopen);
        self.take(&all);
        let mut found = vec![0; usize::try_from(PAGES * PAGE_BYTES).unwrap()];
        self.fault.read(0, &mut found).unwrap();
        self.model.read(0, &found);
        assert_eq!(check(&self.region).unwrap().findings, Vec::<String>::new());
    }
}

fn compare(shape: Shape, mode: Mode, blocks: (u32, u32), steps: &[Step]) {
    let mut scene = Scene::new(shape, mode, blocks);
    for step in steps {
        scene.take(step);
    }
    scene.finish();
}

fn shapes() -> impl Strategy<Value = Shape> {
    let slots = prop::sample::select(&[16, 40, 300][..]);
    let lines = prop::sample::select(&[4 << 10, 16 << 10, 64 << 10][..]);
    let share = prop::option::weighted(0.3, prop::sample::select(&[50, 100][..]));
    (slots, lines, share).prop_map(|(slots, line_bytes, backing_share_pct)| Shape {
        slots,
        line_bytes,
        backing_share_pct,
    })
}

macro_rules! models {
    ($($name:ident: $mode:expr, $modes:expr, $blocks:expr;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(shape in shapes(), steps in steps($modes)) {
                    compare(shape, $mode, $blocks, &steps);
                }
            )*
        }
    };
}

models! {
    wb_is_a_map_of_blocks: Mode::WriteBack, &[Mode::WriteBack], (4096, 4096);
    wt_is_a_map_of_blocks: Mode::WriteThrough, &[Mode::WriteThrough], (4096, 4096);
    wa_is_a_map_of_blocks: Mode::WriteAround, &[Mode::WriteAround], (4096, 4096);
    wi_is_a_map_of_blocks: Mode::WriteInvalidate, &[Mode::WriteInvalidate], (4096, 4096);
    wo_is_a_map_of_blocks: Mode::WriteOnly, &[Mode::WriteOnly], (4096, 4096);
    pt_is_a_map_of_blocks: Mode::PassThrough, &[Mode::PassThrough], (4096, 4096);
    modes_in_turn_are_a_map_of_blocks: Mode::WriteBack, Mode::ALL, (4096, 4096);
    wb_is_a_map_of_small_blocks: Mode::WriteBack, &[Mode::WriteBack], (512, 4096);
    wt_is_a_map_of_small_blocks: Mode::WriteThrough, &[Mode::WriteThrough], (512, 4096);
    small_blocks_over_large_ones_are_a_map: Mode::WriteBack, Mode::ALL, (512, 4096);
    small_blocks_over_small_ones_are_a_map: Mode::WriteBack, Mode::ALL, (512, 512);
}

/// Threads that write, read and clean at once, in a cache for few of their pages.
#[test]
fn threads_side_by_side_see_their_own_writes() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteInvalidate] {
        let (region, backing) = (pool(40), memory());
        let options = CacheDeviceOptions { clean_from_pct: Some(20), ..Default::default() };
        let device =
            CacheDevice::open(region, Arc::clone(&backing) as _, binding(), options).unwrap();
        device.set_mode(mode).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let device = &device;
                scope.spawn(move || {
                    for round in 0..1500_u64 {
                        let page = thread + 3 * (round * 31 % 40);
                        let byte = u8::try_from(round % 251).unwrap();
                        write(device, page, byte);
                        assert_eq!(read(device, page), byte, "{mode}, page {page}");
                    }
                });
            }
            scope.spawn(|| (0..30).for_each(|_| device.clean_all().unwrap()));
        });
        device.shutdown().unwrap();
        (0..PAGES).for_each(|page| assert_eq!(read(&device, page), read(&*backing, page)));
    }
}

/// Writers that do not stop keep pages dirty; a flush ends all the same, and has what was written
/// before it.
#[test]
fn a_flush_ends_while_writers_go_on() {
    const LIMIT: Duration = Duration::from_secs(60);
    let backing = memory();
    let device = CacheDevice::open(pool(300), backing.clone(), binding(), NO_THREAD).unwrap();
    (0..PAGES).for_each(|page| write(&device, page, 1));
    let (is_over, rounds) = (StdAtomicBool::new(false), StdAtomicU64::new(0));
    let is_ended = std::thread::scope(|scope| {
        for first in 0..2 {
            let (device, is_over, rounds) = (&device, &is_over, &rounds);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    (first..64).step_by(2).for_each(|page| write(device, page, 2));
                    rounds.fetch_add(1, Ordering::Release);
                }
            });
        }
        let (told, ended) = channel();
        scope.spawn(|| {
            while rounds.load(Ordering::Acquire) < 4 {
                std::thread::yield_now();
            }
            let told = told;
            told.send(device.clean_all()).unwrap();
        });
        let ended = ended.recv_timeout(LIMIT);
        // What they write behind it stays.
        let last = rounds.load(Ordering::Acquire) + 4;
        while rounds.load(Ordering::Acquire) < last {
            std::thread::yield_now();
        }
        is_over.store(true, Ordering::Relaxed);
        ended.is_ok_and(|cleaned| cleaned.is_ok())
    });
    assert!(is_ended, "it waits for the writers");
    assert!(device.core.pages.usage().dirty > 0, "they wrote meanwhile");
    (64..PAGES).for_each(|page| assert_eq!(read(&*backing, page), 1));
}

#[test]
fn a_write_around_of_which_a_part_is_cached_leaves_nothing_in_the_cache() {
    for is_dirty in [false, true] {
        let backing = memory();
        let device = open(&pool(32), &backing);
        write(&device, 3, 1);
        if !is_dirty {
            device.clean_all().unwrap();
        }
        device.set_mode(Mode::WriteAround).unwrap();
        device.write(2 * PAGE_BYTES, &[2; 3 * 4096], WriteFlags::default()).unwrap();
        assert_eq!(device.core.pages.usage(), Usage::default(), "dirty before: {is_dirty}");
        (2..5).for_each(|page| assert_eq!((read(&*backing, page), read(&device, page)), (2, 2)));
    }
}

#[test]
fn headers_are_one_line_each() {
    assert_eq!(HEADER_BYTES, 64);
    let places = Places::fitting(4096, 1 << 20);
    assert_eq!(places.header(1) - places.header(0), 64);
    assert!(places.header(0).is_multiple_of(64) && places.data(0).is_multiple_of(4096));
}

/// A flush of the backing costs as much for the pages of one shard as for those of all.
#[test]
fn one_batch_makes_free_slots_in_all_full_shards() {
    let pages = 2 * SHARDED;
    let backing = Arc::new(MemoryDevice::new(4096, pages).unwrap());
    let binding = Binding { pages, ..binding() };
    let device = CacheDevice::open(pool(SHARDED), backing, binding, NO_THREAD).unwrap();
    let core = &device.core;
    let has_slot = |page: &u64| core.pages.shard(*page).allocator.available() > 0;
    for page in 0..pages {
        if has_slot(&page) {
            write(&device, page, 1);
        }
    }
    let full = |number: &usize| core.pages.shards.lock(*number).allocator.available() == 0;
    let count = core.pages.shards.count();
    assert!(count > 1 && (0..count).all(|number| full(&number)));
    assert_eq!(device.background().step(), Progress::Again);
    assert_eq!((0..count).filter(full).count(), 0);
    assert!(core.pages.counters.get(counters::Counter::CoreWrites) <= 512, "it was one batch");
    assert!(core.pages.needy_shards().is_empty(), "and its pages do not count as leaving any more");
}
