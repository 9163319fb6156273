//! A connection in its server's list: its mailbox, and whether it may keep its place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Limits;
use super::session::Mail;

/// The value of a connection that is not idle.
const BUSY: u64 = u64::MAX;

/// A connection.
pub(super) struct Member {
    pub(super) mailbox: Arc<Mail>,
    since: Instant,
    /// Start of the client's idleness, in milliseconds after `since`; or [`BUSY`].
    idle_since_ms: AtomicU64,
    /// The connection has had a request answered.
    has_worked: AtomicBool,
    is_evicted: AtomicBool,
}

impl Member {
    pub(super) fn new(mailbox: Arc<Mail>) -> Self {
        Self {
            mailbox,
            since: Instant::now(),
            idle_since_ms: AtomicU64::new(BUSY),
            has_worked: AtomicBool::new(false),
            is_evicted: AtomicBool::new(false),
        }
    }

    /// Notes that the connection has had requests answered.
    pub(super) fn note_work(&self) {
        self.has_worked.store(true, Ordering::Relaxed);
    }

    /// Notes that the connection waits only for its client, which has done nothing since `last`.
    pub(super) fn note_idle(&self, last: Instant) {
        let ms = last.duration_since(self.since).as_millis();
        self.idle_since_ms.store(u64::try_from(ms).unwrap_or(BUSY), Ordering::Relaxed);
    }

    /// Notes that the connection no longer waits for its client.
    pub(super) fn note_busy(&self) {
        self.idle_since_ms.store(BUSY, Ordering::Relaxed);
    }

    /// Returns whether the connection was told to give up its place.
    pub(super) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Acquire)
    }

    /// Tells the connection to give up its place.
    pub(super) fn evict(&self) {
        self.is_evicted.store(true, Ordering::Release);
        self.mailbox.wake().wake();
    }

    /// Returns the connection's rank for giving up its place at the limit of connections; the
    /// greatest goes first. Connections without any request come before the others, then the rank
    /// is how far the idle time exceeds the limit. Returns `None` if the connection may stay.
    pub(super) fn overdue(&self, now: Instant, limits: &Limits) -> Option<(bool, Duration)> {
        let idle_since_ms = self.idle_since_ms.load(Ordering::Relaxed);
        if idle_since_ms == BUSY || self.is_evicted() {
            return None;
        }
        let idle_since = self.since + Duration::from_millis(idle_since_ms);
        let has_worked = self.has_worked.load(Ordering::Relaxed);
        let may = if has_worked { limits.idle_timeout } else { limits.silent_timeout };
        Some((!has_worked, now.duration_since(idle_since).checked_sub(may)?))
    }
}
