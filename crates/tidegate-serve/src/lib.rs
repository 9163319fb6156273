//! Tidegate's protocol servers: each turns a protocol's requests into operations of
//! [`tidegate::device::BlockDevice`], and holds no policy of its own.
//!
//! - [`nbd`]: the Network Block Device protocol over unix and TCP sockets;
//! - [`ublk`]: block devices of this machine, by the kernel's ublk driver;
//! - [`vhost_user`]: disks of virtual machines, by the machine's own memory;
//! - [`control`]: statistics and settings of a server, for its owner;
//! - [`metrics`]: the page that Prometheus reads.
//!
//! Shared by the front ends: `request` (checks of kernels'
//! requests), `queue` (a client's requests at a device), `mailbox` (carries a
//! completion to a client's thread), `changes` (a change waits for an older one), `budget` (memory
//! of all clients), `headroom` (memory that limits of the process leave), `listen` (addresses and
//! sockets), `serial` (servers of one client at a time), `jobs` (long requests), `log` (lines about
//! clients, at a bounded rate), `statistics` and `stop`.

mod budget;
mod changes;
pub mod control;
mod error;
mod headroom;
mod identity;
mod jobs;
mod listen;
mod log;
mod mailbox;
pub mod metrics;
pub mod nbd;
mod payload;
mod queue;
mod request;
mod serial;
mod statistics;
mod stop;
pub mod ublk;
pub mod vhost_user;

pub use budget::RequestMemory;
pub use error::ServeError;
pub use listen::ListenAddress;
pub use log::LogSink;
pub use statistics::{Statistics, StatisticsSource};
pub use stop::{StopHandle, Worker};
