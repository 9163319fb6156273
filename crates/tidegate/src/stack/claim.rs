//! The claim of a pool on its backing: the lock that keeps other programs away, and the mark that
//! says which pool the backing was behind last.

use std::fs::File;

use parking_lot::Mutex;
use uuid::Uuid;

use crate::backing::Mark;
use crate::pool::{BackingState, Superblock};

/// What the mark of a backing says to a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Since {
    /// The pool was the last one before the backing, or no other is known.
    Unchanged,
    /// Another pool was, and may hold writes that the backing lacks.
    Pending(Uuid),
    /// Another pool was, and the backing has all that it held.
    Changed,
    /// This pool was, in a later state than the one that is here.
    Later {
        /// The number of the superblock then.
        sequence: u64,
    },
    /// The mark is not the one that this pool left: the backing is an older state of itself.
    Restored,
}

/// The lock and the mark of an open backing.
pub(super) struct Claim {
    file: File,
    /// What the file is marked with, where it keeps a mark.
    mark: Mutex<Option<Mark>>,
}

impl Claim {
    /// Over the locked `file` of the backing.
    pub(super) fn new(file: File) -> Self {
        Self { file, mark: Mutex::default() }
    }

    /// The file of the backing.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// What happened to the backing since the pool with `superblock` was before it.
    pub(super) fn since(&self, superblock: &Superblock) -> Since {
        let left = superblock.state.filter(|state| state.mark != 0);
        match Mark::read(&self.file) {
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

    /// The number in the mark of `pool`; 0 where there is none.
    pub(super) fn number(&self, pool: Uuid) -> u64 {
        Mark::read(&self.file).filter(|it| it.pool == pool).map_or(0, |it| it.sequence)
    }

    /// The pool with `superblock` writes to the backing from now on. False: the file keeps no mark,
    /// and is used without one.
    pub(super) fn take(&self, superblock: &Superblock) -> bool {
        let Superblock { uuid, sequence, .. } = *superblock;
        self.mark(Mark { pool: uuid, sequence, is_pending: true });
        self.mark.lock().is_some()
    }

    /// The backing has all that the pool held.
    pub(super) fn flushed(&self) {
        let taken = *self.mark.lock();
        if let Some(mark) = taken {
            self.mark(Mark { is_pending: false, ..mark });
        }
    }

    fn mark(&self, mark: Mark) {
        if mark.write(&self.file).is_ok() {
            *self.mark.lock() = Some(mark);
        }
    }
}
