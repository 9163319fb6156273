//! The body of the fuzz target, a plain function so that a short property test runs it too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rustix::fs::{MemfdFlags, memfd_create};
use tidegate::device::BlockDevice;
use tidegate::device::memory::MemoryDevice;
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::GuestAddress;

use super::abi::feature;
use super::guest::{Guest, Part};
use super::inflight::Inflight;
use super::ring::{Disk, Mail, Parts, Ring, queue};
use crate::budget::{Budget, Lease, Wakes};
use crate::request::Rules;

/// The machine's memory: the queue, and requests behind it.
const MEMORY_BYTES: u64 = 16 << 10;
/// The memory of requests in flight.
const INFLIGHT_BYTES: u64 = 4096;
const ENTRIES: u16 = 16;
const DESCRIPTORS_AT: u64 = 0;
const AVAILABLE_AT: u64 = 256;
const USED_AT: u64 = 512;

/// Serves a machine whose memory holds any bytes, and so do its requests in flight. The first byte
/// chooses how the disk is served.
///
/// # Panics
/// Panics if a request is left without an answer.
pub fn machine(data: &[u8]) {
    let Some((bits, data)) = data.split_first() else { return };
    let Some(mut ring) = ring(*bits, data) else { return };
    // The device answers at once, so each turn ends all requests.
    for _ in 0..3 {
        ring.turn(false);
        assert!(ring.in_flight() == 0, "a request is left");
    }
    ring.turn(true);
    ring.finish();
}

/// Returns the ring of a machine with `data` in its memory. Returns `None` if the system refuses.
fn ring(bits: u8, data: &[u8]) -> Option<Ring> {
    let file = File::from(memfd_create("machine", MemfdFlags::CLOEXEC).ok()?);
    file.set_len(MEMORY_BYTES + INFLIGHT_BYTES).ok()?;
    let memory_bytes = usize::try_from(MEMORY_BYTES + INFLIGHT_BYTES).ok()?;
    file.write_all_at(&data[..data.len().min(memory_bytes)], 0).ok()?;
    let part = Part {
        file: file.try_clone().ok()?,
        offset: 0,
        bytes: MEMORY_BYTES,
        guest_address: 0,
        user_address: 0,
    };
    let guest = Guest::map(vec![part]).ok()?;
    let described = VhostUserInflight::new(INFLIGHT_BYTES, MEMORY_BYTES, 1, ENTRIES);
    let inflight = Inflight::open(&described, file.try_clone().ok()?).ok()?;
    let addresses = [DESCRIPTORS_AT, AVAILABLE_AT, USED_AT].map(GuestAddress);
    let features = if bits & 1 == 0 { 0 } else { feature::EVENT_INDEX };
    let mailbox = Arc::new(Mail::new().ok()?);
    let client = Arc::clone(&mailbox) as Arc<dyn Wakes>;
    let parts = Parts {
        number: 0,
        queue: queue(ENTRIES, addresses, features, 0).ok()?,
        guest: Arc::new(RwLock::new(Arc::new(guest))),
        call: Arc::new(Mutex::new(None)),
        marks: if bits & 2 == 0 { None } else { Some(inflight.queue(0, ENTRIES).ok()?) },
        writes_through: bits & 4 != 0,
        mailbox,
        lease: Lease::new(Arc::new(Budget::new(1 << 20)), client),
    };
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(512, 64).ok()?);
    let rules = Rules {
        geometry: device.geometry(),
        read_only: bits & 8 != 0,
        request_bytes_max: 64 << 10,
    };
    let disk = Disk { device, rules, serial: *b"the serial number 12", counters: Arc::default() };
    Some(Ring::new(Arc::new(disk), parts))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::machine;

    proptest! {
        #[test]
        fn any_memory_is_served(data in prop::collection::vec(any::<u8>(), 0..1200)) {
            machine(&data);
        }

        /// A few descriptors that fit the memory, and heads that fit the table.
        #[test]
        fn memory_like_a_queue_is_served(
            bits in any::<u8>(),
            descriptors in prop::collection::vec((0_u64..20_000, 0_u32..700, 0_u16..8, 0_u16..17), 16),
            heads in prop::collection::vec(0_u16..18, 16),
            available in 0_u16..20,
            requests in prop::collection::vec((0_u32..14, 0_u64..80), 1..40),
        ) {
            let mut data = vec![bits];
            for (address, len, flags, next) in descriptors {
                data.extend(address.to_le_bytes());
                data.extend(len.to_le_bytes());
                data.extend(flags.to_le_bytes());
                data.extend(next.to_le_bytes());
            }
            data.extend([0, 0]);
            data.extend(available.to_le_bytes());
            data.extend(heads.iter().flat_map(|head| head.to_le_bytes()));
            data.resize(1 + 1024, 0);
            for (kind, sector) in requests {
                data.extend(kind.to_le_bytes());
                data.extend([0; 4]);
                data.extend(sector.to_le_bytes());
            }
            machine(&data);
        }
    }
}
