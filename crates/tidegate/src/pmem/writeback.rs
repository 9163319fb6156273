//! The msync domain: the pages written back since the last fence, and the `msync` that makes them
//! durable.
//!
//! Invariants: a range leaves the list only after its `msync` succeeded, and fences take turns. So
//! a fence that returns `Ok` covers all ranges that its thread recorded, even those that another
//! thread's fence took. After one failure no fence succeeds again: the kernel may have dropped the
//! dirty pages that it could not write.

use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::Mutex;
use rustix::mm::MsyncFlags;

use super::PmemError;
use super::mapping::Mapping;

/// Ranges are merged when the list grows to this length, and then at each doubling.
const MERGE_AT: usize = 256;

/// Pages written back since the last fence, as byte ranges of whole pages.
pub(super) struct DirtyPages {
    page_bytes: u64,
    ranges: Mutex<Ranges>,
    /// The OS error of the first failed `msync`; 0 if none has failed.
    failed_errno: AtomicI32,
}

struct Ranges {
    list: Vec<(u64, u64)>,
    merge_at: usize,
}

impl Ranges {
    fn add(&mut self, start: u64, end: u64) {
        match self.list.last_mut() {
            Some(last) if start <= last.1 && end >= last.0 => {
                *last = (last.0.min(start), last.1.max(end));
            }
            _ => self.list.push((start, end)),
        }
        if self.list.len() >= self.merge_at {
            merge(&mut self.list);
            self.merge_at = MERGE_AT.max(2 * self.list.len());
        }
    }
}

impl DirtyPages {
    /// Makes an empty list for a mapping whose pages have `page_bytes` bytes.
    pub(super) fn new(page_bytes: u64) -> Self {
        Self {
            page_bytes,
            ranges: Mutex::new(Ranges { list: Vec::new(), merge_at: MERGE_AT }),
            failed_errno: AtomicI32::new(0),
        }
    }

    /// Notes that `len` bytes at `offset` must be durable at the next fence.
    pub(super) fn record(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let start = offset - offset % self.page_bytes;
        let end = (offset + len).next_multiple_of(self.page_bytes);
        self.ranges.lock().add(start, end);
    }

    /// Makes all recorded ranges durable.
    pub(super) fn sync(&self, mapping: &Mapping) -> Result<(), PmemError> {
        let mut ranges = self.ranges.lock();
        self.check()?;
        merge(&mut ranges.list);
        for &(start, end) in &ranges.list {
            self.sync_range(mapping, start, end)?;
        }
        ranges.list.clear();
        Ok(())
    }

    fn sync_range(&self, mapping: &Mapping, start: u64, end: u64) -> Result<(), PmemError> {
        let at = mapping.at(start).cast();
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        // SAFETY: the recorded ranges are whole pages of the mapping; `msync` changes no memory.
        let synced = unsafe { rustix::mm::msync(at, len, MsyncFlags::SYNC) };
        synced.or_else(|errno| {
            self.failed_errno.store(errno.raw_os_error(), Ordering::Relaxed);
            self.check()
        })
    }

    /// Returns an error ever after the first failure.
    fn check(&self) -> Result<(), PmemError> {
        match self.failed_errno.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(PmemError::WritebackFailed { errno }),
        }
    }
}

/// Sorts the ranges and joins those that touch.
fn merge(ranges: &mut Vec<(u64, u64)>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let touches = next.0 <= kept.1;
        if touches {
            kept.1 = kept.1.max(next.1);
        }
        touches
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(calls: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let dirty = DirtyPages::new(4096);
        for &(offset, len) in calls {
            dirty.record(offset, len);
        }
        let mut ranges = dirty.ranges.lock();
        merge(&mut ranges.list);
        std::mem::take(&mut ranges.list)
    }

    #[test]
    fn ranges_are_whole_pages_and_merged() {
        assert_eq!(recorded(&[(10, 1)]), [(0, 4096)]);
        assert_eq!(recorded(&[(4095, 2)]), [(0, 8192)]);
        assert_eq!(recorded(&[(40960, 4), (0, 4), (4096, 4096)]), [(0, 8192), (40960, 45056)]);
        assert_eq!(recorded(&[(8192, 0)]), []);
    }

    #[test]
    fn many_scattered_ranges_lose_none() {
        let calls: Vec<_> = (0..2000).rev().map(|page| (page * 8192, 1)).collect();
        let expected: Vec<_> = (0..2000).map(|page| (page * 8192, page * 8192 + 4096)).collect();
        assert_eq!(recorded(&calls), expected);
    }

    #[test]
    fn one_failure_is_for_good() {
        let mapping = Mapping::anonymous(1 << 16, 0).unwrap();
        // The kernel refuses ranges that start in the middle of a page.
        let dirty = DirtyPages::new(100);
        dirty.sync(&mapping).unwrap();
        dirty.record(150, 1);
        let failed =
            |result| matches!(result, Err(PmemError::WritebackFailed { errno: libc::EINVAL }));
        assert!(failed(dirty.sync(&mapping)));
        dirty.ranges.lock().list.clear();
        assert!(failed(dirty.sync(&mapping)), "nothing is left to sync, and still");
    }

    #[test]
    fn a_range_is_forgotten_only_when_it_is_down() {
        let mapping = Mapping::anonymous(1 << 16, 0).unwrap();
        let dirty = DirtyPages::new(4096);
        dirty.record(5000, 10);
        assert_eq!(dirty.ranges.lock().list, [(4096, 8192)]);
        dirty.sync(&mapping).unwrap();
        assert_eq!(dirty.ranges.lock().list, []);
    }
}
