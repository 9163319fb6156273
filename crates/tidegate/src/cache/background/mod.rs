//! The background work of a cache: keeping what was read, evicting and cleaning ahead of need.

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

/// What became of a step.
pub(super) enum Progress {
    /// There was nothing to do.
    Idle,
    /// Something was done.
    Some,
    /// Pages that were read are kept, and more are likely.
    Filled,
    /// There is work, and other threads are at it.
    Blocked,
}

/// What a cache does beside requests.
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
            // Requests clean.
            return Ok(Progress::Blocked);
        };
        let done = match need {
            Need::FreeSlots => self.cleaners.reclaim_where_needed(&mut scratch)? > 0,
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

    /// A shard that needs work, one without free slots first.
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
