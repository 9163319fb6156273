//! The router decides how a request is served: by its IO class, the mode, the policies of admission
//! and the measured cost of memory and backing.

pub(super) mod admission;
pub(super) mod by_cost;
pub(super) mod classes;
pub(super) mod fallback;
pub mod mode;

use std::sync::Arc;

use super::Origin;
use super::pages::Pages;
use super::policy::Request;
use crate::sync::{AtomicU32, Ordering};
use admission::Admission;
use by_cost::ByCost;
use classes::IoClasses;
use fallback::Fallback;
use mode::{Behaviour, Mode};

/// What decides how requests are served.
pub(super) struct Router {
    pub(super) pages: Arc<Pages>,
    pub(super) classes: IoClasses,
    pub(super) admission: Admission,
    pub(super) by_cost: ByCost,
    pub(super) fallback: Fallback,
    /// A [`Mode`] by its code.
    pub(super) mode: AtomicU32,
}

impl Router {
    pub(in crate::cache) fn mode(&self) -> Mode {
        Mode::of_code(self.mode.load(Ordering::SeqCst)).unwrap_or_default()
    }

    /// What requests do now whose IO class has the mode `own`: as the mode says, unless there were
    /// too many errors.
    pub(in crate::cache) fn behaviour(&self, own: Option<Mode>) -> &'static dyn Behaviour {
        if self.fallback.is_reached(&self.pages.failures) {
            return Mode::PassThrough.behaviour();
        }
        own.unwrap_or_else(|| self.mode()).behaviour()
    }

    /// Where the request of `len` bytes at `offset` comes from, with its class, and what it does.
    pub(in crate::cache) fn sort(
        &self,
        queue: u32,
        (offset_bytes, len_bytes): (u64, u64),
        is_write: bool,
    ) -> (Origin, &'static dyn Behaviour) {
        let queue = u16::try_from(queue).unwrap_or(u16::MAX);
        let (class, own) = self.classes.of(&Request { queue, offset_bytes, len_bytes, is_write });
        (Origin { queue, class }, self.behaviour(own))
    }
}
