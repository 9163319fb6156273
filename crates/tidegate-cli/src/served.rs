//! A served pool, for the control socket and for copies.

use std::convert::Infallible;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tidegate::device::gate::Gate;
use tidegate::stack::Stack;
use tidegate_serve::nbd::{StatisticsSource, StopHandle};

use crate::plan::DevicePlan;

/// The name of the front end whose addresses are block devices of this machine.
pub(crate) const UBLK: &str = "ublk";

/// How clients reach a pool, for statistics and for people.
#[derive(Clone)]
pub(crate) struct Reached {
    /// The name of the front end, as the metrics have it.
    pub(crate) front_end: &'static str,
    /// A path.
    pub(crate) address: PathBuf,
    /// More about it, for people.
    pub(crate) note: Option<&'static str>,
    /// Counts of the clients' requests.
    pub(crate) statistics: StatisticsSource,
}

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
    /// How clients reach it otherwise than over NBD.
    pub(crate) reached: Vec<Reached>,
    /// Its receiver hangs up once the last copy of this is dropped, the stack first.
    pub(crate) _in_use: Sender<Infallible>,
}

impl Served {
    /// Returns the path of the pool as a block device of this machine.
    pub(crate) fn block_device(&self) -> Option<&Path> {
        let found = self.reached.iter().find(|reached| reached.front_end == UBLK);
        found.map(|reached| reached.address.as_path())
    }
}
