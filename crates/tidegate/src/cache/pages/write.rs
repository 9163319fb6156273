//! Stores pages in slots: copy on write, with one fence for each batch. A part of a page is merged
//! with the page's previous content ([`merge`](super::merge)).
use super::index::{Found, Shard, Stored, Taken};
use super::merge::{Base, Demand, Entry, Merged, Payload};
use super::writer::Writer;
use super::{Fill, Missing};
use crate::cache::counters::Counter;
use crate::cache::policy::classes::Admission;
use crate::cache::store::batch::Member;
use crate::cache::store::layout::{PAGE, SlotHeader, is_part, stored_bytes};
use crate::cache::{Ask, Few};
use crate::device::Result;
use crate::pmem::PmemError;
use crate::sync::{Ordering, fence};

/// Maximum number of pages of a batch.
pub(in crate::cache) const BATCH_PAGES_MAX: usize = 256;

/// Maximum number of times that a batch is stored in other slots because memory failed. One page of
/// memory has the headers of 64 adjacent slots.
const TRIES_MAX: u32 = 128;

/// Why a batch ended before all of its entries were stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) enum Lack {
    /// The shard of this page has no slot.
    Slot(u64),
    /// The rest of this page is in the backing, and is needed.
    Base(u64),
    /// A FUA write of a part needs a commit first: other parts of its page wait for that.
    Commit,
}

/// The result of storing a batch: how many entries were stored, and why no more.
pub(in crate::cache) struct Batch {
    pub(in crate::cache) stored: usize,
    pub(in crate::cache) lack: Option<Lack>,
}

/// Called with each page that was stored.
pub(in crate::cache) type Note<'a> = &'a mut dyn FnMut(Found);

impl Writer {
    /// Returns whether to store `fill` as a dirty page, or `None` if the page has changed since the
    /// read, its record waits for a commit, or the backing may lose the bytes. The caller holds the
    /// page's lock.
    ///
    /// If the cache has a record of the page, the fill contains its lines: an unchanged version
    /// shows that the record is still the one that was merged. If the record becomes clean
    /// meanwhile, the page is only written once more.
    pub(in crate::cache) fn is_kept_dirty(&self, fill: &Fill) -> Option<bool> {
        let Missing { page, version, seen, .. } = fill.missing;
        let stands = self.pages.locks.unchanged(page, version)
            && self.pages.backing.traffic.may_fill(page, seen);
        let shard = self.pages.shard(page);
        match shard.find(page).filter(|_| stands) {
            Some(found) => {
                let is_kept = found.record && found.base.is_none() && !shard.waits(page);
                is_kept.then_some(found.dirty)
            }
            None => stands.then_some(false),
        }
    }

    /// Returns whether writes of parts of pages may become records.
    pub(in crate::cache) fn makes_records(&self) -> bool {
        self.makes_records.load(Ordering::Relaxed)
    }

    /// Returns how to store a client's write.
    pub(in crate::cache) fn demand<'a>(&self, ask: Ask<'a>) -> Demand<'a> {
        // Zeroes that keep their space also replace zeroes in a slot without data.
        Demand { ask, whole_pages: !self.makes_records(), by_content: !ask.keeps_space }
    }

    /// Stores a batch of leading `entries`, up to the first that cannot be stored now, and calls
    /// `note` with each stored page. Returns how many were stored, and why the batch ended.
    pub(in crate::cache) fn store_dirty(
        &self,
        entries: &[Entry<'_>],
        base: Option<&Base>,
        demand: Demand<'_>,
        note: Note<'_>,
    ) -> Result<Batch> {
        let locks = self.pages.lock_pages(entries.iter().map(|entry| entry.page));
        // Joins under the locks: invariant 4 of groups.
        let membership = self.pages.join_group(demand.ask.fua);
        let group = membership.as_ref().map_or(0, |it| it.group);
        if self.pages.needs_commit(entries, demand.ask.fua) {
            return Ok(Batch { stored: 0, lack: Some(Lack::Commit) });
        }
        let look = self.look(entries, demand);
        let merged = self.merge(entries, base, demand, &look.changed)?;
        let mergeable = &entries[..merged.lacks_base.unwrap_or(entries.len())];
        let began_ns = Self::begin_measured(&look);
        let (members, stored, replaced) = self.store_in_slots(mergeable, &merged, group)?;
        drop(locks);
        drop(membership);
        let bytes = members.iter().map(Member::stored_bytes).sum();
        self.conclude_look(&look, &entries[..stored], bytes, began_ns);
        let hits = replaced + stored - members.len();
        demand.ask.tally.add(stored as u64, hits as u64);
        for it in &members {
            note(it.found());
        }
        self.pages.bound_group(members.iter().map(|it| it.header.page))?;
        let lack = entries.get(stored).map(|entry| match merged.lacks_base {
            Some(at) if at == stored => Lack::Base(entry.page),
            _ => Lack::Slot(entry.page),
        });
        Ok(Batch { stored, lack })
    }

    /// Stores the fills that may still be kept, in slots that no writer needs. They are stored as
    /// clean, except for pages with a dirty record in the cache.
    pub(in crate::cache) fn store_clean(&self, fills: &[Fill]) -> Result<()> {
        let locks = self.pages.lock_pages(fills.iter().map(|fill| fill.missing.page));
        // A purge first forbids keeping fills, and then waits for the holders of locks. By the
        // fences, either the purge sees these locks, or the check below sees the prohibition.
        fence(Ordering::SeqCst);
        let has_space = |fill: &Fill| {
            let number = self.pages.shard_of(fill.missing.page);
            self.pages.class_admission(number, 1, fill.class) == Admission::Insert
        };
        let kept = fills.iter().filter_map(|fill| {
            let dirty = self.is_kept_dirty(fill).filter(|_| has_space(fill))?;
            Some(Entry::whole(fill.missing.page, Some(&fill.data), dirty, fill.class))
        });
        let entries: Vec<_> = kept.collect();
        // Fills may take one slot of the reserve, so that the worker evicts pages for later ones.
        let (merged, reserve) = (Merged::default(), self.pages.reserve().saturating_sub(1));
        let (members, _) = self.take_slots(&entries, &merged, reserve);
        let stored = self.store(&members, 0);
        drop(locks);
        Ok(stored.map(drop)?)
    }

    /// Takes slots for `entries` and stores them. If memory fails, tries other slots: one whose
    /// memory failed is not taken again. Returns the members, how many leading entries are stored,
    /// and how many pages had a version before. The caller holds the locks of the pages.
    fn store_in_slots<'a>(
        &self,
        entries: &[Entry<'a>],
        merged: &'a Merged,
        group: u64,
    ) -> Result<(Few<Member<'a>>, usize, usize)> {
        let mut tries = 0;
        loop {
            let (members, stored) = self.take_slots(entries, merged, 0);
            match self.store(&members, group) {
                Err(PmemError::Poisoned { .. }) if tries < TRIES_MAX => tries += 1,
                replaced => return Ok((members, stored, replaced?)),
            }
        }
    }

    /// Takes a slot, or for a record a part of one, for each changed entry, while the shard has
    /// more than `reserve` slots. Also returns how many leading entries have a slot or need none.
    fn take_slots<'a>(
        &self,
        entries: &[Entry<'a>],
        merged: &'a Merged,
        reserve: u32,
    ) -> (Few<Member<'a>>, usize) {
        let take = |shard: &mut Shard, entry: &Entry<'a>| {
            let Payload { data, lines, over } = merged.data_of(entry);
            let taken = shard.allocator.take_for(lines.count_ones(), reserve)?;
            let (Entry { page, dirty, class, .. }, version) = (*entry, taken.version);
            let zero = data.is_none();
            let rest = SlotHeader::default();
            let header = SlotHeader { page, version, lines, over, zero, dirty, ..rest };
            Some(Member { header, data, class, taken })
        };
        let (mut members, mut done) = (Few::new(), 0);
        for run in self.pages.runs_by_shard(entries, |entry| entry.page) {
            let mut shard = self.pages.shard(run[0].page);
            for entry in run {
                if !merged.is_unchanged(entry) {
                    let Some(member) = take(&mut shard, entry) else { return (members, done) };
                    members.push(member);
                }
                done += 1;
            }
        }
        (members, done)
    }

    /// Makes a batch durable, then visible. `group` is the group of its members, or 0. Returns how
    /// many pages had a version before. The caller holds the locks of the pages.
    fn store(&self, members: &[Member<'_>], group: u64) -> std::result::Result<usize, PmemError> {
        if members.is_empty() {
            return Ok(0);
        }
        if let Err(error) = self.pages.store.make_durable(members, group) {
            self.pages.counters.add(Counter::WriteErrors, 1);
            self.pages.failures.count();
            self.pages.store.note_lost_slot();
            self.take_back(members);
            return Err(error);
        }
        self.pages.counters.add_each(Counter::BlockWrites, members.iter().map(|it| it.class));
        let runs = self.pages.runs_by_shard(members, |member| member.header.page);
        Ok(runs.map(|run| self.publish(run, group)).sum())
    }

    /// Voids the headers of `members`, whose write failed, so that none counts after a crash.
    fn take_back(&self, members: &[Member<'_>]) {
        let taken: Few<Taken> = members.iter().map(|it| it.taken.whole()).collect();
        let are_void: Few<bool> =
            taken.iter().map(|it| self.pages.store.void(it.slot).is_ok()).collect();
        let is_fenced = self.pages.store.region.fence().is_ok();
        for ((it, taken), is_void) in members.iter().zip(taken).zip(are_void) {
            let data = self.pages.store.places.data(taken.slot);
            let len = if is_part(taken.slot) { stored_bytes(it.header.lines) } else { PAGE };
            let is_whole = self.pages.store.region.read(data, &mut [0; PAGE][..len]).is_ok();
            let page = it.header.page;
            let mut shard = self.pages.shard(page);
            shard.allocator.take_back(page, &taken, is_void && is_fenced, is_whole);
            shard.notify();
        }
    }

    /// Makes durable members of one shard, `run`, visible. The caller holds the locks of their
    /// pages. Returns how many pages had a version before; these versions are dead or retained from
    /// now on.
    fn publish(&self, run: &[Member<'_>], group: u64) -> usize {
        let mut shard = self.pages.shard(run[0].header.page);
        let mut replaced = 0;
        for Member { header, class, taken, .. } in run {
            let SlotHeader { page, over, zero, dirty, .. } = *header;
            let (record, over, class) = (header.is_record(), over > 0, *class);
            let stored = Stored { dirty, zero, record, over, group, class };
            // Advances the page's version under the shard's lock, before the replaced slot becomes
            // dead. A reader that found the replaced slot has read the page's version before this,
            // and finds it changed after its copy. Only from now on may the slot be overwritten.
            self.pages.locks.advance(page);
            replaced += usize::from(shard.publish(page, taken, stored));
        }
        // The replaced slots may be dead, and then can be taken. The worker sees no need to free a
        // slot, so a waiting writer is notified here.
        shard.notify();
        let needs_worker = self.pages.needs_worker(&shard);
        drop(shard);
        if needs_worker {
            self.pages.waker.wake();
        }
        replaced
    }
}
