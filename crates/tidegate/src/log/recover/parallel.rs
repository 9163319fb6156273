//! Runs a function over a list in a few threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Returns `f` of each item, in the order of the items. At most `workers` threads run at once.
pub(super) fn map<'i, T: Sync, R: Send>(
    workers: usize,
    items: &'i [T],
    f: impl Fn(&'i T) -> R + Sync,
) -> Vec<R> {
    if workers <= 1 || items.len() <= 1 {
        return items.iter().map(f).collect();
    }
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    std::thread::scope(|scope| {
        for _ in 0..workers.min(items.len()) {
            scope.spawn(|| {
                while let Some((index, item)) = take(&next, items) {
                    let result = f(item);
                    done.lock().push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn take<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    items.get(index).map(|item| (index, item))
}
