//! Planted bugs: an observer that leaves out or spoils what the write of the BTT, or of the log,
//! does.
//!
//! The engine itself is untouched. What is withheld from the simulator never becomes durable in its
//! model, exactly as if the engine had left it out. A test for each mutation asserts that the
//! simulator objects.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tidegate::log::layout::LIMIT_OFFSET;
use tidegate::pmem::{Observer, Region};
use tidegate::pool::Superblock;

use crate::context;
use crate::judge::Verdict;
use crate::kernel::Layout;

/// What to spoil in every write.
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
    /// Leave out the fence between the void headers of older versions and those of the newest ones,
    /// where a cache evicts.
    MergeVoids,
    /// Leave out the write-back of void headers of a cache.
    DropVoidWriteBack,
}

/// What a thread's present operation did so far.
#[derive(Debug, Default)]
struct Progress {
    operation: u64,
    fences: usize,
    flog_write_backs: usize,
    /// A fence held back until after the next store.
    held_fence: bool,
    /// Where the last store voided a header.
    void: Option<u64>,
    /// A fence held back until it is known whether the next store voids a header.
    held_void_fence: bool,
}

/// An observer that spoils what it passes on.
pub struct Mutant {
    mutation: Mutation,
    layout: Option<Layout>,
    /// Where the log's limit lies.
    limit: Option<u64>,
    inner: Arc<dyn Observer>,
    progress: Mutex<HashMap<usize, Progress>>,
}

impl Mutant {
    /// Plants `mutation` between a BTT, or a log, in a region that starts as `image` and `inner`.
    ///
    /// # Errors
    /// Where the image is not what the mutation is about.
    pub fn new(
        mutation: Mutation,
        image: &[u8],
        inner: Arc<dyn Observer>,
    ) -> Result<Self, Verdict> {
        let (layout, limit) = match mutation {
            Mutation::DropLimitWriteBack => (None, Some(limit_offset(image)?)),
            Mutation::DropFence(_) | Mutation::MergeVoids | Mutation::DropVoidWriteBack => {
                (None, None)
            }
            _ => (Some(Layout::find(image).map_err(Verdict::outside)?), None),
        };
        Ok(Self { mutation, layout, limit, inner, progress: Mutex::default() })
    }

    /// Calls `ask` with the progress of the caller's operation; false outside operations.
    fn ask(&self, ask: impl FnOnce(&mut Progress) -> bool) -> bool {
        let Some(thread) = context::simulated() else { return false };
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

    /// `offset` is in the cache line of the map entry of the block that the caller's operation is
    /// on.
    fn in_own_line(&self, offset: u64) -> bool {
        let Some(layout) = &self.layout else { return false };
        let entry = |lba| layout.map.start as u64 + lba * 4;
        context::lba().is_some_and(|lba| entry(lba) / 64 == offset / 64)
    }

    fn drops_write_back(&self, offset: u64, progress: &mut Progress) -> bool {
        match self.mutation {
            Mutation::DropMapWriteBack => self.in_map(offset) && self.in_own_line(offset),
            Mutation::DropPreviousMapWriteBack => self.in_map(offset) && !self.in_own_line(offset),
            Mutation::DropFlogWriteBack(number) if self.in_flog(offset) => {
                progress.flog_write_backs += 1;
                progress.flog_write_backs == number + 1
            }
            Mutation::DropLimitWriteBack => self.limit == Some(offset),
            Mutation::DropVoidWriteBack => progress.void == Some(offset),
            _ => false,
        }
    }

    fn drops_fence(&self, progress: &mut Progress) -> bool {
        progress.fences += 1;
        match self.mutation {
            Mutation::DropFence(number) => progress.fences == number + 1,
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

fn limit_offset(image: &[u8]) -> Result<u64, Verdict> {
    let region = Region::anonymous(image.len() as u64).map_err(Verdict::outside)?;
    region.write(0, image).map_err(Verdict::outside)?;
    let found = Superblock::read(&region).map_err(Verdict::outside)?;
    Ok(found.superblock.data_offset + LIMIT_OFFSET)
}

impl Observer for Mutant {
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool) {
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
        if !self.ask(|progress| self.drops_write_back(offset, progress)) {
            self.inner.write_back(offset, len);
        }
    }

    fn fence(&self) {
        if !self.ask(|progress| self.drops_fence(progress)) {
            self.inner.fence();
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
