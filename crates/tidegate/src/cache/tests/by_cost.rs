//! What the backing serves by cost: what is read is what the cache has, and what is written is as
//! durable.

use std::sync::Arc;

use super::*;
use super::{NO_THREAD, PAGES, binding, memory, open, pool, pool_with, read, write};
use crate::cache::check::check;
use crate::cache::counters::Counter;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::conformance::{self, Promises};
use crate::device::delay::{Delay, Delays};
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceErrorKind, Op};
use crate::pmem::RegionOptions;
use crate::tier::Tier;

/// All that the backing may serve goes there.
const ALL: CacheDeviceOptions = CacheDeviceOptions { backing_share_pct: Some(100), ..NO_THREAD };
const LARGE_PAGES: u64 = 16;

fn open_with(
    region: &Arc<Region>,
    backing: &Arc<impl BlockDevice + 'static>,
    options: CacheDeviceOptions,
) -> CacheDevice {
    CacheDevice::open(Arc::clone(region), Arc::clone(backing) as _, binding(), options).unwrap()
}

fn count(device: &CacheDevice, counter: Counter) -> u64 {
    device.core.pages.counters.get(counter)
}

fn write_large(device: &CacheDevice, first: u64, byte: u8) {
    let data = vec![byte; usize::try_from(LARGE_PAGES).unwrap() * PAGE];
    device.write(first * PAGE_BYTES, &data, WriteFlags::default()).unwrap();
}

#[test]
fn clean_pages_are_read_from_the_backing_and_dirty_ones_from_the_cache() {
    let (region, backing) = (pool(64), memory());
    let device = open_with(&region, &backing, ALL);
    (0..8).for_each(|page| write(&device, page, 7));
    (0..8).for_each(|page| assert_eq!(read(&device, page), 7));
    assert_eq!(count(&device, Counter::ReadsByCost), 0, "all are dirty");
    device.clean_all().unwrap();
    write(&device, 3, 8);
    (0..8).for_each(|page| assert_eq!(read(&device, page), if page == 3 { 8 } else { 7 }));
    assert_eq!(count(&device, Counter::ReadsByCost), 7);
    let mut both = vec![0; 2 * PAGE];
    device.read(2 * PAGE_BYTES, &mut both).unwrap();
    assert_eq!((both[0], both[PAGE]), (7, 8), "one of them is dirty");
}

#[test]
fn a_backing_that_fails_leaves_reads_to_the_cache() {
    let (region, fault) = (pool(64), Arc::new(Fault::new(memory(), 1)));
    let device = open_with(&region, &fault, ALL);
    write(&device, 3, 7);
    device.clean_all().unwrap();
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    assert_eq!(read(&device, 3), 7);
    assert_eq!(count(&device, Counter::ReadsByCost), 0);
}

#[test]
fn large_writes_that_miss_are_in_the_backing_when_they_return() {
    let (region, backing) = (pool(64), memory());
    let device = open_with(&region, &backing, ALL);
    write_large(&device, 16, 5);
    assert_eq!((count(&device, Counter::WritesByCost), device.core.pages.usage().live), (1, 0));
    (16..32).for_each(|page| assert_eq!((read(&*backing, page), read(&device, page)), (5, 5)));
    write(&device, 0, 6);
    assert!(device.core.pages.find(0).is_some_and(|found| found.dirty), "small ones are cached");
    // A dirty page in the middle: its bytes are older, and leave the cache.
    write(&device, 40, 6);
    write_large(&device, 32, 9);
    assert_eq!(device.core.pages.find(40), None);
    (32..48).for_each(|page| assert_eq!(read(&device, page), 9));
    drop(device);
    let device = open(&region, &backing);
    (32..48).for_each(|page| assert_eq!(read(&device, page), 9));
    assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
}

#[test]
fn large_writes_of_pages_that_are_cached_are_cached() {
    let device = open_with(&pool(64), &memory(), ALL);
    write(&device, 16, 1);
    write_large(&device, 16, 5);
    assert_eq!((count(&device, Counter::WritesByCost), device.core.pages.usage().dirty), (0, 16));
    let options = CacheDeviceOptions { atomic_flush: true, ..ALL };
    let device = open_with(&pool(64), &memory(), options);
    write_large(&device, 16, 5);
    assert_eq!(device.core.pages.usage().waiting, 16, "a group is in the cache alone");
}

#[test]
fn nothing_goes_to_the_backing_unless_it_is_set() {
    let device = open(&pool(300), &memory());
    let setting = || device.settings().into_iter().find(|it| it.key == "cost").unwrap().value;
    assert_eq!(setting(), "off");
    assert_eq!(device.core.router.by_cost.in_words(), None);
    device.set("cost", "auto").unwrap();
    assert_eq!(
        (setting(), device.core.router.by_cost.in_words()),
        ("auto".into(), Some("nothing".into()))
    );
    let words = device.state().details["by_cost"].clone();
    assert_eq!(words, "nothing");
    device.set("cost", "never").unwrap_err();
    device.set("cost", "off").unwrap();
    write_large(&device, 16, 5);
    device.clean_all().unwrap();
    (0..200).for_each(|_| assert_eq!(read(&device, 17), 5));
    assert_eq!([Counter::ReadsByCost, Counter::WritesByCost].map(|it| count(&device, it)), [0, 0]);
}

/// Large writes that all miss, at most `most` and until `is_done`, with `cost=auto`. Each takes the
/// memory of `slots` slots more than a millisecond.
fn write_by_measured_cost(
    slots: u64,
    backing: Arc<dyn BlockDevice>,
    most: u64,
    is_done: impl Fn(&CacheDevice) -> bool,
) -> CacheDevice {
    let media = "custom,thread_write_bytes_per_s=50000000".parse().unwrap();
    let pool = pool_with(slots, 4096, &RegionOptions { media, ..RegionOptions::default() });
    let binding = Binding { pages: most * LARGE_PAGES, ..binding() };
    let device = CacheDevice::open(pool, backing, binding, NO_THREAD).unwrap();
    device.set("cost", "auto").unwrap();
    for number in 0..most {
        if is_done(&device) {
            break;
        }
        write_large(&device, number * LARGE_PAGES, 1);
    }
    device
}

/// From 64 KiB on, by what both devices take and nothing else.
#[test]
fn large_writes_go_to_the_backing_by_themselves_while_the_memory_is_slower() {
    const MOST: u64 = 3000;
    let backing = Arc::new(MemoryDevice::new(4096, MOST * LARGE_PAGES).unwrap());
    let is_shared = |device: &CacheDevice| {
        device.core.router.by_cost.in_words().is_some_and(|it| it != "nothing")
    };
    let device = write_by_measured_cost(300, backing, MOST, |device| {
        is_shared(device) && count(device, Counter::WritesByCost) > 1
    });
    let words = device.core.router.by_cost.in_words().unwrap();
    assert!(words.contains("% of writes from 64K"), "{words}");
    assert!(count(&device, Counter::WritesByCost) > 1, "more than the one that measures");
}

#[test]
fn of_large_writes_a_slow_backing_gets_those_alone_that_measure_it() {
    const MOST: u64 = 150;
    let memory = Arc::new(MemoryDevice::new(4096, MOST * LARGE_PAGES).unwrap());
    let delays = Delays { write_ns: 50_000_000, ..Delays::default() };
    let backing = Arc::new(Delay::new(memory, delays));
    let slots = MOST * LARGE_PAGES + 200;
    let device = write_by_measured_cost(slots, backing, MOST, |device| {
        assert_eq!(device.core.router.by_cost.in_words().as_deref(), Some("nothing"));
        false
    });
    let asked = count(&device, Counter::WritesByCost);
    assert!((1..=2).contains(&asked), "{asked} of {MOST}");
}

/// A request that an attempt hands back for the backing is served there when it is started.
#[test]
fn a_share_of_all_requests_conforms() {
    for backing_share_pct in [Some(50), Some(100)] {
        let options = CacheDeviceOptions { backing_share_pct, ..CacheDeviceOptions::default() };
        let device = open_with(&pool(2 * PAGES), &memory(), options);
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        conformance::check(&*device, Promises::default());
        conformance::check_started(&device, Promises::default());
    }
}

/// Attempts that are handed back, however many, leave the turn to the read that follows.
#[test]
fn an_attempt_hands_the_backings_share_back() {
    for backing_share_pct in [50, 100] {
        let backing_share_pct = Some(backing_share_pct);
        let options = CacheDeviceOptions { backing_share_pct, ..NO_THREAD };
        let device = open_with(&pool(64), &memory(), options);
        write(&device, 3, 7);
        device.clean_all().unwrap();
        let is_done = || {
            let mut buf = vec![0; PAGE];
            let mut operation = Operation::Read { offset: 3 * PAGE_BYTES, buf: &mut buf };
            device.attempt(&mut operation, Context::default()).done().is_some()
        };
        for round in 1..=3 {
            assert!(
                is_done() == (backing_share_pct == Some(50)),
                "the cache's turn, if it has any"
            );
            (0..3).for_each(|_| assert!(!is_done()));
            assert_eq!(count(&device, Counter::ReadsByCost), round - 1);
            assert_eq!(read(&device, 3), 7);
            assert_eq!(count(&device, Counter::ReadsByCost), round);
        }
    }
}
