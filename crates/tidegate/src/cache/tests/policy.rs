//! The policies in the engine: each choice does what it says, online and after an open.

use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use super::{NO_THREAD, PAGES, binding, memory, memory_of, open, pool, pool_of, read, work, write};
use crate::cache::check::check;
use crate::cache::pages::index::Shard;
use crate::cache::policy::{REPLACEMENTS, ReplacementEntry};
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceErrorKind, Op};
use crate::tier::Tier;
use crate::tier::clock::advance;

fn setting(device: &CacheDevice, key: &str) -> String {
    device.settings().into_iter().find(|it| it.key == key).unwrap().value
}

/// Pages that are cached.
fn cached(device: &CacheDevice, pages: Range<u64>) -> Vec<u64> {
    pages.filter(|page| device.core.pages.find(*page).is_some()).collect()
}

#[test]
fn a_slot_takes_at_most_32_bytes_of_dram() {
    const SLOTS: u32 = 2000;
    for entry in &REPLACEMENTS {
        let sharding = Sharding { count: 1, ..Sharding::default() };
        let shard = Shard::new(0, sharding, SLOTS, entry);
        let bytes = shard.bytes() + entry.slot_bytes * SLOTS as usize;
        assert!(bytes <= 32 * SLOTS as usize, "{}: {bytes} bytes", entry.name);
    }
}

#[test]
fn the_policy_of_eviction_is_chosen_online_and_kept() {
    let (region, backing) = (pool(40), memory());
    let device = open(&region, &backing);
    assert_eq!(setting(&device, "eviction"), "s3fifo");
    device.set("eviction", "lru").unwrap();
    let error = device.set("eviction", "fifo").unwrap_err().to_string();
    assert!(error.contains("expected one of s3fifo, lru, lrw, sieve"), "{error}");
    drop(device);
    let device = open(&region, &backing);
    assert_eq!(setting(&device, "eviction"), "lru");
    device.set("eviction", "s3fifo").unwrap();
    assert_eq!(CacheHeader::read(&region).unwrap().settings, "", "the default is not written");
}

/// The pages that leave first after pages 0 to 35 were written, page 0 read, and then others.
fn evicted_first(entry: &ReplacementEntry, later: bool) -> Vec<u64> {
    let device = open(&pool(40), &memory());
    if !later {
        device.set("eviction", entry.name).unwrap();
    }
    (0..36).for_each(|page| write(&device, page, 1));
    device.clean_all().unwrap();
    (0..3).for_each(|_| assert_eq!(read(&device, 0), 1));
    if later {
        device.set("eviction", "lru").unwrap();
        device.set("eviction", entry.name).unwrap();
    }
    device.core.background.cleaners.evict_clean(0).unwrap();
    let there = cached(&device, 0..36);
    (0..36).filter(|page| !there.contains(page)).collect()
}

#[test]
fn reads_count_where_the_policy_counts_them() {
    for entry in &REPLACEMENTS {
        let first = evicted_first(entry, false);
        let expected = if entry.name == "lrw" { 0..4 } else { 1..5 };
        assert_eq!(first, expected.collect::<Vec<_>>(), "{}", entry.name);
    }
}

#[test]
fn another_policy_begins_with_the_order_of_the_one_before() {
    for entry in &REPLACEMENTS {
        assert_eq!(evicted_first(entry, true), (1..5).collect::<Vec<_>>(), "{}", entry.name);
    }
}

#[test]
fn a_setting_that_is_not_known_is_refused_until_it_is_repaired() {
    let (region, backing) = (pool(40), memory());
    write(&open(&region, &backing), 3, 7);
    let mut header = CacheHeader::read(&region).unwrap();
    header.settings = "eviction=lru\neviction=oracle\n".into();
    header.write(&region).unwrap();
    let opened = CacheDevice::open(Arc::clone(&region), backing.clone(), binding(), NO_THREAD);
    let error = opened.map(drop).unwrap_err();
    assert!(matches!(&error, CacheError::Setting { setting } if setting == "eviction=oracle"));
    assert_eq!(check(&region).unwrap().faults, 1);
    let lines = engine::repair_headers(&region).unwrap();
    assert_eq!(lines, ["dropped the settings eviction=oracle"]);
    assert_eq!(check(&region).unwrap().faults, 0);
    let device = open(&region, &backing);
    assert_eq!((read(&device, 3), setting(&device, "eviction").as_str()), (7, "lru"));
    work(&device);
}

const SECOND_NS: u64 = 1_000_000_000;

fn dirty(device: &CacheDevice) -> u64 {
    device.core.pages.usage().dirty
}

/// A device with `settings` and `slots` slots.
fn device_with(slots: u64, settings: &[(&str, &str)]) -> CacheDevice {
    let device = open(&pool(slots), &memory());
    for (key, value) in settings {
        device.set(key, value).unwrap();
    }
    device
}

#[test]
fn watermark_cleans_while_more_than_its_part_is_dirty() {
    let device = device_with(100, &[("clean-from-pct", "20"), ("eviction", "lru")]);
    (0..20).for_each(|page| write(&device, page, 1));
    work(&device);
    assert_eq!(dirty(&device), 20);
    write(&device, 20, 1);
    work(&device);
    assert_eq!(dirty(&device), 0);
}

/// Numbers of pages below `count`: that of rank k in proportion to 1/k^0.99, the ranks scattered.
fn zipf(count: u32) -> impl Iterator<Item = u64> {
    let weights = (1..=count).scan(0.0, |sum, rank| {
        *sum += f64::from(rank).powf(-0.99);
        Some(*sum)
    });
    let sums: Vec<f64> = weights.collect();
    let all = sums[sums.len() - 1];
    let mut random = 1_u64;
    std::iter::repeat_with(move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = f64::from(u32::try_from(random >> 32).unwrap()) / f64::from(u32::MAX) * all;
        sums.partition_point(|sum| *sum < at) as u64 * 40_503 % u64::from(count)
    })
}

/// How many pages the backing gets while a cache with `settings` takes this workload: a cache of a
/// fifth of the disk, pages that are written again and again.
fn pages_written_back(settings: &[(&str, &str)]) -> u64 {
    const DISK_PAGES: u32 = 65_536;
    let backing = Arc::new(NullDevice::new(4096, DISK_PAGES.into()).unwrap());
    let binding = Binding { pages: DISK_PAGES.into(), ..binding() };
    let device = CacheDevice::open(pool(13_000), backing, binding, NO_THREAD).unwrap();
    for (key, value) in [("by-content", "off")].iter().chain(settings) {
        device.set(key, value).unwrap();
    }
    for (round, page) in zipf(DISK_PAGES).take(60_000).enumerate() {
        write(&device, page, 1);
        if round % 16 == 0 {
            work(&device);
        }
    }
    device.core.pages.counters.get(Counter::CoreWrites)
}

#[test]
fn watermark_cleans_what_is_evicted_next() {
    let device = device_with(100, &[("clean-from-pct", "90"), ("eviction", "lru")]);
    (0..90).for_each(|page| write(&device, page, 1));
    (0..10).for_each(|page| write(&device, page, 2));
    work(&device);
    assert_eq!(dirty(&device), 90);
    write(&device, 90, 1);
    work(&device);
    let is_clean = |page: &u64| device.core.pages.find(*page).is_some_and(|found| !found.dirty);
    let clean: Vec<u64> = (0..91).filter(is_clean).collect();
    assert_eq!(clean, (10..30).collect::<Vec<_>>());
}

/// `nop` writes each page when it leaves. What the default writes more is what it has cleaned at
/// the end, and what was written again meanwhile.
#[test]
fn cleaning_writes_pages_back_hardly_more_often_than_they_leave() {
    let [default, least] = [&[][..], &[("cleaning", "nop")]].map(pages_written_back);
    assert!(default * 100 <= least * 112, "{default} pages, with nop {least}");
}

#[test]
fn alru_cleans_what_is_stale_when_clients_rest() {
    let settings = [
        ("cleaning", "alru"),
        ("alru.wake-up-s", "1"),
        ("alru.staleness-time-s", "10"),
        ("alru.activity-threshold-ms", "3000"),
    ];
    let device = device_with(100, &settings);
    let dirty_after = |seconds: u64| {
        (0..seconds).for_each(|_| {
            advance(SECOND_NS);
            work(&device);
        });
        dirty(&device)
    };
    write(&device, 1, 1);
    assert_eq!(dirty_after(9), 1, "not stale yet");
    write(&device, 2, 1);
    assert_eq!(dirty_after(2), 2, "clients do not rest");
    assert_eq!(dirty_after(2), 1, "page 2 is not stale");
    assert_eq!(dirty_after(9), 0);
}

#[test]
fn a_policy_hears_of_pages_that_were_dirty_before_it_was_chosen() {
    for cleaning in ["alru", "acp"] {
        let device = device_with(100, &[("alru.staleness-time-s", "1")]);
        (0..30).for_each(|page| write(&device, page, 1));
        device.set("cleaning", cleaning).unwrap();
        for _ in 0..8 {
            advance(20 * SECOND_NS);
            work(&device);
        }
        assert_eq!(dirty(&device), 0, "{cleaning}");
    }
}

#[test]
fn acp_cleans_neighbours_of_all_shards_together() {
    const RUN: u64 = 512;
    let memory = Arc::new(MemoryDevice::new(4096, 8192).unwrap());
    let fault = Arc::new(Fault::new(memory, 1));
    let binding = Binding { pages: 8192, ..binding() };
    let device =
        CacheDevice::open(pool(4300), Arc::clone(&fault) as _, binding, NO_THREAD).unwrap();
    assert!(device.core.pages.shards.count() > 1);
    device.set("cleaning", "acp").unwrap();
    (0..RUN).for_each(|page| write(&device, 1000 + page, 1));
    // A MiB is 256 pages; a batch may end within the run.
    fault.add(Rule::new(&[Op::Write], When::From(7), Effect::Fail(DeviceErrorKind::Io)));
    for _ in 0..8 {
        advance(SECOND_NS);
        work(&device);
    }
    assert_eq!(dirty(&device), 0);
}

#[test]
fn with_nop_writers_that_find_no_slot_get_one() {
    for no_thread in [true, false] {
        let backing = memory();
        let options = CacheDeviceOptions { no_thread, ..CacheDeviceOptions::default() };
        let device = CacheDevice::open(pool(40), backing.clone(), binding(), options).unwrap();
        device.set("cleaning", "nop").unwrap();
        (0..30).for_each(|page| write(&device, page, 1));
        assert_eq!(dirty(&device), 30, "nothing is cleaned ahead of need");
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let device = &device;
                scope.spawn(move || {
                    (0..300).for_each(|round| write(device, (thread * 300 + round * 7) % PAGES, 2));
                });
            }
        });
        (0..PAGES).for_each(|page| assert!(read(&device, page) <= 2));
        device.shutdown().unwrap();
        (0..PAGES).for_each(|page| assert_eq!(read(&device, page), read(&*backing, page)));
    }
}

#[test]
fn a_rate_limits_cleaning_ahead_of_need_and_no_writer() {
    let settings = [("clean-from-pct", "0"), ("eviction", "lru"), ("cleaning-rate", "80K")];
    let device = device_with(40, &settings);
    (0..20).for_each(|page| write(&device, page, 1));
    work(&device);
    assert_eq!(dirty(&device), 0, "the first batch is free");
    (0..10).for_each(|page| write(&device, page, 1));
    work(&device);
    assert_eq!(dirty(&device), 10, "20 pages are the bytes of a second");
    advance(SECOND_NS);
    work(&device);
    assert_eq!(dirty(&device), 0);
    (0..PAGES).for_each(|page| write(&device, page, 3));
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 3));
}

#[test]
fn cleaning_that_waits_for_its_time_is_no_rest_from_other_work() {
    let options = CacheDeviceOptions::default();
    let device = CacheDevice::open(pool(100), memory(), binding(), options).unwrap();
    device.set("cleaning", "alru").unwrap();
    device.core.pages.waker.await_all_idle();
    for page in 0..20 {
        read(&device, page);
        device.core.pages.waker.await_all_idle();
        assert!(device.core.pages.find(page).is_some(), "page {page} is kept");
    }
}

/// Pages that the backing has with `byte`.
fn below(backing: &MemoryDevice, byte: u8) -> Vec<u64> {
    (0..PAGES).filter(|page| read(backing, *page) == byte).collect()
}

#[test]
fn a_long_stream_of_writes_goes_around_the_cache_in_every_mode_that_caches_writes() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteOnly] {
        let backing = memory();
        let device = open(&pool(300), &backing);
        device.set_mode(mode).unwrap();
        write(&device, 8, 1);
        for (key, value) in [("cutoff", "always"), ("cutoff.threshold", "16K")] {
            device.set(key, value).unwrap();
        }
        (0..12).for_each(|page| write(&device, page, 2));
        (0..12).for_each(|page| assert_eq!(read(&device, page), 2, "{mode}"));
        // The fourth reaches the threshold; page 8 is a hit.
        assert_eq!(cached(&device, 0..PAGES), [0, 1, 2, 8], "{mode}");
        if mode != Mode::WriteThrough {
            assert_eq!(below(&backing, 2), [3, 4, 5, 6, 7, 9, 10, 11], "{mode}");
        }
        assert!(device.core.backing.traffic.needs_flush());
        device.flush().unwrap();
        assert!(!device.core.backing.traffic.needs_flush());
        write(&device, 50, 2);
        assert!(device.core.pages.find(50).is_some(), "another stream");
    }
}

/// Requests of a stream seldom begin and end where pages do.
#[test]
fn a_stream_of_parts_of_pages_is_as_long_as_its_bytes() {
    for len in [512, 1536, 5120] {
        let backing = memory_of(512);
        let device = open(&pool_of(300, 512), &backing);
        for (key, value) in [("cutoff", "always"), ("cutoff.threshold", "16K")] {
            device.set(key, value).unwrap();
        }
        for at in (0..32 << 10).step_by(len) {
            device.write(at, &vec![2; len], WriteFlags::default()).unwrap();
        }
        // The request that reaches the threshold goes around the cache, and what follows misses.
        let first_around = (16 << 10) / len as u64 * len as u64;
        let pages = first_around.div_ceil(PAGE_BYTES);
        let expected: Vec<u64> = (0..pages).collect();
        assert_eq!(cached(&device, 0..PAGES), expected, "requests of {len} bytes");
    }
}

/// Each queue has streams of its own, and continues those of another one only after some requests.
#[test]
fn a_stream_is_one_queues_until_it_is_promoted() {
    for (promotion, expected) in [("8", [0, 1, 2, 3].as_slice()), ("3", &[0, 1, 2])] {
        let device = open(&pool(300), &memory());
        for (key, value) in
            [("cutoff", "always"), ("cutoff.threshold", "16K"), ("cutoff.promotion", promotion)]
        {
            device.set(key, value).unwrap();
        }
        let write = |queue: u32, page: u64| {
            let range = (page * PAGE_BYTES, PAGE_BYTES);
            let route = device.core.router.route(queue, Some(Kind::Write), range).unwrap();
            device.core.write(&route, &[1; PAGE], false).unwrap();
        };
        (0..3).for_each(|page| write(1, page));
        // The fourth request of the stream comes by the other queue.
        write(2, 3);
        assert_eq!(cached(&device, 0..PAGES), expected, "promotion after {promotion}");
    }
}

/// What users of Open CAS rely on without setting it; `cleaning` and `cutoff` are our own choice.
#[test]
fn defaults_are_those_of_open_cas() {
    let device = open(&pool(40), &memory());
    for (key, value) in [
        ("alru.wake-up-s", "20"),
        ("alru.staleness-time-s", "120"),
        ("alru.flush-max-buffers", "100"),
        ("alru.activity-threshold-ms", "10000"),
        ("alru.dirty-ratio-threshold-pct", "100"),
        ("alru.dirty-ratio-inertia", "128M"),
        ("acp.wake-up-ms", "10"),
        ("acp.flush-max-buffers", "128"),
        ("promotion", "always"),
        ("nhit.threshold", "3"),
        ("nhit.trigger-pct", "80"),
        ("cutoff.threshold", "1M"),
        ("cutoff.promotion", "8"),
        ("cutoff.promote-on-threshold", "no"),
        ("pt-error-threshold", "0"),
        ("io-classes", "none"),
    ] {
        assert_eq!(setting(&device, key), value, "{key}");
    }
    assert_eq!(device.core.pages.sharding.cluster.bytes(), 4096, "line size");
}

/// What a write takes there: of the time that really passes meanwhile nothing depends.
const SLOW_NS: u64 = 60 * SECOND_NS;

/// A backing on which each write takes [`SLOW_NS`] of the writing thread's clock.
struct Slow(Arc<MemoryDevice>);

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        if matches!(operation, Operation::Write { .. }) {
            advance(SLOW_NS);
        }
        self.0.run(operation)
    }
}

/// Without a request at the backing the next batch follows at once; beside one it waits for as
/// long as the batch before took.
#[test]
fn a_batch_of_cleaning_is_followed_by_a_rest_while_requests_are_at_the_backing() {
    let fault = Arc::new(Fault::new(Arc::new(Slow(memory())), 1));
    let options = CacheDeviceOptions { clean_from_pct: Some(0), ..Default::default() };
    let device = CacheDevice::open(pool(300), Arc::clone(&fault) as _, binding(), options).unwrap();
    // A device that was opened with threads yields; from now on this thread is its worker.
    device.stop_thread();
    let clean = |page: u64| {
        write(&device, page, 1);
        work(&device);
        dirty(&device)
    };
    assert_eq!([0, 2, 4].map(clean), [0, 0, 0], "nobody waits for the backing");
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Hang));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&device, 100));
        fault.wait_until_hung(1);
        let found = [clean(6), clean(8), clean(10)];
        advance(2 * SLOW_NS);
        work(&device);
        let rested = dirty(&device);
        fault.heal();
        fault.release();
        assert_eq!((found, rested), ([0, 1, 2], 0));
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn a_write_that_is_cut_off_is_divided_by_what_is_cached() {
    let backing = memory();
    let device = open(&pool(300), &backing);
    for page in [3, 4, 7] {
        write(&device, page, 1);
    }
    for (key, value) in [("cutoff", "always"), ("cutoff.threshold", "16K")] {
        device.set(key, value).unwrap();
    }
    write(&device, 0, 2);
    device.write(PAGE_BYTES, &vec![2; 9 * 4096], WriteFlags::default()).unwrap();
    (0..10).for_each(|page| assert_eq!(read(&device, page), 2));
    assert_eq!(cached(&device, 0..PAGES), [0, 3, 4, 7]);
    assert_eq!(below(&backing, 2), [1, 2, 5, 6, 8, 9]);
}

#[test]
fn a_long_stream_of_reads_is_not_kept_and_its_hits_are_served() {
    let backing = memory();
    backing.write(0, &vec![5; 64 * 4096], WriteFlags::default()).unwrap();
    let device = open(&pool(300), &backing);
    for (key, value) in [("cutoff", "always"), ("cutoff.threshold", "16K")] {
        device.set(key, value).unwrap();
    }
    write(&device, 8, 6);
    (0..12).for_each(|page| {
        assert_eq!(read(&device, page), if page == 8 { 6 } else { 5 });
        work(&device);
    });
    assert_eq!(cached(&device, 0..PAGES), [0, 1, 2, 8]);
}

#[test]
fn full_cuts_streams_off_only_while_the_cache_is_full() {
    let device = open(&pool(60), &memory());
    for (key, value) in [("cutoff", "full"), ("cutoff.threshold", "8K")] {
        device.set(key, value).unwrap();
    }
    (0..50).for_each(|page| write(&device, page, 1));
    assert_eq!(cached(&device, 0..50).len(), 50);
    (50..100).for_each(|page| write(&device, page, 1));
    let found = cached(&device, 50..100).len();
    assert!((4..8).contains(&found), "{found} pages of the stream are cached");
}

#[test]
fn nhit_caches_a_page_at_its_third_miss_by_reads_and_writes() {
    let backing = memory();
    let device = open(&pool(300), &backing);
    for (key, value) in [("promotion", "nhit"), ("nhit.trigger-pct", "0")] {
        device.set(key, value).unwrap();
    }
    for (round, byte) in (1..=3).zip(1..) {
        write(&device, 5, byte);
        assert_eq!(read(&*backing, 5), byte.min(2), "write {round}");
        assert_eq!(device.core.pages.find(5).is_some(), round == 3);
    }
    device.flush().unwrap();
    for round in 1..=3 {
        read(&device, 6);
        work(&device);
        assert_eq!(device.core.pages.find(6).is_some(), round == 3, "read {round}");
    }
}

#[test]
fn an_attempt_that_is_handed_back_is_counted_once() {
    let device = open(&pool(300), &memory());
    for (key, value) in [("promotion", "nhit"), ("nhit.trigger-pct", "0")] {
        device.set(key, value).unwrap();
    }
    for round in 1..=3 {
        let data = [round; 4096];
        let flags = WriteFlags::default();
        let mut operation = Operation::Write { offset: 0, data: &data, flags };
        let attempt = device.attempt(&mut operation, Context::default());
        assert!(matches!(attempt, Attempt::WouldBlock));
        write(&device, 0, round);
        assert_eq!(device.core.pages.find(0).is_some(), round == 3, "write {round}");
    }
    let flags = WriteFlags::default();
    let mut operation = Operation::Write { offset: 0, data: &[9; 4096], flags };
    let attempt = device.attempt(&mut operation, Context::default());
    assert!(matches!(attempt, Attempt::Done(Ok(()))), "a hit");
}

/// Spoils the data of `page` in `region`, and opens it again.
fn with_damage(region: &Arc<Region>, backing: &Arc<MemoryDevice>, pages: [u64; 2]) -> CacheDevice {
    let device = open(region, backing);
    let slots = pages.map(|page| device.core.pages.find(page).unwrap().slot);
    drop(device);
    for slot in slots {
        let at = CacheHeader::read(region).unwrap().places.data(slot);
        region.write(at + 100, &[0xFF]).unwrap();
    }
    open(region, backing)
}

#[test]
fn too_many_errors_have_all_pass_through_and_dirty_damage_stays_an_error() {
    let (region, backing) = (pool(40), memory());
    let device = open(&region, &backing);
    device.set("pt-error-threshold", "2").unwrap();
    write(&device, 1, 1);
    device.clean_all().unwrap();
    (2..6).for_each(|page| write(&device, page, 2));
    drop(device);
    let device = with_damage(&region, &backing, [1, 2]);
    let error_of = |page: u64| device.read(page * PAGE_BYTES, &mut [0; 4096]).unwrap_err().kind();
    assert_eq!(read(&device, 1), 1, "the first error, which the backing answers");
    write(&device, 10, 3);
    assert_eq!(read(&*backing, 10), 0);
    assert_eq!(error_of(2), DeviceErrorKind::Corrupt, "the second");
    write(&device, 11, 3);
    assert_eq!((read(&*backing, 11), device.core.pages.find(11)), (3, None));
    assert_eq!((read(&device, 10), read(&*backing, 10)), (3, 3), "what is dirty is cleaned first");
    assert_eq!((read(&device, 5), error_of(2)), (2, DeviceErrorKind::Corrupt));
    assert!(device.state().lines.iter().any(|line| line.1.starts_with("pt, in place of wb")));
    let mut operation = Operation::Read { offset: 5 * PAGE_BYTES, buf: &mut [0; 4096] };
    assert!(matches!(device.attempt(&mut operation, Context::default()), Attempt::WouldBlock));
    device.set("pt-error-threshold", "2").unwrap();
    write(&device, 12, 4);
    assert_eq!(read(&*backing, 12), 0, "it counts from 0 again");
}

#[test]
fn without_a_threshold_no_number_of_errors_changes_the_mode() {
    let (region, backing) = (pool(40), memory());
    let device = open(&region, &backing);
    (1..3).for_each(|page| write(&device, page, 1));
    drop(device);
    let device = with_damage(&region, &backing, [1, 2]);
    for _ in 0..20 {
        device.read(PAGE_BYTES, &mut [0; 4096]).unwrap_err();
    }
    write(&device, 3, 1);
    assert!(device.core.pages.find(3).is_some());
}

/// Every policy that can be chosen, while requests go on.
#[test]
fn policies_change_beside_requests() {
    let backing = memory();
    let options = CacheDeviceOptions { clean_from_pct: Some(20), ..CacheDeviceOptions::default() };
    let device = CacheDevice::open(pool(40), backing.clone(), binding(), options).unwrap();
    let all = device.settings().into_iter().filter_map(|it| {
        let words = it.help.split_once("one of ")?.1.split_once(';')?.0.to_owned();
        Some(words.split(", ").map(|word| (it.key.clone(), word.to_owned())).collect::<Vec<_>>())
    });
    let all: Vec<_> = all.flatten().collect();
    assert!(all.len() >= 4 + 4 + 2 + 3, "{all:?}");
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..1500_u64 {
                    let (page, byte) = (thread + 2 * (round * 31 % 60), round % 251);
                    let byte = u8::try_from(byte).unwrap();
                    write(device, page, byte);
                    assert_eq!(read(device, page), byte, "page {page}");
                }
            });
        }
        scope.spawn(|| {
            for (key, value) in all.iter().cycle().take(20 * all.len()) {
                device.set(key, value).unwrap();
            }
        });
    });
    device.shutdown().unwrap();
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), read(&*backing, page)));
}

proptest! {
    /// P7: any text is settings, and what is known of it is kept.
    #[test]
    fn any_text_in_the_header_is_parsed(
        text in ".{0,200}",
        known in prop::collection::vec(0_usize..40, 0..6),
    ) {
        let all = Choices::parse("").0.list();
        let known = known.into_iter().filter_map(|at| all.get(at));
        let known: Vec<_> = known.map(|it| format!("{}={}\n", it.key, it.value)).collect();
        let (choices, _) = Choices::parse(&format!("{text}\n{}", known.concat()));
        let (again, unknown) = Choices::parse(&choices.text());
        prop_assert!(unknown.is_empty(), "{unknown:?}");
        prop_assert_eq!(again.list(), choices.list());
    }
}
