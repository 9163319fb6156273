//! The library in a real process: this test runs itself again with the library preloaded, and looks
//! at what the log has afterwards. The supervisor's part is played by a thread. The files are in a
//! tmpfs, which every machine has; it does not tell extents, so that every write to a covered file
//! counts as growth.
#![allow(unsafe_code)] // calls of the C library that the standard library does not make

#[path = "../../tidegate-cli/tests/support/built.rs"]
mod built;

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Once};
use std::time::Duration;

use tempfile::TempDir;
use tidegate::log::{
    self, CONTROL_BYTES, Counter, Log, LogOptions, LogPool, RecordKind, Ring, Scanner,
};
use tidegate::pmem::{Region, RegionOptions, SharedMemory};
use tidegate_interpose::library::Symbols;

/// Names what the test does when it runs again.
const PART: &str = "TIDEGATE_TEST_PART";
/// Where it does that.
const DIRECTORY: &str = "TIDEGATE_TEST_DIRECTORY";

/// A log with a supervisor, and a directory for files.
struct World {
    log: Log,
    memory: TempDir,
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = RegionOptions { create_bytes: Some(4 << 20), ..RegionOptions::default() };
        let region = Arc::new(Region::open(&memory.path().join("pool"), &options).unwrap());
        log::create(&region, &LogOptions::default()).unwrap();
        let pool = LogPool::open(region).unwrap();
        let ring_bytes = pool.ring_bytes();
        let control = SharedMemory::create(&memory.path().join("control"), CONTROL_BYTES).unwrap();
        let log = Ring::start(pool, control, ring_bytes).map(Log::over).unwrap();
        Self { log, memory, directory: tempfile::tempdir_in("/dev/shm").unwrap() }
    }

    /// Runs a part of this test with the library preloaded: the records that it leaves, in words.
    fn run(&self, part: &str) -> String {
        let from = self.log.ring().head();
        let stop = AtomicBool::new(false);
        let mut command = self.command(part);
        let (supervised, is_supervised) = std::sync::mpsc::channel();
        let status = std::thread::scope(|scope| {
            scope.spawn(|| self.supervise(&stop, &supervised));
            is_supervised.recv().unwrap();
            let status = command.status();
            stop.store(true, Ordering::SeqCst);
            self.log.ring().wake_cleaner();
            status.unwrap()
        });
        assert!(status.success(), "{part}: {status}");
        let records = Scanner::new(self.log.ring().pool(), from, self.log.ring().head());
        let words = records.filter(|header| header.kind != RecordKind::Define).map(|header| {
            let kind = format!("{:?}", header.kind).to_lowercase();
            format!("{kind}:{}", header.offset)
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn command(&self, part: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "again", "--nocapture", "--test-threads=1"])
            .env(PART, part)
            .env(DIRECTORY, self.directory.path())
            .env("LD_PRELOAD", library())
            .env("TIDEGATE_INCLUDE_TMPFS", "1")
            // However young the file is.
            .env("TIDEGATE_COVER_AFTER", "2")
            // This program makes system calls of its own, of other files.
            .env("TIDEGATE_TRUST", std::env::current_exe().unwrap().canonicalize().unwrap())
            .env("TIDEGATE_POOL", self.memory.path().join("pool"))
            .env("TIDEGATE_CONTROL", self.memory.path().join("control"));
        command
    }

    /// Holds what is asked for, and retires what is to be retired: the files are on the disk as far
    /// as this test is concerned.
    fn supervise(&self, stop: &AtomicBool, supervised: &Sender<()>) {
        let _supervision = self.log.ring().supervise(Duration::from_secs(1)).unwrap();
        supervised.send(()).unwrap();
        while !stop.load(Ordering::SeqCst) {
            let seen = self.log.ring().work();
            for file in self.log.take_wanted_kept() {
                self.log.note_kept(file, true);
            }
            if self.log.ring().wanted() > self.log.ring().tail() {
                self.log.ring().retire_to(self.log.ring().safe_position()).unwrap();
            }
            self.log.ring().wait_for_work(seen, u64::MAX, Some(Duration::from_millis(20)));
        }
    }

    fn total(&self, counter: Counter) -> u64 {
        self.log.ring().stats().total(counter)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.path().join(name)).unwrap()
    }
}

/// The library, which cargo builds for no test that does not link it.
fn library() -> PathBuf {
    static BUILT: Once = Once::new();
    BUILT.call_once(built::build_tidegate);
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("libtidegate_preload.so")
}

/// Not a test by itself: what the others run with the library preloaded.
#[test]
fn again() {
    let (Some(part), Some(directory)) = (std::env::var_os(PART), std::env::var_os(DIRECTORY))
    else {
        return;
    };
    let directory = PathBuf::from(directory);
    match part.to_str().unwrap() {
        "append" => append(&directory),
        "rename" => rename(&directory),
        "stream" => stream(&directory),
        "truncate" => truncate(&directory),
        "never" => never(&directory),
        "fork" => fork(&directory),
        "rights" => rights(&directory),
        "exec" => exec(&directory),
        "refused" => refused(&directory),
        other => panic!("no part {other}"),
    }
}

/// Makes the file, and has it covered by a sync: one of many, for the supervisor may be late on a
/// busy machine. Nothing is pending then.
fn covered(directory: &Path, name: &str) -> File {
    let mut file = File::create(directory.join(name)).unwrap();
    file.write_all(b"file").unwrap();
    for _ in 0..20 {
        file.sync_data().unwrap();
    }
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::syncfs(file.as_raw_fd()) }, 0);
    file
}

fn append(directory: &Path) {
    let mut file = covered(directory, "file");
    for _ in 0..2 {
        file.write_all(b"more").unwrap();
        file.sync_data().unwrap();
    }
    file.write_all_at(b"FI", 0).unwrap();
    file.sync_data().unwrap();
}

#[test]
fn syncs_of_a_covered_file_cost_a_mark_or_nothing() {
    let world = World::new();
    assert_eq!(world.run("append"), "write:4 mark:8 write:8 mark:12 write:0 mark:12");
    assert_eq!(world.read("file"), "FIlemoremore");
    assert_eq!(world.total(Counter::SyncsPending), 0);
}

fn rename(directory: &Path) {
    let mut file = covered(directory, "file");
    file.write_all(b"more").unwrap();
    file.sync_data().unwrap();
    fs::rename(directory.join("file"), directory.join("other")).unwrap();
    file.write_all_at(b"FI", 0).unwrap();
    file.sync_data().unwrap();
    file.sync_data().unwrap();
}

#[test]
fn a_sync_after_a_rename_of_the_file_is_real() {
    let world = World::new();
    assert_eq!(world.run("rename"), "write:4 mark:8 write:0 mark:8");
    assert_eq!(world.total(Counter::SyncsOwn), 1);
}

fn stream(directory: &Path) {
    let file = covered(directory, "file");
    let path = CString::new(directory.join("file").as_os_str().as_bytes()).unwrap();
    // SAFETY: terminated strings.
    let stream = unsafe { libc::fopen(path.as_ptr(), c"r+".as_ptr()) };
    // SAFETY: a stream that is open, and a terminated string.
    unsafe { libc::fputs(c"FILE".as_ptr(), stream) };
    // SAFETY: a stream that is open.
    unsafe { libc::fflush(stream) };
    file.write_all_at(b"data", 4).unwrap();
    // SAFETY: a stream that is open.
    unsafe { libc::fclose(stream) };
    for _ in 0..20 {
        file.sync_data().unwrap();
    }
    file.write_all_at(b"back", 8).unwrap();
}

#[test]
fn a_file_leaves_while_a_stream_is_open_on_it() {
    let world = World::new();
    assert_eq!(world.run("stream"), "end:0 write:8", "the sync after it covers the file again");
    assert_eq!(world.read("file"), "FILEdataback");
}

fn truncate(directory: &Path) {
    let file = covered(directory, "file");
    file.write_all_at(b"more", 4).unwrap();
    file.sync_data().unwrap();
    file.set_len(2).unwrap();
    file.sync_data().unwrap();
    File::create(directory.join("file")).unwrap();
}

#[test]
fn truncations_are_recorded_while_nothing_is_pending() {
    let world = World::new();
    assert_eq!(world.run("truncate"), "write:4 mark:8 setsize:2 mark:2 setsize:0");
    assert_eq!(world.read("file"), "");
}

fn never(directory: &Path) {
    for name in ["one", "two"] {
        fs::write(directory.join(name), name).unwrap();
        fs::write(directory.join(name), "again").unwrap();
    }
    fs::rename(directory.join("one"), directory.join("two")).unwrap();
}

#[test]
fn a_program_that_never_syncs_leaves_no_record() {
    let world = World::new();
    assert_eq!(world.run("never"), "");
    assert_eq!(world.read("two"), "again");
    assert_eq!(world.total(Counter::SyncsReal), 0);
}

fn fork(directory: &Path) {
    let file = covered(directory, "file");
    // SAFETY: the child only writes, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let written = file.write_all_at(b"kind", 4);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(written.is_err())) };
    }
    let mut status = -1;
    // SAFETY: memory for the answer.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    file.write_all_at(b"file", 8).unwrap();
}

#[test]
fn a_forked_child_logs_too() {
    let world = World::new();
    assert_eq!(world.run("fork"), "write:4 write:8");
    assert_eq!(world.read("file"), "filekindfile");
}

/// Whether the process has a part of the log's memory mapped.
fn has_log_mapped() -> bool {
    let pool = std::env::var("TIDEGATE_POOL").unwrap();
    fs::read_to_string("/proc/self/maps").unwrap().contains(&pool)
}

fn rights(directory: &Path) {
    let file = covered(directory, "file");
    assert!(has_log_mapped());
    // SAFETY: no pointers.
    let group = unsafe { libc::getegid() };
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::setgid(group) }, 0, "that changes nothing");
    assert!(has_log_mapped());
    // SAFETY: no pointers. A capability that this test does not need.
    unsafe { libc::prctl(libc::PR_CAPBSET_DROP, 30, 0, 0, 0) };
    assert!(!has_log_mapped());
    file.write_all_at(b"data", 4).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_process_that_gives_up_rights_gives_up_the_log() {
    let world = World::new();
    assert_eq!(world.run("rights"), "");
    assert_eq!(world.read("file"), "filedata");
    assert!(world.log.processes().is_suspended(), "there was nobody to ask");
    assert!(world.log.ring().tail() >= world.log.ring().head(), "all is on the disk");
}

fn exec(directory: &Path) {
    let file = covered(directory, "file");
    // A program of another machine, as far as this one can tell: it cannot be watched.
    let foreign = directory.join("foreign");
    fs::write(&foreign, b"\x7fELF and nothing else").unwrap();
    fs::set_permissions(&foreign, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    Command::new(&foreign).status().unwrap_err();
    file.write_all_at(b"data", 4).unwrap();
    file.sync_data().unwrap();
}

#[test]
fn before_a_program_starts_that_cannot_be_watched_all_files_leave() {
    let world = World::new();
    assert_eq!(world.run("exec"), "end:0");
    assert!(world.log.processes().is_suspended(), "there was nobody to tell that it did not start");
}

fn refused(directory: &Path) {
    let file = covered(directory, "file");
    let (len, flags) = (4096, libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = std::ptr::null_mut();
    // SAFETY: the kernel refuses it on a disk, or maps new memory.
    let mapped = unsafe { libc::mmap(at, len, protection, flags, file.as_raw_fd(), 0) };
    assert_eq!(mapped, libc::MAP_FAILED);
    for _ in 0..20 {
        file.sync_data().unwrap();
    }
    file.write_all_at(b"data", 4).unwrap();
}

#[test]
fn a_mapping_that_the_kernel_refuses_pins_nothing() {
    let world = World::new();
    assert_eq!(world.run("refused"), "end:0 write:4");
}

/// All that the library asks of other objects by a name, which a program may have defined. What it
/// asks of the C library beside that it finds by [`tidegate_interpose::symbols`].
const ASKED_BY_NAME: &str = "
    malloc calloc realloc free posix_memalign memcpy memmove memset memcmp bcmp strlen
    environ stdout stderr _r_debug __errno_location __tls_get_addr __register_atfork
    __cxa_finalize __cxa_thread_atexit_impl __gmon_start__ _ITM_deregisterTMCloneTable
    _ITM_registerTMCloneTable
    pthread_key_create pthread_key_delete pthread_setspecific pthread_testcancel
    pthread_mutex_clocklock pthread_mutex_consistent pthread_mutex_init pthread_mutex_trylock
    pthread_mutex_unlock pthread_mutexattr_init pthread_mutexattr_setpshared
    pthread_mutexattr_setrobust pthread_mutexattr_settype
    clock_gettime clock_nanosleep sched_yield gettid getauxval
    stat64 fstat64 statx read lseek64 poll readlink realpath getcwd getenv getrandom sysconf
    abort raise __xpg_strerror_r dl_iterate_phdr _Unwind_Backtrace _Unwind_GetDataRelBase
    _Unwind_GetIP _Unwind_GetIPInfo _Unwind_GetLanguageSpecificData _Unwind_GetRegionStart
    _Unwind_GetTextRelBase _Unwind_RaiseException _Unwind_Resume _Unwind_SetGR _Unwind_SetIP";

/// In the order of the list: memory; data and what the compiler needs; threads and time; files that
/// are looked at when the library is loaded; panics. None of them has a hook.
#[test]
fn few_functions_are_asked_by_a_name_that_a_program_may_define() {
    let file = File::open(library()).unwrap();
    let symbols = Symbols::of(|at, out| file.read_at(out, at).unwrap()).unwrap();
    let mut asked: Vec<_> =
        symbols.referred.iter().map(|name| str::from_utf8(name).unwrap()).collect();
    asked.sort_unstable();
    asked.dedup();
    assert!(asked.contains(&"malloc"), "{asked:?}");
    asked.retain(|name| !ASKED_BY_NAME.split_whitespace().any(|allowed| allowed == *name));
    assert!(asked.is_empty(), "{asked:?}");
    let defined = symbols.defined.iter().map(|name| str::from_utf8(name).unwrap());
    let hooks: Vec<_> = defined.collect();
    let has_hook = |name: &&str| hooks.contains(name);
    assert!(has_hook(&"write") && has_hook(&"dlsym") && has_hook(&"io_uring_setup"), "{hooks:?}");
    // The linker itself refers to names with an underline, weakly.
    let mut functions = ASKED_BY_NAME.split_whitespace().filter(|name| !name.starts_with('_'));
    assert_eq!(functions.find(has_hook), None);
}
