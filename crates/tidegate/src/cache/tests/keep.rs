//! A cache that keeps what is dirty at its end: nothing is asked of the backing that can be left
//! out, and what was acknowledged is durable.

use std::sync::Arc;

use super::*;
use super::{NO_THREAD, PAGES, binding, copy_of, memory, open, pool, read, write};
use crate::cache::check::check;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::{DeviceErrorKind, Op};
use crate::tier::Tier;

/// All requests to the backing fail, and are counted.
fn fail_all(fault: &Fault) {
    fault.add(Rule::new(&[], When::Always, Effect::Fail(DeviceErrorKind::Io)));
}

/// A cleaner waits for a backing that does not answer: the end of the cache does not wait for it.
#[test]
fn the_end_waits_for_no_cleaner() {
    let (region, fault) = (pool(300), Arc::new(Fault::new(memory(), 1)));
    let options = CacheDeviceOptions { clean_from_pct: Some(0), ..Default::default() };
    let device = CacheDevice::open(Arc::clone(&region), fault.clone(), binding(), options).unwrap();
    fault.add(Rule::new(&[Op::Write], When::Always, Effect::Hang));
    (0..PAGES).for_each(|page| write(&device, page, 1));
    fault.wait_until_hung(1);
    device.stop_destaging();
    device.flush().unwrap();
    assert_eq!(device.state().pending_bytes, PAGES * PAGE_BYTES);
    drop(device);
    // The thread that hangs has the region still.
    let copy = copy_of(&region);
    fault.heal();
    fault.release();
    let device = open(&copy, &memory());
    assert_eq!(device.recovered().dirty_pages, PAGES);
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 1));
}

/// What was written to the backing before the pool was opened, and not flushed then, is left to the
/// next open.
#[test]
fn a_flush_at_the_end_does_not_reach_the_backing() {
    for mode in [Mode::WriteBack, Mode::WriteOnly] {
        let (region, fault) = (pool(300), Arc::new(Fault::new(memory(), 1)));
        fault.add(Rule::new(&[Op::Flush], When::Always, Effect::Fail(DeviceErrorKind::Io)));
        let device = open(&region, &fault);
        assert!(device.core.backing.traffic.needs_flush());
        fault.heal();
        device.set_mode(mode).unwrap();
        (0..20).for_each(|page| write(&device, page, 1));
        device.stop_destaging();
        device.flush().expect_err("the open met a loss");
        fail_all(&fault);
        let injected = fault.injected();
        device.flush().unwrap();
        assert_eq!((fault.injected(), device.core.pages.usage().dirty), (injected, 20), "{mode}");
        fault.heal();
        // It takes writes of the tier above all the same.
        write(&device, 30, 2);
        device.flush().unwrap();
        drop(device);
        let device = open(&region, &fault);
        assert_eq!(device.recovered().dirty_pages, 21);
        assert_eq!((read(&device, 19), read(&device, 30)), (1, 2));
    }
}

/// Also writes through the cache, whose pages are clean then.
#[test]
fn a_flush_at_the_end_covers_writes_that_reached_the_backing() {
    for mode in [Mode::WriteInvalidate, Mode::WriteThrough] {
        let fault = Arc::new(Fault::new(memory(), 1));
        let device = open(&pool(64), &fault);
        device.set_mode(mode).unwrap();
        write(&device, 3, 1);
        device.stop_destaging();
        fault.add(Rule::new(&[Op::Flush], When::Nth(1), Effect::Fail(DeviceErrorKind::Io)));
        assert_eq!(device.flush().unwrap_err().kind(), DeviceErrorKind::Io, "{mode}");
        write(&device, 3, 2);
        device.flush().unwrap();
        assert_eq!((fault.injected(), device.core.pages.usage().dirty), (1, 0), "{mode}");
        fail_all(&fault);
        device.flush().unwrap();
    }
}

#[test]
fn the_open_group_is_committed_at_the_end() {
    let (region, backing) = (pool(300), memory());
    let options = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let device =
        CacheDevice::open(Arc::clone(&region), backing.clone(), binding(), options).unwrap();
    (0..40).for_each(|page| write(&device, page, 1));
    device.stop_destaging();
    device.flush().unwrap();
    drop(device);
    assert_eq!(check(&region).unwrap().uncommitted_slots, 0);
    let device = open(&region, &backing);
    assert_eq!((device.recovered().dirty_pages, read(&device, 39)), (40, 1));
    assert_eq!(read(&*backing, 39), 0);
}

/// A change of the size writes pages to the backing: it is left where it is.
#[test]
fn the_end_waits_for_no_change_of_the_size() {
    let (region, fault) = (pool(300), Arc::new(Fault::new(memory(), 1)));
    let device = open(&region, &fault);
    (0..PAGES).for_each(|page| write(&device, page, 1));
    fault.add(Rule::new(&[Op::Write], When::Always, Effect::Hang));
    device.set("size", "512K").unwrap();
    fault.wait_until_hung(1);
    device.stop_destaging();
    device.flush().unwrap();
    drop(device);
    let copy = copy_of(&region);
    fault.heal();
    fault.release();
    let device = open(&copy, &memory());
    assert_eq!((device.core.store.slots(), device.recovered().dirty_pages), (300, PAGES));
}
