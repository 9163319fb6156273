//! A served pool, for the control socket and for copies.

use std::convert::Infallible;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tidegate::device::gate::Gate;
use tidegate::stack::Stack;
use tidegate_serve::nbd::{StatisticsSource, StopHandle};

use crate::plan::DevicePlan;

/// A served pool.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) plan: Arc<DevicePlan>,
    /// The pool's file, which may be unlinked.
    pub(crate) file: Arc<File>,
    pub(crate) stack: Arc<Stack>,
    /// The gate that all changes by clients pass.
    pub(crate) gate: Arc<Gate>,
    /// Readable once the device is to be closed.
    pub(crate) stop: StopHandle,
    /// Counts of its NBD clients' requests; connections are counted for the whole server.
    pub(crate) statistics: StatisticsSource,
    /// The pool as a block device of this machine.
    pub(crate) block_device: Option<BlockDeviceOfPool>,
    /// Its receiver hangs up once the last copy of this is dropped, the stack first.
    pub(crate) _in_use: Sender<Infallible>,
}

/// A block device of this machine, for statistics and for people.
#[derive(Clone)]
pub(crate) struct BlockDeviceOfPool {
    pub(crate) path: PathBuf,
    /// An earlier server made it.
    pub(crate) is_taken_up: bool,
    /// Counts of its requests.
    pub(crate) statistics: StatisticsSource,
}
