//! Recovers a real log pool into real files.

use std::fs::{self, File};
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::log::recover::{
    ApplyOptions, Failure, LocalFiles, Outcome, file_system_id, handle_of, identity_of, plan_pool,
    recover_pool,
};
use crate::log::{
    CONTROL_BYTES, CoverState, Definition, FileGuard, FileKey, Log, LogOptions, LogPool, NO_BOOT,
    RecordKind, Ring, Scanner, create,
};
use crate::pmem::{Region, SharedMemory};

pub(super) const OPTIONS: ApplyOptions =
    ApplyOptions { workers: 2, booted_ns: None, salvage: false };

/// A log, and files that it covers.
pub(super) struct Bed {
    folder: tempfile::TempDir,
    region: Arc<Region>,
    log: Log,
}

impl Bed {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let region = Arc::new(Region::anonymous(8 << 20).expect("a little memory can be had"));
        create(&region, &LogOptions::default()).expect("the pool can be made");
        let pool = LogPool::open(Arc::clone(&region)).expect("the pool opens");
        let control = SharedMemory::anonymous(CONTROL_BYTES).expect("a little memory can be had");
        let ring_bytes = pool.ring_bytes();
        let log = Ring::start(pool, control, ring_bytes).map(Log::over).expect("the log starts");
        Self { folder, region, log }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a covered file of `size` bytes `.`. Operations of `then` go to the log alone.
    pub(super) fn covered(&self, name: &str, size: usize, then: impl FnOnce(&FileGuard<'_>)) {
        let path = self.path(name);
        fs::write(&path, vec![b'.'; size]).expect("a file can be written");
        let file = File::open(&path).expect("it is there");
        let stat = file.metadata().expect("an open file has metadata");
        let identity = identity_of(&file).expect("the file system has handles");
        let definition = Definition {
            identity,
            file_system: file_system_id(&file).unwrap_or_default(),
            handle: handle_of(&file).expect("the file system has handles"),
            covered: false,
            starts: true,
            size_bytes: 0,
            device: stat.dev(),
            inode: stat.ino(),
            path: path.as_os_str().as_bytes(),
        };
        let key = FileKey { device: stat.dev(), inode: stat.ino(), identity };
        let entry = self.log.entry_for(&key).expect("the table has free space");
        let guard = self.log.lock(entry).expect("it is free");
        guard.begin_story(&definition, 0).expect("the log has free space");
        let (unlogged, synced_from) = (guard.unlogged(), self.log.ring().head());
        let state = CoverState { unlogged, synced_from, size: size as u64, is_dense: true };
        assert!(guard.cover(&state, &definition).expect("the log has free space"));
        then(&guard);
    }

    pub(super) fn pool(&self) -> LogPool {
        LogPool::open(Arc::clone(&self.region)).expect("the pool opens")
    }

    pub(super) fn recover_with(&self, options: ApplyOptions) -> Outcome {
        let files = LocalFiles::new().expect("the list of mounts can be read");
        let recovered = recover_pool(&self.pool(), &files, options, &|_| ());
        recovered.expect("memory can be read").expect("there is something").outcome
    }

    fn recover(&self) -> Outcome {
        let outcome = self.recover_with(OPTIONS);
        assert!(outcome.is_complete(), "{:?}", outcome.failures);
        outcome
    }

    pub(super) fn content(&self, name: &str) -> String {
        let bytes = fs::read(self.path(name)).expect("it is there");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Changes a byte of the payload of the first write.
    fn damage_first_write(&self) {
        let pool = self.pool();
        let mut records = Scanner::new(&pool, pool.tail().unwrap(), pool.limit().unwrap());
        let first = records.find(|record| record.kind == RecordKind::Write).expect("a write");
        self.region.write(pool.region_offset(first.data_position()), b"#").expect("it is inside");
    }
}

pub(super) fn write(guard: &FileGuard<'_>, offset: u64, data: &str, grows: bool) {
    let mut ticket = guard.begin().expect("a slot is free");
    let written = ticket.write(offset, &[IoSlice::new(data.as_bytes())], grows);
    written.expect("the log has free space");
}

#[test]
fn files_get_what_was_promised_and_not_more() {
    let bed = Bed::new();
    bed.covered("over", 8, |guard| write(guard, 2, "over", false));
    bed.covered("grown", 4, |guard| write(guard, 6, "more", true));
    bed.covered("marked", 4, |guard| {
        write(guard, 6, "more", true);
        guard.note_change(crate::log::Change { bytes: 4, grew: true, journaled: None, size: 0 });
        guard.mark(10, 0).expect("the log has free space");
    });
    bed.covered("cut", 8, |guard| {
        let mut ticket = guard.begin().expect("a slot is free");
        ticket.set_size(3, false).expect("the log has free space");
    });
    bed.covered("ended", 4, |guard| {
        write(guard, 0, "none", false);
        guard.end_story().expect("the log has free space");
    });
    for _ in 0..2 {
        let outcome = bed.recover();
        assert_eq!((outcome.files_written, outcome.files_gone), (4, 0));
        assert_eq!(bed.content("over"), "..over..");
        assert_eq!(bed.content("grown"), "....");
        assert_eq!(bed.content("marked"), "....\0\0more");
        assert_eq!(bed.content("cut"), "...");
        assert_eq!(bed.content("ended"), "....");
    }
    assert_eq!(bed.pool().session().expect("memory can be read"), Some(NO_BOOT));
}

#[test]
fn a_file_that_was_changed_from_outside_is_left_and_all_others_are_recovered() {
    let bed = Bed::new();
    bed.covered("changed", 8, |guard| {
        write(guard, 0, "logged", false);
        guard.confirm(0).expect("the log has free space");
    });
    bed.covered("other", 8, |guard| write(guard, 0, "logged", false));
    let file = File::options().write(true).open(bed.path("changed")).expect("it is there");
    let modified = file.metadata().and_then(|metadata| metadata.modified()).expect("it has times");
    file.set_modified(modified + Duration::from_secs(60)).expect("times can be set");
    let stopped = bed.recover_with(OPTIONS);
    assert!(
        matches!(&stopped.failures[..], [Failure::Changed { path }] if path.ends_with("changed"))
    );
    assert_eq!(
        (bed.content("changed"), bed.content("other")),
        ("........".into(), "logged..".into())
    );
    fs::write(bed.path("other"), "later...").expect("a file can be written");
    // The log keeps the records of the file, and has noted that the other one is restored.
    assert!(matches!(&bed.recover_with(OPTIONS).failures[..], [Failure::Changed { .. }]));
    assert_eq!(
        (bed.content("changed"), bed.content("other")),
        ("........".into(), "later...".into())
    );
    let salvaged = bed.recover_with(ApplyOptions { salvage: true, ..OPTIONS });
    assert_eq!((salvaged.is_complete(), salvaged.findings.total()), (true, 1));
    file.set_modified(modified).expect("times can be set");
    // The clock of this boot must not matter.
    let options = ApplyOptions { booted_ns: Some(0), ..OPTIONS };
    assert!(bed.recover_with(options).is_complete());
    assert_eq!(bed.content("changed"), "logged..");
    // The file has a later timestamp of its own now.
    assert!(bed.recover_with(OPTIONS).is_complete());
}

#[test]
fn a_damaged_record_stops_recovery_by_the_name_of_its_file() {
    let bed = Bed::new();
    bed.covered("damaged", 8, |guard| {
        write(guard, 0, "one", false);
        write(guard, 4, "two", false);
    });
    bed.covered("whole", 8, |guard| write(guard, 0, "whole", false));
    bed.damage_first_write();
    let stopped = bed.recover_with(OPTIONS);
    assert!(
        matches!(&stopped.failures[..], [Failure::Damaged { path, .. }] if path.ends_with("damaged"))
    );
    assert_eq!(bed.content("whole"), "........");
    assert!(bed.recover_with(ApplyOptions { salvage: true, ..OPTIONS }).is_complete());
    assert_eq!(
        (bed.content("damaged"), bed.content("whole")),
        ("........".into(), "whole...".into())
    );
}

#[test]
fn a_record_that_the_crash_cut_off_is_passed_over() {
    let bed = Bed::new();
    bed.covered("torn", 8, |guard| write(guard, 0, "torn", false));
    bed.damage_first_write();
    let (plan, unreadable_bytes) = plan_pool(&bed.pool()).expect("memory can be read");
    assert!(plan.is_empty() && unreadable_bytes == 0);
}

#[test]
fn large_files_are_copied_in_parts() {
    let bed = Bed::new();
    let part: String = "0123456789abcdef".repeat(64 << 10);
    bed.covered("large", 5 << 20, |guard| {
        for number in 0..5 {
            write(guard, number << 20, &part, false);
        }
    });
    assert_eq!(bed.recover().written_bytes, 5 << 20);
    assert_eq!(bed.content("large"), part.repeat(5));
}

/// Returns whether files can be opened by handle here, on a file system with a UUID.
fn can_open_by_handle(path: &Path) -> bool {
    let file = File::open(path).expect("it is there");
    let flags = rustix::fs::OFlags::RDONLY;
    let handle = handle_of(&file).expect("the file system has handles");
    let opened = super::super::open_by_handle(&file, &handle, flags);
    file_system_id(&file).is_ok() && opened.is_ok()
}

#[test]
fn a_file_that_was_renamed_is_found_and_one_that_was_removed_needs_nothing() {
    let bed = Bed::new();
    bed.covered("old", 4, |guard| write(guard, 0, "new!", false));
    bed.covered("gone", 4, |guard| write(guard, 0, "new!", false));
    if !can_open_by_handle(&bed.path("old")) {
        let files = LocalFiles::new().expect("the list of mounts can be read");
        fs::rename(bed.path("old"), bed.path("renamed")).expect("a file can be renamed");
        let recovered = recover_pool(&bed.pool(), &files, OPTIONS, &|_| ()).expect("memory");
        assert!(!recovered.expect("there is something").outcome.is_complete());
        return;
    }
    fs::rename(bed.path("old"), bed.path("renamed")).expect("a file can be renamed");
    fs::remove_file(bed.path("gone")).expect("a file can be removed");
    fs::write(bed.path("gone"), "other").expect("another file can be made");
    let outcome = bed.recover();
    assert_eq!((outcome.files_written, outcome.files_gone), (1, 1));
    assert_eq!((bed.content("renamed"), bed.content("gone")), ("new!".into(), "other".into()));
}
