//! Pages into slots: copy on write, with one fence for a batch. A part of a page is merged with
//! what there is of it before ([`merge`](super::merge)).
use super::index::{Found, Stored, Taken};
use super::merge::{Base, Demand, Entry, Merged, Payload};
use super::writer::Writer;
use super::{Fill, Missing};
use crate::cache::counters::Counter;
use crate::cache::policy::classes::Admission;
use crate::cache::store::batch::Member;
use crate::cache::store::layout::{PAGE, SlotHeader, is_part, stored_bytes};
use crate::cache::{Ask, Few};
use crate::device::Result;
use crate::sync::{Ordering, fence};
use crate::tier::version_locks::VersionGuard;

/// Most pages of a batch.
pub(in crate::cache) const BATCH_PAGES_MAX: usize = 256;

/// Why a batch ended before all of its entries were stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) enum Lack {
    /// The shard of this page has no slot.
    Slot(u64),
    /// The rest of this page is in the backing.
    Base(u64),
    /// A page of which a part is to be durable by itself waits for the commit of other parts.
    Commit,
}

/// How much of a batch was stored.
pub(in crate::cache) struct Batch {
    pub(in crate::cache) stored: usize,
    pub(in crate::cache) lack: Option<Lack>,
}

/// Is told of each page that was stored.
pub(in crate::cache) type Note<'a> = &'a mut dyn FnMut(Found);

impl Writer {
    /// What was read is still the page's content, and the backing will not lose it: whether it is
    /// kept as a dirty page. None: it is not kept. With the page's lock.
    ///
    /// A record that the cache has was put over what was read: the version says that it is still
    /// the same one. It may become clean meanwhile; a page that is called dirty then is only
    /// written once more.
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

    /// Writes of parts of pages may become records.
    pub(in crate::cache) fn makes_records(&self) -> bool {
        self.makes_records.load(Ordering::Relaxed)
    }

    /// How a client's write is to be stored.
    pub(in crate::cache) fn demand<'a>(&self, ask: Ask<'a>) -> Demand<'a> {
        // Zeroes that keep their space replace those in a slot without data.
        Demand { ask, whole_pages: !self.makes_records(), by_content: !ask.keeps_space }
    }

    /// Stores a batch of as many of `entries` as nothing lacks for, from the first on.
    pub(in crate::cache) fn store_dirty(
        &self,
        entries: &[Entry<'_>],
        base: Option<&Base>,
        demand: Demand<'_>,
        note: Note<'_>,
    ) -> Result<Batch> {
        let locks = self.pages.lock_pages(entries.iter().map(|entry| entry.page));
        // With the locks: invariant 4 of groups.
        let membership = self.pages.join_group(demand.ask.fua);
        let group = membership.as_ref().map_or(0, |it| it.group);
        if self.pages.needs_commit(entries, demand.ask.fua) {
            return Ok(Batch { stored: 0, lack: Some(Lack::Commit) });
        }
        let look = self.look(entries, demand);
        let merged = self.merge(entries, base, demand, &look.changed)?;
        let mergeable = &entries[..merged.lacks_base.unwrap_or(entries.len())];
        let (members, stored) = self.take_slots(mergeable, &merged, 0);
        let began_ns = Self::begin_measured(&look);
        let replaced = self.store(&members, group, locks)?;
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

    /// Stores those of `fills` that may still be kept, in slots that nobody waits for: clean, but
    /// for pages of which the cache has dirty records.
    pub(in crate::cache) fn store_clean(&self, fills: &[Fill]) -> Result<()> {
        let locks = self.pages.lock_pages(fills.iter().map(|fill| fill.missing.page));
        // A purge forbids to keep them and then looks at the locks: one of both is seen.
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
        // One below the reserve, so that the worker evicts for the next ones.
        let (merged, reserve) = (Merged::default(), self.pages.reserve().saturating_sub(1));
        let (members, _) = self.take_slots(&entries, &merged, reserve);
        self.store(&members, 0, locks).map(drop)
    }

    /// Takes a slot for each of `entries` that changes, or a part of one for a record, as long as a
    /// shard has more than `reserve`.
    /// Also returns for how many there were slots, or need not be.
    fn take_slots<'a>(
        &self,
        entries: &[Entry<'a>],
        merged: &'a Merged,
        reserve: u32,
    ) -> (Few<Member<'a>>, usize) {
        let take = |entry: &Entry<'a>| {
            let Payload { data, lines, over } = merged.data_of(entry);
            let taken =
                self.pages.shard(entry.page).allocator.take_for(lines.count_ones(), reserve)?;
            let (Entry { page, dirty, class, .. }, version) = (*entry, taken.version);
            let zero = data.is_none();
            let rest = SlotHeader::default();
            let header = SlotHeader { page, version, lines, over, zero, dirty, ..rest };
            Some(Member { header, data, class, taken })
        };
        let (mut members, mut done) = (Few::new(), 0);
        for entry in entries {
            if !merged.is_unchanged(entry) {
                let Some(member) = take(entry) else { break };
                members.push(member);
            }
            done += 1;
        }
        (members, done)
    }

    /// Makes a batch durable, then visible; `locks` are those of its pages, and `group` is that of
    /// its members, or 0. Returns how many pages it replaced.
    fn store(
        &self,
        members: &[Member<'_>],
        group: u64,
        locks: Few<VersionGuard<'_>>,
    ) -> Result<usize> {
        if members.is_empty() {
            return Ok(0);
        }
        if let Err(error) = self.pages.store.make_durable(members, group) {
            self.pages.counters.add(Counter::WriteErrors, 1);
            self.pages.failures.count();
            self.pages.store.note_lost_slot();
            self.take_back(members);
            return Err(error.into());
        }
        self.pages.counters.add_each(Counter::BlockWrites, members.iter().map(|it| it.class));
        let replaced = members.iter().filter(|it| self.publish(it, group)).count();
        drop(locks);
        Ok(replaced)
    }

    /// Voids the headers of `members`, whose write fails. Some of them may be on the medium, and a
    /// crash must not make them count.
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

    /// Makes `member` visible, which is durable; the caller holds the lock of its page. Returns
    /// whether the page had a version before, which is dead or retained from now on.
    fn publish(&self, member: &Member<'_>, group: u64) -> bool {
        let Member { header, class, ref taken, .. } = *member;
        let SlotHeader { page, over, zero, dirty, .. } = header;
        let (record, over) = (header.is_record(), over > 0);
        let stored = Stored { dirty, zero, record, over, group, class };
        let mut shard = self.pages.shard(page);
        // Before the slot of the version before is dead, and with the shard's lock: a reader that
        // found that slot read the page's version before this, and finds another one when it has
        // copied. Only then may the slot be written over.
        self.pages.locks.advance(page);
        let replaced = shard.publish(page, taken, stored);
        // A dead slot can be taken: the worker sees no need to free one, so a writer that waits
        // hears of it here.
        shard.notify();
        let needs_worker = self.pages.needs_worker(&shard);
        drop(shard);
        if needs_worker {
            self.pages.waker.wake();
        }
        replaced
    }
}
