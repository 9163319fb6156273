//! The bodies of the fuzz targets for pools: any bytes give an error or a device, and never a
//! panic.

use std::sync::Arc;

use zerocopy::IntoBytes;

use super::info::read_info;
use super::{Btt, BttError, BttOptions, FlogSlots, Version, check, create};
use crate::device::{BlockDevice, BlockDeviceExt, WriteFlags, ZeroFlags};
use crate::pmem::{PmemError, Region};

const POOL_BYTES: u64 = 96 << 10;

/// Opens, checks and uses a pool that holds `bytes` as they are.
///
/// # Panics
/// The engine has a bug.
pub fn arbitrary_pool(bytes: &[u8]) {
    let len = (bytes.len() as u64).max(1);
    let Ok(region) = Region::anonymous(len) else { return };
    region.write(0, bytes).expect("the bytes fit their region");
    exercise(&Arc::new(region));
}

/// Makes a small pool, patches it by `bytes`, and opens, checks and uses it. The first byte chooses
/// the form of the pool and whether the info blocks' checksums are repaired. Each 4 bytes behind it
/// are an offset in two bytes, an area (metadata or anywhere) and a value.
///
/// # Panics
/// The engine has a bug.
pub fn patched_pool(bytes: &[u8]) {
    let Some((&form, patches)) = bytes.split_first() else { return };
    let (region, base) = small_pool(form);
    for patch in patches.chunks_exact(4) {
        let offset = u64::from(patch[0]) | u64::from(patch[1]) << 8;
        let offset = if patch[2] % 2 == 0 { base + offset % 128 } else { offset * 64 % POOL_BYTES };
        let offset = offset + u64::from(patch[2] / 2) % 64;
        if offset < POOL_BYTES {
            region.write(offset, &patch[3..]).expect("the offset is inside");
        }
    }
    if form & 8 != 0 {
        let _ = repair_checksum(&region, base);
    }
    exercise(&region);
}

fn small_pool(form: u8) -> (Arc<Region>, u64) {
    let region = Arc::new(Region::anonymous(POOL_BYTES).expect("a little memory can be had"));
    let version = match form & 0x11 {
        0 => Version::V1_1,
        1 => Version::V2_0,
        _ => Version::Libpmemblk,
    };
    let flog_slots = if form & 2 == 0 { FlogSlots::ZeroOne } else { FlogSlots::ZeroTwo };
    let lba_bytes = if form & 4 == 0 { 512 } else { 4104 };
    let options = BttOptions { version, flog_slots, lba_bytes, lanes: 4, ..BttOptions::default() };
    create(&region, &options).expect("a small pool fits");
    let btt = Btt::open(Arc::clone(&region)).expect("a new pool opens");
    let block = vec![1; btt.geometry().block_bytes as usize];
    for at in [0, 1, 0, 2] {
        btt.write(at * block.len() as u64, &block, WriteFlags::default())
            .expect("a new pool is written");
    }
    (region, version.base())
}

fn repair_checksum(region: &Region, base: u64) -> Result<(), PmemError> {
    let mut info = read_info(region, base)?;
    info.checksum = info.fletcher64().into();
    region.write(base, info.as_bytes())
}

fn exercise(region: &Arc<Region>) {
    let _ = check::check(region, &mut |_| ());
    let _ = use_device(region);
    let _ = super::repair(region, &mut |_| ());
    let _ = use_device(region);
}

fn use_device(region: &Arc<Region>) -> Result<(), BttError> {
    let btt = Btt::open(Arc::clone(region))?;
    let geometry = btt.geometry();
    let mut block = vec![0; geometry.block_bytes as usize];
    let block_bytes = u64::from(geometry.block_bytes);
    for at in (0..geometry.blocks.min(200)).chain([geometry.blocks - 1]) {
        // Errors are fine, panics are not.
        let _ = btt.read(at * block_bytes, &mut block);
        let _ = btt.write(at * block_bytes, &block, WriteFlags::default());
        let _ = btt.write_zeroes(at * block_bytes, block_bytes, ZeroFlags::default());
    }
    let _ = btt.status(0, geometry.size_bytes(), 16);
    Ok(())
}
