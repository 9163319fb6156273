//! The claim of a pool on its backing: the lock that keeps other programs away, and the mark that
//! says which pool the backing was behind last.

use std::fs::File;

use parking_lot::Mutex;
use uuid::Uuid;

use crate::backing::Mark;
use crate::pool::Superblock;

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
        match Mark::read(&self.file) {
            None => Since::Unchanged,
            Some(mark) if mark.pool == superblock.uuid => {
                let sequence = mark.sequence;
                let is_later = sequence > superblock.sequence;
                if is_later { Since::Later { sequence } } else { Since::Unchanged }
            }
            Some(mark) if mark.is_pending => Since::Pending(mark.pool),
            Some(_) => Since::Changed,
        }
    }

    /// The pool with `superblock` writes to the backing from now on. A file that keeps no mark is
    /// used without one.
    pub(super) fn take(&self, superblock: &Superblock) {
        let Superblock { uuid, sequence, .. } = *superblock;
        self.mark(Mark { pool: uuid, sequence, is_pending: true });
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
