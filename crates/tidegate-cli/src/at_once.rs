//! The same work on many items, each on a thread of its own.

use std::thread::{Builder, scope};

/// Calls `work` for all `items` at once, since one may wait for a disk, and returns the results in
/// their order. Without memory for a thread, the work is done one after the other.
pub(crate) fn at_once<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let work = &work;
    scope(|scope| {
        let start = |item| Builder::new().spawn_scoped(scope, move || work(item));
        let started: Vec<_> = items.iter().map(start).collect();
        let results = items.iter().zip(started).map(|(item, started)| match started {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => work(item),
        });
        results.collect()
    })
}
