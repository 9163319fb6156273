//! The parts of a server that all connections share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::export::Exports;
use super::share::Share;
use super::shortage::Shortage;
use super::{Limits, Tls};
use crate::budget::Budget;
use crate::log::Log;
use crate::statistics::ConnectionCounters;

/// The server's part that connections use.
pub(super) struct Service {
    pub(super) exports: Arc<Exports>,
    pub(super) limits: Limits,
    /// Sizes of each connection's own buffers.
    pub(super) share: Share,
    pub(super) tls: Option<Tls>,
    pub(super) counters: Arc<ConnectionCounters>,
    /// Memory for requests.
    pub(super) budget: Arc<Budget>,
    pub(super) log: Log,
    /// Shortage of memory for the data of requests.
    pub(super) memory: Shortage,
    /// The server takes no more requests.
    pub(super) stopping: AtomicBool,
}
