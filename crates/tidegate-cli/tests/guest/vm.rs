//! A QEMU guest that the test drives line by line.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;

use crate::initramfs::{Addition, Kernel};

/// How long the guest may stay silent before it is killed and the test fails.
const SILENCE: Duration = Duration::from_secs(60);

/// Whose turn it is.
static TURN: Mutex<()> = Mutex::new(());

/// What a test works in: a directory, and the turn. One test at a time, as emulation takes all the
/// CPU there is; from its start, as a program that another test starts would inherit the lock of an
/// open pool for a moment.
pub(crate) struct Lab {
    dir: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Lab {
    /// Waits for the turn.
    pub(crate) fn enter() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Self { dir: tempfile::tempdir().expect("a temporary directory"), _turn: turn }
    }

    /// The path of a file in the directory, which goes with the lab.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Kernel and root of a guest.
pub(crate) struct System {
    kernel: Kernel,
    initramfs: Vec<u8>,
    /// Megabytes of memory that it needs.
    memory_mib: u32,
}

/// Only the kernel's drivers.
static PLAIN: LazyLock<System> = LazyLock::new(|| {
    let kernel = Kernel::newest();
    let initramfs = kernel.initramfs(&Addition::default());
    System { kernel, initramfs, memory_mib: 256 }
});

impl System {
    /// A root with more than the plain one.
    pub(crate) fn with(addition: &Addition) -> Self {
        let kernel = Kernel::newest();
        let initramfs = kernel.initramfs(addition);
        Self { kernel, initramfs, memory_mib: 768 }
    }
}

/// A file that the guest sees as an NVDIMM. Both sides share its pages: what one stores, the other
/// loads.
#[derive(Debug, Clone)]
pub(crate) struct Nvdimm {
    /// The file.
    pub(crate) path: PathBuf,
    /// Size of the label area in bytes that QEMU takes from the file's end; 0 for none.
    pub(crate) label_bytes: u64,
}

impl Nvdimm {
    /// An NVDIMM without labels, all of which is one namespace.
    pub(crate) fn plain(path: &Path) -> Self {
        Self { path: path.to_path_buf(), label_bytes: 0 }
    }
}

/// A disk of the guest, which has it as `/dev/vda`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Drive<'a> {
    /// A file of the host.
    File(&'a Path),
    /// The socket of a server of the host, by vhost-user.
    VhostUser(&'a Path),
}

/// Size in bytes of the exchange, NVDIMM 0: plain memory through which data goes in and out.
const EXCHANGE_BYTES: u64 = 64 << 20;

/// A running guest. Dropping it kills it.
///
/// Its NVDIMM 0 is the exchange; the files given to [`boot`](Self::boot) are the NVDIMMs 1, 2 and
/// so on.
pub(crate) struct Guest {
    qemu: Child,
    commands: ChildStdin,
    lines: Receiver<String>,
    console: PathBuf,
    exchange: File,
    /// The guest's number of each NVDIMM's region.
    regions: Vec<u32>,
}

impl Guest {
    /// Boots a plain guest with the files as NVDIMMs and waits for its shell.
    pub(crate) fn boot(lab: &Lab, nvdimms: &[Nvdimm]) -> Self {
        Self::boot_system(&PLAIN, lab, nvdimms, None)
    }

    /// Boots a guest with the files as NVDIMMs and, if one is given, a disk.
    pub(crate) fn boot_system(
        system: &System,
        lab: &Lab,
        nvdimms: &[Nvdimm],
        disk: Option<Drive<'_>>,
    ) -> Self {
        let initramfs = lab.path("initramfs");
        std::fs::write(&initramfs, &system.initramfs).expect("the initramfs can be written");
        let console = lab.path("console");
        File::create(&console).expect("the console file can be made");
        let exchange = Nvdimm { path: lab.path("exchange"), label_bytes: 0 };
        let exchange_file = File::create(&exchange.path).and_then(|file| {
            file.set_len(EXCHANGE_BYTES)?;
            File::options().read(true).write(true).open(&exchange.path)
        });
        let all: Vec<_> = std::iter::once(&exchange).chain(nvdimms).collect();
        let mut qemu = command(system, &initramfs, &console, &all, disk)
            .spawn()
            .expect("cannot run qemu-system-x86_64: install the package qemu-system-x86");
        let commands = qemu.stdin.take().expect("stdin is a pipe");
        let lines = read_lines(qemu.stdout.take().expect("stdout is a pipe"));
        let exchange = exchange_file.expect("the exchange can be made");
        let mut guest = Self { qemu, commands, lines, console, exchange, regions: Vec::new() };
        assert_eq!(guest.line(), "@ready", "{}", guest.console_tail());
        guest.regions = regions_by_nvdimm(&guest.run("regions"));
        assert_eq!(guest.regions.len(), all.len(), "{}", guest.console_tail());
        guest
    }

    /// Takes an NVDIMM from its driver; the host may now change what it holds.
    pub(crate) fn detach(&mut self, nvdimm: usize) {
        self.run(&format!("detach {}", self.regions[nvdimm]));
    }

    /// Lets the kernel look for a BTT on an NVDIMM and recover it.
    ///
    /// # Panics
    /// Where it finds none.
    pub(crate) fn attach(&mut self, nvdimm: usize) {
        let disk = self.disk(nvdimm);
        self.run(&format!("attach {}; dmesg | tail -n 3; [ -e {disk} ]", self.regions[nvdimm]));
    }

    /// Lets the kernel make a detached NVDIMM a BTT.
    pub(crate) fn format(&mut self, nvdimm: usize, lba_bytes: u32, uuid: &str) {
        self.run(&format!("format {} {lba_bytes} {uuid}", self.regions[nvdimm]));
    }

    /// Lets the kernel label an NVDIMM as one namespace for a BTT 2.0.
    pub(crate) fn label(&mut self, nvdimm: usize, bytes: u64, uuid: &str) {
        self.run(&format!("label {} {bytes} {uuid}", self.regions[nvdimm]));
    }

    /// The guest's number of an NVDIMM's region.
    pub(crate) fn region(&self, nvdimm: usize) -> u32 {
        self.regions[nvdimm]
    }

    /// The disk that the BTT on an NVDIMM is.
    pub(crate) fn disk(&self, nvdimm: usize) -> String {
        format!("/dev/pmem{}s", self.regions[nvdimm])
    }

    /// The disk that the exchange is.
    pub(crate) fn exchange(&self) -> String {
        format!("/dev/pmem{}", self.regions[0])
    }

    /// Size in bytes of the BTT on an NVDIMM.
    pub(crate) fn disk_bytes(&mut self, nvdimm: usize) -> u64 {
        let disk = self.disk(nvdimm);
        let sectors = self.run(&format!("blockdev --getsz {disk}"));
        512 * sectors.parse::<u64>().expect("a number of sectors")
    }

    /// What the guest reads from the BTT on an NVDIMM, from its first block to its last.
    pub(crate) fn read_disk(&mut self, nvdimm: usize) -> Vec<u8> {
        let bytes = usize::try_from(self.disk_bytes(nvdimm)).expect("test disks are small");
        self.read_disk_at(nvdimm, 0, bytes)
    }

    /// What the guest reads from the BTT on an NVDIMM, `bytes` from byte `offset` on.
    pub(crate) fn read_disk_at(&mut self, nvdimm: usize, offset: u64, bytes: usize) -> Vec<u8> {
        let (disk, exchange) = (self.disk(nvdimm), self.exchange());
        self.run(&format!(
            "dd if={disk} iflag=direct,count_bytes,skip_bytes skip={offset} count={bytes} \
             of={exchange} oflag=direct bs=1M 2>&1"
        ));
        let mut data = vec![0; bytes];
        self.exchange.read_exact_at(&mut data, 0).expect("the exchange can be read");
        data
    }

    /// Lets the guest write `data` to the BTT on an NVDIMM, from byte `offset` on.
    pub(crate) fn write_disk(&mut self, nvdimm: usize, offset: u64, data: &[u8]) {
        self.fill_exchange(data);
        let (disk, exchange, bytes) = (self.disk(nvdimm), self.exchange(), data.len());
        self.run(&format!(
            "dd if={exchange} iflag=direct,count_bytes count={bytes} \
             of={disk} oflag=direct,seek_bytes seek={offset} bs=1M 2>&1"
        ));
    }

    /// Puts `data` at the start of the exchange.
    pub(crate) fn fill_exchange(&self, data: &[u8]) {
        assert!(data.len() as u64 <= EXCHANGE_BYTES, "{} bytes do not fit", data.len());
        self.exchange.write_all_at(data, 0).expect("the exchange can be written");
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

    /// Stops the guest between two instructions; returns when none of its CPUs runs any more.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        let changed = waitpid(Some(self.pid()), WaitOptions::UNTRACED).expect("qemu is a child");
        let stopped = changed.is_some_and(|(_, status)| status.stopped());
        assert!(stopped, "guest gone\n{}", self.console_tail());
    }

    /// Lets a frozen guest go on.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Cuts the guest's power.
    pub(crate) fn cut(&mut self) {
        self.qemu.kill().expect("qemu can be killed");
        self.qemu.wait().expect("qemu is a child");
    }

    /// Shuts the guest down in order.
    pub(crate) fn power_off(mut self) {
        self.start("sync; poweroff -f");
        let left: Vec<_> = std::iter::from_fn(|| self.lines.recv_timeout(SILENCE).ok()).collect();
        // QEMU closes its end of the serial port when it exits.
        let gone = self.lines.try_recv() == Err(TryRecvError::Disconnected);
        assert!(gone, "the guest does not power off: {left:?}\n{}", self.console_tail());
        let status = self.qemu.wait().expect("qemu is a child");
        assert!(status.success(), "{status}\n{}", self.console_tail());
    }

    /// A line that the guest has already printed.
    pub(crate) fn line_if_any(&self) -> Option<String> {
        self.lines.try_recv().ok()
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
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// What `regions` prints, by NVDIMM.
fn regions_by_nvdimm(printed: &str) -> Vec<u32> {
    let mut pairs: Vec<(u32, u32)> = printed
        .lines()
        .map(|line| {
            let (region, handle) = line.split_once(" 0x").expect("a region and its handle");
            let handle = u32::from_str_radix(handle, 16).expect("a hexadecimal number");
            (handle, region.parse().expect("a number"))
        })
        .collect();
    pairs.sort_unstable();
    pairs.into_iter().map(|(_, region)| region).collect()
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

/// Of the kernel. It stays where it is linked to and as it is: sooner booted in emulation.
const PARAMETERS: &str = "console=ttyS0 quiet loglevel=5 oops=panic panic=-1 no_timer_check \
                          nokaslr mitigations=off";

fn command(
    system: &System,
    initramfs: &Path,
    console: &Path,
    nvdimms: &[&Nvdimm],
    disk: Option<Drive<'_>>,
) -> Command {
    let mut qemu = Command::new("qemu-system-x86_64");
    let machine = match disk {
        Some(Drive::VhostUser(_)) => "pc,nvdimm=on,memory-backend=shared",
        _ => "pc,nvdimm=on",
    };
    let (memory_mib, slots) = (system.memory_mib, nvdimms.len());
    // One thread for both CPUs: with a thread each, this emulation at times runs an instruction
    // that the guest's other CPU is just patching, and the guest panics.
    qemu.args(["-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2"])
        .args(["-machine", machine])
        .args(["-m", &format!("{memory_mib}M,slots={slots},maxmem=768G")])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(["-serial", "stdio"])
        .arg("-kernel")
        .arg(&system.kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", PARAMETERS]);
    for (slot, nvdimm) in nvdimms.iter().enumerate() {
        let path = nvdimm.path.display();
        let size_bytes = std::fs::metadata(&nvdimm.path).expect("the NVDIMM's file exists").len();
        let backend =
            format!("memory-backend-file,id=m{slot},share=on,mem-path={path},size={size_bytes}");
        let device = match nvdimm.label_bytes {
            0 => format!("nvdimm,id=n{slot},memdev=m{slot}"),
            labels => format!("nvdimm,id=n{slot},memdev=m{slot},label-size={labels}"),
        };
        qemu.args(["-object", &backend, "-device", &device]);
    }
    match disk {
        None => {}
        Some(Drive::File(path)) => {
            let drive = format!("file={},format=raw,if=virtio,cache=writeback", path.display());
            qemu.args(["-drive", &drive]);
        }
        Some(Drive::VhostUser(socket)) => {
            let memory = format!("memory-backend-memfd,id=shared,share=on,size={memory_mib}M");
            let socket = format!("socket,id=disk,reconnect=1,path={}", socket.display());
            qemu.args(["-object", &memory, "-chardev", &socket]);
            qemu.args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"]);
        }
    }
    qemu.stdin(Stdio::piped()).stdout(Stdio::piped());
    qemu
}
