//! Records: what they cost, when they become pages, and what a crash or damage leaves of them.

use std::sync::Arc;

use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

use super::part::{open_with, read_block, write_block};
use super::*;
use super::{NO_THREAD, cost, memory_of, pool_of, work};
use crate::cache::check::check;
use crate::cache::store::layout::{CacheHeaderBytes, PAGE_BYTES, VERSION, VERSIONS_BEFORE};
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceErrorKind, Op};
use crate::pmem::Counters as Stores;
use crate::tier::Tier;

fn reads_fail() -> Rule {
    Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io))
}

/// A device of blocks of 512 bytes before a backing full of nines, with blocks of `below` bytes.
fn nines(below: u32) -> (Arc<Region>, Arc<Fault>, CacheDevice) {
    let backing = memory_of(below);
    let bytes = usize::try_from(backing.geometry().size_bytes()).unwrap();
    backing.write(0, &vec![9; bytes], WriteFlags::default()).unwrap();
    let (region, fault) = (pool_of(64, 512), Arc::new(Fault::new(backing, 1)));
    let device = open_with(&region, &fault, NO_THREAD);
    (region, fault, device)
}

/// Bytes that it costs to split a slot: the headers of all parts, and that of the slot.
const SPLIT_BYTES: u64 = 64 * 8;

fn records(device: &CacheDevice) -> u64 {
    device.core.pages.usage().records
}

#[test]
fn a_block_of_a_page_that_is_not_cached_costs_its_bytes_and_64_and_no_read() {
    let (_, fault, device) = nines(4096);
    fault.add(reads_fail());
    let of = |blocks: u64, bytes_read| Stores {
        stores: 2,
        bytes_streamed: 512 * blocks + 64,
        bytes_read,
        fences: 1,
        ..Stores::default()
    };
    let splitting = |stores: Stores| Stores {
        stores: stores.stores + 2,
        bytes_streamed: stores.bytes_streamed + SPLIT_BYTES,
        fences: 2,
        ..stores
    };
    let write = |block| move |it: &CacheDevice| write_block(it, block, 1, false);
    assert_eq!(cost(&device, write(11)), splitting(of(1, 0)));
    assert_eq!(cost(&device, write(11)), of(1, 64 + 512), "over the record before");
    assert_eq!(cost(&device, write(13)), of(2, 64 + 512), "with it");
    let two = |it: &CacheDevice| it.write(14 * 512, &[2; 1024], WriteFlags::default()).unwrap();
    let found = cost(&device, two);
    let expected = (2, 4 * 512 + 64 + SPLIT_BYTES);
    assert_eq!((found.fences, found.bytes_streamed), expected, "the first slot has three units");
    assert_eq!([11, 13, 14, 15].map(|block| read_block(&device, block)), [1, 1, 2, 2]);
    device.read(12 * 512, &mut [0; 512]).unwrap_err();
    fault.heal();
    assert_eq!((read_block(&device, 12), read_block(&device, 13)), (9, 1));
}

#[test]
fn a_record_of_all_lines_is_a_page() {
    let (region, fault, device) = nines(4096);
    fault.add(reads_fail());
    for block in 0..8 {
        assert_eq!(records(&device), u64::from(block > 0));
        write_block(&device, block, 1, false);
    }
    assert_eq!(records(&device), 0);
    device.clean_all().unwrap();
    drop(device);
    let device = open_with(&region, &fault, NO_THREAD);
    (0..8).for_each(|block| assert_eq!(read_block(&device, block), 1));
}

#[test]
fn a_read_of_the_rest_makes_a_page_of_a_record() {
    for cleans_before in [false, true] {
        let (region, fault, device) = nines(4096);
        device.flush().unwrap();
        write_block(&device, 3, 1, false);
        if cleans_before {
            device.clean_all().unwrap();
        }
        let mut page = [0; 4096];
        device.read(0, &mut page).unwrap();
        assert_eq!((page[3 * 512], page[4 * 512]), (1, 9));
        assert_eq!(records(&device), 1, "after the answer");
        work(&device);
        let Usage { live, dirty, records, .. } = device.core.pages.usage();
        assert_eq!((live, dirty, records), (1, u64::from(!cleans_before), 0));
        drop(device);
        fault.add(reads_fail());
        let device = open_with(&region, &fault, NO_THREAD);
        assert_eq!((read_block(&device, 3), read_block(&device, 4)), (1, 9));
    }
}

#[test]
fn the_backing_gets_the_lines_alone_where_it_can_and_else_the_page() {
    for below in [512, 4096] {
        let (_, fault, device) = nines(below);
        write_block(&device, 3, 1, false);
        write_block(&device, 6, 2, false);
        fault.add(reads_fail());
        assert_eq!(device.clean_all().is_ok(), below == 512, "{below}");
        fault.heal();
        device.clean_all().unwrap();
        assert_eq!(device.core.pages.usage().dirty, 0);
        let mut page = [0; 4096];
        fault.read(0, &mut page).unwrap();
        let found: Vec<u8> = page.chunks(512).map(|block| block[0]).collect();
        assert_eq!(found, [9, 9, 9, 1, 9, 9, 2, 9]);
    }
}

#[test]
fn records_are_there_after_a_crash_and_a_torn_one_leaves_the_one_before() {
    let (region, fault, device) = nines(4096);
    write_block(&device, 8, 1, false);
    write_block(&device, 16, 1, false);
    write_block(&device, 17, 2, false);
    let slot = device.core.pages.find(2).unwrap().slot;
    drop(device);
    let report = check(&region).unwrap();
    assert_eq!((report.record_slots, report.findings.len()), (3, 0));
    // The header of the newest batch reached the medium, its second block did not.
    let places = CacheHeader::read(&region).unwrap().places;
    region.write(places.data(slot) + 512, &[0; 64]).unwrap();
    let device = open_with(&region, &fault, NO_THREAD);
    assert_eq!((device.recovered().unfinished, records(&device)), (1, 2));
    assert_eq!([8, 16, 17].map(|block| read_block(&device, block)), [1, 1, 9]);
}

#[test]
fn a_damaged_record_is_an_error_where_it_is_dirty_and_the_backings_bytes_where_it_is_clean() {
    let (region, fault, device) = nines(512);
    (0..2).for_each(|page| write_block(&device, 8 * page, 1, false));
    device.clean_all().unwrap();
    write_block(&device, 8, 2, false);
    write_block(&device, 16, 3, false);
    let slots = [0, 1].map(|page| device.core.pages.find(page).unwrap().slot);
    drop(device);
    let places = CacheHeader::read(&region).unwrap().places;
    for slot in slots {
        region.write(places.data(slot) + 100, &[0xFF]).unwrap();
    }
    let device = open_with(&region, &fault, NO_THREAD);
    assert_eq!((read_block(&device, 0), read_block(&device, 16)), (1, 3));
    let corrupt = |result: Result<()>| {
        assert_eq!(result.unwrap_err().kind(), DeviceErrorKind::Corrupt);
    };
    corrupt(device.read(8 * 512, &mut [0; 512]));
    corrupt(device.read(9 * 512, &mut [0; 512]));
    corrupt(device.write(9 * 512, &[4; 512], WriteFlags::default()));
    corrupt(device.clean_all());
    device.write(4096, &[5; 4096], WriteFlags::default()).unwrap();
    device.clean_all().unwrap();
    assert_eq!([7, 8, 15, 16].map(|block| read_block(&*fault, block)), [9, 5, 5, 3]);
}

fn pages_under_records(device: &CacheDevice) -> u64 {
    device.core.pages.usage().bases
}

fn write_page(device: &CacheDevice, page: u64, byte: u8) {
    device.write(page * PAGE_BYTES, &[byte; 4096], WriteFlags::default()).unwrap();
}

fn first_bytes(device: &dyn BlockDevice, page: u64) -> Vec<u8> {
    let mut data = [0; 4096];
    device.read(page * PAGE_BYTES, &mut data).unwrap();
    data.chunks(512).map(|block| block[0]).collect()
}

#[test]
fn a_block_of_a_cached_page_costs_its_bytes_and_64_until_half_the_page_is_new() {
    let (region, fault, device) = nines(4096);
    fault.add(reads_fail());
    write_page(&device, 0, 1);
    let streamed = |block| cost(&device, |it| write_block(it, block, 2, false)).bytes_streamed;
    assert_eq!([1, 3, 5].map(streamed), [64 + 512 + SPLIT_BYTES, 64 + 1024, 64 + 1536]);
    assert_eq!((records(&device), pages_under_records(&device)), (1, 1));
    assert_eq!(first_bytes(&device, 0), [1, 2, 1, 2, 1, 2, 1, 1]);
    drop(device);
    assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
    let device = open_with(&region, &fault, NO_THREAD);
    assert_eq!((records(&device), pages_under_records(&device)), (1, 1));
    assert_eq!(first_bytes(&device, 0), [1, 2, 1, 2, 1, 2, 1, 1]);
    let last = cost(&device, |it| write_block(it, 7, 3, false));
    assert_eq!(last.bytes_streamed, 64 + 4096);
    assert_eq!((records(&device), pages_under_records(&device)), (0, 0));
    assert_eq!(first_bytes(&device, 0), [1, 2, 1, 2, 1, 2, 1, 3]);
}

#[test]
fn a_page_with_a_record_is_cleaned_and_leaves_the_cache_as_a_whole() {
    for (below, is_page_clean) in [(512, true), (512, false), (4096, true), (4096, false)] {
        let (region, fault, device) = nines(below);
        write_page(&device, 0, 1);
        if is_page_clean {
            device.clean_all().unwrap();
        }
        write_block(&device, 2, 2, false);
        fault.add(reads_fail());
        device.clean_all().unwrap();
        fault.heal();
        let expected = [1, 1, 2, 1, 1, 1, 1, 1];
        assert_eq!(first_bytes(&*fault, 0), expected);
        write_block(&device, 4, 3, false);
        device.clean_all().unwrap();
        let found = device.core.pages.find(0).unwrap();
        assert_eq!(device.core.pages.remove_clean(&[found]).unwrap(), 1);
        assert_eq!(device.core.pages.usage(), Usage { splits: 1, ..Usage::default() });
        drop(device);
        let device = open_with(&region, &fault, NO_THREAD);
        assert_eq!((device.recovered().pages, device.recovered().unfinished), (0, 0));
        assert_eq!(first_bytes(&device, 0), [1, 1, 2, 1, 3, 1, 1, 1]);
    }
}

#[test]
fn a_record_without_the_page_under_it_is_an_error_where_it_is_dirty() {
    for is_clean in [false, true] {
        let (region, fault, device) = nines(4096);
        write_page(&device, 0, 1);
        write_block(&device, 2, 2, false);
        if is_clean {
            device.clean_all().unwrap();
        }
        let base = device.core.pages.find(0).unwrap().base.unwrap();
        drop(device);
        let places = CacheHeader::read(&region).unwrap().places;
        region.write(places.header(base.slot) + 20, &[0xFF]).unwrap();
        assert_eq!(check(&region).unwrap().faults, u64::from(!is_clean));
        let device = open_with(&region, &fault, NO_THREAD);
        if is_clean {
            assert_eq!(first_bytes(&device, 0), [1, 1, 2, 1, 1, 1, 1, 1]);
            continue;
        }
        for block in [0, 2] {
            let error = device.read(block * 512, &mut [0; 512]).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::Corrupt);
        }
        device.clean_all().unwrap_err();
        write_page(&device, 0, 5);
        device.clean_all().unwrap();
        assert_eq!(first_bytes(&*fault, 0), [5; 8]);
    }
}

#[test]
fn few_pages_are_kept_under_records() {
    let (_, _, device) = nines(4096);
    (0..24).for_each(|page| write_page(&device, page, 1));
    (0..24).for_each(|page| write_block(&device, page * 8 + 1, 2, false));
    assert_eq!(pages_under_records(&device), 64 / 8);
    (0..24).for_each(|page| assert_eq!(first_bytes(&device, page), [1, 2, 1, 1, 1, 1, 1, 1]));
}

#[test]
fn a_crash_takes_a_record_back_that_no_flush_covered_and_leaves_the_page_under_it() {
    let (region, fault, device) = nines(4096);
    drop(device);
    let atomic = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let reopen = |device| {
        drop(device);
        assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
        open_with(&region, &fault, atomic)
    };
    let device = open_with(&region, &fault, atomic);
    write_page(&device, 0, 1);
    device.flush().unwrap();
    write_block(&device, 1, 2, false);
    let device = reopen(device);
    assert_eq!(first_bytes(&device, 0), [1; 8]);
    write_block(&device, 1, 2, false);
    device.flush().unwrap();
    write_block(&device, 2, 3, false);
    write_page(&device, 0, 4);
    assert_eq!(first_bytes(&device, 0), [4; 8]);
    let device = reopen(device);
    assert_eq!(first_bytes(&device, 0), [1, 2, 1, 1, 1, 1, 1, 1]);
    write_page(&device, 0, 4);
    write_block(&device, 3, 5, false);
    device.flush().unwrap();
    let device = reopen(device);
    assert_eq!(first_bytes(&device, 0), [4, 4, 4, 5, 4, 4, 4, 4]);
    device.shutdown().unwrap();
    assert_eq!(first_bytes(&*fault, 0), [4, 4, 4, 5, 4, 4, 4, 4]);
}

#[test]
fn the_granularity_is_kept_and_shown_and_changes_what_comes_from_now_on() {
    let (region, fault, device) = nines(4096);
    write_block(&device, 0, 1, false);
    device.set("granularity", "page").unwrap();
    write_block(&device, 8, 1, false);
    assert_eq!(records(&device), 1);
    write_block(&device, 1, 2, false);
    assert_eq!(records(&device), 0, "that of page 0 became a page");
    assert_eq!(device.state().details["granularity"], "page");
    drop(device);
    let device = open_with(&region, &fault, NO_THREAD);
    write_block(&device, 16, 1, false);
    assert_eq!(records(&device), 0);
    device.set("granularity", "record").unwrap();
    write_block(&device, 24, 1, false);
    assert_eq!((records(&device), device.state().details["records"].as_u64()), (1, Some(1)));
    device.set("granularity", "line").unwrap_err();
    assert_eq!([0, 1, 2, 8, 16, 24].map(|block| read_block(&device, block)), [1, 2, 9, 1, 1, 1]);
}

/// Where the copies of the pool's header are.
fn copies_of(region: &Region) -> [u64; 2] {
    let at = CacheHeader::read(region).unwrap().superblock.data_offset;
    [at, at + PAGE_BYTES]
}

fn header_at(region: &Region, at: u64) -> CacheHeaderBytes {
    let mut bytes = CacheHeaderBytes::new_zeroed();
    region.read(at, bytes.as_mut_bytes()).unwrap();
    bytes
}

/// The pool's header says that it has `version`.
fn set_version(region: &Region, version: u32) {
    for at in copies_of(region) {
        let mut bytes = header_at(region, at);
        assert_eq!(bytes.version.get(), VERSION);
        bytes.version = U32::new(version);
        bytes.seal();
        region.write(at, bytes.as_bytes()).unwrap();
    }
}

/// Version 3 had slots that were split into parts of other sizes.
#[test]
fn a_pool_with_other_parts_is_refused_with_the_way_out() {
    let (region, _, device) = nines(4096);
    drop(device);
    set_version(&region, 3);
    let error = check(&region).unwrap_err();
    assert!(matches!(error, CacheError::UnknownVersion { found: 3 }));
    assert!(error.to_string().contains("flush the pool with the Tidegate that made it"));
}

#[test]
fn a_header_of_an_earlier_version_is_written_anew_before_there_is_a_record_or_a_part() {
    for version in VERSIONS_BEFORE {
        let (region, fault, device) = nines(4096);
        drop(device);
        set_version(&region, version);
        assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
        drop(open_with(&region, &fault, NO_THREAD));
        for at in copies_of(&region) {
            assert_eq!(header_at(&region, at).version.get(), VERSION);
        }
    }
}

/// Bytes written to memory for each byte of the user's, in hundredths: streamed, and 64 for each
/// line written back.
fn traffic_pct(granularity: &str, act: impl Fn(&CacheDevice) -> u64) -> u64 {
    let region = pool_of(320, 512);
    let backing = Arc::new(MemoryDevice::new(512, 8 * 2000).unwrap());
    let device = open_with(&region, &backing, NO_THREAD);
    device.set("granularity", granularity).unwrap();
    // All blocks have the same bytes.
    device.set("by-content", "off").unwrap();
    device.flush().unwrap();
    let mut users = 0;
    let found = cost(&device, |it| users = act(it));
    (found.bytes_streamed + 64 * found.lines_written_back) * 100 / users
}

/// Writes 512 bytes to each of `blocks`, with background work between, and reads some pages.
fn small_writes(blocks: impl Fn(u64) -> u64, reads: bool) -> impl Fn(&CacheDevice) -> u64 {
    move |device| {
        for round in 0..2400 {
            write_block(device, blocks(round), 1, false);
            if reads && round % 4 == 0 {
                device.read(blocks(round) / 8 * PAGE_BYTES, &mut [0; 4096]).unwrap();
            }
            work(device);
        }
        2400 * 512
    }
}

/// Returns how many bytes it wrote.
type Pattern = Box<dyn Fn(&CacheDevice) -> u64>;

/// What decides the default.
#[test]
fn records_write_less_to_memory_than_pages_in_every_pattern() {
    let random = |round: u64| round * 7919 % (8 * 2000);
    let hot = |round: u64| round * round * 7919 % (8 * 200);
    let patterns: [(&str, Pattern); 5] = [
        ("random, with evictions", Box::new(small_writes(random, false))),
        ("hot", Box::new(small_writes(hot, false))),
        ("sequential, with evictions", Box::new(small_writes(|round| round, false))),
        ("random, a read of a page for four writes", Box::new(small_writes(random, true))),
        ("hot, a read of a page for four writes", Box::new(small_writes(hot, true))),
    ];
    for (name, act) in patterns {
        let [pages, records] = ["page", "record"].map(|granularity| traffic_pct(granularity, &act));
        println!("{name}: pages {pages} %, records {records} % of the user's bytes");
        assert!(records < pages, "{name}: {records} % and {pages} %");
    }
}
