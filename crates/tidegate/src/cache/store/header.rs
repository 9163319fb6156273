//! The cache header: the pool's salt, its mode and its backing, in two copies.
//!
//! Invariant: at every moment one copy is whole. If both are whole, the copy with the higher
//! sequence number counts. An update writes the other copy first. A copy that is left by an update
//! that was cut off is no damage.

use std::collections::BTreeMap;

use serde::Serialize;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use super::layout::{
    CHUNK_HEAD_BYTES, CHUNKS_OFFSET, COMMIT_BYTES, CacheHeaderBytes, HEADER_BYTES, HeaderFault,
    NAME_BYTES_MAX, PAGE_BYTES, Places, SETTINGS_BYTES_MAX, VERSION, commit_offset,
    committed_group,
};
use crate::cache::CODE;
use crate::cache::error::CacheError;
use crate::cache::pages::cluster::{Cluster, Sharding};
use crate::cache::router::mode::Mode;
use crate::pmem::{PmemError, Region};
use crate::pool::{self, CopyFault, Difference, Found, PoolError, Superblock, compare_copies};

type Result<T> = std::result::Result<T, CacheError>;

/// Approximate number of slots in each shard of a new pool. Small pools have one shard.
const SHARD_SLOTS: u32 = 2048;
const SHARDS_MAX: u32 = 16;
/// The fewest slots of a pool.
pub(in crate::cache) const SLOTS_MIN: u32 = 4;

/// Three pages of superblocks, the cache headers, the commit words, and the smallest chunk: its
/// head, a page of slot headers, and [`SLOTS_MIN`] slots.
pub(in crate::cache) const POOL_BYTES_MIN: u64 =
    3 * PAGE_BYTES + CHUNKS_OFFSET + CHUNK_HEAD_BYTES + (1 + SLOTS_MIN as u64) * PAGE_BYTES;

/// The backing that a pool caches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Binding {
    /// Distinguishes the backing from all others; never 0.
    pub identity: u64,
    /// Its absolute path or URL, cut off after 512 bytes.
    pub name: String,
    /// Its size in pages of 4 KiB.
    pub pages: u64,
}

/// How to make a cache pool.
#[derive(Debug, Clone, Copy)]
pub struct CacheOptions {
    /// The pool's uuid.
    pub uuid: Uuid,
    /// Goes into all checksums, so that headers of older pools in these bytes do not count.
    pub salt: u64,
    /// Size of a block of the device in bytes: 512, 1024, 2048 or 4096.
    pub block_bytes: u32,
    /// Size of the clusters in bytes: 4096, 8192, 16384, 32768 or 65536. A read that misses fills a
    /// cluster, and cleaning writes a cluster's dirty pages together (Open CAS's cache line).
    pub line_bytes: u32,
}

impl Default for CacheOptions {
    fn default() -> Self {
        let (salt, _) = Uuid::new_v4().as_u64_pair();
        Self { uuid: Uuid::new_v4(), salt, block_bytes: 4096, line_bytes: 4096 }
    }
}

/// The content of a pool's cache header, and the offsets of its slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheHeader {
    /// The pool's superblock.
    pub superblock: Superblock,
    /// Goes into all checksums.
    pub salt: u64,
    /// How writes and reads are treated.
    pub mode: Mode,
    /// The settings that differ from their defaults, one `KEY=VALUE` line each.
    pub settings: String,
    /// The backing; `None` before the first use.
    pub binding: Option<Binding>,
    /// Where the slots are.
    pub places: Places,
    /// Number of shards. A page lies only in slots of its own shard.
    pub shards: u32,
    pub(in crate::cache) cluster: Cluster,
    sequence: u64,
    /// The format version of the header. A header of an older version is rewritten before a slot
    /// gets content that the older version does not know.
    pub(in crate::cache) version: u32,
    /// Whether the second copy is the one that counts.
    second_counts: bool,
    /// Whether both copies of this header are whole and equal.
    pub is_whole: bool,
    /// Whether both copies of the superblock are whole and equal.
    pub superblock_is_whole: bool,
    /// The damage of a copy of the superblock or of this header.
    pub damaged_copy: Option<CopyDamage>,
}

/// The damage of one copy of a superblock or of a cache header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyDamage {
    /// No update leaves such a copy.
    #[error("one copy of the superblock or of the cache header is damaged")]
    Damaged,
    /// The copy differs from the whole one by one bit.
    #[error(
        "one copy of the superblock or of the cache header differs from the other one by one bit: it was changed, or an update of it never finished"
    )]
    OneBit,
}

/// Formats all of `region` as a cache pool. Previous content is lost.
///
/// # Errors
/// Returns [`CacheError::LineSize`], or [`CacheError::Pool`] if the region is too small. Both are
/// detected before anything changes. Also returns [`CacheError::Pool`] if the region fails.
pub fn create(region: &Region, options: &CacheOptions) -> Result<CacheHeader> {
    let cluster = cluster_of(options.line_bytes)?;
    let mut superblock = Superblock::plan(region, CODE, options.uuid, options.block_bytes)?;
    superblock.incompatible = features_of(cluster) | pool::NEIGHBOURS;
    let (base, bytes) = bytes_for_slots(&superblock);
    let places = Places::fitting(base, bytes);
    if places.slots() < SLOTS_MIN {
        let (found_bytes, least_bytes) = (region.len_bytes(), POOL_BYTES_MIN);
        return Err(PoolError::TooSmall { found_bytes, least_bytes }.into());
    }
    pool::erase(region)?;
    // Zeroed commit words mean that no group was committed.
    region.zero_streaming(superblock.data_offset + commit_offset(0), PAGE_BYTES)?;
    // Zeroed headers are free slots. They are fenced before the superblock makes them count.
    for slot in (0..places.slots()).step_by(super::layout::CHUNK_SLOTS as usize) {
        let start = places.header(slot) - CHUNK_HEAD_BYTES;
        region.zero_streaming(start, places.data(slot) - start)?;
    }
    let (salt, mode) = (options.salt, Mode::default());
    let mut header = CacheHeader {
        superblock,
        salt,
        mode,
        settings: String::new(),
        binding: None,
        places,
        shards: (places.slots() / SHARD_SLOTS).clamp(1, SHARDS_MAX),
        cluster,
        sequence: 0,
        version: VERSION,
        second_counts: false,
        is_whole: true,
        superblock_is_whole: true,
        damaged_copy: None,
    };
    header.write(region)?;
    superblock.write(region)?;
    header.superblock = superblock;
    Ok(header)
}

/// Returns clusters of `found_bytes` bytes, or an error if there is no such cluster size.
fn cluster_of(found_bytes: u32) -> Result<Cluster> {
    Cluster::of_bytes(found_bytes).ok_or(CacheError::LineSize { found_bytes })
}

/// Returns the incompatible features that a pool has because of its `cluster`.
pub(in crate::cache) fn features_of(cluster: Cluster) -> u64 {
    if cluster.is_page() { 0 } else { pool::CLUSTERS }
}

/// Returns the offset where slots may begin, and how many bytes they may use.
fn bytes_for_slots(superblock: &Superblock) -> (u64, u64) {
    let bytes = superblock.data_bytes.saturating_sub(CHUNKS_OFFSET);
    (superblock.data_offset + CHUNKS_OFFSET, bytes)
}

/// Returns the slots of a pool with `superblock` that was created with `chunk_slots` slots.
pub(in crate::cache) fn places_of(superblock: &Superblock, chunk_slots: u64) -> Places {
    let (base, bytes) = bytes_for_slots(superblock);
    Places::within(base, bytes, u32::try_from(chunk_slots).unwrap_or(u32::MAX))
}

/// Returns the fewest slots that a pool with `shards` shards may have.
pub(in crate::cache) fn slots_least(shards: u32) -> u32 {
    SLOTS_MIN * shards
}

/// Frees the slots of `places` from `first` on by zeroing their headers, durably.
pub(in crate::cache) fn free_headers(region: &Region, places: &Places, first: u32) -> Result<()> {
    for (first, count) in places.header_runs(first, places.slots()) {
        region.zero_streaming(places.header(first), u64::from(count) * HEADER_BYTES)?;
    }
    Ok(region.fence()?)
}

impl CacheHeader {
    /// Returns the size of the clusters in bytes.
    pub fn line_bytes(&self) -> u64 {
        self.cluster.bytes()
    }

    pub(in crate::cache) fn sharding(&self) -> Sharding {
        let by_neighbourhood = self.superblock.incompatible & pool::NEIGHBOURS != 0;
        Sharding { count: self.shards, cluster: self.cluster, by_neighbourhood }
    }

    /// Returns whether `page` may lie in `slot`: both are of the same shard.
    pub fn is_home(&self, slot: u32, page: u64) -> bool {
        self.sharding().is_home(slot, page)
    }

    /// Returns the settings that differ from their defaults, by key.
    pub(in crate::cache) fn settings_by_key(&self) -> BTreeMap<&str, &str> {
        self.settings.lines().filter_map(|line| line.split_once('=')).collect()
    }

    /// Reads the headers of the pool in `region` without changing anything.
    ///
    /// # Errors
    /// Fails if there is no cache pool, neither copy of its header is whole, or the header is of an
    /// unknown version or names an impossible layout.
    pub fn read(region: &Region) -> Result<Self> {
        let found = Superblock::read(region)?;
        let superblock = found.superblock;
        superblock.expect_engine(CODE)?;
        let copies = [0, PAGE_BYTES].map(|at| read_copy(region, superblock.data_offset + at));
        let [first, second] = [copies[0].as_ref(), copies[1].as_ref()];
        let (bytes, second_counts) = match (first, second) {
            (Ok(first), Ok(second)) if first.sequence.get() >= second.sequence.get() => {
                (first, false)
            }
            (_, Ok(bytes)) => (bytes, true),
            (Ok(bytes), _) => (bytes, false),
            (Err(HeaderFault::Version(found)), _) | (_, Err(HeaderFault::Version(found))) => {
                return Err(CacheError::UnknownVersion { found: *found });
            }
            (Err(_), Err(_)) => return Err(CacheError::HeaderDamaged),
        };
        let is_whole = first.is_ok_and(|it| it.as_bytes() == bytes.as_bytes())
            && second.is_ok_and(|it| it.as_bytes() == bytes.as_bytes());
        let (other_at, other) = if second_counts { (0, first) } else { (PAGE_BYTES, second) };
        // A whole copy with the same number was never that of this pool's last updates.
        let is_foreign = !is_whole && other.is_ok_and(|it| it.sequence == bytes.sequence);
        let damaged_copy = damage_of(&found).or_else(|| match is_whole {
            true => None,
            false if is_foreign => Some(CopyDamage::Damaged),
            false => damage_beside(region, superblock.data_offset + other_at, bytes),
        });
        let shards = bytes.shards.get();
        let has_layout = bytes.chunks_offset.get() == CHUNKS_OFFSET;
        if !(1..=SHARDS_MAX).contains(&shards) || !has_layout {
            return Err(CacheError::HeaderDamaged);
        }
        // Pools created before clusters existed have 0.
        let cluster = match bytes.line_bytes.get() {
            0 => Cluster::default(),
            found_bytes => cluster_of(found_bytes)?,
        };
        let places = places_of(&superblock, bytes.slots.get());
        let (slots, expected) = (places.slots(), slots_least(shards));
        if slots < expected {
            return Err(CacheError::Slots { found: slots.into(), expected: expected.into() });
        }
        Ok(Self {
            superblock,
            shards,
            cluster,
            salt: bytes.salt.get(),
            mode: Mode::of_code(bytes.mode.get()).ok_or(CacheError::HeaderDamaged)?,
            settings: settings_of(bytes),
            binding: binding_of(bytes),
            places,
            sequence: bytes.sequence.get(),
            version: bytes.version.get(),
            second_counts,
            is_whole,
            superblock_is_whole: found.is_whole(),
            damaged_copy,
        })
    }

    /// Returns the last committed group, or 0. All members of this group and earlier ones count.
    ///
    /// # Errors
    /// [`CacheError::CommitWords`] if the commit words are damaged.
    pub fn committed_group(&self, region: &Region) -> Result<u64> {
        let read = |group| -> Result<[u64; 2]> {
            let mut bytes = [0; COMMIT_BYTES];
            region.read(self.superblock.data_offset + commit_offset(group), &mut bytes)?;
            let word: [U64; 2] = zerocopy::transmute!(bytes);
            Ok(word.map(U64::get))
        };
        let found = [read(0)?, read(1)?];
        committed_group(self.salt, found).ok_or(CacheError::CommitWords { found })
    }

    /// Rewrites the superblock and this header where one of their copies is damaged.
    ///
    /// # Errors
    /// [`CacheError::Pool`] or [`CacheError::Pmem`] if a write fails.
    pub(in crate::cache) fn restore(&mut self, region: &Region) -> Result<()> {
        if !self.superblock_is_whole {
            self.superblock.write(region)?;
            self.superblock_is_whole = true;
        }
        if self.is_whole { Ok(()) } else { self.write(region) }
    }

    /// Writes both copies; the one that counts is written last.
    ///
    /// # Errors
    /// [`CacheError::Pmem`] if a write fails. The pool then has either its old header or this one.
    pub(in crate::cache) fn write(&mut self, region: &Region) -> Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = self.encode();
        let order = if self.second_counts { [0, PAGE_BYTES] } else { [PAGE_BYTES, 0] };
        for offset in order {
            region.write_streaming(self.superblock.data_offset + offset, bytes.as_bytes())?;
            // This copy must be durable before the copy that counted is overwritten.
            region.fence()?;
        }
        (self.second_counts, self.is_whole, self.version) = (false, true, VERSION);
        Ok(())
    }

    fn encode(&self) -> CacheHeaderBytes {
        let mut bytes = CacheHeaderBytes::new();
        bytes.mode = U32::new(self.mode.code());
        bytes.sequence = U64::new(self.sequence);
        bytes.salt = U64::new(self.salt);
        bytes.slots = U64::new(self.places.chunk_slots().into());
        bytes.shards = U32::new(self.shards);
        bytes.line_bytes = U32::new(u32::try_from(self.cluster.bytes()).unwrap_or_default());
        let settings = self.settings.as_bytes();
        let len = settings.len().min(SETTINGS_BYTES_MAX);
        bytes.settings[..len].copy_from_slice(&settings[..len]);
        if let Some(binding) = &self.binding {
            let name = binding.name.as_bytes();
            let len = name.len().min(NAME_BYTES_MAX);
            bytes.backing_identity = U64::new(binding.identity);
            bytes.backing_pages = U64::new(binding.pages);
            bytes.backing_name_bytes = U32::new(u32::try_from(len).unwrap_or_default());
            bytes.backing_name[..len].copy_from_slice(&name[..len]);
        }
        bytes.seal();
        bytes
    }
}

/// Returns the damage of a copy of the superblock.
fn damage_of(found: &Found) -> Option<CopyDamage> {
    match (found.first, found.second) {
        (None | Some(CopyFault::CutOff), None | Some(CopyFault::CutOff)) => None,
        (Some(CopyFault::OneBit), _) | (_, Some(CopyFault::OneBit)) => Some(CopyDamage::OneBit),
        _ => Some(CopyDamage::Damaged),
    }
}

/// Returns the damage of the copy at `offset` beside the copy `whole`, which differs.
fn damage_beside(region: &Region, offset: u64, whole: &CacheHeaderBytes) -> Option<CopyDamage> {
    let mut copy = CacheHeaderBytes::new_zeroed();
    if region.read(offset, copy.as_mut_bytes()).is_err() {
        return Some(CopyDamage::Damaged);
    }
    let sequences = [copy.sequence.get(), whole.sequence.get()];
    match compare_copies(copy.as_bytes(), whole.as_bytes(), sequences) {
        Difference::CutOff if whole.is_of_one_pool(&copy) => None,
        Difference::OneBit => Some(CopyDamage::OneBit),
        _ => Some(CopyDamage::Damaged),
    }
}

fn settings_of(bytes: &CacheHeaderBytes) -> String {
    let text = bytes.settings.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

fn binding_of(bytes: &CacheHeaderBytes) -> Option<Binding> {
    let identity = bytes.backing_identity.get();
    let len = (bytes.backing_name_bytes.get() as usize).min(NAME_BYTES_MAX);
    let name = String::from_utf8_lossy(&bytes.backing_name[..len]).into_owned();
    (identity != 0).then(|| Binding { identity, name, pages: bytes.backing_pages.get() })
}

fn read_copy(
    region: &Region,
    offset: u64,
) -> std::result::Result<Box<CacheHeaderBytes>, HeaderFault> {
    let mut bytes = Box::new(CacheHeaderBytes::new_zeroed());
    let read: std::result::Result<(), PmemError> = region.read(offset, bytes.as_mut_bytes());
    read.map_err(|_| HeaderFault::Damaged)?;
    bytes.validate().map(|()| bytes)
}
