//! The router decides how a request is served: by its IO class, the mode, the policies of admission
//! and the measured cost of memory and backing.
//!
//! [`Router::route`] decides once for a request, and changes nothing: an attempt that hands its
//! request back leaves no trace, and the request is routed again when it is started. The [`Route`]
//! then goes along with the request. Callers count requests by [`Router::take_turn`],
//! [`Admission::note_hit`] and [`Router::is_wanted`].

pub(super) mod admission;
pub(super) mod by_cost;
pub(super) mod classes;
pub(super) mod fallback;
pub mod mode;

use std::ops::Range;
use std::sync::Arc;

use super::pages::Pages;
use super::policy::Request;
use super::policy::cost::{Kind, Place};
use super::span::pages_in;
use crate::device::Result;
use crate::sync::{AtomicU32, Ordering};
use crate::tier::clock::now_ns;
use admission::Admission;
use by_cost::ByCost;
use classes::IoClasses;
use fallback::Fallback;
use mode::{Behaviour, Mode};

/// Whether pages that a request misses are cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misses {
    Cached,
    /// Cached if the admission policies want them.
    IfAdmitted,
    Uncached,
}

/// How a request is served.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub(super) request: Request,
    /// The IO class.
    pub(super) class: u8,
    pub(super) mode: &'static dyn Behaviour,
    /// The request needs the cache alone, if the cache has its pages or free slots.
    pub(super) needs_cache_alone: bool,
    pub(super) misses: Misses,
    /// The quicker place; `None` if cost does not decide.
    pub(super) place: Option<Place>,
}

impl Route {
    /// Returns the bytes of the request.
    pub(super) fn bytes(&self) -> Range<u64> {
        let Request { offset_bytes, len_bytes, .. } = self.request;
        offset_bytes..offset_bytes + len_bytes
    }

    /// Returns the pages of the request.
    pub(super) fn pages(&self) -> Range<u64> {
        pages_in(&self.bytes())
    }

    /// Returns the kind of request, for the measurement of cost.
    fn kind(&self) -> Kind {
        if self.request.is_write { Kind::Write } else { Kind::Read }
    }

    /// Returns the present time if the cost of the request is measured.
    pub(super) fn began_ns(&self) -> Option<u64> {
        self.place.map(|_| now_ns())
    }
}

/// The parts that decide how requests are served.
pub(super) struct Router {
    pub(super) pages: Arc<Pages>,
    pub(super) classes: IoClasses,
    pub(super) admission: Admission,
    pub(super) by_cost: ByCost,
    pub(super) fallback: Fallback,
    /// Code of the [`Mode`].
    pub(super) mode: AtomicU32,
}

impl Router {
    pub(in crate::cache) fn mode(&self) -> Mode {
        Mode::of_code(self.mode.load(Ordering::SeqCst)).unwrap_or_default()
    }

    /// Routes a request of `queue` for `len_bytes` bytes at `offset_bytes`. `kind` is `None` for
    /// zeroes, because cost does not decide about zeroes.
    ///
    /// # Errors
    /// The device has no such bytes, or the request would change a device that is read-only.
    pub(in crate::cache) fn route(
        &self,
        queue: u32,
        kind: Option<Kind>,
        (offset_bytes, len_bytes): (u64, u64),
    ) -> Result<Route> {
        let (geometry, is_write) = (&self.pages.backing.geometry, kind != Some(Kind::Read));
        if is_write {
            geometry.check_write(offset_bytes, len_bytes)?;
        } else {
            geometry.check(offset_bytes, len_bytes)?;
        }
        let queue = u16::try_from(queue).unwrap_or(u16::MAX);
        let request = Request { queue, offset_bytes, len_bytes, is_write };
        let (class, own) = self.classes.of(&request);
        let mode = self.behaviour(own);
        let (needs_cache_alone, caches_misses) = if is_write {
            (mode.writes_back(), mode.caches_writes())
        } else {
            (mode.reads_hits(), mode.keeps_misses())
        };
        let misses = if !caches_misses {
            Misses::Uncached
        } else if len_bytes > 0 && self.admission.is_choosy() {
            Misses::IfAdmitted
        } else {
            Misses::Cached
        };
        let route = Route { request, class, mode, needs_cache_alone, misses, place: None };
        let place = kind
            .filter(|_| needs_cache_alone && len_bytes > 0)
            .and_then(|_| self.place_by_cost(&route));
        Ok(Route { place, ..route })
    }

    /// Returns the behaviour of requests whose IO class has the mode `own`: that of the mode, or
    /// pass-through after too many errors.
    fn behaviour(&self, own: Option<Mode>) -> &'static dyn Behaviour {
        if self.fallback.is_reached(&self.pages.failures) {
            return Mode::PassThrough.behaviour();
        }
        own.unwrap_or_else(|| self.mode()).behaviour()
    }
}
