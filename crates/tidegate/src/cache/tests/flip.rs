//! One flipped bit in the metadata of a cache: the check finds it, or it makes no difference.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::*;
use super::{memory, open, pool, read, write};
use crate::cache::check::{check, repair_changed};
use crate::cache::engine::CacheEngine;
use crate::cache::recover::{Newest, Scan, Scanned};
use crate::cache::store::layout::{COMMIT_BYTES, Decoded, PAGE_BYTES, SlotHeader, commit_offset};
use crate::device::memory::MemoryDevice;
use crate::pmem::flips::scrambled;
use crate::pmem::{Region, flips};
use crate::tier::Engine;

const SLOTS: u64 = 64;
const WRITTEN: u64 = 40;

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// A pool whose pages below [`WRITTEN`] were written, every third one twice, and its backing.
fn written() -> (Arc<Region>, Arc<MemoryDevice>) {
    let (region, backing) = (pool(SLOTS), memory());
    let device = open(&region, &backing);
    (0..WRITTEN).for_each(|page| write(&device, page, 1));
    (0..WRITTEN).step_by(3).for_each(|page| write(&device, page, 2));
    (region, backing)
}

fn expected(page: u64) -> u8 {
    if page.is_multiple_of(3) { 2 } else { 1 }
}

/// The slot that was stored last, and what its header says.
fn last_stored(region: &Region, header: &CacheHeader) -> (u32, SlotHeader) {
    let mut newest = Newest::default();
    let see = |scanned: Scanned| {
        if let Decoded::Header(found) = scanned.decoded {
            newest.see(scanned.slot, &found);
        }
        Ok(())
    };
    Scan { region, header }.each(see).unwrap();
    let members: Vec<_> = newest.members().copied().collect();
    assert_eq!(members.len(), 1, "one thread wrote by one lane");
    members[0]
}

fn region_of(bytes: &[u8]) -> Arc<Region> {
    let region = Region::anonymous(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    Arc::new(region)
}

fn copy_of(region: &Region) -> Region {
    let copy = Region::anonymous(region.len_bytes()).unwrap();
    copy.write(0, &bytes_of(region)).unwrap();
    copy
}

#[test]
fn check_finds_random_flips_that_matter_and_repair_restores_slot_headers() {
    let (region, backing) = written();
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
    let flips = flips::numbers(10_000);
    let (count, mut found_flips, mut repaired, mut harmless) = (flips.end - flips.start, 0, 0, 0);
    for n in flips {
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
            Ok(report) if report.faults == 0 => {
                assert!(is_right(&flipped), "bit {bit}");
                harmless += 1;
            }
            Ok(report) if !report.changed_slots.is_empty() => {
                assert_eq!(repair_changed(&flipped, &report.changed_slots).unwrap(), 1);
                assert_eq!(check(&flipped).unwrap().faults, 0, "bit {bit}");
                assert!(is_right(&flipped), "bit {bit}, repaired");
                repaired += 1;
            }
            _ => found_flips += 1,
        }
        bytes[at] ^= 1 << (bit % 8);
    }
    println!("{found_flips} found, {repaired} found and repaired, {harmless} make no difference");
    assert!(found_flips >= count / 2, "{found_flips} of {count} found");
    assert!(repaired >= count / 10, "{repaired} of {count} found and repaired");
    assert!(harmless <= count / 5, "{harmless} of {count} make no difference");
}

/// A flip in data is damage by the name of its page, in the newest batch too, of which a crash
/// could have left the header without the data. An older version has none: the newest one counts.
#[test]
fn check_names_each_page_of_whose_data_a_bit_changed() {
    let (region, backing) = written();
    let header = CacheHeader::read(&region).unwrap();
    let (last, _) = last_stored(&region, &header);
    let mut newest = BTreeMap::new();
    let see = |Scanned { slot, decoded, .. }: Scanned| {
        if let Decoded::Header(found) = decoded {
            let known = newest.entry(found.page).or_insert((found.version, slot));
            *known = (found.version, slot).max(*known);
        }
        Ok(())
    };
    Scan { region: &region, header: &header }.each(see).unwrap();
    let page_in: HashMap<u32, u64> =
        newest.iter().map(|(page, (_, slot))| (*slot, *page)).collect();
    let mut bytes = bytes_of(&region);
    let slots = (0..header.places.slots()).chain(std::iter::repeat_n(last, 64));
    for (n, slot) in (0..).zip(slots) {
        let bit = header.places.data(slot) * 8 + scrambled(n) % (PAGE_BYTES * 8);
        let at = usize::try_from(bit / 8).unwrap();
        bytes[at] ^= 1 << (bit % 8);
        let flipped = region_of(&bytes);
        bytes[at] ^= 1 << (bit % 8);
        let report = check(&flipped).unwrap();
        let Some(page) = page_in.get(&slot) else {
            assert_eq!(report.faults, 0, "slot {slot} holds no newest version");
            continue;
        };
        let name = format!("slot {slot}: the data of the dirty page at offset {}", page * 4096);
        let findings = &report.findings;
        assert!(report.faults == 1 && findings[0].starts_with(&name), "{findings:?}");
        assert_eq!(report.unfinished_slots, 0, "slot {slot}");
        assert_eq!(report.doubtful_lanes, u64::from(slot == last), "slot {slot}");
        assert_eq!(findings[0].contains("differs by one bit"), slot == last, "{findings:?}");
        let device = open(&flipped, &backing);
        let offset = (slot == last).then_some(page * PAGE_BYTES);
        assert_eq!(device.recovered().first_changed_offset, offset, "slot {slot}");
    }
}

/// What a crash interrupts is the newest batch of each lane: as many headers as these have, and no
/// more, may be none.
#[test]
fn more_headers_that_are_none_than_a_crash_leaves_are_damage() {
    let most = 64 * 256;
    let region = Region::anonymous(72 << 20).unwrap();
    let places = create(&region, &CacheOptions::default()).unwrap().places;
    assert!(u64::from(places.slots()) > most);
    let spoil = |slot: u64| {
        let at = places.header(u32::try_from(slot).unwrap());
        region.write(at, &scrambled(slot).to_le_bytes().repeat(8)).unwrap();
    };
    (0..most).for_each(spoil);
    let report = check(&region).unwrap();
    assert_eq!((report.faults, report.unfinished_slots), (0, most), "{:?}", report.findings);
    spoil(most);
    let report = check(&region).unwrap();
    assert_eq!(report.faults, 1);
    assert!(report.findings[0].starts_with("16385 slots have headers that are none"));
}

/// A crash while the slot of an older version is filled leaves that version's header over other
/// data. The slot of the newest version is filled before its header is there.
#[test]
fn an_older_version_that_is_written_over_is_no_fault_and_the_newest_is() {
    let (region, backing) = (pool(SLOTS), memory());
    let device = open(&region, &backing);
    for byte in [1, 2] {
        device.write(0, &[byte; 2 * PAGE], WriteFlags::default()).unwrap();
    }
    // Takes the slot of one of the two older versions.
    write(&device, 2, 1);
    drop(device);
    let header = CacheHeader::read(&region).unwrap();
    let (mut stored, mut newest) = (Vec::new(), HashMap::new());
    let see = |Scanned { slot, decoded, .. }: Scanned| {
        if let Decoded::Header(found) = decoded {
            stored.push((found.page, found.version, slot));
            let version = newest.entry(found.page).or_insert(0);
            *version = found.version.max(*version);
        }
        Ok(())
    };
    Scan { region: &region, header: &header }.each(see).unwrap();
    let (page, _, older) = *stored.iter().find(|it| newest[&it.0] > it.1).unwrap();
    let newer = stored.iter().find(|it| it.0 == page && it.2 != older).unwrap().2;
    let overwrite = |region: &Region, slot| {
        region.write(header.places.data(slot) + 100, b"bytes of the next page").unwrap();
    };
    for (slot, faults) in [(older, 0), (newer, 1)] {
        let copy = copy_of(&region);
        overwrite(&copy, slot);
        assert_eq!(check(&copy).unwrap().faults, faults);
    }
    // No version that is whole replaces the older one.
    overwrite(&region, older);
    overwrite(&region, newer);
    assert_eq!(check(&region).unwrap().faults, 2);
}

/// Damage of more than a bit in the newest batch looks like a write that never finished: the check
/// and the opening say of how many lanes that is so.
#[test]
fn a_last_write_of_which_nothing_tells_whether_it_was_acknowledged_is_told() {
    let (region, backing) = written();
    let header = CacheHeader::read(&region).unwrap();
    let (slot, found) = last_stored(&region, &header);
    region.write(header.places.data(slot) + 100, b"other bytes").unwrap();
    let checked =
        |region: &Arc<Region>| CacheEngine.check(copy_of(region), false, &mut |_| ()).unwrap();
    let found_by_check = checked(&region);
    let told = "of the last writes of 1 lane nothing tells whether they were acknowledged";
    assert_eq!(
        (found_by_check.faults, found_by_check.report["doubtful_lanes"].as_u64()),
        (0, Some(1))
    );
    assert!(found_by_check.lines.concat().contains(told), "{:?}", found_by_check.lines);
    let device = open(&region, &backing);
    let recovered = device.recovered();
    assert_eq!((recovered.unfinished, recovered.doubtful_lanes, recovered.changed), (1, 1, 0));
    assert_eq!(read(&device, found.page), 1, "the version before it");
    drop(device);
    let lines = checked(&region).lines;
    assert!(!lines.concat().contains("nothing tells"), "{lines:?}");
}
