//! The recorder: a thread that drains events from the rings, sorts them, and writes rows.
//!
//! Invariant: events become rows in time order. Drained events stay pending until the next drain if
//! another ring may still get an earlier event.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate::glob::Filter;
use tidegate_record::event::{Event, Kind, Unseen};
use tidegate_record::rings::{Rings, Told};

use super::files::{Files, Out};
use super::programs::{self, Programs};
use super::rows::{At, Rows};
use super::summary::{Operation, Summary};

/// Maximum time that events stay in rings that do not fill.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);

/// A handle to the recorder's thread.
pub(super) struct Recorder {
    rings: Arc<Rings>,
    is_ending: Arc<AtomicBool>,
    thread: JoinHandle<Summary>,
}

impl Recorder {
    /// Starts the thread.
    pub(super) fn start(rings: Arc<Rings>, filter: Filter, rows: Rows) -> io::Result<Self> {
        let is_ending = Arc::new(AtomicBool::new(false));
        let (its_rings, its_end) = (Arc::clone(&rings), Arc::clone(&is_ending));
        let mut trace = Trace::new(filter, rows);
        let work = move || {
            trace.follow(&its_rings, &its_end);
            trace.end(its_rings.lost())
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(work)?;
        Ok(Self { rings, is_ending, thread })
    }

    /// Writes the reported events, and ends the recording, also of processes that still run.
    pub(super) fn finish(self) -> Summary {
        self.rings.close();
        self.is_ending.store(true, Ordering::Release);
        self.rings.interrupt();
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Events that wait for their rows, and the state that rows depend on.
pub(super) struct Trace {
    pending: Vec<Told>,
    /// Time of the first event.
    begun_ns: Option<u64>,
    last: At,
    files: Files,
    programs: Programs,
    rows: Rows,
    summary: Summary,
}

impl Trace {
    pub(super) fn new(filter: Filter, rows: Rows) -> Self {
        Self {
            pending: Vec::new(),
            begun_ns: None,
            last: At { time_us: 0, thread: 0 },
            files: Files::new(filter),
            programs: Programs::default(),
            rows,
            summary: Summary::default(),
        }
    }

    /// Drains events until `is_ending`.
    fn follow(&mut self, rings: &Rings, is_ending: &AtomicBool) {
        loop {
            let (filled, ends) = (rings.filled(), is_ending.load(Ordering::Acquire));
            let pending = &mut self.pending;
            let until_ns = rings.drain(|told| pending.push(told));
            self.write_until(if ends { u64::MAX } else { until_ns });
            if ends {
                return;
            }
            rings.wait(filled, DRAIN_INTERVAL);
        }
    }

    /// Adds an event.
    #[cfg(test)]
    pub(super) fn push(&mut self, told: Told) {
        self.pending.push(told);
    }

    /// Writes rows for the events before a time.
    pub(super) fn write_until(&mut self, until_ns: u64) {
        self.pending.sort_by_key(|told| told.event.time_ns);
        let ready = self.pending.partition_point(|told| told.event.time_ns < until_ns);
        let rest = self.pending.split_off(ready);
        for told in std::mem::replace(&mut self.pending, rest) {
            self.write(&told);
        }
    }

    fn write(&mut self, told: &Told) {
        let Told { event, text } = told;
        let begun_ns = *self.begun_ns.get_or_insert(event.time_ns);
        let time_us = event.time_ns.saturating_sub(begun_ns) / 1000;
        self.last = At { time_us, thread: event.thread };
        let mut out = Out { at: self.last, rows: &mut self.rows, summary: &mut self.summary };
        let text = Text::of(text);
        match event.kind {
            Kind::Ended => self.files.executed(event.process, &mut out),
            Kind::Started => {
                self.files.executed(event.process, &mut out);
                self.programs.started(event.process);
            }
            Kind::Executed => {
                let path = programs::path_of(text.0[0], text.0[1]);
                self.programs.executed(event.process, path);
            }
            Kind::NotExecuted => self.programs.not_executed(event.process),
            Kind::Unseen => {
                if let Some(what) = Unseen::of(event.arguments[0]) {
                    out.summary.add_unseen(what);
                }
            }
            Kind::SyncFailed => out.summary.failed_syncs += 1,
            Kind::SyncAll if event.is_flagged() => out.push(Operation::Syncfs, b"", [0, 0]),
            Kind::SyncAll => out.push(Operation::Sync, b"", [0, 0]),
            Kind::Opened => self.files.opened(event, text.0[0], &mut out),
            Kind::Copied => self.files.copied(event),
            Kind::Closed => self.files.closed(event, &mut out),
            Kind::Resized => self.files.resized(event, &mut out),
            Kind::ResizedPath => self.files.resized_path(event, &text.path(0), &mut out),
            Kind::Removed => self.files.unlinked(event, &text.path(0), &mut out),
            Kind::Linked => self.files.linked(event, &text.path(0)),
            Kind::Renamed => {
                self.files.renamed(event, [&text.path(0), &text.path(2)], &mut out);
            }
            Kind::Read | Kind::Write | Kind::Sync | Kind::SyncRange | Kind::Allocated => {
                operate(&mut self.files, event, &mut out);
            }
        }
    }

    /// Ends the trace after the last event; `lost` is the number of lost events.
    pub(super) fn end(mut self, lost: u64) -> Summary {
        let mut out = Out { at: self.last, rows: &mut self.rows, summary: &mut self.summary };
        self.files.end(&mut out);
        self.programs.end(&mut self.summary);
        self.summary.lost = lost;
        self.summary.written = self.rows.finish();
        self.summary
    }
}

/// Writes the row of an operation on a file.
fn operate(files: &mut Files, event: &Event, out: &mut Out<'_>) {
    let Some((name, syncs)) = files.shown(event.file, out) else { return };
    let [offset, len, ..] = event.arguments;
    let numbers = [offset, len];
    match event.kind {
        Kind::Read => out.push(Operation::Read, name, numbers),
        Kind::Write => {
            out.push(Operation::Write, name, numbers);
            if syncs || event.is_flagged() {
                out.push(Operation::Fdatasync, name, [0, 0]);
            }
        }
        Kind::Sync if event.is_flagged() => out.push(Operation::Fsync, name, [0, 0]),
        Kind::Sync => out.push(Operation::Fdatasync, name, [0, 0]),
        Kind::SyncRange => out.push(Operation::SyncRange, name, numbers),
        _ => out.push(Operation::Fallocate, name, numbers),
    }
}

/// The parts of a text; missing parts are empty.
struct Text<'a>([&'a [u8]; 4]);

impl<'a> Text<'a> {
    fn of(text: &'a [u8]) -> Self {
        let mut parts = text.split(|byte| *byte == 0);
        Self(std::array::from_fn(|_| parts.next().unwrap_or_default()))
    }

    /// Returns the absolute path of the directory and name at index `at`, without `.` and `..`.
    fn path(&self, at: usize) -> Vec<u8> {
        use std::os::unix::ffi::OsStringExt;
        let path = programs::path_of(self.0[at], self.0[at + 1]);
        plain(&path).into_os_string().into_vec()
    }
}

/// Returns the path without `.` and `..`; keeps symbolic links.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}
