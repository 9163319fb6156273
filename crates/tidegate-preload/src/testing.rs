//! A log in memory, and files on the disk that the log knows, for the tests of several modules.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use tidegate::log::{
    self, CONTROL_BYTES, CoverState, Header, Log, LogOptions, LogPool, RecordKind, Ring, Scanner,
};
use tidegate::pmem::{Region, SharedMemory};

use crate::covered::Open;
use crate::state::descriptors::{Entry, Known};
use crate::state::files::{self, Seen};
use crate::state::process::{self, Attached};
use crate::sys::path::PathBuffer;

/// A log, and a directory for files.
pub(crate) struct World {
    pub(crate) log: &'static Log,
    /// The log's head when the world was made.
    start: u64,
    directory: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(Box::leak(Box::new(new_log(1 << 20))))
    }

    /// Makes a world whose log the process uses, so that all hooks use it.
    pub(crate) fn of_process() -> Self {
        process::use_log(Attached::of_test(new_log(16 << 20)));
        Self::with(process::log().unwrap())
    }

    fn with(log: &'static Log) -> Self {
        Self { log, start: log.ring().head(), directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    /// Makes a file whose content is its name.
    pub(crate) fn file(&self, name: &str) -> File {
        std::fs::write(self.path(name), name).unwrap();
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    /// Returns the open file as a hook sees it through a descriptor with these flags.
    pub(crate) fn open(&self, file: &File, flags: u32) -> Open {
        let fd: c_int = file.as_raw_fd();
        let stat = Seen::of(fd).unwrap().stat;
        Open { log: self.log, fd, known: Known::of_file(stat.st_dev, stat.st_ino, flags) }
    }

    /// Covers an open file as dense, with nothing pending in its file system.
    pub(crate) fn covered(&self, file: &File, flags: u32) -> Open {
        let open = self.open(file, flags);
        let identified = files::identify(self.log, open.fd).unwrap();
        let file_system = self.log.file_systems().find_or_add(77, true).unwrap();
        let entry = Entry { file: self.log.entry_for(&identified.key).unwrap(), file_system };
        let path = PathBuffer::new();
        let definition = identified.definition(&path);
        let size = Seen::of(open.fd).unwrap().size();
        let guard = self.log.lock(entry.file).unwrap();
        guard.begin_story(&definition, size).unwrap();
        let (unlogged, synced_from) = (guard.unlogged(), self.log.ring().head());
        let state = CoverState { unlogged, synced_from, size, is_dense: true };
        assert!(guard.cover(&state, &definition).unwrap());
        self.log
            .file_systems()
            .committed(file_system, self.log.file_systems().changes(file_system));
        Open { known: open.known.with_entry(entry), ..open }
    }

    /// Notes that the supervisor holds a descriptor of the file.
    pub(crate) fn keep(&self, open: &Open) {
        self.log.note_kept(open.entry().unwrap().file, true);
    }

    pub(crate) fn is_covered(&self, open: &Open) -> bool {
        self.log.is_covered(open.entry().unwrap().file)
    }

    /// Returns the records since position `from` as words; 0 means since the world was made.
    pub(crate) fn records_since(&self, from: u64) -> String {
        let headers =
            Scanner::new(self.log.ring().pool(), from.max(self.start), self.log.ring().head());
        let words = headers.map(|header| in_words(&header));
        words.collect::<Vec<_>>().join(" ")
    }
}

fn new_log(bytes: u64) -> Log {
    let region = Arc::new(Region::anonymous(bytes).unwrap());
    log::create(&region, &LogOptions::default()).unwrap();
    let pool = LogPool::open(region).unwrap();
    let all = pool.ring_bytes();
    let control = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    Ring::start(pool, control, all).map(Log::over).unwrap()
}

fn in_words(header: &Header) -> String {
    let grows = if header.grows { "+" } else { "" };
    match header.kind {
        RecordKind::Write => format!("{}{grows}", header.offset),
        RecordKind::SetSize => format!("size:{}{grows}", header.offset),
        RecordKind::Mark => format!("mark:{}", header.offset),
        kind => format!("{kind:?}").to_lowercase(),
    }
}
