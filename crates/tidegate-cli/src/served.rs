//! A pool that is served, as the control socket and copies know it.

use std::fs::File;
use std::sync::Arc;

use tidegate::device::gate::Gate;
use tidegate::stack::Stack;
use tidegate_serve::nbd::{StatisticsSource, StopHandle};

use crate::plan::DevicePlan;

/// A pool that is served.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) plan: Arc<DevicePlan>,
    /// The pool's file, which may have no name any more.
    pub(crate) file: Arc<File>,
    pub(crate) stack: Arc<Stack>,
    /// Through which all changes by clients go.
    pub(crate) gate: Arc<Gate>,
    /// Readable once the server is to stop.
    pub(crate) stop: StopHandle,
    /// What its clients did; connections are the server's.
    pub(crate) statistics: StatisticsSource,
}
