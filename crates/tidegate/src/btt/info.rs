//! Finding and validating the arenas of a region by their info blocks.

use zerocopy::{FromZeros, IntoBytes};

use super::flog::Flog;
use super::layout::{ARENA_BYTES_MIN, Info, PAGE_BYTES, SIGNATURE, Version};
use super::map::Map;
use super::pmemblk::POOL_SIGNATURE;
use super::{BttError, pmemblk};
use crate::pmem::{PmemError, Region};

/// An arena that was found on the medium: its start and its info block.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundArena<'a> {
    pub(super) region: &'a Region,
    pub(super) version: Version,
    pub(super) base: u64,
    pub(super) info: Info,
}

impl<'a> FoundArena<'a> {
    /// Returns the arena's map.
    pub(super) fn map(&self) -> Map<'a> {
        let base = self.base + self.info.mapoff.get();
        Map { region: self.region, base, blocks: self.info.internal_nlba.get() }
    }

    /// Returns the arena's flog.
    ///
    /// # Errors
    /// The same errors as [`Flog::open`].
    pub(super) fn flog(&self) -> Result<Flog<'a>, PmemError> {
        let offset = self.base + self.info.logoff.get();
        let is_pair = self.version == Version::Libpmemblk;
        Flog::open(self.region, offset, self.info.nfree.get(), is_pair)
    }
}

/// Reads the info block at `offset` unchecked.
pub(super) fn read_info(region: &Region, offset: u64) -> Result<Info, PmemError> {
    let mut info = Info::new_zeroed();
    region.read(offset, info.as_mut_bytes())?;
    Ok(info)
}

/// Returns the version of the BTT in the region, judged by the signature of the first arena, or of
/// a pool of libpmemblk. The rest may be damaged.
///
/// # Errors
/// [`BttError::Pmem`] if the memory cannot be read.
pub fn probe(region: &Region) -> Result<Option<Version>, BttError> {
    for version in [Version::V1_1, Version::V2_0] {
        if begins_with(region, version.base(), &SIGNATURE)? {
            return Ok(Some(version));
        }
    }
    let is_libpmemblk = begins_with(region, 0, &POOL_SIGNATURE)?;
    Ok(is_libpmemblk.then_some(Version::Libpmemblk))
}

/// Returns whether `expected` is at `offset`. The pool may be cut off right behind it.
pub(super) fn begins_with<const LEN: usize>(
    region: &Region,
    offset: u64,
    expected: &[u8; LEN],
) -> Result<bool, BttError> {
    let mut found = [0; LEN];
    if region.len_bytes() < offset + LEN as u64 {
        return Ok(false);
    }
    match region.read(offset, &mut found) {
        Ok(()) => Ok(found == *expected),
        Err(PmemError::Poisoned { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Reads the info block of `arena` at `base`.
///
/// # Errors
/// [`BttError::Truncated`] if the region ends before the arena; [`BttError::Pmem`] if the memory
/// failed.
pub(super) fn read_uncut(
    region: &Region,
    version: Version,
    arena: usize,
    base: u64,
) -> Result<Info, BttError> {
    let found_bytes = region.len_bytes();
    let cut_off = |needed_bytes| BttError::Truncated { arena, needed_bytes, found_bytes };
    if found_bytes < base + PAGE_BYTES {
        return Err(cut_off(base + ARENA_BYTES_MIN));
    }
    let info = read_info(region, base)?;
    match info.end_bytes(version) {
        Some(end) if base + end > found_bytes => Err(cut_off(base + end)),
        _ => Ok(info),
    }
}

/// Finds the arenas of a region, in the order of their lbas.
pub(super) fn discover(region: &Region) -> Result<(Version, Vec<FoundArena<'_>>), BttError> {
    let version = probe(region)?.ok_or(BttError::NotFound)?;
    let mut arenas: Vec<FoundArena<'_>> = Vec::new();
    let mut base = version.base();
    loop {
        let info = read_uncut(region, version, arenas.len(), base)?;
        let damaged = |reason| BttError::InfoDamaged { arena: arenas.len(), offset: base, reason };
        info.validate(version, region.len_bytes() - base).map_err(damaged)?;
        if let Some(first) = arenas.first().filter(|first| !same_device(&first.info, &info)) {
            let (found, expected) =
                (info.external_lbasize.get(), first.info.external_lbasize.get());
            let reason =
                format!("its uuid or lba size ({found}) is not the first arena's ({expected})");
            return Err(damaged(reason));
        }
        if version == Version::Libpmemblk && arenas.is_empty() {
            pmemblk::expect_own(region, &info)?;
        }
        arenas.push(FoundArena { region, version, base, info });
        match info.nextoff.get() {
            0 => return Ok((version, arenas)),
            next => base += next,
        }
    }
}

fn same_device(first: &Info, other: &Info) -> bool {
    first.uuid == other.uuid && first.external_lbasize == other.external_lbasize
}
