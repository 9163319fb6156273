//! The BTT as a block device.

use std::ops::Range;
use std::sync::Arc;

use super::arena::Arena;
use super::check::find_arenas;
use super::info::{FoundArena, discover, probe};
use super::layout::{FLAG_ERROR, FlogSlots, Version};
use super::recover::open_arena;
use super::{BttError, layout, unwritten};
use crate::device::{
    Attempt, BlockDevice, Context, DeviceError, Extent, Geometry, Operation, Result,
};
use crate::pmem::Region;
use crate::stats::Requests;
use crate::tier::begin;

/// Metadata of a block if the caller gives none: up to 128 zero bytes.
const NO_METADATA: [u8; 128] = [0; 128];
/// The data of a write of zeroes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// An open BTT: a block device whose blocks are atomic, and durable when a write returns.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::btt::{self, Btt, BttOptions};
/// use tidegate::device::{BlockDeviceExt, WriteFlags};
/// use tidegate::pmem::Region;
///
/// let region = Arc::new(Region::anonymous(32 << 20)?);
/// btt::create(&region, &BttOptions::default())?;
/// let device = Btt::open(region)?;
/// device.write(8192, &[1; 4096], WriteFlags::default())?;
/// let mut block = [0; 4096];
/// device.read(8192, &mut block)?;
/// assert_eq!(block, [1; 4096]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Btt {
    region: Arc<Region>,
    pub(super) arenas: Vec<Arena>,
    geometry: Geometry,
    summary: Summary,
    pub(super) requests: Requests,
}

/// The description of a BTT, for people and scripts.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Version of the format.
    pub version: Version,
    /// The device's UUID.
    pub uuid: uuid::Uuid,
    /// UUID of the namespace it belongs to; nil suits any.
    pub parent_uuid: uuid::Uuid,
    /// Size of an lba with its metadata, in bytes.
    pub lba_bytes: u32,
    /// Size of a block without its metadata, in bytes.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Writes that recovery completed when the BTT was opened.
    pub recovered_lanes: u32,
    /// The arenas.
    pub arenas: Vec<ArenaSummary>,
    /// The damage, in words; empty for a whole BTT.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damage: Vec<String>,
}

/// The description of an arena.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ArenaSummary {
    /// Start of the arena in the pool, in bytes.
    pub offset_bytes: u64,
    /// Number of its lbas.
    pub lbas: u32,
    /// Number of its blocks, the lanes' free ones included.
    pub blocks: u32,
    /// Number of lanes.
    pub lanes: u32,
    /// Size of a block on the medium, in bytes.
    pub block_bytes: u32,
    /// The flog slots that hold entries.
    pub flog_slots: FlogSlots,
    /// An earlier error made the arena read-only.
    pub failed: bool,
}

impl Btt {
    /// Opens the BTT in `region` and completes the writes that a crash cut off. Reads map and flog
    /// once, 4 bytes a block, to see that each block has one owner. A read-only region is not
    /// changed: the completed entries stay in memory, and a damaged BTT is opened as far as it can
    /// be read, with the damage in [`Summary::damage`].
    ///
    /// # Errors
    /// Fails as [`BttError`] if no BTT was found, it is damaged, or the memory failed.
    pub fn open(region: Arc<Region>) -> std::result::Result<Self, BttError> {
        Self::open_as(region, false)
    }

    /// Opens a BTT even if its damage makes writes dangerous: a write may overwrite a block with
    /// two owners, and a read may return the block of another lba.
    ///
    /// # Errors
    /// Fails as [`open`](Self::open) does, except as [`BttError::Unwritable`].
    pub fn open_forced(region: Arc<Region>) -> std::result::Result<Self, BttError> {
        Self::open_as(region, true)
    }

    fn open_as(region: Arc<Region>, force: bool) -> std::result::Result<Self, BttError> {
        expect_layout(&region)?;
        let (version, found, mut damage) = find(&region)?;
        let mut arenas = Vec::new();
        let mut completed_lanes = Vec::new();
        for (number, found) in found.iter().enumerate() {
            let recovered = open_arena(&region, number, found, force)?;
            arenas.push(recovered.arena);
            completed_lanes.push(recovered.completed_lanes);
            damage.extend(recovered.damage);
        }
        let slots: Vec<_> = arenas.iter().map(|arena| arena.flog_slots).collect();
        let summary = Summary {
            recovered_lanes: completed_lanes.iter().sum(),
            damage,
            ..describe(version, &found, &slots)
        };
        let read_only = region.read_only() || summary.arenas.iter().any(|arena| arena.failed);
        let geometry = geometry(&summary, read_only);
        Ok(Self { region, arenas, geometry, summary, requests: Requests::default() })
    }

    /// Describes the BTT in `region` without opening it, or the one that the first write will make.
    ///
    /// # Errors
    /// Fails as [`open`](Self::open) does, except for the content of map and flog.
    pub fn summarize(region: &Region) -> std::result::Result<Summary, BttError> {
        let (version, found, damage) = if is_unwritten(region)? {
            (Version::Libpmemblk, unwritten::planned(region)?, Vec::new())
        } else {
            find(region)?
        };
        let slots = found
            .iter()
            .map(|found| Ok(found.flog()?.slots))
            .collect::<std::result::Result<Vec<_>, BttError>>()?;
        Ok(Summary { damage, ..describe(version, &found, &slots) })
    }

    /// Returns the description of this BTT.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Returns the memory under the BTT.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the bytes of metadata that a block has beside its data: 0, 8, 16, 64 or 128.
    pub fn metadata_bytes(&self) -> usize {
        self.arenas[0].metadata_bytes
    }

    /// Reads block `block` and its metadata, both from one write.
    ///
    /// # Errors
    /// Fails as [`Operation::Read`] does; a buffer of the wrong size is misaligned.
    pub fn read_with_metadata(
        &self,
        block: u64,
        data: &mut [u8],
        metadata: &mut [u8],
    ) -> Result<()> {
        let (arena, lba) = self.locate_one(block, data.len(), metadata.len())?;
        Ok(arena.read_block(lba, data, metadata)?)
    }

    /// Writes block `block` and its metadata, atomically together; durable on return.
    ///
    /// # Errors
    /// Fails as [`Operation::Write`] does; a buffer of the wrong size is misaligned.
    pub fn write_with_metadata(&self, block: u64, data: &[u8], metadata: &[u8]) -> Result<()> {
        let (arena, lba) = self.locate_one(block, data.len(), metadata.len())?;
        if self.geometry.read_only {
            return Err(crate::pmem::PmemError::ReadOnly.into());
        }
        Ok(arena.write_blocks(lba, data, data.len(), metadata)?)
    }

    /// Lets reads of block `block` fail until it is written; durable on return.
    ///
    /// # Errors
    /// The block is out of range, the device is read-only, or the memory failed.
    pub fn set_error(&self, block: u64) -> Result<()> {
        let block_bytes = u64::from(self.geometry.block_bytes);
        self.geometry.check(block.saturating_mul(block_bytes), block_bytes)?;
        if self.geometry.read_only {
            return Err(crate::pmem::PmemError::ReadOnly.into());
        }
        let (arena, lba) = self.locate(block);
        Ok(arena.set_error(lba)?)
    }

    fn locate_one(
        &self,
        block: u64,
        data_len: usize,
        metadata_len: usize,
    ) -> Result<(&Arena, u32)> {
        let block_bytes = u64::from(self.geometry.block_bytes);
        let offset = block.saturating_mul(block_bytes);
        if data_len as u64 != block_bytes || metadata_len != self.metadata_bytes() {
            let len = (data_len + metadata_len) as u64;
            return Err(DeviceError::misaligned(offset, len, self.summary.lba_bytes));
        }
        self.geometry.check(offset, block_bytes)?;
        Ok(self.locate(block))
    }

    /// Returns the arena and lba of block `block`, which is in range.
    fn locate(&self, block: u64) -> (&Arena, u32) {
        let mut lba = block;
        for arena in &self.arenas {
            match u32::try_from(lba) {
                Ok(lba) if lba < arena.lbas => return (arena, lba),
                _ => lba -= u64::from(arena.lbas),
            }
        }
        unreachable!("block {block} passed the range check")
    }

    fn blocks_of(&self, offset: u64, len: u64) -> Range<u64> {
        let block_bytes = u64::from(self.geometry.block_bytes);
        offset / block_bytes..(offset + len) / block_bytes
    }

    /// Splits a request that is in range into runs of lbas, arena by arena.
    fn runs(&self, offset: u64, len: u64) -> impl Iterator<Item = (&Arena, Range<u32>)> {
        let mut blocks = self.blocks_of(offset, len);
        std::iter::from_fn(move || {
            if blocks.is_empty() {
                return None;
            }
            let (arena, lba) = self.locate(blocks.start);
            let count = (blocks.end - blocks.start).min(u64::from(arena.lbas - lba));
            blocks.start += count;
            Some((arena, lba..lba + u32::try_from(count).expect("at most the arena's lbas")))
        })
    }

    fn read_blocks(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let blocks = self.blocks_of(offset, buf.len() as u64);
        for (block, data) in blocks.zip(buf.chunks_exact_mut(self.geometry.block_bytes as usize)) {
            let (arena, lba) = self.locate(block);
            arena.read_block(lba, data, &mut [])?;
        }
        Ok(())
    }

    /// Writes blocks durably, so that FUA needs nothing more.
    fn write_blocks(&self, offset: u64, data: &[u8]) -> Result<()> {
        let block_bytes = self.geometry.block_bytes as usize;
        let mut rest = data;
        for (arena, lbas) in self.runs(offset, data.len() as u64) {
            let (run, behind) = rest.split_at(lbas.len() * block_bytes);
            let metadata = &NO_METADATA[..arena.metadata_bytes];
            arena.write_blocks(lbas.start, run, block_bytes, metadata)?;
            rest = behind;
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<()> {
        if self.geometry.fast_zero {
            for (arena, lbas) in self.runs(offset, len) {
                arena.zero_blocks(lbas)?;
            }
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROES.len() as u64);
            let zeroes = &ZEROES[..usize::try_from(step).expect("at most the zeroes at hand")];
            self.write_blocks(offset + done, zeroes)?;
            done += step;
        }
        Ok(())
    }

    /// Reports no block as a hole: a block keeps its storage, zero or not.
    fn extents(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        let block_bytes = u64::from(self.geometry.block_bytes);
        let mut extents: Vec<Extent> = Vec::new();
        for block in self.blocks_of(offset, len) {
            let (arena, lba) = self.locate(block);
            let zero = !arena.is_written(lba)?;
            let count = extents.len();
            match extents.last_mut() {
                Some(last) if last.zero == zero => last.len += block_bytes,
                _ if count == most => break,
                _ => extents.push(Extent {
                    offset: block * block_bytes,
                    len: block_bytes,
                    hole: false,
                    zero,
                }),
            }
        }
        Ok(extents)
    }
}

impl BlockDevice for Btt {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry.check_operation(operation)?;
        let _running = begin(&self.requests, operation);
        match *operation {
            Operation::Read { offset, ref mut buf } => self.read_blocks(offset, buf),
            Operation::Write { offset, data, .. } => self.write_blocks(offset, data),
            // Every acknowledged write is durable.
            Operation::Flush => Ok(()),
            // If the map cannot mark the blocks, the old bytes stay readable.
            Operation::Discard { .. } if !self.geometry.fast_zero => Ok(()),
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                self.zero(offset, len)
            }
            Operation::Status { offset, len, most, ref mut extents } => {
                **extents = self.extents(offset, len, most)?;
                Ok(())
            }
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

/// Returns whether `region` is a pool of libpmemblk without a BTT. For reading, a damaged header
/// leaves the question to the BTT behind it.
fn is_unwritten(region: &Region) -> std::result::Result<bool, BttError> {
    if probe(region)? != Some(Version::Libpmemblk) {
        return Ok(false);
    }
    match unwritten::is_unwritten(region) {
        Err(_) if region.read_only() => Ok(false),
        result => result,
    }
}

/// Makes the BTT of a pool of libpmemblk that was never written.
fn expect_layout(region: &Region) -> std::result::Result<(), BttError> {
    if !is_unwritten(region)? {
        return Ok(());
    }
    if region.read_only() { Err(BttError::NeverWritten) } else { unwritten::lay_out(region) }
}

/// Finds the arenas of `region`, and the faults of their info blocks. For reading, either copy of
/// an arena's info block is enough, and the walk may end before a lost arena.
fn find(
    region: &Region,
) -> std::result::Result<(Version, Vec<FoundArena<'_>>, Vec<String>), BttError> {
    match discover(region) {
        Ok((version, arenas)) => Ok((version, arenas, Vec::new())),
        Err(error) if !region.read_only() => Err(error),
        Err(error) => {
            let (version, arenas, report) = find_arenas(region).map_err(|_| error)?;
            Ok((version, arenas, report.findings.iter().map(ToString::to_string).collect()))
        }
    }
}

fn geometry(summary: &Summary, read_only: bool) -> Geometry {
    Geometry {
        block_bytes: summary.block_bytes,
        blocks: summary.blocks,
        preferred_bytes: summary.block_bytes.max(4096),
        read_only,
        atomic_block: true,
        volatile_cache: false,
        // The kernel reads a page of 512-byte blocks only up to the first block in zero state.
        fast_zero: summary.block_bytes == 4096 || summary.version == Version::Libpmemblk,
        keeps_data: true,
    }
}

fn describe(version: Version, found: &[FoundArena<'_>], slots: &[FlogSlots]) -> Summary {
    let first = &found[0].info;
    let lba_bytes = first.external_lbasize.get();
    let arenas = found
        .iter()
        .zip(slots)
        .map(|(found, &slots)| describe_arena(found, slots))
        .collect::<Vec<_>>();
    Summary {
        version,
        uuid: uuid::Uuid::from_bytes(first.uuid),
        parent_uuid: uuid::Uuid::from_bytes(first.parent_uuid),
        lba_bytes,
        block_bytes: version.data_bytes(lba_bytes),
        blocks: arenas.iter().map(|arena| u64::from(arena.lbas)).sum(),
        recovered_lanes: 0,
        arenas,
        damage: Vec::new(),
    }
}

fn describe_arena(found: &FoundArena<'_>, flog_slots: FlogSlots) -> ArenaSummary {
    let layout::Info { flags, external_nlba, internal_nlba, internal_lbasize, nfree, .. } =
        found.info;
    ArenaSummary {
        offset_bytes: found.base,
        lbas: external_nlba.get(),
        blocks: internal_nlba.get(),
        lanes: nfree.get(),
        block_bytes: internal_lbasize.get(),
        flog_slots,
        failed: flags.get() & FLAG_ERROR != 0,
    }
}
