//! Gathers data that is scattered in the log into large writes to a file.

use super::extents::{Content, Extent};

/// Bytes of a batch.
pub(super) const BATCH_BYTES: usize = 1 << 20;

/// Bytes for one or more ranges of a file, in order.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    used: usize,
    runs: Vec<Run>,
}

/// Adjacent bytes.
#[derive(Debug, Clone, Copy)]
struct Run {
    offset: u64,
    len: usize,
}

impl Batch {
    /// Returns the adjacent bytes to write, with their offsets in the file.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let mut rest = &self.bytes[..self.used];
        self.runs.iter().map(move |run| {
            let (bytes, behind) = rest.split_at(run.len);
            rest = behind;
            (run.offset, bytes)
        })
    }

    /// Returns whether `bytes` fit an empty batch but not the rest of this one.
    fn parts(&self, bytes: u64) -> bool {
        let left = (BATCH_BYTES - self.used) as u64;
        bytes > left && bytes <= BATCH_BYTES as u64
    }

    /// Returns the number of gathered bytes.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Empties the batch, and keeps its memory.
    fn clear(&mut self) {
        self.used = 0;
        self.runs.clear();
    }

    /// Returns memory for up to `most` bytes at `offset` of the file: none if the batch is full.
    fn space(&mut self, offset: u64, most: u64) -> &mut [u8] {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let len = most.min(BATCH_BYTES - self.used);
        match self.runs.last_mut() {
            Some(run) if run.offset + run.len as u64 == offset => run.len += len,
            _ => self.runs.push(Run { offset, len }),
        }
        let from = self.used;
        self.used += len;
        if self.bytes.len() < self.used {
            self.bytes.resize(self.used, 0);
        }
        &mut self.bytes[from..self.used]
    }
}

/// Reads the data of `extents` from the log with `read`, and passes it to `full` in batches. An
/// extent that fits a batch is never split.
pub(super) fn gather<E>(
    extents: impl Iterator<Item = Extent>,
    read: impl Fn(u64, &mut [u8]) -> Result<(), E>,
    mut full: impl FnMut(&Batch) -> Result<(), E>,
) -> Result<(), E> {
    let mut batch = Batch::default();
    for extent in extents {
        let Content::Log(position) = extent.content else { continue };
        if batch.parts(extent.bytes()) {
            full(&batch)?;
            batch.clear();
        }
        let mut done = 0;
        while done < extent.bytes() {
            let space = batch.space(extent.start + done, extent.bytes() - done);
            read(position.saturating_add(done), space)?;
            done += space.len() as u64;
            if batch.used == BATCH_BYTES {
                full(&batch)?;
                batch.clear();
            }
        }
    }
    if batch.used > 0 { full(&batch) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, bytes: u64, position: u64) -> Extent {
        Extent { start, end: start + bytes, content: Content::Log(position) }
    }

    /// Returns the writes with their offsets, and the number of batches.
    fn gathered(extents: &[Extent]) -> (Vec<(u64, Vec<u8>)>, usize) {
        let (mut written, mut batches) = (Vec::new(), 0);
        let read = |position: u64, buf: &mut [u8]| {
            (position..).zip(buf).for_each(|(at, byte)| *byte = at.to_le_bytes()[0]);
            Ok::<(), ()>(())
        };
        gather(extents.iter().copied(), read, |batch| {
            written.extend(batch.runs().map(|(offset, bytes)| (offset, bytes.to_vec())));
            batches += 1;
            Ok(())
        })
        .unwrap();
        (written, batches)
    }

    #[test]
    fn adjacent_bytes_are_written_at_once_and_others_where_they_belong() {
        let zero = Extent { start: 6, end: 8, content: Content::Zero };
        let extents = [extent(0, 2, 10), extent(2, 2, 30), zero, extent(8, 1, 50)];
        assert_eq!(gathered(&extents), (vec![(0, vec![10, 11, 30, 31]), (8, vec![50])], 1));
        assert_eq!(gathered(&[zero]), (vec![], 0));
    }

    #[test]
    fn what_is_longer_than_a_batch_goes_on_in_the_next() {
        let bytes = BATCH_BYTES as u64;
        let (written, batches) = gathered(&[extent(5, 2 * bytes + 3, 0), extent(0, 1, 9)]);
        let places: Vec<_> = written.iter().map(|(offset, part)| (*offset, part.len())).collect();
        let expected = [(5, BATCH_BYTES), (5 + bytes, BATCH_BYTES), (5 + 2 * bytes, 3), (0, 1)];
        assert_eq!((places, batches), (expected.to_vec(), 3));
        assert_eq!(written[1].1[..3], [0, 1, 2]);
    }

    #[test]
    fn what_fits_into_a_batch_is_not_parted() {
        let bytes = BATCH_BYTES as u64;
        let (written, batches) = gathered(&[extent(0, 10, 0), extent(10, bytes, 64)]);
        let places: Vec<_> = written.iter().map(|(offset, part)| (*offset, part.len())).collect();
        assert_eq!((places, batches), (vec![(0, 10), (10, BATCH_BYTES)], 2));
    }

    #[test]
    fn nothing_is_handed_on_after_a_failure() {
        let fails = |_, _: &mut [u8]| Err("read");
        let outcome = gather([extent(0, 1, 1)].into_iter(), fails, |_| Err("written"));
        assert_eq!(outcome, Err("read"));
    }
}
