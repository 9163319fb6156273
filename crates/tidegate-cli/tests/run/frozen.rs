//! File systems that a program of the tree freezes or makes read-only: other programs go on, and
//! the pool stays of use.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::bed::{Bed, Runner};
use crate::causes::PRELUDE;
use crate::programs::compiled;
use crate::support::small::Small;
use crate::support::tool;

/// How long a program may take, on whatever machine. Without the file system it would hang.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Thaws a file system when it is dropped, so that a test that fails leaves no process behind.
struct Thaw(PathBuf);

impl Drop for Thaw {
    fn drop(&mut self) {
        // It fails where the program has thawed the file system.
        let _ =
            tool("fsfreeze", "util-linux").arg("-u").arg(&self.0).stderr(Stdio::null()).status();
    }
}

/// Starts a Python program, and returns it with its lines.
fn lines_of(mut command: Command, program: &str) -> (Child, Receiver<String>) {
    command.args(["-c", &format!("{PRELUDE}{program}")]).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        // The test may have failed and stopped waiting.
        stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    (child, lines)
}

/// A snapshot is made this way: freeze, run a tool, thaw. Meanwhile another process writes.
#[test]
fn a_program_that_cannot_be_watched_runs_while_a_file_system_is_frozen() {
    let (bed, tool) = (Bed::new(), compiled("static", &["-static"]));
    let pool = bed.pool();
    let program = format!(
        "import fcntl
file, other = covered('file'), covered('other')
os.pwrite(file, b'y', 0)
os.fdatasync(file)
writer = os.fork()
if writer == 0:
    while True:
        os.pwrite(other, b'z', 0)
        os.fdatasync(other)
directory = os.open('.', os.O_RDONLY)
fcntl.ioctl(directory, 0xc0045877, 0)
try:
    fcntl.ioctl(directory, 0xc0045877, 0)
except OSError as error:
    print(error.errno, flush=True)
subprocess.run([{tool:?}], check=True)
fcntl.ioctl(directory, 0xc0045878, 0)
os.kill(writer, 9)
os.waitpid(writer, 0)
os.close(covered('again'))
print('covered', flush=True)"
    );
    let thaw = Thaw(bed.disk().to_owned());
    let (mut child, lines) = lines_of(Runner::Run(&pool).command("python3", bed.disk()), &program);
    for expected in ["16", "started", "covered"] {
        let line = lines.recv_timeout(TIMEOUT);
        if line.is_err() {
            drop(thaw);
            let _ = child.wait();
            panic!("no line where {expected} is expected");
        }
        assert_eq!(line.as_deref(), Ok(expected));
    }
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_file_system_is_made_read_only_right_after_the_program_that_wrote_to_it() {
    let (small, bed) = (Small::new("64M"), Bed::new());
    let (mount, pool) = (small.mount_point(), bed.pool());
    let tool = compiled("static", &["-static"]);
    let program = format!(
        "from time import monotonic
file = covered('file')
os.pwrite(file, b'y', 0)
os.fdatasync(file)
os.close(file)
subprocess.run(['mount', '-o', 'remount,ro', {mount:?}], check=True)
before = monotonic()
subprocess.run([{tool:?}], check=True)
print(monotonic() - before < 20)"
    );
    let mut command = Runner::Run(&pool).command("python3", &mount);
    let output = command.args(["-c", &format!("{PRELUDE}{program}")]).output().expect("it starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "started\nTrue\n", "{stderr}");
    assert!(output.status.success() && !stderr.contains("reach"), "{stderr}");
    let printed = Runner::Run(&pool).script("echo next", bed.disk());
    assert_eq!(printed, "next\nexit status: 0\n");
}
