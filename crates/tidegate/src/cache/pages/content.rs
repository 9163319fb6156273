//! Dirty by content: what a write changes of the pages that are cached.
//!
//! A page of which nothing changes is not stored: its slot is durable already, and what the backing
//! lacks of it stays dirty. Of one with few changed lines these are stored, as a record over it.
//! Neither changes what a crash leaves: the slot that has the other lines is the newest version of
//! its page before, and stays under the record.
//!
//! Writes that are durable by themselves are not compared with atomic flush: what they would leave
//! out may wait for a commit.

use super::comparing::{ALWAYS, MEASURED, NEVER};
use super::index::Found;
use super::merge::{Demand, Entry, LINES_OVER_PAGE_MAX};
use super::read::Copied;
use super::writer::Writer;
use crate::cache::Few;
use crate::cache::counters::Counter;
use crate::cache::policy::by_content::Sample;
use crate::cache::span::Part;
use crate::cache::store::layout::{HEADER, LINE, PAGE};
use crate::cache::store::record::lines_of;
use crate::tier::clock::now_ns;

/// Of the writes of a thread one in so many is measured: a prime, so that turns of clients are not
/// met at one point alone.
const MEASURED_ONE_IN: u64 = 61;

/// What a comparison found.
#[derive(Default)]
pub(in crate::cache) struct Look {
    /// By entry: the lines that change. None: not known, or all of it is to be stored.
    /// Fewer than entries where nothing is known.
    pub(in crate::cache) changed: Few<Option<u64>>,
    /// What it cost, where it was measured.
    sample: Option<Sample>,
}

/// A record may lie over `found`.
fn can_lie_over(found: &Found, may_lay_over: bool) -> bool {
    if found.record { found.base.is_some() } else { may_lay_over }
}

/// Bytes of memory that need not be stored where of `entries` the lines `changed` alone are.
fn saved_bytes(entries: &[Entry<'_>], changed: &[Option<u64>]) -> u64 {
    let of = |(entry, changed): (&Entry<'_>, &Option<u64>)| {
        let (Some(lines), Some(data)) = (*changed, entry.data) else { return 0 };
        let header = if lines == 0 { HEADER } else { 0 };
        (data.len() + header).saturating_sub(lines.count_ones() as usize * LINE)
    };
    entries.iter().zip(changed).map(of).sum::<usize>() as u64
}

/// The lines of a page whose bytes from `from` on are `held` and that `data` changes.
fn changed_lines(from: usize, held: &[u8], data: &[u8]) -> u64 {
    let lines = held.chunks(LINE).zip(data.chunks(LINE)).enumerate();
    let changed = lines.filter(|(_, (held, data))| held != data);
    changed.fold(0, |lines, (at, _)| lines | lines_of(from + at * LINE, LINE))
}

impl Writer {
    /// Compares `entries`, of which the caller holds the locks, with what is cached, where that is
    /// the choice.
    pub(in crate::cache) fn look(&self, entries: &[Entry<'_>], demand: Demand<'_>) -> Look {
        let state = self.comparing.state();
        let is_apart = demand.ask.fua && self.pages.groups.is_some();
        if state == NEVER || !demand.by_content || is_apart {
            return Look::default();
        }
        let turn = || self.pages.counters.own_cached_writes().is_multiple_of(MEASURED_ONE_IN);
        let is_measured = state != ALWAYS && turn();
        if state == MEASURED && !is_measured {
            return Look::default();
        }
        let began_ns = is_measured.then(now_ns);
        let mut changed: Few<_> =
            entries.iter().map(|entry| self.changed_lines(entry, demand)).collect();
        let sample = began_ns.map(|began_ns| Sample {
            compare_ns: now_ns().saturating_sub(began_ns),
            saved_bytes: saved_bytes(entries, &changed),
            ..Sample::default()
        });
        if state == MEASURED {
            changed.clear();
        }
        Look { changed, sample }
    }

    /// The lines of the page of `entry` that it changes. None: the cache does not have all of them,
    /// or they cannot be a record over it.
    fn changed_lines(&self, entry: &Entry<'_>, demand: Demand<'_>) -> Option<u64> {
        let data = entry.data?;
        let (found, may_lay_over) = {
            let shard = self.pages.shard(entry.page);
            (shard.find(entry.page)?, shard.may_lay_over())
        };
        let mut page = [0; PAGE];
        let held = &mut page[..data.len()];
        let part = Part { page: entry.page, from: entry.from, at: 0..data.len() };
        // Where the cache cannot tell, all is stored.
        if self.pages.copy_part(&found, &part, held).ok()? != Copied::Whole {
            return None;
        }
        let lines = changed_lines(entry.from, held, data);
        if lines == 0 {
            self.pages.shard(entry.page).touch(&found, entry.class, true);
            return Some(0);
        }
        let fits = !demand.whole_pages && lines.count_ones() <= LINES_OVER_PAGE_MAX;
        (fits && can_lie_over(&found, may_lay_over)).then_some(lines)
    }

    /// After the `done` first of `entries` were stored, in `stored_bytes` and since `began_ns`.
    pub(in crate::cache) fn conclude_look(
        &self,
        look: &Look,
        done: &[Entry<'_>],
        stored_bytes: u64,
        began_ns: u64,
    ) {
        let saved_bytes = saved_bytes(done, &look.changed);
        if saved_bytes > 0 {
            self.pages.counters.add(Counter::UnchangedBytes, saved_bytes);
        }
        if let Some(sample) = look.sample {
            let store_ns = now_ns().saturating_sub(began_ns);
            self.comparing.see(&Sample { stored_bytes, store_ns, ..sample });
        }
    }

    /// When the stores of a write began that is measured.
    pub(in crate::cache) fn begin_measured(look: &Look) -> u64 {
        look.sample.map_or(0, |_| now_ns())
    }
}
