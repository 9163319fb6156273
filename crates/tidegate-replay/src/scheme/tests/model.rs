//! Devices that track their content: every written line has a version, and no sync may be lost.

use std::collections::HashMap;

use crate::scheme::devices::{Devices, Source};
use crate::scheme::page::{ALL_LINES, LINE_BYTES, PageId, lines_of, pages_of, part_of};
use crate::trace::{FileId, Op};

type Versions = HashMap<PageId, [u32; 64]>;

/// A mistake that the model must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planted {
    /// Writes to flash do not arrive.
    SsdWriteLost,
    /// Persistent memory stores only the first line of several.
    LinesLost,
    /// No store is fenced.
    NoFence,
}

/// The devices, and the content that programs expect.
#[derive(Default)]
pub(super) struct Model {
    /// Last version that programs wrote, by line.
    written: Versions,
    /// Version that the last sync of a line covered.
    synced: Versions,
    dram: Versions,
    pmem: Versions,
    /// Lines in persistent memory, for the pages that it has.
    pmem_lines: HashMap<PageId, u64>,
    ssd: Versions,
    next: u32,
    pub(super) ssd_reads: u64,
    pub(super) ssd_writes: u64,
    pub(super) ssd_flushes: u64,
    pub(super) data_bytes: u64,
    pub(super) metadata_bytes: u64,
    pub(super) fences: u64,
    /// Whether a store to persistent memory is not fenced yet.
    unfenced: bool,
    /// Whether the operation is a write.
    is_write: bool,
    planted: Option<Planted>,
}

fn put(versions: &mut Versions, page: PageId, lines: u64, from: [u32; 64]) {
    let to = versions.entry(page).or_insert([0; 64]);
    for line in (0..64).filter(|line| lines >> line & 1 != 0) {
        to[line] = from[line];
    }
}

impl Model {
    /// Returns devices with a mistake.
    pub(super) fn with(planted: Planted) -> Self {
        Self { planted: Some(planted), ..Self::default() }
    }

    /// Begins `op`.
    pub(super) fn begin(&mut self, op: &Op) {
        self.is_write = matches!(op, Op::Write { .. });
        match *op {
            Op::Write { file, offset_bytes, len_bytes } => {
                self.next += 1;
                for page in pages_of(offset_bytes, len_bytes) {
                    let lines = lines_of(&part_of(page, offset_bytes, len_bytes));
                    put(&mut self.written, PageId { file, page }, lines, [self.next; 64]);
                }
            }
            Op::Resize { file, len_bytes } => self.cut(file, len_bytes),
            Op::Remove { file } => self.cut(file, 0),
            Op::Read { .. } | Op::Sync { .. } | Op::SyncAll => {}
        }
    }

    /// Zeroes the lines behind the end of a file in all versions.
    fn cut(&mut self, file: FileId, len_bytes: u64) {
        let Self { written, synced, dram, pmem, ssd, .. } = self;
        for versions in [written, synced, dram, pmem, ssd] {
            for (id, lines) in versions.iter_mut().filter(|(id, _)| id.file == file) {
                let first = len_bytes.saturating_sub(id.page * 4096).div_ceil(LINE_BYTES);
                for line in lines.iter_mut().skip(usize::try_from(first).unwrap()) {
                    *line = 0;
                }
            }
        }
    }

    /// Ends `op`: checks that no synced line is lost, and that reads return written versions.
    pub(super) fn end(&mut self, op: &Op) {
        let is_synced = |id: &PageId| match *op {
            Op::Sync { file } => id.file == file,
            Op::SyncAll => true,
            _ => false,
        };
        let synced: Vec<_> = self
            .written
            .iter()
            .filter(|(id, _)| is_synced(id))
            .map(|(id, it)| (*id, *it))
            .collect();
        self.synced.extend(synced);
        assert!(!self.unfenced || !matches!(op, Op::Sync { .. } | Op::SyncAll), "no fence");
        for (id, synced) in &self.synced {
            let durable = self.durable(*id);
            for line in 0..64 {
                assert!(durable[line] >= synced[line], "{id:?} line {line} is lost after {op:?}");
            }
        }
        if let Op::Read { file, offset_bytes, len_bytes } = *op {
            for page in pages_of(offset_bytes, len_bytes) {
                let id = PageId { file, page };
                let (written, dram) = (self.written.get(&id), self.dram.get(&id));
                let written = written.copied().unwrap_or([0; 64]);
                let lines = lines_of(&part_of(page, offset_bytes, len_bytes));
                for line in (0..64).filter(|line| lines >> line & 1 != 0) {
                    // A small DRAM may have evicted the page for another page of the same read.
                    assert!(dram.is_none_or(|it| it[line] == written[line]), "{id:?} {line}");
                }
            }
        }
    }

    /// Returns the versions that are found after a crash.
    fn durable(&self, page: PageId) -> [u32; 64] {
        let mut found = self.ssd.get(&page).copied().unwrap_or([0; 64]);
        if let (Some(lines), Some(from)) = (self.pmem_lines.get(&page), self.pmem.get(&page)) {
            (0..64).filter(|line| lines >> line & 1 != 0).for_each(|line| found[line] = from[line]);
        }
        found
    }

    /// Returns the bytes of data and metadata that were stored in persistent memory.
    pub(super) fn traffic(&self) -> (u64, u64) {
        (self.data_bytes, self.metadata_bytes)
    }
}

impl Devices for Model {
    fn dram_copy(&mut self, page: PageId, lines: u64) {
        if self.is_write {
            let versions = self.written.get(&page).copied().unwrap_or([0; 64]);
            put(&mut self.dram, page, lines, versions);
        }
    }

    fn dram_forget(&mut self, page: PageId) {
        self.dram.remove(&page);
    }

    fn ssd_read(&mut self, page: PageId) {
        self.ssd_reads += 1;
        let found = self.ssd.get(&page).copied().unwrap_or([0; 64]);
        put(&mut self.dram, page, ALL_LINES, found);
    }

    fn ssd_write(&mut self, page: PageId, source: Source) {
        self.ssd_writes += 1;
        if self.planted == Some(Planted::SsdWriteLost) {
            return;
        }
        let from = match source {
            Source::Dram => *self.dram.get(&page).expect("DRAM does not have the page"),
            Source::Pmem => self.durable(page),
        };
        put(&mut self.ssd, page, ALL_LINES, from);
    }

    fn ssd_flush(&mut self) {
        self.ssd_flushes += 1;
    }

    fn pmem_read(&mut self, page: PageId, lines: u64) {
        // If all data is on persistent memory, unwritten lines existed before the trace.
        let from = self.pmem.get(&page).copied().unwrap_or([0; 64]);
        put(&mut self.dram, page, lines, from);
    }

    fn pmem_store(&mut self, page: PageId, lines: u64) {
        self.unfenced = true;
        self.data_bytes += u64::from(lines.count_ones()) * LINE_BYTES;
        let from = *self.dram.get(&page).expect("DRAM does not have the page");
        let lost = self.planted == Some(Planted::LinesLost);
        let lines = if lost { lines & lines.wrapping_neg() } else { lines };
        put(&mut self.pmem, page, lines, from);
        *self.pmem_lines.entry(page).or_default() |= lines;
    }

    fn pmem_metadata(&mut self, bytes: u64) {
        self.unfenced = true;
        self.metadata_bytes += bytes;
    }

    fn pmem_fence(&mut self) {
        self.unfenced = self.planted == Some(Planted::NoFence);
        self.fences += 1;
    }

    fn pmem_forget(&mut self, page: PageId) {
        self.pmem.remove(&page);
        self.pmem_lines.remove(&page);
    }

    fn index_steps(&mut self, _steps: u32) {}

    fn now_ns(&self) -> f64 {
        0.0
    }

    fn set_now_ns(&mut self, _now_ns: f64) {}
}
