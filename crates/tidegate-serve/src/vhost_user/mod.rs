//! A vhost-user server: the pool as a disk of a virtual machine, whose requests are read from the
//! machine's own memory.
//!
//! The machine's monitor (QEMU, Cloud Hypervisor, libvirt's) connects to a unix socket, and passes
//! its memory and an event for each queue. From then on requests need no call of the monitor.
//!
//! Invariants:
//! 1. A request is answered only after the device has acknowledged it; a flush keeps its meaning.
//!    A guest that sends no flushes has each write durable when it is answered.
//! 2. Requests in flight are noted in memory that the monitor keeps: a server that is killed or
//!    stopped costs the machine a pause, and no request is lost or repeated after its answer. If a
//!    kill has lost acknowledged writes, the machine is refused until it is reset.
//! 3. A guest that breaks the rules gets its queue stopped, and harms no other client.
//!
//! Entry points: [`VhostUser::start`], and its drop. Inside: `server` (the socket), `arrival`
//! (whole messages), `session` (the monitor's messages), `queue` (a thread for each queue), `ring`
//! (the requests of a queue, without its thread), `chain` (the memory of a request), `inflight`
//! (requests in flight), `guest` (the machine's memory), `event` (eventfds) and `abi` (structs and
//! numbers of virtio).

mod abi;
mod arrival;
mod chain;
#[cfg(test)]
mod cut_tests;
mod event;
#[doc(hidden)]
pub mod fuzzing;
mod guest;
mod inflight;
#[cfg(test)]
#[path = "../../tests/vhost_user/memory.rs"]
#[expect(dead_code, reason = "the other tests use all")]
mod memory;
mod queue;
mod ring;
mod server;
mod session;

pub use server::{DurableNote, Options, VhostUser};

/// Most queues of a machine, each with a thread while it is used.
const QUEUES_MAX: u16 = 64;
/// Most entries of a queue.
const QUEUE_ENTRIES_MAX: u16 = 1024;
/// Most parts of a machine's memory, as the protocol has it.
const REGIONS_MAX: usize = 8;
/// Most segments of a request's data.
const SEGMENTS_MAX: u32 = 126;
/// Most bytes of a segment.
const SEGMENT_BYTES_MAX: u32 = 32 << 10;
/// Most data of a request.
const REQUEST_BYTES_MAX: u32 = SEGMENTS_MAX * SEGMENT_BYTES_MAX;
/// Memory for data that a queue keeps for its next requests.
const PAYLOADS_KEPT_BYTES: usize = 256 << 10;
