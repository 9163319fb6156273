//! Atomic flush: what a crash leaves of a group, what a flush costs, and what is refused. A crash
//! is a device that is dropped: what it stored stays, and no flush follows.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use super::{NO_THREAD, PAGES, binding, cost, memory, pool, read, work, write};
use crate::cache::check::check;
use crate::cache::counters::Counter;
use crate::cache::pages::index::Stored;
use crate::cache::policy::REPLACEMENTS;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::memory::MemoryDevice;
use crate::pmem::Counters as Stores;
use crate::tier::Tier;

const ATOMIC: CacheDeviceOptions = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
const FUA: WriteFlags = WriteFlags { fua: true };

fn open(region: &Arc<Region>, backing: &Arc<MemoryDevice>) -> CacheDevice {
    CacheDevice::open(Arc::clone(region), Arc::clone(backing) as _, binding(), ATOMIC).unwrap()
}

fn crash(device: CacheDevice, region: &Arc<Region>, backing: &Arc<MemoryDevice>) -> CacheDevice {
    drop(device);
    open(region, backing)
}

fn early_commits(device: &CacheDevice) -> u64 {
    device.core.pages.counters.get(Counter::GroupsCommittedEarly)
}

#[test]
fn a_flush_costs_one_line_and_one_fence_for_any_number_of_pages() {
    let (region, backing) = (pool(300), memory());
    let device = open(&region, &backing);
    device.set("by-content", "off").unwrap();
    assert!(device.geometry().volatile_cache, "clients are told to flush");
    let flush = |it: &CacheDevice| it.flush().unwrap();
    assert_eq!(cost(&device, flush), Stores::default(), "nothing was written");
    for count in [1, 64, PAGES] {
        let of_writes = Stores {
            stores: 2 * count,
            bytes_streamed: (4096 + 64) * count,
            fences: count,
            ..Stores::default()
        };
        let writes = |it: &CacheDevice| (0..count).for_each(|page| write(it, page, 1));
        assert_eq!(cost(&device, writes), of_writes);
        let of_flush = Stores {
            stores: 2,
            bytes_stored: 16,
            lines_written_back: 1,
            fences: 1,
            ..Stores::default()
        };
        assert_eq!(cost(&device, flush), of_flush, "{count} pages");
        assert_eq!(cost(&device, flush), Stores::default(), "all is committed");
    }
}

#[test]
fn a_crash_takes_back_what_no_flush_covered_and_nothing_else() {
    let (region, backing) = (pool(300), memory());
    let device = open(&region, &backing);
    (0..60).for_each(|page| write(&device, page, 1));
    let device = crash(device, &region, &backing);
    assert_eq!((device.recovered().pages, device.recovered().uncommitted), (0, 60));
    (0..60).for_each(|page| write(&device, page, 2));
    device.flush().unwrap();
    for byte in 3..6 {
        (30..90).for_each(|page| write(&device, page, byte));
    }
    (30..90).for_each(|page| assert_eq!(read(&device, page), 5, "readers see the newest"));
    assert!(check(&region).unwrap().uncommitted_slots >= 60);
    let device = crash(device, &region, &backing);
    (0..90).for_each(|page| assert_eq!(read(&device, page), if page < 60 { 2 } else { 0 }));
    assert_eq!(check(&region).unwrap().uncommitted_slots, 0);
    let device = crash(device, &region, &backing);
    assert_eq!((device.recovered().dirty_pages, device.recovered().uncommitted), (60, 0));
}

#[test]
fn a_fua_write_is_durable_by_itself_between_those_of_a_group() {
    let (region, backing) = (pool(300), memory());
    let device = open(&region, &backing);
    let fua = |it: &CacheDevice, page: u64, byte| {
        it.write(page * PAGE_BYTES, &[byte; 4096], FUA).unwrap();
    };
    (0..4).for_each(|page| write(&device, page, 1));
    device.flush().unwrap();
    (0..4).for_each(|page| write(&device, page, 2));
    (1..4).for_each(|page| fua(&device, page, 3));
    (2..4).for_each(|page| write(&device, page, 4));
    write(&device, 3, 5);
    let all = |it: &CacheDevice| [0, 1, 2, 3].map(|page| read(it, page));
    assert_eq!(all(&device), [2, 3, 4, 5]);
    let device = crash(device, &region, &backing);
    assert_eq!(all(&device), [1, 3, 3, 3]);
    // The page under a FUA write still waits for the group: it goes nowhere before.
    write(&device, 1, 6);
    fua(&device, 1, 7);
    device.clean_all().unwrap();
    assert_eq!(read(&*backing, 1), 0);
    device.flush().unwrap();
    device.clean_all().unwrap();
    assert_eq!((read(&*backing, 1), device.core.pages.usage().waiting), (7, 0));
}

#[test]
fn the_backing_gets_nothing_that_no_flush_covered() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    (0..20).for_each(|page| write(&device, page, 1));
    device.flush().unwrap();
    (0..20).for_each(|page| write(&device, page, 2));
    device.clean_all().unwrap();
    // Reads, fills and evictions beside it.
    for page in 20..PAGES {
        assert_eq!(read(&device, page), 0);
        work(&device);
    }
    (0..20).for_each(|page| assert_eq!(read(&*backing, page), 0));
    device.flush().unwrap();
    (0..20).for_each(|page| write(&device, page, 3));
    device.clean_all().unwrap();
    let device = crash(device, &region, &backing);
    (0..20).for_each(|page| assert_eq!(read(&device, page), 2));
    device.clean_all().unwrap();
    (0..20).for_each(|page| assert_eq!(read(&*backing, page), 2));
}

#[test]
fn a_group_that_fills_the_cache_is_committed_early_and_told() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    // Half of the slots, and the other half for the versions before: seven eighths of that.
    (0..27).for_each(|page| write(&device, page, 1));
    device.flush().unwrap();
    (0..27).for_each(|page| write(&device, page, 2));
    assert_eq!(early_commits(&device), 0);
    let device = crash(device, &region, &backing);
    (0..27).for_each(|page| assert_eq!(read(&device, page), 1));
    (0..PAGES).for_each(|page| write(&device, page, 3));
    let early = early_commits(&device);
    assert!((1..=4).contains(&early), "{early}");
    let lines = format!("{:?}", device.state().lines);
    assert!(lines.contains("of them early"), "{lines}");
    let large = vec![4; 2 * 64 * 4096];
    device.write(0, &large, WriteFlags::default()).unwrap();
    device.flush().unwrap();
    let device = crash(device, &region, &backing);
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 4));
}

/// Pages that wait for a commit may be the first to be evicted, whichever policy says so: a writer
/// finds the others, in pools of all sizes, and however few they are.
#[test]
fn pages_that_wait_for_a_commit_do_not_hide_those_that_can_leave() {
    for entry in &REPLACEMENTS {
        for slots in [24, 32, 48, 64, 96, 128] {
            let (region, backing) = (pool(slots), memory());
            let device = open(&region, &backing);
            device.set("eviction", entry.name).unwrap();
            let can_leave = slots / 4;
            (0..can_leave).for_each(|page| write(&device, page, 1));
            device.flush().unwrap();
            // Used often, so that the others go first.
            for _ in 0..3 {
                (0..can_leave).for_each(|page| assert_eq!(read(&device, page), 1));
            }
            // Seven eighths of the slots at most wait, so none of this commits.
            (can_leave..slots * 7 / 8).for_each(|page| write(&device, page, 2));
            assert_eq!(early_commits(&device), 0, "{} with {slots} slots", entry.name);
        }
    }
}

#[test]
fn zeroes_of_any_length_are_members_and_a_discard_may_leave_pages() {
    let pages = 400;
    let (region, backing) = (pool(600), Arc::new(MemoryDevice::new(4096, pages).unwrap()));
    backing.write(0, &vec![9; 400 * 4096], WriteFlags::default()).unwrap();
    let device = open(&region, &backing);
    write(&device, 3, 1);
    device.flush().unwrap();
    device.write_zeroes(0, pages * PAGE_BYTES, ZeroFlags::default()).unwrap();
    assert_eq!((read(&device, 3), read(&device, 300)), (0, 0));
    let device = crash(device, &region, &backing);
    assert_eq!((read(&device, 3), read(&device, 300)), (1, 9));
    device.discard(0, pages * PAGE_BYTES).unwrap();
    assert_eq!((read(&device, 3), read(&device, 300)), (0, 9));
    let device = crash(device, &region, &backing);
    assert_eq!((read(&device, 3), read(&device, 300)), (1, 9));
    device
        .write_zeroes(0, pages * PAGE_BYTES, ZeroFlags { fua: true, ..ZeroFlags::default() })
        .unwrap();
    let device = crash(device, &region, &backing);
    assert_eq!((read(&device, 3), read(&device, 300)), (0, 0));
}

#[test]
fn modes_that_write_to_the_backing_are_refused() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    for &mode in Mode::ALL {
        let is_atomic = matches!(mode, Mode::WriteBack | Mode::WriteOnly);
        assert_eq!(device.set("mode", mode.name()).is_ok(), is_atomic, "{mode}");
    }
    drop(device);
    let plain =
        CacheDevice::open(Arc::clone(&region), Arc::clone(&backing) as _, binding(), NO_THREAD);
    let plain = plain.unwrap();
    assert_eq!(plain.geometry().volatile_cache, backing.geometry().volatile_cache);
    plain.set_mode(Mode::WriteThrough).unwrap();
    drop(plain);
    let refused = CacheDevice::open(region, backing, binding(), ATOMIC).map(drop).unwrap_err();
    assert!(matches!(refused, CacheError::NotAtomic { mode: Mode::WriteThrough }), "{refused}");
}

#[test]
fn a_device_without_atomic_flush_takes_back_what_one_with_it_left() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    write(&device, 1, 1);
    device.flush().unwrap();
    write(&device, 1, 2);
    drop(device);
    let plain =
        CacheDevice::open(Arc::clone(&region), Arc::clone(&backing) as _, binding(), NO_THREAD);
    let plain = plain.unwrap();
    assert_eq!(read(&plain, 1), 1);
    write(&plain, 1, 3);
    drop(plain);
    let device = open(&region, &backing);
    assert_eq!(read(&device, 1), 3, "durable by itself");
    write(&device, 1, 4);
    device.shutdown().unwrap();
    assert_eq!(read(&*backing, 1), 4, "a server that stops is no crash");
}

#[test]
fn damaged_commit_words_are_refused() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    for byte in 1..=3 {
        write(&device, 1, byte);
        device.flush().unwrap();
    }
    drop(device);
    let at = CacheHeader::read(&region).unwrap().superblock.data_offset + layout::commit_offset(1);
    let mut check_byte = [0];
    region.read(at + 9, &mut check_byte).unwrap();
    region.write(at + 9, &[check_byte[0] ^ 4]).unwrap();
    let refused =
        CacheDevice::open(Arc::clone(&region), Arc::clone(&backing) as _, binding(), ATOMIC);
    assert!(matches!(refused.map(drop), Err(CacheError::CommitWords { .. })));
    assert!(matches!(check(&region), Err(CacheError::CommitWords { .. })));
    region.write(at + 9, &check_byte).unwrap();
    assert_eq!(read(&open(&region, &backing), 1), 3);
}

/// A page that leaves the cache takes its dead slots along, and no retained ones.
#[test]
fn a_page_waits_until_all_slots_that_its_group_replaced_are_dead() {
    let sharding = Sharding { count: 1, ..Sharding::default() };
    let mut shard = Shard::new(0, sharding, 16, &REPLACEMENTS[0]);
    let mut publish = |page, group| {
        let taken = shard.allocator.take().unwrap();
        let stored =
            Stored { dirty: true, zero: false, record: false, over: false, group, class: 0 };
        shard.publish(page, &taken, stored);
    };
    (0..4).for_each(|page| publish(page, 0));
    (0..4).for_each(|page| publish(page, 7));
    // A group that is open while 7 is committed: page 0 waits for it too.
    publish(0, 8);
    let can_be_cleaned = |shard: &Shard, page| shard.can_be_cleaned(&shard.find(page).unwrap());
    while shard.release(7, 1) {
        let retained = shard.usage().retained - 1;
        assert!(retained == 0 || (0..4).all(|page| !can_be_cleaned(&shard, page)));
    }
    assert_eq!((0..4).filter(|page| can_be_cleaned(&shard, *page)).count(), 3);
    assert_eq!((shard.usage().waiting, shard.usage().retained), (1, 1));
    while shard.release(8, 1) {}
    assert!(can_be_cleaned(&shard, 0));
    assert_eq!((shard.usage().waiting, shard.usage().retained), (0, 0));
}

/// A writer numbers its pages in order, round by round, beside flushes of another thread. After a
/// crash the pages are as they were at one moment: a part of a round from the first page on, and
/// the round before it.
#[test]
fn a_crash_beside_writers_and_flushes_leaves_one_moment() {
    for attempt in 0..20 {
        let (region, backing) = (pool(600), memory());
        let options = CacheDeviceOptions { atomic_flush: true, ..Default::default() };
        let device =
            CacheDevice::open(Arc::clone(&region), Arc::clone(&backing) as _, binding(), options)
                .unwrap();
        std::thread::scope(|scope| {
            for first in [0, 64] {
                let device = &device;
                scope.spawn(move || {
                    for round in 1..=10 + attempt {
                        (first..first + 64).for_each(|page| write(device, page, round));
                    }
                });
            }
            let flushes = || (0..50).for_each(|_| device.flush().unwrap());
            scope.spawn(flushes);
            scope.spawn(flushes);
        });
        let device = crash(device, &region, &backing);
        for first in [0, 64] {
            let found: Vec<u8> = (first..first + 64).map(|page| read(&device, page)).collect();
            let whole = found.iter().take_while(|round| **round == found[0]).count();
            let is_one_moment = found[whole..].iter().all(|round| *round + 1 == found[0]);
            assert!(is_one_moment, "{found:?}");
        }
    }
}

#[derive(Debug, Clone)]
enum Act {
    Write { first: u64, count: u64, byte: u8, fua: bool },
    Zero { first: u64, count: u64 },
    Discard { first: u64, count: u64 },
    Flush,
    Background,
    Clean,
    Crash,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let run = || (0..PAGES).prop_flat_map(|first| (Just(first), 1..=(PAGES - first).min(12)));
    let act = prop_oneof![
        8 => (run(), 1_u8.., prop::bool::weighted(0.2))
            .prop_map(|((first, count), byte, fua)| Act::Write { first, count, byte, fua }),
        1 => run().prop_map(|(first, count)| Act::Zero { first, count }),
        1 => run().prop_map(|(first, count)| Act::Discard { first, count }),
        2 => Just(Act::Flush),
        2 => Just(Act::Background),
        1 => Just(Act::Clean),
        1 => Just(Act::Crash),
    ];
    prop::collection::vec(act, 1..60)
}

/// The pages as a read gives them, and as a crash leaves them.
struct Content {
    now: Vec<u8>,
    committed: Vec<u8>,
}

impl Content {
    fn set(&mut self, first: u64, count: u64, byte: u8, fua: bool) {
        let range = usize::try_from(first).unwrap()..usize::try_from(first + count).unwrap();
        self.now[range.clone()].fill(byte);
        if fua {
            self.committed[range].fill(byte);
        }
    }
}

fn take(device: &CacheDevice, act: &Act, content: &mut Content) {
    match *act {
        Act::Write { first, count, byte, fua } => {
            let data = vec![byte; usize::try_from(count * PAGE_BYTES).unwrap()];
            device.write(first * PAGE_BYTES, &data, WriteFlags { fua }).unwrap();
            content.set(first, count, byte, fua);
        }
        Act::Zero { first, count } => {
            let (offset, len) = (first * PAGE_BYTES, count * PAGE_BYTES);
            device.write_zeroes(offset, len, ZeroFlags::default()).unwrap();
            content.set(first, count, 0, false);
        }
        Act::Discard { first, count } => {
            device.discard(first * PAGE_BYTES, count * PAGE_BYTES).unwrap();
            for page in first..first + count {
                let found = read(device, page);
                content.set(page, 1, found, false);
            }
        }
        Act::Flush => {
            device.flush().unwrap();
            content.committed.clone_from(&content.now);
        }
        Act::Background => work(device),
        Act::Clean => device.clean_all().unwrap(),
        Act::Crash => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Where no group fills the cache, a crash leaves what the last flush and FUA writes left.
    #[test]
    fn a_crash_leaves_the_pages_as_at_the_last_flush(acts in acts()) {
        let (region, backing) = (pool(300), memory());
        let mut device = open(&region, &backing);
        let none = || vec![0; usize::try_from(PAGES).unwrap()];
        let mut content = Content { now: none(), committed: none() };
        for act in acts.iter().chain([&Act::Crash]) {
            take(&device, act, &mut content);
            if matches!(act, Act::Crash) {
                device = crash(device, &region, &backing);
                content.now.clone_from(&content.committed);
            }
            let found: Vec<u8> = (0..PAGES).map(|page| read(&device, page)).collect();
            prop_assert_eq!(&found, &content.now, "{:?}", act);
        }
        prop_assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
        device.shutdown().unwrap();
        let found: Vec<u8> = (0..PAGES).map(|page| read(&*backing, page)).collect();
        prop_assert_eq!(found, content.now);
    }
}
