//! Pools as disks of a virtual machine, by a server of the host: what the guest sees of the disk,
//! and of kills and stops of its server.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use rustix::process::Signal;

use crate::initramfs::Addition;
use crate::run::{libraries, read};
use crate::support::{Server, ok, tidegate};
use crate::ublk::{LOAD_MIB, assert_no_io_error, fill};
use crate::vm::{Drive, Guest, Lab, System};

/// A root with the driver of virtual disks, and the programs of ext4.
static SYSTEM: LazyLock<System> = LazyLock::new(|| {
    let mut files = Vec::new();
    for program in ["mke2fs", "e2fsck"] {
        let path = Path::new("/sbin").join(program);
        files.push((format!("bin/{program}-ext4"), read(&path)));
        files.extend(libraries(&path));
    }
    System::with(&Addition {
        modules: vec!["block/virtio_blk"],
        files,
        functions: concat!(include_str!("functions"), include_str!("functions-ublk")),
    })
});

const DISK: &str = "/dev/vda";

/// The pool and the backing of a disk, and its socket.
struct Place {
    lab: Lab,
}

impl Place {
    /// Makes a pool.
    fn create(arguments: &[&str]) -> Self {
        let this = Self { lab: Lab::enter() };
        let pool = this.pool();
        let created = ["create".as_ref(), pool.as_os_str()];
        ok(created.into_iter().chain(arguments.iter().map(AsRef::as_ref)));
        this
    }

    fn pool(&self) -> PathBuf {
        self.lab.path("pool")
    }

    fn socket(&self) -> PathBuf {
        self.lab.path("disk.sock")
    }

    fn serve(&self, arguments: &[&str]) -> Server {
        let mut command: Command = tidegate();
        command.arg("serve").arg(self.pool()).arg("--vhost-user").arg(self.socket());
        Server::spawn(command.args(arguments))
    }

    fn boot(&self) -> Guest {
        Guest::boot_system(&SYSTEM, &self.lab, &[], Some(Drive::VhostUser(&self.socket())))
    }
}

#[test]
fn a_btt_is_the_disk_of_a_machine() {
    for block_bytes in ["512", "4096"] {
        let place = Place::create(&["--engine=btt", "--size=64M", "--block-size", block_bytes]);
        let server = place.serve(&[]);
        let mut guest = place.boot();
        let (sum, exchange) = (fill(&mut guest), guest.exchange());
        let fact = |guest: &mut Guest, name: &str| guest.run(&format!("cat /sys/block/vda/{name}"));
        assert_eq!(fact(&mut guest, "queue/logical_block_size"), block_bytes);
        assert_eq!(fact(&mut guest, "queue/write_cache"), "write through", "writes are durable");
        assert_eq!(fact(&mut guest, "serial").len(), 20);
        guest.run(&format!("dd if={exchange} of={DISK} bs=1M count={LOAD_MIB} conv=fsync 2>&1"));
        assert_eq!(guest.run(&format!("sum {DISK} {LOAD_MIB}")), sum);
        guest.run(&format!("blkdiscard -o 1048576 -l 1048576 {DISK}"));
        guest.run(&format!("mke2fs-ext4 -q -t ext4 -E discard {DISK} 2>&1"));
        guest
            .run(&format!("mount -t ext4 {DISK} /mnt && cp {exchange} /mnt/all 2>/dev/null; sync"));
        guest.run(&format!("umount /mnt && e2fsck-ext4 -fn {DISK} 2>&1"));
        assert_no_io_error(&mut guest);
        guest.power_off();
        let (status, printed) = server.stop(Signal::TERM);
        assert!(status.success(), "{printed}");
        ok(["check".as_ref(), place.pool().as_os_str()]);
    }
}

/// A load and a file system go on over kills and stops of the server of a cache.
#[test]
fn a_machine_notices_no_end_of_its_server() {
    let place = Place::create(&["--engine=cache", "--size=24M"]);
    let backing = place.lab.path("backing");
    std::fs::File::create(&backing).expect("made").set_len(48 << 20).expect("sized");
    let backing = backing.to_str().expect("a plain path").to_owned();
    let serve = || place.serve(&["--backing", &backing]);
    let mut server = serve();
    let mut guest = place.boot();
    let (sum, exchange) = (fill(&mut guest), guest.exchange());
    guest.run(&format!("load {exchange} {DISK}"));
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        guest.run("await_parts 25");
        let (status, printed) = server.stop(signal);
        assert_eq!(status.success(), signal == Signal::TERM, "{status}: {printed}");
        server = serve();
    }
    guest.run("end_load");
    assert_eq!(guest.run(&format!("sum {DISK} {LOAD_MIB}")), sum);

    guest.run(&format!("mke2fs-ext4 -q -t ext4 {DISK} 2>&1 && mount -t ext4 {DISK} /mnt"));
    guest.run(&format!("dd if={exchange} of=/mnt/file bs=1M count={LOAD_MIB} conv=fsync 2>&1"));
    drop(server.stop(Signal::KILL));
    guest.run("echo waits >/mnt/second; sync & flusher=$!");
    server = serve();
    guest.run("wait $flusher && echo 3 >/proc/sys/vm/drop_caches");
    assert_eq!(guest.run(&format!("sum /mnt/file {LOAD_MIB}")), sum);
    assert_no_io_error(&mut guest);

    // What is synced outlives the machine and the server.
    guest.run("echo synced >/mnt/third && sync");
    guest.cut();
    drop(server.stop(Signal::KILL));
    server = serve();
    let mut guest = place.boot();
    guest.run(&format!("mount -t ext4 {DISK} /mnt"));
    assert_eq!(guest.run("cat /mnt/second /mnt/third"), "waits\nsynced");
    guest.run(&format!("umount /mnt && e2fsck-ext4 -fn {DISK} 2>&1"));
    guest.power_off();
    let (status, printed) = server.stop(Signal::TERM);
    assert!(status.success(), "{printed}");
    ok(["check".as_ref(), place.pool().as_os_str()]);
}

/// Writes that a killed server had acknowledged are lost with its write cache: the machine gets no
/// disk that has forgotten them, until it is reset.
#[test]
fn a_machine_is_kept_from_a_disk_that_has_lost_writes() {
    let place = Place::create(&["--engine=btt", "--size=32M"]);
    let server = place.serve(&["--dram=lru:8M"]);
    let mut guest = place.boot();
    guest.run(&format!("dd if=/dev/zero of={DISK} bs=1M count=1 oflag=direct 2>&1"));
    drop(server.stop(Signal::KILL));
    let mut command = tidegate();
    command.arg("serve").arg(place.pool()).args(["--dram=lru:8M", "--vhost-user"]);
    command.arg(place.socket()).stderr(std::process::Stdio::piped());
    let mut server = Server::spawn(&mut command);
    let said = std::io::BufRead::lines(server.stderr())
        .map_while(Result::ok)
        .find(|line| line.contains("reset the machine"));
    assert!(said.is_some());
    guest.cut();
}
