//! A ublk server: the pool as a block device of this machine, `/dev/ublkbN`, without a network.
//!
//! Invariants:
//! 1. A request is answered only after the device has acknowledged it; flush and FUA keep their
//!    meaning.
//! 2. A queue's thread never waits for the device: a request that has to wait is started, and all
//!    of a queue's requests may be in progress at once.
//! 3. A server takes up only a device that carries the mark of its own pool, has the same size,
//!    blocks, access and durability, and whose last server has ended.
//!
//! Entry points: [`Ublk::start`], [`Ublk::stop`], [`delete_left`]. Inside: `device` (start and
//! end), `driver` (the driver's commands), `queue` (a thread for each queue), `requests` (the
//! requests of a queue, without the kernel), `request` (checks and answers), `parameters` (the
//! device as the kernel sees it), `users` (programs that have the
//! device open), `abi` (the kernel's structs) and `ring` (`io_uring`, and all `unsafe`).

mod abi;
mod device;
mod driver;
mod parameters;
mod queue;
mod request;
mod requests;
mod ring;
mod users;

pub use device::{Options, Rest, Ublk, delete_left, expect_driver, prepare_threads};
pub use users::has_users;
