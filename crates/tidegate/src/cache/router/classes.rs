//! The class of a request, its mode, and slots for its misses.
//!
//! [`policy::classes`](crate::cache::policy::classes) has the table and its decisions. A class may
//! use a share of each shard, since pages are spread evenly. Once a class has used its share, a
//! request that misses reclaims slots of its own class; if it cannot, it goes around the cache. A
//! page has the class of the request that wrote or read it last. The medium does not keep classes:
//! all pages are of class 0 when a pool is opened.

use std::sync::Arc;

use parking_lot::RwLock;

use super::Router;
use super::mode::Mode;
use crate::cache::policy::Request;
use crate::cache::policy::classes::Classes;
use crate::sync::{AtomicBool, Ordering};

/// The classes of a cache.
#[derive(Default)]
pub(in crate::cache) struct IoClasses {
    /// There is more than class 0: requests are looked at.
    is_used: AtomicBool,
    table: RwLock<Arc<Classes>>,
}

impl IoClasses {
    /// Returns the class of `request`, and the class's own mode if it has one.
    pub(in crate::cache) fn of(&self, request: &Request) -> (u8, Option<Mode>) {
        if !self.is_used.load(Ordering::Relaxed) {
            return (0, None);
        }
        let table = self.table.read();
        let id = table.classify(request);
        let mode = table.get(id).and_then(|class| class.mode);
        (id, mode.and_then(|name| name.parse().ok()))
    }

    /// Returns the table; `None` if there is class 0 alone.
    pub(in crate::cache) fn table(&self) -> Option<Arc<Classes>> {
        self.is_used.load(Ordering::Relaxed).then(|| Arc::clone(&self.table.read()))
    }
}

/// Returns the first mode of `classes` that does not write back, and so excludes atomic flush.
pub(in crate::cache) fn mode_against_groups(classes: &Classes) -> Option<Mode> {
    let modes = classes.iter().filter_map(|class| class.mode?.parse::<Mode>().ok());
    modes.into_iter().find(|mode| !mode.writes_back())
}

impl Router {
    /// Makes `classes` decide from now on.
    pub(in crate::cache) fn set_classes(&self, classes: &Classes) {
        let table = (!classes.is_default()).then(|| Arc::new(classes.clone()));
        self.pages.each_shard(|shard| shard.set_classes(table.clone()));
        self.pages.counters.set_has_classes(table.is_some());
        self.admission.change(|it| it.has_classes = table.is_some());
        self.classes.is_used.store(table.is_some(), Ordering::Relaxed);
        *self.classes.table.write() = table.unwrap_or_default();
    }
}
