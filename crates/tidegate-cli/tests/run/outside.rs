//! What is seen outside the tree while its program lives: each line when it was written, and, when
//! the program pauses, a disk that has all that it synced.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::{Errno, retry_on_intr};
use serde_json::Value;

use crate::bed::{Bed, Runner, Small};
use crate::causes::PRELUDE;
use crate::support::{ok, run, succeed, tool};
use crate::volatile::Disk;

/// How long an answer may take, on whatever machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A process whose lines are read as they come; killed when dropped.
struct Lines {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Lines {
    fn of(mut child: Child) -> Self {
        let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        Self { child, stdout }
    }

    /// The next line, without its end.
    fn next(&mut self) -> String {
        if self.stdout.buffer().is_empty() {
            let timeout = Timespec::try_from(TIMEOUT).expect("it is short");
            let mut events = [PollFd::new(self.stdout.get_ref(), PollFlags::IN)];
            let ready = retry_on_intr(|| poll(&mut events, Some(&timeout))).expect("it is a pipe");
            assert!(ready > 0, "no line for {TIMEOUT:?}");
        }
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("it prints text");
        assert!(line.ends_with('\n'), "it has ended, after {line:?}");
        line.trim_end().to_owned()
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A Python program under `run` that answers each line by one, and waits for the next.
struct Program {
    lines: Lines,
    stdin: ChildStdin,
}

impl Program {
    /// Starts `program` in `dir`; it says what it did first.
    fn start(pool: &Path, dir: &Path, program: &str) -> Self {
        let mut command = Runner::Run(pool).command("/usr/bin/python3", dir);
        command.args(["-c", &format!("{PRELUDE}{program}")]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let stdin = child.stdin.take().expect("it is piped");
        let mut this = Self { lines: Lines::of(child), stdin };
        assert_eq!(this.lines.next(), "covered");
        this
    }

    fn tell(&mut self, what: &str) -> String {
        writeln!(self.stdin, "{what}").expect("it reads");
        self.lines.next()
    }

    /// Has it end.
    fn end(self) {
        let Self { mut lines, stdin } = self;
        drop(stdin);
        assert!(lines.child.wait().expect("it can be waited for").success());
    }
}

/// Notices of changes of one file.
struct Watch(OwnedFd);

impl Watch {
    fn of(file: &Path) -> Self {
        let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&watch, file, WatchFlags::MODIFY).unwrap();
        Self(watch)
    }

    /// Takes the notices that are there: whether there were any.
    fn take(&self) -> bool {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut notices = inotify::Reader::new(self.0.as_fd(), &mut buffer);
        let mut has_any = false;
        loop {
            match notices.next() {
                Ok(notice) => has_any |= notice.events().contains(ReadFlags::MODIFY),
                Err(Errno::AGAIN) => return has_any,
                Err(error) => panic!("inotify: {error}"),
            }
        }
    }
}

/// Appends what it is told to `lines`, which is covered, and syncs it when it is told to.
const APPENDING: &str = "open('lines', 'w').close()
file = os.open('lines', os.O_RDWR | os.O_APPEND)
answered = ask()['fsyncs_skipped']
while ask()['fsyncs_skipped'] == answered: os.write(file, b'begin\\n'); os.fdatasync(file)
print('covered', flush=True)
for told in sys.stdin:
    if told != 'sync\\n':
        before = ask()
        os.write(file, told.encode())
        print('written', flush=True)
        continue
    os.fdatasync(file)
    now = ask()
    print(*(now[key] - before[key] for key in ('writes', 'fsyncs_skipped')), flush=True)
";

/// The program waits for the test behind each write, and behind each sync: what is seen then was
/// there when the call had returned.
#[test]
fn watchers_outside_see_each_line_when_it_was_written() {
    let bed = Bed::new();
    let mut program = Program::start(&bed.pool(), bed.disk(), APPENDING);
    let file = bed.disk().join("lines");
    let mut command = tool("tail", "coreutils");
    command.args(["-n", "+1", "-F"]).arg(&file).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut tail = Lines::of(command.spawn().expect("it starts"));
    let watch = Watch::of(&file);
    let mut skipped = 0;
    for number in 1..=20 {
        let line = format!("line {number}");
        assert!(!watch.take(), "{line} is not yet written");
        assert_eq!(program.tell(&line), "written");
        assert!(watch.take(), "{line}: no notice");
        let found = std::fs::read_to_string(&file).unwrap();
        assert!(found.ends_with(&format!("{line}\n")), "{line}: {found}");
        while tail.next() != line {
            assert_eq!(number, 1, "tail skips a line, or has one twice");
        }
        // One write that was logged, and one sync that the kernel did not make.
        skipped += u32::from(program.tell("sync") == "1 1");
    }
    // Where this machine has no time for the program, the idle log lets the file go meanwhile.
    assert!(skipped > 10, "{skipped} syncs of 20 were skipped");
    program.end();
}

/// Overwrites covered files and syncs them, then pauses.
const PAUSING: &str = "files = [covered(name) for name in ('one', 'two', 'three')]
print('covered', flush=True)
for told in sys.stdin:
    for n in range(50):
        for file in files: os.pwrite(file, told.strip().encode() * 500, n * 100); os.fdatasync(file)
    print('synced', flush=True)
";

/// How long after the last write an idle log has been retired, as docs/operations/run.md says.
const IDLE: Duration = Duration::from_secs(5);

/// What the disk at `image` has, as a power cut would leave it: the files of a copy.
fn after_a_cut(image: &Path, name: &str) -> Vec<u8> {
    let copy = Small::new("64M");
    copy.unmount();
    succeed(tool("cp", "coreutils").arg("--sparse=always").args([image, &copy.image()]));
    copy.mount();
    std::fs::read(copy.mount_point().join(name)).unwrap()
}

fn statistics(pool: &Path) -> Value {
    let printed = ok(["stat".as_ref(), "--json".as_ref(), pool.as_os_str()]);
    serde_json::from_str(&printed).expect("one JSON object")
}

#[test]
fn the_log_of_a_program_that_pauses_becomes_empty() {
    let (bed, small) = (Bed::new(), Small::new("64M"));
    let pool = bed.pool();
    let mut program = Program::start(&pool, &small.mount_point(), PAUSING);
    for round in ["first", "again"] {
        assert_eq!(program.tell(round), "synced");
        let paused = Instant::now();
        // Nothing tells of the moment.
        let found = loop {
            let found = statistics(&pool);
            if found["log_used_bytes"] == 0 {
                break found;
            }
            assert!(paused.elapsed() < TIMEOUT, "{round}: the log is not empty: {found}");
            std::thread::sleep(Duration::from_millis(100));
        };
        // Three times as long as promised: this machine may be busy.
        assert!(paused.elapsed() < 3 * IDLE, "{round}: {:?}", paused.elapsed());
        assert_eq!((&found["live"], &found["cleaner_errors"]), (&true.into(), &0.into()));
        assert!(found["fsyncs_skipped"].as_u64() > Some(100), "{round}: {found}");
        for name in ["one", "two", "three"] {
            let content = after_a_cut(&small.image(), name);
            assert!(content.starts_with(&expected(round)), "{round}: {name}");
        }
    }
    program.end();
}

/// What the program's writes of this round have left: fifty, each 100 bytes behind the last.
fn expected(round: &str) -> Vec<u8> {
    let written = round.repeat(500).into_bytes();
    let starts = (0..50).map(|n| n * 100);
    starts.fold(vec![0; 4900 + written.len()], |mut content, start| {
        content[start..start + written.len()].copy_from_slice(&written);
        content
    })
}

/// The kernel's list of locks has other device numbers than a file's own on btrfs.
#[test]
fn a_pool_that_another_process_has_open_is_not_called_unserved() {
    for kind in ["ext4", "xfs", "btrfs"] {
        let disk = Disk::make(kind);
        let pool = disk.mount_point.join("pool");
        let shown = pool.to_str().unwrap();
        ok(["create", "--engine=btt", "--size=64M", shown]);
        let said = || String::from_utf8(run(["snapshot", shown, "copy"]).stderr).unwrap();
        assert!(said().contains("is not served"), "{kind}: {}", said());
        let locked = std::fs::File::open(&pool).unwrap();
        locked.lock().unwrap();
        assert!(said().contains("open in a process that does not answer"), "{kind}: {}", said());
    }
}
