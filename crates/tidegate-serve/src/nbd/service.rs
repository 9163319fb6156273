//! What all connections of a server share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::export::Exports;
use super::share::Share;
use super::shortage::Shortage;
use super::{Limits, Tls};
use crate::budget::Budget;
use crate::log::Log;
use crate::statistics::ConnectionCounters;

/// What a connection needs of its server.
pub(super) struct Service {
    pub(super) exports: Arc<Exports>,
    pub(super) limits: Limits,
    /// What each connection has to itself.
    pub(super) share: Share,
    pub(super) tls: Option<Tls>,
    pub(super) counters: Arc<ConnectionCounters>,
    /// Memory for requests.
    pub(super) budget: Arc<Budget>,
    pub(super) log: Log,
    /// Of memory for the data of a request.
    pub(super) memory: Shortage,
    /// The server takes no more requests.
    pub(super) stopping: AtomicBool,
}
