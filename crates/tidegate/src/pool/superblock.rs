//! The superblock: the description of a pool, in two copies.
//!
//! Invariants:
//! 1. The first copy lies in the first 4 KiB of the pool, the second in the last. At every moment,
//!    even during an update, at least one is valid: [`Superblock::write`] makes the copy that does
//!    *not* count durable before it touches the one that does. The former is the second copy,
//!    unless the first is damaged or older. A crash before the fence between both writes leaves the
//!    copy that counted, and a crash after it leaves the new one, which then counts, whatever the
//!    state of the other copy. Beside it, a copy that such a crash left is no damage.
//! 2. `sequence` grows with each update: of two valid copies the one with the higher number counts.
//! 3. [`erase`] comes before any write of a new pool, so that no valid copy of an older pool is
//!    beside it.
//! 4. Fields are used only after their checksum was found correct, and are checked even then.

use arrayvec::ArrayString;
use parking_lot::Mutex;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use super::content::{self, Content};
use super::error::PoolError;
use super::layout::{
    BACKING_NAME_BYTES_MAX, DATA_OFFSET_MIN, MAGIC, PAGE_BYTES, SuperblockBytes, VERSION,
};
use super::state::BackingState;
use crate::pmem::{PmemError, Region};
use crate::tier::EngineCode;

type Result<T> = std::result::Result<T, PoolError>;

/// Incompatible feature: a cache keeps its pages in slots by clusters of several pages, its lines.
pub const CLUSTERS: u64 = 1;
/// Incompatible feature: a cache keeps neighbouring pages of 64 KiB in one shard.
pub const NEIGHBOURS: u64 = 2;
/// The incompatible features that this program knows.
const KNOWN_INCOMPATIBLE: u64 = CLUSTERS | NEIGHBOURS;

/// Distinguishes the device behind a pool from all others. It contains no inode numbers, which a
/// disk behind a network does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingIdentity {
    /// The number that is compared; never 0.
    pub identity: u64,
    /// The name for people: the absolute path or the URL, cut off after 512 bytes.
    pub name: ArrayString<BACKING_NAME_BYTES_MAX>,
}

impl BackingIdentity {
    /// Returns the identity of the backing called `name`.
    pub fn new(identity: u64, name: &str) -> Self {
        let mut kept = ArrayString::new();
        name.chars().take_while(|letter| kept.try_push(*letter).is_ok()).for_each(drop);
        Self { identity: identity.max(1), name: kept }
    }

    /// Decodes the identity in a superblock with a correct checksum, or `None` without a backing.
    fn decode(bytes: &SuperblockBytes) -> Option<Self> {
        let len = (bytes.backing_name_bytes.get() as usize).min(BACKING_NAME_BYTES_MAX);
        let identity = bytes.backing_identity.get();
        let name = String::from_utf8_lossy(&bytes.backing_name[..len]);
        (identity != 0).then(|| Self::new(identity, &name))
    }
}

/// The decoded superblock of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Superblock {
    /// The engine that the pool belongs to.
    pub engine: EngineCode,
    /// The pool's name for machines.
    pub uuid: Uuid,
    /// Size of a block in bytes: 512, 1024, 2048 or 4096.
    pub block_bytes: u32,
    /// Size of the pool in bytes, both superblocks included: a multiple of 4096.
    pub pool_bytes: u64,
    /// Offset of the engine's bytes: a multiple of 4096, at least 8192.
    pub data_offset: u64,
    /// Number of the engine's bytes: whole blocks.
    pub data_bytes: u64,
    /// Counts updates.
    pub sequence: u64,
    /// Features that any program may ignore.
    pub compatible: u64,
    /// Features that a program must know to open the pool: [`CLUSTERS`], [`NEIGHBOURS`].
    pub incompatible: u64,
    /// The last device that was used behind the pool; `None` if the pool never had one.
    #[serde(skip)]
    pub backing: Option<BackingIdentity>,
    /// The state of that device when the pool left it; `None` if an older program did.
    #[serde(skip)]
    pub state: Option<BackingState>,
}

/// The fault of one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyFault {
    /// The copy does not start with the magic bytes.
    #[error("does not start with \"TIDEGATE\"")]
    NoMagic,
    /// The checksum is wrong.
    #[error("has checksum {found:#018x}, its bytes have {expected:#018x}")]
    Checksum {
        /// The checksum in the copy.
        found: u64,
        /// The checksum of its bytes.
        expected: u64,
    },
    /// The memory of the copy cannot be read.
    #[error("lies in memory that cannot be read")]
    Unreadable,
    /// The copy differs from the other one by one bit.
    #[error("differs from the other one by one bit, or an update of it never finished")]
    OneBit,
    /// An update of the copy was cut off, before it was complete or before it began.
    #[error("is unfinished")]
    CutOff,
    /// The copy is valid, but older than the other one.
    #[error("is an older one, number {sequence}")]
    Older {
        /// The sequence number of the copy.
        sequence: u64,
    },
    /// The copy is valid, but of another pool, or it differs from the other one with the same
    /// number.
    #[error("speaks of another pool")]
    Different,
}

/// The result of reading a superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The copy that counts.
    pub superblock: Superblock,
    /// The fault of the copy at the start, if it does not count.
    pub first: Option<CopyFault>,
    /// The fault of the copy at the end, if it disagrees.
    pub second: Option<CopyFault>,
}

impl Found {
    /// Returns whether both copies are whole and agree.
    pub fn is_whole(&self) -> bool {
        self.first.is_none() && self.second.is_none()
    }

    /// Returns the faults of the copies, a line each. A copy that a crash leaves is none.
    pub fn findings(&self) -> Vec<String> {
        let finding = |which, fault| {
            format!("the superblock at the pool's {which} {fault}; the other one is whole")
        };
        let is_damage = |fault: &CopyFault| *fault != CopyFault::CutOff;
        let first = self.first.filter(is_damage).map(|fault| finding("start", fault));
        let second = self.second.filter(is_damage).map(|fault| finding("end", fault));
        first.into_iter().chain(second).collect()
    }

    /// Returns the remaining faults of the copies, a line each, and the number of repaired ones.
    /// With `repair`, rewrites the superblock if a copy is damaged.
    ///
    /// # Errors
    /// Returns the errors of [`Superblock::write`] and [`Superblock::read`].
    pub fn check(&self, region: &Region, repair: bool) -> Result<(Vec<String>, usize)> {
        let before = self.findings();
        if !repair || self.is_whole() {
            return Ok((before, 0));
        }
        let mut superblock = self.superblock;
        superblock.write(region)?;
        let left = Superblock::read(region)?.findings();
        let repaired = before.len() - left.len();
        Ok((left, repaired))
    }
}

impl Superblock {
    /// Returns a superblock for `engine` over all of `region`, with the blocks between both copies.
    /// Writes nothing.
    ///
    /// # Errors
    /// [`PoolError::TooSmall`] if the size is too small.
    pub fn plan(region: &Region, engine: EngineCode, uuid: Uuid, block_bytes: u32) -> Result<Self> {
        if !crate::device::is_block_bytes(block_bytes) {
            return Err(PoolError::BlockBytes { found: block_bytes });
        }
        let empty = Self {
            engine,
            uuid,
            block_bytes,
            pool_bytes: 0,
            data_offset: DATA_OFFSET_MIN,
            data_bytes: 0,
            sequence: 0,
            compatible: 0,
            incompatible: 0,
            backing: None,
            state: None,
        };
        empty.resized(region.len_bytes())
    }

    /// Returns this superblock for a pool of `pool_bytes` bytes, rounded down to 4096, with the
    /// engine's bytes at their offset. Writes nothing. The second copy then lies elsewhere: until
    /// the new superblock is [written](Self::write), the second copy of the old size counts.
    ///
    /// # Errors
    /// [`PoolError::TooSmall`].
    pub fn resized(&self, pool_bytes: u64) -> Result<Self> {
        let (found_bytes, pool_bytes) = (pool_bytes, page_floor(pool_bytes));
        let least_bytes = self.data_offset + 2 * PAGE_BYTES;
        if pool_bytes < least_bytes {
            return Err(PoolError::TooSmall { found_bytes, least_bytes });
        }
        let data_bytes = pool_bytes - PAGE_BYTES - self.data_offset;
        Ok(Self { pool_bytes, data_bytes, ..*self })
    }

    /// Writes both copies as the next update, in the order of invariant 1.
    ///
    /// # Errors
    /// [`PoolError::Pmem`] if a write fails. The pool then has its old superblock or this one.
    pub fn write(&mut self, region: &Region) -> Result<()> {
        self.sequence += 1;
        let bytes = self.encode();
        let second = self.pool_bytes - PAGE_BYTES;
        let second_counts = Self::read(region).is_ok_and(|found| found.first.is_some());
        for offset in if second_counts { [0, second] } else { [second, 0] } {
            region.write_streaming(offset, bytes.as_bytes())?;
            // This copy must be durable before the copy that counts is overwritten.
            region.fence()?;
        }
        Ok(())
    }

    /// Reads the superblock of `region`, applies `change`, and writes it. Concurrent updates by
    /// threads of this process do not lose each other's changes.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read), [`write`](Self::write) and `change`.
    pub fn update(region: &Region, change: impl FnOnce(&mut Self) -> Result<()>) -> Result<Self> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _alone = ONE_AT_A_TIME.lock();
        let mut superblock = Self::read(region)?.superblock;
        change(&mut superblock)?;
        superblock.write(region)?;
        Ok(superblock)
    }

    /// Reads the superblock of `region`.
    ///
    /// # Errors
    /// Returns any [`PoolError`] but [`WrongEngine`](PoolError::WrongEngine) if `region` holds no
    /// usable pool.
    pub fn read(region: &Region) -> Result<Found> {
        let first = read_copy(region, 0)?;
        let second = read_second(region, first.as_deref().ok())?;
        let second_at = second_offset(region, first.as_deref().ok());
        let (bytes, (first, second)) = choose(first, second, region)?;
        let superblock = Self::decode(&bytes, region)?;
        let closer = |at, fault| look_closer(region, at, fault, &bytes);
        let first = first.map(|fault| closer(0, fault));
        let second = second.map(|fault| closer(second_at, fault));
        Ok(Found { superblock, first, second })
    }

    /// Checks that the pool belongs to the engine `expected`.
    ///
    /// # Errors
    /// [`PoolError::WrongEngine`] if it does not.
    pub fn expect_engine(&self, expected: EngineCode) -> Result<()> {
        if self.engine == expected {
            return Ok(());
        }
        Err(PoolError::WrongEngine { found: self.engine, expected })
    }

    fn encode(&self) -> SuperblockBytes {
        let mut bytes = SuperblockBytes {
            magic: MAGIC,
            version: U32::new(VERSION),
            engine: U32::new(self.engine.0),
            compatible: U64::new(self.compatible),
            incompatible: U64::new(self.incompatible),
            uuid: self.uuid.into_bytes(),
            sequence: U64::new(self.sequence),
            pool_bytes: U64::new(self.pool_bytes),
            data_offset: U64::new(self.data_offset),
            data_bytes: U64::new(self.data_bytes),
            block_bytes: U32::new(self.block_bytes),
            ..SuperblockBytes::new_zeroed()
        };
        if let Some(BackingIdentity { identity, name }) = &self.backing {
            bytes.backing_identity = U64::new(*identity);
            bytes.backing_name_bytes = U32::new(u32::try_from(name.len()).unwrap_or(0));
            bytes.backing_name[..name.len()].copy_from_slice(name.as_bytes());
        }
        if let Some(state) = &self.state {
            bytes.state = state.encode();
        }
        bytes.checksum = U64::new(bytes.expected_checksum());
        bytes
    }

    /// Decodes the fields of a copy with a correct checksum, and checks them.
    fn decode(bytes: &SuperblockBytes, region: &Region) -> Result<Self> {
        if bytes.version.get() != VERSION {
            return Err(PoolError::UnknownVersion { found: bytes.version.get(), known: VERSION });
        }
        check_features(bytes, region.read_only())?;
        let superblock = Self {
            engine: EngineCode(bytes.engine.get()),
            uuid: Uuid::from_bytes(bytes.uuid),
            block_bytes: bytes.block_bytes.get(),
            pool_bytes: bytes.pool_bytes.get(),
            data_offset: bytes.data_offset.get(),
            data_bytes: bytes.data_bytes.get(),
            sequence: bytes.sequence.get(),
            compatible: bytes.compatible.get(),
            incompatible: bytes.incompatible.get(),
            backing: BackingIdentity::decode(bytes),
            state: BackingState::decode(&bytes.state),
        };
        superblock.check(region.len_bytes())?;
        Ok(superblock)
    }

    /// Checks that the numbers fit each other and the region, which the checksum does not ensure.
    fn check(&self, region_bytes: u64) -> Result<()> {
        let Self { block_bytes, pool_bytes, data_offset, data_bytes, .. } = *self;
        let require = |holds: bool, field, found, expected: &str| {
            let expected = expected.to_owned();
            if holds { Ok(()) } else { Err(PoolError::Inconsistent { field, found, expected }) }
        };
        let block = u64::from(block_bytes);
        let is_block = crate::device::is_block_bytes(block_bytes);
        require(is_block, "block_bytes", block, "512, 1024, 2048 or 4096")?;
        let whole_pages = pool_bytes.is_multiple_of(PAGE_BYTES);
        require(whole_pages, "pool_bytes", pool_bytes, "a multiple of 4096")?;
        if pool_bytes > region_bytes {
            let (expected_bytes, found_bytes) = (pool_bytes, region_bytes);
            return Err(PoolError::Truncated { expected_bytes, found_bytes });
        }
        let starts = data_offset.is_multiple_of(PAGE_BYTES) && data_offset >= DATA_OFFSET_MIN;
        require(starts, "data_offset", data_offset, "a multiple of 4096, at least 8192")?;
        let end = data_offset.checked_add(data_bytes).and_then(|end| end.checked_add(PAGE_BYTES));
        let fits = end.is_some_and(|end| end <= pool_bytes) && data_bytes.is_multiple_of(block);
        require(fits, "data_bytes", data_bytes, "whole blocks before the second superblock")?;
        require(self.sequence < u64::MAX, "sequence", self.sequence, "less than 2^64 - 1")
    }
}

/// Refuses unknown incompatible features, and for writers also unknown read-only-compatible ones.
/// No read-only-compatible feature is known yet.
fn check_features(bytes: &SuperblockBytes, read_only: bool) -> Result<()> {
    let refuse = |class, bits, hint| Err(PoolError::UnknownFeatures { class, bits, hint });
    let incompatible = bytes.incompatible.get() & !KNOWN_INCOMPATIBLE;
    match (incompatible, bytes.read_only_compatible.get()) {
        (0, 0) => Ok(()),
        (0, _) if read_only => Ok(()),
        (0, bits) => refuse("read-only-compatible", bits, ", or open the pool read-only"),
        (bits, _) => refuse("incompatible", bits, ""),
    }
}

/// Removes both superblocks and all signatures that could make the region look like another pool.
/// That is the first step of creating a pool.
///
/// # Errors
/// [`PoolError::TooSmall`], or [`PoolError::Pmem`] if a write fails.
pub fn erase(region: &Region) -> Result<()> {
    let (found_bytes, least_bytes) = (region.len_bytes(), DATA_OFFSET_MIN + 2 * PAGE_BYTES);
    if found_bytes < least_bytes {
        return Err(PoolError::TooSmall { found_bytes, least_bytes });
    }
    let old = read_copy(region, 0)?;
    for offset in [second_offset(region, old.as_deref().ok()), second_offset(region, None)] {
        region.zero_streaming(offset, PAGE_BYTES)?;
    }
    region.zero_streaming(0, DATA_OFFSET_MIN)?;
    Ok(region.fence()?)
}

pub(super) fn page_floor(bytes: u64) -> u64 {
    bytes - bytes % PAGE_BYTES
}

/// Returns the offset of the second copy: as the first copy says, if it is valid and the offset
/// makes sense, and otherwise the last page of the region.
fn second_offset(region: &Region, first: Option<&SuperblockBytes>) -> u64 {
    let end = page_floor(region.len_bytes());
    let claimed = first.map_or(end, |first| first.pool_bytes.get());
    let sane = (DATA_OFFSET_MIN..=end).contains(&claimed) && claimed.is_multiple_of(PAGE_BYTES);
    (if sane { claimed } else { end }).saturating_sub(PAGE_BYTES)
}

pub(super) type Copy = std::result::Result<Box<SuperblockBytes>, CopyFault>;

/// Reads the second copy at the offset that `first` says, if `first` is whole.
///
/// Otherwise the second copy lies at the region's end, or where the damaged first copy says: a
/// region may be longer than its pool, and a torn update leaves the whole word of the old or of the
/// new size. A copy contains its own offset, so a copy at that offset counts.
fn read_second(region: &Region, first: Option<&SuperblockBytes>) -> Result<Copy> {
    let at_end = read_copy(region, second_offset(region, first))?;
    if first.is_some() {
        return Ok(at_end);
    }
    let mut torn = SuperblockBytes::new_zeroed();
    if region.len_bytes() < PAGE_BYTES || region.read(0, torn.as_mut_bytes()).is_err() {
        return Ok(at_end);
    }
    let offset = second_offset(region, Some(&torn));
    let is_told = |copy: &SuperblockBytes| {
        copy.uuid == torn.uuid && copy.pool_bytes.get() == offset + PAGE_BYTES
    };
    let told = read_copy(region, offset)?.ok().filter(|copy| is_told(copy));
    Ok(match (told, at_end) {
        (Some(told), Ok(at_end)) if told.sequence.get() <= at_end.sequence.get() => Ok(at_end),
        (Some(told), _) => Ok(told),
        (None, at_end) => at_end,
    })
}

/// Reads the copy at `offset`. Returns its fault unless it is whole.
pub(super) fn read_copy(region: &Region, offset: u64) -> Result<Copy> {
    let mut bytes = Box::new(SuperblockBytes::new_zeroed());
    if region.len_bytes() < offset + PAGE_BYTES {
        return Ok(Err(CopyFault::NoMagic));
    }
    match region.read(offset, bytes.as_mut_bytes()) {
        Ok(()) => Ok(validate(bytes)),
        Err(PmemError::Poisoned { .. }) => Ok(Err(CopyFault::Unreadable)),
        Err(error) => Err(error.into()),
    }
}

fn validate(bytes: Box<SuperblockBytes>) -> Copy {
    let (found, expected) = (bytes.checksum.get(), bytes.expected_checksum());
    if bytes.magic != MAGIC {
        return Err(CopyFault::NoMagic);
    }
    if found != expected {
        return Err(CopyFault::Checksum { found, expected });
    }
    Ok(bytes)
}

type Faults = (Option<CopyFault>, Option<CopyFault>);

/// Returns the copy that counts, and the faults of the copies.
fn choose(first: Copy, second: Copy, region: &Region) -> Result<(Box<SuperblockBytes>, Faults)> {
    match (first, second) {
        (Ok(first), Ok(second)) => Ok(choose_valid(first, second)),
        (Ok(first), Err(fault)) => Ok((first, (None, Some(fault)))),
        (Err(fault), Ok(second)) => {
            // A second copy may outlive its pool: if another program wrote a file system over the
            // rest, the region is that program's.
            let found = look(region)?;
            if fault == CopyFault::NoMagic && found.is_foreign() {
                return Err(PoolError::NotAPool { found });
            }
            Ok((second, (Some(fault), None)))
        }
        (Err(CopyFault::NoMagic), Err(CopyFault::NoMagic)) => {
            Err(PoolError::NotAPool { found: look(region)? })
        }
        (Err(first), Err(second)) => Err(PoolError::Damaged { first, second }),
    }
}

/// Returns the fault of the copy at `offset` beside the copy `whole`: `fault`, unless an update
/// that a crash cut off may have left the copy so.
fn look_closer(
    region: &Region,
    offset: u64,
    fault: CopyFault,
    whole: &SuperblockBytes,
) -> CopyFault {
    let mut copy = SuperblockBytes::new_zeroed();
    let may_be_cut_off = matches!(fault, CopyFault::Checksum { .. } | CopyFault::Older { .. });
    if !may_be_cut_off || region.read(offset, copy.as_mut_bytes()).is_err() {
        return fault;
    }
    // The fields that no update changes.
    let fixed = |it: &SuperblockBytes| {
        (it.magic, it.version, it.engine, it.uuid, it.data_offset, it.block_bytes, it.reserved)
    };
    let of_one_pool = fixed(&copy) == fixed(whole);
    let sequences = [copy.sequence.get(), whole.sequence.get()];
    match compare_copies(copy.as_bytes(), whole.as_bytes(), sequences) {
        Difference::CutOff if of_one_pool => CopyFault::CutOff,
        Difference::OneBit => CopyFault::OneBit,
        _ => fault,
    }
}

/// How a copy that does not count differs from the one that does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Difference {
    /// As an update that was cut off leaves a copy: each word is that of the update or of the one
    /// before it.
    CutOff,
    /// By one bit, which damage and an update that was cut off both leave.
    OneBit,
    /// As no update leaves a copy.
    Other,
}

/// Compares `copy` with the copy `whole`. Both contain a number of their updates, `sequences`.
///
/// An update writes one copy after the other. So the number of a copy whose update was cut off is
/// that of the whole copy, the one before it or the one behind it.
pub(crate) fn compare_copies(copy: &[u8], whole: &[u8], sequences: [u64; 2]) -> Difference {
    let bits = copy.iter().zip(whole).map(|(one, other)| (one ^ other).count_ones()).sum::<u32>();
    match sequences[0].abs_diff(sequences[1]) {
        0 if bits == 1 => Difference::OneBit,
        0 | 1 => Difference::CutOff,
        _ => Difference::Other,
    }
}

fn choose_valid(
    first: Box<SuperblockBytes>,
    second: Box<SuperblockBytes>,
) -> (Box<SuperblockBytes>, Faults) {
    if first.as_bytes() == second.as_bytes() {
        return (first, (None, None));
    }
    let (one, other) = (first.sequence.get(), second.sequence.get());
    if first.uuid != second.uuid || one == other {
        return (first, (None, Some(CopyFault::Different)));
    }
    if one < other {
        return (second, (Some(CopyFault::Older { sequence: one }), None));
    }
    (first, (None, Some(CopyFault::Older { sequence: other })))
}

/// Guesses the content at the start of the region. Unreadable bytes count as unknown.
pub(super) fn look(region: &Region) -> Result<Content> {
    match content::look(region) {
        Err(PmemError::Poisoned { .. }) => Ok(Content::Other),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests;
