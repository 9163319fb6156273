//! Regions that grow: the file, the mapping, and threads that use it meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};

use super::super::{PmemError, Region, RegionOptions};

const MIB: u64 = 1 << 20;

fn growing() -> RegionOptions {
    RegionOptions { create_bytes: Some(MIB), limit_bytes: 8 * MIB, ..RegionOptions::default() }
}

#[test]
fn a_region_grows_up_to_its_limit_and_keeps_its_bytes() {
    for dir in [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let path = dir.path().join("pool");
        let region = Region::open(&path, &growing()).unwrap();
        region.write_streaming(MIB - 64, &[7; 64]).unwrap();
        let beyond = region.read(MIB, &mut [0; 1]).unwrap_err();
        assert!(matches!(beyond, PmemError::OutOfRange { .. }));
        region.grow(4 * MIB + 100).unwrap();
        assert_eq!(region.len_bytes(), 4 * MIB + 100);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * MIB + 100);
        region.write_streaming(4 * MIB, &[9; 100]).unwrap();
        region.grow(8 * MIB).unwrap();
        region.persist(8 * MIB - 64, 64).unwrap();
        // The region is that long already.
        region.grow(MIB).unwrap();
        assert_eq!(region.len_bytes(), 8 * MIB);
        drop(region);
        let region = Region::open(&path, &RegionOptions::default()).unwrap();
        let (mut old, mut new) = ([0; 128], [1; 228]);
        region.read(MIB - 64, &mut old).unwrap();
        region.read(4 * MIB, &mut new).unwrap();
        assert_eq!((&old[..64], &old[64..]), (&[7; 64][..], &[0; 64][..]));
        assert_eq!((&new[..100], &new[100..]), (&[9; 100][..], &[0; 128][..]));
    }
}

#[test]
fn growing_beyond_the_limit_or_read_only_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let region = Region::open(&path, &growing()).unwrap();
    let error = region.grow(8 * MIB + 1).unwrap_err();
    assert!(matches!(error, PmemError::Limit { limit_bytes, .. } if limit_bytes == 8 * MIB));
    assert!(error.to_string().contains("pool"), "{error}");
    drop(region);
    let region = Region::open(&path, &RegionOptions::default()).unwrap();
    assert!(matches!(region.grow(MIB + 1), Err(PmemError::Limit { .. })));
    drop(region);
    let options = RegionOptions { read_only: true, limit_bytes: 8 * MIB, ..Default::default() };
    let region = Region::open(&path, &options).unwrap();
    assert!(matches!(region.grow(2 * MIB), Err(PmemError::ReadOnly)));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);
}

/// No file system has so much space: the region and its file keep their size.
#[test]
fn space_that_cannot_be_had_leaves_the_region_as_it_was() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("pool");
    let region = Region::open(&path, &RegionOptions { limit_bytes: 1 << 43, ..growing() }).unwrap();
    assert!(matches!(region.grow(1 << 43), Err(PmemError::Os { .. })));
    assert_eq!((region.len_bytes(), std::fs::metadata(&path).unwrap().len()), (MIB, MIB));
    region.write(MIB - 1, &[1]).unwrap();
    region.grow(2 * MIB).unwrap();
    region.write(2 * MIB - 1, &[1]).unwrap();
}

/// A late access finds memory of the process, and bytes that were cut off are zero when they come
/// back.
#[test]
fn a_region_that_was_cut_grows_again() {
    for dir in [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let path = dir.path().join("pool");
        let options = RegionOptions { create_bytes: Some(4 * MIB), ..growing() };
        let region = Region::open(&path, &options).unwrap();
        region.write_streaming(MIB - 64, &vec![7; 3 << 20]).unwrap();
        region.shrink(MIB + 100).unwrap();
        region.shrink(2 * MIB).unwrap();
        assert_eq!(region.len_bytes(), MIB + 100, "as short already");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB + 100);
        assert_eq!(region.load_u64(3 * MIB).unwrap(), 0);
        region.store_u64(3 * MIB, 9).unwrap();
        region.persist(3 * MIB, 8).unwrap();
        assert!(region.load_u64(4 * MIB).is_err(), "it was never so long");
        region.grow(8 * MIB).unwrap();
        for (offset, word) in [(MIB, 0x0707_0707_0707_0707), (2 * MIB, 0), (3 * MIB, 0)] {
            assert_eq!(region.load_u64(offset).unwrap(), word, "at {offset}");
        }
        region.store_u64(8 * MIB - 8, 5).unwrap();
        region.persist(8 * MIB - 8, 8).unwrap();
        drop(region);
        let region = Region::open(&path, &RegionOptions::default()).unwrap();
        assert_eq!(region.load_u64(8 * MIB - 8).unwrap(), 5);
        assert!(matches!(region.shrink(0), Err(PmemError::Empty { .. })));
    }
}

/// A thread stores to old bytes all the while, and to new bytes as soon as the length includes
/// them.
#[test]
fn threads_use_a_region_that_grows() {
    let options = RegionOptions { limit_bytes: 64 * MIB, ..RegionOptions::default() };
    let region = Region::anonymous_with(MIB, &options).unwrap();
    let is_grown = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                let end = region.len_bytes();
                region.store_u64(end - 8, end).unwrap();
                region.store_u64(0, end).unwrap();
                if is_grown.load(Ordering::Acquire) {
                    break;
                }
            }
        });
        for len_mib in 2..=64 {
            region.grow(len_mib * MIB).unwrap();
        }
        is_grown.store(true, Ordering::Release);
    });
    assert_eq!(region.len_bytes(), 64 * MIB);
    let last = region.load_u64(0).unwrap();
    assert_eq!(region.load_u64(last - 8).unwrap(), last);
}
