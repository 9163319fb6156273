//! The claim of a pool on its backing: the lock that keeps other programs away, and the mark that
//! names the last pool in front of the backing.

use std::fs::File;

use parking_lot::Mutex;
use uuid::Uuid;

use crate::backing::{Guard, Mark};
use crate::pool::{BackingState, Superblock};

/// The state of a backing for a pool, by the backing's mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Since {
    /// This pool was the last one in front of the backing, or no other is known.
    Unchanged,
    /// Another pool was the last one, and may hold writes that the backing lacks.
    Pending(Uuid),
    /// Another pool was the last one, and the backing has all of that pool's writes.
    Changed,
    /// This pool was the last one, in a later state than the present one.
    Later {
        /// The number of the superblock in the later state.
        sequence: u64,
    },
    /// The mark is not the one that this pool left: an older state of the backing was restored.
    Restored,
}

/// The lock and the mark of an open backing.
pub(super) struct Claim {
    guard: Guard,
    /// The mark of the file, if it keeps one.
    mark: Mutex<Option<Mark>>,
}

impl Claim {
    /// Claims the backing with the locks `guard`.
    pub(super) fn new(guard: Guard) -> Self {
        Self { guard, mark: Mutex::default() }
    }

    /// Returns the file of the backing.
    pub(super) fn file(&self) -> &File {
        &self.guard.lock
    }

    /// Returns how the backing has changed since the pool with `superblock` last used it, by the
    /// mark.
    pub(super) fn since(&self, superblock: &Superblock) -> Since {
        let left = superblock.state.filter(|state| state.mark != 0);
        match Mark::read(&self.guard.lock) {
            None if left.is_some_and(|state| state.mark_before == 0) => Since::Restored,
            None => Since::Unchanged,
            Some(mark) if mark.pool == superblock.uuid => {
                let sequence = mark.sequence;
                let is_left = |it: BackingState| [it.mark, it.mark_before].contains(&sequence);
                match sequence > superblock.sequence {
                    true => Since::Later { sequence },
                    false if left.is_some_and(|state| !is_left(state)) => Since::Restored,
                    false => Since::Unchanged,
                }
            }
            Some(mark) if mark.is_pending => Since::Pending(mark.pool),
            Some(_) => Since::Changed,
        }
    }

    /// Returns the number in the mark of `pool`; 0 without such a mark.
    pub(super) fn number(&self, pool: Uuid) -> u64 {
        Mark::read(&self.guard.lock).filter(|it| it.pool == pool).map_or(0, |it| it.sequence)
    }

    /// Marks the backing before the pool with `superblock` writes to it. Returns false if the file
    /// keeps no mark; it is used without one.
    pub(super) fn take(&self, superblock: &Superblock) -> bool {
        let Superblock { uuid, sequence, .. } = *superblock;
        self.mark(Mark { pool: uuid, sequence, is_pending: true });
        self.mark.lock().is_some()
    }

    /// Marks that the backing has all writes of the pool.
    pub(super) fn flushed(&self) {
        let taken = *self.mark.lock();
        if let Some(mark) = taken {
            self.mark(Mark { is_pending: false, ..mark });
        }
    }

    fn mark(&self, mark: Mark) {
        if mark.write(&self.guard.lock).is_ok() {
            *self.mark.lock() = Some(mark);
        }
    }
}
