//! Slots that are split into parts for records: which records share one, how it becomes whole
//! again, what goes first, and what a crash, damage or many threads leave of it.

use std::sync::Arc;

use super::part::{open_with, read_block, write_block};
use super::vanish::within;
use super::*;
use super::{NO_THREAD, PAGES, binding, cost, memory_of, pool_of};
use crate::cache::check::{check, repair_changed};
use crate::cache::pages::cluster::Sharding;
use crate::cache::pages::index::{Stored, Taken};
use crate::cache::policy::REPLACEMENTS;
use crate::cache::store::layout::{
    PAGE_BYTES, VERDICT_OFFSET, part_number, parts_of, split_header, whole_slot,
};
use crate::device::memory::MemoryDevice;
use crate::pmem::flips::{self, scrambled};
use crate::tier::Tier;

const BLOCKS_A_PAGE: u64 = 8;
/// Records of one block in a slot.
const PARTS: u64 = 7;

/// A pool of `slots` slots for blocks of 512 bytes, the backing and the device.
fn scene(slots: u64) -> (Arc<Region>, Arc<MemoryDevice>, CacheDevice) {
    let (region, backing) = (pool_of(slots, 512), memory_of(512));
    let device = open_with(&region, &backing, NO_THREAD);
    device.set("by-content", "off").unwrap();
    (region, backing, device)
}

/// Writes the first block of `page`.
fn write_first(device: &CacheDevice, page: u64, byte: u8) {
    write_block(device, page * BLOCKS_A_PAGE, byte, false);
}

fn write_page(device: &CacheDevice, page: u64, byte: u8) {
    device.write(page * PAGE_BYTES, &[byte; PAGE], WriteFlags::default()).unwrap();
}

/// The slots in which `pages` lie, without their parts.
fn slots_of(device: &CacheDevice, pages: std::ops::Range<u64>) -> Vec<u32> {
    let mut slots: Vec<u32> =
        pages.map(|page| whole_slot(device.core.pages.find(page).unwrap().slot)).collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

#[test]
fn small_records_share_a_slot_and_are_there_after_a_crash() {
    let (region, backing, device) = scene(64);
    (0..PARTS).for_each(|page| write_first(&device, page, 1));
    assert_eq!(slots_of(&device, 0..PARTS).len(), 1);
    let usage = device.core.pages.usage();
    assert_eq!((usage.live, usage.parts, usage.splits, usage.used_slots()), (7, 7, 1, 1));
    let one_more = cost(&device, |it| write_first(it, PARTS, 1));
    assert_eq!(one_more.fences, 2, "a second slot is split");
    drop(device);
    let report = check(&region).unwrap();
    assert_eq!((report.findings, report.used_slots, report.split_slots), (vec![], 2, 2));
    assert_eq!((report.record_slots, report.dirty_slots, report.free_slots), (8, 8, 62));
    let device = open_with(&region, &backing, NO_THREAD);
    assert_eq!((device.recovered().pages, device.recovered().dirty_pages), (8, 8));
    (0..=PARTS).for_each(|page| assert_eq!(read_block(&device, page * BLOCKS_A_PAGE), 1));
    let again = cost(&device, |it| write_first(it, PARTS + 1, 1));
    assert_eq!(again.fences, 1, "the second slot has parts that are free");
    device.clean_all().unwrap();
    (0..=PARTS + 1).for_each(|page| assert_eq!(read_block(&*backing, page * BLOCKS_A_PAGE), 1));
}

/// Writes the first `blocks` blocks of `page`.
fn write_blocks(device: &CacheDevice, page: u64, blocks: usize, byte: u8) {
    let data = vec![byte; 512 * blocks];
    device.write(page * PAGE_BYTES, &data, WriteFlags::default()).unwrap();
}

/// The slot in which `page` lies, and its first unit there.
fn place_of(device: &CacheDevice, page: u64) -> (u32, Option<u32>) {
    let slot = device.core.pages.find(page).unwrap().slot;
    (whole_slot(slot), part_number(slot).map(|part| part.unit))
}

#[test]
fn records_of_all_sizes_share_slots_where_the_least_is_left() {
    let (region, backing, device) = scene(64);
    let sizes = [4, 6, 2, 1, 5, 7, 1, 2];
    for (page, blocks) in (0..).zip(sizes) {
        write_blocks(&device, page, blocks, 1);
    }
    let places: Vec<_> = (0..8).map(|page| place_of(&device, page)).collect();
    let [first, second, third, page] = [0, 1, 4, 5].map(|it| places[it].0);
    let unit = |unit| Some(unit);
    assert_eq!(
        places,
        [
            (first, unit(0)),
            (second, unit(0)),
            (first, unit(4)),
            (first, unit(6)),
            (third, unit(0)),
            (page, None),
            (second, unit(6)),
            (third, unit(5)),
        ]
    );
    let usage = device.core.pages.usage();
    assert_eq!((usage.parts, usage.splits, usage.dirty_units), (7, 3, 21 + 7));
    drop(device);
    assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
    let device = open_with(&region, &backing, NO_THREAD);
    assert_eq!(device.core.pages.usage(), usage);
    assert_eq!((0..8).map(|page| place_of(&device, page)).collect::<Vec<_>>(), places);
    for (page, blocks) in (0..).zip(sizes) {
        let last = page * BLOCKS_A_PAGE + blocks as u64 - 1;
        assert_eq!([read_block(&device, last), read_block(&device, last + 1)], [1, 0], "{page}");
    }
}

/// A small record takes a large part that is dead, and others get the rest of it once the record is
/// durable. A large one takes a small dead part and the free units behind it.
#[test]
fn a_dead_part_becomes_a_smaller_or_a_larger_one() {
    let (region, backing, device) = scene(64);
    write_blocks(&device, 0, 3, 1);
    let (slot, _) = place_of(&device, 0);
    write_page(&device, 0, 2);
    write_first(&device, 1, 3);
    assert_eq!(place_of(&device, 1), (slot, Some(0)));
    write_blocks(&device, 2, 6, 4);
    assert_eq!(place_of(&device, 2), (slot, Some(1)), "the rest of that part is free");
    write_page(&device, 1, 5);
    write_page(&device, 2, 5);
    write_blocks(&device, 3, 2, 6);
    assert_eq!(place_of(&device, 3), (slot, Some(1)), "a larger dead part does");
    write_blocks(&device, 4, 5, 7);
    assert_ne!(place_of(&device, 4).0, slot, "four units are free behind it");
    write_blocks(&device, 5, 4, 8);
    assert_eq!(place_of(&device, 5), (slot, Some(3)));
    drop(device);
    assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
    let device = open_with(&region, &backing, NO_THREAD);
    let firsts = (0..6).map(|page| read_block(&device, page * BLOCKS_A_PAGE));
    assert_eq!(firsts.collect::<Vec<_>>(), [2, 5, 5, 6, 7, 8]);
}

/// A pool of another program, or a damaged one, may have headers in the units of another part.
#[test]
fn a_header_in_the_units_of_another_part_does_not_count() {
    let (region, backing, device) = scene(64);
    write_blocks(&device, 0, 3, 1);
    let (slot, _) = place_of(&device, 0);
    drop(device);
    let header = CacheHeader::read(&region).unwrap();
    let inside = layout::part_of(slot, 1);
    let stored = layout::SlotHeader {
        page: 9,
        version: 77,
        lane: 40,
        batch: 1,
        group: 0,
        lines: 1,
        over: 0,
        zero: false,
        dirty: true,
        data_check: layout::data_check(&[1; 64]),
    };
    region.write(header.places.header(inside), &stored.encode(header.salt, inside)).unwrap();
    let device = open_with(&region, &backing, NO_THREAD);
    assert_eq!((device.recovered().pages, device.recovered().unfinished), (1, 1));
    assert_eq!([read_block(&device, 2), read_block(&device, 72)], [1, 0]);
    drop(device);
    assert_eq!(check(&region).unwrap().unfinished_slots, 0);
}

/// All parts are dead: one word makes the slot whole again, and none of the older versions comes
/// back, also where their successors have left the cache.
#[test]
fn a_slot_without_records_is_whole_again_when_slots_are_needed() {
    let (region, backing, device) = scene(64);
    (0..PARTS).for_each(|page| write_first(&device, page, 1));
    let split = slots_of(&device, 0..PARTS)[0];
    (0..PARTS).for_each(|page| write_page(&device, page, 2));
    let usage = device.core.pages.usage();
    assert_eq!((usage.live, usage.parts, usage.splits), (7, 0, 1));
    let found = cost(&device, |it| assert_eq!(it.core.pages.unite_spent(0).unwrap(), 1));
    assert_eq!((found.stores, found.fences), (1, 1));
    assert_eq!(
        (device.core.pages.usage().splits, device.core.pages.unite_spent(0).unwrap()),
        (0, 0)
    );
    device.clean_all().unwrap();
    let all: Vec<_> = (0..PARTS).filter_map(|page| device.core.pages.find(page)).collect();
    assert_eq!(device.core.pages.evict(&all).unwrap(), 7);
    drop(device);
    let header = CacheHeader::read(&region).unwrap();
    assert_eq!(region.load_u64(header.places.header(split)).unwrap(), 0);
    let device = open_with(&region, &backing, NO_THREAD);
    assert_eq!(device.recovered().pages, 0);
    (0..PARTS).for_each(|page| assert_eq!(read_block(&device, page * BLOCKS_A_PAGE), 2));
}

/// Each record of a slot costs a write to the backing when it leaves, and all of them together free
/// one slot: so pages go first.
#[test]
fn records_leave_when_all_of_their_slot_have_come_up() {
    let (_, backing, device) = scene(16);
    device.set("eviction", "lrw").unwrap();
    let is_cached = |page| device.core.pages.find(page).is_some();
    for page in 0..PARTS {
        write_first(&device, page, 1);
        write_page(&device, 10 + page, 3);
    }
    (20..28).for_each(|page| write_page(&device, page, 3));
    (30..34).for_each(|page| write_page(&device, page, 3));
    assert!((0..PARTS).all(is_cached), "four records came up, and pages went");
    assert!(!is_cached(10) && is_cached(16));
    (40..50).for_each(|page| write_page(&device, page, 3));
    assert!(!(0..PARTS).any(is_cached), "all records came up");
    assert!(!is_cached(16) && is_cached(49));
    (0..PARTS).for_each(|page| assert_eq!(read_block(&*backing, page * BLOCKS_A_PAGE), 1));
}

/// A header that splits a slot is right with one changed bit too, for all parts were void before
/// it was stored.
#[test]
fn no_flipped_bit_of_a_split_slot_loses_a_record_in_silence() {
    let (region, backing, device) = scene(64);
    (0..PARTS).for_each(|page| write_first(&device, page, 1));
    (0..PARTS).step_by(2).for_each(|page| write_first(&device, page, 2));
    let slots = slots_of(&device, 0..PARTS);
    drop(device);
    let header = CacheHeader::read(&region).unwrap();
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    let parts = slots.iter().flat_map(|slot| parts_of(*slot));
    let headers: Vec<u32> = slots.iter().copied().chain(parts).collect();
    let is_right = |region: &Arc<Region>| {
        let device = open_with(region, &backing, NO_THREAD);
        let expected = |page: u64| if page.is_multiple_of(2) { 2 } else { 1 };
        (0..PARTS).all(|page| read_block(&device, page * BLOCKS_A_PAGE) == expected(page))
    };
    let (mut found, mut repaired, flips) = (0, 0, flips::numbers(2000));
    let count = flips.end - flips.start;
    for n in flips {
        let slot = headers[usize::try_from(n).unwrap() % headers.len()];
        let bit = header.places.header(slot) * 8 + scrambled(n) % 512;
        let at = usize::try_from(bit / 8).unwrap();
        bytes[at] ^= 1 << (bit % 8);
        let flipped = Arc::new(Region::anonymous(bytes.len() as u64).unwrap());
        flipped.write(0, &bytes).unwrap();
        bytes[at] ^= 1 << (bit % 8);
        let report = check(&flipped).unwrap();
        if report.faults == 0 {
            assert!(is_right(&flipped), "bit {bit} of slot {slot}");
            continue;
        }
        found += 1;
        if whole_slot(slot) == slot {
            let again = Arc::new(Region::anonymous(bytes.len() as u64).unwrap());
            let mut copy = bytes.clone();
            copy[at] ^= 1 << (bit % 8);
            again.write(0, &copy).unwrap();
            assert!(is_right(&again), "opening restores bit {bit}");
            assert_eq!(check(&again).unwrap().faults, 0, "bit {bit}");
        }
        if !report.changed_slots.is_empty() {
            assert_eq!(repair_changed(&flipped, &report.changed_slots).unwrap(), 1);
            assert_eq!(check(&flipped).unwrap().faults, 0, "bit {bit}");
            assert!(is_right(&flipped), "bit {bit}, repaired");
            repaired += 1;
        }
    }
    assert!(found > count / 2 && repaired > count / 2, "{found} found, {repaired} repaired");
}

/// A write of a page waits for no verdict: a part that a cleaner found may be other data by then.
#[test]
fn a_verdict_of_a_part_is_not_stored_where_the_part_is_no_more() {
    let (_, backing, device) = scene(16);
    (0..PARTS).for_each(|page| write_first(&device, page, 1));
    let found: Vec<_> = (0..PARTS).filter_map(|page| device.core.pages.find(page)).collect();
    (0..PARTS).for_each(|page| write_page(&device, page, 2));
    assert_eq!(device.core.pages.unite_spent(0).unwrap(), 1);
    (PARTS..16).for_each(|page| write_page(&device, page, 3));
    let slot = whole_slot(found[0].slot);
    assert!((PARTS..16).any(|page| device.core.pages.find(page).is_some_and(|it| it.slot == slot)));
    let stored = cost(&device, |it| it.core.pages.conclude_clean(&found).unwrap());
    assert_eq!((stored.stores, stored.fences), (0, 0));
    device.clean_all().unwrap();
    (PARTS..16).for_each(|page| assert_eq!(read_block(&*backing, page * BLOCKS_A_PAGE + 7), 3));
}

#[test]
fn a_torn_split_is_no_split() {
    let (region, backing, device) = scene(64);
    drop(device);
    let header = CacheHeader::read(&region).unwrap();
    let bytes = split_header(header.salt, 5);
    region.write(header.places.header(5), &bytes[..32]).unwrap();
    let device = open_with(&region, &backing, NO_THREAD);
    assert_eq!((device.recovered().unfinished, device.core.pages.usage().splits), (1, 0));
}

/// A shard whose slots are taken from the lowest number on, with `records` records of a block each,
/// of pages from 0 on.
fn shard_with(slots: u32, records: u64) -> Shard {
    let sharding = Sharding { count: 1, ..Sharding::default() };
    let mut shard = Shard::new(0, sharding, slots, &REPLACEMENTS[0]);
    let all: Vec<Taken> = std::iter::from_fn(|| shard.allocator.take()).collect();
    for it in &all {
        shard.allocator.free(it.slot);
    }
    for page in 0..records {
        let taken = shard.allocator.take_for(8, 0).unwrap();
        let stored =
            Stored { dirty: true, zero: false, record: true, over: false, group: 0, class: 0 };
        shard.publish(page, &taken, stored);
    }
    shard
}

#[test]
fn what_is_dirty_is_found_where_the_shard_gets_another_size_meanwhile() {
    for slots in [8, 64] {
        let mut shard = shard_with(16, 20);
        let mut found = Vec::new();
        let next = shard.dirty_from(0, 5, &mut found);
        shard.allocator.set_usable(slots);
        shard.resize(slots);
        shard.dirty_from(next, 100, &mut found);
        let pages: Vec<u64> = found.iter().map(|found| found.page).collect();
        assert_eq!(pages, (0..20).collect::<Vec<_>>(), "{slots} slots");
    }
}

/// The memory of a part failed: the parts beside it are no better.
#[test]
fn no_part_is_taken_beside_one_that_is_lost() {
    let mut shard = shard_with(16, 3);
    let lost = whole_slot(shard.find(0).unwrap().slot);
    let taken = shard.allocator.take_for(8, 0).unwrap();
    assert_eq!(whole_slot(taken.slot), lost);
    shard.allocator.take_back(9, &taken, false, false);
    let other = shard.allocator.take_for(8, 0).unwrap();
    assert_ne!(whole_slot(other.slot), lost);
    let mut victims = Vec::new();
    assert_eq!(shard.leaving_victims(16, &mut victims), 3);
    assert_eq!(victims.len(), 3, "the records beside it leave when all have come up");
}

/// Parts that wait for a commit, and those that they replace, cannot leave; dirty pages can.
#[test]
fn a_write_finds_a_slot_where_no_split_slot_can_become_free() {
    const RECORDS: u64 = 140;
    const DIRTY: std::ops::Range<u64> = 200..241;
    let region = pool_of(64, 512);
    let backing = Arc::new(MemoryDevice::new(512, 8 * 512).unwrap());
    let options = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let binding = Binding { identity: 1, name: "memory".into(), pages: 512 };
    let device = CacheDevice::open(region, backing, binding, options).unwrap();
    device.set("by-content", "off").unwrap();
    for record in 0..RECORDS {
        write_first(&device, record, 1);
        let page = DIRTY.start + record / 3;
        if record % 3 == 2 && page < DIRTY.end {
            write_page(&device, page, 1);
            device.flush().unwrap();
        }
    }
    device.flush().unwrap();
    device.clean_all().unwrap();
    for page in DIRTY {
        write_page(&device, page, 2);
        device.flush().unwrap();
    }
    (0..RECORDS).step_by(7).for_each(|record| write_first(&device, record, 2));
    let device = within("a write", move || {
        write_page(&device, 300, 3);
        device
    });
    device.flush().unwrap();
    (0..RECORDS).for_each(|record| {
        let expected = if record % 7 == 0 { 2 } else { 1 };
        assert_eq!(read_block(&device, record * BLOCKS_A_PAGE), expected);
    });
}

/// The slot may have had a verdict that was stored late. Versions behind it may be given out again.
#[test]
fn a_split_slot_has_no_verdict_when_it_becomes_whole() {
    let (region, backing, device) = scene(64);
    write_first(&device, 0, 1);
    let slot = slots_of(&device, 0..1)[0];
    drop(device);
    let at = CacheHeader::read(&region).unwrap().places.header(slot) + VERDICT_OFFSET;
    region.store_u64(at, 7).unwrap();
    let device = open_with(&region, &backing, NO_THREAD);
    assert_eq!(region.load_u64(at).unwrap(), 0);
    assert_eq!(read_block(&device, 0), 1);
}

/// The byte that block `block` has after write `step` of a thread.
fn byte_of(thread: u64, step: u64) -> u8 {
    u8::try_from(1 + (step * 3 + thread) % 250).unwrap()
}

const THREADS: u64 = 3;

/// Writes blocks of the thread's own pages, parts and whole pages in turn, and reads them back.
fn write_and_read(device: &CacheDevice, thread: u64, steps: u64) -> Vec<u8> {
    let pages = PAGES / THREADS;
    let (first, blocks) = (thread * pages * BLOCKS_A_PAGE, pages * BLOCKS_A_PAGE);
    let mut expected = vec![0; usize::try_from(blocks).unwrap()];
    for step in 0..steps {
        let random = scrambled(thread << 32 | step);
        let count = [1, 1, 1, 2, 3, 8][usize::try_from(random % 6).unwrap()];
        let at = (random >> 8) % (blocks / BLOCKS_A_PAGE) * BLOCKS_A_PAGE;
        let at = if count == 8 { at } else { at + (random >> 40) % (BLOCKS_A_PAGE - count) };
        let byte = byte_of(thread, step);
        let len = usize::try_from(count).unwrap();
        device.write((first + at) * 512, &vec![byte; len * 512], WriteFlags::default()).unwrap();
        let from = usize::try_from(at).unwrap();
        expected[from..from + len].fill(byte);
        let look = scrambled(random) % blocks;
        let found = read_block(device, first + look);
        assert_eq!(found, expected[usize::try_from(look).unwrap()], "thread {thread}, {step}");
        if step % 512 == 0 {
            device.flush().unwrap();
        }
    }
    expected
}

#[test]
fn threads_find_what_they_wrote_while_slots_are_split_evicted_and_made_whole() {
    for (atomic_flush, slots) in [(false, 48), (true, 48), (false, 24)] {
        let (region, backing) = (pool_of(slots, 512), memory_of(512));
        let options = CacheDeviceOptions { atomic_flush, ..CacheDeviceOptions::default() };
        let open = || CacheDevice::open(Arc::clone(&region), backing.clone(), binding(), options);
        let device = open().unwrap();
        let all: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let device = &device;
            let run = |thread| scope.spawn(move || write_and_read(device, thread, 4000));
            let threads: Vec<_> = (0..THREADS).map(run).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        let is_there = |device: &dyn BlockDevice| {
            for (thread, blocks) in (0..).zip(&all) {
                let first = thread * (PAGES / THREADS) * BLOCKS_A_PAGE;
                for (block, byte) in (first..).zip(blocks) {
                    assert_eq!(read_block(device, block), *byte, "block {block}");
                }
            }
        };
        is_there(&device);
        device.flush().unwrap();
        drop(device);
        assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
        let device = open().unwrap();
        is_there(&device);
        device.shutdown().unwrap();
        is_there(&*backing);
    }
}
