//! Writes: into slots, or around the cache if the router says so.

use super::counters::{Counter, Tally};
use super::pages::merge::{Demand, Entry};
use super::pages::write::{BATCH_PAGES_MAX, Batch, Lack, Note};
use super::router::{Misses, Route};
use super::span::{Content, ZERO_PAGE};
use super::store::layout::PAGE;
use super::{Ask, Core, Few};
use crate::device::{Attempt, Result};
use crate::stats::RequestKind;

impl Core {
    /// Returns whether to cache the pages that a request misses.
    ///
    /// # Errors
    /// Reclaiming slots of the IO class failed.
    pub(super) fn admits(&self, route: &Route) -> Result<bool> {
        if route.misses != Misses::IfAdmitted {
            return Ok(route.misses == Misses::Cached);
        }
        let missing: Few<u64> =
            route.pages().filter(|page| self.pages.find(*page).is_none()).collect();
        Ok(self.router.is_wanted(route, missing.len() as u64)
            && self.background.cleaners.has_space_of_class(
                &missing,
                route.class,
                route.request.is_write,
            )?)
    }

    /// Stores `content`, dirty. It is durable on return; or, with atomic flush and without
    /// `ask.fua`, when its group is committed.
    pub(super) fn write_content(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        self.store_content(content, self.writer.demand(ask), &mut |_| ())
    }

    /// Stores `content` like [`write_content`](Self::write_content), but as whole pages.
    pub(super) fn write_whole_pages(
        &self,
        content: &Content<'_>,
        ask: Ask<'_>,
        note: Note<'_>,
    ) -> Result<()> {
        self.store_content(content, Demand { ask, whole_pages: true, by_content: false }, note)
    }

    fn store_content(
        &self,
        content: &Content<'_>,
        demand: Demand<'_>,
        note: Note<'_>,
    ) -> Result<()> {
        let Some(data) = content.data else {
            return self.zero_pages(content.pages(), demand.ask, note);
        };
        let entries = Entry::all(content.bytes.start, data, demand.ask.class);
        self.store_all(&entries, demand, note)
    }

    /// Makes pages zero, dirty: without data, or with data if they keep their space on the backing.
    /// They are durable when a [`write_content`](Self::write_content) would be.
    pub(super) fn zero_pages(
        &self,
        pages: impl Iterator<Item = u64>,
        ask: Ask<'_>,
        note: Note<'_>,
    ) -> Result<()> {
        let data = ask.keeps_space.then_some(&ZERO_PAGE[..]);
        let entries: Vec<_> = pages.map(|page| Entry::whole(page, data, true, ask.class)).collect();
        let demand = Demand { ask, whole_pages: true, by_content: false };
        self.store_all(&entries, demand, note)
    }

    /// Stores all `entries`. Waits for slots, reads base pages and commits groups where needed.
    fn store_all(
        &self,
        mut entries: &[Entry<'_>],
        demand: Demand<'_>,
        note: Note<'_>,
    ) -> Result<()> {
        let mut base = None;
        while !entries.is_empty() {
            let batch = &entries[..entries.len().min(BATCH_PAGES_MAX)];
            let Batch { stored, lack } =
                self.writer.store_dirty(batch, base.as_ref(), demand, note)?;
            entries = &entries[stored..];
            match lack {
                None => {}
                Some(Lack::Slot(page)) => {
                    self.background.cleaners.wait_for_slot(self.pages.shard_of(page))?;
                }
                Some(Lack::Base(page)) => {
                    base = Some(self.writer.read_base(page, demand.ask.class)?);
                }
                Some(Lack::Commit) => {
                    self.pages.counters.add(Counter::GroupsCommittedEarly, 1);
                    self.pages.commit_groups()?;
                }
            }
        }
        Ok(())
    }

    /// Attempts a write, which succeeds if there are free slots and no page has to be admitted.
    pub(super) fn attempt_write(&self, route: &Route, data: &[u8], fua: bool) -> Attempt {
        let pages = route.pages();
        if data.len() > BATCH_PAGES_MAX * PAGE
            || route.misses == Misses::IfAdmitted && !self.pages.has_all(&pages)
        {
            return Attempt::WouldBlock;
        }
        let (tally, began_ns) = (Tally::default(), route.began_ns());
        let entries = Entry::all(route.request.offset_bytes, data, route.class);
        let running = self.requests.begin(RequestKind::Write, data.len() as u64);
        let demand = self.writer.demand(Ask::of_write(fua, route.class, &tally));
        match self.writer.store_dirty(&entries, None, demand, &mut |_| ()) {
            Ok(Batch { lack: None, .. }) => {
                self.router.note_write_cost(route, began_ns);
                self.pages.counters.count_write(route.class, &tally, &pages);
                Attempt::Done(Ok(()))
            }
            Ok(_) => {
                running.hand_back();
                Attempt::WouldBlock
            }
            Err(error) => Attempt::Done(Err(error)),
        }
    }
}
