//! Blocks smaller than a page: what a part of a page costs, and that no write takes back the
//! bytes of another part.

use std::sync::Arc;

use super::*;
use super::{NO_THREAD, PAGES, binding, cost, memory_of, pool_of, work};
use crate::cache::check::check;
use crate::cache::counters::Counter;
use crate::cache::engine::CacheEngine;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::conformance::{self, Promises};
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceErrorKind, Op};
use crate::pmem::Counters as Stores;
use crate::tier::{Engine, EngineError, Tier};

const BLOCK: u64 = 512;
const BLOCKS_A_PAGE: u64 = PAGE_BYTES / BLOCK;

pub(super) fn open_with(
    region: &Arc<Region>,
    backing: &Arc<impl BlockDevice + 'static>,
    options: CacheDeviceOptions,
) -> CacheDevice {
    CacheDevice::open(Arc::clone(region), Arc::clone(backing) as _, binding(), options).unwrap()
}

/// A device of blocks of 512 bytes before a backing with blocks of 4096.
fn device_over(backing: &Arc<MemoryDevice>) -> CacheDevice {
    open_with(&pool_of(64, 512), backing, NO_THREAD)
}

pub(super) fn write_block(device: &dyn BlockDevice, block: u64, byte: u8, fua: bool) {
    device.write(block * BLOCK, &[byte; 512], WriteFlags { fua }).unwrap();
}

pub(super) fn read_block(device: &dyn BlockDevice, block: u64) -> u8 {
    let mut data = [0; 512];
    device.read(block * BLOCK, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == data[0]), "block {block} is torn");
    data[0]
}

#[test]
fn every_mode_conforms_with_small_blocks_over_small_and_large_ones() {
    for (below, granularity) in [(512, "record"), (4096, "record"), (512, "page"), (4096, "page")] {
        for &mode in Mode::ALL {
            let device = open_with(&pool_of(24, 512), &memory_of(below), NO_THREAD);
            device.set("granularity", granularity).unwrap();
            assert_eq!(device.geometry().block_bytes, 512);
            device.set_mode(mode).unwrap();
            println!("{mode}, {granularity}, before blocks of {below} bytes");
            conformance::check(&device, Promises::default());
        }
    }
}

#[test]
fn small_blocks_conform_with_a_thread_and_started_requests() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteInvalidate] {
        let options = CacheDeviceOptions { clean_from_pct: Some(30), ..Default::default() };
        let device = open_with(&pool_of(40, 512), &memory_of(4096), options);
        device.set_mode(mode).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        conformance::check(&*device, Promises::default());
        conformance::check_started(&device, Promises::default());
    }
}

#[test]
fn a_part_of_a_cached_page_is_a_new_page_with_one_fence() {
    let device = device_over(&memory_of(4096));
    device.set("granularity", "page").unwrap();
    device.write(0, &[1; 4096], WriteFlags::default()).unwrap();
    let expected = Stores {
        stores: 2,
        bytes_streamed: 4096 + 64,
        bytes_read: 4096,
        fences: 1,
        ..Stores::default()
    };
    assert_eq!(cost(&device, |it| write_block(it, 3, 2, false)), expected);
    for block in 0..BLOCKS_A_PAGE {
        let one = |it: &CacheDevice| {
            assert_eq!(read_block(it, block), if block == 3 { 2 } else { 1 });
        };
        assert_eq!(cost(&device, one), Stores { bytes_read: 512, ..Stores::default() });
    }
}

#[test]
fn a_request_over_parts_of_two_pages_and_a_whole_one_is_one_batch() {
    let device = device_over(&memory_of(4096));
    (0..3).for_each(|page| {
        device.write(page * PAGE_BYTES, &[1; 4096], WriteFlags::default()).unwrap();
    });
    let data = [2; 512 + 4096 + 512];
    let found = cost(&device, |it| it.write(7 * BLOCK, &data, WriteFlags::default()).unwrap());
    // Both parts of pages split a slot: nobody has a part of a slot before that is durable.
    let split_bytes = 2 * 8 * 64;
    assert_eq!((found.fences, found.bytes_streamed), (2, 4096 + 2 * 512 + 3 * 64 + split_bytes));
    (0..24).for_each(|block| {
        let expected = if (7..17).contains(&block) { 2 } else { 1 };
        assert_eq!(read_block(&device, block), expected, "block {block}");
    });
}

#[test]
fn the_rest_of_a_page_that_is_not_cached_is_the_backings() {
    for &mode in Mode::ALL {
        for (below, granularity) in [(512, "record"), (4096, "record"), (4096, "page")] {
            let backing = memory_of(below);
            backing.write(0, &[9; 8192], WriteFlags::default()).unwrap();
            let region = pool_of(64, 512);
            let device = open_with(&region, &backing, NO_THREAD);
            device.set_mode(mode).unwrap();
            device.set("granularity", granularity).unwrap();
            write_block(&device, 3, 1, false);
            write_block(&device, 9, 2, true);
            let flags = ZeroFlags::default();
            device.write_zeroes(11 * BLOCK, BLOCK, flags).unwrap();
            drop(device);
            let device = open_with(&region, &backing, NO_THREAD);
            let expected = |block| match block {
                3 => 1,
                9 => 2,
                11 => 0,
                _ => 9,
            };
            let same = |it: &dyn BlockDevice| {
                (0..16).for_each(|it_block| {
                    assert_eq!(read_block(it, it_block), expected(it_block), "{mode} {below}");
                });
            };
            same(&device);
            device.clean_all().unwrap();
            same(&device);
            let mut all = [0; 8192];
            backing.read(0, &mut all).unwrap();
            let found: Vec<u8> = all.chunks(512).map(|block| block[0]).collect();
            assert_eq!(found, (0..16).map(expected).collect::<Vec<u8>>(), "{mode} {below}");
            assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
        }
    }
}

#[test]
fn a_part_of_a_page_fails_where_the_rest_cannot_be_read() {
    let fault = Arc::new(Fault::new(memory_of(4096), 1));
    let device = open_with(&pool_of(64, 512), &fault, NO_THREAD);
    device.set("granularity", "page").unwrap();
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    device.write(0, &[1; 512], WriteFlags::default()).unwrap_err();
    device.write(4096, &[1; 4096], WriteFlags::default()).unwrap();
    write_block(&device, 9, 2, false);
    fault.heal();
    assert_eq!((read_block(&device, 0), read_block(&device, 8)), (0, 1));
    assert_eq!(read_block(&device, 9), 2);
}

/// Threads of which each has a block of every page.
#[test]
fn threads_that_write_parts_of_one_page_keep_each_others_bytes() {
    for below in [512, 4096] {
        for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::PassThrough] {
            let backing = memory_of(below);
            let options = CacheDeviceOptions { clean_from_pct: Some(20), ..Default::default() };
            let device = open_with(&pool_of(12, 512), &backing, options);
            device.set_mode(mode).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let device = &device;
                    scope.spawn(move || {
                        for round in 0..400_u64 {
                            let block = thread + BLOCKS_A_PAGE * (round * 7 % 20);
                            let byte = u8::try_from(1 + round % 251).unwrap();
                            write_block(device, block, byte, round % 16 == 0);
                            assert_eq!(read_block(device, block), byte, "{mode}, block {block}");
                        }
                    });
                }
                scope.spawn(|| (0..20).for_each(|_| device.clean_all().unwrap()));
            });
            device.shutdown().unwrap();
            let mut data = vec![0; 20 * 4096];
            backing.read(0, &mut data).unwrap();
            for (block, bytes) in (0..).zip(data.chunks(512)) {
                assert_eq!(read_block(&device, block), bytes[0], "{mode}, block {block}");
                assert_eq!(bytes[0] == 0, block % BLOCKS_A_PAGE > 2, "{mode}, block {block}");
            }
        }
    }
}

#[test]
fn a_part_that_is_durable_by_itself_commits_the_other_parts_of_its_page() {
    let (region, backing) = (pool_of(64, 512), memory_of(4096));
    let atomic = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let early = |it: &CacheDevice| it.core.pages.counters.get(Counter::GroupsCommittedEarly);
    let device = open_with(&region, &backing, atomic);
    write_block(&device, 1, 1, false);
    write_block(&device, 17, 1, false);
    write_block(&device, 10, 2, true);
    assert_eq!(early(&device), 0, "no other part of its page waits");
    drop(device);
    let device = open_with(&region, &backing, atomic);
    assert_eq!([1, 10, 17].map(|block| read_block(&device, block)), [0, 2, 0]);
    write_block(&device, 1, 3, false);
    write_block(&device, 17, 3, false);
    write_block(&device, 2, 4, true);
    assert_eq!(early(&device), 1, "that of block 1 would be durable alone");
    write_block(&device, 18, 5, false);
    drop(device);
    let device = open_with(&region, &backing, atomic);
    assert_eq!([1, 2, 10, 17, 18].map(|block| read_block(&device, block)), [3, 4, 2, 3, 0]);
}

#[test]
fn a_read_of_a_block_keeps_its_page() {
    let backing = memory_of(4096);
    backing.write(0, &[5; 4096], WriteFlags::default()).unwrap();
    let fault = Arc::new(Fault::new(backing, 1));
    let device = open_with(&pool_of(64, 512), &fault, NO_THREAD);
    assert_eq!(read_block(&device, 3), 5);
    work(&device);
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    assert_eq!(read_block(&device, 6), 5);
    assert_eq!(device.status(3 * BLOCK, BLOCK, 9).unwrap().len(), 1);
}

#[test]
fn the_block_size_is_an_option_of_create() {
    let plan = |text: &str| {
        CacheEngine.plan(&[("block-size", text.to_owned())].into()).map(|plan| {
            let region = Region::anonymous(1 << 20).unwrap();
            plan.create(&region).unwrap();
            CacheHeader::read(&region).unwrap().superblock.block_bytes
        })
    };
    assert_eq!((plan("512").unwrap(), plan("4096").unwrap()), (512, 4096));
    assert!(matches!(plan("1000"), Err(EngineError::Usage(_))));
    assert_eq!(PAGES * PAGE_BYTES, memory_of(512).geometry().size_bytes());
}
