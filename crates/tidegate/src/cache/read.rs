//! Reads: pages from their slots, the rest from the backing.

use super::counters::Counter;
use super::policy::cost::Kind;
use super::router::by_cost::may_read_around;
use super::router::mode::Behaviour;
use super::span::{bytes_at, pages_of, parts};
use super::store::layout::{PAGE, PAGE_BYTES};
use super::{Core, Origin};
use crate::device::{Attempt, Result};
use crate::stats::RequestKind;
use crate::stats::Running;
use crate::tier::clock::now_ns;
use crate::tier::version_locks::Version;

impl Core {
    /// Reads at `offset`. What the backing had is kept afterwards where `promotes`.
    pub(super) fn read_bytes(
        &self,
        offset: u64,
        buf: &mut [u8],
        promotes: bool,
        from: Origin,
    ) -> Result<()> {
        let Origin { class, .. } = from;
        let pages = pages_of(offset, buf.len() as u64);
        let promotes = promotes && self.admits(&bytes_at(offset, buf.len()), false, from)?;
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

    /// Reads neighbours from `first` on that the cache does not have from the backing, at most as
    /// many as fit into `buf`, for `class`, and keeps them where it `promotes`. Returns how many: 0
    /// where it has the first one by now.
    fn read_missing(&self, first: u64, buf: &mut [u8], promotes: bool, class: u8) -> Result<usize> {
        let run = self.pages.missing_run(first, buf.len() / PAGE);
        if run.is_empty() {
            // It came into the cache this moment.
            self.store.region.relax();
            return Ok(0);
        }
        let buf = &mut buf[..run.len() * PAGE];
        self.read_backing(first * PAGE_BYTES, buf, class)?;
        // A page that was written meanwhile is read again, with all behind it.
        let stood = self.pages.standing(&run, buf)?;
        if promotes {
            self.background.fills.keep_read(&run[..stood], buf, class);
        }
        Ok(stood)
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a read of whole blocks of the device,
    /// which the caller has checked: done where all of it is cached.
    pub(super) fn attempt_read(&self, offset: u64, buf: &mut [u8], class: u8) -> Attempt {
        let running = self.requests.begin(RequestKind::Read, buf.len() as u64);
        for part in parts(offset, buf.len()) {
            match self.pages.read_hit(&part, &mut buf[part.at.clone()], class) {
                Ok(true) => {}
                Ok(false) => {
                    running.hand_back();
                    return Attempt::WouldBlock;
                }
                Err(error) => return Attempt::Done(Err(error)),
            }
        }
        let pages = pages_of(offset, buf.len() as u64);
        let pages = pages.end - pages.start;
        self.pages.counters.count_read(class, pages, pages);
        self.router.note_read_cost(buf.len(), &running);
        Attempt::Done(Ok(()))
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a read: one that is the backing's is
    /// handed back.
    pub(super) fn attempt_read_by_cost(
        &self,
        offset: u64,
        buf: &mut [u8],
        from: Origin,
    ) -> Attempt {
        if let Err(error) = self.backing.geometry.check(offset, buf.len() as u64) {
            return Attempt::Done(Err(error));
        }
        let may_be = self.router.by_cost.is_on() && may_read_around(offset, buf.len());
        if may_be && self.router.hands_back(Kind::Read, buf.len() as u64) {
            return Attempt::WouldBlock;
        }
        self.attempt_noted_read(offset, buf, from)
    }

    /// Reads whole pages from the backing for a client, counts them, and measures what it takes.
    pub(super) fn read_backing(&self, offset: u64, buf: &mut [u8], class: u8) -> Result<()> {
        let _foreground = self.backing.pace.foreground();
        let began_ns = if self.router.by_cost.is_on() { now_ns() } else { 0 };
        let read = self.backing.device.read(offset, buf);
        self.pages.counters.count_core_read(class, (buf.len() / PAGE) as u64, &read);
        read?;
        self.router.note_backing_read(buf.len(), began_ns);
        Ok(())
    }

    /// Reads at `offset` as `behaviour` does, or from the backing where that is quicker. `running`
    /// may measure it.
    pub(super) fn read_by_cost(
        &self,
        behaviour: &dyn Behaviour,
        offset: u64,
        buf: &mut [u8],
        from: Origin,
        running: &Running<'_>,
    ) -> Result<()> {
        if !self.router.by_cost.is_on() || !behaviour.reads_hits() {
            return behaviour.read(self, offset, buf, from);
        }
        if self.reads_around(offset, buf, from.class) {
            return Ok(());
        }
        let pages = pages_of(offset, buf.len() as u64);
        let is_measured = running.sampled_ns().is_some() && self.pages.has_all(&pages);
        behaviour.read(self, offset, buf, from)?;
        if is_measured {
            self.router.note_read_cost(buf.len(), running);
        }
        Ok(())
    }

    /// Reads clean pages at `offset` from the backing, where that is quicker. False: the cache is
    /// to be read.
    fn reads_around(&self, offset: u64, buf: &mut [u8], class: u8) -> bool {
        let may_be = may_read_around(offset, buf.len());
        if !may_be || !self.router.by_cost.picks_or_was_picked(Kind::Read, buf.len() as u64) {
            return false;
        }
        let pages = pages_of(offset, buf.len() as u64);
        let Some(seen) = self.router.see_clean(pages, class) else { return false };
        let is_read = self.read_backing(offset, buf, class).is_ok();
        let stands = |(page, version): (u64, Version)| self.pages.locks.unchanged(page, version);
        if !is_read || !seen.into_iter().all(stands) {
            return false;
        }
        self.pages.counters.add_of(class, Counter::PassThroughReads, 1);
        self.pages.counters.add(Counter::ReadsByCost, 1);
        true
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a read: of cached pages alone.
    pub(super) fn attempt_noted_read(&self, offset: u64, buf: &mut [u8], from: Origin) -> Attempt {
        let done = self.attempt_read(offset, buf, from.class);
        if matches!(done, Attempt::Done(Ok(()))) {
            self.router.admission.note_hit(&bytes_at(offset, buf.len()), false, from.queue);
        }
        done
    }
}
