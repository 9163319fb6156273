//! What a trace asks for, whatever answers it: its footprint, how much of what it writes is
//! synced, and how much of each synced page is dirty (AFCM, figures 1 and 2).

use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::scheme::page::{LINE_BYTES, PAGE_BYTES, lines_of, pages_of, part_of};
use crate::trace::{Event, FileId, Op};

/// What is dirty of a page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    lines: u64,
    /// What was written, also what was written again.
    bytes: u64,
}

/// Pages of a chunk.
const CHUNK_PAGES: usize = 16;

/// Neighbouring pages, which one look-up finds.
#[derive(Debug, Clone, Default)]
struct Chunk {
    pages: [Page; CHUNK_PAGES],
    /// By page: it was touched.
    touched: u16,
}

#[derive(Debug, Default)]
struct File {
    /// By number of a page divided by [`CHUNK_PAGES`]: where its chunk is.
    map: FxHashMap<u64, usize>,
    chunks: Vec<Chunk>,
    /// The chunk that was looked up last.
    last: Option<(u64, usize)>,
    /// Dirty pages, and where their chunks are.
    dirty: Vec<(u64, usize)>,
    end: u64,
}

impl File {
    /// Where the chunk of `page` is; a new one if there is none.
    fn chunk(&mut self, page: u64) -> usize {
        let key = page / CHUNK_PAGES as u64;
        if let Some((last, at)) = self.last
            && last == key
        {
            return at;
        }
        let next = self.chunks.len();
        let at = *self.map.entry(key).or_insert(next);
        if at == next {
            self.chunks.push(Chunk::default());
        }
        self.last = Some((key, at));
        at
    }

    /// The page in the chunk at `at`.
    fn page(&mut self, page: u64, at: usize) -> &mut Page {
        &mut self.chunks[at].pages[in_chunk(page)]
    }
}

/// Which page of its chunk `page` is.
fn in_chunk(page: u64) -> usize {
    usize::try_from(page).unwrap_or(usize::MAX) % CHUNK_PAGES
}

/// What a trace asks for. Memory grows with the pages that it touches.
#[derive(Debug)]
pub struct Profile {
    files: Vec<File>,
    /// Different pages that were touched.
    pub footprint_pages: u64,
    /// Those of them that a read touched first: storage had them before the trace.
    pub first_read_pages: u64,
    /// Operations.
    pub operations: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Those of them that a sync covered.
    pub synced_bytes: u64,
    /// By number of dirty lines: pages that syncs covered.
    pub synced_pages: [u64; 65],
    /// When the last operation was asked for, in microseconds since the first one.
    pub last_us: u64,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            footprint_pages: 0,
            first_read_pages: 0,
            operations: 0,
            written_bytes: 0,
            synced_bytes: 0,
            synced_pages: [0; 65],
            last_us: 0,
        }
    }
}

impl Profile {
    /// Adds an operation.
    pub fn add(&mut self, op: &Op) {
        self.operations += 1;
        match *op {
            Op::Read { file, offset_bytes, len_bytes } => {
                let before_pages = self.footprint_pages;
                for page in pages_of(offset_bytes, len_bytes) {
                    self.page(file, page);
                }
                self.first_read_pages += self.footprint_pages - before_pages;
            }
            Op::Write { file, offset_bytes, len_bytes } => {
                self.written_bytes += len_bytes;
                for page in pages_of(offset_bytes, len_bytes) {
                    self.write(file, page, part_of(page, offset_bytes, len_bytes));
                }
            }
            Op::Sync { file } => self.sync(file.0 as usize),
            Op::SyncAll => (0..self.files.len()).for_each(|file| self.sync(file)),
            Op::Resize { file, len_bytes } => self.cut(file, len_bytes.div_ceil(PAGE_BYTES)),
            Op::Remove { file } => self.cut(file, 0),
        }
    }

    /// Adds an operation, and when it was asked for.
    pub fn add_event(&mut self, event: &Event) {
        self.last_us = self.last_us.max(event.time_us);
        self.add(&event.op);
    }

    /// From the first operation to the last one; 0 where the trace has no times.
    pub fn seconds(&self) -> f64 {
        Duration::from_micros(self.last_us).as_secs_f64()
    }

    /// Share of the written bytes that a sync covered; none where nothing was written.
    pub fn synced_share(&self) -> Option<f64> {
        share(self.synced_bytes, self.written_bytes)
    }

    /// Share of synced pages all of which was dirty.
    pub fn whole_share(&self) -> Option<f64> {
        share(self.synced_pages[64], self.synced_pages.iter().sum())
    }

    /// Mean of the dirty bytes of a synced page.
    pub fn mean_dirty_bytes(&self) -> Option<f64> {
        let lines =
            (0_u64..).zip(&self.synced_pages).map(|(lines, pages)| lines * pages).sum::<u64>();
        share(lines * LINE_BYTES, self.synced_pages.iter().sum())
    }

    /// Notes that `page` was touched: its file, and where its chunk is there.
    fn page(&mut self, file: FileId, page: u64) -> (&mut File, usize) {
        let at = file.0 as usize;
        if self.files.len() <= at {
            self.files.resize_with(at + 1, File::default);
        }
        let file = &mut self.files[at];
        file.end = file.end.max(page.saturating_add(1));
        let chunk = file.chunk(page);
        let bit = 1 << in_chunk(page);
        let touched = &mut file.chunks[chunk].touched;
        self.footprint_pages += u64::from(*touched & bit == 0);
        *touched |= bit;
        (file, chunk)
    }

    fn write(&mut self, file: FileId, page: u64, bytes: std::ops::Range<u64>) {
        let (file, chunk) = self.page(file, page);
        let Page { lines, bytes: written } = file.page(page, chunk);
        let was_clean = *lines == 0;
        *lines |= lines_of(&bytes);
        *written += bytes.end - bytes.start;
        if was_clean {
            file.dirty.push((page, chunk));
        }
    }

    fn sync(&mut self, file: usize) {
        let Some(file) = self.files.get_mut(file) else { return };
        let mut dirty = std::mem::take(&mut file.dirty);
        for (page, chunk) in dirty.drain(..) {
            let Page { lines, bytes } = std::mem::take(file.page(page, chunk));
            if lines != 0 {
                self.synced_pages[lines.count_ones() as usize] += 1;
                self.synced_bytes += bytes;
            }
        }
        file.dirty = dirty;
    }

    /// Cuts the pages from `end` on off.
    fn cut(&mut self, file: FileId, end: u64) {
        let Some(file) = self.files.get_mut(file.0 as usize) else { return };
        if end < file.end {
            let mut dirty = std::mem::take(&mut file.dirty);
            for (page, chunk) in dirty.extract_if(.., |(page, _)| *page >= end) {
                *file.page(page, chunk) = Page::default();
            }
            file.dirty = dirty;
            file.end = end;
        }
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId(1);

    #[test]
    fn synced_bytes_and_dirty_lines_are_counted_by_hand() {
        let mut profile = Profile::default();
        let ops = [
            Op::Write { file: FILE, offset_bytes: 0, len_bytes: 100 },
            Op::Write { file: FILE, offset_bytes: 0, len_bytes: 100 },
            Op::Write { file: FILE, offset_bytes: 4096, len_bytes: 4096 },
            Op::Sync { file: FILE },
            Op::Write { file: FILE, offset_bytes: 8192, len_bytes: 4096 },
            Op::Resize { file: FILE, len_bytes: 8192 },
            Op::SyncAll,
            Op::Read { file: FileId(0), offset_bytes: 0, len_bytes: 1 },
            Op::Write { file: FILE, offset_bytes: 8192, len_bytes: 64 },
        ];
        for op in &ops {
            profile.add(op);
        }
        assert_eq!((profile.footprint_pages, profile.operations), (4, 9));
        assert_eq!(profile.first_read_pages, 1);
        assert_eq!((profile.written_bytes, profile.synced_bytes), (8456, 4296));
        assert_eq!((profile.synced_pages[2], profile.synced_pages[64]), (1, 1));
        assert_eq!(profile.synced_pages.iter().sum::<u64>(), 2);
        assert_eq!(profile.whole_share(), Some(0.5));
        assert_eq!(profile.mean_dirty_bytes(), Some(66.0 * 64.0 / 2.0));
        assert_eq!(Profile::default().synced_share(), None);
    }
}
