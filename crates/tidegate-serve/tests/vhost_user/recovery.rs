//! Servers that end while a machine has requests.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::sync::Arc;
use std::time::Duration;

use tidegate::device::BlockDevice;
use tidegate::device::Op;
use tidegate::device::fault::{Effect, Fault, Rule, When};
use vhost::vhost_user::message::VhostUserInflight;

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
    // The monitor looks at its memory when the connection ends, so that comes last.
    monitor.stream.set_read_timeout(Some(Duration::from_millis(300))).expect("set");
    let read = monitor.stream.read(&mut [0]);
    assert!(read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "it has ended");
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

/// Returns whether the server of `scene` gives its disk to a machine with `inflight`.
fn goes_on(scene: &Scene, memory: &Memory, inflight: &(VhostUserInflight, File)) -> bool {
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    monitor.start(memory, Some(inflight), 0).is_ok()
}

/// A server that holds acknowledged writes in memory of its own loses them with its end, unless its
/// tiers are written back.
#[test]
fn a_machine_is_refused_unless_its_last_server_has_written_all_back() {
    let device = blocks(512, 1 << 20);
    let holding = Served { survives_a_kill: false, ..SERVED };
    // Whether the next server holds writes or not.
    for next in [holding, SERVED] {
        let mut scene = Scene::new(&device, holding);
        let memory = Memory::new();
        let inflight = Monitor::connect(&scene.socket(), DRIVER_FEATURES).inflight();
        assert!(goes_on(&scene, &memory, &inflight), "the first server");
        assert!(goes_on(&scene, &memory, &inflight), "the end of a connection loses nothing");
        let durable_note = scene.served.as_ref().expect("it is served").durable_note();
        scene.served = None;
        scene.serve(&device, next);
        assert!(!goes_on(&scene, &memory, &inflight), "nothing was written back");
        durable_note.confirm();
        assert!(goes_on(&scene, &memory, &inflight), "all was written back");
    }
}

/// Without memory for requests in flight no server can tell that a kill has lost writes.
#[test]
fn a_monitor_without_that_memory_gets_no_disk_with_a_write_cache() {
    let device = blocks(512, 1 << 20);
    for (survives_a_kill, starts) in [(true, true), (false, false)] {
        let scene = Scene::new(&device, Served { survives_a_kill, ..SERVED });
        let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
        assert_eq!(monitor.start(&Memory::new(), None, 0).is_ok(), starts);
    }
}

/// A reload may take a write cache away: the guest goes on to send flushes.
#[test]
fn features_of_an_earlier_disk_are_accepted() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, Served { read_only: true, ..SERVED });
    let monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    for (features, is_fine) in [(DRIVER_FEATURES, true), (DRIVER_FEATURES | 1 << 50, false)] {
        let answered = vhost::VhostBackend::set_features(&monitor.frontend, features);
        assert_eq!(answered.is_ok(), is_fine);
    }
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
