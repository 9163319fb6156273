//! The commands around a log pool: what `run`, its supervisor, `recover`, `flush` and `stat` do,
//! whichever process is killed.
//!
//! The programs here are this test itself: it joins the log as the preload library does, and so can
//! stop between any two steps. What real programs see is tried elsewhere.

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Read};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use rustix::fd::OwnedFd;
use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tidegate::log::recover::{file_system_id, handle_of, identity_of};
use tidegate::log::{Change, CoverState, Definition, FileGuard, FileKey, Log, Ring};

use support::{ok, scratch, tidegate};

/// A file system for files, and a directory for a pool in memory.
struct Place {
    files: PathBuf,
    // Unmounted when it is dropped.
    _small: support::small::Small,
    _pool: TempDir,
}

impl Place {
    fn path(&self) -> &Path {
        &self.files
    }
}

/// A place, and the path of a pool that is not there yet. What `run` needs is built.
fn place() -> (Place, PathBuf) {
    support::preload_library();
    let (small, pool_dir) = (support::small::Small::new("256M"), scratch());
    let pool = pool_dir.path().join("pool");
    (Place { files: small.mount_point(), _small: small, _pool: pool_dir }, pool)
}

/// A running `tidegate run`, whose program lives until [`Session::end`].
struct Session {
    launcher: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    pool: PathBuf,
    control: PathBuf,
    socket: PathBuf,
}

impl Session {
    fn start(pool: &Path, args: &[&str]) -> Self {
        let mut command = tidegate();
        command.args(["run", "--pool"]).arg(pool).args(args);
        if !args.contains(&"--size") {
            command.args(["--size", "8M"]);
        }
        command.args(["--", "sh", "-c", "echo $TIDEGATE_CONTROL; echo $TIDEGATE_SOCKET; exec cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut launcher = command.spawn().expect("the launcher starts");
        let stdin = launcher.stdin.take();
        let mut stdout = BufReader::new(launcher.stdout.take().expect("its output is piped"));
        let mut path = || {
            let mut line = String::new();
            stdout.read_line(&mut line).expect("the program prints text");
            PathBuf::from(line.trim_end())
        };
        let (control, socket) = (path(), path());
        let mut session =
            Self { launcher, stdin, stdout, pool: pool.to_path_buf(), control, socket };
        let has_started = session.control.is_absolute();
        assert!(has_started, "the program did not start: {}", session.stderr());
        session
    }

    fn stderr(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.launcher.stderr.take() {
            stderr.read_to_string(&mut text).expect("errors are text");
        }
        text
    }

    /// Ends the program, waits for the launcher, and hands back what it printed on standard error.
    fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.launcher), Signal::CONT).unwrap();
        drop(self.stdin.take());
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).expect("the program prints text");
        let stderr = self.stderr();
        let status = self.launcher.wait().expect("the launcher can be waited for");
        assert!(status.success(), "{status}: {stderr}");
        stderr
    }

    /// The supervisor: it listens at the socket.
    fn supervisor(&self) -> Pid {
        let socket = self.connect();
        // A process that ends without a message announces itself.
        let request = br#"{"request":"stat"}"#;
        rustix::net::send(&socket, request, rustix::net::SendFlags::NOSIGNAL).unwrap();
        rustix::net::sockopt::socket_peercred(&socket).expect("who listens is known").pid
    }

    fn connect(&self) -> OwnedFd {
        let socket = new_socket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&self.socket).unwrap()).unwrap();
        socket
    }

    /// Kills the supervisor and waits until the kernel has cleaned up after it; the launcher is
    /// stopped, so that nobody replaces it.
    fn kill_supervisor(&self) {
        let launcher = Pid::from_child(&self.launcher);
        kill_process(launcher, Signal::STOP).unwrap();
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        rustix::process::waitid(WaitId::Pid(launcher), options).unwrap();
        let supervisor = self.supervisor();
        let handle =
            rustix::process::pidfd_open(supervisor, rustix::process::PidfdFlags::empty()).unwrap();
        kill_process(supervisor, Signal::KILL).unwrap();
        let mut handles = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
        retry_on_intr(|| rustix::event::poll(&mut handles, None)).unwrap();
    }

    /// Kills the launcher, and ends the program with it; returns when that is gone.
    fn kill_program(mut self) {
        let launcher = self.launcher.id();
        let children = format!("/proc/{launcher}/task/{launcher}/children");
        let children = std::fs::read_to_string(children).unwrap();
        // A supervisor that was killed may be gone by now.
        let handle = |number: &str| {
            let child = Pid::from_raw(number.parse().unwrap()).unwrap();
            rustix::process::pidfd_open(child, rustix::process::PidfdFlags::empty()).ok()
        };
        let children: Vec<_> = children.split_whitespace().filter_map(handle).collect();
        self.launcher.kill().unwrap();
        self.launcher.wait().unwrap();
        // The program sees the end of its input.
        drop(self.stdin.take());
        for child in &children {
            let mut handles = [rustix::event::PollFd::new(child, rustix::event::PollFlags::IN)];
            retry_on_intr(|| rustix::event::poll(&mut handles, None)).unwrap();
        }
    }

    fn stat(&self) -> Value {
        stat(&self.pool)
    }
}

/// Not for the programs that other tests start at the same moment.
fn new_socket() -> OwnedFd {
    let (family, kind, flags) = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    rustix::net::socket_with(family, kind, flags, None).unwrap()
}

fn stat(pool: &Path) -> Value {
    let pool = pool.to_str().unwrap();
    serde_json::from_str(&ok(["stat", pool, "--json"])).expect("one JSON object")
}

/// A program that writes as the preload library lets it.
struct Program {
    log: Log,
}

impl Program {
    fn join(pool: &Path, control: &Path) -> Self {
        Self { log: Ring::attach(pool, control).map(Log::over).expect("the log is there") }
    }

    fn of(session: &Session) -> Self {
        let program = Self::join(&session.pool, &session.control);
        drop(session.connect());
        program
    }

    fn lock(&self, file: &File) -> FileGuard<'_> {
        let metadata = file.metadata().unwrap();
        let (device, inode) = (metadata.dev(), metadata.ino());
        let key = FileKey { device, inode, identity: identity_of(file).unwrap() };
        let entry = self.log.entry_for(&key).unwrap();
        self.log.lock(entry).unwrap()
    }

    /// Writes `data` to the log and to the file, and syncs it.
    fn write(&self, path: &Path, offset: u64, data: &[u8]) {
        let file = open(path);
        let guard = self.lock(&file);
        log(&self.log, &guard, &file, path, offset, data);
        file.write_all_at(data, offset).unwrap();
        let bytes = data.len() as u64;
        let size = file.metadata().unwrap().len();
        guard.note_change(Change { bytes, grew: true, journaled: Some(0), size });
        guard.mark(file.metadata().unwrap().len(), 0).unwrap();
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Appends the record of a write; covers the file before it, if it is not covered.
fn log(log: &Log, guard: &FileGuard<'_>, file: &File, path: &Path, offset: u64, data: &[u8]) {
    let metadata = file.metadata().unwrap();
    let definition = Definition {
        identity: identity_of(file).unwrap(),
        file_system: file_system_id(file).unwrap(),
        handle: handle_of(file).unwrap(),
        covered: false,
        starts: false,
        size_bytes: 0,
        device: metadata.dev(),
        inode: metadata.ino(),
        path: path.as_os_str().as_encoded_bytes(),
    };
    if !guard.is_logged() {
        guard.begin_story(&definition, metadata.len()).unwrap();
        let (unlogged, synced_from) = (guard.unlogged(), log.ring().head());
        file.sync_all().unwrap();
        let state = CoverState { unlogged, synced_from, size: metadata.len(), is_dense: true };
        assert!(guard.cover(&state, &definition).unwrap());
    }
    let mut ticket = guard.begin().unwrap();
    if ticket.needs_define() {
        guard.define_again(&mut ticket, &definition).unwrap();
    }
    let grows = guard.grows(offset + data.len() as u64);
    ticket.write(offset, &[IoSlice::new(data)], grows).unwrap();
    if std::env::var_os("HELPER_FILE").is_some() {
        kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
    }
}

/// Runs `tidegate ARGS`, which must fail with one line.
fn fails(args: &[&str]) -> String {
    let Output { status, stderr, .. } = support::run(args);
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    assert!(stderr.starts_with("tidegate: "), "{stderr}");
    stderr
}

#[test]
fn the_exit_status_is_the_program_s() {
    let (_dir, pool) = place();
    let run = |script: &str| {
        let pool = pool.to_str().unwrap();
        support::run(["run", "--pool", pool, "--size", "8M", "--", "sh", "-c", script])
    };
    let output = run("echo out; exit 7");
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"out\n"[..]));
    assert_eq!(run("kill -TERM $$").status.code(), Some(128 + 15));
    let stderr = String::from_utf8(run("true").stderr).unwrap();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("pool") && stderr.contains("8M, tmpfs; power cut: "), "{stderr}");
}

/// `tidegate run` with these options on a machine without persistent memory, whose `/dev/shm` has
/// nothing in it.
fn run_without_persistent_memory(options: &str) -> Output {
    support::preload_library();
    let script = format!(
        "set -e
for mount in $(awk '$4 ~ /(^|,)dax/ {{ print $2 }}' /proc/mounts); do umount -l $mount; done
mount -t tmpfs none /dev/shm
exec {} run {options}",
        env!("CARGO_BIN_EXE_tidegate")
    );
    let mut command = support::tool("unshare", "util-linux");
    command.args(["--mount", "--propagation=private", "sh", "-c", &script]).output().unwrap()
}

/// With a power cut programs would lose what they synced: nobody gets that without having asked for
/// it.
#[test]
fn syncs_that_a_power_cut_undoes_have_to_be_asked_for() {
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let refused = run_without_persistent_memory("-- echo out");
    assert_eq!((refused.status.code(), &refused.stdout[..]), (Some(1), &b""[..]));
    let told = said(&refused);
    assert!(told.contains("no persistent memory"), "{told}");
    assert!(told.contains("--pool") && told.contains("--volatile"), "{told}");
    let taken = run_without_persistent_memory("--volatile -- echo out");
    let told = said(&taken);
    assert_eq!((taken.status.code(), &taken.stdout[..]), (Some(0), &b"out\n"[..]), "{told}");
    assert!(told.contains("a power cut loses what programs synced"), "{told}");
}

#[test]
fn a_signal_for_the_launcher_reaches_the_program() {
    let (_dir, pool) = place();
    let mut command = tidegate();
    command.args(["run", "--size", "8M", "--pool"]).arg(&pool).arg("--");
    command.args(["sh", "-c", "trap 'exit 9' USR1; echo ready; while :; do sleep 1; done"]);
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(launcher.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&launcher), Signal::USR1).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(9));
}

#[test]
fn nothing_stays_of_an_ended_session_but_the_pool() {
    let (_dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let (control, socket) = (session.control.clone(), session.socket.clone());
    assert!(control.exists() && socket.exists());
    assert_eq!(session.stat()["live"], true);
    session.end();
    assert!(!control.exists() && !socket.exists());
    assert_eq!(stat(&pool)["live"], false);
    assert_eq!(pool.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn flush_brings_the_log_into_the_files_and_stat_tells() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let program = Program::of(&session);
    program.write(&dir.path().join("file"), 0, b"data");
    let before = session.stat();
    assert!(before["log_used_bytes"].as_u64() > Some(0), "{before}");
    assert!(before["processes"].as_u64() >= Some(1), "{before}");
    let text = ok(["flush", pool.to_str().unwrap()]);
    assert!(text.contains("of the log are in the files"), "{text}");
    let after = session.stat();
    assert_eq!((&after["log_used_bytes"], &after["files"]), (&0.into(), &1.into()));
    assert_eq!(after["log_used_max_bytes"], before["log_used_bytes"]);
    let socket = session.socket.to_str().unwrap().to_owned();
    assert!(ok(["stat", &socket]).contains("lives, with"));
    assert!(ok(["flush", pool.to_str().unwrap()]).contains("the log was empty"));
    drop(program);
    session.end();
}

#[test]
fn a_supervisor_that_is_told_to_end_empties_the_log_and_stays_for_its_tree() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let program = Program::of(&session);
    program.write(&dir.path().join("file"), 0, b"data");
    kill_process(session.supervisor(), Signal::TERM).unwrap();
    while session.stat()["log_used_bytes"] != 0 {}
    assert!(program.log.ring().supervisor_alive());
    drop(program);
    session.end();
}

#[test]
fn a_full_log_is_emptied_while_a_program_writes() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &["--stats"]);
    let program = Program::of(&session);
    let path = dir.path().join("file");
    let (file, data) = (open(&path), vec![7; 100_000]);
    program.write(&path, 0, b"covered");
    for number in 0..400 {
        let guard = program.lock(&file);
        loop {
            let space = program.log.ring().space_changes();
            let mut ticket = guard.begin().unwrap();
            if ticket.needs_define() {
                drop(ticket);
                log(&program.log, &guard, &file, &path, 0, b"");
                continue;
            }
            if ticket.write(number, &[IoSlice::new(&data)], true).is_ok() {
                break;
            }
            drop(ticket);
            program.log.ring().wait_for_space(space, std::time::Duration::from_secs(10));
        }
        file.write_all_at(&data, number).unwrap();
    }
    let counted = session.stat();
    assert!(counted["log_used_max_bytes"].as_u64() > Some(4 << 20), "{counted}");
    // The same bytes again and again reach the disk as often as the log was full, not as often as
    // they were written.
    assert!(counted["written_back_bytes"].as_u64() < Some(4 << 20), "{counted}");
    let stderr = session.end();
    assert!(stderr.contains("written back"), "{stderr}");
}

/// Not a test of its own: the process that [`killed_in_a_write`] kills.
#[test]
fn helper() {
    let (Ok(pool), Ok(control)) = (std::env::var("HELPER_POOL"), std::env::var("HELPER_CONTROL"))
    else {
        return;
    };
    let program = Program::join(Path::new(&pool), Path::new(&control));
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let address = std::env::var("HELPER_SOCKET").unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(&*address).unwrap()).unwrap();
    drop(socket);
    let path = PathBuf::from(std::env::var("HELPER_FILE").unwrap());
    let file = open(&path);
    let guard = program.lock(&file);
    log(&program.log, &guard, &file, &path, 4, b"late");
    unreachable!("killed");
}

/// A process that appends the record of a write to `path` and is killed before the kernel has it.
fn killed_in_a_write(session: &Session, path: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["helper", "--exact"]).env("HELPER_FILE", path);
    command.env("HELPER_POOL", &session.pool).env("HELPER_CONTROL", &session.control);
    command.env("HELPER_SOCKET", &session.socket).stdout(Stdio::null());
    let status = command.status().unwrap();
    assert_eq!(status.signal(), Some(9), "{status}");
}

#[test]
fn what_a_killed_process_had_in_the_log_alone_is_voided() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let path = dir.path().join("file");
    std::fs::write(&path, "0123").unwrap();
    killed_in_a_write(&session, &path);
    session.end();
    assert_eq!(std::fs::read(&path).unwrap(), b"0123");
}

#[test]
fn the_next_run_takes_over_from_a_killed_supervisor() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let program = Program::of(&session);
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    program.write(&one, 0, b"before");
    killed_in_a_write(&session, &two);
    session.kill_supervisor();
    assert!(!program.log.ring().supervisor_alive());
    assert!(stat(&pool)["log_used_bytes"].as_u64() > Some(0));

    let next = Session::start(&pool, &[]);
    assert_eq!(next.control, session.control);
    assert!(program.log.ring().supervisor_alive(), "its programs are served again");
    program.write(&one, 6, b" and after");
    ok(["flush", pool.to_str().unwrap()]);
    assert_eq!(next.stat()["log_used_bytes"], 0);
    assert_eq!(std::fs::read(&one).unwrap(), b"before and after");
    assert_eq!(std::fs::read(&two).unwrap(), b"");
    let stderr = next.end();
    assert!(stderr.contains("taken over from a supervisor that died"), "{stderr}");
    session.end();
}

#[test]
fn a_launcher_replaces_a_supervisor_that_dies() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let program = Program::of(&session);
    let path = dir.path().join("file");
    for number in 0..3 {
        program.write(&path, number, &[b'0' + u8::try_from(number).unwrap()]);
        let dead = session.supervisor();
        kill_process(dead, Signal::KILL).unwrap();
        while session.stat()["live"] != true || session.supervisor() == dead {}
    }
    ok(["flush", pool.to_str().unwrap()]);
    assert_eq!(session.stat()["log_used_bytes"], 0);
    assert_eq!(std::fs::read(&path).unwrap(), b"012");
    drop(program);
    let stderr = session.end();
    assert_eq!(stderr.matches("died; another one took over").count(), 3, "{stderr}");
}

/// What is told to leave while nobody is there to hear it leaves by the next one.
#[test]
fn a_supervisor_that_dies_with_its_last_program_is_replaced_too() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let path = dir.path().join("file");
    Program::of(&session).write(&path, 0, b"data");
    session.kill_supervisor();
    session.end();
    assert_eq!(stat(&pool)["live"], false);
    assert!(ok(["recover", pool.to_str().unwrap()]).contains("nothing to recover"));
}

/// Stands in for a supervisor that was killed and that the kernel has not cleaned up after: its
/// socket takes connections and says nothing, and its pool stays locked until the next one looks at
/// the pool for the second time.
fn die_slowly(pool: &Path, socket: &Path) {
    use rustix::fs::inotify;
    let _ = std::fs::remove_file(socket);
    let listener = new_socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let locked = File::open(pool).unwrap();
    rustix::fs::flock(&locked, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let looks = inotify::WatchFlags::OPEN | inotify::WatchFlags::CLOSE;
    inotify::add_watch(&watch, pool, looks).unwrap();
    std::thread::spawn(move || {
        drop(rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap());
        drop(listener);
        let mut space = [std::mem::MaybeUninit::uninit(); 512];
        let mut events = inotify::Reader::new(&watch, &mut space);
        // Opened, closed, opened again.
        for _ in 0..3 {
            events.next().unwrap();
        }
        drop(locked);
    });
}

#[test]
fn a_supervisor_that_is_dying_is_waited_for_and_replaced() {
    let (_dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let socket = session.socket.clone();
    session.end();
    die_slowly(&pool, &socket);
    assert_eq!(stat(&pool)["live"], false);
    die_slowly(&pool, &socket);
    assert!(ok(["flush", pool.to_str().unwrap()]).contains("nothing to recover"));
    die_slowly(&pool, &socket);
    let next = Session::start(&pool, &[]);
    assert_eq!(next.stat()["live"], true);
    next.end();
}

/// As it happens: nobody waits for the kernel to clean up.
#[test]
fn a_run_right_after_the_supervisor_was_killed_gets_a_new_one() {
    let (_dir, pool) = place();
    let mut session = Session::start(&pool, &[]);
    for _ in 0..10 {
        kill_process(session.supervisor(), Signal::KILL).unwrap();
        let next = Session::start(&pool, &[]);
        session.kill_program();
        session = next;
    }
    session.end();
}

#[test]
fn a_killed_tree_is_recovered_with_what_was_in_the_middle() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let path = dir.path().join("file");
    let control = session.control.clone();
    session.kill_supervisor();
    killed_in_a_write_without_supervisor(&session, &path);
    session.kill_program();
    assert!(control.exists());
    let text = ok(["recover", pool.to_str().unwrap()]);
    assert!(text.contains("recovered: ") && text.contains("taken over"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap(), b"");
    assert!(!control.exists());
    assert!(ok(["recover", pool.to_str().unwrap()]).contains("nothing to recover"));
}

/// Kills a program in a write while no supervisor listens: its slot alone tells of the process.
fn killed_in_a_write_without_supervisor(session: &Session, path: &Path) {
    let listener = new_socket();
    let address = session.pool.with_file_name("nobody");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&address).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["helper", "--exact"]).env("HELPER_FILE", path);
    command.env("HELPER_POOL", &session.pool).env("HELPER_CONTROL", &session.control);
    command.env("HELPER_SOCKET", &address).stdout(Stdio::null());
    assert_eq!(command.status().unwrap().signal(), Some(9));
}

/// A pool as a power cut leaves it: with a record of a write that the file lacks.
fn after_power_cut(dir: &Place, pool: &Path) -> PathBuf {
    let session = Session::start(pool, &[]);
    let program = Program::of(&session);
    let path = dir.path().join("file");
    let control = session.control.clone();
    // Before the write: nobody cleans it away.
    session.kill_supervisor();
    program.write(&path, 0, b"acknowledged");
    session.kill_program();
    // What the machine loses: shared memory and the page cache.
    std::fs::remove_file(control).unwrap();
    lose_end(&path);
    path
}

/// Leaves the file at `path` as a disk has it that lacks its last writes: shorter, and older.
fn lose_end(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(3).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
}

#[test]
fn after_a_power_cut_the_files_get_what_was_acknowledged() {
    let (dir, pool) = place();
    let path = after_power_cut(&dir, &pool);
    let text = ok(["recover", pool.to_str().unwrap()]);
    assert!(text.contains("recovered: 12 bytes written to 1 files"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap(), b"acknowledged");
    assert!(ok(["recover", pool.to_str().unwrap()]).contains("nothing to recover"));
}

#[test]
fn the_next_run_recovers_before_the_program_starts() {
    let (dir, pool) = place();
    let path = after_power_cut(&dir, &pool);
    let output = support::run([
        "run".as_ref(),
        "--pool".as_ref(),
        pool.as_os_str(),
        "--".as_ref(),
        "cat".as_ref(),
        path.as_os_str(),
    ]);
    assert_eq!(output.stdout, b"acknowledged");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("recovered: 12 bytes"), "{stderr}");
}

#[test]
fn a_log_is_discarded_only_after_it_was_said_what_is_lost() {
    let (dir, pool) = place();
    let path = after_power_cut(&dir, &pool);
    let pool = pool.to_str().unwrap();
    let text = ok(["recover", pool, "--discard"]);
    assert!(text.contains("discarding 12 bytes of data of 1 files"), "{text}");
    assert!(ok(["recover", pool, "--discard"]).contains("the log was empty"));
    assert!(ok(["recover", pool]).contains("nothing to recover"));
    assert_eq!(std::fs::read(&path).unwrap(), b"ack");
}

#[test]
fn a_replay_on_the_same_boot_is_done_when_asked_for() {
    let (dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let program = Program::of(&session);
    let path = dir.path().join("file");
    session.kill_supervisor();
    program.write(&path, 0, b"acknowledged");
    let pool = pool.to_str().unwrap();
    let error = fails(&["recover", pool, "--replay"]);
    assert!(error.contains("whose supervisor died"), "{error}");
    drop(program);
    session.kill_program();
    lose_end(&path);
    let text = ok(["recover", pool, "--replay"]);
    assert!(text.contains("recovered: 12 bytes"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap(), b"acknowledged");
}

#[test]
fn a_second_run_joins_and_the_first_leaves_without_waiting() {
    let (_dir, pool) = place();
    let first = Session::start(&pool, &[]);
    let second = Session::start(&pool, &["--size", "16M"]);
    assert_eq!(first.control, second.control);
    assert_eq!(first.supervisor(), second.supervisor());
    first.end();
    assert_eq!(second.stat()["live"], true);
    let stderr = second.end();
    assert!(stderr.contains("--size 16M has no effect"), "{stderr}");
    assert_eq!(stat(&pool)["live"], false);
}

#[test]
fn a_live_pool_is_neither_recovered_nor_discarded() {
    let (_dir, pool) = place();
    let session = Session::start(&pool, &[]);
    let pool = pool.to_str().unwrap();
    for option in [&[][..], &["--discard"], &["--replay"]] {
        let error = fails(&[&["recover", pool], option].concat());
        assert!(error.contains("has a supervisor that lives"), "{error}");
    }
    session.end();
}

/// Runs `program` under `run`: what that says on standard error.
fn said_of(pool: &Path, program: &Path) -> String {
    let output = support::run([
        "run".as_ref(),
        "--pool".as_ref(),
        pool.as_os_str(),
        "--".as_ref(),
        program.as_os_str(),
    ]);
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn what_cannot_be_watched_is_run_with_a_line_that_says_so() {
    let (dir, pool) = place();
    let said = said_of(&pool, &set_user_id_program(dir.path()));
    assert!(said.contains("gains privileges") && said.contains("real ones"), "{said}");
    let plain = dir.path().join("static");
    std::fs::write(&plain, static_program()).unwrap();
    std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o755)).unwrap();
    let said = said_of(&pool, &plain);
    assert!(said.contains("linked statically") && said.contains("real ones"), "{said}");
}

#[test]
fn a_program_that_is_not_there_is_named_before_anything_is_made() {
    let (_dir, pool) = place();
    let error = fails(&["run", "--pool", pool.to_str().unwrap(), "--", "no-such-program"]);
    assert!(error.contains("not in PATH"), "{error}");
    assert!(!pool.exists());
}

/// A program that would run as another user.
fn set_user_id_program(dir: &Path) -> PathBuf {
    if !rustix::process::geteuid().is_root() {
        return PathBuf::from("/bin/su");
    }
    let copy = dir.join("other-user");
    std::fs::copy("/bin/true", &copy).unwrap();
    std::os::unix::fs::chown(&copy, Some(65534), None).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o4755)).unwrap();
    copy
}

/// The start of this very program's file, with no segments left: nothing loads anything.
fn static_program() -> Vec<u8> {
    let mut bytes = std::fs::read("/bin/true").unwrap();
    bytes[56..58].fill(0);
    bytes[60..62].fill(0);
    bytes
}

#[test]
fn a_file_that_is_no_pool_is_left_alone() {
    let (dir, _) = place();
    let path = dir.path().join("text");
    std::fs::write(&path, "To whom it may concern,\n".repeat(10_000)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = fails(&["run", "--pool", path.to_str().unwrap(), "--", "true"]);
    assert!(error.contains("holds text, no log pool"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let error = fails(&["run", "--pool", path.to_str().unwrap(), "--", "true"]);
    assert!(error.contains("holds text, no log pool") && !error.contains("mode"), "{error}");
}
