//! A pool that gets another size: what stays in it, what is refused, and what a failure leaves.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use super::{
    NO_THREAD, PAGES, SHARDED, binding, memory, memory_of, open, pool, pool_of, read, write,
};
use crate::cache::error::CacheError;
use crate::cache::pages::index::Stored;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::{DeviceErrorKind, Op};
use crate::pmem::RegionOptions;
use crate::tier::Tier;

const MIB: u64 = 1 << 20;

/// A pool of `slots` slots in memory that can grow.
fn growing(slots: u64) -> Arc<Region> {
    let options = RegionOptions { limit_bytes: 64 * MIB, ..RegionOptions::default() };
    super::pool_with(slots, 4096, &options)
}

fn slots(device: &CacheDevice) -> u32 {
    device.core.store.slots()
}

#[test]
fn a_pool_that_grew_keeps_its_pages_warm_and_takes_more() {
    let (region, backing) = (growing(40), memory());
    let device = open(&region, &backing);
    (0..30).for_each(|page| write(&device, page, 1));
    device.resize(region.len_bytes() + MIB).unwrap();
    // The gap of four pages, and three stripes and a part.
    assert_eq!(slots(&device), 40 + 248);
    (30..PAGES).for_each(|page| write(&device, page, 2));
    assert_eq!(device.core.pages.usage().live, PAGES);
    for device in [device, open(&region, &backing)] {
        assert_eq!((slots(&device), device.core.pages.usage().dirty), (40 + 248, PAGES));
        (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 1 + u8::from(page >= 30)));
    }
}

#[test]
fn a_pool_that_shrinks_loses_no_page_and_gets_its_slots_back() {
    let (region, backing) = (growing(200), memory());
    let device = open(&region, &backing);
    let before_bytes = region.len_bytes();
    for _ in 0..2 {
        (0..PAGES).for_each(|page| write(&device, page, 3));
    }
    for pool_bytes in [before_bytes - MIB / 2, before_bytes, MIB / 4, before_bytes + MIB] {
        device.resize(pool_bytes).unwrap();
        assert_eq!(region.len_bytes(), pool_bytes);
        (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 3));
        (0..PAGES).for_each(|page| write(&device, page, 3));
        assert_eq!(check::check(&region).unwrap().findings, [""; 0]);
    }
    drop(device);
    let device = open(&region, &backing);
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 3));
}

#[test]
fn every_shard_gets_its_slots() {
    let (region, backing) = (growing(SHARDED), memory());
    let device = open(&region, &backing);
    (0..PAGES).for_each(|page| write(&device, page, 4));
    for slots_wanted in [SHARDED + 77, SHARDED / 3, 7 * 1024] {
        let pool_bytes = (slots_wanted + slots_wanted / 64 + 20) * 4096;
        device.resize(pool_bytes).unwrap();
        let count = |number| device.core.pages.shards.lock(number).allocator.slot_count();
        let sum: u32 = (0..device.core.pages.shards.count()).map(count).sum();
        assert_eq!(sum, slots(&device));
        (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 4));
    }
}

#[test]
fn a_backing_that_fails_leaves_the_old_size_and_all_slots() {
    let (region, backing) = (pool(200), memory());
    let fault = Arc::new(Fault::new(backing, 1));
    let device = open(&region, &fault);
    (0..PAGES).for_each(|page| write(&device, page, 5));
    fault.add(Rule::new(&[Op::Write], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    let error = device.resize(MIB / 4).unwrap_err();
    assert!(matches!(error, CacheError::Backing(_)), "{error}");
    assert_eq!((slots(&device), device.core.pages.usage().live), (200, PAGES));
    (0..PAGES).for_each(|page| write(&device, page, 6));
    assert_eq!(CacheHeader::read(&region).unwrap().places.slots(), 200);
    fault.heal();
    device.resize(MIB / 4).unwrap();
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 6));
}

#[test]
fn sizes_that_do_not_do_are_refused() {
    let (region, backing) = (growing(SHARDED), memory());
    let device = open(&region, &backing);
    let few = device.resize(20 * 4096).unwrap_err();
    assert!(matches!(few, CacheError::TooFewSlots { expected: 20, .. }), "{few}");
    assert!(matches!(device.resize(4096).unwrap_err(), CacheError::Pool(_)));
    let beyond = device.resize(65 * MIB).unwrap_err();
    assert!(beyond.to_string().contains("memory"), "{beyond}");
    for value in ["", "-1", "20K", "65M", "many"] {
        let error = device.set("size", value).unwrap_err().to_string();
        assert!(error.contains("`size`") && !error.contains('\n'), "{error}");
    }
    assert_eq!(u64::from(slots(&device)), SHARDED);
    device.shutdown().unwrap();
    assert!(matches!(device.resize(MIB).unwrap_err(), CacheError::ShutDown));
}

#[test]
fn pages_that_no_flush_covered_are_committed_before_they_leave() {
    let (region, backing) = (pool(200), memory());
    let options = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let device = CacheDevice::open(region, backing, binding(), options).unwrap();
    (0..60).for_each(|page| write(&device, page, 7));
    (0..60).for_each(|page| write(&device, page, 8));
    device.resize(MIB / 2).unwrap();
    (0..60).for_each(|page| assert_eq!(read(&device, page), 8));
}

#[test]
fn a_version_that_was_replaced_does_not_come_back_with_another_size() {
    let sharding = Sharding { count: 1, ..Sharding::default() };
    let mut shard = Shard::new(0, sharding, 16, &crate::cache::policy::REPLACEMENTS[0]);
    let stored =
        Stored { dirty: true, zero: false, record: false, over: false, group: 0, class: 0 };
    let [old, new] = [false, true].map(|is_replaced| {
        let taken = shard.allocator.take().unwrap();
        assert_eq!(shard.publish(7, &taken, stored), is_replaced);
        taken
    });
    assert!(old.slot > new.slot, "a look through all slots meets the older one last");
    shard.resize(20);
    assert_eq!(shard.find(7).unwrap().version, new.version);
    assert_eq!((shard.usage().live, shard.allocator.available()), (1, 19));
}

#[test]
fn a_page_and_the_record_over_it_leave_once() {
    let backing = memory_of(512);
    let device = CacheDevice::open(pool_of(130, 512), backing, binding(), NO_THREAD).unwrap();
    (0..100).for_each(|page| write(&device, page, 7));
    device.clean_all().unwrap();
    for page in 90..100 {
        device.write(page * 4096 + 512, &[8; 512], WriteFlags::default()).unwrap();
    }
    assert_eq!(device.core.pages.usage().bases, 10, "all slots of these leave");
    device.resize(24 * 4096).unwrap();
    assert_eq!(device.core.pages.usage().live, u64::from(slots(&device)), "the others stay");
    for page in 0..100 {
        let mut data = [0; 4096];
        device.read(page * 4096, &mut data).unwrap();
        assert_eq!((data[0], data[512]), (7, if page < 90 { 7 } else { 8 }));
    }
}

/// Readers and writers go on in a file that becomes longer and shorter under them.
#[test]
fn requests_go_on_while_the_file_grows_and_shrinks() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = RegionOptions {
        create_bytes: Some(2 * MIB),
        limit_bytes: 16 * MIB,
        ..RegionOptions::default()
    };
    let region = Arc::new(Region::open(&dir.path().join("pool"), &options).unwrap());
    create(&region, &CacheOptions::default()).unwrap();
    let backing = memory();
    let options = CacheDeviceOptions::default();
    let device =
        CacheDevice::open(Arc::clone(&region), Arc::clone(&backing) as _, binding(), options)
            .unwrap();
    let is_done = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let workers: Vec<_> = [0, 1]
            .map(|own| {
                let (device, is_done) = (&device, &is_done);
                scope.spawn(move || {
                    let mut byte = 1_u8;
                    // At least once, however late the thread begins.
                    loop {
                        byte = byte.wrapping_add(1);
                        (own..PAGES).step_by(2).for_each(|page| write(device, page, byte));
                        (own..PAGES)
                            .step_by(2)
                            .for_each(|page| assert_eq!(read(device, page), byte));
                        if is_done.load(std::sync::atomic::Ordering::SeqCst) {
                            return byte;
                        }
                    }
                })
            })
            .into();
        for turn in 0..30 {
            device.resize([MIB / 2, 5 * MIB, MIB, 2 * MIB][turn % 4]).unwrap();
        }
        is_done.store(true, std::sync::atomic::Ordering::SeqCst);
        workers.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
    });
    drop(device);
    let device = open(&region, &backing);
    for page in 0..PAGES {
        let own = usize::try_from(page % 2).unwrap();
        assert_eq!(read(&device, page), last[own]);
    }
}
