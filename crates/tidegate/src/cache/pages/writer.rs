//! Stores pages: see [`write`](super::write), [`merge`](super::merge), [`content`](super::content).

use std::sync::Arc;

use super::Pages;
use super::comparing::Comparing;
use crate::sync::AtomicBool;

/// Stores batches of pages in free slots.
pub(in crate::cache) struct Writer {
    pub(in crate::cache) pages: Arc<Pages>,
    pub(in crate::cache) comparing: Comparing,
    /// Whether the granularity is `record`.
    pub(in crate::cache) makes_records: AtomicBool,
}
