//! Writes: into slots, or around the cache where the router says so.

use std::ops::Range;

use super::counters::Counter;
use super::pages::merge::{Demand, Entry};
use super::pages::write::{BATCH_PAGES_MAX, Batch, Lack, Note};
use super::policy::cost::{Kind, Place};
use super::router::admission::request_of;
use super::span::{Content, ZERO_PAGE, bytes_at, pages_in, pages_of};
use super::store::layout::PAGE;
use super::{Ask, Core, Few, Origin};
use crate::device::{Attempt, Result};
use crate::stats::RequestKind;
use crate::tier::clock::now_ns;

impl Core {
    /// [`attempt`](crate::device::BlockDevice::attempt) of a write in a mode that writes back: one
    /// that is the backing's is handed back.
    pub(super) fn attempt_write_by_cost(&self, offset: u64, data: &[u8], ask: Ask<'_>) -> Attempt {
        if let Err(error) = self.backing.geometry.check_write(offset, data.len() as u64) {
            return Attempt::Done(Err(error));
        }
        if !self.router.may_go_around(&bytes_at(offset, data.len())) {
            return self.attempt_admitted_write(offset, data, ask);
        }
        if self.router.hands_back(Kind::Write, data.len() as u64) {
            return Attempt::WouldBlock;
        }
        let began_ns = now_ns();
        let done = self.attempt_admitted_write(offset, data, ask);
        if matches!(done, Attempt::Done(Ok(()))) {
            let took_ns = now_ns().saturating_sub(began_ns);
            self.router.see_cost(Place::Memory, Kind::Write, data.len() as u64, took_ns, 1);
        }
        done
    }

    /// Whether what a request for `bytes` misses is cached.
    ///
    /// # Errors
    /// The class made place for it, and that failed.
    pub(super) fn admits(&self, bytes: &Range<u64>, is_write: bool, from: Origin) -> Result<bool> {
        if !self.router.admission.is_choosy() || bytes.is_empty() {
            return Ok(true);
        }
        let pages = pages_in(bytes);
        let missing: Few<u64> =
            pages.clone().filter(|page| self.pages.find(*page).is_none()).collect();
        let request = request_of(bytes, is_write, from.queue);
        let is_wanted = self.router.is_wanted(&pages, missing.len() as u64, &request);
        Ok(is_wanted
            && self.background.cleaners.has_space_of_class(&missing, from.class, is_write)?)
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a write: one that misses a page has to
    /// be admitted first.
    pub(super) fn attempt_admitted_write(&self, offset: u64, data: &[u8], ask: Ask<'_>) -> Attempt {
        if !self.router.admission.is_choosy() {
            return self.attempt_write(offset, data, ask);
        }
        let bytes = bytes_at(offset, data.len());
        if !self.pages.has_all(&pages_in(&bytes)) {
            return Attempt::WouldBlock;
        }
        let done = self.attempt_write(offset, data, ask);
        if matches!(done, Attempt::Done(Ok(()))) {
            self.router.admission.note_hit(&bytes, true, ask.from.queue);
        }
        done
    }

    /// Stores `content`, dirty. Durable on return, or with atomic flush and unless `ask.fua`, when
    /// its group is committed.
    pub(super) fn write_content(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        self.store_content(content, self.writer.demand(ask), &mut |_| ())
    }

    /// As [`write_content`](Self::write_content), and the slots hold whole pages afterwards.
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
        let entries = Entry::all(content.bytes.start, data, demand.ask.from.class);
        self.store_all(&entries, demand, note)
    }

    /// Makes pages zero, dirty: without data, or with data where they keep their space on the
    /// backing. Durable as for [`write_content`](Self::write_content).
    pub(super) fn zero_pages(
        &self,
        pages: impl Iterator<Item = u64>,
        ask: Ask<'_>,
        note: Note<'_>,
    ) -> Result<()> {
        let data = ask.keeps_space.then_some(&ZERO_PAGE[..]);
        let entries: Vec<_> =
            pages.map(|page| Entry::whole(page, data, true, ask.from.class)).collect();
        let demand = Demand { ask, whole_pages: true, by_content: false };
        self.store_all(&entries, demand, note)
    }

    /// Stores all `entries`, and waits for what they need.
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
                    base = Some(self.writer.read_base(page, demand.ask.from.class)?);
                }
                Some(Lack::Commit) => {
                    self.pages.counters.add(Counter::GroupsCommittedEarly, 1);
                    self.pages.commit_groups()?;
                }
            }
        }
        Ok(())
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a write of whole blocks of the device,
    /// which the caller has checked: done where there are slots.
    pub(super) fn attempt_write(&self, offset: u64, data: &[u8], ask: Ask<'_>) -> Attempt {
        if data.len() > BATCH_PAGES_MAX * PAGE {
            return Attempt::WouldBlock;
        }
        let entries = Entry::all(offset, data, ask.from.class);
        let running = self.requests.begin(RequestKind::Write, data.len() as u64);
        match self.writer.store_dirty(&entries, None, self.writer.demand(ask), &mut |_| ()) {
            Ok(Batch { lack: None, .. }) => {
                let pages = pages_of(offset, data.len() as u64);
                self.pages.counters.count_write(ask.from.class, ask.tally, &pages);
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
