//! The conversion of a pool of libpmemblk to a BTT of version 1.1, in place.
//!
//! The first arena of version 1.1 starts 4 KiB into the file, that of libpmemblk 8 KiB. All offsets
//! of an info block count from the start of its arena. So the first arena gets its info block one
//! page earlier, with offsets that are one page larger, and no data moves.

use std::sync::Arc;

use zerocopy::IntoBytes;

use super::create::{BttOptions, create};
use super::info::{FoundArena, begins_with, discover};
use super::layout::{Info, MapEntry, MapState, PAGE_BYTES, SIGNATURE, Version};
use super::pmemblk::POOL_SIGNATURE;
use super::{Btt, BttError, unwritten};
use crate::pmem::Region;

/// The bytes of an info block that are stored at once, as the commit of a conversion.
const COMMIT_BYTES: usize = 8;

/// Returns whether a conversion of the pool in `region` was cut off behind its commit.
pub fn is_half_converted(region: &Region) -> bool {
    let is_libpmemblk = begins_with(region, 0, &POOL_SIGNATURE).unwrap_or(false);
    let is_btt = begins_with(region, Version::V1_1.base(), &SIGNATURE).unwrap_or(false);
    is_libpmemblk && is_btt
}

/// Converts the pool of libpmemblk in `region`, with blocks of 512 or 4096 bytes, to a BTT of
/// version 1.1. The data stays where it is. Completes unfinished writes, and a conversion that a
/// crash cut off.
///
/// # Errors
/// The pool is damaged, or the memory failed.
pub fn convert(region: &Arc<Region>) -> Result<(), BttError> {
    if !is_half_converted(region) {
        if unwritten::is_unwritten(region)? {
            let lba_bytes = unwritten::planned(region)?[0].info.external_lbasize.get();
            let options = BttOptions { lba_bytes, ..BttOptions::default() };
            return create(region, &options).map(drop);
        }
        // Completes the unfinished writes, and refuses damage.
        drop(Btt::open(Arc::clone(region))?);
        commit(region)?;
    }
    finish(region)
}

/// Makes the region a BTT of version 1.1, with a store of 8 bytes.
fn commit(region: &Region) -> Result<(), BttError> {
    let (_, arenas) = discover(region)?;
    for arena in &arenas {
        fill_zero_blocks(arena)?;
    }
    let info = one_page_earlier(&arenas[0].info);
    let (signature, rest) = info.as_bytes().split_at(COMMIT_BYTES);
    let base = Version::V1_1.base();
    // libpmemblk uses all but the first 8 bytes here only while it has the pool open.
    region.write_streaming(base + COMMIT_BYTES as u64, rest)?;
    region.fence()?;
    let signature = signature.try_into().expect("the first 8 bytes");
    region.store_u64(base, u64::from_le_bytes(signature))?;
    Ok(region.persist(base, COMMIT_BYTES as u64)?)
}

/// Gives small blocks in zero state zeroes of their own: the kernel stops reading a page at the
/// first block of 512 bytes in that state.
fn fill_zero_blocks(arena: &FoundArena<'_>) -> Result<(), BttError> {
    let FoundArena { region, base, info, .. } = *arena;
    let lba_bytes = u64::from(info.external_lbasize.get());
    if lba_bytes >= PAGE_BYTES {
        return Ok(());
    }
    let map = arena.map();
    let data = base + info.dataoff.get();
    let stored_bytes = u64::from(info.internal_lbasize.get());
    for lba in 0..info.external_nlba.get() {
        let (entry, block) = map.load_block(lba)?;
        if entry.state() == MapState::Zero {
            region.zero_streaming(data + u64::from(block) * stored_bytes, lba_bytes)?;
            region.fence()?;
            map.store(lba, MapEntry::normal(block))?;
            map.write_back(lba)?;
        }
    }
    Ok(region.fence()?)
}

/// Moves the info block of the first arena to the page before it.
fn one_page_earlier(info: &Info) -> Info {
    let mut earlier = Info { parent_uuid: [0; 16], ..*info };
    let offsets = [
        &mut earlier.dataoff,
        &mut earlier.mapoff,
        &mut earlier.logoff,
        &mut earlier.info2off,
        &mut earlier.nextoff,
    ];
    for offset in offsets.into_iter().filter(|offset| offset.get() != 0) {
        *offset += PAGE_BYTES;
    }
    seal(&mut earlier);
    earlier
}

fn seal(info: &mut Info) {
    info.checksum = info.fletcher64().into();
}

/// Completes a conversion behind its commit: writes the other info blocks, which the kernel wants
/// without the UUID of libpmemblk's pool, and then erases that pool's header.
fn finish(region: &Region) -> Result<(), BttError> {
    let (_, arenas) = discover(region)?;
    for arena in &arenas {
        let mut info = Info { parent_uuid: [0; 16], ..arena.info };
        seal(&mut info);
        for offset in [arena.base + info.info2off.get(), arena.base] {
            region.write_streaming(offset, info.as_bytes())?;
            region.fence()?;
        }
    }
    region.zero_streaming(Version::Libpmemblk.base(), PAGE_BYTES)?;
    region.fence()?;
    region.zero_streaming(0, PAGE_BYTES)?;
    Ok(region.fence()?)
}
