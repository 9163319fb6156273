//! The policies in the engine: each choice does what it says, online and after an open.

use std::sync::Arc;

use super::check::check;
use super::index::Shard;
use super::policy::{REPLACEMENTS, ReplacementEntry};
use super::tests::{NO_THREAD, binding, memory, open, pool, read, work, write};
use super::*;
use crate::tier::Tier;

fn setting(device: &CacheDevice, key: &str) -> String {
    device.settings().into_iter().find(|it| it.key == key).unwrap().value
}

/// Pages that are cached.
fn cached(device: &CacheDevice, pages: Range<u64>) -> Vec<u64> {
    pages.filter(|page| device.core.find(*page).is_some()).collect()
}

#[test]
fn a_slot_takes_at_most_32_bytes_of_dram() {
    const SLOTS: u32 = 2000;
    for entry in &REPLACEMENTS {
        let shard = Shard::new(0, 1, SLOTS, entry);
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
    device.core.evict_clean(0).unwrap();
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
