//! Gives the pool's file its space, a step ahead of the log's head: making a pool takes no time, and a log that is little used
//! takes little of a tmpfs.

use tidegate::log::Log;
use tidegate::pmem::Kind;

use tidegate::size::Size;

/// Space is asked for in steps of this.
const STEP_BYTES: u64 = 8 << 20;
/// How much there should be ahead of the head.
const AHEAD_BYTES: u64 = 64 << 20;
/// What a log starts with.
const FIRST_BYTES: u64 = 2 << 20;

/// The space of a pool's file.
#[derive(Debug, Default)]
pub(crate) struct Allocator {
    /// There was no space: what there is has to do.
    refused: bool,
}

impl Allocator {
    /// Bytes of the ring that have space already, where all of the file of `file_bytes` has as `allocated_bytes` of it.
    pub(crate) fn present_bytes(kind: Kind, whole: bool, ring_bytes: u64) -> u64 {
        if whole || kind == Kind::Devdax { ring_bytes } else { 0 }
    }

    /// Gives a log that is about to start its first space.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn begin(log: &Log) -> Result<Self, tidegate::log::LogError> {
        if log.allocated_bytes() == 0 {
            log.allocate(FIRST_BYTES)?;
        }
        Ok(Self::default())
    }

    /// Asks for space until there is enough ahead of the head of a log that is used, or that somebody wants to.
    ///
    /// # Errors
    /// There is none left; it is not asked for again.
    pub(crate) fn keep_ahead(&mut self, log: &Log, wanted: bool) -> Result<(), String> {
        let ring_bytes = log.pool().ring_bytes();
        let used = wanted || log.head() > log.tail();
        while used && !self.refused && is_short(log, ring_bytes) {
            if let Err(error) = log.allocate(STEP_BYTES) {
                self.refused = true;
                log.stop_allocating();
                let size = Size { bytes: log.allocated_bytes() };
                return Err(format!("no more space for the log, which stays at {size}: {error}"));
            }
        }
        Ok(())
    }

    /// The head at which space has to be asked for; none, if there is all of it.
    pub(crate) fn wake_at(&self, log: &Log) -> Option<u64> {
        let (allocated, ring_bytes) = (log.allocated_bytes(), log.pool().ring_bytes());
        if self.refused || allocated >= ring_bytes {
            return None;
        }
        let head = log.head();
        let left = allocated.saturating_sub(head % ring_bytes);
        Some(head + left.saturating_sub(AHEAD_BYTES / 2).max(1))
    }
}

fn is_short(log: &Log, ring_bytes: u64) -> bool {
    let wanted = (log.head() % ring_bytes + AHEAD_BYTES).min(ring_bytes);
    log.allocated_bytes() < wanted
}
