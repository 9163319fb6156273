//! A served pool, for the control socket and for copies.

use std::convert::Infallible;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use anyhow::Result;
use parking_lot::Mutex;
use tidegate::device::gate::Gate;
use tidegate::stack::{Stack, StackError};
use tidegate_serve::nbd::{StatisticsSource, StopHandle};
use tidegate_serve::vhost_user::DurableNote;

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
    /// Notes for clients that their writes are durable, for the end of the pool.
    pub(crate) durable_notes: Arc<Mutex<Vec<DurableNote>>>,
    /// Its receiver hangs up once the last copy of this is dropped, the stack first.
    pub(crate) _in_use: Sender<Infallible>,
}

impl Served {
    /// Ends the work of the tiers by `end`, and notes for the clients that all their acknowledged
    /// writes are durable.
    ///
    /// # Errors
    /// The error of `end`; then the clients get no note.
    pub(crate) fn end(&self, end: impl FnOnce(&Stack) -> Result<(), StackError>) -> Result<()> {
        end(&self.stack)?;
        std::mem::take(&mut *self.durable_notes.lock()).into_iter().for_each(DurableNote::confirm);
        Ok(())
    }

    /// Returns the path of the pool as a block device of this machine.
    pub(crate) fn block_device(&self) -> Option<&Path> {
        let found = self.reached.iter().find(|reached| reached.front_end == UBLK);
        found.map(|reached| reached.address.as_path())
    }
}
