//! Disks of virtual machines, as a machine's monitor and driver see them.

mod hostile;
mod machine;
mod memory;
mod others;
mod recovery;

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tempfile::TempDir;
use tidegate::device::conformance::{self, Promises};
use tidegate::device::fault::{Effect, Fault, Rule, When};
use tidegate::device::memory::MemoryDevice;
use tidegate::device::{
    BlockDevice, BlockDeviceExt, DeviceErrorKind, Geometry, Op, Operation, Result, WriteFlags,
};
use tidegate_serve::RequestMemory;
use tidegate_serve::vhost_user::{Options, VhostUser};

use machine::{DRIVER_FEATURES, MachineDisk, Monitor};
use memory::{DISCARD, Memory, READ, SERIAL, WRITE};

/// A server of a disk, and what it logs.
struct Scene {
    dir: TempDir,
    log: Arc<Mutex<Vec<String>>>,
    served: Option<VhostUser>,
}

/// How a scene's disk is served.
#[derive(Clone, Copy)]
struct Served {
    survives_a_kill: bool,
    read_only: bool,
    memory_bytes: usize,
    identity: &'static str,
}

const SERVED: Served =
    Served { survives_a_kill: true, read_only: false, memory_bytes: 16 << 20, identity: "a pool" };

impl Scene {
    fn new(device: &Arc<dyn BlockDevice>, served: Served) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut scene = Self { dir, log: Arc::default(), served: None };
        scene.serve(device, served);
        scene
    }

    fn serve(&mut self, device: &Arc<dyn BlockDevice>, served: Served) {
        let log = Arc::clone(&self.log);
        let options = Options {
            socket: self.socket(),
            serial: "0123456789abcdefghijklmn".into(),
            identity: served.identity.into(),
            survives_a_kill: served.survives_a_kill,
            read_only: served.read_only,
            memory: RequestMemory::new(served.memory_bytes),
            log: Arc::new(move |line: &str| log.lock().push(line.to_owned())),
        };
        self.served = Some(VhostUser::start(device, &options).expect("it listens"));
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("disk.sock")
    }
}

fn blocks(block_bytes: u32, bytes: u64) -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::new(block_bytes, bytes / u64::from(block_bytes)).expect("a device"))
}

#[test]
fn a_disk_conforms() {
    for block_bytes in [512, 4096] {
        let device = blocks(block_bytes, 4 << 20);
        let scene = Scene::new(&device, SERVED);
        let disk = MachineDisk::new(&scene.socket(), &device.geometry());
        let geometry = disk.geometry();
        assert_eq!((geometry.block_bytes, geometry.size_bytes()), (block_bytes, 4 << 20));
        conformance::check(&disk, Promises::default());
        let disk: Arc<dyn BlockDevice> = Arc::new(disk);
        conformance::check_started(&disk, Promises::default());
    }
}

/// Requests that the server's memory is too small for, at once, wait for it.
#[test]
fn requests_wait_for_memory() {
    let device = blocks(512, 8 << 20);
    let scene = Scene::new(&device, Served { memory_bytes: 2 << 20, ..SERVED });
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    std::thread::scope(|threads| {
        for number in 0..8_u8 {
            let disk = &disk;
            threads.spawn(move || {
                let (offset, data) = (u64::from(number) << 20, vec![number; 700 << 10]);
                for _ in 0..20 {
                    disk.write(offset, &data, WriteFlags::default()).expect("written");
                    let mut back = vec![0xff; data.len()];
                    disk.read(offset, &mut back).expect("read");
                    assert!(back == data, "thread {number}");
                }
            });
        }
    });
}

#[test]
fn a_read_only_disk_refuses_changes_and_has_a_serial_number() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, Served { read_only: true, ..SERVED });
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES | 1 << 5);
    let memory = Memory::new();
    monitor.start(&memory, None, 0).expect("started");
    memory.submit(0, WRITE, 0, &[1; 512], 0);
    memory.submit(1, READ, 0, &[], 512);
    memory.submit(2, SERIAL, 0, &[], 20);
    memory.submit(3, 99, 0, &[], 0);
    memory.submit(4, READ, 0, &[], 100);
    memory.submit(5, DISCARD, 0, &[0; 32], 0);
    monitor.kick.write(1).expect("notified");
    monitor.await_answers(&memory, 6);
    let statuses: Vec<_> = (0..6).map(|slot| memory.status(slot)).collect();
    assert_eq!(statuses, [1, 0, 0, 2, 1, 1]);
    let mut serial = [0; 20];
    memory.data(2, &mut serial);
    assert_eq!(&serial, b"0123456789abcdefghij");
    let counted = scene.served.as_ref().expect("it is served").statistics().snapshot();
    assert_eq!((counted.reads, counted.errors, counted.failures), (1, 4, 0));
}

#[test]
fn failures_are_answers() {
    let fault = Arc::new(Fault::new(blocks(512, 1 << 20), 0));
    let device: Arc<dyn BlockDevice> = Arc::<Fault>::clone(&fault);
    let scene = Scene::new(&device, SERVED);
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    fault.add(Rule::new(&[Op::Read], When::Nth(1), Effect::Fail(DeviceErrorKind::Io)));
    let mut block = [0; 512];
    assert_eq!(disk.read(0, &mut block).unwrap_err().kind(), DeviceErrorKind::Io);
    disk.read(0, &mut block).expect("read");
    let counted = scene.served.as_ref().expect("it is served").statistics().snapshot();
    assert_eq!((counted.reads, counted.errors, counted.failures), (2, 1, 1));
}

/// A device that notes for each write whether it is to be durable at once.
struct Noting {
    device: Arc<dyn BlockDevice>,
    durable: Mutex<Vec<bool>>,
}

impl BlockDevice for Noting {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        if let Operation::Write { flags, .. } = operation {
            self.durable.lock().push(flags.fua);
        }
        self.device.run(operation)
    }
}

/// A guest without flushes trusts each answer.
#[test]
fn writes_of_a_guest_without_flushes_are_durable() {
    let noting = Arc::new(Noting { device: blocks(512, 1 << 20), durable: Mutex::default() });
    let device: Arc<dyn BlockDevice> = Arc::<Noting>::clone(&noting);
    let scene = Scene::new(&device, SERVED);
    for features in [DRIVER_FEATURES, DRIVER_FEATURES & !(1 << 9)] {
        let mut monitor = Monitor::connect(&scene.socket(), features);
        let memory = Memory::new();
        monitor.start(&memory, None, 0).expect("started");
        memory.submit(0, WRITE, 0, &[1; 512], 0);
        monitor.kick.write(1).expect("notified");
        monitor.await_answers(&memory, 1);
    }
    assert_eq!(*noting.durable.lock(), [false, true]);
}

#[test]
fn the_monitors_of_two_machines_do_not_share_a_disk() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, SERVED);
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    let other = std::os::unix::net::UnixStream::connect(scene.socket()).expect("it listens");
    let read = std::io::Read::read(&mut &other, &mut [0]);
    assert_eq!(read.expect("closed"), 0);
    disk.flush().expect("the first machine goes on");
    assert!(scene.log.lock()[0].contains("the disk is in use"), "{:?}", scene.log.lock());
}
