//! What the files still owe their disks: the records between tail and head, summed up a segment at a time.
//!
//! Invariants:
//! 1. Every record below [`Backlog::scanned`] that is not retired is part of exactly one segment, and segments follow one
//!    another without gaps.
//! 2. A file is known here from its definition on, as long as a record of it can be live: definitions are retired after
//!    the records that rely on them.
//!
//! Nothing here touches a file: what is due is for `writeback` to do.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tidegate::log::{Definition, Header, RecordKind, RenamePaths};

/// A file that the log defines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    /// Its id in the log.
    pub(crate) id: u64,
    /// Device number.
    pub(crate) device: u64,
    /// Inode number.
    pub(crate) inode: u64,
    /// What tells it from later files of these numbers.
    pub(crate) identity: u64,
    /// Names that it has, as far as the log knows.
    pub(crate) names: Vec<PathBuf>,
    /// Position of its last definition.
    defined_at: u64,
}

impl Known {
    /// A file with these names; `key` is device, inode and identity.
    pub(crate) fn at(id: u64, key: (u64, u64, u64), names: Vec<PathBuf>) -> Self {
        let (device, inode, identity) = key;
        Self { id, device, inode, identity, names, defined_at: 0 }
    }
}

/// The part of a file that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// Bytes that were written, each time they were.
    pub(crate) written_bytes: u64,
    /// The first byte that was.
    pub(crate) start: u64,
    /// The byte behind the last one.
    pub(crate) end: u64,
    /// Position of the last record about the file.
    last: u64,
}

impl Window {
    const EMPTY: Self = Self { written_bytes: 0, start: u64::MAX, end: 0, last: 0 };

    fn add(&mut self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        self.written_bytes = self.written_bytes.saturating_add(len);
        self.start = self.start.min(offset);
        self.end = self.end.max(offset.saturating_add(len));
    }

    fn merge(&mut self, other: Self) {
        self.written_bytes = self.written_bytes.saturating_add(other.written_bytes);
        self.start = self.start.min(other.start);
        self.end = self.end.max(other.end);
        self.last = self.last.max(other.last);
    }

    /// Bytes that differ on the disk at most: what is written again counts once.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.written_bytes.min(self.end.saturating_sub(self.start))
    }

    /// The same in parts that follow each other, with about `part_bytes` to write in each.
    pub(super) fn parts(&self, part_bytes: u64) -> impl Iterator<Item = Self> {
        let (whole, span_bytes) = (*self, self.end.saturating_sub(self.start));
        let count = self.dirty_bytes().div_ceil(part_bytes);
        let step = span_bytes.div_ceil(count.max(1));
        let parts = (0..count).map(move |number| {
            let start = whole.start.saturating_add(step.saturating_mul(number)).min(whole.end);
            Self { start, end: start.saturating_add(step).min(whole.end), ..whole }
        });
        // To the kernel an empty range is all of the file.
        parts.filter(|part| part.start < part.end)
    }

    /// The same bytes are written again and again: on the way to the disk each time would be too often.
    pub(crate) fn is_hot(&self) -> bool {
        self.written_bytes > 2 * self.dirty_bytes()
    }
}

/// What has to be durable before the records up to a position may go.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Due {
    /// Files, by id.
    pub(crate) files: HashMap<u64, Window>,
    /// Directories whose entries changed.
    pub(crate) directories: HashSet<PathBuf>,
}

impl Due {
    fn merge(&mut self, other: &Self) {
        for (id, window) in &other.files {
            self.files.entry(*id).or_insert(Window::EMPTY).merge(*window);
        }
        self.directories.extend(other.directories.iter().cloned());
    }

    /// Bytes to write, at most.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.files.values().map(Window::dirty_bytes).sum()
    }

    /// Parts of files, with about `part_bytes` to write in each, in the order in which a disk best takes them.
    pub(crate) fn parts(&self, part_bytes: u64) -> Vec<(u64, Window)> {
        let files = self.files.iter();
        files.flat_map(|(id, window)| window.parts(part_bytes).map(|part| (*id, part))).collect()
    }
}

#[derive(Debug)]
struct Segment {
    start: u64,
    end: u64,
    due: Due,
    write_started: bool,
}

/// The records that are not retired.
#[derive(Debug)]
pub(crate) struct Backlog {
    scanned: u64,
    segment_bytes: u64,
    segments: VecDeque<Segment>,
    known: HashMap<u64, Known>,
    files_seen: u64,
}

impl Backlog {
    /// An empty backlog of a log whose records begin at `position`; it is summed up in steps of `segment_bytes`.
    pub(crate) fn new(position: u64, segment_bytes: u64) -> Self {
        let (segments, known) = (VecDeque::new(), HashMap::new());
        Self { scanned: position, segment_bytes, segments, known, files_seen: 0 }
    }

    /// Up to where records were added.
    pub(crate) fn scanned(&self) -> u64 {
        self.scanned
    }

    /// Files that were ever defined.
    pub(crate) fn files_seen(&self) -> u64 {
        self.files_seen
    }

    /// The file with this id.
    pub(crate) fn file(&self, id: u64) -> Option<&Known> {
        self.known.get(&id)
    }

    /// Adds a record; `payload` is that of a record about names or definitions.
    pub(crate) fn add(&mut self, header: &Header, payload: &[u8]) {
        match header.kind {
            RecordKind::Write => {
                self.touch(header, header.offset, u64::from(header.payload_bytes));
            }
            RecordKind::Zero => self.touch(header, header.offset, header.len),
            RecordKind::SetSize => self.touch(header, header.offset, 0),
            RecordKind::Define => self.define(header, payload),
            RecordKind::Link => self.link(header.file, as_path(payload)),
            RecordKind::Unlink => self.unlink(header.file, as_path(payload)),
            RecordKind::Rename => self.rename(header, payload),
            RecordKind::Retire | RecordKind::Void | RecordKind::Settle => {}
        }
        self.reached(header.position + header.record_bytes());
    }

    /// All records below `position` were added.
    pub(crate) fn reached(&mut self, position: u64) {
        self.scanned = self.scanned.max(position);
        if let Some(segment) = self.segments.back_mut() {
            segment.end = self.scanned;
        }
    }

    fn define(&mut self, header: &Header, payload: &[u8]) {
        let Some(definition) = Definition::decode(payload) else { return };
        let path = as_path(definition.path);
        self.files_seen += u64::from(header.file == header.position);
        if let (true, Some(directory)) = (definition.born, path.parent()) {
            self.segment(header.position).due.directories.insert(directory.to_path_buf());
        }
        let key = (definition.device, definition.inode, definition.identity);
        let known = Known::at(header.file, key, vec![path.to_path_buf()]);
        self.known.insert(header.file, Known { defined_at: header.position, ..known });
        self.touch(header, 0, 0);
    }

    fn touch(&mut self, header: &Header, offset: u64, len: u64) {
        let due = &mut self.segment(header.position).due;
        let window = due.files.entry(header.file).or_insert(Window::EMPTY);
        window.last = header.position;
        window.add(offset, len);
    }

    fn link(&mut self, file: u64, name: &Path) {
        self.entry_changed(name);
        if let Some(known) = self.known.get_mut(&file) {
            known.names.push(name.to_path_buf());
        }
    }

    fn unlink(&mut self, file: u64, name: &Path) {
        self.entry_changed(name);
        if let Some(known) = self.known.get_mut(&file) {
            known.names.retain(|known| known != name);
        }
    }

    fn rename(&mut self, header: &Header, payload: &[u8]) {
        let Some(paths) = RenamePaths::decode(payload) else { return };
        let (from, to) = (as_path(paths.from), as_path(paths.to));
        if header.aux != 0 {
            let replaced = |known: &&mut Known| known.identity == header.aux;
            for known in self.known.values_mut().filter(replaced) {
                known.names.retain(|name| name != to);
            }
        }
        self.unlink(header.file, from);
        self.link(header.file, to);
    }

    fn entry_changed(&mut self, name: &Path) {
        let position = self.scanned;
        if let Some(directory) = name.parent() {
            self.segment(position).due.directories.insert(directory.to_path_buf());
        }
    }

    /// The segment for the record at `position`.
    fn segment(&mut self, position: u64) -> &mut Segment {
        let segment_bytes = self.segment_bytes;
        let is_open = |last: &Segment| position.saturating_sub(last.start) < segment_bytes;
        if !self.segments.back().is_some_and(is_open) {
            let due = Due::default();
            let (start, end, write_started) = (position, position, false);
            self.segments.push_back(Segment { start, end, due, write_started });
        }
        let last = self.segments.len() - 1;
        &mut self.segments[last]
    }

    /// What is due for all records that were added.
    pub(crate) fn due(&self) -> Due {
        let mut all = Due::default();
        self.segments.iter().for_each(|segment| all.merge(&segment.due));
        all
    }

    /// What is due for the records before a position that `may_be_goal` accepts, and that position: the first one with at least
    /// `dirty_bytes` to write. `None`: only all is enough.
    pub(crate) fn due_for(
        &self,
        dirty_bytes: u64,
        may_be_goal: impl Fn(u64) -> bool,
    ) -> Option<(u64, Due)> {
        let mut due = Due::default();
        for (segment, next) in self.segments.iter().zip(self.segments.iter().skip(1)) {
            due.merge(&segment.due);
            // Where the next one starts a record starts, so none is cut in two.
            if due.dirty_bytes() >= dirty_bytes && may_be_goal(next.start) {
                return Some((next.start, due));
            }
        }
        None
    }

    /// Bytes to write for all that is due, at most.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.due().dirty_bytes()
    }

    /// Windows of files that are worth writing ahead of their sync: those of full segments, each handed back once, and none that
    /// is written again and again.
    pub(crate) fn worth_starting(&mut self) -> Vec<(u64, Window)> {
        let all = self.due();
        let segment_bytes = self.segment_bytes;
        let is_full = |segment: &&mut Segment| segment.end - segment.start >= segment_bytes;
        let fresh = self.segments.iter_mut().filter(|segment| !segment.write_started);
        let mut windows = Due::default();
        for segment in fresh.filter(is_full) {
            segment.write_started = true;
            windows.merge(&segment.due);
        }
        let is_hot = |id: &u64| all.files.get(id).is_some_and(Window::is_hot);
        let started = windows
            .files
            .into_iter()
            .filter(|(id, window)| window.written_bytes > 0 && !is_hot(id));
        started.collect()
    }

    /// The records below `position` are durable in their files and gone from the log.
    pub(crate) fn retired(&mut self, position: u64) {
        while self.segments.front().is_some_and(|first| first.end <= position) {
            self.segments.pop_front();
        }
        for segment in self.segments.iter_mut().take_while(|segment| segment.start < position) {
            segment.due.files.retain(|_, window| window.last >= position);
        }
        self.known.retain(|_, known| known.defined_at >= position);
        self.scanned = self.scanned.max(position);
    }
}

/// A path out of a record.
pub(super) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    fn names(backlog: &Backlog) -> Vec<PathBuf> {
        let mut names: Vec<_> =
            backlog.known.values().flat_map(|known| known.names.clone()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_known_by_the_names_that_they_have_now() {
        let trial = Trial::new();
        let path = |name| trial.path(name);
        let bytes = |path: &PathBuf| path.as_os_str().as_bytes().to_vec();
        let (one, two) = (trial.file("one", b""), trial.file("two", b""));
        trial.write(&two, "two", 0, b"x");
        trial.record(&one, "one", |ticket| {
            ticket.link(&bytes(&path("more"))).unwrap();
        });
        assert_eq!(names(&trial.backlog()), [path("more"), path("one"), path("two")]);
        let replaced = Trial::key(&two).identity;
        trial.record(&one, "one", |ticket| {
            ticket.rename(&bytes(&path("one")), &bytes(&path("two")), replaced).unwrap();
            ticket.unlink(&bytes(&path("more"))).unwrap();
        });
        let backlog = trial.backlog();
        assert_eq!(names(&backlog), [path("two")]);
        assert_eq!(backlog.files_seen(), 2);
        assert_eq!(backlog.due().directories, HashSet::from([trial.dir.path().to_path_buf()]));
    }

    #[test]
    fn what_is_written_again_is_due_once_and_not_started_early() {
        let trial = Trial::new();
        let (hot, cold) = (trial.file("hot", b""), trial.file("cold", b""));
        for number in 0..10 {
            trial.write(&hot, "hot", 4096, &[number; 1000]);
            trial.write(&cold, "cold", u64::from(number) * 1000, &[number; 1000]);
        }
        let mut backlog = trial.backlog();
        assert_eq!(backlog.dirty_bytes(), 1000 + 10_000);
        let cold_id = trial.lock(&cold).id();
        let started = backlog.worth_starting();
        assert_eq!(started.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [cold_id]);
        assert!(started[0].1.start == 0 && started[0].1.end > 5000, "{started:?}");
        assert_eq!(backlog.worth_starting(), [], "started once");
    }

    #[test]
    fn parts_cover_all_that_was_written_once_and_in_order() {
        let window = |written_bytes, start, end| Window { written_bytes, start, end, last: 0 };
        let cut = |whole: Window| {
            let parts = Due { files: HashMap::from([(1, whole)]), ..Due::default() }.parts(100);
            parts.into_iter().map(|(_, it)| (it.start, it.end)).collect::<Vec<_>>()
        };
        assert_eq!(cut(window(250, 50, 300)), [(50, 134), (134, 218), (218, 300)]);
        assert_eq!(cut(window(150, 0, 1000)), [(0, 500), (500, 1000)], "scattered");
        assert_eq!(cut(window(9999, 7, 17)), [(7, 17)], "hot");
        assert_eq!(cut(Window::EMPTY), [], "only its size was changed");
        assert_eq!(window(4, 0, 5).parts(1).count(), 3, "none is empty");
        let all = cut(window(u64::MAX, 0, 100_000_000));
        assert!(all.windows(2).all(|pair| pair[0].1 == pair[1].0) && all.len() == 1_000_000);
        assert_eq!((all[0].0, all[999_999].1), (0, 100_000_000));
    }

    #[test]
    fn a_part_of_the_log_ends_where_a_record_starts_that_may_be_a_goal() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        for number in 0..40 {
            trial.write(&file, "file", number * 10_000, &[1; 10_000]);
        }
        let end = trial.log.safe_position();
        let records: Vec<_> = trial.log.records(trial.log.tail(), end).collect();
        let mut backlog = Backlog::new(trial.log.tail(), 30_000);
        for header in &records {
            backlog.add(header, &[]);
        }
        let (goal, due) = backlog.due_for(100_000, |_| true).unwrap();
        assert!(records.iter().any(|header| header.position == goal));
        let written = |before: u64| {
            let writes = records.iter().filter(|it| it.kind == RecordKind::Write);
            writes
                .filter(|it| it.position < before)
                .map(|it| u64::from(it.payload_bytes))
                .sum::<u64>()
        };
        assert_eq!(due.dirty_bytes(), written(goal));
        assert!((100_000..150_000).contains(&written(goal)));
        let (later, _) = backlog.due_for(100_000, |position| position > goal).unwrap();
        assert!(later > goal);
        assert_eq!(backlog.due_for(100_000, |_| false), None);
        assert_eq!(backlog.due_for(1_000_000, |_| true), None, "all is less");
        backlog.retired(goal);
        assert_eq!(backlog.due_for(1, |_| true).map(|(next, _)| next > goal), Some(true));
    }

    #[test]
    fn what_is_retired_is_due_no_more_and_what_follows_is() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        trial.write(&file, "file", 0, b"x");
        let middle = trial.log.safe_position();
        trial.write(&file, "file", 0, &[1; 8000]);
        let mut backlog = trial.backlog();
        backlog.retired(middle);
        // Defined anew behind the goal, so known still.
        assert_eq!(backlog.due().files.len(), 1);
        assert!(backlog.file(trial.lock(&file).id()).is_some());
        backlog.retired(trial.log.safe_position());
        assert_eq!((backlog.due(), backlog.known.len()), (Due::default(), 0));
    }
}
