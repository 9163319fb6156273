//! The body of the fuzz target for cache pools: any bytes give an error or a device, never a panic.

use std::sync::Arc;

use super::check::check;
use super::engine;
use super::store::header::{Binding, CacheHeader, CacheOptions, create};
use super::store::layout::{
    HEADER, PAGE, PAGE_BYTES, SETTINGS_BYTES_MAX, SlotHeader, UNITS, part_of, split_header,
};
use super::{CacheDevice, CacheDeviceOptions};
use crate::device::memory::MemoryDevice;
use crate::device::{BlockDeviceExt, WriteFlags, ZeroFlags};
use crate::pmem::Region;
use crate::tier::Tier;
use crate::tier::background::{Step, Work};

/// Pages of the backing.
const PAGES: u64 = 32;
/// Superblocks, headers, and 18 slots.
const POOL_BYTES: u64 = 29 * PAGE_BYTES;
/// Most background steps of one use of a device.
const STEPS_MAX: usize = 100;
/// Length of a patch in bytes.
const PATCH: usize = 6;

/// Makes a small pool, patches it as `bytes` say, and checks, opens, uses and repairs it. The first
/// byte chooses the form of the pool. The other bytes are the text of the pool's settings, or
/// patches of six bytes: each changes a byte anywhere, or stores a valid header in a slot.
///
/// # Panics
/// Panics if the engine has a bug.
pub fn patched_pool(bytes: &[u8]) {
    let Some((&form, patches)) = bytes.split_first() else { return };
    let options = CacheDeviceOptions {
        no_thread: true,
        atomic_flush: form & 2 != 0,
        adopt_foreign: form & 4 != 0,
        ..CacheDeviceOptions::default()
    };
    let region = small_pool(form, options);
    if form & 8 != 0 {
        store_settings(&region, patches);
    } else {
        for patch in patches.as_chunks().0 {
            patch_pool(&region, *patch);
        }
    }
    exercise(&region, options);
}

fn patch_pool(region: &Region, patch: [u8; PATCH]) {
    if patch[0].is_multiple_of(4) {
        store_header(region, patch);
    } else {
        change_bytes(region, patch);
    }
}

fn backing() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(512, PAGES * PAGE_BYTES / 512).expect("a little memory can be had"))
}

fn open(region: &Arc<Region>, options: CacheDeviceOptions) -> Option<CacheDevice> {
    let binding = Binding { identity: 1, name: "memory".into(), pages: PAGES };
    CacheDevice::open(Arc::clone(region), backing(), binding, options).ok()
}

/// Creates a pool with some written pages: some in part, and some twice.
fn small_pool(form: u8, options: CacheDeviceOptions) -> Arc<Region> {
    let region = Arc::new(Region::anonymous(POOL_BYTES).expect("a little memory can be had"));
    let block_bytes = if form & 1 == 0 { 4096 } else { 512 };
    create(&region, &CacheOptions { block_bytes, salt: 1, ..CacheOptions::default() })
        .expect("a small pool fits");
    let device = open(&region, options).expect("a new pool opens");
    for page in [0, 1, 2, 1, 4, 5] {
        let len = if page % 2 == 0 { PAGE } else { block_bytes as usize };
        device
            .write(page * PAGE_BYTES, &[3; PAGE][..len], WriteFlags::default())
            .expect("a new pool is written");
    }
    device.flush().expect("a new pool is flushed");
    drop(device);
    region
}

/// Changes one byte anywhere.
fn change_bytes(region: &Region, patch: [u8; PATCH]) {
    let offset = u64::from(u32::from_le_bytes([patch[1], patch[2], patch[3], 0]));
    region.write(offset % POOL_BYTES, &patch[4..5]).expect("the offset is inside");
}

/// Stores a header with a right checksum and any content.
fn store_header(region: &Region, patch: [u8; PATCH]) {
    let Ok(header) = CacheHeader::read(region) else { return };
    let [kind, slot, page, version, lines, rest] = patch;
    let slot = u32::from(slot) % header.places.slots().max(1);
    let (is_far, is_part) = (kind & 4 != 0, kind & 8 != 0);
    let stored = SlotHeader {
        page: if is_far { u64::MAX >> 16 } else { u64::from(page) % (PAGES + 2) },
        version: if kind & 16 == 0 { version.into() } else { u64::MAX - u64::from(version) },
        lane: u16::from(rest) << (kind & 8),
        batch: u64::from(rest % 8) << (kind & 32),
        group: u64::from(rest / 64),
        lines: if is_part { u64::from(lines) } else { u64::MAX },
        over: if is_part { u64::from(rest % 16) } else { 0 },
        zero: kind & 64 != 0,
        dirty: kind & 128 != 0,
        data_check: u32::from(lines) << 16,
    };
    let splits = kind & 1 != 0;
    let part = if splits { part_of(slot, u32::from(rest) % UNITS) } else { slot };
    if splits {
        let bytes = split_header(header.salt, slot);
        region.write(header.places.header(slot), &bytes).expect("the slot is inside");
    }
    let bytes: [u8; HEADER] = stored.encode(header.salt, part);
    region.write(header.places.header(part), &bytes).expect("the slot is inside");
}

fn store_settings(region: &Region, text: &[u8]) {
    let Ok(mut header) = CacheHeader::read(region) else { return };
    let text = &text[..text.len().min(SETTINGS_BYTES_MAX / 3)];
    header.settings = String::from_utf8_lossy(text).into_owned();
    let _ = header.write(region);
}

fn exercise(region: &Arc<Region>, options: CacheDeviceOptions) {
    let _ = check(region);
    use_device(region, options);
    let _ = engine::repair_headers(region);
    let _ = check(region);
    use_device(region, options);
}

/// Uses the device in many ways. Errors are fine, panics are not.
fn use_device(region: &Arc<Region>, options: CacheDeviceOptions) {
    let Some(device) = open(region, options) else { return };
    let mut page = [0; PAGE];
    for at in 0..PAGES {
        let _ = device.read(at * PAGE_BYTES, &mut page);
        let _ = device.write(at * PAGE_BYTES, &[1; PAGE], WriteFlags::default());
        let _ = device.write_zeroes(at * PAGE_BYTES, PAGE_BYTES, ZeroFlags::default());
    }
    let mut background = device.background();
    let _ = (0..STEPS_MAX).find(|_| background.step() != Step::Again);
    for setting in device.settings() {
        let _ = device.set(&setting.key, &setting.value);
    }
    let _ = device.flush();
    let _ = device.clean_all();
}
