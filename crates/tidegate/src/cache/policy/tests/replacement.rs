//! The replacement policies against models that are slow and obvious, and their hit ratios in a
//! simulated cache.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::{Strategy, any, prop_oneof};
use proptest::{prop_assert, prop_assert_eq, proptest};

use crate::cache::policy::*;
use crate::cache::tests::{NO_THREAD, pool, work};
use crate::cache::{Binding, CacheDevice};
use crate::device::BlockDeviceExt;
use crate::device::memory::MemoryDevice;
use crate::tier::{Tier, list};

/// LRU, or LRW if reads do not count: the slots from the oldest use on.
struct Recency {
    order: VecDeque<u32>,
    reads_count: bool,
}

impl Replacement for Recency {
    fn insert(&mut self, slot: u32, page: u64) {
        self.remove(slot, page);
        self.order.push_back(slot);
    }

    fn touch(&mut self, slot: u32, write: bool) {
        if self.order.contains(&slot) && (write || self.reads_count) {
            self.insert(slot, 0);
        }
    }

    fn remove(&mut self, slot: u32, _page: u64) {
        self.order.retain(|&it| it != slot);
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        for _ in 0..n.min(self.order.len()) {
            out.push(self.order[0]);
            self.order.rotate_left(1);
        }
    }

    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        out.extend(self.order.iter().take(n));
    }
}

/// SIEVE: the slots from the oldest on, with their visited bits, and the position of the hand.
#[derive(Default)]
struct Hand {
    order: Vec<(u32, bool)>,
    hand: usize,
}

impl Replacement for Hand {
    fn insert(&mut self, slot: u32, _page: u64) {
        match self.order.iter_mut().find(|it| it.0 == slot) {
            Some(there) => there.1 = true,
            None => self.order.push((slot, false)),
        }
    }

    fn touch(&mut self, slot: u32, _write: bool) {
        self.order.iter_mut().filter(|it| it.0 == slot).for_each(|it| it.1 = true);
    }

    fn remove(&mut self, slot: u32, _page: u64) {
        let Some(at) = self.order.iter().position(|it| it.0 == slot) else { return };
        self.order.remove(at);
        if at < self.hand {
            self.hand -= 1;
        } else if self.hand == self.order.len() {
            self.hand = 0;
        }
    }

    fn moved(&mut self, from: u32, to: u32, page: u64) {
        self.remove(to, page);
        match self.order.iter_mut().find(|it| it.0 == from) {
            Some(there) => *there = (to, true),
            None => self.insert(to, page),
        }
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        let end = out.len() + n.min(self.order.len());
        while out.len() < end {
            let (slot, visited) = &mut self.order[self.hand];
            if !*visited {
                out.push(*slot);
            }
            *visited = !*visited;
            self.hand = (self.hand + 1) % self.order.len();
        }
    }

    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        let (newer, older) = (&self.order[self.hand..], &self.order[..self.hand]);
        let unvisited = newer.iter().chain(older).filter(|it| !it.1);
        out.extend(unvisited.map(|it| it.0).take(n));
    }
}

/// S3-FIFO: queues of slots with their uses, and the pages that left, the oldest first.
struct Queues {
    small: VecDeque<(u32, u32)>,
    main: VecDeque<(u32, u32)>,
    /// Slots, and whether they come from the small queue.
    victims: VecDeque<(u32, bool)>,
    left: VecDeque<u64>,
    /// Victims that the caller kept since a slot was removed.
    kept: usize,
    small_target: usize,
    left_most: usize,
}

impl Queues {
    fn new(slots: u32) -> Self {
        let tenth = slots as usize / 10;
        Self {
            small: VecDeque::new(),
            main: VecDeque::new(),
            victims: VecDeque::new(),
            left: VecDeque::new(),
            kept: 0,
            small_target: tenth.max(1),
            left_most: slots as usize - tenth,
        }
    }

    fn victim(&mut self) -> Option<u32> {
        loop {
            let is_first = self.small.len() >= self.small_target;
            let first = if is_first { self.small.len() } else { self.main.len() };
            let is_next = is_first != (self.kept >= first) && !self.small.is_empty();
            if is_next || self.main.is_empty() {
                let (slot, uses) = self.small.pop_front()?;
                if uses < 2 {
                    self.victims.push_back((slot, true));
                    return Some(slot);
                }
                self.main.push_back((slot, 0));
            } else {
                let (slot, uses) = self.main.pop_front()?;
                if uses == 0 {
                    self.victims.push_back((slot, false));
                    return Some(slot);
                }
                self.main.push_back((slot, uses - 1));
            }
        }
    }

    fn holds(&self, slot: u32) -> bool {
        self.small.iter().chain(&self.main).any(|it| it.0 == slot)
            || self.victims.iter().any(|it| it.0 == slot)
    }
}

impl Replacement for Queues {
    fn insert(&mut self, slot: u32, page: u64) {
        if self.holds(slot) {
            return self.touch(slot, true);
        }
        let before = self.left.len();
        self.left.retain(|&it| it != page);
        let queue = if self.left.len() < before { &mut self.main } else { &mut self.small };
        queue.push_back((slot, 0));
    }

    fn touch(&mut self, slot: u32, _write: bool) {
        let mut queued = self.small.iter_mut().chain(&mut self.main);
        if let Some((_, uses)) = queued.find(|it| it.0 == slot) {
            *uses = (*uses + 1).min(3);
        }
    }

    fn remove(&mut self, slot: u32, page: u64) {
        if self.holds(slot) {
            self.kept = 0;
        }
        if self.victims.contains(&(slot, true)) {
            self.left.push_back(page);
            if self.left.len() > self.left_most {
                self.left.pop_front();
            }
        }
        self.small.retain(|it| it.0 != slot);
        self.main.retain(|it| it.0 != slot);
        self.victims.retain(|it| it.0 != slot);
    }

    fn moved(&mut self, from: u32, to: u32, page: u64) {
        self.remove(to, page);
        let queued = self.small.iter_mut().chain(&mut self.main).map(|it| &mut it.0);
        let mut all = queued.chain(self.victims.iter_mut().map(|it| &mut it.0));
        match all.find(|it| **it == from) {
            Some(there) => *there = to,
            None => return self.insert(to, page),
        }
        self.touch(to, true);
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        for (slot, from_small) in std::mem::take(&mut self.victims) {
            let queue = if from_small { &mut self.small } else { &mut self.main };
            queue.push_back((slot, 0));
            self.kept += 1;
        }
        if self.kept >= self.small.len() + self.main.len() {
            self.kept = 0;
        }
        out.extend(std::iter::from_fn(|| self.victim()).take(n));
    }

    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        let small = self.small.iter().filter(|it| it.1 < 2);
        let mut main: Vec<_> = self.main.iter().collect();
        main.sort_by_key(|it| it.1);
        out.extend(small.chain(main).map(|it| it.0).take(n));
    }
}

/// Returns the model of the policy called `name`.
fn model(name: &str, slots: u32) -> Box<dyn Replacement> {
    match name {
        "lru" => Box::new(Recency { order: VecDeque::new(), reads_count: true }),
        "lrw" => Box::new(Recency { order: VecDeque::new(), reads_count: false }),
        "sieve" => Box::new(Hand::default()),
        "s3fifo" => Box::new(Queues::new(slots)),
        _ => panic!("{name} has no model"),
    }
}

#[derive(Debug, Clone, Copy)]
enum Call {
    Insert(u32),
    Touch(u32, bool),
    Remove(u32),
    /// Moves a page from the first slot to the second.
    Moved(u32, u32),
    /// Asks for so many victims, and evicts those with a number modulo 4 not below the second
    /// value.
    Evict(usize, u32),
}

/// Number of slots in a test of calls: few, so that calls hit the same slots.
const FEW_SLOTS: u32 = 8;

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let slot = || 0..FEW_SLOTS;
    let call = prop_oneof![
        4 => slot().prop_map(Call::Insert),
        4 => (slot(), any::<bool>()).prop_map(|(slot, write)| Call::Touch(slot, write)),
        1 => slot().prop_map(Call::Remove),
        2 => (slot(), 1..FEW_SLOTS).prop_map(|(slot, by)| Call::Moved(slot, (slot + by) % FEW_SLOTS)),
        2 => (0..2 * FEW_SLOTS as usize, 1..4_u32).prop_map(|(n, kept)| Call::Evict(n, kept)),
    ];
    vec(call, 0..200)
}

/// Makes `call`. `page_of` returns the page of a slot. Returns the victims.
fn apply(policy: &mut dyn Replacement, call: Call, page_of: impl Fn(u32) -> u64) -> Vec<u32> {
    let mut victims = Vec::new();
    match call {
        Call::Insert(slot) => policy.insert(slot, page_of(slot)),
        Call::Touch(slot, write) => policy.touch(slot, write),
        Call::Remove(slot) => policy.remove(slot, page_of(slot)),
        Call::Moved(from, to) => policy.moved(from, to, page_of(to)),
        Call::Evict(n, kept) => {
            policy.victims(n, &mut victims);
            let evicted = victims.iter().filter(|&slot| slot % 4 >= kept);
            evicted.for_each(|&slot| policy.remove(slot, page_of(slot)));
        }
    }
    victims
}

/// The page that each slot holds, as an engine knows it.
struct Pages(Box<[u64]>);

/// The page of a slot that holds nothing.
const NO_PAGE: u64 = u64::MAX;

impl Pages {
    fn new(slots: u32) -> Self {
        Self(vec![NO_PAGE; slots as usize].into())
    }

    fn get(&self, slot: u32) -> u64 {
        self.0[slot as usize]
    }

    fn set(&mut self, slot: u32, page: u64) {
        self.0[slot as usize] = page;
    }

    /// Prepares `call`: an insertion gets a page that no other slot has. Returns `false` for a move
    /// that no engine makes.
    fn prepare(&mut self, call: Call) -> bool {
        match call {
            Call::Insert(slot) if self.get(slot) == NO_PAGE => {
                let is_free = |page: &u64| (0..FEW_SLOTS).all(|slot| self.get(slot) != *page);
                let pages = (u64::from(slot)..).map(|page| page % u64::from(FEW_SLOTS));
                self.set(slot, pages.take(FEW_SLOTS as usize).find(is_free).unwrap_or(NO_PAGE));
            }
            Call::Moved(from, to) if self.get(from) == NO_PAGE || self.get(to) != NO_PAGE => {
                return false;
            }
            Call::Moved(from, to) => {
                self.set(to, self.get(from));
                self.set(from, NO_PAGE);
            }
            _ => {}
        }
        true
    }

    /// Forgets the pages that `call` removed, with its `victims`.
    fn complete(&mut self, call: Call, victims: &[u32]) {
        match call {
            Call::Remove(slot) => self.set(slot, NO_PAGE),
            Call::Evict(_, kept) => {
                for &slot in victims.iter().filter(|&slot| slot % 4 >= kept) {
                    self.set(slot, NO_PAGE);
                }
            }
            _ => {}
        }
    }
}

proptest! {
    /// With 40 slots, 8 of these in use, the small queue of `s3fifo` has several, and its memory of
    /// pages never overflows.
    #[test]
    fn policies_choose_what_their_models_choose(calls in calls(), slots in proptest::sample::select(vec![FEW_SLOTS, 40])) {
        for entry in &REPLACEMENTS {
            let mut pages = Pages::new(slots);
            let mut policy = (entry.create)(slots, slots);
            let mut model = model(entry.name, slots);
            for &call in &calls {
                if !pages.prepare(call) {
                    continue;
                }
                let found = apply(&mut *policy, call, |slot| pages.get(slot));
                let expected = apply(&mut *model, call, |slot| pages.get(slot));
                prop_assert_eq!(&found, &expected, "{} after {:?}", entry.name, call);
                pages.complete(call, &found);
                let coldest = |of: &dyn Replacement| {
                    let mut coldest = vec![u32::MAX];
                    of.coldest(3, &mut coldest);
                    coldest
                };
                prop_assert_eq!(coldest(&*policy), coldest(&*model), "{} after {:?}", entry.name, call);
            }
        }
    }

    #[test]
    fn victims_are_all_slots_in_the_policy_and_none_twice(calls in calls()) {
        for entry in &REPLACEMENTS {
            let mut policy = (entry.create)(FEW_SLOTS, FEW_SLOTS);
            let mut there = [false; FEW_SLOTS as usize];
            for &call in &calls {
                let victims = apply(&mut *policy, call, u64::from);
                match call {
                    Call::Insert(slot) => there[slot as usize] = true,
                    Call::Remove(slot) => there[slot as usize] = false,
                    Call::Moved(from, to) => {
                        there[from as usize] = false;
                        there[to as usize] = true;
                    }
                    Call::Evict(_, kept) => {
                        prop_assert!(victims.iter().all(|&slot| there[slot as usize]));
                        victims.iter().filter(|&slot| slot % 4 >= kept).for_each(|&slot| there[slot as usize] = false);
                    }
                    Call::Touch(..) => {}
                }
            }
            let mut victims = Vec::new();
            policy.victims(usize::MAX, &mut victims);
            victims.sort_unstable();
            let expected = (0..FEW_SLOTS).filter(|&slot| there[slot as usize]);
            prop_assert_eq!(victims, expected.collect::<Vec<_>>(), "{}", entry.name);
        }
    }
}

/// An engine that looks for a page that can leave asks for a few victims at a time, and keeps all
/// that cannot leave: every other page is returned before long.
#[test]
fn victims_that_are_kept_do_not_hide_others() {
    const SLOTS: u32 = 64;
    for entry in &REPLACEMENTS {
        for (used, batch) in [(0, 4), (8, 4), (8, 16), (32, 4), (32, 7), (64, 4)] {
            let mut policy = (entry.create)(SLOTS, SLOTS);
            (0..SLOTS).for_each(|slot| policy.insert(slot, u64::from(slot)));
            // These are used so often that they move to other queues.
            for _ in 0..3 {
                (0..used).for_each(|slot| policy.touch(slot, true));
            }
            let mut missing: BTreeSet<u32> = (0..SLOTS).collect();
            // Used slots go around up to four times.
            for _ in 0..6 * SLOTS as usize / batch {
                let mut victims = Vec::new();
                policy.victims(batch, &mut victims);
                missing.retain(|slot| !victims.contains(slot));
            }
            assert!(missing.is_empty(), "{}, {used} used, by {batch}: {missing:?}", entry.name);
        }
    }
}

/// A cache without data: pages in slots, and the hits.
struct Cache {
    policy: Box<dyn Replacement>,
    slots: HashMap<u64, u32>,
    pages: Pages,
    free: Vec<u32>,
    /// Slots evicted at a time.
    batch: usize,
    hits: u64,
}

impl Cache {
    fn new(capacity: u32, batch: usize, create: impl FnOnce(u32) -> Box<dyn Replacement>) -> Self {
        let (pages, policy) = (Pages::new(capacity), create(capacity));
        Self { policy, slots: HashMap::new(), pages, free: (0..capacity).collect(), batch, hits: 0 }
    }

    fn access(&mut self, page: u64, write: bool) {
        if let Some(&slot) = self.slots.get(&page) {
            self.hits += 1;
            return self.policy.touch(slot, write);
        }
        if self.free.is_empty() {
            self.policy.victims(self.batch, &mut self.free);
            for &slot in &self.free {
                self.policy.remove(slot, self.pages.get(slot));
                self.slots.remove(&self.pages.get(slot));
            }
        }
        let slot = self.free.pop().expect("a full cache has victims");
        self.pages.set(slot, page);
        self.slots.insert(page, slot);
        self.policy.insert(slot, page);
    }
}

/// Numbers from a seed (`SplitMix64`).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in [0, 1).
    fn unit(&mut self) -> f64 {
        f64::from(u32::try_from(self.next() >> 32).expect("32 bits")) / 2_f64.powi(32)
    }
}

/// `count` pages out of `pages`, the page of rank k in proportion to 1/k^0.99.
fn zipf(pages: u32, count: usize, seed: u64) -> Vec<u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=pages)
        .map(|rank| {
            sum += f64::from(rank).powf(-0.99);
            sum
        })
        .collect();
    let mut rng = Rng(seed);
    let mut next = || {
        let drawn = rng.unit() * sum;
        sums.partition_point(|&it| it <= drawn) as u64
    };
    (0..count).map(|_| next()).collect()
}

/// Hits of the second half of `trace`, in percent.
fn hit_pct(mut cache: Cache, trace: &[u64]) -> f64 {
    let (warm_up, measured) = trace.split_at(trace.len() / 2);
    for &page in warm_up {
        cache.access(page, false);
    }
    cache.hits = 0;
    for &page in measured {
        cache.access(page, false);
    }
    let count = |number: u64| f64::from(u32::try_from(number).expect("a short trace"));
    100.0 * count(cache.hits) / count(measured.len() as u64)
}

/// Zipf 0.99 over ten times the capacity. The models evict one slot at a time, as the papers do.
/// Without writes, LRW keeps the order of insertion.
#[test]
fn hit_ratios_under_zipf_are_those_of_the_models() {
    const CAPACITY: u32 = 1000;
    let trace = zipf(10 * CAPACITY, 100_000, 1);
    let mut found = HashMap::new();
    for entry in &REPLACEMENTS {
        let exact = Cache::new(CAPACITY, 1, |slots| model(entry.name, slots));
        let exact_pct = hit_pct(exact, &trace);
        for batch in [1, 10] {
            let pct =
                hit_pct(Cache::new(CAPACITY, batch, |slots| (entry.create)(slots, slots)), &trace);
            let name = entry.name;
            assert!((pct - exact_pct).abs() < 1.0, "{name} by {batch}: {pct} %, {exact_pct} %");
            found.insert(name, pct);
        }
    }
    assert!(found["sieve"] > found["lru"] + 3.0, "{found:?}");
    assert!(found["s3fifo"] > found["lru"] + 3.0, "{found:?}");
    assert!(found["lru"] > found["lrw"] + 2.0, "{found:?}");
}

/// Compares the engine with an exact simulation, which evicts one page at a time and keeps none
/// free.
#[test]
fn hit_ratios_of_the_engine_under_zipf_are_those_of_the_policies() {
    const CAPACITY: u32 = 1000;
    let trace = zipf(10 * CAPACITY, 60_000, 2);
    for entry in &REPLACEMENTS {
        let exact_pct =
            hit_pct(Cache::new(CAPACITY, 1, |slots| (entry.create)(slots, slots)), &trace);
        let pages = u64::from(10 * CAPACITY);
        let backing = Arc::new(MemoryDevice::new(4096, pages).unwrap());
        let binding = Binding { identity: 1, name: "memory".into(), pages };
        let region = pool(CAPACITY.into());
        let device = CacheDevice::open(region, backing, binding, NO_THREAD).unwrap();
        device.set("eviction", entry.name).unwrap();
        let (mut hits, mut buf) = (0_u32, [0; 4096]);
        for (number, page) in trace.iter().enumerate() {
            let is_hit = device.core.pages.find(*page).is_some();
            hits += u32::from(is_hit && number >= trace.len() / 2);
            device.read(page * 4096, &mut buf).unwrap();
            work(&device);
        }
        let pct = 100.0 * f64::from(hits) / f64::from(u32::try_from(trace.len() / 2).unwrap());
        let name = entry.name;
        println!("{name}: {pct:.2} %, exact {exact_pct:.2} %");
        assert!((pct - exact_pct).abs() < 1.0, "{name}: {pct} %, exact {exact_pct} %");
    }
}

/// One use of a hot page among four pages of a scan: between two uses of a page LRU meets more
/// other pages than it holds.
#[test]
fn a_scan_evicts_hot_pages_of_lru_alone() {
    const CAPACITY: u32 = 100;
    const HOT: u64 = 50;
    for (name, kept) in [("lru", false), ("sieve", true), ("s3fifo", true)] {
        let entry = replacement(name).expect("it is there");
        let mut cache = Cache::new(CAPACITY, 1, |slots| (entry.create)(slots, slots));
        (0..4).flat_map(|_| 0..HOT).for_each(|page| cache.access(page, false));
        cache.hits = 0;
        for number in 0..10 * HOT {
            (0..4).for_each(|scanned| cache.access(HOT + 4 * number + scanned, false));
            cache.access(number % HOT, false);
        }
        let share = if kept { 9 * HOT..=10 * HOT } else { 0..=HOT };
        assert!(share.contains(&cache.hits), "{name}: {} hits of {}", cache.hits, 10 * HOT);
    }
}

#[test]
fn the_registry_names_each_policy_once_and_counts_its_memory() {
    for entry in &REPLACEMENTS {
        assert_eq!(replacement(entry.name).map(|it| it.about), Some(entry.about));
        let _ = model(entry.name, 1);
    }
    assert!(replacement("fifo").is_none());
    assert_eq!(list::Links::new(1000).bytes(), 8 * 1000);
    assert!(recent::RecentPages::<recent::Seen>::new(900).bytes() <= 2 * 1000);
}
