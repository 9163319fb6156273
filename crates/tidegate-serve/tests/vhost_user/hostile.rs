//! Machines and monitors that break the rules: each harms only itself.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tidegate::device::BlockDeviceExt as _;

use crate::machine::{DRIVER_FEATURES, MachineDisk, Monitor};
use crate::memory::{Descriptors, INDIRECT, Memory, READ, WRITE};
use crate::{SERVED, Scene, blocks};

const WRITABLE: u16 = 2;
const FAR: u64 = u64::MAX - 100;

/// Returns what the server says of a machine with these descriptors at head 0, if it stops the
/// queue, or else the status of the answer.
fn outcome(scene: &Scene, prepare: impl FnOnce(&Memory)) -> Result<u8, String> {
    // The server sees all of it at once.
    let before = |memory: &Memory| {
        prepare(memory);
        memory.make_available(0);
    };
    outcome_of(scene, before, |_| {})
}

/// Returns the outcome for a machine that does `before` and `after` the start of its queue.
fn outcome_of(
    scene: &Scene,
    before: impl FnOnce(&Memory),
    after: impl FnOnce(&Memory),
) -> Result<u8, String> {
    let memory = Memory::new();
    let mut monitor = Monitor::connect(&scene.socket(), DRIVER_FEATURES);
    let fault = vmm_sys_util::eventfd::EventFd::new(libc_nonblock()).expect("an eventfd");
    vhost::VhostBackend::set_vring_err(&monitor.frontend, 0, &fault).expect("set");
    let said = scene.log.lock().len();
    before(&memory);
    monitor.start(&memory, None, 0).expect("started");
    after(&memory);
    monitor.kick.write(1).expect("notified");
    loop {
        if memory.used() > 0 {
            return Ok(memory.status(0));
        }
        if fault.read().is_ok() {
            return Err(scene.log.lock()[said..].concat());
        }
        std::thread::yield_now();
    }
}

fn libc_nonblock() -> i32 {
    rustix::event::EventfdFlags::NONBLOCK.bits().cast_signed()
}

#[test]
fn chains_that_break_the_rules_stop_their_queue() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, SERVED);
    let at = Memory::slot_at(0);
    let header = (at, 16, 0);
    let status = (at + 16, 1, WRITABLE);
    let chains: [(&str, Descriptors<'_>); 8] = [
        ("outside the memory", &[header, (FAR, 512, WRITABLE), status]),
        ("outside the memory", &[header, (at, u32::MAX, WRITABLE), status]),
        ("outside the memory", &[(FAR, 16, INDIRECT)]),
        ("not allowed", &[(at, 17, INDIRECT)]),
        ("not allowed", &[(at, 0, INDIRECT)]),
        ("behind space", &[status, header]),
        ("too short", &[header]),
        ("too short", &[(at, 15, 0), status]),
    ];
    for (expected, chain) in chains {
        let found = outcome(&scene, |memory| memory.put_chain(0, chain)).expect_err(expected);
        assert!(found.contains(expected), "{found} for {chain:?}");
    }
    let twice = outcome(&scene, |memory| {
        memory.put_descriptors(at + 512, 0, &[(at + 1024, 32, INDIRECT)]);
        memory.put_chain(0, &[(at + 512, 16, INDIRECT)]);
    });
    assert!(twice.expect_err("a table in a table").contains("not allowed"));
    let round = outcome(&scene, |memory| {
        let next = 1;
        memory.put_descriptor(0x1000, 0, (at, 16, next), 0);
    });
    assert!(round.expect_err("a loop").contains("too many"));
    // The server and its disk go on.
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    disk.flush().expect("flushed");
}

#[test]
fn a_queue_that_is_broken_is_stopped() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, SERVED);
    let outside = outcome(&scene, |memory| memory.make_available(64));
    assert!(outside.expect_err("a head outside").contains("used twice"));
    let full = outcome(&scene, |memory| (0..64).for_each(|_| memory.make_available(0)));
    assert!(full.expect_err("65 requests in 64 entries").contains("broken"));
    let again = outcome(&scene, |memory| {
        memory.put_chain(0, &[(FAR, 16, 0)]);
        memory.make_available(0);
    });
    assert!(again.is_err());
}

/// The monitor of a machine may cut the memory that it has passed.
#[test]
fn memory_that_is_cut_stops_the_queue_and_not_the_server() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, SERVED);
    let at = Memory::slot_at(10);
    let cut = |memory: &Memory| {
        memory.put_chain(0, &[(at, 16, 0), (at + 16, 1, WRITABLE)]);
        memory.file.set_len(at).expect("cut");
        memory.make_available(0);
    };
    let found = outcome_of(&scene, |_| {}, cut);
    // A header of zeroes is a read without data: it is answered before the queue is stopped.
    assert!(found.is_err() || found == Ok(0), "{found:?}");
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    disk.flush().expect("flushed");
}

#[test]
fn messages_of_any_bytes_end_the_connection_at_most() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, SERVED);
    let mut runner = TestRunner::new(Config::with_cases(60));
    let messages =
        prop::collection::vec((0_u32..45, 0_u32..12, any::<[u8; 40]>(), 0_u32..41), 1..8);
    runner
        .run(&messages, |messages| {
            let mut socket = UnixStream::connect(scene.socket()).expect("it listens");
            for (code, flags, bytes, len) in messages {
                let message = [code, flags, len].map(u32::to_le_bytes);
                let message = [&message.concat(), &bytes[..len as usize]].concat();
                if socket.write_all(&message).is_err() {
                    break;
                }
            }
            Ok(())
        })
        .expect("no case fails");
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    disk.flush().expect("flushed");
}

/// A monitor that sends a part of a message, or takes no answers, is given up.
#[test]
fn a_monitor_that_stops_in_the_middle_is_given_up() {
    let device = blocks(512, 1 << 20);
    let scenes = [(); 2].map(|()| Scene::new(&device, SERVED));
    let get_features = [1_u32, 1, 0].map(u32::to_le_bytes).concat();
    let mut part = UnixStream::connect(scenes[0].socket()).expect("it listens");
    part.write_all(&get_features[..6]).expect("sent");
    let mut deaf = UnixStream::connect(scenes[1].socket()).expect("it listens");
    // Until the server, which cannot send its answers, takes no more and gives up.
    while deaf.write_all(&get_features).is_ok() {}
    let read = part.read(&mut [0]);
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    for scene in &scenes {
        let disk = MachineDisk::new(&scene.socket(), &device.geometry());
        disk.flush().expect("flushed");
    }
}

/// Random descriptors in a small part of the memory, some of them sound.
#[test]
fn any_descriptors_harm_only_their_machine() {
    let device = blocks(512, 1 << 20);
    let scene = Scene::new(&device, SERVED);
    let mut runner = TestRunner::new(Config::with_cases(80));
    let at = Memory::slot_at(0);
    let descriptor = (
        prop_oneof![Just(at), Just(at + 16), Just(at + 4096), Just(0x1000), Just(FAR)],
        prop_oneof![Just(1_u32), Just(16), Just(512), Just(32), Just(5000), any::<u32>()],
        0_u16..8,
        0_u16..8,
    );
    let kinds = prop_oneof![Just(READ), Just(WRITE), 0_u32..20];
    let machines = (prop::collection::vec(descriptor, 8), kinds, 0_u64..3000);
    runner
        .run(&machines, |(descriptors, kind, sector)| {
            let _ = outcome(&scene, |memory| {
                memory.submit(0, kind, sector, &[], 0);
                for (index, (address, len, flags, next)) in (0..).zip(descriptors) {
                    memory.put_descriptor(0x1000, index, (address, len, flags), next);
                }
            });
            Ok(())
        })
        .expect("no case fails");
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    disk.flush().expect("flushed");
}
