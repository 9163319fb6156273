//! A connection among those of its server: how it is woken, and whether it may stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Limits;
use super::session::Mail;

/// Never idle.
const BUSY: u64 = u64::MAX;

/// A connection.
pub(super) struct Member {
    pub(super) mailbox: Arc<Mail>,
    since: Instant,
    /// Since when its client has done nothing, in milliseconds after `since`; or [`BUSY`].
    idle_since_ms: AtomicU64,
    /// It has had a request answered.
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

    /// It has had requests answered.
    pub(super) fn note_work(&self) {
        self.has_worked.store(true, Ordering::Relaxed);
    }

    /// It waits for its client, which has done nothing since `last`, and for nothing else.
    pub(super) fn note_idle(&self, last: Instant) {
        let ms = last.duration_since(self.since).as_millis();
        self.idle_since_ms.store(u64::try_from(ms).unwrap_or(BUSY), Ordering::Relaxed);
    }

    /// It waits no more.
    pub(super) fn note_busy(&self) {
        self.idle_since_ms.store(BUSY, Ordering::Relaxed);
    }

    /// It has been told to give its place up.
    pub(super) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Acquire)
    }

    /// Tells it to give its place up.
    pub(super) fn evict(&self) {
        self.is_evicted.store(true, Ordering::Release);
        self.mailbox.wake().wake();
    }

    /// How soon it gives its place up at the limit of connections, the greatest first: one without
    /// any request before the others, then by how much it has been idle for longer than it may.
    /// None: not now.
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
