//! Kills of a server at each store to the requests in flight, and a guest without a pause.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use parking_lot::{Mutex, RwLock};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::event::{PollFd, PollFlags, poll};
use tidegate::device::memory::MemoryDevice;
use tidegate::device::{
    Attempt, BlockDevice, BlockDeviceExt, Context, Geometry, Operation, Result,
};
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::GuestAddress;

use super::chain::Fault;
use super::guest::{Guest, Part};
use super::inflight::Inflight;
use super::memory::{
    AVAILABLE_AT, DESCRIPTORS_AT, ENTRIES, MEMORY_BYTES, Memory, SLOTS, USED_AT, WRITE,
};
use super::ring::{Disk, Mail, Parts, Ring, queue};
use crate::budget::{Budget, Lease, Wakes};
use crate::request::Rules;

/// A device that never runs a request at once, so that requests are in flight.
struct Slow(MemoryDevice);

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.0.run(operation)
    }
}

struct Machine {
    memory: Arc<Memory>,
    inflight: (VhostUserInflight, File),
    device: Arc<dyn BlockDevice>,
}

impl Machine {
    fn new(is_slow: bool) -> Self {
        let device = MemoryDevice::new(512, 256).expect("a device");
        let device: Arc<dyn BlockDevice> =
            if is_slow { Arc::new(Slow(device)) } else { Arc::new(device) };
        Self::with(Arc::new(Memory::new()), device)
    }

    fn with(memory: Arc<Memory>, device: Arc<dyn BlockDevice>) -> Self {
        Self { memory, inflight: Inflight::create(1, ENTRIES).expect("memory"), device }
    }

    /// Returns the ring of a server that makes `stores` to the requests in flight.
    fn server(&self, stores: u64) -> Ring {
        let part = Part {
            file: self.memory.file.try_clone().expect("a descriptor"),
            offset: 0,
            bytes: MEMORY_BYTES,
            guest_address: 0,
            user_address: 0,
        };
        let guest = Guest::map(vec![part]).expect("mapped");
        let addresses = [DESCRIPTORS_AT, AVAILABLE_AT, USED_AT].map(GuestAddress);
        let file = self.inflight.1.try_clone().expect("a descriptor");
        let inflight = Inflight::open(&self.inflight.0, file).expect("mapped");
        inflight.stores_left.store(stores, Ordering::Relaxed);
        let mailbox = Arc::new(Mail::new().expect("a mailbox"));
        let client = Arc::clone(&mailbox) as Arc<dyn Wakes>;
        let parts = Parts {
            number: 0,
            queue: queue(ENTRIES, addresses, 0, 0).expect("a queue"),
            guest: Arc::new(RwLock::new(Arc::new(guest))),
            call: Arc::new(Mutex::new(None)),
            marks: Some(inflight.queue(0, ENTRIES).expect("the only queue")),
            writes_through: false,
            mailbox,
            lease: Lease::new(Arc::new(Budget::new(1 << 20)), client),
        };
        let rules = Rules {
            geometry: self.device.geometry(),
            read_only: false,
            request_bytes_max: 1 << 20,
        };
        let disk = Disk {
            device: Arc::clone(&self.device),
            rules,
            serial: [0; 20],
            counters: Arc::default(),
        };
        Ring::new(Arc::new(disk), parts)
    }
}

/// Serves until each of the machine's requests is answered, or the server is killed.
fn serve(ring: &mut Ring, machine: &Machine, requests: u16) -> std::result::Result<(), Fault> {
    loop {
        ring.turn(false);
        if let Some(fault) = ring.fault() {
            return Err(fault);
        }
        if machine.memory.used() >= requests {
            return Ok(());
        }
        let mut woken = [PollFd::new(ring.wake(), PollFlags::IN)];
        poll(&mut woken, None).expect("it waits");
        ring.wake().reset();
    }
}

/// Each request is answered once, whenever a server is killed and however often, and has happened
/// when it is answered.
#[test]
fn a_kill_at_any_store_loses_and_repeats_no_answer() {
    let kills = prop::collection::vec((0_u64..90, 1_u16..5), 1..5);
    let mut runner = TestRunner::new(Config::with_cases(400));
    runner
        .run(&(kills, any::<bool>()), |(kills, is_slow)| {
            let machine = Machine::new(is_slow);
            let mut requests = 0;
            for (stores, more) in kills {
                for slot in requests..(requests + more).min(SLOTS) {
                    let byte = u8::try_from(slot + 1).expect("few");
                    machine.memory.submit(slot, WRITE, slot.into(), &[byte; 512], 0);
                }
                requests = (requests + more).min(SLOTS);
                // Killed, or done: then it is killed while it rests.
                let _ = serve(&mut machine.server(stores), &machine, requests);
            }
            serve(&mut machine.server(u64::MAX), &machine, requests).expect("not killed");
            prop_assert_eq!(machine.memory.used(), requests);
            let heads = (0..requests).map(|index| machine.memory.used_head(index));
            let mut heads: Vec<_> = heads.collect();
            heads.sort_unstable();
            prop_assert_eq!(heads, (0..requests).map(|slot| 4 * slot).collect::<Vec<_>>());
            for slot in 0..requests {
                let mut block = [0; 512];
                machine.device.read(512 * u64::from(slot), &mut block).expect("read");
                prop_assert_eq!(u16::from(block[0]), slot + 1);
                prop_assert_eq!(machine.memory.status(slot), 0);
            }
            Ok(())
        })
        .expect("no case fails");
}

/// A device whose guest has the next request ready whenever one is answered.
struct Busy {
    memory: Arc<Memory>,
    device: MemoryDevice,
    requests: AtomicU16,
}

impl BlockDevice for Busy {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let next = self.requests.fetch_add(1, Ordering::Relaxed) % SLOTS;
        self.memory.submit(next, WRITE, 0, &[1; 512], 0);
        self.device.run(operation)
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

#[test]
fn a_turn_ends_although_the_guest_asks_for_more() {
    let memory = Arc::new(Memory::new());
    let device = MemoryDevice::new(512, 256).expect("a device");
    let busy = Busy { memory: Arc::clone(&memory), device, requests: AtomicU16::new(1) };
    let machine = Machine::with(memory, Arc::new(busy));
    machine.memory.submit(0, WRITE, 0, &[1; 512], 0);
    let mut ring = machine.server(u64::MAX);
    for turns in 1..4 {
        ring.turn(false);
        assert_eq!(machine.memory.used(), turns * ENTRIES);
        assert!(ring.has_more());
    }
    ring.turn(true);
    assert_eq!(ring.in_flight(), 0);
}
