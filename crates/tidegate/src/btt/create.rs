//! Creation of a new, empty BTT.

use zerocopy::{FromZeros, IntoBytes};

use super::flog::unused_group;
use super::layout::{
    ARENA_BYTES_MIN, ArenaPlan, FLOG_GROUP_BYTES, FlogSlot, FlogSlots, Info, LANES,
    MAP_ENTRY_BYTES, PAGE_BYTES, SIGNATURE, Version, arena_sizes,
};
use super::{BttError, Summary, pmemblk};
use crate::pmem::Region;

/// How to create a BTT.
#[derive(Debug, Clone)]
pub struct BttOptions {
    /// External lba size in bytes, one of [`LBA_SIZES`](super::LBA_SIZES): 4096, for example, or
    /// 4104 for 8 bytes of metadata in each block. A pool of libpmemblk has blocks of any size.
    pub lba_bytes: u32,
    /// Version of the format.
    pub version: Version,
    /// The device's UUID.
    pub uuid: [u8; 16],
    /// UUID of the namespace that holds the BTT; all zero suits any namespace. In a pool of
    /// libpmemblk, that pool's UUID.
    pub parent_uuid: [u8; 16],
    /// Lanes of an arena, 1 to 256. The kernel makes 256. With fewer lanes the 16 MiB minimum of an
    /// arena does not apply, which is for simulation.
    pub lanes: u32,
    /// The flog slots that hold entries.
    pub flog_slots: FlogSlots,
}

impl Default for BttOptions {
    fn default() -> Self {
        Self {
            lba_bytes: 4096,
            version: Version::V1_1,
            uuid: *uuid::Uuid::new_v4().as_bytes(),
            parent_uuid: [0; 16],
            lanes: LANES,
            flog_slots: FlogSlots::ZeroOne,
        }
    }
}

impl BttOptions {
    /// Returns the options of a new pool of libpmemblk with blocks of `block_bytes`.
    pub fn libpmemblk(block_bytes: u32) -> Self {
        Self {
            lba_bytes: block_bytes,
            version: Version::Libpmemblk,
            parent_uuid: *uuid::Uuid::new_v4().as_bytes(),
            ..Self::default()
        }
    }

    fn arena_bytes_min(&self) -> u64 {
        if self.lanes < LANES { 4 * PAGE_BYTES } else { ARENA_BYTES_MIN }
    }

    /// Returns the arenas of a region of `region_bytes`, or `None` if it is too small for any.
    pub(super) fn plans(&self, region_bytes: u64) -> Option<Vec<ArenaPlan>> {
        let block_bytes = self.version.stored_bytes(self.lba_bytes)?;
        let space_bytes = region_bytes.checked_sub(self.version.base())?;
        let plans: Option<Vec<_>> = arena_sizes(space_bytes, self.arena_bytes_min())
            .into_iter()
            .map(|size_bytes| ArenaPlan::new(size_bytes, block_bytes, self.lanes))
            .collect();
        // As libpmemblk has it, so that it can make the same pool.
        let blocks_min = if self.version == Version::Libpmemblk { 2 * self.lanes } else { 0 };
        plans
            .filter(|plans| !plans.is_empty() && plans.iter().all(|plan| plan.blocks >= blocks_min))
    }
}

/// Returns the size in bytes of the smallest pool that holds a BTT with these options.
pub fn smallest_bytes(options: &BttOptions) -> u64 {
    options.version.base() + options.arena_bytes_min()
}

/// Returns the largest pool size in bytes, at most `region_bytes`, that a BTT uses completely.
pub fn largest_fit_bytes(options: &BttOptions, region_bytes: u64) -> u64 {
    let space_bytes = region_bytes.saturating_sub(options.version.base());
    let used: u64 = arena_sizes(space_bytes, options.arena_bytes_min()).iter().sum();
    options.version.base() + used - used % PAGE_BYTES
}

/// Writes an empty BTT over the whole region. The region's old content is lost; a crash during the
/// call leaves no valid BTT.
///
/// # Errors
/// [`BttError::Options`] if the options contradict each other or the region's size;
/// [`BttError::Pmem`].
pub fn create(region: &Region, options: &BttOptions) -> Result<Summary, BttError> {
    let plans = validate(region, options)?;
    create_arenas(region, options, &plans)
}

/// Writes the arenas in `plans`, one behind the other.
pub(super) fn create_arenas(
    region: &Region,
    options: &BttOptions,
    plans: &[ArenaPlan],
) -> Result<Summary, BttError> {
    // The order: the old headers go first, so that none survives beside new content. The first
    // arena's first info block comes last, since no arena is found without it.
    invalidate(region)?;
    write_arenas(region, options, plans)?;
    if options.version == Version::Libpmemblk {
        pmemblk::write_header(region, options.parent_uuid, options.lba_bytes)?;
    }
    super::Btt::summarize(region)
}

/// Writes the arenas in `plans` to a region without a BTT, the first one last.
pub(super) fn write_arenas(
    region: &Region,
    options: &BttOptions,
    plans: &[ArenaPlan],
) -> Result<(), BttError> {
    let mut end = options.version.base() + plans.iter().map(|plan| plan.size_bytes).sum::<u64>();
    for (index, plan) in plans.iter().enumerate().rev() {
        end -= plan.size_bytes;
        let next_arena = if index + 1 < plans.len() { plan.size_bytes } else { 0 };
        write_arena(region, options, plan, end, next_arena)?;
    }
    Ok(())
}

fn validate(region: &Region, options: &BttOptions) -> Result<Vec<ArenaPlan>, BttError> {
    let BttOptions { lba_bytes, lanes, version, .. } = *options;
    if version.stored_bytes(lba_bytes).is_none() {
        let expected = version.lba_sizes();
        let fault = format!("lba size {lba_bytes} bytes: expected {expected}");
        return Err(BttError::Options(fault));
    }
    if lanes == 0 || lanes > LANES {
        return Err(BttError::Options(format!("{lanes} lanes are not between 1 and {LANES}")));
    }
    options.plans(region.len_bytes()).ok_or_else(|| {
        let (found, smallest) = (region.len_bytes(), smallest_bytes(options));
        BttError::Options(format!(
            "a BTT does not fit {found} bytes: version {version} needs at least {smallest} bytes ({} MiB will do)",
            smallest.div_ceil(1 << 20)
        ))
    })
}

/// Makes sure, durably, that neither version finds an info block of an earlier BTT.
fn invalidate(region: &Region) -> Result<(), BttError> {
    region.zero_streaming(0, 2 * PAGE_BYTES)?;
    region.fence()?;
    Ok(())
}

fn write_arena(
    region: &Region,
    options: &BttOptions,
    plan: &ArenaPlan,
    base: u64,
    next_arena: u64,
) -> Result<(), BttError> {
    // A repair must not restore a stale second copy over a half-made arena.
    region.zero_streaming(base + plan.info2_offset, PAGE_BYTES)?;
    region.fence()?;
    let map_bytes = (u64::from(plan.lbas) * MAP_ENTRY_BYTES).next_multiple_of(PAGE_BYTES);
    region.zero_streaming(base + plan.map_offset, map_bytes)?;
    region.zero_streaming(base + plan.flog_offset, plan.info2_offset - plan.flog_offset)?;
    for lane in 0..options.lanes {
        // One entry that maps the lane's free block to itself, so that there is nothing to replay.
        let block = options.version.unused_map(plan.lbas + lane);
        let group = unused_group(options.flog_slots, lane % plan.lbas, block);
        let start = base + plan.flog_offset + u64::from(lane) * FLOG_GROUP_BYTES;
        for (slot, offset) in group.iter().zip((start..).step_by(size_of::<FlogSlot>())) {
            if !slot.is_padding() {
                region.write_streaming(offset, slot.as_bytes())?;
            }
        }
    }
    let info = info_block(options, plan, next_arena);
    // The map and the flog are durable before either copy, and the second copy before the first.
    region.fence()?;
    region.write_streaming(base + plan.info2_offset, info.as_bytes())?;
    region.fence()?;
    region.write_streaming(base, info.as_bytes())?;
    region.fence()?;
    Ok(())
}

/// Makes the info block of an arena; `next_arena` is the distance to the next one, or 0.
pub(super) fn info_block(options: &BttOptions, plan: &ArenaPlan, next_arena: u64) -> Info {
    let mut info = Info::new_zeroed();
    info.signature = SIGNATURE;
    info.uuid = options.uuid;
    info.parent_uuid = options.parent_uuid;
    let (major, minor) = options.version.numbers();
    info.major = major.into();
    info.minor = minor.into();
    info.external_lbasize = options.lba_bytes.into();
    info.external_nlba = plan.lbas.into();
    info.internal_lbasize = plan.block_bytes.into();
    info.internal_nlba = plan.blocks.into();
    info.nfree = options.lanes.into();
    info.infosize = 4096.into();
    info.nextoff = next_arena.into();
    info.dataoff = plan.data_offset.into();
    info.mapoff = plan.map_offset.into();
    info.logoff = plan.flog_offset.into();
    info.info2off = plan.info2_offset.into();
    info.checksum = info.fletcher64().into();
    info
}
