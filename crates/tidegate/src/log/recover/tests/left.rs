//! Files of this machine that cannot be recovered now. All other files are recovered, no file is
//! restored twice, and recovery restores the attributes that it changes, wherever it is
//! interrupted.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use proptest::collection::vec;
use proptest::prelude::*;
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};

use super::super::apply::apply_noting;
use super::pool::{Bed, OPTIONS, write};
use crate::log::recover::{
    Access, ApplyOptions, Failure, FilePlan, FileState, FileSystem, LocalFiles, Notes, Outcome,
    Ranges, Saved, plan_pool,
};
use crate::log::{LogPool, RecordKind};

/// The capability `cap_net_bind_service`, as `setcap` sets it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const BEFORE: &str = "........";
const AFTER: &str = "LOGGED..";
const CHANGED: &str = "changed.";

/// The fault that keeps a file from being restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Open(i32),
    Write(i32),
    Sync(i32),
}

fn fault() -> impl Strategy<Value = Fault> {
    let errno = prop::sample::select(vec![
        libc::ETXTBSY,
        libc::EACCES,
        libc::EPERM,
        libc::EROFS,
        libc::ENOSPC,
        libc::EDQUOT,
        libc::EAGAIN,
        libc::EIO,
    ]);
    prop_oneof![
        3 => Just(Fault::None),
        1 => errno.clone().prop_map(Fault::Open),
        1 => errno.clone().prop_map(Fault::Write),
        1 => errno.prop_map(Fault::Sync),
    ]
}

/// One recovery.
#[derive(Debug, Clone)]
struct Run {
    faults: Vec<Fault>,
    /// Calls until the power is lost, if it is.
    calls: Option<usize>,
}

fn run(files: usize) -> impl Strategy<Value = Run> {
    (vec(fault(), files), prop::option::of(0_usize..60))
        .prop_map(|(faults, calls)| Run { faults, calls })
}

/// The files and the pool of a machine with faults.
struct Faulty<'a> {
    files: LocalFiles,
    pool: &'a LogPool,
    run: &'a Run,
    inodes: &'a [u64],
    calls_left: AtomicUsize,
}

impl Faulty<'_> {
    fn call<R>(&self, call: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        let left = self.calls_left.load(Ordering::Relaxed);
        let left = left.checked_sub(1).ok_or(io::ErrorKind::Interrupted)?;
        self.calls_left.store(left, Ordering::Relaxed);
        call()
    }

    /// Returns whether the power is lost.
    fn is_off(&self) -> bool {
        self.calls_left.load(Ordering::Relaxed) == 0
    }

    fn fault_of(&self, file: &File) -> Fault {
        let inode = file.metadata().unwrap().ino();
        let at = self.inodes.iter().position(|it| *it == inode);
        at.map_or(Fault::None, |at| self.run.faults[at])
    }

    fn fail(errno: i32) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(errno))
    }
}

impl FileSystem for Faulty<'_> {
    type File = File;

    fn open(&self, file: &FilePlan, access: Access) -> Result<Option<File>, Failure> {
        let opened = self.files.open(file, access)?;
        match opened.as_ref().map(|opened| self.fault_of(opened)) {
            Some(Fault::Open(errno)) if access == Access::Write => Err(Failure::Io {
                path: file.name(),
                doing: "open the file",
                source: io::Error::from_raw_os_error(errno),
            }),
            _ => Ok(opened),
        }
    }

    fn state(&self, file: &File) -> io::Result<FileState> {
        self.files.state(file)
    }

    fn written(&self, file: &File, size_bytes: u64) -> io::Result<Ranges> {
        self.files.written(file, size_bytes)
    }

    fn saved(&self, file: &File) -> io::Result<Saved> {
        self.files.saved(file)
    }

    fn unlock(&self, file: &File, saved: &Saved) -> io::Result<()> {
        self.call(|| self.files.unlock(file, saved))
    }

    fn restore(&self, file: &File, saved: &Saved, is_made: bool) -> io::Result<()> {
        self.call(|| self.files.restore(file, saved, is_made))
    }

    fn read(&self, file: &File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.files.read(file, offset, buf)
    }

    fn set_size(&self, file: &File, size_bytes: u64) -> io::Result<()> {
        self.call(|| self.files.set_size(file, size_bytes))
    }

    fn write(&self, file: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Fault::Write(errno) = self.fault_of(file) {
            // A part of the data may be written.
            self.call(|| file.write_all_at(&data[..data.len() / 2], offset))?;
            return Self::fail(errno);
        }
        self.call(|| file.write_all_at(data, offset))
    }

    fn zero(&self, file: &File, offset: u64, len: u64) -> io::Result<()> {
        self.call(|| self.files.zero(file, offset, len))
    }

    fn start_sync(&self, _: &File, _: u64, _: u64) {}

    fn sync(&self, file: &File) -> io::Result<()> {
        match self.fault_of(file) {
            Fault::Sync(errno) => Self::fail(errno),
            _ => self.call(|| Ok(())),
        }
    }
}

impl Notes for Faulty<'_> {
    fn note(&self, kind: RecordKind, offset: u64, payload: &[u8]) -> io::Result<()> {
        self.call(|| self.pool.note(kind, offset, payload))
    }

    fn reserved_name(&self, identity: u64) -> Vec<u8> {
        self.pool.reserved_name(identity)
    }
}

fn name(number: usize) -> String {
    format!("file{number}")
}

/// Returns mode, capability and modification time of a file.
fn attributes(file: &File) -> (u32, Vec<u8>, SystemTime) {
    let metadata = file.metadata().unwrap();
    let mut capability = [0; 64];
    let len = fgetxattr(file, "security.capability", &mut capability[..]).unwrap_or(0);
    (metadata.mode() & 0o7777, capability[..len].to_vec(), metadata.modified().unwrap())
}

fn recover(bed: &Bed, run: &Run, inodes: &[u64]) -> (Outcome, bool) {
    let pool = bed.pool();
    let files = LocalFiles::new().unwrap();
    let calls_left = AtomicUsize::new(run.calls.unwrap_or(usize::MAX));
    let faulty = Faulty { files, pool: &pool, run, inodes, calls_left };
    let (plan, unreadable_bytes) = plan_pool(&pool).unwrap();
    // One worker, so that a run depends on its seed alone.
    let options = ApplyOptions { workers: 1, booted_ns: Some(i128::MAX), ..OPTIONS };
    let begin = &mut || faulty.call(|| Ok(()));
    let noting = (&pool as _, Some(&faulty as _));
    let outcome = apply_noting((&plan, unreadable_bytes), noting, &faulty, options, &|_| (), begin);
    let is_off = faulty.is_off();
    (outcome, is_off)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn each_file_is_restored_once_with_all_that_it_had(
        modes in vec(prop::sample::select(vec![0o644, 0o444, 0o4755, 0o6711, 0o400]), 3),
        with_capability in vec(any::<bool>(), 3),
        runs in vec(run(3), 0..5),
    ) {
        let bed = Bed::new();
        let mut had = Vec::new();
        let mut inodes = Vec::new();
        for (number, mode) in modes.iter().enumerate() {
            let name = name(number);
            bed.covered(&name, 8, |guard| write(guard, 0, "LOGGED", false));
            let file = File::options().write(true).open(bed.path(&name)).unwrap();
            fs::set_permissions(bed.path(&name), fs::Permissions::from_mode(*mode)).unwrap();
            if with_capability[number] {
                // Only root may set it.
                let flags = XattrFlags::empty();
                let _ = fsetxattr(&file, "security.capability", &CAPABILITY, flags);
            }
            let modified = SystemTime::UNIX_EPOCH + Duration::new(1_000_000, 7);
            file.set_modified(modified).unwrap();
            had.push(attributes(&file));
            inodes.push(file.metadata().unwrap().ino());
        }
        let mut is_changed = [false; 3];
        let all = Run { faults: vec![Fault::None; 3], calls: None };
        for run in runs.iter().chain([&all]) {
            let (outcome, is_off) = recover(&bed, run, &inodes);
            if is_off {
                continue;
            }
            let is_left = |number: &usize| {
                let path = name(*number);
                outcome.failures.iter().any(|failure| failure.to_string().contains(&path))
            };
            for number in (0..3).filter(|number| !is_left(number)) {
                let expected = if is_changed[number] { CHANGED } else { AFTER };
                prop_assert_eq!(bed.content(&name(number)), expected);
                let file = File::open(bed.path(&name(number))).unwrap();
                if !is_changed[number] {
                    prop_assert_eq!(&attributes(&file), &had[number]);
                }
            }
            if outcome.is_complete() {
                break;
            }
            // A program continues with the restored files.
            for number in (0..3).filter(|number| !is_left(number)) {
                is_changed[number] = true;
                fs::write(bed.path(&name(number)), CHANGED).unwrap();
            }
        }
    }
}

#[test]
fn a_file_that_cannot_be_written_to_and_has_all_is_recovered() {
    let bed = Bed::new();
    bed.covered("file0", 8, |guard| write(guard, 0, "LOGGED", false));
    let inodes = [fs::metadata(bed.path("file0")).unwrap().ino()];
    let run = Run { faults: vec![Fault::Open(libc::ETXTBSY)], calls: None };
    let (outcome, _) = recover(&bed, &run, &inodes);
    let [failure] = &outcome.failures[..] else { panic!("{:?}", outcome.failures) };
    assert!(failure.leaves_one_file() && failure.to_string().contains("end the program"));
    assert_eq!(bed.content("file0"), BEFORE);
    fs::write(bed.path("file0"), AFTER).unwrap();
    let (outcome, _) = recover(&bed, &run, &inodes);
    assert!(outcome.is_complete(), "{:?}", outcome.failures);
}

#[test]
fn what_is_left_and_changed_after_the_boot_is_refused_and_what_recovery_changed_is_not() {
    let bed = Bed::new();
    for name in ["file0", "file1"] {
        bed.covered(name, 8, |guard| write(guard, 0, "LOGGED", false));
    }
    let inode = |name: &str| fs::metadata(bed.path(name)).unwrap().ino();
    let inodes = [inode("file0"), inode("file1")];
    let faults = vec![Fault::Open(libc::ETXTBSY), Fault::Write(libc::EIO)];
    let (outcome, _) = recover(&bed, &Run { faults, calls: None }, &inodes);
    assert_eq!(outcome.failures.len(), 2, "{:?}", outcome.failures);
    let pool = bed.pool();
    let (plan, _) = plan_pool(&pool).unwrap();
    let begun: Vec<_> = plan.files().iter().map(|file| file.begun.is_some()).collect();
    assert_eq!(begun, [false, true], "the first one was not touched");
    for name in ["file0", "file1"] {
        // This time is later than any that the session can have left.
        let file = File::options().write(true).open(bed.path(name)).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified + Duration::from_secs(60)).unwrap();
    }
    let options = ApplyOptions { booted_ns: Some(0), ..OPTIONS };
    let outcome = bed.recover_with(options);
    let [Failure::Changed { path }] = &outcome.failures[..] else {
        panic!("{:?}", outcome.failures)
    };
    assert!(path.ends_with("file0"), "{path}");
    assert_eq!((bed.content("file0"), bed.content("file1")), (BEFORE.into(), AFTER.into()));
}
