//! The background work of a cache: it keeps pages that were read, and evicts and cleans ahead of
//! need.

pub(super) mod ahead;
pub(super) mod clean;
pub(super) mod clusters;
pub(super) mod evict;
pub(super) mod fill;
pub(super) mod purge;
pub(super) mod resize;

use std::sync::Arc;

use super::pages::{Need, Pages};
use super::router::admission::Admission;
use crate::device::Result;
use crate::tier::clock::now_ns;
use clean::Cleaners;
use fill::Fills;
use resize::Resizing;

/// The result of a step of background work.
pub(super) enum Progress {
    /// There is no work.
    Idle,
    /// The step did some work.
    Some,
    /// The step stored pages that were read, and more are likely to follow.
    Filled,
    /// There is work, and other threads do it.
    Blocked,
}

/// The work of a cache apart from requests.
pub(super) struct Background {
    pub(super) pages: Arc<Pages>,
    pub(super) cleaners: Cleaners,
    pub(super) fills: Fills,
    pub(super) resizing: Resizing,
}

impl Background {
    pub(in crate::cache) fn step(&self, admission: &Admission) -> Result<Progress> {
        if self.fills.are_waiting() {
            self.fills.store_fills(admission)?;
            return Ok(Progress::Filled);
        }
        let Some((number, need)) = self.next_need(now_ns()) else { return Ok(Progress::Idle) };
        let Some(mut scratch) = self.cleaners.try_lock() else {
            // Threads of requests are cleaning.
            return Ok(Progress::Blocked);
        };
        let done = match need {
            Need::FreeSlots => {
                let freed = self.cleaners.reclaim_where_needed(&mut scratch);
                freed.inspect_err(|_| self.cleaners.note_stall())? > 0
            }
            Need::Cleaning => {
                let Some(_ahead) = self.cleaners.ahead.try_lock() else {
                    return Ok(Progress::Blocked);
                };
                self.cleaners.clean_by_policy(number, &mut scratch)?
            }
        };
        Ok(if done { Progress::Some } else { Progress::Blocked })
    }

    pub(in crate::cache) fn has_work(&self) -> bool {
        self.fills.are_waiting() || self.next_need(now_ns()).is_some()
    }

    /// Returns a shard that needs work, and its need. Shards that lack free slots come first.
    fn next_need(&self, now_ns: u64) -> Option<(usize, Need)> {
        let may_clean = !self.cleaners.ahead.is_locked() && self.pages.backing.pace.is_free(now_ns);
        let need_of = |it| {
            let shard = self.pages.shards.lock(it);
            Some((it, self.pages.need_of(&shard, may_clean.then_some(now_ns))?))
        };
        let needs = (0..self.pages.shards.count()).filter_map(need_of);
        needs.min_by_key(|(_, need)| *need)
    }
}
