//! Pages into slots: copy on write, with one fence for a batch. A part of a page is merged with
//! what there is of it before ([`merge`](super::merge)).

use std::io::IoSlice;

use super::index::{Found, Stored, Taken};
use super::merge::{Base, Demand, Entry, Merged, Payload};
use crate::cache::background::fill::Fill;
use crate::cache::recover::found_in;
use crate::cache::span::{Content, ZERO_PAGE, pages_of};
use crate::cache::store::layout::{
    ALL_PART_HEADERS, HEADER_BYTES, PAGE, SlotHeader, is_part, part_of, split_header, stored_bytes,
    whole_slot,
};
use crate::cache::tier::Counter;
use crate::cache::{Ask, Core, Few, PmemResult};
use crate::device::{Attempt, Result};
use crate::stats::RequestKind;
use crate::sync::{Ordering, fence};
use crate::tier::version_locks::VersionGuard;

/// Most pages of a batch.
pub(in crate::cache) const BATCH_PAGES_MAX: usize = 256;

/// Why a batch ended before all of its entries were stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// The shard of this page has no slot.
    Slot(u64),
    /// The rest of this page is in the backing.
    Base(u64),
    /// A page of which a part is to be durable by itself waits for the commit of other parts.
    Commit,
}

/// How much of a batch was stored.
struct Batch {
    stored: usize,
    lack: Option<Lack>,
}

/// A page, or a record of one, with its slot.
struct Member<'a> {
    /// Without what is known only when it is stored: lane, batch, group, and the data's checksum.
    header: SlotHeader,
    /// Its bytes; none for zeroes.
    data: Option<&'a [u8]>,
    class: u8,
    taken: Taken,
}

impl Member<'_> {
    /// Bytes of memory that it takes, with its header.
    fn stored_bytes(&self) -> u64 {
        HEADER_BYTES + self.data.map_or(0, |data| data.len() as u64)
    }

    /// What was stored.
    fn found(&self) -> Found {
        Found { verified: true, ..found_in(self.taken.slot, &self.header) }
    }
}

/// Is told of each page that was stored.
pub(in crate::cache) type Note<'a> = &'a mut dyn FnMut(Found);

impl Core {
    /// Stores `content`, dirty. Durable on return, or with atomic flush and unless `ask.fua`, when
    /// its group is committed.
    pub(in crate::cache) fn write_content(
        &self,
        content: &Content<'_>,
        ask: Ask<'_>,
    ) -> Result<()> {
        self.store_content(content, self.demand(ask), &mut |_| ())
    }

    /// How a client's write is to be stored.
    fn demand<'a>(&self, ask: Ask<'a>) -> Demand<'a> {
        // Zeroes that keep their space replace those in a slot without data.
        Demand { ask, whole_pages: !self.makes_records(), by_content: !ask.keeps_space }
    }

    /// As [`write_content`](Self::write_content), and the slots hold whole pages afterwards.
    pub(in crate::cache) fn write_whole_pages(
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
    pub(in crate::cache) fn zero_pages(
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
            let Batch { stored, lack } = self.store_dirty(batch, base.as_ref(), demand, note)?;
            entries = &entries[stored..];
            match lack {
                None => {}
                Some(Lack::Slot(page)) => self.wait_for_slot(self.shard_of(page))?,
                Some(Lack::Base(page)) => {
                    base = Some(self.read_base(page, demand.ask.from.class)?);
                }
                Some(Lack::Commit) => {
                    self.counters.add(Counter::GroupsCommittedEarly, 1);
                    self.commit_groups()?;
                }
            }
        }
        Ok(())
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a write of whole blocks of the device,
    /// which the caller has checked: done where there are slots.
    pub(in crate::cache) fn attempt_write(
        &self,
        offset: u64,
        data: &[u8],
        ask: Ask<'_>,
    ) -> Attempt {
        if data.len() > BATCH_PAGES_MAX * PAGE {
            return Attempt::WouldBlock;
        }
        let entries = Entry::all(offset, data, ask.from.class);
        let running = self.requests.begin(RequestKind::Write, data.len() as u64);
        match self.store_dirty(&entries, None, self.demand(ask), &mut |_| ()) {
            Ok(Batch { lack: None, .. }) => {
                let pages = pages_of(offset, data.len() as u64);
                self.counters.count_write(ask.from.class, ask.tally, &pages);
                Attempt::Done(Ok(()))
            }
            Ok(_) => {
                running.hand_back();
                Attempt::WouldBlock
            }
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    /// Stores a batch of as many of `entries` as nothing lacks for, from the first on.
    fn store_dirty(
        &self,
        entries: &[Entry<'_>],
        base: Option<&Base>,
        demand: Demand<'_>,
        note: Note<'_>,
    ) -> Result<Batch> {
        let locks = self.lock_pages(entries.iter().map(|entry| entry.page));
        // With the locks: invariant 4 of groups.
        let membership = self.join_group(demand.ask.fua);
        let group = membership.as_ref().map_or(0, |it| it.group);
        if self.needs_commit(entries, demand.ask.fua) {
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
        self.bound_group(members.iter().map(|it| it.header.page))?;
        let lack = entries.get(stored).map(|entry| match merged.lacks_base {
            Some(at) if at == stored => Lack::Base(entry.page),
            _ => Lack::Slot(entry.page),
        });
        Ok(Batch { stored, lack })
    }

    /// A part that is to be durable by itself would make other parts of its page durable that wait
    /// for the commit of their group.
    fn needs_commit(&self, entries: &[Entry<'_>], fua: bool) -> bool {
        let waits = |entry: &Entry<'_>| entry.is_part() && self.shard(entry.page).waits(entry.page);
        fua && self.groups.is_some() && entries.iter().any(waits)
    }

    /// Stores those of `fills` that may still be kept, in slots that nobody waits for: clean, but
    /// for pages of which the cache has dirty records.
    pub(in crate::cache) fn store_clean(&self, fills: &[Fill]) -> Result<()> {
        let locks = self.lock_pages(fills.iter().map(|fill| fill.missing.page));
        // A purge forbids to keep them and then looks at the locks: one of both is seen.
        fence(Ordering::SeqCst);
        let kept = fills.iter().filter_map(|fill| {
            let dirty = self.is_kept_dirty(fill).filter(|_| self.has_space_for(fill))?;
            Some(Entry::whole(fill.missing.page, Some(&fill.data), dirty, fill.class))
        });
        let entries: Vec<_> = kept.collect();
        // One below the reserve, so that the worker evicts for the next ones.
        let (merged, reserve) = (Merged::default(), self.reserve().saturating_sub(1));
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
            let taken = self.shard(entry.page).take_for(lines.count_ones(), reserve)?;
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
        if let Err(error) = self.make_durable(members, group) {
            self.counters.add(Counter::WriteErrors, 1);
            self.fallback.count();
            self.note_lost_slot();
            self.take_back(members);
            return Err(error.into());
        }
        self.counters.add_each(Counter::BlockWrites, members.iter().map(|it| it.class));
        let replaced = members.iter().filter(|it| self.publish(it, group)).count();
        drop(locks);
        Ok(replaced)
    }

    /// Voids the headers of `members`, whose write fails. Some of them may be on the medium, and a
    /// crash must not make them count.
    fn take_back(&self, members: &[Member<'_>]) {
        let taken: Few<Taken> = members.iter().map(|it| it.taken.whole()).collect();
        let are_void: Few<bool> = taken.iter().map(|it| self.void(it.slot).is_ok()).collect();
        let is_fenced = self.region.fence().is_ok();
        for ((it, taken), is_void) in members.iter().zip(taken).zip(are_void) {
            let data = self.places.data(taken.slot);
            let len = if is_part(taken.slot) { stored_bytes(it.header.lines) } else { PAGE };
            let is_whole = self.region.read(data, &mut [0; PAGE][..len]).is_ok();
            let page = it.header.page;
            let mut shard = self.shard(page);
            shard.take_back(page, &taken, is_void && is_fenced, is_whole);
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
        let mut shard = self.shard(page);
        // Before the slot of the version before is dead, and with the shard's lock: a reader that
        // found that slot read the page's version before this, and finds another one when it has
        // copied. Only then may the slot be written over.
        self.locks.advance(page);
        let replaced = shard.publish(page, taken, stored);
        // A dead slot can be taken: the worker sees no need to free one, so a writer that waits
        // hears of it here.
        shard.notify();
        let needs_worker = self.needs_worker(&shard);
        drop(shard);
        if needs_worker {
            self.waker.wake();
        }
        replaced
    }

    /// Stores data and headers, and fences them.
    ///
    /// Data and header of a page go in any order: the header has the data's checksum, and after a
    /// crash that decides for a lane's newest batch. For older batches it need not: their fence
    /// came before the lane's next batch began.
    ///
    /// A slot that is split gets its header in the same batch as its first part: without the one
    /// the other is not looked at, and the parts beside it are void by then. No other batch has a
    /// part of it before this one is fenced.
    fn make_durable(&self, members: &[Member<'_>], group: u64) -> PmemResult {
        self.clear_parts(members)?;
        let lane = self.lanes.take(&self.region);
        let store = |it: &Member<'_>| {
            if it.taken.splits {
                let whole = whole_slot(it.taken.slot);
                let bytes = split_header(self.salt, whole);
                self.region.write_streaming(self.places.header(whole), &bytes)?;
            }
            let (lane, batch) = (lane.number, lane.batch);
            let mut header = SlotHeader { lane, batch, group, ..it.header };
            if let Some(data) = it.data {
                let at = self.places.data(it.taken.slot);
                let parts = [IoSlice::new(data)];
                header.data_check = self.region.write_streaming_crc32c::<PAGE>(at, &parts)?;
            }
            let bytes = header.encode(self.salt, it.taken.slot);
            self.region.write_streaming(self.places.header(it.taken.slot), &bytes)
        };
        // The fence also after a failure: the lane's next batch relies on it.
        let stored = members.iter().try_for_each(store);
        stored.and(self.region.fence())
    }

    /// Makes the headers of all parts void of slots that are to be split, durably: the header that
    /// splits the slot would else make an older one count, or other data that looks like one.
    fn clear_parts(&self, members: &[Member<'_>]) -> PmemResult {
        let mut has_cleared = false;
        for taken in members.iter().map(|it| it.taken).filter(|it| it.splits) {
            let headers = self.places.header(part_of(whole_slot(taken.slot), 0));
            self.region.write_streaming(headers, &[0; ALL_PART_HEADERS])?;
            has_cleared = true;
        }
        if has_cleared { self.region.fence() } else { Ok(()) }
    }
}
