//! A log and files to try the cleaner's parts on, within one process.

use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use tidegate::log::recover::identity_of;
use tidegate::log::{
    CONTROL_BYTES, Definition, FileGuard, FileKey, Log, LogOptions, LogPool, RecordKind, Ticket,
};
use tidegate::pmem::{Region, SharedMemory};

use super::backlog::Backlog;

/// A log of one MiB in ordinary memory, and a directory.
pub(super) struct Trial {
    pub(super) log: Arc<Log>,
    pub(super) dir: TempDir,
}

impl Trial {
    pub(super) fn new() -> Self {
        let log = log_over(Region::anonymous(1 << 20).unwrap());
        Self { log, dir: tempfile::tempdir().unwrap() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The file of this name, made with `content`.
    pub(super) fn file(&self, name: &str, content: &[u8]) -> File {
        std::fs::write(self.path(name), content).unwrap();
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    pub(super) fn key(file: &File) -> FileKey {
        let metadata = file.metadata().unwrap();
        let (device, inode) = (metadata.dev(), metadata.ino());
        FileKey { device, inode, identity: identity_of(file).unwrap() }
    }

    pub(super) fn lock(&self, file: &File) -> FileGuard<'_> {
        self.log.lock(self.log.entry_for(&Self::key(file)).unwrap()).unwrap()
    }

    /// Does `operation` in the log alone, on a file that is defined at `name`.
    pub(super) fn record(&self, file: &File, name: &str, operation: impl FnOnce(&mut Ticket<'_>)) {
        let guard = self.lock(file);
        let mut ticket = guard.begin().unwrap();
        define(&mut ticket, file, &self.path(name));
        operation(&mut ticket);
    }

    pub(super) fn write(&self, file: &File, name: &str, offset: u64, data: &[u8]) {
        self.record(file, name, |ticket| {
            ticket.write(offset, &[IoSlice::new(data)]).unwrap();
        });
    }

    /// All records, summed up.
    pub(super) fn backlog(&self) -> Backlog {
        let mut backlog = Backlog::new(self.log.tail(), 4096);
        for header in self.log.records(self.log.tail(), self.log.head()) {
            let mut payload = vec![0; header.payload_bytes as usize];
            if header.kind != RecordKind::Write {
                self.log.pool().read_payload(&header, 0, &mut payload).unwrap();
            }
            backlog.add(&header, &payload);
        }
        backlog
    }
}

/// A new log that fills the region.
pub(super) fn log_over(region: Region) -> Arc<Log> {
    let region = Arc::new(region);
    tidegate::log::create(&region, &LogOptions::default()).unwrap();
    let pool = LogPool::open(region).unwrap();
    let ring_bytes = pool.ring_bytes();
    let memory = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    Arc::new(Log::start(pool, memory, ring_bytes).unwrap())
}

pub(super) fn define(ticket: &mut Ticket<'_>, file: &File, path: &Path) {
    if !ticket.needs_define() {
        return;
    }
    let metadata = file.metadata().unwrap();
    let FileKey { device, inode, identity } = Trial::key(file);
    let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
    let path = path.as_os_str().as_encoded_bytes();
    let definition = Definition { identity, device, inode, mode, uid, gid, born: true, path };
    ticket.define(&definition).unwrap();
}
