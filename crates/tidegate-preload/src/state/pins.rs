//! Files that this process has pinned until it ends, since they may change unseen at any time: it
//! has mapped them, or has them written by the kernel or by other processes.
//!
//! Invariant: each file is in the table at most once, unless two threads note it at the same time.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::FileRef;

/// Entries of the log's table as words, 0 for none.
static PINNED: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Notes a file that this process has pinned in the log's table. Returns whether there was space.
#[must_use = "a forked child does not pin the file again"]
pub(crate) fn note(file: FileRef) -> bool {
    PINNED.iter().any(|word| {
        word.compare_exchange(0, file.to_word(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })
}

/// Returns whether the file is noted.
pub(crate) fn has(file: FileRef) -> bool {
    find(file).is_some()
}

/// Removes one note of the file. Returns whether there was one.
pub(crate) fn forget(file: FileRef) -> bool {
    find(file).inspect(|word| word.store(0, Ordering::Release)).is_some()
}

fn find(file: FileRef) -> Option<&'static AtomicU64> {
    PINNED.iter().find(|word| word.load(Ordering::Acquire) == file.to_word())
}

/// Calls `visit` for each file that is noted.
pub(crate) fn each(visit: impl Fn(FileRef)) {
    for word in &PINNED {
        let word = word.load(Ordering::Acquire);
        if word != 0 {
            visit(FileRef::from_word(word));
        }
    }
}
