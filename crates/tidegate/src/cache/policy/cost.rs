//! Decides by measured cost which share of requests the backing serves because it is quicker.
//!
//! A cache is slower than its backing if its memory is saturated, or if a write waits for dirty
//! pages to leave. Open CAS turns large writes away by a constant (the study's third takeaway).
//! Here the time of requests at both devices decides, by their size and by the number of requests
//! under way. The backing gets a share of the requests: since both devices are slower with more
//! requests, the share moves until they take about as long (Orthus, "The Storage Hierarchy is Not a
//! Hierarchy", FAST 2021, moves its share by measured throughput).
//!
//! Invariants:
//! - The memory always keeps a part of the requests, so its cost stays known.
//! - While the backing has no share, probes (requests that are sent there only to measure it) take
//!   at most a hundredth of the time of the other requests, after the first probe.

/// Parts of a share.
pub const WHOLE: u32 = 64;
/// Step of a share, in parts.
const STEP: u32 = 4;
/// The largest share of the backing.
const SHARE_MAX: u32 = WHOLE - STEP;
/// The share grows if the memory takes more than this percentage of the backing's time. It shrinks
/// below 100.
const BEGIN_PCT: u128 = 125;
/// Number of size classes: from 4 KiB on, each four times the one before.
pub const SIZES: usize = 5;
/// Number of depth classes: 1, 2, 4 and so on, up to 32 and more requests under way.
const DEPTHS: usize = 6;
/// Time at the memory before the next probe of the backing, in units of the backing's time.
const PROBE_ONE_IN: u64 = 100;
/// Like `PROBE_ONE_IN`, for a backing that is more than four times slower.
const SELDOM_ONE_IN: u64 = 1000;
/// Assumed time of a backing of unknown cost.
const UNKNOWN_NS: u64 = 1_000_000;
/// Of so many first requests at a device and depth the quickest counts. Otherwise a request that
/// meets an idle device, or waits once, would stand for all later ones.
const FIRST: u8 = 4;
/// A sample that stands for many requests counts for at most so many times their mean, because the
/// other requests did not have the same wait.
const OUTLIER: u64 = 8;

/// The device that served a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The persistent memory, with all waits of a request there.
    Memory,
    /// The backing.
    Backing,
}

/// Kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum Kind {
    /// Reads clean pages that are cached.
    #[strum(serialize = "reads")]
    Read,
    /// Writes pages that are not cached.
    #[strum(serialize = "writes")]
    Write,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];
}

/// A measured request.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// The device that served it.
    pub place: Place,
    /// Kind of the request.
    pub kind: Kind,
    /// Size in bytes.
    pub len_bytes: u64,
    /// Time that it took.
    pub took_ns: u64,
    /// Requests under way at the memory and at the backing, itself included.
    pub depths: [u32; 2],
    /// Number of requests that it stands for.
    pub weight: u32,
}

/// The decision about requests of one kind and size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Decision {
    /// The backing's share, in parts of [`WHOLE`].
    pub share: u32,
    /// The backing gets one more request, as a probe.
    pub probes: bool,
}

/// A moving mean: after the first values, each new one counts an eighth.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    /// The mean; 0 before the first sample.
    ns: u64,
    /// Samples so far, up to [`FIRST`].
    seen: u8,
}

impl Mean {
    fn see(&mut self, ns: u64, weight: u32) {
        let ns = ns.max(1);
        if self.seen < FIRST {
            self.ns = if self.seen == 0 { ns } else { ns.min(self.ns) };
            self.seen += 1;
            return;
        }
        let ns = if weight > 1 { ns.min(self.ns.saturating_mul(OUTLIER)) } else { ns };
        self.ns = (self.ns - self.ns / 8 + ns / 8).max(1);
    }
}

/// Requests of one kind and size.
#[derive(Debug, Clone, Copy, Default)]
struct Class {
    /// By place and depth.
    means: [[Mean; DEPTHS]; 2],
    share: u32,
    /// Time at the memory since the last probe of the backing.
    since_probe_ns: u64,
}

impl Class {
    /// Returns the time at `place` with `depth` requests under way: that of the nearest measured
    /// depth, a smaller one first.
    fn estimate(&self, place: Place, depth: u32) -> Option<Mean> {
        let (means, depth) = (&self.means[place as usize], depth_class(depth));
        let smaller = means[..=depth].iter().rev();
        smaller.chain(&means[depth + 1..]).find(|mean| mean.seen > 0).copied()
    }

    fn see(&mut self, sample: &Sample) -> Decision {
        let Sample { place, took_ns, depths, weight, .. } = *sample;
        let [memory_depth, backing_depth] = depths;
        self.means[place as usize][depth_class(depths[place as usize])].see(took_ns, weight);
        let backing = self.estimate(Place::Backing, backing_depth);
        if place == Place::Backing {
            self.since_probe_ns = 0;
        } else if let Some(memory) = self.estimate(Place::Memory, memory_depth) {
            let time_ns = took_ns.saturating_mul(weight.into());
            self.since_probe_ns = self.since_probe_ns.saturating_add(time_ns);
            if let Some(backing) = backing {
                self.move_share(memory.ns, backing.ns);
            }
            return Decision { share: self.share, probes: self.is_probe_due(memory.ns, backing) };
        }
        Decision { share: self.share, probes: false }
    }

    fn move_share(&mut self, memory_ns: u64, backing_ns: u64) {
        if u128::from(memory_ns) * 100 > u128::from(backing_ns) * BEGIN_PCT {
            self.share = (self.share + STEP).min(SHARE_MAX);
        } else if memory_ns < backing_ns {
            self.share = self.share.saturating_sub(STEP);
        }
    }

    fn is_probe_due(&mut self, memory_ns: u64, backing: Option<Mean>) -> bool {
        let is_far_slower = |it: &Mean| it.seen == FIRST && it.ns / 4 > memory_ns;
        let one_in =
            if backing.as_ref().is_some_and(is_far_slower) { SELDOM_ONE_IN } else { PROBE_ONE_IN };
        let backing_ns = backing.map_or(UNKNOWN_NS, |it| it.ns);
        let is_due = self.share == 0 && self.since_probe_ns >= backing_ns.saturating_mul(one_in);
        if is_due {
            self.since_probe_ns = 0;
        }
        is_due
    }
}

/// The cost of requests at both devices, and the decisions.
#[derive(Debug, Default)]
pub struct Costs {
    classes: [[Class; SIZES]; 2],
}

impl Costs {
    /// Takes `sample` in. Returns the decision about requests like it from now on.
    pub fn see(&mut self, sample: &Sample) -> Decision {
        self.classes[sample.kind as usize][size_class(sample.len_bytes)].see(sample)
    }
}

/// Returns the size class of requests of `len_bytes`.
pub fn size_class(len_bytes: u64) -> usize {
    let class = (len_bytes >> 12).max(1).ilog2() / 2;
    usize::try_from(class).unwrap_or(SIZES).min(SIZES - 1)
}

/// Returns the size of the smallest request of size class `class`, in bytes.
pub fn size_of_class(class: usize) -> u64 {
    4096 << (2 * class.min(SIZES - 1))
}

fn depth_class(depth: u32) -> usize {
    usize::try_from(depth.max(1).ilog2()).unwrap_or(DEPTHS).min(DEPTHS - 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MICROSECOND_NS: u64 = 1000;

    /// Two devices: each serves `servers` requests at once, each in `each_ns`.
    #[derive(Debug, Clone, Copy)]
    struct Model {
        each_ns: [u64; 2],
        servers: [u64; 2],
    }

    impl Model {
        /// The time of a request at `place` beside `depth` in all.
        fn took_ns(&self, place: Place, depth: u32) -> u64 {
            let (each_ns, servers) = (self.each_ns[place as usize], self.servers[place as usize]);
            each_ns * u64::from(depth.max(1)).div_ceil(servers)
        }
    }

    struct Run {
        decision: Decision,
        /// Time of all requests at the memory; the next field counts probes of the backing.
        memory_ns: u64,
        probes_ns: u64,
        probes: u32,
    }

    /// Runs `count` reads of 4 KiB by `clients` clients, which each wait for their last one.
    fn run(model: Model, clients: u32, count: u32) -> Run {
        let mut costs = Costs::default();
        let mut run = Run { decision: Decision::default(), memory_ns: 0, probes_ns: 0, probes: 0 };
        for at in 0..count {
            let at_backing = clients * run.decision.share / WHOLE;
            let depths = [clients - at_backing, at_backing.max(1)];
            let turn = at * run.decision.share % WHOLE < run.decision.share;
            let is_probe = std::mem::take(&mut run.decision.probes);
            let place = if turn || is_probe { Place::Backing } else { Place::Memory };
            let took_ns = model.took_ns(place, depths[place as usize]);
            if place == Place::Memory {
                run.memory_ns += took_ns;
            } else if !turn {
                run.probes += 1;
                run.probes_ns += took_ns;
            }
            let sample =
                Sample { place, kind: Kind::Read, len_bytes: 4096, took_ns, depths, weight: 1 };
            let decision = costs.see(&sample);
            let probes = run.decision.probes || decision.probes;
            run.decision = Decision { probes, ..decision };
        }
        run
    }

    #[test]
    fn classes_are_those_of_their_sizes_and_depths() {
        let sizes = [512, 4096, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 1 << 30];
        assert_eq!(sizes.map(size_class), [0, 0, 1, 2, 2, 3, 4, 4]);
        (0..SIZES).for_each(|class| assert_eq!(size_class(size_of_class(class)), class));
        assert_eq!([0, 1, 2, 3, 4, 31, 32, u32::MAX].map(depth_class), [0, 0, 1, 1, 2, 4, 5, 5]);
    }

    #[test]
    fn a_memory_that_is_quicker_keeps_all() {
        let model = Model { each_ns: [500, 20 * MICROSECOND_NS], servers: [4, 4] };
        let found = run(model, 2, 1_000_000);
        assert_eq!(found.decision.share, 0);
        assert!(found.probes > 1, "what the backing costs stays known");
        assert!(found.probes_ns * 1000 <= found.memory_ns * 11, "{} ns", found.probes_ns);
    }

    #[test]
    fn a_memory_that_waits_for_the_backing_gives_it_nearly_all() {
        let model =
            Model { each_ns: [900 * MICROSECOND_NS, 500 * MICROSECOND_NS], servers: [9; 2] };
        assert_eq!(run(model, 1, 10_000).decision.share, SHARE_MAX);
    }

    #[test]
    fn a_saturated_memory_shares_until_both_take_as_long() {
        // One request at a time in 10 µs, against 32 in 80 µs: 8 of 32 clients at the memory take
        // as long.
        let model = Model { each_ns: [10 * MICROSECOND_NS, 80 * MICROSECOND_NS], servers: [1, 32] };
        let share = run(model, 32, 50_000).decision.share;
        assert!((36..=52).contains(&share), "{share} of {WHOLE}");
    }

    fn read(place: Place, took_ns: u64, weight: u32) -> Sample {
        Sample { place, kind: Kind::Read, len_bytes: 4096, took_ns, depths: [1, 1], weight }
    }

    #[test]
    fn one_read_that_waited_does_not_speak_for_those_that_it_stands_for() {
        let mut costs = Costs::default();
        costs.see(&read(Place::Backing, 20 * MICROSECOND_NS, 1));
        for number in 0..200 {
            // A thread that lost its CPU.
            let waited = number == 100;
            let took_ns = MICROSECOND_NS * if waited { 4000 } else { 1 };
            let Decision { share, .. } = costs.see(&read(Place::Memory, took_ns, 64));
            assert_eq!(share, 0, "after {number} reads");
        }
        let slow = |costs: &mut Costs| costs.see(&read(Place::Memory, 100 * MICROSECOND_NS, 64));
        let last = (0..60).map(|_| slow(&mut costs).share).last();
        assert_eq!(last, Some(SHARE_MAX), "a memory that stays slow is found out");
    }

    #[test]
    fn a_first_request_that_waited_does_not_keep_the_backing_out() {
        let mut costs = Costs::default();
        let memory = read(Place::Memory, 1000 * MICROSECOND_NS, 1);
        costs.see(&read(Place::Backing, 8000 * MICROSECOND_NS, 1));
        assert_eq!(costs.see(&memory).share, 0);
        let mut until_probe = (1..).map(|number| (number, costs.see(&memory)));
        let (number, _) = until_probe.find(|(_, decision)| decision.probes).unwrap();
        assert!((700..900).contains(&number), "a hundredth of the time: {number}");
        drop(until_probe);
        costs.see(&read(Place::Backing, 100 * MICROSECOND_NS, 1));
        assert!(costs.see(&memory).share > 0);
    }

    #[test]
    fn what_one_size_costs_says_nothing_of_another() {
        let mut costs = Costs::default();
        let sample = |place, len_bytes, took_ns| Sample {
            place,
            kind: Kind::Write,
            len_bytes,
            took_ns,
            depths: [1, 1],
            weight: 1,
        };
        for _ in 0..100 {
            costs.see(&sample(Place::Backing, 1 << 20, 1000));
            costs.see(&sample(Place::Memory, 1 << 20, 5000));
            assert_eq!(costs.see(&sample(Place::Memory, 64 << 10, 5000)).share, 0);
        }
        assert_eq!(costs.see(&sample(Place::Memory, 1 << 20, 5000)).share, SHARE_MAX);
    }

    proptest! {
        /// The share ends at the limit that the costs ask for, or where both devices cost about as
        /// much, within a step or two.
        #[test]
        fn the_share_comes_to_rest_where_the_costs_are_even(
            memory_us in 1_u64..200, backing_us in 1_u64..200, clients in 1_u32..48,
            servers in prop::array::uniform2(1_u64..8),
        ) {
            let each_ns = [memory_us, backing_us].map(|it| it * MICROSECOND_NS);
            let model = Model { each_ns, servers };
            let share = run(model, clients, 60_000).decision.share;
            prop_assert!(share <= SHARE_MAX);
            let cost_at = |share: u32| {
                let at_backing = clients * share.min(WHOLE) / WHOLE;
                [
                    model.took_ns(Place::Memory, clients - at_backing),
                    model.took_ns(Place::Backing, at_backing.max(1)),
                ]
            };
            // A depth class is as wide as half of its depths, and so is the share's error.
            let [memory_ns, backing_ns] = cost_at(share.saturating_sub(WHOLE / 3));
            prop_assert!(share == 0 || 2 * memory_ns >= backing_ns, "too much: {share}");
            let [memory_ns, backing_ns] = cost_at(share + WHOLE / 3);
            prop_assert!(share == SHARE_MAX || memory_ns <= 2 * backing_ns, "too little: {share}");
        }

        #[test]
        fn no_sample_panics(
            samples in prop::collection::vec(
                (any::<bool>(), any::<bool>(), any::<u64>(), any::<u64>(), any::<[u32; 2]>()), 0..200,
            ),
        ) {
            let mut costs = Costs::default();
            for (at_backing, is_write, len_bytes, took_ns, depths) in samples {
                let place = if at_backing { Place::Backing } else { Place::Memory };
                let kind = if is_write { Kind::Write } else { Kind::Read };
                let sample =
                    Sample { place, kind, len_bytes, took_ns, depths, weight: u32::MAX };
                prop_assert!(costs.see(&sample).share <= SHARE_MAX);
            }
        }
    }
}
