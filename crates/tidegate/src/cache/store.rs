//! Pages into slots: copy on write, with one fence for a batch.

use std::io::IoSlice;

use super::index::{Found, Stored, Taken};
use super::layout::{PAGE, PAGE_BYTES, SlotHeader, data_check};
use super::{Core, Few, fill};
use crate::device::{Attempt, Result};
use crate::stats::RequestKind;
use crate::tier::version_locks::VersionGuard;

/// Most pages of a batch.
const BATCH_PAGES_MAX: usize = 256;

/// A page to be stored.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) page: u64,
    /// Its bytes; none for zeroes.
    pub(super) data: Option<&'a [u8]>,
}

/// What all pages of a batch are.
#[derive(Clone, Copy)]
struct Kind {
    /// The backing does not have them.
    dirty: bool,
    /// The group that they are members of; 0: none.
    group: u64,
}

/// An entry with its slot.
struct Member<'a> {
    entry: Entry<'a>,
    taken: Taken,
}

impl Member<'_> {
    /// What was stored, as a dirty page.
    fn found(&self) -> Found {
        let Taken { slot, version, .. } = self.taken;
        let (page, zero) = (self.entry.page, self.entry.data.is_none());
        Found { page, slot, version, dirty: true, zero, verified: true }
    }
}

/// Is told of each page that was stored.
type Note<'a> = &'a mut dyn FnMut(Found);

impl Core {
    /// Stores `data` as the pages from `first` on, dirty. Durable on return, or with atomic flush
    /// and unless `fua`, when its group is committed.
    pub(super) fn write_pages(
        &self,
        first: u64,
        data: &[u8],
        fua: bool,
        note: Note<'_>,
    ) -> Result<()> {
        let pages = (first..).zip(data.chunks(PAGE));
        let entries: Few<_> = pages.map(|(page, data)| Entry { page, data: Some(data) }).collect();
        self.store_all(&entries, fua, note)
    }

    /// Makes pages zero, dirty. Durable as for [`write_pages`](Self::write_pages).
    pub(super) fn zero_pages(
        &self,
        pages: impl Iterator<Item = u64>,
        fua: bool,
        note: Note<'_>,
    ) -> Result<()> {
        let entries: Vec<_> = pages.map(|page| Entry { page, data: None }).collect();
        self.store_all(&entries, fua, note)
    }

    /// Stores all `entries`, and waits for free slots where there are none.
    fn store_all(&self, mut entries: &[Entry<'_>], fua: bool, note: Note<'_>) -> Result<()> {
        while let Some(first) = entries.first() {
            let batch = &entries[..entries.len().min(BATCH_PAGES_MAX)];
            match self.store_dirty(batch, fua, note)? {
                0 => self.wait_for_slot(self.shard_of(first.page))?,
                stored => entries = &entries[stored..],
            }
        }
        Ok(())
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a write: done where there are slots.
    pub(super) fn attempt_write(&self, offset: u64, data: &[u8], fua: bool) -> Attempt {
        if let Err(error) = self.geometry.check_write(offset, data.len() as u64) {
            return Attempt::Done(Err(error));
        }
        if data.len() > BATCH_PAGES_MAX * PAGE {
            return Attempt::WouldBlock;
        }
        let pages = (offset / PAGE_BYTES..).zip(data.chunks(PAGE));
        let entries: Few<_> = pages.map(|(page, data)| Entry { page, data: Some(data) }).collect();
        let running = self.requests.begin(RequestKind::Write, data.len() as u64);
        match self.store_dirty(&entries, fua, &mut |_| ()) {
            Ok(stored) if stored == entries.len() => Attempt::Done(Ok(())),
            Ok(_) => {
                running.hand_back();
                Attempt::WouldBlock
            }
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    /// Stores a batch of as many of `entries` as there are slots for, from the first on.
    fn store_dirty(&self, entries: &[Entry<'_>], fua: bool, note: Note<'_>) -> Result<usize> {
        let locks = self.lock_pages(entries.iter().map(|entry| entry.page));
        // With the locks: invariant 4 of groups.
        let membership = self.join_group(fua);
        let group = membership.as_ref().map_or(0, |it| it.group);
        let members = self.take_slots(entries, 0);
        self.store(&members, Kind { dirty: true, group }, locks)?;
        drop(membership);
        for it in &members {
            note(it.found());
        }
        self.bound_group(members.iter().map(|it| it.entry.page))?;
        Ok(members.len())
    }

    /// Stores those of `fills` that may still be kept, clean, in slots that nobody waits for.
    pub(super) fn store_clean(&self, fills: &[fill::Fill]) -> Result<()> {
        let locks = self.lock_pages(fills.iter().map(|fill| fill.page));
        let kept = fills.iter().filter(|fill| self.may_keep(fill));
        let entries: Vec<_> =
            kept.map(|fill| Entry { page: fill.page, data: Some(&fill.data) }).collect();
        // One below the reserve, so that the worker evicts for the next ones.
        let members = self.take_slots(&entries, self.reserve.saturating_sub(1));
        self.store(&members, Kind { dirty: false, group: 0 }, locks)
    }

    /// Takes a slot for each of `entries`, as long as a shard has more than `reserve`.
    fn take_slots<'a>(&self, entries: &[Entry<'a>], reserve: u32) -> Few<Member<'a>> {
        let take = |entry: &Entry<'a>| {
            let mut shard = self.shard(entry.page);
            let taken = (shard.available() > reserve).then(|| shard.take()).flatten()?;
            Some(Member { entry: *entry, taken })
        };
        entries.iter().map_while(take).collect()
    }

    /// Makes a batch durable, then visible; `locks` are those of its pages.
    fn store(
        &self,
        members: &[Member<'_>],
        kind: Kind,
        locks: Few<VersionGuard<'_>>,
    ) -> Result<()> {
        if members.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.make_durable(members, kind) {
            self.fallback.count();
            // Nobody knows which of the headers are on the medium.
            for Entry { page, .. } in members.iter().map(|it| it.entry) {
                self.shard(page).hold(page);
            }
            return Err(error.into());
        }
        let publish = |it: &Member<'_>| {
            let Entry { page, data } = it.entry;
            let Kind { dirty, group } = kind;
            let stored = Stored { dirty, zero: data.is_none(), group };
            let old = self.shard(page).publish(page, &it.taken, stored)?;
            Some((page, old))
        };
        let replaced: Few<_> = members.iter().filter_map(publish).collect();
        // A reader that copied from a slot that is replaced finds the lock's version changed, and
        // only then may the slot be written over.
        drop(locks);
        if kind.dirty {
            self.counters.count_write(replaced.len() as u64, members.len() as u64);
        }
        for (page, old) in replaced.into_iter().filter(|(_, old)| !old.is_retained) {
            let mut shard = self.shard(page);
            shard.retire(old);
            // A dead slot can be taken: the worker sees no need to free one, so a writer that waits
            // hears of it here.
            shard.notify();
        }
        // Pages of a batch lie in several shards.
        for it in members {
            self.wake_where_due(it.entry.page);
        }
        Ok(())
    }

    /// Stores data and headers, and fences them.
    ///
    /// Data and header of a page go in any order: the header has the data's checksum, and after a
    /// crash that decides for a lane's newest batch. For older batches it need not: their fence
    /// came before the lane's next batch began.
    fn make_durable(
        &self,
        members: &[Member<'_>],
        kind: Kind,
    ) -> std::result::Result<(), crate::pmem::PmemError> {
        let lane = self.lanes.take(&self.region);
        let store = |it: &Member<'_>| {
            let mut header = SlotHeader {
                page: it.entry.page,
                version: it.taken.version,
                lane: lane.number,
                batch: lane.batch,
                group: kind.group,
                zero: it.entry.data.is_none(),
                dirty: kind.dirty,
                data_check: 0,
            };
            if let Some(data) = it.entry.data {
                // The client may change its memory meanwhile: what is checked is what is stored.
                let see = |seen: &[u8]| header.data_check = data_check(seen);
                let at = self.places.data(it.taken.slot);
                self.region.write_streaming_seen::<PAGE>(at, &[IoSlice::new(data)], see)?;
            }
            let bytes = header.encode(self.salt, it.taken.slot);
            self.region.write_streaming(self.places.header(it.taken.slot), &bytes)
        };
        // The fence also after a failure: the lane's next batch relies on it.
        let stored = members.iter().try_for_each(store);
        stored.and(self.region.fence())
    }
}
