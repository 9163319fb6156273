//! One flipped bit in the metadata of a cache: the check finds it, or it makes no difference.

use std::sync::Arc;

use super::check::{check, repair_changed};
use super::layout::{COMMIT_BYTES, commit_offset};
use super::tests::{memory, open, pool, read, write};
use super::*;
use crate::pmem::flips::scrambled;
use crate::pmem::{Region, flips};

const SLOTS: u64 = 64;
const WRITTEN: u64 = 40;

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

fn region_of(bytes: &[u8]) -> Arc<Region> {
    let region = Region::anonymous(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    Arc::new(region)
}

#[test]
fn check_finds_random_flips_that_matter_and_repair_restores_slot_headers() {
    let (region, backing) = (pool(SLOTS), memory());
    let device = open(&region, &backing);
    (0..WRITTEN).for_each(|page| write(&device, page, 1));
    (0..WRITTEN).step_by(3).for_each(|page| write(&device, page, 2));
    drop(device);
    let expected = |page: u64| if page.is_multiple_of(3) { 2 } else { 1 };
    let mut bytes = bytes_of(&region);
    assert_eq!(check(&region).unwrap().findings, Vec::<String>::new());
    let header = CacheHeader::read(&region).unwrap();
    let base = header.superblock.data_offset;
    let places = [
        (0, 4096),
        (region.len_bytes() - 4096, 4096),
        (base, 8192),
        (base + commit_offset(0), COMMIT_BYTES as u64),
        (base + commit_offset(1), COMMIT_BYTES as u64),
        (header.places.header(0), SLOTS * 64),
        (header.places.header(0), SLOTS * 64),
    ];
    for n in flips::numbers(1000) {
        let (start, len) = places[usize::try_from(n).unwrap() % places.len()];
        let bit = start * 8 + scrambled(n) % (len * 8);
        let at = usize::try_from(bit / 8).unwrap();
        bytes[at] ^= 1 << (bit % 8);
        let flipped = region_of(&bytes);
        let found = check(&flipped);
        let is_right = |region: &Arc<Region>| {
            let device = open(region, &backing);
            (0..WRITTEN).all(|page| read(&device, page) == expected(page))
        };
        match found {
            Ok(report) if report.faults == 0 => assert!(is_right(&flipped), "bit {bit}"),
            Ok(report) if !report.changed_slots.is_empty() => {
                assert_eq!(repair_changed(&flipped, &report.changed_slots).unwrap(), 1);
                assert_eq!(check(&flipped).unwrap().faults, 0, "bit {bit}");
                assert!(is_right(&flipped), "bit {bit}, repaired");
            }
            _ => {}
        }
        bytes[at] ^= 1 << (bit % 8);
    }
}
