//! Dirty by content: stores only the changes of a write to cached pages.
//!
//! A page that a write does not change is not stored: its slot is durable already, and the page
//! stays dirty if the backing lacks its bytes. If few lines change, they are stored as a record
//! over the page. Neither changes the result of a crash: the slot with the other lines was the
//! newest version of its page before, and stays under the record.
//!
//! With atomic flush, FUA writes are not compared: the bytes that they omit may wait for a commit.

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

/// One in this many writes of a thread is measured. A prime number, so that samples do not fall on
/// one point of a client's regular pattern.
const MEASURED_ONE_IN: u64 = 61;

/// The result of a comparison.
#[derive(Default)]
pub(in crate::cache) struct Look {
    /// The changed lines of each entry. `None` if they are not known, or if the whole entry is to
    /// be stored. Has fewer elements than there are entries if nothing is known.
    pub(in crate::cache) changed: Few<Option<u64>>,
    /// The cost of the comparison, if it was measured.
    sample: Option<Sample>,
}

/// Returns whether a record may lie over `found`.
fn can_lie_over(found: &Found, may_lay_over: bool) -> bool {
    if found.record { found.base.is_some() } else { may_lay_over }
}

/// Returns how many bytes of memory a write saves by storing only the lines `changed` of `entries`.
fn saved_bytes(entries: &[Entry<'_>], changed: &[Option<u64>]) -> u64 {
    let of = |(entry, changed): (&Entry<'_>, &Option<u64>)| {
        let (Some(lines), Some(data)) = (*changed, entry.data) else { return 0 };
        let header = if lines == 0 { HEADER } else { 0 };
        (data.len() + header).saturating_sub(lines.count_ones() as usize * LINE)
    };
    entries.iter().zip(changed).map(of).sum::<usize>() as u64
}

/// Returns the lines of a page that `data` changes. `held` are the page's bytes from `from` on.
fn changed_lines(from: usize, held: &[u8], data: &[u8]) -> u64 {
    let lines = held.chunks(LINE).zip(data.chunks(LINE)).enumerate();
    let changed = lines.filter(|(_, (held, data))| held != data);
    changed.fold(0, |lines, (at, _)| lines | lines_of(from + at * LINE, LINE))
}

impl Writer {
    /// Compares `entries` with the cached pages, if the setting or the measured benefit demands
    /// that. The caller holds the locks of their pages.
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

    /// Returns the lines of its page that `entry` changes. Returns `None` if the cache lacks some
    /// of these bytes, or if the lines cannot be a record over the cached page.
    fn changed_lines(&self, entry: &Entry<'_>, demand: Demand<'_>) -> Option<u64> {
        let data = entry.data?;
        let (found, may_lay_over) = {
            let shard = self.pages.shard(entry.page);
            (shard.find(entry.page)?, shard.may_lay_over())
        };
        let mut page = [0; PAGE];
        let held = &mut page[..data.len()];
        let part = Part { page: entry.page, from: entry.from, at: 0..data.len() };
        // If the cache cannot tell, the whole entry is stored.
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

    /// Counts the bytes that `look` saved, and adds the sample if `look` was measured. `done` are
    /// the stored entries, which took `stored_bytes` of memory and the time since `began_ns`.
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

    /// Returns the time before the stores of a measured write, or 0 if it is not measured.
    pub(in crate::cache) fn begin_measured(look: &Look) -> u64 {
        look.sample.map_or(0, |_| now_ns())
    }
}
