//! A QEMU guest that the test drives line by line.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::initramfs::Kernel;

/// How long the guest may stay silent before it is killed and the test fails.
const SILENCE: Duration = Duration::from_secs(60);

/// One guest at a time: emulation takes all the CPU there is.
static TURN: Mutex<()> = Mutex::new(());

/// Kernel and root, the same for every guest.
static SYSTEM: LazyLock<(Kernel, Vec<u8>)> = LazyLock::new(|| {
    let kernel = Kernel::newest();
    let initramfs = kernel.initramfs();
    (kernel, initramfs)
});

/// A file that the guest sees as an NVDIMM. Both sides share its pages: what one stores, the other loads.
#[derive(Debug, Clone)]
pub(crate) struct Nvdimm {
    /// The file.
    pub(crate) path: PathBuf,
    /// Size of the label area in bytes that QEMU takes from the file's end; 0 for none.
    pub(crate) label_bytes: u64,
}

/// A running guest. Dropping it kills it.
pub(crate) struct Guest {
    qemu: Child,
    commands: ChildStdin,
    lines: Receiver<String>,
    console: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Guest {
    /// Boots a guest with the files as NVDIMMs and waits for its shell. Its own files go to `dir`.
    pub(crate) fn boot(dir: &Path, nvdimms: &[Nvdimm]) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let initramfs = dir.join("initramfs");
        std::fs::write(&initramfs, &SYSTEM.1).expect("the initramfs can be written");
        let console = dir.join("console");
        File::create(&console).expect("the console file can be made");
        let mut qemu = command(&initramfs, &console, nvdimms)
            .spawn()
            .expect("cannot run qemu-system-x86_64: install the package qemu-system-x86");
        let commands = qemu.stdin.take().expect("stdin is a pipe");
        let lines = read_lines(qemu.stdout.take().expect("stdout is a pipe"));
        let guest = Self { qemu, commands, lines, console, _turn: turn };
        assert_eq!(guest.line(), "@ready", "{}", guest.console_tail());
        guest
    }

    /// Runs a shell command and returns what it printed.
    ///
    /// # Panics
    /// Where the command fails, or the guest dies or hangs; the message has the end of the console.
    pub(crate) fn run(&mut self, command: &str) -> String {
        let (status, output) = self.try_run(command);
        assert_eq!(status, 0, "guest: {command}\n{output}\n{}", self.console_tail());
        output
    }

    /// Runs a shell command and returns its exit status and what it printed.
    pub(crate) fn try_run(&mut self, command: &str) -> (u32, String) {
        self.start(command);
        let mut output = String::new();
        loop {
            let line = self.line();
            if let Some(status) = line.strip_prefix("@status ") {
                let status = status.parse().expect("the guest's shell prints a number");
                return (status, output.trim_end().to_owned());
            }
            output.push_str(&line);
            output.push('\n');
        }
    }

    /// Sends a shell command without waiting for it; [`line`](Self::line) gives what it prints.
    pub(crate) fn start(&mut self, command: &str) {
        assert!(!command.contains('\n'), "a command is one line: {command}");
        let sent = writeln!(self.commands, "{command}").and_then(|()| self.commands.flush());
        sent.unwrap_or_else(|err| panic!("guest gone ({err})\n{}", self.console_tail()));
    }

    /// The next line that the guest prints.
    pub(crate) fn line(&self) -> String {
        match self.lines.recv_timeout(SILENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("guest silent\n{}", self.console_tail()),
            Err(RecvTimeoutError::Disconnected) => panic!("guest gone\n{}", self.console_tail()),
        }
    }

    /// Stops the guest between two instructions; returns when no CPU of it runs any more.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        waitpid(Some(self.pid()), WaitOptions::UNTRACED).expect("qemu stops");
    }

    /// Lets a frozen guest go on.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Cuts the guest's power.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// Shuts the guest down in order.
    pub(crate) fn power_off(mut self) {
        self.start("sync; poweroff -f");
        let status = self.qemu.wait().expect("qemu is a child");
        assert!(status.success(), "{status}\n{}", self.console_tail());
    }

    /// The last lines of the kernel's console.
    pub(crate) fn console_tail(&self) -> String {
        let text = std::fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        format!("-- console --\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.qemu)
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("qemu runs");
    }

    fn end(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end();
    }
}

/// The lines of a stream, read by a thread of its own so that the reader can give up waiting.
fn read_lines(stream: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line.trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    lines
}

fn command(initramfs: &Path, console: &Path, nvdimms: &[Nvdimm]) -> Command {
    let mut qemu = Command::new("qemu-system-x86_64");
    let slots = nvdimms.len();
    qemu.args(["-accel", "tcg", "-cpu", "max", "-smp", "2", "-machine", "pc,nvdimm=on"])
        .args(["-m", &format!("256M,slots={slots},maxmem=768G")])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(["-serial", "stdio"])
        .arg("-kernel")
        .arg(&SYSTEM.0.image)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", "console=ttyS0 quiet loglevel=5 oops=panic panic=-1"]);
    for (slot, nvdimm) in nvdimms.iter().enumerate() {
        let path = nvdimm.path.display();
        let size_bytes = std::fs::metadata(&nvdimm.path).expect("the NVDIMM's file exists").len();
        let backend = format!("memory-backend-file,id=m{slot},share=on,mem-path={path},size={size_bytes}");
        let device = match nvdimm.label_bytes {
            0 => format!("nvdimm,id=n{slot},memdev=m{slot}"),
            labels => format!("nvdimm,id=n{slot},memdev=m{slot},label-size={labels}"),
        };
        qemu.args(["-object", &backend, "-device", &device]);
    }
    qemu.stdin(Stdio::piped()).stdout(Stdio::piped());
    qemu
}
