//! Names and files that are created again, on the files of this machine. Each state of the disk is
//! recovered as docs/decisions/run-logs-what-was-synced.md says, also if recovery is interrupted.
//!
//! Each test prepares the disk and the log. If the temporary folder is on a file system without
//! handles, or the right to open files by handle is missing, the tests report that and pass.

use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::apply::apply_noting;
use super::super::dates::Dates;
use crate::log::recover::{
    Access, ApplyOptions, Failure, FilePlan, FileState, FileSystem, LocalFiles, MadeFile,
    NameSystem, NamedFile, Outcome, Place, Ranges, file_system_id, handle_of, identity_of,
    open_by_handle, plan_pool, recover_pool, remove_reserved,
};
use crate::log::{
    Attributes, CONTROL_BYTES, Definition, FileHandle, FileKey, FileRef, Heartbeat, Log,
    LogOptions, LogPool, Make, NameAt, NameChange, NameRecord, Ring, Timestamp, create,
    put_extended,
};
use crate::pmem::{Region, SharedMemory};

const OPTIONS: ApplyOptions = ApplyOptions { workers: 2, booted_ns: None, salvage: false };
/// Later than any directory of a test: no commit can have included the file.
const UNSEEN: Timestamp = Timestamp { s: 1 << 40, ns: 0 };
/// Earlier than any directory of a test.
const SEEN: Timestamp = Timestamp { s: 1, ns: 0 };
const MODIFIED: Timestamp = Timestamp { s: 1_000_000, ns: 5 };

struct Bed {
    folder: tempfile::TempDir,
    region: Arc<Region>,
    log: Log,
    inodes: Cell<u64>,
}

/// A file in the log.
#[derive(Clone, Copy)]
struct Logged {
    entry: FileRef,
}

impl Bed {
    /// Makes a bed. Returns `None` if files cannot be found by their handles here.
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let directory = File::open(folder.path()).unwrap();
        let files = LocalFiles::new().unwrap();
        let place = Place {
            file_system: file_system_id(&directory).ok()?,
            device: directory.metadata().unwrap().dev(),
            parent: handle_of(&directory).ok()?,
            name: b"any".to_vec(),
        };
        let flags = rustix::fs::OFlags::PATH;
        let can = open_by_handle(&directory, &place.parent, flags).is_ok()
            && files.directory(&place).is_ok();
        if !can {
            println!("skipped: no handles here, or no right to open them");
            return None;
        }
        let region = Arc::new(Region::anonymous(8 << 20).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        let pool = LogPool::open(Arc::clone(&region)).unwrap();
        let control = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
        let ring_bytes = pool.ring_bytes();
        let log = Ring::start(pool, control, ring_bytes).map(Log::over).unwrap();
        Some(Self { folder, region, log, inodes: Cell::new(1) })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a directory whose state no commit can have included.
    fn directory(&self, name: &str) {
        fs::create_dir(self.path(name)).unwrap();
    }

    fn parent(&self, name: &str) -> FileHandle {
        handle_of(File::open(self.path(name).parent().unwrap()).unwrap()).unwrap()
    }

    fn at<'a>(&self, name: &'a str) -> NameAt<'a> {
        let last = Path::new(name).file_name().unwrap();
        NameAt { parent: self.parent(name), name: last.as_bytes() }
    }

    /// Makes an empty file at `name`, and records it whole, with `content` and attributes.
    fn made(&self, name: &str, content: &str, parent_changed: Timestamp) -> Logged {
        fs::write(self.path(name), b"").unwrap();
        let file = File::open(self.path(name)).unwrap();
        let (identity, handle) = (identity_of(&file).unwrap(), handle_of(&file).unwrap());
        let stat = file.metadata().unwrap();
        let path = self.path(name);
        let definition = Definition {
            identity,
            file_system: file_system_id(&file).unwrap(),
            handle,
            covered: false,
            starts: true,
            size_bytes: 0,
            device: stat.dev(),
            inode: stat.ino(),
            path: path.as_os_str().as_bytes(),
        };
        // Reused inode numbers do not matter here.
        let inode = self.inodes.replace(self.inodes.get() + 1);
        let key = FileKey { device: stat.dev(), inode, identity };
        let entry = self.log.entry_for(&key).unwrap();
        let guard = self.log.lock(entry).unwrap();
        guard.begin_story(&definition, 0).unwrap();
        let mut extended = [0; 64];
        let used = put_extended(b"user.tidegate", b"value", &mut extended).unwrap();
        let attributes = Attributes {
            mode: 0o640,
            owner: stat.uid(),
            group: stat.gid(),
            accessed: SEEN,
            modified: MODIFIED,
            extended: &extended[..used],
        };
        let make = Make { at: self.at(name), parent_changed, attributes };
        let unlogged = guard.unlogged();
        let content = content.as_bytes();
        assert_eq!(guard.make((&make, content, 0), &definition, unlogged, false, true), Ok(true));
        Logged { entry }
    }

    /// Records a change of names, whether the kernel makes it or not.
    fn record(&self, file: Logged, change: &NameChange<'_>, links: u32) {
        let guard = self.log.lock(file.entry).unwrap();
        guard.begin().unwrap().name(&NameRecord { change: *change, links }).unwrap();
    }

    fn rename(&self, file: Logged, from: &str, to: &str, replaced: Option<FileHandle>) {
        let (from, to) = (self.at(from), self.at(to));
        self.record(file, &NameChange::Rename { from, to, replaced }, 1);
    }

    /// Removes the file, as if no commit had included it.
    fn lose(&self, name: &str) {
        fs::remove_file(self.path(name)).unwrap();
    }

    fn pool(&self) -> LogPool {
        LogPool::open(Arc::clone(&self.region)).unwrap()
    }

    fn recover_with(&self, options: ApplyOptions) -> Outcome {
        let files = LocalFiles::new().unwrap();
        recover_pool(&self.pool(), &files, options, &|_| ()).unwrap().unwrap().outcome
    }

    /// Recovers with these times of the session.
    fn recover_dated(&self, dates: Dates, options: ApplyOptions) -> Outcome {
        let (pool, files) = (self.pool(), LocalFiles::new().unwrap());
        let (mut plan, unreadable_bytes) = plan_pool(&pool).unwrap();
        plan.dates = dates;
        let noting = (&pool as _, Some(&pool as _));
        let plan = (&plan, unreadable_bytes);
        apply_noting(plan, noting, &files, options, &|_| (), &mut || Ok(()))
    }

    /// Recovers until the decisions are noted.
    fn note_decisions(&self) {
        let files = LocalFiles::new().unwrap();
        let files = Interrupted { files, calls_left: AtomicUsize::new(0) };
        let stopped = recover_pool(&self.pool(), &files, OPTIONS, &|_| ()).unwrap().unwrap();
        assert!(!stopped.outcome.is_complete());
    }

    /// Recovers twice. The second recovery must change nothing.
    fn recover(&self) -> Outcome {
        let first = self.recover_with(OPTIONS);
        assert!(first.is_complete(), "{:?}", first.failures);
        let names = self.names();
        let second = self.recover_with(OPTIONS);
        assert!(second.is_complete(), "{:?}", second.failures);
        assert_eq!(self.names(), names, "a second recovery changes nothing");
        first
    }

    /// Returns all names with their contents.
    fn names(&self) -> Vec<(String, String)> {
        let entries = fs::read_dir(self.folder.path()).unwrap().map(Result::unwrap);
        let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
        let mut names: Vec<_> = files
            .map(|entry| {
                // A plain read would set the access time.
                let mut options = File::options();
                options.read(true).custom_flags(libc::O_NOATIME);
                let file = options.open(entry.path()).unwrap();
                let content = io::read_to_string(file).unwrap();
                (entry.file_name().into_string().unwrap(), content)
            })
            .collect();
        names.sort();
        names
    }

    fn assert_names(&self, expected: &[(&str, &str)]) {
        let found = self.names();
        let found: Vec<_> =
            found.iter().map(|(name, content)| (name.as_str(), content.as_str())).collect();
        assert_eq!(found, expected);
    }
}

/// Times of a session that ended long before any file of a test was changed.
fn long_ago() -> Dates {
    Dates::new(Some(Heartbeat { wall_ns: 1 << 40, ..Heartbeat::default() }))
}

macro_rules! bed_or_return {
    () => {
        match Bed::new() {
            Some(bed) => bed,
            None => return,
        }
    };
}

#[test]
fn a_file_at_a_name_that_the_log_knows_gets_bytes_attributes_and_its_last_names() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    bed.rename(file, "tmp", "new", None);
    let outcome = bed.recover();
    bed.assert_names(&[("new", "content")]);
    let found = fs::metadata(bed.path("new")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o640);
    assert_eq!((found.mtime(), found.mtime_nsec()), (MODIFIED.s, i64::from(MODIFIED.ns)));
    assert_eq!((outcome.names.made, outcome.names.set, outcome.names.removed), (0, 1, 1));
}

#[test]
fn what_was_written_after_the_record_is_there_too() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    let guard = bed.log.lock(file.entry).unwrap();
    guard.begin().unwrap().write(2, &[io::IoSlice::new(b"NT")], false).unwrap();
    drop(guard);
    bed.recover();
    bed.assert_names(&[("tmp", "coNTent")]);
    bed.lose("tmp");
    // The decision is made: the file is not created a second time.
    assert!(bed.recover_with(OPTIONS).is_complete());
    bed.assert_names(&[]);
}

#[test]
fn a_file_with_names_that_the_log_does_not_explain_gets_its_bytes_only() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    bed.rename(file, "tmp", "new", None);
    fs::rename(bed.path("tmp"), bed.path("elsewhere")).unwrap();
    bed.recover();
    bed.assert_names(&[("elsewhere", "content")]);
}

#[test]
fn a_file_that_is_not_there_is_made_again_with_all_that_it_had() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    bed.rename(file, "tmp", "new", None);
    bed.lose("tmp");
    // Another file may have its inode number now.
    fs::write(bed.path("other"), b"other").unwrap();
    let outcome = bed.recover();
    bed.assert_names(&[("new", "content"), ("other", "other")]);
    let found = fs::metadata(bed.path("new")).unwrap();
    assert_eq!((found.mode() & 0o7777, found.nlink()), (0o640, 1));
    assert_eq!((found.mtime(), found.mtime_nsec()), (MODIFIED.s, i64::from(MODIFIED.ns)));
    assert_eq!((found.atime(), found.uid()), (SEEN.s, rustix::process::getuid().as_raw()));
    let mut value = [0; 16];
    let len = rustix::fs::getxattr(bed.path("new"), "user.tidegate", &mut value[..]).unwrap();
    assert_eq!(&value[..len], b"value");
    assert_eq!((outcome.names.made, outcome.files_gone), (1, 0));
}

#[test]
fn a_file_whose_directory_was_changed_later_was_removed_from_outside() {
    let bed = bed_or_return!();
    bed.made("file", "content", SEEN);
    bed.lose("file");
    let outcome = bed.recover();
    bed.assert_names(&[]);
    assert_eq!((outcome.names.made, outcome.files_gone), (0, 1));
}

#[test]
fn a_directory_that_was_changed_since_the_session_stops_recovery() {
    let bed = bed_or_return!();
    bed.made("file", "content", SEEN);
    bed.lose("file");
    let long_ago = long_ago();
    // The session ended long before the directory was changed, or the log has no times. After a
    // failed write-back the boot is unknown.
    let booted_ns = Some(1 << 40);
    for (dates, booted_ns) in
        [(long_ago, booted_ns), (Dates::default(), booted_ns), (long_ago, None)]
    {
        let outcome = bed.recover_dated(dates, ApplyOptions { booted_ns, ..OPTIONS });
        let failures = &outcome.failures[..];
        assert!(matches!(failures, [Failure::Removed { .. }]), "{failures:?}");
    }
    let salvaged = bed.recover_with(ApplyOptions { salvage: true, booted_ns, ..OPTIONS });
    assert!(salvaged.is_complete(), "{:?}", salvaged.failures);
    bed.assert_names(&[]);
}

#[test]
fn a_file_that_was_unlinked_is_not_made_and_loses_its_name() {
    let bed = bed_or_return!();
    for is_there in [true, false] {
        let file = bed.made("file", "content", UNSEEN);
        bed.record(file, &NameChange::Unlink { from: bed.at("file") }, 0);
        if !is_there {
            bed.lose("file");
        }
        bed.recover();
        bed.assert_names(&[]);
    }
}

#[test]
fn a_file_that_the_log_replaces_is_replaced_whatever_the_disk_has() {
    for is_made in [false, true] {
        let bed = bed_or_return!();
        fs::write(bed.path("old"), b"old").unwrap();
        let old = handle_of(File::open(bed.path("old")).unwrap()).unwrap();
        let file = bed.made("tmp", "content", UNSEEN);
        bed.rename(file, "tmp", "old", Some(old));
        if is_made {
            bed.lose("tmp");
        }
        bed.recover();
        bed.assert_names(&[("old", "content")]);
    }
}

#[test]
fn a_file_that_was_changed_since_the_session_is_neither_replaced_nor_removed() {
    for (is_noted, is_unlinked) in [(false, false), (true, false), (false, true), (true, true)] {
        let bed = bed_or_return!();
        fs::write(bed.path("cfg"), b"old").unwrap();
        let old = handle_of(File::open(bed.path("cfg")).unwrap()).unwrap();
        let file = bed.made("tmp", "logged", UNSEEN);
        bed.rename(file, "tmp", "cfg", Some(old));
        if is_unlinked {
            bed.record(file, &NameChange::Unlink { from: bed.at("cfg") }, 0);
            bed.lose("tmp");
        }
        if is_noted {
            bed.note_decisions();
        }
        fs::write(bed.path("cfg"), b"newer").unwrap();
        let outcome = bed.recover_dated(long_ago(), OPTIONS);
        let failures = &outcome.failures[..];
        let [Failure::Changed { path }] = failures else { panic!("{failures:?}") };
        assert_eq!((&path[..], fs::read(bed.path("cfg")).unwrap()), ("cfg", b"newer".to_vec()));
        let salvaged = bed.recover_dated(long_ago(), ApplyOptions { salvage: true, ..OPTIONS });
        assert!(salvaged.is_complete(), "{:?}", salvaged.failures);
        assert_eq!(fs::read(bed.path("cfg")).unwrap(), b"newer");
    }
}

/// Makes a file in `held` that replaces a changed one, and a missing file in `free`.
fn held_and_free(bed: &Bed) {
    bed.directory("held");
    bed.directory("free");
    fs::write(bed.path("held/cfg"), b"old").unwrap();
    let old = handle_of(File::open(bed.path("held/cfg")).unwrap()).unwrap();
    let file = bed.made("held/tmp", "logged", UNSEEN);
    bed.rename(file, "held/tmp", "held/cfg", Some(old));
    let mail = bed.made("free/tmp", "mail", UNSEEN);
    bed.rename(mail, "free/tmp", "free/new", None);
    bed.lose("free/tmp");
}

fn read(bed: &Bed, name: &str) -> String {
    fs::read_to_string(bed.path(name)).unwrap_or_default()
}

#[test]
fn names_that_fail_hold_back_only_those_that_share_a_file_or_a_directory() {
    let bed = bed_or_return!();
    held_and_free(&bed);
    fs::write(bed.path("held/cfg"), b"newer").unwrap();
    let outcome = bed.recover_dated(long_ago(), OPTIONS);
    let failures = &outcome.failures[..];
    assert!(matches!(failures, [Failure::Changed { path }] if path == "cfg"), "{failures:?}");
    assert_eq!((outcome.names.made, read(&bed, "free/new")), (1, "mail".into()));
    assert_eq!(fs::read_dir(bed.path("free")).unwrap().count(), 1, "no reserved name is left");
    // A program goes on with the names that are done.
    fs::rename(bed.path("free/new"), bed.path("free/cur")).unwrap();
    assert_eq!(bed.recover_dated(long_ago(), OPTIONS).failures.len(), 1);
    // Without times nothing keeps the rest from recovery.
    let outcome = bed.recover_with(OPTIONS);
    assert!(outcome.is_complete(), "{:?}", outcome.failures);
    assert_eq!((read(&bed, "held/cfg"), bed.path("held/tmp").exists()), ("logged".into(), false));
    assert_eq!((read(&bed, "free/cur"), bed.path("free/new").exists()), ("mail".into(), false));
}

#[test]
fn a_directory_that_is_removed_before_a_recovery_is_complete_holds_back_its_group_only() {
    let bed = bed_or_return!();
    held_and_free(&bed);
    bed.note_decisions();
    fs::remove_dir_all(bed.path("held")).unwrap();
    let outcome = bed.recover_with(OPTIONS);
    let failures = &outcome.failures[..];
    assert!(matches!(failures, [Failure::NoDirectory { path }] if path == "cfg"), "{failures:?}");
    assert_eq!(read(&bed, "free/new"), "mail");
    let salvaged = bed.recover_with(ApplyOptions { salvage: true, ..OPTIONS });
    assert!(salvaged.is_complete(), "{:?}", salvaged.failures);
    assert_eq!(salvaged.findings.total(), 1);
}

#[test]
fn reserved_names_of_a_log_that_is_given_up_are_removed() {
    let bed = bed_or_return!();
    bed.made("file", "content", UNSEEN);
    bed.lose("file");
    let pool = bed.pool();
    // The power is lost once the file has its reserved name.
    for calls in 0.. {
        let (files, calls_left) = (LocalFiles::new().unwrap(), AtomicUsize::new(calls));
        let files = Interrupted { files, calls_left };
        recover_pool(&pool, &files, OPTIONS, &|_| ()).unwrap();
        if !bed.names().is_empty() {
            break;
        }
    }
    assert!(bed.names()[0].0.starts_with(".tidegate-"));
    let (plan, _) = plan_pool(&pool).unwrap();
    remove_reserved(&pool, &plan, &LocalFiles::new().unwrap());
    bed.assert_names(&[]);
}

#[test]
fn groups_that_are_decided_one_after_the_other_survive_an_interruption_anywhere() {
    for calls in 0.. {
        let bed = bed_or_return!();
        held_and_free(&bed);
        fs::write(bed.path("held/cfg"), b"newer").unwrap();
        assert_eq!(bed.recover_dated(long_ago(), OPTIONS).failures.len(), 1);
        let (files, calls_left) = (LocalFiles::new().unwrap(), AtomicUsize::new(calls));
        let files = Interrupted { files, calls_left };
        let stopped = recover_pool(&bed.pool(), &files, OPTIONS, &|_| ()).unwrap().unwrap();
        let outcome = bed.recover_with(OPTIONS);
        assert!(outcome.is_complete(), "after {calls} calls: {:?}", outcome.failures);
        assert_eq!(
            (read(&bed, "held/cfg"), read(&bed, "free/new")),
            ("logged".into(), "mail".into())
        );
        if stopped.outcome.is_complete() {
            return;
        }
    }
}

#[test]
fn a_file_with_a_later_time_that_the_session_set_is_replaced() {
    let bed = bed_or_return!();
    fs::write(bed.path("cfg"), b"old").unwrap();
    let old = File::options().write(true).open(bed.path("cfg")).unwrap();
    let modified = old.metadata().unwrap().modified().unwrap();
    old.set_modified(modified + std::time::Duration::from_secs(60)).unwrap();
    let file = bed.made("tmp", "logged", UNSEEN);
    bed.rename(file, "tmp", "cfg", Some(handle_of(&old).unwrap()));
    bed.recover();
    bed.assert_names(&[("cfg", "logged")]);
}

#[test]
fn a_file_that_the_log_does_not_know_keeps_its_name() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    bed.rename(file, "tmp", "new", None);
    fs::write(bed.path("new"), b"foreign").unwrap();
    let outcome = bed.recover();
    bed.assert_names(&[("new", "foreign"), ("tmp", "content")]);
    assert_eq!(outcome.names.taken, ["new"]);
}

#[test]
fn a_name_without_its_directory_is_none() {
    let bed = bed_or_return!();
    fs::create_dir(bed.path("gone")).unwrap();
    bed.made("gone/file", "content", UNSEEN);
    fs::remove_dir_all(bed.path("gone")).unwrap();
    bed.recover();
    bed.assert_names(&[]);
}

#[test]
fn a_directory_that_was_removed_after_an_incomplete_recovery_needs_nothing() {
    let bed = bed_or_return!();
    fs::create_dir(bed.path("gone")).unwrap();
    bed.made("gone/file", "content", UNSEEN);
    bed.lose("gone/file");
    bed.made("kept", "content", UNSEEN);
    bed.lose("kept");
    assert!(bed.recover_with(OPTIONS).is_complete());
    fs::remove_dir_all(bed.path("gone")).unwrap();
    let outcome = bed.recover_with(OPTIONS);
    assert!(outcome.is_complete(), "{:?}", outcome.failures);
    bed.assert_names(&[("kept", "content")]);
}

#[test]
fn a_directory_that_is_elsewhere_is_found() {
    let bed = bed_or_return!();
    fs::create_dir(bed.path("one")).unwrap();
    bed.made("one/file", "content", UNSEEN);
    bed.lose("one/file");
    fs::rename(bed.path("one"), bed.path("two")).unwrap();
    bed.recover();
    assert_eq!(fs::read(bed.path("two/file")).unwrap(), b"content");
}

#[test]
fn a_second_name_is_set_and_the_first_is_removed() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    bed.record(file, &NameChange::Link { to: bed.at("new") }, 2);
    bed.record(file, &NameChange::Unlink { from: bed.at("tmp") }, 1);
    bed.lose("tmp");
    bed.recover();
    bed.assert_names(&[("new", "content")]);
}

#[test]
fn a_record_that_was_voided_or_has_left_does_not_count() {
    let bed = bed_or_return!();
    let voided = bed.made("voided", "content", UNSEEN);
    let guard = bed.log.lock(voided.entry).unwrap();
    let mut ticket = guard.begin().unwrap();
    let change = NameChange::Unlink { from: bed.at("voided") };
    let position = ticket.name(&NameRecord { change, links: 0 }).unwrap();
    ticket.void(position).unwrap();
    drop(ticket);
    drop(guard);
    let left = bed.made("left", "content", UNSEEN);
    bed.rename(left, "left", "right", None);
    bed.log.lock(left.entry).unwrap().end_story().unwrap();
    bed.recover();
    bed.assert_names(&[("left", ""), ("voided", "content")]);
}

/// Files whose calls fail after some number, as at the next power cut.
struct Interrupted {
    files: LocalFiles,
    calls_left: AtomicUsize,
}

impl Interrupted {
    fn call<R>(&self, call: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        let left = self.calls_left.load(Ordering::Relaxed);
        let left = left.checked_sub(1).ok_or(io::ErrorKind::Interrupted)?;
        self.calls_left.store(left, Ordering::Relaxed);
        call()
    }
}

impl FileSystem for Interrupted {
    type File = File;

    fn open(&self, file: &FilePlan, access: Access) -> Result<Option<File>, Failure> {
        self.files.open(file, access)
    }

    fn state(&self, file: &File) -> io::Result<FileState> {
        self.files.state(file)
    }

    fn written(&self, file: &File, size_bytes: u64) -> io::Result<Ranges> {
        self.files.written(file, size_bytes)
    }

    fn set_size(&self, file: &File, size_bytes: u64) -> io::Result<()> {
        self.call(|| self.files.set_size(file, size_bytes))
    }

    fn write(&self, file: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        self.call(|| file.write_all_at(data, offset))
    }

    fn zero(&self, file: &File, offset: u64, len: u64) -> io::Result<()> {
        self.call(|| self.files.zero(file, offset, len))
    }

    fn start_sync(&self, _: &File, _: u64, _: u64) {}

    fn sync(&self, _: &File) -> io::Result<()> {
        self.call(|| Ok(()))
    }

    fn names(&self) -> Option<&dyn NameSystem<File>> {
        Some(self)
    }
}

impl NameSystem<File> for Interrupted {
    fn directory(&self, place: &Place) -> io::Result<Option<File>> {
        self.files.directory(place)
    }

    fn file(&self, file: &NamedFile) -> io::Result<Option<File>> {
        self.files.file(file)
    }

    fn identity_at(&self, directory: &File, name: &[u8]) -> io::Result<Option<u64>> {
        self.files.identity_at(directory, name)
    }

    fn links(&self, file: &File) -> io::Result<u64> {
        self.files.links(file)
    }

    fn modified(&self, file: &File) -> io::Result<Timestamp> {
        self.files.modified(file)
    }

    fn changed(&self, directory: &File) -> io::Result<Timestamp> {
        self.files.changed(directory)
    }

    fn make(&self, directory: &File) -> io::Result<File> {
        self.call(|| self.files.make(directory))
    }

    fn set_attributes(&self, file: &File, made: &MadeFile, with_times: bool) -> io::Result<()> {
        self.call(|| self.files.set_attributes(file, made, with_times))
    }

    fn link(&self, file: &File, directory: &File, name: &[u8]) -> io::Result<()> {
        self.call(|| self.files.link(file, directory, name))
    }

    fn rename(&self, directory: &File, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.call(|| self.files.rename(directory, from, to))
    }

    fn open_at(&self, directory: &File, name: &[u8]) -> io::Result<File> {
        self.files.open_at(directory, name)
    }

    fn unlink(&self, directory: &File, name: &[u8]) -> io::Result<()> {
        self.call(|| self.files.unlink(directory, name))
    }

    fn commit(&self, _: &File) -> io::Result<()> {
        self.call(|| Ok(()))
    }
}

/// Makes two files that swap names over a third name, one missing file, one that replaces another,
/// and one that is unlinked.
fn mixed(bed: &Bed) {
    let (one, two) = (bed.made("one", "1", UNSEEN), bed.made("two", "2", UNSEEN));
    bed.rename(one, "one", "three", None);
    bed.rename(two, "two", "one", None);
    bed.rename(one, "three", "two", None);
    fs::write(bed.path("old"), b"old").unwrap();
    let old = handle_of(File::open(bed.path("old")).unwrap()).unwrap();
    let four = bed.made("four", "4", UNSEEN);
    bed.rename(four, "four", "old", Some(old));
    let five = bed.made("five", "5", UNSEEN);
    bed.record(five, &NameChange::Unlink { from: bed.at("five") }, 0);
    bed.lose("two");
}

#[test]
fn a_recovery_that_was_interrupted_anywhere_is_completed_by_the_next() {
    let expected = [("old", "4"), ("one", "2"), ("two", "1")];
    for calls in 0.. {
        let bed = bed_or_return!();
        mixed(&bed);
        let (files, calls_left) = (LocalFiles::new().unwrap(), AtomicUsize::new(calls));
        let files = Interrupted { files, calls_left };
        let pool = bed.pool();
        let is_whole = {
            let (plan, unreadable_bytes) = plan_pool(&pool).unwrap();
            let begin = &mut || Ok(());
            let plan = (&plan, unreadable_bytes);
            apply_noting(plan, (&pool, Some(&pool)), &files, OPTIONS, &|_| (), begin).is_complete()
        };
        for name in ["one", "two", "three"] {
            let found = fs::read_to_string(bed.path(name));
            let is_half = found.is_ok_and(|content| content.is_empty() && name == "two");
            assert!(!is_half, "after {calls} calls a file is seen that is half made");
        }
        let outcome = bed.recover_with(OPTIONS);
        assert!(outcome.is_complete(), "after {calls} calls: {:?}", outcome.failures);
        bed.assert_names(&expected);
        let permissions = fs::metadata(bed.path("one")).unwrap().permissions();
        assert_eq!(permissions.mode() & 0o7777, 0o640, "after {calls} calls");
        if is_whole {
            assert!(calls > 20, "it has more calls than that");
            return;
        }
    }
}

#[test]
fn a_file_that_is_to_be_made_again_is_not_made_of_a_damaged_record() {
    let bed = bed_or_return!();
    let file = bed.made("tmp", "content", UNSEEN);
    bed.rename(file, "tmp", "new", None);
    bed.lose("tmp");
    let pool = bed.pool();
    let mut records = bed.log.ring().records(bed.log.ring().tail(), bed.log.ring().head());
    let made = records.find(|it| it.kind == crate::log::RecordKind::Make).unwrap();
    let (content, _) = pool.content_of(&made).unwrap().unwrap();
    bed.region.write(pool.region_offset(content), b"#").unwrap();
    let outcome = bed.recover_with(OPTIONS);
    bed.assert_names(&[]);
    assert!(matches!(outcome.failures[..], [Failure::Damaged { .. }]), "{:?}", outcome.failures);
}
