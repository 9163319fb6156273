//! The metadata of a BTT 1.1 of one arena, as plain bytes: written from the format's description,
//! not with the code under test.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the arena starts in the pool.
const ARENA: usize = 4096;
/// Both flag bits: the entry names the block that was written.
const NORMAL: u32 = 3 << 30;
/// The block's content is lost.
const ERROR: u32 = 1 << 30;
const FLOG_GROUP_BYTES: usize = 64;
const FLOG_SLOT_BYTES: usize = 16;

/// All bytes of a pool.
pub(crate) struct Image {
    bytes: Vec<u8>,
}

/// A slot of the flog.
#[derive(Debug, Clone, Copy)]
struct Entry {
    lba: u32,
    old_map: u32,
    new_map: u32,
    seq: u32,
}

impl Image {
    /// Reads a pool's file.
    pub(crate) fn read(path: &Path) -> Self {
        Self { bytes: fs::read(path).unwrap_or_else(|err| panic!("{}: {err}", path.display())) }
    }

    /// The bytes of a pool that are in memory.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec() }
    }

    /// Replaces the content of a pool's file. In place: QEMU may have it mapped.
    pub(crate) fn write(&self, path: &Path) {
        let file = fs::File::options().write(true).open(path);
        let written = file.and_then(|file| file.write_all_at(&self.bytes, 0));
        written.unwrap_or_else(|err| panic!("{}: {err}", path.display()));
    }

    /// The map.
    pub(crate) fn map(&self) -> &[u8] {
        &self.bytes[self.offset(96)..self.offset(104)]
    }

    /// Where the flog is in the pool, in bytes.
    pub(crate) fn flog_range(&self) -> Range<usize> {
        let start = self.offset(104);
        start..start + self.lanes() * FLOG_GROUP_BYTES
    }

    /// Takes back the map entry of each lane's newest write where nothing followed it, on a disk
    /// all of whose blocks had been written before; returns how many.
    pub(crate) fn rewind_maps(&mut self) -> usize {
        // All of them before any is taken back: two lanes' entries may form a chain on one lba, of
        // which only the last can be unfinished.
        let last: Vec<(usize, Entry)> = (0..self.lanes())
            .map(|lane| self.newest(lane))
            .map(|entry| (self.offset(96) + 4 * entry.lba as usize, entry))
            .filter(|(at, entry)| self.u32(*at) == entry.new_map | NORMAL)
            .filter(|(_, entry)| entry.old_map != entry.new_map)
            .collect();
        for (at, entry) in &last {
            // The kernel's flog has no flag bits; the lba had been written before, so its map entry
            // had both.
            self.bytes[*at..at + 4].copy_from_slice(&(entry.old_map | NORMAL).to_le_bytes());
        }
        last.len()
    }

    /// Marks the content of a written block as lost to a media error.
    pub(crate) fn lose(&mut self, lba: u32) {
        let at = self.offset(96) + 4 * lba as usize;
        let entry = self.u32(at) & !NORMAL | ERROR;
        self.bytes[at..at + 4].copy_from_slice(&entry.to_le_bytes());
    }

    fn newest(&self, lane: usize) -> Entry {
        let group = self.offset(104) + lane * FLOG_GROUP_BYTES;
        let [first, second] = [0, 1].map(|slot| self.entry(group + slot * FLOG_SLOT_BYTES));
        match (first.seq, second.seq) {
            (_, 0) | (2, 1) | (3, 2) | (1, 3) => first,
            _ => second,
        }
    }

    fn entry(&self, at: usize) -> Entry {
        let word = |index: usize| self.u32(at + 4 * index);
        Entry { lba: word(0), old_map: word(1), new_map: word(2), seq: word(3) }
    }

    fn lanes(&self) -> usize {
        self.u32(ARENA + 72) as usize
    }

    /// An offset that the info block names at `field`, as one in the pool.
    fn offset(&self, field: usize) -> usize {
        ARENA + self.u32(ARENA + field) as usize
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }
}
