//! Planted bugs: an observer that leaves out or spoils stores, write-backs or fences of the BTT,
//! the log, or the cache.
//!
//! The engine itself is unchanged. A store that the observer withholds never becomes durable in the
//! simulator's model, exactly as if the engine had left it out. A test for each mutation asserts
//! that the simulator objects.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crc_fast::{CrcAlgorithm, checksum};
use tidegate::cache::CacheHeader;
use tidegate::cache::layout::{
    ALL_LINES, ALL_PART_HEADERS, Decoded, PAGE_BYTES, SlotHeader, VERDICT_OFFSET, clean_verdict,
    data_check, parts_of,
};
use tidegate::log::layout::{COPY_DISTANCE, LIMIT_OFFSET, RING_OFFSET};
use tidegate::pmem::{Observer, Region};
use tidegate::pool::Superblock;

use crate::cache::BACKING_OFFSET;
use crate::context;
use crate::judge::Verdict;
use crate::kernel::Layout;

/// A planted bug, in every write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Leave out the fence with this number, from 0.
    DropFence(usize),
    /// Leave out the write-back of the map line of the lba being written: of the entry that the
    /// write replaces.
    DropMapWriteBack,
    /// Leave out the write-back of other map lines: of the entry that the lane's previous write
    /// stored.
    DropPreviousMapWriteBack,
    /// Leave out the write-back of the flog line with this number, from 0: the first half's, the
    /// second half's.
    DropFlogWriteBack(usize),
    /// Store the data through the cache without writing it back, where it should be streamed.
    CachedData,
    /// Store the second half of the flog slot before the first fence: swaps that store with the
    /// fence.
    EarlySequence,
    /// Leave out the write-back of the log's limit.
    DropLimitWriteBack,
    /// Let each record of a log call all records before it finished: as if the finished position
    /// were moved when space is reserved, before the fence.
    EarlyFinished,
    /// Leave out the fence between the void headers of older versions and the headers of the newest
    /// ones, when a cache evicts.
    MergeVoids,
    /// Leave out the write-back of void headers of a cache.
    DropVoidWriteBack,
    /// Void the version that a page of a cache has when its successor is stored, not fenced.
    DeadBeforeFence,
    /// Void the version that a member of a group replaces when the member is fenced, not committed.
    DeadBeforeCommit,
    /// Leave out the fences of a group's members: the commit word's is the first after them.
    EarlyCommit,
    /// Write each member of a group to the backing before the group is committed.
    CleanBeforeCommit,
    /// Leave the last block out of the bitmap of each record of several, and its bytes out of the
    /// checksum: a line lost in a merge.
    LostLines,
    /// Let a record that a page replaces count as the page's successor.
    RecordOverPage,
    /// Store members of groups as pages of none, so that each commits by itself: the `TCoW` of AFCM
    /// as printed.
    CommitAlone,
    /// Store the verdict that a page of a cache is clean with its header: as if a write were clean
    /// when it is acknowledged.
    CleanAtOnce,
    /// Let a page that a read loaded into a cache have its bytes from before the last write: as if
    /// the page's version were ignored.
    StaleFill,
    /// Hold each page of a batch but the first back until after the fence: a later fence, also of
    /// another thread, is to make it durable.
    LateMember,
    /// Leave the old headers in the parts of a slot that is split.
    StaleParts,
    /// Leave out the fence behind the void headers of a slot that is to be split.
    UnfencedParts,
    /// Leave the header that marks a slot as split, after all of its parts became free or dead.
    KeepSplit,
    /// Leave out all stores of a cache while its size changes, except of the superblock: new slots
    /// are used before their headers are free, and slots are removed before their pages are.
    ResizeAlone,
    /// Leave out the write-back of the backing while a cache is purged, until the purge is done:
    /// pages are given up before the backing is flushed.
    PurgeBeforeFlush,
}

/// Lines of a block of 512 bytes.
const BLOCK_LINES: u32 = 8;

/// The progress of a thread's present operation.
#[derive(Debug, Default)]
struct Progress {
    operation: u64,
    fences: usize,
    flog_write_backs: usize,
    /// Void headers of parts that were stored since the last fence.
    cleared: usize,
    /// A fence held back until after the next store.
    held_fence: bool,
    /// Offset of the header that the last store voided.
    void: Option<u64>,
    /// A fence held back until it is known whether the next store voids a header.
    held_void_fence: bool,
    /// The operation stored members of a group.
    has_members: bool,
    /// The bytes of the last page or record that was stored.
    page: Vec<u8>,
    /// Headers that are void after the next fence.
    voids: Vec<u64>,
    /// Headers that the operation stored.
    headers: usize,
    /// Headers that are stored after the next fence.
    late: Vec<(u64, [u8; 64])>,
    /// The write-back of the backing that was left out, offset and length.
    late_write_back: Option<(u64, u64)>,
}

/// An observer that spoils the events that it passes on.
pub struct Mutant {
    mutation: Mutation,
    layout: Option<Layout>,
    /// Offset of the log's limit.
    limit: Option<u64>,
    ring: Option<Ring>,
    slots: Option<Slots>,
    inner: Arc<dyn Observer>,
    progress: Mutex<HashMap<usize, Progress>>,
}

impl Mutant {
    /// Plants `mutation` between an engine, whose region starts as `image`, and `inner`.
    ///
    /// # Errors
    /// If `image` does not fit the mutation.
    pub fn new(
        mutation: Mutation,
        image: &[u8],
        inner: Arc<dyn Observer>,
    ) -> Result<Self, Verdict> {
        let (mut layout, mut limit, mut ring, mut slots) = (None, None, None, None);
        match mutation {
            Mutation::DropLimitWriteBack => limit = Some(limit_offset(image)?),
            Mutation::EarlyFinished => ring = Some(Ring::find(image)?),
            Mutation::DropFence(_)
            | Mutation::MergeVoids
            | Mutation::DropVoidWriteBack
            | Mutation::ResizeAlone
            | Mutation::PurgeBeforeFlush => {}
            Mutation::DeadBeforeFence
            | Mutation::DeadBeforeCommit
            | Mutation::EarlyCommit
            | Mutation::CleanBeforeCommit
            | Mutation::LostLines
            | Mutation::RecordOverPage
            | Mutation::CommitAlone
            | Mutation::CleanAtOnce
            | Mutation::StaleFill
            | Mutation::StaleParts
            | Mutation::UnfencedParts
            | Mutation::KeepSplit
            | Mutation::LateMember => slots = Some(Slots::find(image)?),
            _ => layout = Some(Layout::find(image).map_err(Verdict::outside)?),
        }
        Ok(Self { mutation, layout, limit, ring, slots, inner, progress: Mutex::default() })
    }

    /// Calls `ask` with the progress of the caller's operation; the default outside operations.
    fn ask<T: Default>(&self, ask: impl FnOnce(&mut Progress) -> T) -> T {
        let Some(thread) = context::simulated() else { return T::default() };
        let mut all = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = all.entry(thread).or_default();
        if progress.operation != context::operation() {
            *progress = Progress { operation: context::operation(), ..Progress::default() };
        }
        ask(progress)
    }

    fn in_flog(&self, offset: u64) -> bool {
        let flog = self.layout.as_ref().map(|layout| &layout.flog);
        usize::try_from(offset).is_ok_and(|offset| flog.is_some_and(|flog| flog.contains(&offset)))
    }

    fn in_map(&self, offset: u64) -> bool {
        let map = self.layout.as_ref().map(|layout| &layout.map);
        usize::try_from(offset).is_ok_and(|offset| map.is_some_and(|map| map.contains(&offset)))
    }

    /// Returns whether `offset` is in the cache line of the map entry of the operation's block.
    fn in_own_line(&self, offset: u64) -> bool {
        let Some(layout) = &self.layout else { return false };
        let entry = |lba| layout.map.start as u64 + lba * 4;
        context::lba().is_some_and(|lba| entry(lba) / 64 == offset / 64)
    }

    fn drops_write_back(&self, offset: u64, len: u64, progress: &mut Progress) -> bool {
        match self.mutation {
            Mutation::PurgeBeforeFlush if offset == BACKING_OFFSET && context::is_purging() => {
                progress.late_write_back = Some((offset, len));
                true
            }
            Mutation::DropMapWriteBack => self.in_map(offset) && self.in_own_line(offset),
            Mutation::DropPreviousMapWriteBack => self.in_map(offset) && !self.in_own_line(offset),
            Mutation::DropFlogWriteBack(number) if self.in_flog(offset) => {
                progress.flog_write_backs += 1;
                progress.flog_write_backs == number + 1
            }
            Mutation::DropLimitWriteBack => {
                self.limit.is_some_and(|limit| [limit, limit + COPY_DISTANCE].contains(&offset))
            }
            Mutation::DropVoidWriteBack => progress.void == Some(offset),
            _ => false,
        }
    }

    fn drops_fence(&self, progress: &mut Progress) -> bool {
        progress.fences += 1;
        match self.mutation {
            Mutation::DropFence(number) => progress.fences == number + 1,
            Mutation::EarlyCommit => progress.has_members,
            Mutation::UnfencedParts => std::mem::take(&mut progress.cleared) > 0,
            Mutation::EarlySequence if progress.fences == 1 => {
                progress.held_fence = true;
                true
            }
            Mutation::MergeVoids => {
                progress.held_void_fence = progress.void.is_some();
                progress.held_void_fence
            }
            _ => false,
        }
    }
}

fn region_of(image: &[u8]) -> Result<Region, Verdict> {
    let region = Region::anonymous(image.len() as u64).map_err(Verdict::outside)?;
    region.write(0, image).map_err(Verdict::outside)?;
    Ok(region)
}

fn limit_offset(image: &[u8]) -> Result<u64, Verdict> {
    let region = region_of(image)?;
    let found = Superblock::read(&region).map_err(Verdict::outside)?;
    Ok(found.superblock.data_offset + LIMIT_OFFSET)
}

/// The part of a region that holds the records of a log.
struct Ring {
    start: u64,
    bytes: u64,
    salt: u64,
}

impl Ring {
    fn find(image: &[u8]) -> Result<Self, Verdict> {
        let region = region_of(image)?;
        let found = Superblock::read(&region).map_err(Verdict::outside)?;
        let base = found.superblock.data_offset;
        let word = |offset| region.load_u64(base + offset).map_err(Verdict::outside);
        Ok(Self { start: base + RING_OFFSET, salt: word(16)?, bytes: word(24)? })
    }

    /// Decodes `data` at `offset` as a record's header; returns it with all earlier records
    /// finished.
    fn early(&self, offset: u64, data: &[u8]) -> Option<[u8; 64]> {
        let mut bytes: [u8; 64] = data.try_into().ok()?;
        let position = u64::from_le_bytes(bytes[8..16].try_into().ok()?);
        let is_there = offset.checked_sub(self.start)? == position % self.bytes;
        if !is_there || position == 0 {
            return None;
        }
        bytes[60..].copy_from_slice(&1_u32.to_le_bytes());
        bytes[..8].copy_from_slice(&self.salt.to_le_bytes());
        let mut checked = [0; 128];
        checked[..64].copy_from_slice(&bytes);
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &checked);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        Some(bytes)
    }
}

/// The slots of a cache, and the stores to them.
struct Slots {
    header: CacheHeader,
    /// By page: headers of versions that are not known to be void, and their groups.
    versions: Mutex<HashMap<u64, Vec<(u64, u64)>>>,
    /// Slots that are split.
    split: Mutex<HashSet<u32>>,
    /// By page: the last record, its slot, and where its header lies.
    records: Mutex<HashMap<u64, (SlotHeader, u32, u64)>>,
    /// By page: the bytes that were written to it, the last ones at the end.
    contents: Mutex<HashMap<u64, Vec<Vec<u8>>>>,
}

impl Slots {
    fn find(image: &[u8]) -> Result<Self, Verdict> {
        let region = region_of(image)?;
        let header = CacheHeader::read(&region).map_err(Verdict::outside)?;
        let (versions, split, records, contents) = Default::default();
        let slots = Self { header, versions, split, records, contents };
        for slot in slots.numbers() {
            let offset = slots.header.places.header(slot);
            let mut bytes = [0; 64];
            region.read(offset, &mut bytes).map_err(Verdict::outside)?;
            slots.unites(offset, &bytes);
            if let Some((_, header)) = slots.decode(offset, &bytes) {
                slots.replace(&header, offset);
            }
        }
        Ok(slots)
    }

    /// Decodes `data` at `offset` as a slot's header; returns the slot and the header.
    fn decode(&self, offset: u64, data: &[u8]) -> Option<(u32, SlotHeader)> {
        let bytes: &[u8; 64] = data.try_into().ok()?;
        let places = self.header.places;
        let slot = self.numbers().find(|slot| places.header(*slot) == offset)?;
        match SlotHeader::decode(bytes, self.header.salt, slot) {
            Decoded::Header(header) => Some((slot, header)),
            _ => None,
        }
    }

    /// Returns the numbers of all slots, and of all parts that each may have.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        (0..self.header.places.slots()).flat_map(|slot| std::iter::once(slot).chain(parts_of(slot)))
    }

    /// Notes whether `data` at `offset`, the header of a slot, splits the slot. Returns whether it
    /// voids the header of one that is split.
    fn unites(&self, offset: u64, data: &[u8]) -> bool {
        let places = self.header.places;
        let Some(slot) = (0..places.slots()).find(|slot| places.header(*slot) == offset) else {
            return false;
        };
        let mut split = self.split.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(bytes) = data.try_into() else { return data == [0; 8] && split.contains(&slot) };
        match SlotHeader::decode(bytes, self.header.salt, slot) {
            Decoded::Split => split.insert(slot),
            _ => split.remove(&slot),
        };
        false
    }

    /// Notes that `header` is stored at `offset`. Returns the headers of the page that it replaces,
    /// except the headers of its own group.
    fn replace(&self, header: &SlotHeader, offset: u64) -> Vec<u64> {
        let mut all = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        for versions in all.values_mut() {
            versions.retain(|(other, _)| *other != offset);
        }
        let versions = all.entry(header.page).or_default();
        let is_replaced = |group: u64| header.group == 0 || group != header.group;
        let replaced = versions.extract_if(.., |(_, group)| is_replaced(*group));
        let replaced = replaced.map(|(offset, _)| offset).collect();
        versions.push((offset, header.group));
        replaced
    }
}

impl Mutant {
    /// Stores a slot's header at `offset`, spoiled by the mutation.
    fn store_header(&self, slots: &Slots, slot: u32, header: &SlotHeader, offset: u64) {
        let is_member = header.group > 0;
        let alone = is_member && self.mutation == Mutation::CommitAlone;
        let group = if alone { 0 } else { header.group };
        let (lines, data_check) = self.lines_of(header);
        let bytes =
            SlotHeader { group, lines, data_check, ..*header }.encode(slots.header.salt, slot);
        let replaced = slots.replace(header, offset);
        if self.mutation == Mutation::LateMember && self.is_late(offset, &bytes) {
            return;
        }
        self.inner.store(offset, &bytes, true);
        match self.mutation {
            Mutation::CleanAtOnce => {
                let verdict = clean_verdict(slots.header.salt, slot, header.version);
                self.inner.store(offset + VERDICT_OFFSET, &verdict.to_le_bytes(), true);
            }
            Mutation::StaleFill => self.spoil_fill(slots, slot, header, offset),
            Mutation::DeadBeforeFence => self.void(&replaced),
            Mutation::DeadBeforeCommit if is_member => {
                self.ask(|progress| progress.voids.extend(replaced));
            }
            Mutation::EarlyCommit if is_member => {
                self.ask(|progress| progress.has_members = true);
            }
            Mutation::RecordOverPage => self.revive(slots, slot, header, offset),
            Mutation::CleanBeforeCommit if is_member && !header.zero => {
                self.clean(header.page);
            }
            _ => {}
        }
    }

    /// Returns whether the header `bytes` at `offset` is not the first of its operation; keeps such
    /// a header until after the fence.
    fn is_late(&self, offset: u64, bytes: &[u8; 64]) -> bool {
        self.ask(|progress| {
            progress.headers += 1;
            let is_late = progress.headers > 1;
            if is_late {
                progress.late.push((offset, *bytes));
            }
            is_late
        })
    }

    /// Remembers the last written page. A page that a read loaded is stored again, with the bytes
    /// from before its last write.
    fn spoil_fill(&self, slots: &Slots, slot: u32, header: &SlotHeader, offset: u64) {
        if header.lines != ALL_LINES || header.zero {
            return;
        }
        let data = self.ask(|progress| progress.page.clone());
        let mut all = slots.contents.lock().unwrap_or_else(PoisonError::into_inner);
        let contents = all.entry(header.page).or_default();
        if header.dirty {
            contents.push(data);
        } else if let [.., older, newest] = contents.as_slice()
            && *newest == data
        {
            let header = SlotHeader { data_check: data_check(older), ..*header };
            self.inner.store(slots.header.places.data(slot), older, true);
            self.inner.store(offset, &header.encode(slots.header.salt, slot), true);
        }
    }

    /// Returns the lines that `header` is stored with, and the checksum of their bytes.
    fn lines_of(&self, header: &SlotHeader) -> (u64, u32) {
        let lines = header.lines;
        let kept = (0..BLOCK_LINES).fold(lines, |lines, _| lines & !(1 << lines.ilog2()));
        if self.mutation != Mutation::LostLines || lines == ALL_LINES || kept == 0 {
            return (lines, header.data_check);
        }
        let bytes = self.ask(|progress| progress.page.clone());
        (kept, data_check(&bytes[..kept.count_ones() as usize * 64]))
    }

    /// Remembers a record. After a page that replaces a record, the record is stored again, as a
    /// later version.
    fn revive(&self, slots: &Slots, slot: u32, header: &SlotHeader, offset: u64) {
        let mut records = slots.records.lock().unwrap_or_else(PoisonError::into_inner);
        if header.lines != ALL_LINES {
            records.insert(header.page, (*header, slot, offset));
        } else if let Some((record, slot, offset)) = records.remove(&header.page) {
            let revived = SlotHeader { version: header.version + 1, ..record };
            self.inner.store(offset, &revived.encode(slots.header.salt, slot), true);
        }
    }

    /// Flushes the backing once a purge is over, as the purge should have done.
    fn flush_late(&self) {
        let is_over = !context::is_purging();
        let late = self.ask(|progress| progress.late_write_back.take_if(|_| is_over));
        if let Some((offset, len)) = late {
            self.inner.write_back(offset, len);
            self.inner.fence();
        }
    }

    fn void(&self, headers: &[u64]) {
        for offset in headers {
            self.inner.store(*offset, &[0; 8], true);
        }
    }

    /// Writes the page that the caller stored last to the backing.
    fn clean(&self, page: u64) {
        let data = self.ask(|progress| progress.page.clone());
        self.inner.store(BACKING_OFFSET + page * PAGE_BYTES, &data, true);
        self.inner.fence();
    }
}

impl Observer for Mutant {
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool) {
        self.flush_late();
        let is_superblock = data.starts_with(b"TIDEGATE");
        if self.mutation == Mutation::ResizeAlone && context::is_resizing() && !is_superblock {
            return;
        }
        if let Some(slots) = self.slots.as_ref().filter(|_| context::simulated().is_some()) {
            let keeps = slots.unites(offset, data) && self.mutation == Mutation::KeepSplit;
            let clears = *data == [0; ALL_PART_HEADERS];
            if keeps || clears && self.mutation == Mutation::StaleParts {
                return;
            }
            self.ask(|progress| progress.cleared += usize::from(clears));
            if let Some((slot, header)) = slots.decode(offset, data) {
                return self.store_header(slots, slot, &header, offset);
            }
            if data.len() > 64 {
                self.ask(|progress| progress.page = data.into());
            }
        }
        let ring = self.ring.as_ref().filter(|_| context::simulated().is_some());
        if let Some(early) = ring.and_then(|ring| ring.early(offset, data)) {
            return self.inner.store(offset, &early, non_temporal);
        }
        let is_void = data == [0; 8];
        let late = self.ask(|progress| {
            progress.void = is_void.then_some(offset);
            std::mem::take(&mut progress.held_void_fence) && !is_void
        });
        if late {
            self.inner.fence();
        }
        let cached = self.mutation == Mutation::CachedData && context::simulated().is_some();
        self.inner.store(offset, data, non_temporal && !cached);
        let held = self.ask(|progress| std::mem::take(&mut progress.held_fence));
        if held {
            self.inner.fence();
        }
    }

    fn write_back(&self, offset: u64, len: u64) {
        if !self.ask(|progress| self.drops_write_back(offset, len, progress)) {
            self.inner.write_back(offset, len);
        }
    }

    fn fence(&self) {
        if !self.ask(|progress| self.drops_fence(progress)) {
            self.inner.fence();
        }
        self.void(&self.ask(|progress| std::mem::take(&mut progress.voids)));
        for (offset, bytes) in self.ask(|progress| std::mem::take(&mut progress.late)) {
            self.inner.store(offset, &bytes, true);
        }
    }

    fn load(&self, offset: u64, len: u64) {
        self.inner.load(offset, len);
    }

    fn relax(&self) {
        self.inner.relax();
    }

    fn thread_ordinal(&self) -> usize {
        self.inner.thread_ordinal()
    }
}
