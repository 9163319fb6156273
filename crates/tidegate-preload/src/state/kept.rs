//! Files that this process may change unseen at any time, since it has mapped them, or has others
//! write them.
//!
//! Invariant: each is in the table at most once, unless two threads note it at the same time.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::FileRef;

/// Entries of the log's table as words, 0 for none.
static KEPT: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Notes a file that the log's table counts as kept for this process.
pub(crate) fn note(file: FileRef) {
    // Where there is no place left, the pin stays until the supervisor hears of the process's end.
    for kept in &KEPT {
        if kept.compare_exchange(0, file.to_word(), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// Whether the file is noted.
pub(crate) fn is_kept(file: FileRef) -> bool {
    find(file).is_some()
}

/// Takes one note back. False: there was none.
pub(crate) fn forget(file: FileRef) -> bool {
    let kept = find(file);
    kept.inspect(|kept| kept.store(0, Ordering::Release)).is_some()
}

fn find(file: FileRef) -> Option<&'static AtomicU64> {
    KEPT.iter().find(|kept| kept.load(Ordering::Acquire) == file.to_word())
}

/// Calls `visit` for each file that is noted.
pub(crate) fn each(visit: impl Fn(FileRef)) {
    for kept in &KEPT {
        let word = kept.load(Ordering::Acquire);
        if word != 0 {
            visit(FileRef::from_word(word));
        }
    }
}
