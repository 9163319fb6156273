//! The changes that the files' disks lack: the records from tail to head, summed up by segments.
//!
//! Invariants:
//! 1. Every record below [`Backlog::scanned`] that is not retired is part of exactly one segment,
//!    and segments follow one another without gaps.
//! 2. A file is known here from its definition on, as long as one of its records can be live:
//!    definitions are retired after the records that rely on them.
//! 3. A page of a record may be left out of the due data only if a later record that was added, and
//!    that stays in the log or is due itself, overwrites all of the page and does nothing else.
//!    Recovery applies the later record to any content of the disk, so the earlier bytes are needed
//!    no more. So a page that is written again and again reaches the disk once that ends.
//!
//! This module accesses no file: `writeback` makes the ranges durable.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tidegate::log::{Definition, FileHandle, FileSystemId, Header, RecordKind};

use super::ranges::{Ranges, whole_pages};

/// A file that the log defines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    /// Device number.
    pub(crate) device: u64,
    /// Inode number.
    pub(crate) inode: u64,
    /// Distinguishes the file from later files with these numbers.
    pub(crate) identity: u64,
    /// Its file system.
    pub(crate) file_system: FileSystemId,
    /// Its handle there.
    pub(crate) handle: FileHandle,
    /// The path at the time of the definition; empty if unknown.
    pub(crate) path: PathBuf,
    /// Position of its last definition.
    defined_at: u64,
}

impl Known {
    /// Returns the file that `definition` names. The definition is at `position` of the log.
    pub(crate) fn of(definition: &Definition<'_>, position: u64) -> Self {
        Self {
            device: definition.device,
            inode: definition.inode,
            identity: definition.identity,
            file_system: definition.file_system,
            handle: definition.handle,
            path: Path::new(OsStr::from_bytes(definition.path)).to_path_buf(),
            defined_at: position,
        }
    }
}

/// Sums up all writes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    /// Bytes of all writes; a byte that is written again counts again.
    written_bytes: u64,
    /// Offset of the first byte that was written, and of the byte behind the last one.
    start: u64,
    end: u64,
}

impl Window {
    const EMPTY: Self = Self { written_bytes: 0, start: u64::MAX, end: 0 };

    fn add(&mut self, other: Self) {
        self.written_bytes = self.written_bytes.saturating_add(other.written_bytes);
        self.start = self.start.min(other.start);
        self.end = self.end.max(other.end);
    }

    /// Returns how many bytes differ on the disk at most: a byte that is written again counts once.
    fn dirty_bytes(&self) -> u64 {
        self.written_bytes.min(self.end.saturating_sub(self.start))
    }

    /// Returns whether the same bytes are written too often to write them back each time.
    fn is_hot(&self) -> bool {
        self.written_bytes > 2 * self.dirty_bytes()
    }
}

/// Data of one file that the records of one segment make due.
#[derive(Debug, Clone)]
struct Part {
    window: Window,
    ranges: Ranges,
    /// Position of the last record about the file.
    last: u64,
    /// Whether a record does more than overwrite bytes that the disk has.
    has_grown: bool,
}

/// Data that must be durable before the records up to a position may be retired.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Due {
    /// Ranges of files, by the files' ids. A file without ranges changed only its size.
    pub(crate) files: HashMap<u64, Ranges>,
    /// Files that grew, or changed their size. A sync of their ranges is not enough.
    pub(crate) grown: HashSet<u64>,
    /// File systems whose names were recorded: their journal must be committed after the files.
    /// Zeroes stand for an unknown file system.
    pub(crate) file_systems: HashSet<FileSystemId>,
}

impl Due {
    fn add(&mut self, segment: &Segment, overwrites: &Overwrites) {
        for (id, part) in &segment.files {
            let ranges = overwrites.without_later(*id, &part.ranges, segment.start);
            if part.has_grown || ranges.bytes() > 0 {
                self.files.entry(*id).or_default().merge(&ranges);
            }
            self.grown.extend(part.has_grown.then_some(*id));
        }
        self.file_systems.extend(segment.file_systems.keys());
    }

    /// Returns whether nothing is due.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty() && self.file_systems.is_empty()
    }

    fn sorted(mut self) -> Self {
        self.files.values_mut().for_each(Ranges::sort);
        self
    }

    /// Returns how many bytes must be written at most.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.files.values().map(Ranges::bytes).sum()
    }
}

/// By file and page, the start of the segment of the last record that overwrites all of the page.
#[derive(Debug, Default)]
struct Overwrites(HashMap<u64, HashMap<u64, u64>>);

impl Overwrites {
    fn add(&mut self, header: &Header, segment_start: u64) {
        let pages = whole_pages(header.offset, u64::from(header.payload_bytes));
        let of_file = self.0.entry(header.file).or_default();
        of_file.extend(pages.map(|page| (page, segment_start)));
    }

    /// Returns `ranges` of a file without the pages that later segments overwrite.
    fn without_later(&self, file: u64, ranges: &Ranges, segment_start: u64) -> Ranges {
        let Some(of_file) = self.0.get(&file) else { return ranges.clone() };
        ranges.without(|page| of_file.get(&page).is_some_and(|last| *last > segment_start))
    }

    /// Removes the overwrites that point to a retired segment.
    fn retired(&mut self, segment: &Segment) {
        for (id, part) in &segment.files {
            let Some(of_file) = self.0.get_mut(id) else { continue };
            if part.ranges.has_indivisible() {
                of_file.retain(|_, last| *last > segment.start);
            }
            for page in part.ranges.pages() {
                if of_file.get(&page).is_some_and(|last| *last <= segment.start) {
                    of_file.remove(&page);
                }
            }
            if of_file.is_empty() {
                self.0.remove(id);
            }
        }
    }

    /// Forgets all overwrites of a file.
    fn forget(&mut self, file: u64) {
        self.0.remove(&file);
    }
}

#[derive(Debug)]
struct Segment {
    start: u64,
    end: u64,
    files: HashMap<u64, Part>,
    /// File systems whose names were recorded, with the position of the last such record.
    file_systems: HashMap<FileSystemId, u64>,
    write_started: bool,
}

/// The records that are not retired.
#[derive(Debug)]
pub(crate) struct Backlog {
    scanned: u64,
    segment_bytes: u64,
    segments: VecDeque<Segment>,
    overwrites: Overwrites,
    known: HashMap<u64, Known>,
    files_seen: u64,
}

impl Backlog {
    /// Creates an empty backlog of a log that begins at `position`, with segments of
    /// `segment_bytes`.
    pub(crate) fn new(position: u64, segment_bytes: u64) -> Self {
        Self {
            scanned: position,
            segment_bytes,
            segments: VecDeque::new(),
            overwrites: Overwrites::default(),
            known: HashMap::new(),
            files_seen: 0,
        }
    }

    /// Returns the end of the records that were added.
    pub(crate) fn scanned(&self) -> u64 {
        self.scanned
    }

    /// Returns how many files were ever defined.
    pub(crate) fn files_seen(&self) -> u64 {
        self.files_seen
    }

    /// Returns the file with this id.
    pub(crate) fn file(&self, id: u64) -> Option<&Known> {
        self.known.get(&id)
    }

    /// Returns the files on a file system, with their ids.
    pub(crate) fn files_on<'a>(
        &'a self,
        file_system: &'a FileSystemId,
    ) -> impl Iterator<Item = (u64, &'a Known)> {
        let known = self.known.iter().filter(|(_, known)| known.file_system == *file_system);
        known.map(|(id, known)| (*id, known))
    }

    /// Adds a record. `payload` is that of a definition, and ignored for other records.
    pub(crate) fn add(&mut self, header: &Header, payload: &[u8]) {
        match header.kind {
            RecordKind::Write => {
                self.change(header, header.offset, u64::from(header.payload_bytes));
            }
            RecordKind::Zero => self.change(header, header.offset, header.len),
            RecordKind::SetSize => self.change(header, header.offset, 0),
            RecordKind::Define => self.define(header, payload),
            // The file has all its earlier records durably, or they are not promised any more.
            RecordKind::End => {
                self.overwrites.forget(header.file);
                self.segments.iter_mut().for_each(|segment| {
                    segment.files.remove(&header.file);
                });
            }
            RecordKind::Make => {
                // The payload is some hundred bytes longer than the content.
                self.change(header, 0, u64::from(header.payload_bytes));
                self.name(header);
            }
            RecordKind::Name => self.name(header),
            // The write was not made and overwrote nothing, but may be counted as an overwrite.
            RecordKind::Void => self.overwrites.forget(header.file),
            RecordKind::Mark
            | RecordKind::Decided
            | RecordKind::Done
            | RecordKind::Gap
            | RecordKind::Begun
            | RecordKind::Restored => {}
        }
        // Every kind of record is part of a segment.
        self.segment(header.position);
        self.reached(header.position + header.record_bytes());
    }

    /// Notes that all records below `position` were added.
    pub(crate) fn reached(&mut self, position: u64) {
        self.scanned = self.scanned.max(position);
        if let Some(segment) = self.segments.back_mut() {
            segment.end = self.scanned;
        }
    }

    fn define(&mut self, header: &Header, payload: &[u8]) {
        let Some(definition) = Definition::decode(payload) else { return };
        self.files_seen += u64::from(header.file == header.position);
        self.known.insert(header.file, Known::of(&definition, header.position));
    }

    /// Notes that names of the file's file system were recorded.
    fn name(&mut self, header: &Header) {
        let file_system = self.known.get(&header.file).map(|known| known.file_system);
        let file_systems = &mut self.segment(header.position).file_systems;
        file_systems.insert(file_system.unwrap_or_default(), header.position);
    }

    fn change(&mut self, header: &Header, offset: u64, len: u64) {
        let position = header.position;
        let segment = self.segment(position);
        let segment_start = segment.start;
        let part = segment.files.entry(header.file).or_insert_with(|| Part {
            window: Window::EMPTY,
            ranges: Ranges::default(),
            last: position,
            has_grown: false,
        });
        part.last = position;
        part.has_grown |= header.grows || header.kind != RecordKind::Write;
        part.ranges.add(offset, len);
        if len > 0 {
            let end = offset.saturating_add(len);
            part.window.add(Window { written_bytes: len, start: offset, end });
        }
        if header.kind == RecordKind::Write && !header.grows {
            self.overwrites.add(header, segment_start);
        }
    }

    /// Returns the segment of the record at `position`, and begins a new one if the last is full.
    fn segment(&mut self, position: u64) -> &mut Segment {
        let segment_bytes = self.segment_bytes;
        let is_open = |last: &Segment| position.saturating_sub(last.start) < segment_bytes;
        if !self.segments.back().is_some_and(is_open) {
            let (start, end, write_started) = (position, position, false);
            let (files, file_systems) = (HashMap::new(), HashMap::new());
            self.segments.push_back(Segment { start, end, files, file_systems, write_started });
        }
        let last = self.segments.len() - 1;
        &mut self.segments[last]
    }

    /// Returns all data that the added records make due.
    pub(crate) fn due(&self) -> Due {
        let mut due = Due::default();
        self.segments.iter().for_each(|segment| due.add(segment, &self.overwrites));
        due.sorted()
    }

    /// Returns a position that `may_be_goal` accepts, with the data that the records before it make
    /// due. It is the first such position with at least `dirty_bytes` to write or `log_bytes` to
    /// retire. Returns `None` if only all records reach these amounts.
    pub(crate) fn due_for(
        &self,
        dirty_bytes: u64,
        log_bytes: u64,
        may_be_goal: impl Fn(u64) -> bool,
    ) -> Option<(u64, Due)> {
        let mut due = Due::default();
        let first = self.segments.front().map_or(0, |first| first.start);
        for (segment, next) in self.segments.iter().zip(self.segments.iter().skip(1)) {
            due.add(segment, &self.overwrites);
            let is_enough = due.dirty_bytes() >= dirty_bytes || next.start - first >= log_bytes;
            // A record starts where the next segment starts, so this cuts no record in two.
            if is_enough && may_be_goal(next.start) {
                return Some((next.start, due.sorted()));
            }
        }
        None
    }

    fn windows(&self) -> HashMap<u64, Window> {
        let mut windows = HashMap::new();
        for (id, part) in self.segments.iter().flat_map(|segment| &segment.files) {
            windows.entry(*id).or_insert(Window::EMPTY).add(part.window);
        }
        windows
    }

    /// Returns how many bytes must be written for all records at most.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.windows().values().map(Window::dirty_bytes).sum()
    }

    /// Returns about `dirty_bytes` of ranges that are worth writing before their sync. They belong
    /// to the oldest full segments. Each segment is returned once, and files that are written again
    /// and again are left out.
    pub(crate) fn worth_starting(&mut self, dirty_bytes: u64) -> Due {
        let windows = self.windows();
        let is_hot = |id: &u64| windows.get(id).is_some_and(Window::is_hot);
        let segment_bytes = self.segment_bytes;
        let is_full = |segment: &&mut Segment| segment.end - segment.start >= segment_bytes;
        let fresh = self.segments.iter_mut().filter(|segment| !segment.write_started);
        let mut due = Due::default();
        for segment in fresh.filter(is_full) {
            if due.dirty_bytes() >= dirty_bytes {
                break;
            }
            segment.write_started = true;
            due.add(segment, &self.overwrites);
        }
        due.files.retain(|id, ranges| !is_hot(id) && ranges.bytes() > 0);
        due.sorted()
    }

    /// Removes the records below `position`, which are durable in their files and retired.
    pub(crate) fn retired(&mut self, position: u64) {
        while self.segments.front().is_some_and(|first| first.end <= position)
            && let Some(first) = self.segments.pop_front()
        {
            self.overwrites.retired(&first);
        }
        for segment in self.segments.iter_mut().take_while(|segment| segment.start < position) {
            segment.files.retain(|_, part| part.last >= position);
            segment.file_systems.retain(|_, last| *last >= position);
        }
        self.known.retain(|_, known| known.defined_at >= position);
        self.scanned = self.scanned.max(position);
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use proptest::prelude::*;

    use super::super::trial::Trial;
    use super::*;

    /// Size of the model's file.
    const MODEL_BYTES: usize = 5 * 4096;

    /// A step of a program or the cleaner.
    #[derive(Debug, Clone)]
    enum Act {
        /// A write; one that `grows` is not promised.
        Write { offset: usize, len: usize, grows: bool },
        /// A write that the kernel refuses.
        Refused { page: usize },
        /// The cleaner looks: the next write defines the file again.
        Look,
        /// A batch of at least so many dirty bytes or bytes of the log, or else of all records.
        Retire { dirty_bytes: u64, log_bytes: u64 },
    }

    fn act() -> impl Strategy<Value = Act> {
        let page = 0..MODEL_BYTES / 4096;
        let whole = page.clone().prop_map(|page| (page * 4096, 4096));
        let pages = page.clone().prop_map(|page| (page * 4096, MODEL_BYTES - page * 4096));
        let part = (0..MODEL_BYTES - 1000, 1..1000_usize);
        let range = prop_oneof![4 => whole, 1 => pages, 2 => part];
        let write = (range, prop::bool::weighted(0.2));
        let retire = (0..30_000_u64, 0..60_000_u64);
        prop_oneof![
            8 => write.prop_map(|((offset, len), grows)| Act::Write { offset, len, grows }),
            1 => page.prop_map(|page| Act::Refused { page }),
            4 => Just(Act::Look),
            2 => retire.prop_map(|(dirty_bytes, log_bytes)| Act::Retire { dirty_bytes, log_bytes }),
        ]
    }

    /// A record of a write: offset, whether it grows, and its bytes.
    struct Written {
        position: u64,
        offset: usize,
        len: usize,
        grows: bool,
    }

    /// A model of a file and its log. All bytes of a write are its number.
    struct Model {
        trial: Trial,
        file: std::fs::File,
        backlog: Backlog,
        written: Vec<Written>,
        kernel: Vec<usize>,
        disk: Vec<usize>,
    }

    impl Model {
        fn new() -> Self {
            let trial = Trial::new();
            let file = trial.file("file", &vec![0; MODEL_BYTES]);
            trial.begin_story(&file, "file");
            let backlog = Backlog::new(trial.log.ring().tail(), 10_000);
            let bytes = vec![0; MODEL_BYTES];
            Self { trial, file, backlog, written: Vec::new(), kernel: bytes.clone(), disk: bytes }
        }

        /// Number of the next write.
        fn next(&self) -> usize {
            self.written.len() + 1
        }

        fn append(&mut self, offset: usize, len: usize, grows: bool, is_made: bool) {
            let (number, data) = (self.next(), vec![0; len]);
            let mut position = 0;
            self.trial.record(&self.file, "file", |ticket| {
                position = ticket.write(offset as u64, &[IoSlice::new(&data)], grows).unwrap();
                if !is_made {
                    ticket.void(position).unwrap();
                }
            });
            if is_made {
                self.written.push(Written { position, offset, len, grows });
                self.kernel[offset..offset + len].fill(number);
            }
        }

        fn scan(&mut self) {
            let (from, safe) = (self.backlog.scanned(), self.trial.log.ring().safe_position());
            for header in self.trial.log.ring().records(from, safe) {
                let mut payload = vec![0; header.payload_bytes as usize];
                self.trial.log.ring().pool().read_payload(&header, 0, &mut payload).unwrap();
                self.backlog.add(&header, &payload);
            }
            self.backlog.reached(safe);
        }

        fn retire(&mut self, dirty_bytes: u64, log_bytes: u64) {
            self.scan();
            let safe = self.backlog.scanned();
            let chosen = self
                .backlog
                .due_for(dirty_bytes, log_bytes, |goal| self.trial.log.ring().may_retire_to(goal));
            let (goal, due) = chosen.unwrap_or_else(|| (safe, self.backlog.due()));
            for (id, ranges) in &due.files {
                let whole = (0, MODEL_BYTES as u64);
                let ranges: Vec<_> =
                    if due.grown.contains(id) { vec![whole] } else { ranges.iter().collect() };
                for (offset, len) in ranges {
                    let start = usize::try_from(offset).unwrap().min(MODEL_BYTES);
                    let end = (start + usize::try_from(len).unwrap()).min(MODEL_BYTES);
                    self.disk[start..end].copy_from_slice(&self.kernel[start..end]);
                }
            }
            self.trial.log.ring().retire_to(goal).unwrap();
            self.backlog.retired(goal);
        }

        /// Returns each byte's state after a power cut now, and the oldest promised state.
        fn after_a_cut(&self) -> impl Iterator<Item = (usize, usize)> {
            let tail = self.trial.log.ring().tail();
            let (mut found, mut promised) = (self.disk.clone(), vec![0; MODEL_BYTES]);
            for (number, write) in (1..).zip(&self.written) {
                let range = write.offset..write.offset + write.len;
                if write.position >= tail && !write.grows {
                    found[range.clone()].fill(number);
                }
                if write.position < tail || !write.grows {
                    promised[range].fill(number);
                }
            }
            found.into_iter().zip(promised)
        }
    }

    proptest! {
        /// A byte is never older than its promise, whatever is retired.
        #[test]
        fn what_is_retired_is_on_the_disk_or_overwritten_by_what_is_not(
            acts in prop::collection::vec(act(), 1..60),
        ) {
            let mut model = Model::new();
            for act in acts {
                match act {
                    Act::Write { offset, len, grows } => model.append(offset, len, grows, true),
                    Act::Refused { page } => model.append(page * 4096, 4096, false, false),
                    Act::Look => model.scan(),
                    Act::Retire { dirty_bytes, log_bytes } => model.retire(dirty_bytes, log_bytes),
                }
                for (at, (found, promised)) in model.after_a_cut().enumerate() {
                    prop_assert!(found >= promised, "byte {at} is of write {found}, not {promised}");
                }
            }
        }
    }

    #[test]
    fn a_hot_page_reaches_the_disk_only_when_all_is_retired() {
        let mut model = Model::new();
        for _ in 0..100 {
            model.append(4096, 4096, false, true);
            model.append(0, 100, false, true);
        }
        model.scan();
        let (goal, due) = model.backlog.due_for(u64::MAX, 300_000, |_| true).unwrap();
        assert!(goal >= 300_000 && due.files.values().flat_map(Ranges::iter).eq([(0, 4096)]));
        assert_eq!(model.backlog.due().dirty_bytes(), 2 * 4096);
        model.retire(u64::MAX, u64::MAX);
        assert!(model.backlog.overwrites.0.is_empty(), "{:?}", model.backlog.overwrites);
    }

    #[test]
    fn what_is_written_again_is_due_once_and_not_started_early() {
        let trial = Trial::new();
        let (hot, cold) = (trial.file("hot", b""), trial.file("cold", b""));
        for number in 0..10 {
            trial.write(&hot, "hot", 4096, &[number; 1000]);
            trial.write(&cold, "cold", u64::from(number) * 4096, &[number; 4096]);
        }
        let mut backlog = trial.backlog();
        assert_eq!(backlog.dirty_bytes(), 1000 + 40_960);
        assert_eq!(backlog.due().dirty_bytes(), 4096 + 40_960, "in pages");
        let cold_id = trial.log.id_of(trial.lock(&cold).file());
        let started = backlog.worth_starting(u64::MAX);
        assert_eq!(started.files.keys().collect::<Vec<_>>(), [&cold_id]);
        assert_eq!(backlog.worth_starting(u64::MAX), Due::default(), "started once");
        assert_eq!(backlog.files_seen(), 2);
    }

    #[test]
    fn a_story_that_has_ended_leaves_nothing_due() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        trial.write(&file, "file", 0, b"x");
        trial.lock(&file).end_story().unwrap();
        assert_eq!(trial.backlog().due(), Due::default());
        trial.write(&file, "file", 0, b"y");
        assert_eq!(trial.backlog().due().files.len(), 1);
    }

    #[test]
    fn a_part_of_the_log_ends_where_a_record_starts_that_may_be_a_goal() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        for number in 0..40 {
            trial.write(&file, "file", number * 8192, &[1; 8192]);
        }
        let end = trial.log.ring().safe_position();
        let records: Vec<_> = trial.log.ring().records(trial.log.ring().tail(), end).collect();
        let mut backlog = Backlog::new(trial.log.ring().tail(), 30_000);
        for header in &records {
            backlog.add(header, &[]);
        }
        let (goal, due) = backlog.due_for(100_000, u64::MAX, |_| true).unwrap();
        assert!(records.iter().any(|header| header.position == goal));
        let writes = records.iter().filter(|it| it.kind == RecordKind::Write);
        let written: u64 =
            writes.filter(|it| it.position < goal).map(|it| u64::from(it.payload_bytes)).sum();
        assert_eq!(due.dirty_bytes(), written);
        assert!((100_000..150_000).contains(&written));
        let (later, _) = backlog.due_for(100_000, u64::MAX, |position| position > goal).unwrap();
        assert!(later > goal);
        assert_eq!(backlog.due_for(100_000, u64::MAX, |_| false), None);
        assert_eq!(backlog.due_for(1_000_000, u64::MAX, |_| true), None, "all is less");
        backlog.retired(goal);
        assert_eq!(backlog.due_for(1, u64::MAX, |_| true).map(|(next, _)| next > goal), Some(true));
    }

    #[test]
    fn what_is_retired_is_due_no_more_and_what_follows_is() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        trial.write(&file, "file", 0, b"x");
        let middle = trial.log.ring().safe_position();
        trial.write(&file, "file", 0, &[1; 8000]);
        let mut backlog = trial.backlog();
        backlog.retired(middle);
        // The file was defined again behind the goal, so it stays known.
        assert_eq!(backlog.due().files.len(), 1);
        let id = trial.log.id_of(trial.lock(&file).file());
        assert!(backlog.file(id).is_some());
        backlog.retired(trial.log.ring().safe_position());
        assert_eq!((backlog.due(), backlog.known.len()), (Due::default(), 0));
    }
}
