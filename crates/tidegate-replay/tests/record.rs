//! `tidegate record` with real programs: what is in the trace is what they did, and they do not
//! notice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use tempfile::TempDir;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_tidegate-replay"))
}

/// Builds the library that is preloaded, where the whole workspace was not built before.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if std::env::var_os("TIDEGATE_IS_BUILT").is_none() {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--quiet", "--locked", "-p", "tidegate-record-preload"]);
            cargo.args((!cfg!(debug_assertions)).then_some("--release"));
            // What cargo tells this test of its package would make build scripts run again.
            let told = std::env::vars().map(|(name, _)| name);
            let own = ["CARGO_PKG", "CARGO_MANIFEST"];
            for name in told.filter(|name| own.iter().any(|own| name.starts_with(own))) {
                cargo.env_remove(name);
            }
            let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
            assert!(status.success(), "the library is not built");
        }
        program().with_file_name("libtidegate_record_preload.so")
    })
}

/// A row of a trace: operation, file, and two fields.
type Row = (String, String, String, String);

/// A directory in which programs are recorded.
struct Scene {
    dir: TempDir,
}

/// What a recorded program has left.
struct Recorded {
    status: Option<i32>,
    said: String,
    rows: Vec<Row>,
}

impl Scene {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.env("TIDEGATE_RECORD_PRELOAD", library());
        command.current_dir(self.dir.path()).args(arguments).output().unwrap()
    }

    /// Records a program, with options before it.
    fn record(&self, options: &[&str], command: &[&str]) -> Recorded {
        let before = ["record", "-o", "trace.csv"];
        let output = self.run(&[&before, options, &["--"], command].concat());
        let text = std::fs::read_to_string(self.path("trace.csv")).unwrap();
        Recorded {
            status: output.status.code(),
            said: String::from_utf8(output.stderr).unwrap(),
            rows: text.lines().skip(1).map(|line| row(line, self.dir.path())).collect(),
        }
    }

    fn compile(&self, name: &str, text: &str, options: &[&str]) {
        let source = format!("{name}.c");
        std::fs::write(self.path(&source), text).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-o", name, &source]).args(options).current_dir(self.dir.path());
        assert!(cc.status().unwrap().success(), "cc makes a program (package gcc)");
    }

    fn python(&self, script: &str) -> Recorded {
        let recorded = self.record(&[], &["python3", "-S", "-c", script]);
        assert_eq!(recorded.status, Some(0), "{}", recorded.said);
        recorded
    }

    /// What `replay` makes of a trace.
    fn replay(&self, trace: &str) -> serde_json::Value {
        let output = self.run(&["replay", trace, "--schemes=dram", "--json=-"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// Names of files below `dir` are relative to it.
fn row(line: &str, dir: &Path) -> Row {
    let mut fields = line.splitn(4, ',').skip(2);
    let (operation, rest) = (fields.next().unwrap(), fields.next().unwrap());
    let (first, last) = rest.rsplit_once(',').unwrap();
    let (file, offset) = first.rsplit_once(',').unwrap();
    let prefix = format!("{}/", dir.canonicalize().unwrap().display());
    let short = |name: &str| name.strip_prefix(&prefix).unwrap_or(name).to_owned();
    (operation.to_owned(), short(file), offset.to_owned(), short(last))
}

impl Recorded {
    /// The rows of files with this name, or of new names.
    fn of(&self, name: &str) -> Vec<String> {
        let rows = self.rows.iter().filter(|(_, file, ..)| file == name);
        rows.map(|(operation, _, offset, last)| format!("{operation} {offset} {last}")).collect()
    }

    fn count(&self, operation: &str, file: impl Fn(&str) -> bool) -> usize {
        self.rows.iter().filter(|(op, name, ..)| op == operation && file(name)).count()
    }

    fn bytes(&self, operation: &str, file: &str) -> u64 {
        let rows = self.rows.iter().filter(|(op, name, ..)| op == operation && name == file);
        rows.map(|(_, _, _, len)| len.parse::<u64>().unwrap()).sum()
    }
}

#[test]
fn a_shell_and_its_children_are_recorded() {
    let scene = Scene::new();
    let script = "dd if=/dev/zero of=a bs=4096 count=10 conv=fsync status=none; cat a > b; rm b; \
                  mv a c; exit 7";
    let recorded = scene.record(&[], &["sh", "-c", script]);
    assert_eq!(recorded.status, Some(7), "{}", recorded.said);
    let mut expected = vec!["truncate 0 0".to_owned()];
    expected.extend((0..10).map(|at| format!("write {} 4096", at * 4096)));
    expected.push("fsync 0 0".to_owned());
    let of_a = recorded.of("a");
    assert_eq!(of_a[..expected.len()], expected[..]);
    assert_eq!(of_a.last().unwrap(), "rename 0 c");
    assert_eq!((recorded.bytes("read", "a"), recorded.bytes("write", "b")), (40_960, 40_960));
    assert_eq!(recorded.of("b").last().unwrap(), "unlink 0 0");
    for part in ["1 fsync", "1 renames", "1 removals", "tidegate replay trace.csv"] {
        assert!(recorded.said.contains(part), "{part}: {}", recorded.said);
    }
}

#[test]
fn a_trace_is_found_by_its_content_and_replayed() {
    let scene = Scene::new();
    let script = "import os
fd = os.open('data', os.O_CREAT | os.O_RDWR)
for at in range(100):
    os.pwrite(fd, b'x' * 100, at * 4096)
    os.fdatasync(fd)
assert len(os.pread(fd, 100, 0)) == 100
";
    let command = ["python3", "-S", "-c", script];
    let before = ["record", "-q", "--include", "*/data", "-o", "trace.csv.zst", "--"];
    let output = scene.run(&[&before[..], &command].concat());
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let magic = std::fs::read(scene.path("trace.csv.zst")).unwrap();
    assert_eq!(magic[..4], [0x28, 0xb5, 0x2f, 0xfd], "it is compressed");
    std::fs::rename(scene.path("trace.csv.zst"), scene.path("trace")).unwrap();
    let found = scene.replay("trace");
    assert_eq!((found["operations"].as_u64(), found["bad_lines"].as_u64()), (Some(201), Some(0)));
    assert_eq!(found["written_bytes"].as_u64(), Some(10_000));
    assert_eq!(found["synced_bytes"].as_u64(), Some(10_000));
    assert_eq!(found["rows"][0]["syncs"].as_u64(), Some(100));
}

#[test]
fn threads_and_forked_children_are_recorded() {
    let scene = Scene::new();
    let recorded = scene.python(
        "import os, threading
def work(name):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY)
    for at in range(200):
        os.write(fd, b'x' * 64)
        if at % 10 == 9:
            os.fdatasync(fd)
    os.close(fd)
threads = [threading.Thread(target=work, args=(f't{number}',)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
shared = os.open('shared', os.O_CREAT | os.O_WRONLY)
os.write(shared, b'p' * 10)
child = os.fork()
if child == 0:
    os.write(shared, b'c' * 20)
    work('child')
    os._exit(0)
os.waitpid(child, 0)
os.write(shared, b'p' * 30)
",
    );
    for name in ["t0", "t1", "t2", "t3", "child"] {
        let rows = recorded.of(name);
        let writes: Vec<_> = rows.iter().filter(|row| row.starts_with("write")).collect();
        let expected: Vec<_> = (0..200).map(|at| format!("write {} 64", at * 64)).collect();
        assert!(writes.into_iter().eq(&expected), "{name}: {rows:?}");
        assert_eq!(recorded.count("fdatasync", |file| file == name), 20, "{name}");
    }
    assert_eq!(recorded.of("shared"), ["write 0 10", "write 10 20", "write 30 30"]);
}

#[test]
fn new_names_lost_names_and_lengths_are_recorded() {
    let scene = Scene::new();
    std::fs::write(scene.path("target"), "old").unwrap();
    let recorded = scene.python(
        "import os
old = os.open('target', os.O_RDONLY)
os.read(old, 3)
fd = os.open('new', os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
os.write(fd, b'12345')
os.fsync(fd)
os.rename('new', 'target')
folder = os.open('.', os.O_RDONLY)
os.fsync(folder)
os.ftruncate(fd, 2)
os.truncate('target', 1)
os.lseek(old, 0, 0)
os.read(old, 3)
os.close(old)
gone = os.open('gone', os.O_CREAT | os.O_WRONLY)
os.write(gone, b'1')
os.unlink('gone')
os.write(gone, b'2')
os.close(gone)
os.mkdir('d')
below = os.open('d/f', os.O_CREAT | os.O_WRONLY)
os.write(below, b'1')
os.rename('d', 'e')
os.write(below, b'2')
",
    );
    assert_eq!(recorded.of("new"), ["truncate 0 0", "write 0 5", "fsync 0 0", "rename 0 target"]);
    let aside = "target (unlinked 1)";
    assert_eq!(
        recorded.of("target"),
        ["read 0 3", &format!("rename 0 {aside}"), "truncate 2 0", "truncate 1 0"]
    );
    assert_eq!(recorded.of(aside), ["read 0 3", "unlink 0 0"], "it is open after it was replaced");
    assert_eq!(recorded.of("gone"), ["write 0 1", "rename 0 gone (unlinked 2)"]);
    assert_eq!(recorded.of("gone (unlinked 2)"), ["write 1 1", "unlink 0 0"]);
    assert_eq!(recorded.of("d/f"), ["write 0 1", "rename 0 e/f"]);
    assert_eq!(recorded.of("e/f"), ["write 1 1"]);
    let folder = scene.dir.path().canonicalize().unwrap();
    assert_eq!(recorded.of(folder.to_str().unwrap()), ["fsync 0 0"]);
}

#[test]
fn vectors_appends_synced_writes_and_copies_are_recorded() {
    let scene = Scene::new();
    let recorded = scene.python(
        "import os
fd = os.open('v', os.O_CREAT | os.O_RDWR)
os.writev(fd, [b'12', b'345'])
os.pwritev(fd, [b'6', b'7'], 100)
os.preadv(fd, [bytearray(3), bytearray(4)], 1)
os.pwritev(fd, [b'8'], 200, os.RWF_DSYNC)
other = os.dup(fd)
os.close(fd)
os.write(other, b'9')
tail = os.open('v', os.O_WRONLY | os.O_APPEND)
os.write(tail, b'abc')
os.pwrite(tail, b'de', 0)
sync = os.open('s', os.O_CREAT | os.O_WRONLY | os.O_DSYNC)
os.write(sync, b'1')
os.posix_fallocate(sync, 0, 4096)
copy = os.open('c', os.O_CREAT | os.O_WRONLY)
os.copy_file_range(other, copy, 5, 100)
os.sync()
",
    );
    assert_eq!(
        recorded.of("v"),
        [
            "write 0 5",
            "write 100 2",
            "read 1 7",
            "write 200 1",
            "fdatasync 0 0",
            "write 5 1",
            "write 201 3",
            "write 204 2",
            "read 100 5"
        ]
    );
    assert_eq!(recorded.of("s"), ["write 0 1", "fdatasync 0 0", "fallocate 0 4096"]);
    assert_eq!(recorded.of("c"), ["write 0 5"]);
    assert_eq!(recorded.count("sync", str::is_empty), 1);
}

#[test]
fn streams_of_the_c_library_are_recorded_by_what_they_move() {
    let scene = Scene::new();
    std::fs::write(scene.path("in"), "x".repeat(5000)).unwrap();
    let recorded = scene.python(
        "import ctypes
c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
c.fopen.argtypes = [ctypes.c_char_p] * 2
for name in ['fflush', 'fclose', 'fileno']:
    getattr(c, name).argtypes = [ctypes.c_void_p]
c.fputs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
c.fseek.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
c.fgetc.argtypes = [ctypes.c_void_p]
out = c.fopen(b'out', b'w')
c.fputs(b'x' * 10, out)
c.fflush(out)
c.fdatasync(c.fileno(out))
c.fputs(b'y' * 6, out)
c.fseek(out, 100, 0)
c.fputs(b'z' * 3, out)
c.fclose(out)
more = c.fopen(b'out', b'a')
c.fputs(b'w', more)
left = c.fopen(b'in', b'r')
c.fgetc(left)
c.exit(0)
",
    );
    let expected =
        ["truncate 0 0", "write 0 10", "fdatasync 0 0", "write 10 6", "write 100 3", "write 103 1"];
    assert_eq!(recorded.of("out"), expected);
    assert_eq!(recorded.of("in"), ["read 0 4096"]);
}

#[test]
fn what_was_recorded_before_a_kill_is_kept() {
    let scene = Scene::new();
    let script = "import os
fd = os.open('data', os.O_CREAT | os.O_WRONLY)
for at in range(5000):
    os.write(fd, b'x' * 10)
os.fsync(fd)
os.kill(os.getpid(), 9)
";
    let recorded = scene.record(&[], &["python3", "-S", "-c", script]);
    assert_eq!(recorded.status, Some(137));
    assert_eq!(recorded.count("write", |file| file == "data"), 5000);
    assert_eq!(recorded.bytes("write", "data"), 50_000);
    assert_eq!(recorded.of("data").last().unwrap(), "fsync 0 0");
}

#[test]
fn a_data_base_s_syncs_and_bytes_are_those_that_strace_sees() {
    let scene = Scene::new();
    let recorded = scene.record(
        &["--include", "*/app.db*"],
        &[
            "python3",
            "-c",
            "import sqlite3
db = sqlite3.connect('app.db', isolation_level=None)
db.execute('pragma synchronous=full')
db.execute('create table t(x)')
for at in range(20):
    db.execute('insert into t values(?)', (at,))
",
        ],
    );
    assert_eq!(recorded.status, Some(0), "{}", recorded.said);
    // One more transaction makes the table.
    assert_eq!(recorded.count("fdatasync", |file| file == "app.db"), 21, "{:?}", recorded.rows);
    assert_eq!(recorded.count("unlink", |file| file == "app.db-journal"), 21);
    let size = std::fs::metadata(scene.path("app.db")).unwrap().len();
    let reach = recorded.rows.iter().filter(|(op, file, ..)| op == "write" && file == "app.db");
    let reach = reach.map(|row| row.2.parse::<u64>().unwrap() + row.3.parse::<u64>().unwrap());
    assert_eq!(reach.max(), Some(size));
    let found = scene.replay("trace.csv");
    assert_eq!(found["bad_lines"].as_u64(), Some(0));
}

#[test]
fn programs_that_cannot_be_recorded_are_named() {
    let scene = Scene::new();
    scene.compile("still", "int main(void) { return 3; }", &["-static"]);
    let recorded = scene.record(&[], &["./still"]);
    assert_eq!(recorded.status, Some(3));
    assert!(recorded.said.contains("./still is linked statically"), "{}", recorded.said);
    let recorded = scene.record(&[], &["sh", "-c", "./still; no-such-program; exit 0"]);
    let named = format!("not recorded: {}", scene.path("./still is linked statically"));
    assert_eq!(recorded.status, Some(0));
    assert!(recorded.said.contains(&named), "{}", recorded.said);
    assert!(!recorded.said.contains("no-such-program is"), "{}", recorded.said);
}

/// Writes from a handler of a signal that comes in the middle of other writes, and has a child of
/// `vfork` put another file under its descriptor. At the end it writes how often it has written.
const INTERRUPTED: &str = r#"
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
static int fd;
static volatile int handled;
static void on(int signal) { (void)signal; handled += pwrite(fd, "h", 1, 0); }
int main(void)
{
    struct sigaction action = { .sa_handler = on, .sa_flags = SA_RESTART };
    struct itimerval often = { { 0, 50 }, { 0, 50 } }, never = { { 0, 0 }, { 0, 0 } };
    int done = 0;
    fd = open("data", O_CREAT | O_RDWR, 0644);
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &often, 0);
    while (handled < 100)
        done += pwrite(fd, "m", 1, 100);
    setitimer(ITIMER_REAL, &never, 0);
    if (vfork() == 0) {
        dup2(open("/dev/null", O_WRONLY), fd);
        _exit(write(fd, "x", 1) != 1);
    }
    wait(0);
    pwrite(fd, &handled, sizeof handled, 1000);
    pwrite(fd, &done, sizeof done, 1004);
    return 0;
}
"#;

#[test]
fn signal_handlers_lose_nothing_and_children_of_vfork_change_nothing() {
    let scene = Scene::new();
    scene.compile("interrupted", INTERRUPTED, &["-w"]);
    let recorded = scene.record(&[], &["./interrupted"]);
    assert_eq!(recorded.status, Some(0), "{}", recorded.said);
    let data = std::fs::read(scene.path("data")).unwrap();
    let number = |at: usize| {
        let number = i32::from_le_bytes(data[at..at + 4].try_into().unwrap());
        usize::try_from(number).unwrap()
    };
    let rows = recorded.of("data");
    let count = |row: &str| rows.iter().filter(|it| *it == row).count();
    let found = (count("write 0 1"), count("write 100 1"));
    assert_eq!(found, (number(1000), number(1004)));
    assert_eq!(rows.len(), found.0 + found.1 + 2);
}

#[test]
fn what_no_hook_sees_is_counted() {
    let scene = Scene::new();
    let recorded = scene.python(
        "import mmap
with open('m', 'wb+', buffering=0) as file:
    file.write(b'x' * 4096)
    mmap.mmap(file.fileno(), 4096)[0] = 1
",
    );
    assert!(recorded.said.contains("1 mappings of files"), "{}", recorded.said);
}

#[test]
fn the_program_sees_what_it_would_without() {
    let scene = Scene::new();
    let script = "import os, errno
def fails(code, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == code, (call, error)
    else:
        raise AssertionError(call)
fails(errno.EBADF, os.write, 999, b'x')
fails(errno.EBADF, os.fsync, 998)
fails(errno.EBADF, os.close, 70000)
fails(errno.ENOENT, os.open, 'none', os.O_RDONLY)
fails(errno.ENOENT, os.unlink, 'none')
fails(errno.ENOENT, os.rename, 'none', 'other')
end, start = os.pipe()
fails(errno.EINVAL, os.fsync, end)
fails(errno.ESPIPE, os.pread, end, 1, 0)
os.write(start, b'abc')
assert os.read(end, 3) == b'abc'
print('done')
";
    let command = ["python3", "-S", "-c", script];
    let output = scene.run(&[&["record", "--"][..], &command].concat());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{output:?}");
    assert!(Path::new(&scene.path("python3.csv.zst")).is_file(), "a trace is named by its program");
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let scene = Scene::new();
    let cases: BTreeMap<&str, (&[&str], i32)> = [
        ("there is no program no-such-program", (&["record", "no-such-program"][..], 1)),
        ("/no/such/folder/t.csv", (&["record", "-o", "/no/such/folder/t.csv", "true"], 1)),
        ("<CMD>", (&["record"], 2)),
    ]
    .into();
    for (part, (arguments, status)) in cases {
        let output = scene.run(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.starts_with("tidegate: ") && said.contains(part), "{part}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}
