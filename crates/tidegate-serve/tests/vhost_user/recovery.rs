//! Servers that end while a machine has requests.

use std::sync::Arc;

use tidegate::device::BlockDevice;
use tidegate::device::Op;
use tidegate::device::fault::{Effect, Fault, Rule, When};

use crate::machine::{DRIVER_FEATURES, Monitor};
use crate::memory::{Memory, READ, WRITE};
use crate::{SERVED, Scene, Served, blocks};

/// The requests at the device are answered before the connection ends; the others wait for the next
/// server.
#[test]
fn a_server_that_stops_costs_a_machine_a_pause() {
    let fault = Arc::new(Fault::new(blocks(512, 1 << 20), 0));
    let device: Arc<dyn BlockDevice> = Arc::<Fault>::clone(&fault);
    let mut scene = Scene::new(&device, SERVED);
    let memory = Memory::new();
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    let inflight = monitor.inflight();
    monitor.start(&memory, Some(&inflight), 0).expect("started");
    fault.add(Rule::new(&[Op::Write], When::Nth(2), Effect::Hang));
    for slot in 0..3_u8 {
        memory.submit(slot.into(), WRITE, slot.into(), &[slot + 1; 512], 0);
    }
    monitor.kick.write(1).expect("notified");
    fault.wait_until_hung(1);
    monitor.await_answers(&memory, 2);
    let served = scene.served.take();
    let stopping = std::thread::spawn(move || drop(served));
    memory.submit(3, WRITE, 3, &[4; 512], 0);
    let _ = monitor.kick.write(1);
    fault.heal();
    fault.release();
    stopping.join().expect("stopped");
    let answered = memory.used();
    assert!((3..=4).contains(&answered), "{answered}");

    scene.serve(&device, SERVED);
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    monitor.start(&memory, Some(&inflight), answered).expect("started");
    memory.submit(4, READ, 0, &[], 2048);
    monitor.kick.write(1).expect("notified");
    monitor.await_answers(&memory, 5);
    let mut data = [0; 2048];
    memory.data(4, &mut data);
    let expected: Vec<u8> = (1..=4_u8).flat_map(|byte| [byte; 512]).collect();
    assert!(data[..] == expected, "each write happened");
    let mut heads: Vec<_> = (0..5).map(|index| memory.used_head(index)).collect();
    heads.sort_unstable();
    assert_eq!(heads, [0, 4, 8, 12, 16]);
}

/// A server that holds acknowledged writes in memory loses them if it is killed.
#[test]
fn a_machine_is_refused_if_its_last_server_lost_writes() {
    let device = blocks(512, 1 << 20);
    let mut scene = Scene::new(&device, Served { survives_a_kill: false, ..SERVED });
    let memory = Memory::new();
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    let inflight = monitor.inflight();
    monitor.start(&memory, Some(&inflight), 0).expect("started");
    memory.submit(0, WRITE, 0, &[1; 512], 0);
    monitor.kick.write(1).expect("notified");
    monitor.await_answers(&memory, 1);
    // What the memory is while the server runs, as a kill leaves it.
    let left = copy(&inflight.1);
    drop(monitor);
    // Also by a server that would lose none.
    for survives_a_kill in [false, true] {
        scene.served = None;
        scene.serve(&device, Served { survives_a_kill, ..SERVED });
        let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
        let left = (inflight.0, left.try_clone().expect("a descriptor"));
        assert!(monitor.start(&memory, Some(&left), 1).is_err());
    }
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    monitor.start(&memory, Some(&inflight), 1).expect("the end of a connection loses nothing");
    let lines = scene.log.lock().clone();
    assert!(lines.iter().any(|line| line.contains("reset the machine")), "{lines:?}");
}

/// A guest knows what is on its disk.
#[test]
fn a_machine_does_not_go_on_with_another_disk() {
    let device = blocks(512, 1 << 20);
    let mut scene = Scene::new(&device, SERVED);
    let memory = Memory::new();
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    let inflight = monitor.inflight();
    monitor.start(&memory, Some(&inflight), 0).expect("started");
    let other = Served { identity: "another pool", ..SERVED };
    for (device, served) in [(&device, other), (&blocks(512, 2 << 20), SERVED)] {
        scene.served = None;
        scene.serve(device, served);
        let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
        assert!(monitor.start(&memory, Some(&inflight), 0).is_err());
    }
    scene.served = None;
    let lines = scene.log.lock().clone();
    assert!(
        lines.len() == 2 && lines.iter().all(|line| line.contains("another pool")),
        "{lines:?}"
    );
    scene.serve(&device, SERVED);
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    monitor.start(&memory, Some(&inflight), 0).expect("the disk is back");
}

/// Returns another file with the same bytes.
fn copy(file: &std::fs::File) -> std::fs::File {
    use std::os::unix::fs::FileExt;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let other = std::fs::File::from(rustix::fs::memfd_create("left", flags).expect("a memfd"));
    let mut bytes = vec![0; usize::try_from(file.metadata().expect("known").len()).expect("short")];
    file.read_exact_at(&mut bytes, 0).expect("read");
    other.write_all_at(&bytes, 0).expect("written");
    other
}
