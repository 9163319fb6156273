//! What a process has written to a file that the kernel does not have yet, by page.
//!
//! While a file is *absorbed*, its writes end in the log and the kernel learns of them later, from the supervisor. A read then
//! takes each page from where its newest bytes are: the log, a copy in memory, or the kernel.
//!
//! Invariants, for calls under the file's lock:
//! 1. A page that was written whole is known by the position of its bytes in the log. Once the tail has passed that position, the
//!    kernel has the bytes, and the page is as if it were not in the table.
//! 2. A page that was written in part has a copy in memory, which is whole and newest. It may be forgotten when the tail
//!    has passed its last write.
//! 3. Bytes copied out of the log count only if the tail has not passed them after the copy.
//! 4. After [`Overlay::new`] nothing allocates memory from the process's heap: a signal handler may have interrupted that.
//!
//! The `NVCache` paper's read cache, but for pages written whole, which need no copy.

use std::io::IoSlice;

use super::Log;
use crate::pmem::{PmemError, Region, RegionOptions, SharedMemory};
use crate::sync::Ordering;

const PAGE_BYTES: u64 = PAGE_LEN as u64;
const PAGE_LEN: usize = 4096;

/// Pages that a table finds room for, and a second table for when the first is swept. A prime number: steps of any length lead to
/// every slot.
const SLOTS: u64 = (1 << 19) - 1;
/// Neighbours in the file that are neighbours in the table, so that they share cache lines and page faults.
const GROUP: u64 = 64;
const GROUPS: u64 = SLOTS.next_power_of_two() / GROUP;
const SLOTS_USED_MAX: u64 = SLOTS / 10 * 7;
const SLOT_BYTES: u64 = 16;
const TABLE_BYTES: u64 = (SLOTS + 1) * SLOT_BYTES;
/// Pages that have a copy, at most.
const COPIES: u64 = 16 << 10;
/// Two words a copy: the page that it is of, plus 1, and the position of its last write.
const COPIES_AT: u64 = 2 * TABLE_BYTES;
/// Number of the table in use, slots used in it, where the search for a copy to reuse goes on.
const ACTIVE_AT: u64 = COPIES_AT + COPIES * 16;
const USED_AT: u64 = ACTIVE_AT + 8;
const HAND_AT: u64 = ACTIVE_AT + 16;
const WORDS_BYTES: u64 = ACTIVE_AT + 4096;

/// Set where a page's place is the number of a copy; else it is a position of the log.
const COPY: u64 = 1 << 63;

/// Where the kernel's bytes of a file come from.
pub trait Base {
    /// Fills `buf` from byte `offset` on; zeroes from the end of the file on.
    ///
    /// # Errors
    /// The kernel's error number.
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), i32>;
}

/// Of a file whose bytes nobody has to read.
struct Unreadable;

impl Base for Unreadable {
    fn read(&mut self, _: u64, _: &mut [u8]) -> Result<(), i32> {
        Err(libc::EBADF)
    }
}

/// Why a page could not be noted or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverlayError {
    /// There is no room in the table or for a copy: the file has to be settled.
    #[error("no room for more pages")]
    Full,
    /// The kernel's bytes could not be read.
    #[error("reading failed with OS error {0}")]
    Base(i32),
    /// The log's memory failed.
    #[error("the log's memory failed")]
    Memory,
}

impl From<PmemError> for OverlayError {
    fn from(_: PmemError) -> Self {
        Self::Memory
    }
}

/// Where a page's newest bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Kernel,
    Log(u64),
    Copy(u64),
}

/// The pages of one absorbed file.
pub struct Overlay {
    words: SharedMemory,
    copies: Region,
}

/// A part of a page that was written: where it begins in the page, and where in the record's payload.
#[derive(Clone, Copy)]
struct Piece {
    page: u64,
    start: u64,
    len: u64,
    at: u64,
}

impl Overlay {
    /// Bytes of a page.
    pub const PAGE_BYTES: u64 = PAGE_BYTES;

    /// An overlay of no pages. Takes address space; memory only for what is used.
    ///
    /// # Errors
    /// [`PmemError`]: there is no address space.
    pub fn new() -> Result<Self, PmemError> {
        let options = RegionOptions { guest: true, ..RegionOptions::default() };
        Ok(Self {
            words: SharedMemory::anonymous(WORDS_BYTES)?,
            copies: Region::anonymous_with(COPIES * PAGE_BYTES, &options)?,
        })
    }

    /// Makes sure that the next [`wrote`](Self::wrote) of these bytes finds room, with the copies that it needs made. `size` is
    /// the file's size before the write.
    ///
    /// # Errors
    /// [`OverlayError`]; nothing has changed that a reader could see.
    pub fn prepare(
        &self,
        log: &Log,
        offset: u64,
        len: u64,
        size: u64,
        base: &mut dyn Base,
    ) -> Result<(), OverlayError> {
        let pages = len / PAGE_BYTES + 2;
        if self.words.word(USED_AT).load(Ordering::Relaxed) + pages > SLOTS_USED_MAX {
            self.sweep(log.tail());
            if self.words.word(USED_AT).load(Ordering::Relaxed) + pages > SLOTS_USED_MAX {
                return Err(OverlayError::Full);
            }
        }
        for piece in pieces(offset, len) {
            if piece.len == PAGE_BYTES {
                continue;
            }
            match self.place(log.tail(), piece.page) {
                Place::Copy(copy) => self.pin(copy),
                Place::Kernel | Place::Log(_) => self.load(log, piece.page, size, base)?,
            }
        }
        Ok(())
    }

    /// Notes that `parts` were written at `offset`, by the record at `position` whose payload they are.
    ///
    /// # Errors
    /// [`OverlayError::Memory`]; [`OverlayError::Full`] where [`prepare`](Self::prepare) was not asked.
    pub fn wrote(
        &self,
        log: &Log,
        offset: u64,
        parts: &[IoSlice<'_>],
        position: u64,
    ) -> Result<(), OverlayError> {
        let payload_at = position + super::layout::RECORD_ALIGN_BYTES;
        let len = parts.iter().map(|part| part.len() as u64).sum();
        for piece in pieces(offset, len) {
            match self.place(log.tail(), piece.page) {
                Place::Copy(copy) if piece.len < PAGE_BYTES => {
                    self.patch(copy, piece, parts)?;
                    self.words.word(COPIES_AT + copy * 16 + 8).store(position, Ordering::Relaxed);
                }
                Place::Copy(copy) => {
                    self.free(copy);
                    self.set(piece.page, payload_at + piece.at);
                }
                Place::Kernel | Place::Log(_) if piece.len == PAGE_BYTES => {
                    self.set(piece.page, payload_at + piece.at);
                }
                Place::Kernel | Place::Log(_) => return Err(OverlayError::Full),
            }
        }
        Ok(())
    }

    /// Notes what the kernel has of the file's last page, of which nothing was there before `parts` were written at `offset`, by
    /// the record at `position`: for a file whose bytes cannot be read.
    ///
    /// # Errors
    /// [`OverlayError::Full`], [`OverlayError::Memory`].
    pub fn begin_with(
        &self,
        log: &Log,
        offset: u64,
        parts: &[IoSlice<'_>],
        position: u64,
    ) -> Result<(), OverlayError> {
        let len = parts.iter().map(|part| part.len() as u64).sum();
        let Some(last) = pieces(offset, len).last() else { return Ok(()) };
        self.load(log, last.page, last.page * PAGE_BYTES, &mut Unreadable)?;
        if let Place::Copy(copy) = self.place(log.tail(), last.page) {
            self.patch(copy, last, parts)?;
            self.words.word(COPIES_AT + copy * 16 + 8).store(position, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fills `buf` with the file's bytes from `offset` on.
    ///
    /// # Errors
    /// [`OverlayError::Base`], [`OverlayError::Memory`].
    pub fn read(
        &self,
        log: &Log,
        offset: u64,
        buf: &mut [u8],
        base: &mut dyn Base,
    ) -> Result<(), OverlayError> {
        let len = buf.len() as u64;
        let mut rest = buf;
        // Neighbours that the kernel has are read with one call.
        let mut of_kernel = 0;
        for piece in pieces(offset, len) {
            if self.place(log.tail(), piece.page) == Place::Kernel {
                of_kernel += piece.len;
                continue;
            }
            rest = read_base(rest, offset + piece.at - of_kernel, of_kernel, base)?;
            of_kernel = 0;
            let (part, after) = rest.split_at_mut(to_usize(piece.len));
            self.read_piece(log, piece, part, base)?;
            rest = after;
        }
        read_base(rest, offset + len - of_kernel, of_kernel, base)?;
        Ok(())
    }

    fn read_piece(
        &self,
        log: &Log,
        piece: Piece,
        buf: &mut [u8],
        base: &mut dyn Base,
    ) -> Result<(), OverlayError> {
        match self.place(log.tail(), piece.page) {
            Place::Copy(copy) => Ok(self.copies.read(copy * PAGE_BYTES + piece.start, buf)?),
            Place::Log(at) => {
                log.pool.region().read(log.pool.region_offset(at + piece.start), buf)?;
                // The tail after the copy: only if it has not passed, nobody has reused the bytes meanwhile.
                if log.tail() <= at {
                    return Ok(());
                }
                base.read(piece.page * PAGE_BYTES + piece.start, buf).map_err(OverlayError::Base)
            }
            Place::Kernel => {
                base.read(piece.page * PAGE_BYTES + piece.start, buf).map_err(OverlayError::Base)
            }
        }
    }

    /// Makes a copy of a page that is about to be written in part.
    fn load(
        &self,
        log: &Log,
        page: u64,
        size: u64,
        base: &mut dyn Base,
    ) -> Result<(), OverlayError> {
        let mut bytes = [0; PAGE_LEN];
        if page * PAGE_BYTES < size {
            let whole = Piece { page, start: 0, len: PAGE_BYTES, at: 0 };
            self.read_piece(log, whole, &mut bytes, base)?;
            let inside = to_usize((size - page * PAGE_BYTES).min(PAGE_BYTES));
            bytes[inside..].fill(0);
        }
        let copy = self.free_copy(log.tail()).ok_or(OverlayError::Full)?;
        self.copies.write(copy * PAGE_BYTES, &bytes)?;
        self.words.word(COPIES_AT + copy * 16).store(page + 1, Ordering::Relaxed);
        self.pin(copy);
        self.set(page, COPY | copy);
        Ok(())
    }

    /// Never behind the tail, so that nobody takes the copy before the next write to it is noted.
    fn pin(&self, copy: u64) {
        self.words.word(COPIES_AT + copy * 16 + 8).store(u64::MAX, Ordering::Relaxed);
    }

    /// Stores the bytes of a piece into a copy.
    fn patch(&self, copy: u64, piece: Piece, parts: &[IoSlice<'_>]) -> Result<(), OverlayError> {
        let (from, to) = (piece.at, piece.at + piece.len);
        let mut part_at = 0;
        for part in parts {
            let part_end = part_at + part.len() as u64;
            let (first, last) = (from.max(part_at), to.min(part_end));
            if first < last {
                let bytes = &part[to_usize(first - part_at)..to_usize(last - part_at)];
                let at = copy * PAGE_BYTES + piece.start + (first - from);
                self.copies.write(at, bytes)?;
            }
            part_at = part_end;
        }
        Ok(())
    }

    fn place(&self, tail: u64, page: u64) -> Place {
        let Some(slot) = self.find(page) else { return Place::Kernel };
        match self.words.word(slot + 8).load(Ordering::Relaxed) {
            copy if copy & COPY != 0 => Place::Copy(copy & !COPY),
            at if at < tail => Place::Kernel,
            at => Place::Log(at),
        }
    }

    fn set(&self, page: u64, place: u64) {
        let slot = self.find(page).unwrap_or_else(|| self.add(page));
        self.words.word(slot + 8).store(place, Ordering::Relaxed);
    }

    fn find(&self, page: u64) -> Option<u64> {
        let mut slot = self.first_slot(page);
        loop {
            match self.words.word(slot).load(Ordering::Relaxed) {
                0 => return None,
                found if found == page + 1 => return Some(slot),
                _ => slot = self.next_slot(slot),
            }
        }
    }

    /// A slot for a page that has none. There is one: `prepare` has seen to it.
    fn add(&self, page: u64) -> u64 {
        let mut slot = self.first_slot(page);
        while self.words.word(slot).load(Ordering::Relaxed) != 0 {
            slot = self.next_slot(slot);
        }
        self.words.word(slot).store(page + 1, Ordering::Relaxed);
        self.words.word(USED_AT).fetch_add(1, Ordering::Relaxed);
        slot
    }

    fn table(&self) -> u64 {
        self.words.word(ACTIVE_AT).load(Ordering::Relaxed) % 2 * TABLE_BYTES
    }

    fn first_slot(&self, page: u64) -> u64 {
        let mixed = (page / GROUP).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // In another order in each group: else the pages of a regular distance would meet.
        let in_group = (page ^ mixed >> 40) % GROUP;
        let group = mixed >> (u64::BITS - GROUPS.ilog2());
        self.table() + (group * GROUP + in_group) % SLOTS * SLOT_BYTES
    }

    /// In the next group: the slots beside this one are for its neighbours.
    fn next_slot(&self, slot: u64) -> u64 {
        self.table() + ((slot - self.table()) / SLOT_BYTES + GROUP) % SLOTS * SLOT_BYTES
    }

    /// Moves the pages that count into the other table.
    fn sweep(&self, tail: u64) {
        let old = self.table();
        let next = self.words.word(ACTIVE_AT).load(Ordering::Relaxed) + 1;
        self.words.word(ACTIVE_AT).store(next, Ordering::Relaxed);
        self.words.word(USED_AT).store(0, Ordering::Relaxed);
        for slot in (old..old + TABLE_BYTES).step_by(16) {
            let page = self.words.word(slot).swap(0, Ordering::Relaxed);
            let place = self.words.word(slot + 8).load(Ordering::Relaxed);
            if page != 0 && (place & COPY != 0 || place >= tail) {
                self.set(page - 1, place);
            }
        }
    }

    /// A copy that is not used, or whose page the kernel has by now.
    fn free_copy(&self, tail: u64) -> Option<u64> {
        let hand = self.words.word(HAND_AT);
        for _ in 0..COPIES {
            let copy = hand.load(Ordering::Relaxed) % COPIES;
            hand.store(copy + 1, Ordering::Relaxed);
            let page = self.words.word(COPIES_AT + copy * 16).load(Ordering::Relaxed);
            let last = self.words.word(COPIES_AT + copy * 16 + 8).load(Ordering::Relaxed);
            if page == 0 {
                return Some(copy);
            }
            if last < tail {
                // The kernel has it: as if it were not in the table.
                self.set(page - 1, 0);
                return Some(copy);
            }
        }
        None
    }

    fn free(&self, copy: u64) {
        self.words.word(COPIES_AT + copy * 16).store(0, Ordering::Relaxed);
    }
}

/// Fills the first `len` bytes of `rest` from the kernel; the others.
fn read_base<'a>(
    rest: &'a mut [u8],
    offset: u64,
    len: u64,
    base: &mut dyn Base,
) -> Result<&'a mut [u8], OverlayError> {
    let (part, after) = rest.split_at_mut(to_usize(len));
    if !part.is_empty() {
        base.read(offset, part).map_err(OverlayError::Base)?;
    }
    Ok(after)
}

/// The parts of pages that `len` bytes at `offset` cover.
fn pieces(offset: u64, len: u64) -> impl Iterator<Item = Piece> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = (offset + at) % PAGE_BYTES;
        let piece_len = (PAGE_BYTES - start).min(len - at);
        let piece = Piece { page: (offset + at) / PAGE_BYTES, start, len: piece_len, at };
        at += piece_len;
        (piece_len > 0).then_some(piece)
    })
}

/// At most the length of a slice.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::{
        CONTROL_BYTES, Definition, FileKey, LogOptions, LogPool, RecordKind, create,
    };
    use super::*;

    /// The kernel's file: what the cleaner has written.
    #[derive(Default)]
    struct Kernel {
        bytes: Vec<u8>,
        reads: u32,
    }

    impl Base for Kernel {
        fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), i32> {
            self.reads += 1;
            let from = to_usize(offset).min(self.bytes.len());
            let len = buf.len().min(self.bytes.len() - from);
            buf[..len].copy_from_slice(&self.bytes[from..from + len]);
            buf[len..].fill(0);
            Ok(())
        }
    }

    struct Absorbed {
        log: Log,
        overlay: Overlay,
        kernel: Kernel,
        model: Vec<u8>,
    }

    impl Absorbed {
        fn new() -> Self {
            let region = Arc::new(Region::anonymous(2 << 20).unwrap());
            create(&region, &LogOptions::default()).unwrap();
            let pool = LogPool::open(region).unwrap();
            let all = pool.ring_bytes();
            let control = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
            Self {
                log: Log::start(pool, control, all).unwrap(),
                overlay: Overlay::new().unwrap(),
                kernel: Kernel::default(),
                model: Vec::new(),
            }
        }

        fn write(&mut self, offset: u64, data: &[u8]) {
            let file = self.log.entry_for(&FileKey { device: 1, inode: 1, identity: 1 }).unwrap();
            let (size, len) = (self.model.len() as u64, data.len() as u64);
            let (overlay, log) = (&self.overlay, &self.log);
            overlay.prepare(log, offset, len, size, &mut self.kernel).unwrap();
            let guard = log.lock(file).unwrap();
            let mut ticket = guard.begin().unwrap();
            if ticket.needs_define() {
                let path = b"/f";
                let (identity, device, inode) = (1, 1, 1);
                let (mode, uid, gid, born) = (0, 0, 0, false);
                let it = Definition { identity, device, inode, mode, uid, gid, born, path };
                ticket.define(&it).unwrap();
            }
            let (first, second) = data.split_at(data.len() / 3);
            let parts = [IoSlice::new(first), IoSlice::new(second)];
            let position = ticket.write(offset, &parts).unwrap();
            overlay.wrote(log, offset, &parts, position).unwrap();
            let end = to_usize(offset) + data.len();
            self.model.resize(self.model.len().max(end), 0);
            self.model[to_usize(offset)..end].copy_from_slice(data);
        }

        /// What the supervisor does: the records into the file, then the tail.
        fn clean(&mut self) {
            let safe = self.log.safe_position();
            let (tail, mut records) = (self.log.tail(), Vec::new());
            records.extend(self.log.records(tail, safe));
            for record in records.iter().filter(|record| record.kind == RecordKind::Write) {
                let mut data = vec![0; record.payload_bytes as usize];
                self.log.pool().read_payload(record, 0, &mut data).unwrap();
                let end = to_usize(record.offset) + data.len();
                let file = &mut self.kernel.bytes;
                file.resize(file.len().max(end), 0);
                file[to_usize(record.offset)..end].copy_from_slice(&data);
            }
            self.log.retire_to(safe).unwrap();
        }

        fn read(&mut self, offset: usize, len: usize) -> Vec<u8> {
            let mut found = vec![0xEE; len];
            self.overlay.read(&self.log, offset as u64, &mut found, &mut self.kernel).unwrap();
            found
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, Vec<u8>),
        Read(usize, usize),
        Clean,
    }

    fn step() -> impl Strategy<Value = Step> {
        let offset = prop_oneof![0..40_000_u64, (0..10_u64).prop_map(|page| page * 4096)];
        let len = prop_oneof![Just(4096_usize), Just(8192), 0..300_usize, 0..10_000_usize];
        prop_oneof![
            6 => (offset, len, any::<u8>()).prop_map(|(offset, len, first)| {
                let bytes = (0..len).map(|at| first.wrapping_add(u8::try_from(at % 251).unwrap())).collect();
                Step::Write(offset, bytes)
            }),
            4 => (0..50_000_usize, 0..20_000_usize).prop_map(|(at, len)| Step::Read(at, len)),
            1 => Just(Step::Clean),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_read_finds_the_newest_bytes(steps in prop::collection::vec(step(), 1..60)) {
            let mut file = Absorbed::new();
            for step in steps {
                match step {
                    Step::Write(offset, data) => file.write(offset, &data),
                    Step::Read(offset, len) => {
                        let from = offset.min(file.model.len());
                        let len = len.min(file.model.len() - from);
                        let expected = file.model[from..from + len].to_vec();
                        prop_assert_eq!(file.read(from, len), expected);
                    }
                    Step::Clean => file.clean(),
                }
            }
            let expected = file.model.clone();
            prop_assert_eq!(file.read(0, expected.len()), expected);
            file.clean();
            prop_assert_eq!(&file.kernel.bytes, &file.model);
        }
    }

    #[test]
    fn pages_written_whole_need_no_kernel_and_no_copy() {
        let mut file = Absorbed::new();
        file.write(4096, &[1; 8192]);
        assert_eq!(file.read(4096, 8192), [1; 8192]);
        assert_eq!(file.kernel.reads, 0);
        assert_eq!(file.overlay.words.word(HAND_AT).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn appends_to_a_file_that_cannot_be_read_need_no_kernel() {
        let mut file = Absorbed::new();
        // Logged: the kernel has it, and nothing is known of its first page.
        let begun = vec![3; 5000];
        file.model.clone_from(&begun);
        file.kernel.bytes.clone_from(&begun);
        let (first, second) = begun.split_at(4500);
        let parts = [IoSlice::new(first), IoSlice::new(second)];
        file.overlay.begin_with(&file.log, 0, &parts, file.log.tail()).unwrap();
        for at in (5000..20_000).step_by(100) {
            file.write(at, &[4; 100]);
        }
        assert_eq!(file.kernel.reads, 0);
        assert_eq!(file.read(0, 20_000), file.model.clone());
    }

    #[test]
    fn copies_are_used_again_once_the_kernel_has_their_pages() {
        let mut file = Absorbed::new();
        for page in 0..COPIES + 100 {
            file.write(page * PAGE_BYTES + 7, b"part");
            if page % 1000 == 999 {
                file.clean();
            }
        }
        assert_eq!(file.read(7, 4), b"part");
    }

    #[test]
    fn without_a_cleaner_copies_run_out_and_nothing_is_lost() {
        let file = Absorbed::new();
        let mut kernel = Kernel::default();
        let found = (0..=COPIES).find_map(|page| {
            let at = page * PAGE_BYTES + 1;
            file.overlay.prepare(&file.log, at, 1, 0, &mut kernel).err()
        });
        assert_eq!(found, Some(OverlayError::Full));
    }

    #[test]
    fn pages_at_any_distance_find_their_slots_and_neighbours_lie_together() {
        let file = Absorbed::new();
        let overlay = &file.overlay;
        for distance in [1, GROUP, 4096, SLOTS, 1 << 20, 0x12_3457] {
            let first = distance << 24;
            let pages = (0..20_000).map(|number| first + number * distance);
            pages.clone().for_each(|page| overlay.set(page, page + 1));
            for page in pages {
                assert_eq!(overlay.place(0, page), Place::Log(page + 1), "{distance}");
            }
        }
        let place = |page| overlay.first_slot(page) / (GROUP * SLOT_BYTES);
        assert!((0..GROUP).all(|page| place(page) == place(0)));
        assert_ne!(place(GROUP), place(0));
    }

    #[test]
    fn a_table_that_is_full_of_pages_finds_them_all() {
        let file = Absorbed::new();
        // As many as there may be, of which the groups have one each.
        let pages = (0..SLOTS_USED_MAX).map(|number| number * GROUP);
        pages.clone().for_each(|page| file.overlay.set(page, page + 64));
        for page in pages {
            assert_eq!(file.overlay.place(0, page), Place::Log(page + 64));
        }
        assert_eq!(file.overlay.place(0, 1), Place::Kernel);
    }

    #[test]
    fn a_full_table_is_swept() {
        let file = Absorbed::new();
        for page in 0..SLOTS_USED_MAX {
            file.overlay.set(page, file.log.head() - 64);
        }
        let mut kernel = Kernel::default();
        let all_live = file.overlay.prepare(&file.log, 0, 4096, 0, &mut kernel);
        assert_eq!(all_live, Ok(()), "all of it is behind the tail");
        assert_eq!(file.overlay.words.word(USED_AT).load(Ordering::Relaxed), 0);
    }
}
