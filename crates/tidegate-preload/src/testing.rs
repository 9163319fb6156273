//! What tests of several modules need: a log in memory, and files on the disk that it knows.

use std::ffi::CString;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use tidegate::log::recover::{Plan, Planner};
use tidegate::log::{
    self, CONTROL_BYTES, Definition, Header, Log, LogOptions, LogPool, RecordKind, RenamePaths,
    Scanner,
};
use tidegate::pmem::{Region, SharedMemory};

use crate::names::{Name, Target};
use crate::path::PathBuffer;
use crate::subject::{Place, Subject};

/// A log, and a directory for files.
pub(crate) struct World {
    pub(crate) log: Log,
    directory: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let region = Arc::new(Region::anonymous(1 << 20).unwrap());
        log::create(&region, &LogOptions::default()).unwrap();
        let pool = LogPool::open(region).unwrap();
        let all = pool.ring_bytes();
        let control = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
        let log = Log::start(pool, control, all).unwrap();
        Self { log, directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    /// Makes a file of which the log has nothing.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, name).unwrap();
        path
    }

    /// Makes a file of which the log has a definition and a write.
    pub(crate) fn live_file(&self, name: &str) -> PathBuf {
        let path = self.file(name);
        let target = look(&path);
        let subject = target.entered(&self.log).unwrap();
        let mut buffer = PathBuffer::new();
        let mut ticket = subject.guard.begin().unwrap();
        let (seen, key) = target.identify(&mut buffer).unwrap();
        ticket.define(&seen.definition(key, false, &buffer)).unwrap();
        ticket.write(0, &[IoSlice::new(b"data")]).unwrap();
        subject.guard.synced(subject.guard.unlogged());
        path
    }

    /// What the log's entry of the file says.
    pub(crate) fn subject(&self, path: &Path) -> Subject<'_> {
        look(path).known(&self.log).unwrap()
    }

    pub(crate) fn headers(&self) -> Vec<Header> {
        Scanner::new(self.log.pool(), self.log.tail(), self.log.head()).collect()
    }

    /// What recovery makes of the records.
    pub(crate) fn plan(&self) -> Plan {
        let mut planner = Planner::new();
        for header in self.headers() {
            let mut payload = vec![0; header.payload_bytes as usize];
            self.log.pool().read_payload(&header, 0, &mut payload).unwrap();
            planner.add(&header, &payload);
        }
        planner.finish()
    }

    /// The records in words; the names of files stand for their paths.
    pub(crate) fn records(&self) -> Vec<String> {
        self.headers().iter().map(|header| self.in_words(header)).collect()
    }

    fn in_words(&self, header: &Header) -> String {
        let mut payload = vec![0; header.payload_bytes as usize];
        self.log.pool().read_payload(header, 0, &mut payload).unwrap();
        let name = |path: &[u8]| {
            let path = Path::new(std::ffi::OsStr::from_bytes(path));
            let inside = path.strip_prefix(self.path("")).unwrap_or(path);
            inside.display().to_string()
        };
        match header.kind {
            RecordKind::Define => {
                format!("define {}", name(Definition::decode(&payload).unwrap().path))
            }
            RecordKind::Link | RecordKind::Unlink => {
                format!("{:?} {}", header.kind, name(&payload)).to_lowercase()
            }
            RecordKind::Rename => {
                let paths = RenamePaths::decode(&payload).unwrap();
                let replaced = if header.aux == 0 { "" } else { " over another" };
                format!("rename {} {}{replaced}", name(paths.from), name(paths.to))
            }
            RecordKind::SetSize => format!("size {}", header.offset),
            RecordKind::Zero => format!("zero {} {}", header.offset, header.len),
            kind => format!("{kind:?}").to_lowercase(),
        }
    }
}

/// A path as C has it.
pub(crate) fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// What stands at a path.
pub(crate) fn look(path: &Path) -> Target {
    let path = c_path(path);
    Name { directory: libc::AT_FDCWD, path: &path }.look(libc::O_NOFOLLOW).unwrap()
}
