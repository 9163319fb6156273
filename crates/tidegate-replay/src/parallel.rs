//! Runs one function on many items, on all CPUs.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};

/// Returns the results of `work` for `items`, in the same order. Runs as many in parallel as this
/// machine has CPUs.
///
/// # Panics
/// If `work` panics.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    let left = Mutex::new(items.iter().enumerate());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || {
        let works = std::iter::from_fn(next).map(|(at, item)| (at, work(item)));
        works.collect::<Vec<_>>()
    };
    let mut made: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cpus.min(items.len())).map(|_| scope.spawn(worker)).collect();
        let joined = workers.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.flat_map(|it| it.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, made)| made).collect()
}
