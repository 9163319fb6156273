//! Reads: pages from their slots, the rest from the backing.

use super::Core;
use super::counters::Counter;
use super::policy::Request;
use super::policy::cost::Place;
use super::router::Route;
use super::span::parts;
use super::store::layout::{PAGE, PAGE_BYTES};
use crate::device::{Attempt, BlockDeviceExt, Result};
use crate::stats::RequestKind;
use crate::stats::Running;
use crate::tier::clock::now_ns;
use crate::tier::version_locks::Version;

impl Core {
    /// Reads the bytes of a request. Caches the pages that the backing served if they are admitted.
    pub(super) fn read_bytes(&self, route: &Route, buf: &mut [u8]) -> Result<()> {
        let Route { class, request: Request { offset_bytes: offset, .. }, .. } = *route;
        let pages = route.pages();
        let promotes = self.admits(route)?;
        let (mut at, mut hits) = (0, 0);
        while let Some(part) = parts(offset + at as u64, buf.len() - at).next() {
            let rest = &mut buf[at..];
            if self.pages.read_hit(&part, &mut rest[part.at.clone()], class)? {
                hits += 1;
                at += part.at.len();
            } else if part.is_whole() {
                let most = rest.len() / PAGE;
                let missed = &mut rest[..most * PAGE];
                at += self.read_missing(part.page, missed, promotes, class)? * PAGE;
            } else {
                let mut page = [0; PAGE];
                if self.read_missing(part.page, &mut page, promotes, class)? > 0 {
                    let len = part.at.len();
                    rest[part.at].copy_from_slice(&page[part.from..part.from + len]);
                    at += len;
                }
            }
        }
        self.pages.counters.count_read(class, hits, pages.end - pages.start);
        Ok(())
    }

    /// Reads uncached pages from the backing: the neighbours from `first` on, at most as many as
    /// fit into `buf`. Caches them for `class` if `promotes`. Returns the number of pages read; 0
    /// if the first page was cached or written meanwhile.
    fn read_missing(&self, first: u64, buf: &mut [u8], promotes: bool, class: u8) -> Result<usize> {
        let run = self.pages.missing_run(first, buf.len() / PAGE);
        if run.is_empty() {
            // The first page was cached a moment ago.
            self.store.region.relax();
            return Ok(0);
        }
        let buf = &mut buf[..run.len() * PAGE];
        self.read_backing(first * PAGE_BYTES, buf, class)?;
        // The caller reads a page that was written meanwhile again, with all pages behind it.
        let stood = self.pages.standing(&run, buf)?;
        if promotes {
            self.background.fills.keep_read(&run[..stood], buf, class);
        }
        Ok(stood)
    }

    /// Attempts a read, which succeeds if all pages are cached.
    pub(super) fn attempt_read(&self, route: &Route, buf: &mut [u8]) -> Attempt {
        let running = self.requests.begin(RequestKind::Read, buf.len() as u64);
        for part in parts(route.request.offset_bytes, buf.len()) {
            match self.pages.read_hit(&part, &mut buf[part.at.clone()], route.class) {
                Ok(true) => {}
                Ok(false) => {
                    running.hand_back();
                    return Attempt::WouldBlock;
                }
                Err(error) => return Attempt::Done(Err(error)),
            }
        }
        let pages = route.pages();
        let pages = pages.end - pages.start;
        self.pages.counters.count_read(route.class, pages, pages);
        self.router.note_read_cost(buf.len(), &running);
        Attempt::Done(Ok(()))
    }

    /// Reads whole pages from the backing for a client, counts them, and measures the time.
    pub(super) fn read_backing(&self, offset: u64, buf: &mut [u8], class: u8) -> Result<()> {
        let _foreground = self.backing.pace.foreground();
        let began_ns = if self.router.by_cost.is_on() { now_ns() } else { 0 };
        let read = self.backing.device.read(offset, buf);
        self.pages.counters.count_core_read(class, (buf.len() / PAGE) as u64, &read);
        read?;
        self.router.note_backing_read(buf.len(), began_ns);
        Ok(())
    }

    /// Reads in the route's mode, or from the backing if that is quicker. `running` may measure it.
    pub(super) fn read_routed(
        &self,
        route: &Route,
        buf: &mut [u8],
        running: &Running<'_>,
    ) -> Result<()> {
        if route.place == Some(Place::Backing) && self.reads_around(route, buf) {
            return Ok(());
        }
        let is_measured = route.needs_cache_alone
            && self.router.by_cost.is_on()
            && running.sampled_ns().is_some()
            && self.pages.has_all(&route.pages());
        route.mode.read(self, route, buf)?;
        if is_measured {
            self.router.note_read_cost(buf.len(), running);
        }
        Ok(())
    }

    /// Reads clean pages from the backing. Returns `false` if the cache has to be read instead.
    fn reads_around(&self, route: &Route, buf: &mut [u8]) -> bool {
        let Some(seen) = self.router.see_clean(route) else { return false };
        let is_read = self.read_backing(route.request.offset_bytes, buf, route.class).is_ok();
        let stands = |(page, version): (u64, Version)| self.pages.locks.unchanged(page, version);
        if !is_read || !seen.into_iter().all(stands) {
            return false;
        }
        self.pages.counters.add_of(route.class, Counter::PassThroughReads, 1);
        self.pages.counters.add(Counter::ReadsByCost, 1);
        true
    }
}
