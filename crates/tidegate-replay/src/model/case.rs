//! A run on a modelled machine: jobs that write random blocks, back to back.
//!
//! Latencies are defined as in `tidegate bench block`: at a depth of D, D requests run back to
//! back, and each latency counts from the issue of the first. Devices are synchronous, so that the
//! depth has no other effect: one run gives the latencies of all depths.

use std::sync::{Arc, Mutex, PoisonError};

use hdrhistogram::Histogram;
use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError, DeviceErrorKind, WriteFlags};
use tidegate::dram::{self, DramTier, Phases};
use tidegate::pmem::MediaModel;
use tidegate_bench::pattern::{Pattern, Picker};
use tidegate_bench::policy::Policy;

use super::below::{Below, Engine};
use super::costs::Costs;
use super::machine::{self, ModelledMemory, lock};

/// Number of times that a run of `pmbd` fills the cache.
const PMBD_TURNS: u64 = 4;
const LONGEST_NS: u64 = 1_000_000_000_000;

/// The end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// After this many requests of all jobs together.
    Requests(u64),
    /// After this much virtual time.
    Nanoseconds(u64),
}

impl Length {
    /// Returns a length of virtual seconds.
    pub fn seconds(seconds: f64) -> Self {
        let time = std::time::Duration::from_secs_f64(seconds);
        Self::Nanoseconds(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// The configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// A DRAM tier over a block translation table, or an engine without one.
    pub policy: Policy,
    /// CPUs of the machine.
    pub cores: u32,
    /// Number of writing threads.
    pub jobs: u32,
    /// Depths to measure latencies for, each at least 1.
    pub depths: Vec<u32>,
    /// Size of the DRAM tier.
    pub cache_bytes: u64,
    /// Size of a block and of a request.
    pub block_bytes: u32,
    /// Size of the device.
    pub device_bytes: u64,
    /// Requests of all jobs before the counted ones.
    pub warm_up: u64,
    /// End of the run.
    pub length: Length,
    /// Requests of a job between two of its flushes; 0 for no flushes.
    pub flush_every: u64,
    /// Counted requests are reads; earlier requests are writes.
    pub reads: bool,
    /// Seed of all random choices.
    pub seed: u64,
}

/// The measurements of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Virtual time of the counted requests.
    pub elapsed_ns: u64,
    /// Number of counted requests.
    pub requests: u64,
    /// Latencies of counted requests in nanoseconds, for each depth.
    pub latencies: Vec<Histogram<u64>>,
    /// Latencies of flushes, in nanoseconds.
    pub flushes: Histogram<u64>,
    /// The DRAM tier's phases before and after the counted requests.
    pub phases: Option<(Phases, Phases)>,
}

impl Outcome {
    /// Returns the requests per second of all jobs together.
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn ops_per_s(&self) -> f64 {
        self.requests as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    /// Returns the mean time of a request in its job, in nanoseconds.
    #[allow(clippy::cast_precision_loss, reason = "a mean for people")]
    pub fn service_ns(&self, jobs: u32) -> f64 {
        self.elapsed_ns as f64 * f64::from(jobs) / self.requests.max(1) as f64
    }
}

impl Case {
    /// Returns a case of one job on one core that writes pages to a device of `device_bytes`,
    /// without a warm-up.
    pub fn new(policy: Policy, device_bytes: u64) -> Self {
        Self {
            policy,
            cores: 1,
            jobs: 1,
            depths: vec![1],
            cache_bytes: 0,
            block_bytes: 4096,
            device_bytes,
            warm_up: 0,
            length: Length::Requests(0),
            flush_every: 0,
            reads: false,
            seed: 1,
        }
    }

    /// Returns the case with an overrun cache. The warm-up writes twice as many blocks as there are
    /// slots, because some blocks are written back during it. The counted requests, at least
    /// `requests`, fill the cache once more. Under `pmbd`, whose drains all come at about the same
    /// time, they fill it several times, so that drains count in proportion.
    #[must_use]
    pub fn overrun(self, requests: u64) -> Self {
        let has_tier = self.policy.has_tier();
        let slots = if has_tier { self.cache_bytes / u64::from(self.block_bytes) } else { 0 };
        let turns = if self.policy == Policy::Tier(dram::Policy::Pmbd) { PMBD_TURNS } else { 1 };
        let length = Length::Requests((slots * turns).max(requests));
        Self { warm_up: slots * 2 + requests / 100, length, ..self }
    }

    /// Runs the case on a machine with these costs, on a new thread. So thread-local state, such as
    /// the phase of the sampling, does not affect the next run.
    ///
    /// # Errors
    /// The device cannot be created.
    ///
    /// # Panics
    /// The machine deadlocks: a bug in a tier.
    pub fn run(&self, costs: &Costs, media: &MediaModel) -> Result<Outcome, DeviceError> {
        let case = self.clone();
        let (cores, request_ns, btt_ns) = (self.cores, costs.request_ns, costs.btt_ns);
        let main = move || case.main(request_ns, btt_ns);
        std::thread::scope(|scope| {
            let run = scope.spawn(|| machine::run(costs, media.clone(), cores, main));
            let result = run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result.unwrap_or_else(|deadlock| panic!("{deadlock}"))
        })
    }

    /// Runs the first thread of the machine.
    fn main(self, request_ns: u64, btt_ns: u64) -> Result<Outcome, DeviceError> {
        let block_bytes = self.block_bytes;
        let blocks = self.device_bytes / u64::from(block_bytes);
        let engine = if self.policy == Policy::Raw { Engine::Raw } else { Engine::Btt };
        let below = Below::open(engine, block_bytes, blocks, btt_ns, Arc::new(ModelledMemory))?;
        let tier = self.open_tier(&below)?;
        let device: Arc<dyn BlockDevice> = match &tier {
            Some(tier) => Arc::clone(tier) as _,
            None => Arc::clone(&below) as _,
        };
        let (jobs, seed) = (u64::from(self.jobs), self.seed);
        let (flush_every, reads) = (self.flush_every, self.reads);
        let tally = Arc::new(Mutex::new(Tally::new(self, tier.clone())));
        let job = |number| {
            let picker = Picker::new(Pattern::Uniform, blocks, seed, number, jobs);
            let (device, tally) = (Arc::clone(&device), Arc::clone(&tally));
            let block = vec![0; block_bytes as usize];
            let job = Job { device, tally, picker, request_ns, flush_every, reads, block };
            machine::spawn(move || job.run())
        };
        (0..jobs).map(job).collect::<Vec<_>>().into_iter().for_each(machine::JoinHandle::join);
        below.end();
        drop((device, tier));
        let tally = Arc::into_inner(tally).expect("all jobs have ended");
        let tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        tally.error.map_or(Ok(tally.outcome), Err)
    }

    fn open_tier(&self, below: &Arc<Below>) -> Result<Option<Arc<dyn DramTier>>, DeviceError> {
        match self.policy {
            Policy::Raw | Policy::Btt => Ok(None),
            Policy::Tier(policy) => {
                dram::open(policy, self.cache_bytes, Arc::clone(below) as _).map(Some)
            }
            other => {
                let context = format!("{} cannot be modelled", other.name());
                Err(DeviceError::new(DeviceErrorKind::Unsupported, context))
            }
        }
    }
}

/// A thread that makes requests.
struct Job {
    device: Arc<dyn BlockDevice>,
    tally: Arc<Mutex<Tally>>,
    picker: Picker,
    request_ns: u64,
    flush_every: u64,
    reads: bool,
    block: Vec<u8>,
}

impl Job {
    fn run(mut self) {
        let mut issued_ns = Vec::new();
        let mut requests = 0;
        loop {
            machine::spend(self.request_ns);
            let offset = self.picker.next_block() * self.block.len() as u64;
            let result = if self.reads && lock(&self.tally).begun_ns.is_some() {
                self.device.read(offset, &mut self.block)
            } else {
                self.device.write(offset, &self.block, WriteFlags::default())
            };
            requests += 1;
            if !lock(&self.tally).answered(result, requests, &mut issued_ns) {
                return;
            }
            if self.flush_every > 0 && requests % self.flush_every == 0 {
                self.flush();
            }
        }
    }

    fn flush(&self) {
        let begun_ns = machine::now_ns();
        let result = self.device.flush();
        lock(&self.tally).flushed(result, machine::now_ns() - begun_ns);
    }
}

/// The progress of a run's jobs.
struct Tally {
    case: Case,
    tier: Option<Arc<dyn DramTier>>,
    answered: u64,
    /// Start of the counted requests.
    begun_ns: Option<u64>,
    ended_ns: u64,
    phases_before: Option<Phases>,
    /// Results so far.
    outcome: Outcome,
    error: Option<DeviceError>,
}

impl Tally {
    fn new(case: Case, tier: Option<Arc<dyn DramTier>>) -> Self {
        let histogram = || Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constant bounds");
        let outcome = Outcome {
            elapsed_ns: 0,
            requests: 0,
            latencies: case.depths.iter().map(|_| histogram()).collect(),
            flushes: histogram(),
            phases: None,
        };
        let (begun_ns, phases_before, error) = (None, None, None);
        Self { case, tier, answered: 0, begun_ns, ended_ns: 0, phases_before, outcome, error }
    }

    /// Counts the answer to a job's request number `request`. `issued_ns` holds the issue time of
    /// the job's current batch for each depth. Returns `false` if the job must end.
    fn answered(
        &mut self,
        result: Result<(), DeviceError>,
        request: u64,
        issued_ns: &mut Vec<u64>,
    ) -> bool {
        let now_ns = machine::now_ns();
        self.answered += 1;
        self.error = self.error.take().or(result.err());
        if self.error.is_some() || self.is_over() {
            return false;
        }
        let Some(begun_ns) = self.begun_ns else {
            if self.answered >= self.case.warm_up {
                self.begun_ns = Some(now_ns);
                self.phases_before = self.tier.as_ref().map(|tier| tier.phases());
            }
            return true;
        };
        // The first counted batch is issued at the job's first answer after the warm-up.
        if issued_ns.is_empty() {
            issued_ns.resize(self.case.depths.len(), now_ns);
            return true;
        }
        self.count(now_ns, request, issued_ns);
        let is_done = match self.case.length {
            Length::Requests(requests) => self.outcome.requests >= requests,
            Length::Nanoseconds(ns) => now_ns >= begun_ns + ns,
        };
        if is_done {
            self.ended_ns = now_ns;
            self.outcome.elapsed_ns = now_ns - begun_ns;
            let after = self.tier.take().map(|tier| tier.phases());
            self.outcome.phases = self.phases_before.take().zip(after);
        }
        !is_done
    }

    /// Counts a job's flush, which took `ns`.
    fn flushed(&mut self, result: Result<(), DeviceError>, ns: u64) {
        self.error = self.error.take().or(result.err());
        if self.begun_ns.is_some() && !self.is_over() {
            self.outcome.flushes.saturating_record(ns);
        }
    }

    fn is_over(&self) -> bool {
        self.ended_ns > 0
    }

    fn count(&mut self, now_ns: u64, request: u64, issued_ns: &mut [u64]) {
        self.outcome.requests += 1;
        let depths = self.case.depths.iter().zip(issued_ns).zip(&mut self.outcome.latencies);
        for ((&depth, issued_ns), latencies) in depths {
            latencies.saturating_record(now_ns - *issued_ns);
            if request.is_multiple_of(depth.into()) {
                *issued_ns = now_ns;
            }
        }
    }
}
