//! Errors of opening and resizing a cache pool.

use super::router::mode::Mode;
use super::store::layout::{PAGE_BYTES, PAGES_MAX};
use crate::device::DeviceError;
use crate::pmem::PmemError;
use crate::pool::PoolError;

/// Largest size of a backing in bytes.
const BACKING_BYTES_MAX: u64 = PAGES_MAX * PAGE_BYTES;

/// An error of opening or resizing a cache pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The superblock does not belong to a cache pool that can be used.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The persistent memory failed.
    #[error("persistent memory under the cache failed")]
    Pmem(#[from] PmemError),
    /// Neither copy of the cache header is whole.
    #[error(
        "both copies of the cache header are damaged: dirty pages cannot be found, restore the pool from a backup"
    )]
    HeaderDamaged,
    /// Another Tidegate wrote the cache header, or an earlier one whose slots have other parts.
    #[error(
        "the cache header has version {found}, this program knows 1, 2 and 4: flush the pool with the Tidegate that made it, and make it anew"
    )]
    UnknownVersion {
        /// Version of the header.
        found: u32,
    },
    /// The pool is too small for its cache header.
    #[error(
        "the pool has {found} slots, expected at least {expected}: it was made by another program"
    )]
    Slots {
        /// Slots of the pool.
        found: u64,
        /// Slots that a pool with its shards has at least.
        expected: u64,
    },
    /// A cache cannot have lines of this size.
    #[error(
        "the cache has lines of {found_bytes} bytes, expected 4096, 8192, 16384, 32768 or 65536: use a later Tidegate"
    )]
    LineSize {
        /// Size of a line in bytes.
        found_bytes: u32,
    },
    /// The pool keeps a setting that this program does not know.
    #[error(
        "the cache header keeps the setting `{setting}`, which this program does not know: use the Tidegate that made it, or `tidegate check --repair` to drop it"
    )]
    Setting {
        /// The line of the setting.
        setting: String,
    },
    /// The backing failed, or is not suitable.
    #[error(transparent)]
    Backing(#[from] DeviceError),
    /// The size of the backing is not a whole number of pages.
    #[error(
        "the backing has {bytes} bytes, expected a multiple of 4096 for a cache, whatever its --block-size: use a pool of --engine log, which has the backing's own size, or, if the backing is an image of a disk, make it longer by `truncate -s {}`",
        bytes.next_multiple_of(4096)
    )]
    PartialPage {
        /// Size of the backing in bytes.
        bytes: u64,
    },
    /// The backing has more pages than a cache can number.
    #[error(
        "the backing has {bytes} bytes, expected at most {BACKING_BYTES_MAX} (1 EiB) for a cache: use a smaller backing, or a pool of --engine log"
    )]
    TooLarge {
        /// Size of the backing in bytes.
        bytes: u64,
    },
    /// The pool holds dirty pages of another backing.
    #[error(
        "the cache holds {dirty} dirty pages of another backing, {name}: use that one, or say that this one is to get them"
    )]
    OtherBacking {
        /// Path or URL of that backing.
        name: String,
        /// Number of dirty pages.
        dirty: u64,
    },
    /// Another program wrote to the backing since this pool last cached it.
    #[error(
        "the cache holds {dirty} dirty pages of a backing that another program changed since: restore the backing as it was, or say that it is to get them"
    )]
    ChangedBacking {
        /// Number of dirty pages.
        dirty: u64,
    },
    /// A dirty page lies behind the end of the backing.
    #[error(
        "the cache holds a dirty page at offset {offset}, and the backing has {bytes} bytes: it was cut short, or is another one; make it as long as it was, or name the right one"
    )]
    Misfit {
        /// First byte of the page.
        offset: u64,
        /// Size of the backing in bytes.
        bytes: u64,
    },
    /// A page lies in a slot of another shard, where no program of this version puts it.
    #[error(
        "slot {slot} of the cache holds a page of another shard: the pool was made by another program"
    )]
    Misplaced {
        /// Number of the slot.
        slot: u32,
    },
    /// The commit words of atomic flush are damaged.
    #[error(
        "the commit words of the cache hold {found:x?}, which no flush wrote: which writes the last flush covered is lost, restore the pool from a backup"
    )]
    CommitWords {
        /// Content of both copies of the commit words.
        found: [[u64; 2]; 2],
    },
    /// The mode does not support atomic flush.
    #[error(
        "atomic flush needs the mode wb or wo, found {mode}: the backing would get a part of what a flush covers; set the mode without atomic flush first"
    )]
    NotAtomic {
        /// The mode.
        mode: Mode,
    },
    /// The pool would have too few slots.
    #[error("a pool of that size would have {found} slots, expected at least {expected}")]
    TooFewSlots {
        /// Slots of a pool of that size.
        found: u32,
        /// Fewest slots that this pool can have.
        expected: u32,
    },
    /// Another thread is changing the size of the pool.
    #[error("another change of the size is under way: wait until it is done")]
    Resizing,
    /// A slot that has to leave the pool stays taken.
    #[error("the memory failed while a slot was filled: stop the server and serve the pool again")]
    LostSlots,
    /// The cache was shut down before the pool had its new size.
    #[error("the cache is being shut down: the pool keeps its size")]
    ShutDown,
    /// The operating system refused a thread.
    #[error("the cache's thread cannot be started")]
    Thread(#[source] std::io::Error),
}

impl CacheError {
    /// Returns the error with its causes, in one line.
    pub(super) fn in_words(&self) -> String {
        let causes = std::iter::successors(std::error::Error::source(self), |it| it.source());
        causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}"))
    }
}
