//! The hit ratio of reads by popularity, beside an exact simulation of the policy that evicts.

use std::collections::HashMap;

use tidegate::cache::CacheDevice;
use tidegate::cache::policy::{Replacement, ReplacementEntry, replacement};
use tidegate::tier::Tier;

use super::bed::{PAGE_BYTES, Pool, Subject, null, reading, writes};
use super::{Bench, CACHE, Part};
use crate::error::{BenchError, Result};
use crate::pattern::{Pattern, Picker};
use crate::workload::{Stop, Workload};

/// Name of the measure.
pub(super) const MEASURE: &str = "hits of Zipf 0.99 reads, backing 10x the cache";
/// The policy of the simulation in the table.
pub(super) const SIMULATION: &str = "simulation";

const PATTERN: Pattern = Pattern::Zipf { theta: 0.99 };
/// Size of the backing, in sizes of the cache.
const BACKING_SIZES: u64 = 10;
/// Reads before the count begins, and counted reads, in slots of the cache.
const READS_A_SLOT: u64 = 30;
/// Divisor of `--size` for the cache.
const SHARE: u64 = 4;

/// Measures the hit ratio, and simulates the policy.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let size = bench.args.size / SHARE;
    let pool = Pool::new(bench.args, size)?;
    for repetition in 1..=bench.args.repetitions {
        bench.step(Part::Zipf, 1, &format!("reads by popularity, run {repetition}"));
        let seed = u64::from(repetition);
        let backing = null(size * BACKING_SIZES)?;
        let pages = backing.geometry().blocks;
        let (subject, cache) = pool.with_settings(CACHE, &[], backing)?;
        let slots = slots_of(&cache);
        let reads = Reads { pages, slots, seed };
        let ratio_pct = reads.of_cache(&subject, &cache)?;
        bench.found.amounts.add(MEASURE, "%", CACHE, ratio_pct);
        let simulated_pct = reads.simulated(policy_of(&cache)?);
        bench.found.amounts.add(MEASURE, "%", SIMULATION, simulated_pct);
    }
    Ok(())
}

/// A sequence of reads, determined by the seed.
struct Reads {
    pages: u64,
    slots: u64,
    seed: u64,
}

impl Reads {
    fn count(&self) -> u64 {
        self.slots * READS_A_SLOT
    }

    /// Returns the share of the counted reads that hit, in percent.
    fn of_cache(&self, subject: &Subject, cache: &CacheDevice) -> Result<f64> {
        let part = |seed| {
            let bytes = self.pages * u64::from(PAGE_BYTES);
            let workload = writes(PATTERN, bytes, Stop::Requests(self.count()));
            Workload { read_pct: 100, seed, ..workload }
        };
        subject.prepare(&part(!self.seed))?;
        let hits = || reading(cache, "cache_read_hits");
        let before = hits();
        subject.prepare(&part(self.seed))?;
        Ok((hits() - before) as f64 * 100.0 / self.count() as f64)
    }

    /// Returns the hits, in percent, of a cache that consists of the policy alone: a page that
    /// misses is kept at once.
    fn simulated(&self, policy: &ReplacementEntry) -> f64 {
        let mut simulation = Simulation::new(policy, self.slots);
        let mut hits = 0;
        for seed in [!self.seed, self.seed] {
            let mut picker = Picker::new(PATTERN, self.pages, seed, 0, 1);
            hits = (0..self.count()).filter(|_| simulation.reads(picker.next_block())).count();
        }
        hits as f64 * 100.0 / self.count() as f64
    }
}

/// A policy with the pages of its slots.
struct Simulation {
    policy: Box<dyn Replacement>,
    pages: Vec<u64>,
    slots: HashMap<u64, u32>,
    free: Vec<u32>,
}

impl Simulation {
    fn new(entry: &ReplacementEntry, slots: u64) -> Self {
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let policy = (entry.create)(slots, slots);
        let pages = vec![0; slots as usize];
        Self { policy, pages, slots: HashMap::new(), free: (0..slots).collect() }
    }

    /// Reads `page`. Returns whether it was a hit.
    fn reads(&mut self, page: u64) -> bool {
        if let Some(slot) = self.slots.get(&page) {
            self.policy.touch(*slot, false);
            return true;
        }
        let slot = self.free.pop().unwrap_or_else(|| self.evict());
        self.pages[slot as usize] = page;
        self.slots.insert(page, slot);
        self.policy.insert(slot, page);
        false
    }

    fn evict(&mut self) -> u32 {
        let mut victim = Vec::new();
        self.policy.victims(1, &mut victim);
        let slot = victim.first().copied().unwrap_or_default();
        let page = self.pages[slot as usize];
        self.policy.remove(slot, page);
        self.slots.remove(&page);
        slot
    }
}

fn slots_of(cache: &CacheDevice) -> u64 {
    let bytes = ["cache_occupancy_bytes", "cache_free_bytes"].map(|name| reading(cache, name));
    bytes.iter().sum::<u64>() / u64::from(PAGE_BYTES)
}

/// Returns the policy that evicts from `cache`.
fn policy_of(cache: &CacheDevice) -> Result<&'static ReplacementEntry> {
    let settings = cache.settings();
    let set = settings.iter().find(|setting| setting.key == "eviction");
    let name = set.map_or("lru", |setting| setting.value.as_str());
    let unknown = || BenchError::program(CACHE, format!("evicts by {name}, which is not known"));
    replacement(name).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulation_of_lru_keeps_what_was_used_last() {
        let mut simulation = Simulation::new(replacement("lru").unwrap(), 2);
        let found: Vec<_> =
            [1, 2, 1, 3, 1, 2].into_iter().map(|page| simulation.reads(page)).collect();
        assert_eq!(found, [false, false, true, false, true, false]);
    }
}
