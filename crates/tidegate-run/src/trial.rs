//! A log and files for tests of the cleaner's parts, within one process.

use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use tidegate::log::recover::identity_of;
use tidegate::log::{
    Attributes, CONTROL_BYTES, Definition, FileGuard, FileHandle, FileKey, FileSystemId, Log,
    LogOptions, LogPool, Make, NameAt, RecordKind, Ring, Ticket, Timestamp,
};
use tidegate::pmem::{Region, RegionOptions, SharedMemory};

use super::backlog::Backlog;

/// A log, and a directory.
pub(super) struct Trial {
    pub(super) log: Arc<Log>,
    pub(super) dir: TempDir,
}

impl Trial {
    /// Makes a log of one MiB in ordinary memory.
    pub(super) fn new() -> Self {
        Self::over(log_over(Region::anonymous(1 << 20).unwrap(), u64::MAX))
    }

    pub(super) fn over(log: Arc<Log>) -> Self {
        Self { log, dir: tempfile::tempdir().unwrap() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a file of this name with `content`.
    pub(super) fn file(&self, name: &str, content: &[u8]) -> File {
        std::fs::write(self.path(name), content).unwrap();
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    fn key(file: &File) -> FileKey {
        let metadata = file.metadata().unwrap();
        let (device, inode) = (metadata.dev(), metadata.ino());
        FileKey { device, inode, identity: identity_of(file).unwrap() }
    }

    pub(super) fn lock(&self, file: &File) -> FileGuard<'_> {
        self.log.lock(self.log.entry_for(&Self::key(file)).unwrap()).unwrap()
    }

    /// Begins the file's story, unless it has begun.
    pub(super) fn begin_story(&self, file: &File, name: &str) {
        let (guard, path) = (self.lock(file), self.path(name));
        if !guard.is_logged() {
            let size = file.metadata().unwrap().len();
            guard.begin_story(&definition(file, &path), size).unwrap();
        }
    }

    /// Begins the file's story with the given file system in its definition.
    pub(super) fn begin_story_on(&self, file: &File, name: &str, file_system: FileSystemId) {
        let (guard, path) = (self.lock(file), self.path(name));
        let definition = Definition { file_system, ..definition(file, &path) };
        guard.begin_story(&definition, 0).unwrap();
    }

    /// Covers a new file by a record of the whole file.
    pub(super) fn make(&self, file: &File, name: &str, content: &[u8]) {
        self.begin_story(file, name);
        let (guard, path, time) = (self.lock(file), self.path(name), Timestamp::default());
        let parent = FileHandle::new(1, &[1; 8]).unwrap();
        let attributes = Attributes {
            mode: 0o600,
            owner: 0,
            group: 0,
            accessed: time,
            modified: time,
            extended: &[],
        };
        let at = NameAt { parent, name: name.as_bytes() };
        let make = Make { at, parent_changed: time, attributes };
        let made = guard.make(
            (&make, content, 0),
            &definition(file, &path),
            guard.unlogged(),
            false,
            true,
        );
        assert_eq!(made, Ok(true));
    }

    /// Does `operation` in the log only, on a file that is defined at `name`.
    pub(super) fn record(&self, file: &File, name: &str, operation: impl FnOnce(&mut Ticket<'_>)) {
        self.begin_story(file, name);
        let (guard, path) = (self.lock(file), self.path(name));
        let mut ticket = guard.begin().unwrap();
        if ticket.needs_define() {
            guard.define_again(&mut ticket, &definition(file, &path)).unwrap();
        }
        operation(&mut ticket);
    }

    pub(super) fn write(&self, file: &File, name: &str, offset: u64, data: &[u8]) {
        self.record(file, name, |ticket| {
            ticket.write(offset, &[IoSlice::new(data)], false).unwrap();
        });
    }

    /// Returns a backlog of all records.
    pub(super) fn backlog(&self) -> Backlog {
        let mut backlog = Backlog::new(self.log.ring().tail(), 4096);
        for header in self.log.ring().records(self.log.ring().tail(), self.log.ring().head()) {
            let mut payload = vec![0; header.payload_bytes as usize];
            if header.kind == RecordKind::Define {
                self.log.ring().pool().read_payload(&header, 0, &mut payload).unwrap();
            }
            backlog.add(&header, &payload);
        }
        backlog
    }
}

/// Makes a log that fills the region. `allocated_bytes` of its ring have space.
fn log_over(region: Region, allocated_bytes: u64) -> Arc<Log> {
    let region = Arc::new(region);
    tidegate::log::create(&region, &LogOptions::default()).unwrap();
    let pool = LogPool::open(region).unwrap();
    let allocated_bytes = pool.ring_bytes().min(allocated_bytes);
    let memory = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    Arc::new(Ring::start(pool, memory, allocated_bytes).map(Log::over).unwrap())
}

/// Makes a log in a file of so many bytes, without space for its ring.
pub(super) fn log_in_file(path: &Path, bytes: u64) -> Arc<Log> {
    let create_bytes = Some(bytes);
    let options = RegionOptions { create_bytes, sparse: true, ..RegionOptions::default() };
    log_over(Region::open(path, &options).unwrap(), 0)
}

fn definition<'a>(file: &File, path: &'a Path) -> Definition<'a> {
    let FileKey { device, inode, identity } = Trial::key(file);
    Definition {
        identity,
        file_system: [1; 16],
        handle: FileHandle::NONE,
        starts: true,
        covered: false,
        size_bytes: 0,
        device,
        inode,
        path: path.as_os_str().as_encoded_bytes(),
    }
}
