//! The profile of a trace, independent of any scheme: its footprint, the share of written bytes
//! that is synced, and the dirty part of each synced page (AFCM, figures 1 and 2).

use std::ops::Range;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::scheme::page::{LINE_BYTES, PAGE_BYTES, bits, lines_of, pages_of, part_of};
use crate::trace::{Event, FileId, Op};

/// The dirty part of a page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    lines: u64,
    /// Bytes written, including overwritten ones.
    bytes: u64,
}

/// Pages of a chunk: one for each bit of a mask.
const CHUNK_PAGES: u64 = u16::BITS as u64;
/// Pages of a group.
const GROUP_PAGES: usize = 4;
/// An index that stands for no group.
const NONE: u32 = u32::MAX;

/// Neighbouring pages, which one look-up finds.
#[derive(Debug, Clone)]
struct Chunk {
    /// Mask of the pages that were touched.
    touched: u16,
    /// Mask of the dirty pages.
    dirty: u16,
    /// Indices of groups of written pages, by page in the chunk divided by [`GROUP_PAGES`].
    groups: [u32; 4],
}

#[derive(Debug, Default)]
struct File {
    /// Indices of chunks, by page number divided by [`CHUNK_PAGES`].
    map: FxHashMap<u64, usize>,
    chunks: Vec<Chunk>,
    groups: Vec<[Page; GROUP_PAGES]>,
    /// The chunk that was looked up last.
    last: Option<(u64, usize)>,
    /// Keys and indices of the chunks with dirty pages.
    dirty: Vec<(u64, usize)>,
    end: u64,
}

impl File {
    /// Returns the index of chunk `key`, which is created if missing.
    fn chunk(&mut self, key: u64) -> usize {
        if let Some((last, at)) = self.last
            && last == key
        {
            return at;
        }
        let next = self.chunks.len();
        let at = *self.map.entry(key).or_insert(next);
        if at == next {
            self.chunks.push(Chunk { touched: 0, dirty: 0, groups: [NONE; 4] });
        }
        self.last = Some((key, at));
        at
    }

    /// Returns page `number` of the chunk at index `at`.
    fn page(&mut self, at: usize, number: usize) -> &mut Page {
        let group = &mut self.chunks[at].groups[number / GROUP_PAGES];
        if *group == NONE {
            *group = u32::try_from(self.groups.len()).unwrap_or(NONE);
            self.groups.push(<[Page; GROUP_PAGES]>::default());
        }
        &mut self.groups[*group as usize][number % GROUP_PAGES]
    }

    /// Writes to the pages `mask` of chunk `key` at index `at`; `part` returns a page's bytes.
    fn write(&mut self, (key, at): (u64, usize), mask: u16, part: impl Fn(u64) -> Range<u64>) {
        let dirty = &mut self.chunks[at].dirty;
        if *dirty == 0 {
            self.dirty.push((key, at));
        }
        *dirty |= mask;
        for number in bits(mask.into()) {
            let bytes = part(key * CHUNK_PAGES + u64::from(number));
            let page = self.page(at, number as usize);
            page.lines |= lines_of(&bytes);
            page.bytes += bytes.end - bytes.start;
        }
    }

    /// Cleans the pages `mask` of the chunk at index `at`, and passes each dirty page to `see`.
    fn clean(&mut self, at: usize, mask: u16, mut see: impl FnMut(Page)) {
        let cleaned = self.chunks[at].dirty & mask;
        self.chunks[at].dirty &= !mask;
        bits(cleaned.into()).for_each(|number| see(std::mem::take(self.page(at, number as usize))));
    }
}

/// Returns the chunks with `pages`: each chunk's key, and a mask of the pages in it.
fn chunks_of(pages: Range<u64>) -> impl Iterator<Item = (u64, u16)> {
    let keys = pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES);
    keys.map(move |key| (key, mask_from(key, pages.start) & !mask_from(key, pages.end)))
}

/// Returns a mask of the pages of chunk `key` from `page` on.
fn mask_from(key: u64, page: u64) -> u16 {
    match page.saturating_sub(key * CHUNK_PAGES) {
        before if before < CHUNK_PAGES => u16::MAX << before,
        _ => 0,
    }
}

/// The profile of a trace. Memory use grows with the number of touched pages.
#[derive(Debug)]
pub struct Profile {
    files: Vec<File>,
    /// Number of distinct touched pages.
    pub footprint_pages: u64,
    /// Pages of the footprint that a read touched first: storage had them before the trace.
    pub first_read_pages: u64,
    /// Number of operations.
    pub operations: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes written that a sync covered.
    pub synced_bytes: u64,
    /// Pages that syncs covered, by number of dirty lines.
    pub synced_pages: [u64; 65],
    /// Time of the last operation, in microseconds since the first.
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
                self.touch(file, pages_of(offset_bytes, len_bytes), |_, _, _| {});
                self.first_read_pages += self.footprint_pages - before_pages;
            }
            Op::Write { file, offset_bytes, len_bytes } => {
                self.written_bytes += len_bytes;
                let part = |page| part_of(page, offset_bytes, len_bytes);
                self.touch(file, pages_of(offset_bytes, len_bytes), |file, chunk, mask| {
                    file.write(chunk, mask, part);
                });
            }
            Op::Sync { file } => self.sync(file.0 as usize),
            Op::SyncAll => (0..self.files.len()).for_each(|file| self.sync(file)),
            Op::Resize { file, len_bytes } => self.cut(file, len_bytes.div_ceil(PAGE_BYTES)),
            Op::Remove { file } => self.cut(file, 0),
        }
    }

    /// Adds an operation with its time.
    pub fn add_event(&mut self, event: &Event) {
        self.last_us = self.last_us.max(event.time_us);
        self.add(&event.op);
    }

    /// Returns the seconds from the first operation to the last; 0 if the trace has no times.
    pub fn seconds(&self) -> f64 {
        Duration::from_micros(self.last_us).as_secs_f64()
    }

    /// Returns the share of the written bytes that a sync covered; `None` if nothing was written.
    pub fn synced_share(&self) -> Option<f64> {
        share(self.synced_bytes, self.written_bytes)
    }

    /// Returns the share of synced pages that were dirty as a whole.
    pub fn whole_share(&self) -> Option<f64> {
        share(self.synced_pages[64], self.synced_pages.iter().sum())
    }

    /// Returns the mean of the dirty bytes of a synced page.
    pub fn mean_dirty_bytes(&self) -> Option<f64> {
        let lines =
            (0_u64..).zip(&self.synced_pages).map(|(lines, pages)| lines * pages).sum::<u64>();
        share(lines * LINE_BYTES, self.synced_pages.iter().sum())
    }

    /// Marks `pages` as touched. Passes each chunk to `see`: the file, the chunk's key and index,
    /// and a mask of the pages in it.
    fn touch(
        &mut self,
        file: FileId,
        pages: Range<u64>,
        mut see: impl FnMut(&mut File, (u64, usize), u16),
    ) {
        if pages.is_empty() {
            return;
        }
        let at = file.0 as usize;
        if self.files.len() <= at {
            self.files.resize_with(at + 1, File::default);
        }
        let file = &mut self.files[at];
        file.end = file.end.max(pages.end);
        for (key, mask) in chunks_of(pages) {
            let at = file.chunk(key);
            let touched = &mut file.chunks[at].touched;
            self.footprint_pages += u64::from((mask & !*touched).count_ones());
            *touched |= mask;
            see(file, (key, at), mask);
        }
    }

    fn sync(&mut self, file: usize) {
        let Some(file) = self.files.get_mut(file) else { return };
        let mut dirty = std::mem::take(&mut file.dirty);
        for (_, at) in dirty.drain(..) {
            file.clean(at, u16::MAX, |Page { lines, bytes }| {
                self.synced_pages[lines.count_ones() as usize] += 1;
                self.synced_bytes += bytes;
            });
        }
        file.dirty = dirty;
    }

    /// Removes the pages from `end` on.
    fn cut(&mut self, file: FileId, end: u64) {
        let Some(file) = self.files.get_mut(file.0 as usize) else { return };
        if end < file.end {
            let mut dirty = std::mem::take(&mut file.dirty);
            dirty.retain(|(key, at)| {
                file.clean(*at, mask_from(*key, end), |_| {});
                file.chunks[*at].dirty != 0
            });
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
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    const FILE: FileId = FileId(1);

    proptest! {
        /// Chunks and groups of pages give the same counts as single pages.
        #[test]
        fn pages_are_counted_one_by_one(
            ops in prop::collection::vec((0..9_u8, 0..2_u32, 0..400_000_u64, 0..90_000_u64), 0..60)
        ) {
            let (mut profile, mut model) = (Profile::default(), Model::default());
            for (kind, file, offset_bytes, len_bytes) in ops {
                let file = FileId(file);
                let op = match kind {
                    0..=1 => Op::Read { file, offset_bytes, len_bytes },
                    2..=5 => Op::Write { file, offset_bytes, len_bytes },
                    6 => Op::Sync { file },
                    7 => Op::SyncAll,
                    _ => Op::Resize { file, len_bytes: offset_bytes },
                };
                profile.add(&op);
                model.add(&op);
            }
            prop_assert_eq!(profile.footprint_pages, model.touched.len() as u64);
            prop_assert_eq!(profile.first_read_pages, model.first_read_pages);
            prop_assert_eq!(profile.synced_bytes, model.synced_bytes);
            prop_assert_eq!(profile.synced_pages.to_vec(), model.synced_pages);
        }
    }

    /// The counts of a profile, computed page by page.
    struct Model {
        touched: HashSet<(FileId, u64)>,
        dirty: HashMap<(FileId, u64), Page>,
        first_read_pages: u64,
        synced_bytes: u64,
        synced_pages: Vec<u64>,
    }

    impl Default for Model {
        fn default() -> Self {
            Self {
                touched: HashSet::new(),
                dirty: HashMap::new(),
                first_read_pages: 0,
                synced_bytes: 0,
                synced_pages: vec![0; 65],
            }
        }
    }

    impl Model {
        fn add(&mut self, op: &Op) {
            match *op {
                Op::Read { file, offset_bytes, len_bytes } => {
                    for page in pages_of(offset_bytes, len_bytes) {
                        self.first_read_pages += u64::from(self.touched.insert((file, page)));
                    }
                }
                Op::Write { file, offset_bytes, len_bytes } => {
                    for page in pages_of(offset_bytes, len_bytes) {
                        self.touched.insert((file, page));
                        let bytes = part_of(page, offset_bytes, len_bytes);
                        let dirty = self.dirty.entry((file, page)).or_default();
                        dirty.lines |= lines_of(&bytes);
                        dirty.bytes += bytes.end - bytes.start;
                    }
                }
                Op::Sync { file } => self.sync(|of| of == file),
                Op::SyncAll => self.sync(|_| true),
                Op::Resize { file, len_bytes } => {
                    let end = len_bytes.div_ceil(PAGE_BYTES);
                    self.dirty.retain(|(of, page), _| *of != file || *page < end);
                }
                Op::Remove { file } => self.dirty.retain(|(of, _), _| *of != file),
            }
        }

        fn sync(&mut self, is_synced: impl Fn(FileId) -> bool) {
            for (_, Page { lines, bytes }) in self.dirty.extract_if(|(of, _), _| is_synced(*of)) {
                self.synced_pages[lines.count_ones() as usize] += 1;
                self.synced_bytes += bytes;
            }
        }
    }

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
