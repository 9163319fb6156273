//! The guarantees, costs and refusals of the raw engine.

use super::*;
use crate::device::conformance::{self, Promises};
use crate::device::{BlockDeviceExt, DeviceError, DeviceErrorKind, WriteFlags, ZeroFlags};
use crate::pmem::{Counters, RegionOptions};

fn region(block_bytes: u32) -> Arc<Region> {
    let region = Region::anonymous(1 << 20).unwrap();
    create(&region, &RawOptions { block_bytes, ..RawOptions::default() }).unwrap();
    Arc::new(region)
}

fn cost(device: &RawDevice, act: impl FnOnce(&RawDevice) -> Result<()>) -> Counters {
    let before = device.region().counters();
    act(device).unwrap();
    device.region().counters() - before
}

#[test]
fn it_conforms() {
    for block_bytes in [512, 4096] {
        let device = RawDevice::open(region(block_bytes)).unwrap();
        conformance::check(&device, Promises::default());
        conformance::check_started(&(Arc::new(device) as _), Promises::default());
    }
}

#[test]
fn a_write_costs_one_fence() {
    let device = RawDevice::open(region(4096)).unwrap();
    let expected = Counters { stores: 1, bytes_streamed: 4096, fences: 1, ..Counters::default() };
    for fua in [false, true] {
        let found = cost(&device, |it| it.write(8192, &[3; 4096], WriteFlags { fua }));
        assert_eq!(found, expected);
    }
    let flags = ZeroFlags::default();
    assert_eq!(cost(&device, |it| it.write_zeroes(8192, 4096, flags)), expected);
    assert_eq!(cost(&device, BlockDeviceExt::flush), Counters::default());
    let read = cost(&device, |it| it.read(0, &mut [0; 4096]));
    assert_eq!(read, Counters { bytes_read: 4096, ..Counters::default() });
}

#[test]
fn data_stays_between_the_superblocks() {
    let region = region(512);
    let device = RawDevice::open(Arc::clone(&region)).unwrap();
    let all = vec![0xAB; usize::try_from(device.geometry().size_bytes()).unwrap()];
    device.write(0, &all, WriteFlags::default()).unwrap();
    let found = Superblock::read(&region).unwrap();
    assert!(found.is_whole());
    let mut reserved = [1; 4096];
    region.read(4096, &mut reserved).unwrap();
    assert_eq!(reserved, [0; 4096]);
}

#[test]
fn opening_repairs_a_damaged_superblock() {
    let region = region(4096);
    for offset in [9, region.len_bytes() - 9] {
        region.write(offset, &[0xFF]).unwrap();
        assert!(!Superblock::read(&region).unwrap().is_whole());
        RawDevice::open(Arc::clone(&region)).unwrap();
        assert!(Superblock::read(&region).unwrap().is_whole());
    }
}

#[test]
fn a_read_only_pool_is_read_and_not_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let options = RegionOptions { create_bytes: Some(1 << 20), ..RegionOptions::default() };
    let region = Region::open(&path, &options).unwrap();
    create(&region, &RawOptions::default()).unwrap();
    region.write(9, &[0xFF]).unwrap();
    region.persist(9, 1).unwrap();
    drop(region);
    let before = std::fs::read(&path).unwrap();
    let options = RegionOptions { read_only: true, ..RegionOptions::default() };
    let device = RawDevice::open(Arc::new(Region::open(&path, &options).unwrap())).unwrap();
    conformance::check_read_only(&device);
    drop(device);
    assert!(before == std::fs::read(&path).unwrap(), "a read-only open changed the pool");
}

#[test]
fn impossible_pools_are_refused_before_anything_changes() {
    let region = Region::anonymous(64 << 10).unwrap();
    region.write(0, b"precious").unwrap();
    let options = RawOptions { block_bytes: 520, ..RawOptions::default() };
    let error = create(&region, &options).unwrap_err();
    assert_eq!(DeviceError::from(error).kind(), DeviceErrorKind::Unsupported);
    let mut start = [0; 8];
    region.read(0, &mut start).unwrap();
    assert_eq!(&start, b"precious");
    let opened = RawDevice::open(Arc::new(region)).map(|_| ());
    assert!(matches!(opened, Err(PoolError::NotAPool { found: pool::Content::Text })));
}
