//! Runs histories on the real engine, crashes them everywhere, and judges the images.
//!
//! An execution is a plan under one interleaving. Its trace is replayed on the model of the medium.
//! The set of possible crash images is largest just before each fence and at the end. There the
//! engine's real recovery opens every image of a small set, or a sample of a large one, and the
//! blocks are compared with the values that the history allows.
//!
//! Invariant: an image is judged once for each set of allowed values, however many interleavings
//! lead to it.
//!
//! Entry points: [`Explorer::exhaustive`], [`Explorer::sampled`], [`Explorer::lifetime`];
//! [`seeded`] for many seeds.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tidegate::device::{BlockDevice, BlockDeviceExt, WriteFlags};
use tidegate::pmem::{Observer, Region};
use tidegate::tier::background::{self, Work};

use crate::context;
use crate::history::{Call, History, Mix, Plan, Step, payload, perform, stamp_of};
use crate::judge::{Judge, Ordinals, Promise, Verdict};
use crate::medium::{Choice, CrashSet, Granule, Medium, MediumModel, StoreOrder};
use crate::model::{Stamp, TORN, World};
use crate::mutations::{Mutant, Mutation};
use crate::random::{Random, mix, seeds};
use crate::scheduler::{Body, Exhaustive, Sampled, Scheduler, Strategy, Stuck, Workers};
use crate::subject::{Alive, Subject};
use crate::trace::{Action, Recorder, Trace};

/// A formatted region, and the stamps of its blocks.
#[derive(Debug, Clone)]
pub struct Pool {
    /// The bytes, all durable.
    pub image: Vec<u8>,
    /// The stamp of each block.
    pub stamps: Vec<Stamp>,
}

impl Pool {
    /// Formats a pool and writes to `blocks`, in this order, with stamps from 1 on.
    ///
    /// # Errors
    /// Describes the failure.
    pub fn prepare(subject: &dyn Subject, blocks: &[u64]) -> Result<Self, String> {
        let region = Region::anonymous(subject.region_bytes()).map_err(|e| e.to_string())?;
        subject.create(&region)?;
        let region = Arc::new(region.observed(Arc::new(Ordinals::default())));
        let device = subject.open(&region)?;
        let geometry = device.geometry();
        let mut stamps =
            vec![0; usize::try_from(geometry.blocks).map_err(|error| error.to_string())?];
        for (&lba, stamp) in blocks.iter().zip(1..) {
            context::next_operation(stamp as usize, None);
            let data = payload(lba, stamp, geometry.block_bytes as usize);
            let offset = lba * u64::from(geometry.block_bytes);
            device.write(offset, &data, WriteFlags { fua: true }).map_err(|e| e.to_string())?;
            stamps[usize::try_from(lba).map_err(|error| error.to_string())?] = stamp;
        }
        drop(device);
        let mut image = vec![0; usize::try_from(subject.region_bytes()).unwrap_or(0)];
        region.read(0, &mut image).map_err(|error| error.to_string())?;
        Ok(Self { image, stamps })
    }
}

/// Thoroughness of a search.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Crash moments with at most this many images are enumerated.
    pub exhaustive_images: usize,
    /// Images sampled of each larger moment.
    pub sampled_images: usize,
    /// One image in this many is also crashed in recovery and written to afterwards.
    pub deep_one_in: u64,
    /// Units of bulk stores.
    pub granule: Granule,
    /// Order within a cache line.
    pub order: StoreOrder,
}

/// Coverage of a search.
#[derive(Debug, Default, Clone, Copy)]
pub struct Stats {
    /// Executions run.
    pub executions: u64,
    /// Crash moments looked at.
    pub moments: u64,
    /// Crash moments whose images were all enumerated.
    pub moments_enumerated: u64,
    /// Different images judged.
    pub images: u64,
    /// Images skipped, since an identical one was judged before.
    pub repeats: u64,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { executions, moments, moments_enumerated, images, repeats } = self;
        write!(
            f,
            "{executions} executions, {moments} crash moments ({moments_enumerated} with all images), \
             {images} images judged, {repeats} repeats"
        )
    }
}

impl std::ops::AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        self.executions += other.executions;
        self.moments += other.moments;
        self.moments_enumerated += other.moments_enumerated;
        self.images += other.images;
        self.repeats += other.repeats;
    }
}

/// A promise that the engine broke, with the means to replay it.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The broken promise.
    pub verdict: Verdict,
    /// The interleaving.
    pub schedule: String,
    /// The crash, if there was one.
    pub crash: Option<String>,
    /// The history up to the failure.
    pub story: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verdict, schedule, crash, story } = self;
        writeln!(f, "{verdict}\n  schedule: {schedule}")?;
        if let Some(crash) = crash {
            writeln!(f, "  crash: {crash}")?;
        }
        write!(f, "{story}")
    }
}

/// One life of the engine between two openings of its region.
struct Session<'a> {
    plan: &'a Plan,
    /// Steps after which the process is killed.
    kill_after: Option<usize>,
}

/// The trace and the history of an execution.
struct Execution {
    trace: Trace,
    history: History,
}

/// Runs histories on one subject.
pub struct Explorer<'a> {
    subject: &'a dyn Subject,
    pool: Pool,
    effort: Effort,
    mutation: Option<Mutation>,
    workers: Workers,
    judge: Judge<'a>,
    seen: HashSet<(u64, u64)>,
    stats: Stats,
}

type Calls = Arc<Mutex<Vec<Call>>>;

impl<'a> Explorer<'a> {
    /// Makes an explorer of histories with up to `threads` threads that start from `pool`.
    ///
    /// # Errors
    /// Describes the failure.
    pub fn new(
        subject: &'a dyn Subject,
        pool: Pool,
        threads: usize,
        effort: Effort,
    ) -> Result<Self, String> {
        Ok(Self {
            judge: Judge::new(subject)?,
            subject,
            pool,
            effort,
            mutation: None,
            workers: Workers::new(threads + subject.background_threads()),
            seen: HashSet::new(),
            stats: Stats::default(),
        })
    }

    /// Plants `mutation` in every execution.
    #[must_use]
    pub fn with_mutation(mut self, mutation: Option<Mutation>) -> Self {
        self.mutation = mutation;
        self
    }

    /// Returns the coverage so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Runs `plan` under every interleaving with at most `preemptions` preemptions.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn exhaustive(&mut self, plan: &Plan, preemptions: usize) -> Result<(), Failure> {
        let search = Arc::new(Mutex::new(Exhaustive::new(preemptions)));
        let session = [Session { plan, kill_after: None }];
        loop {
            let run = self.execute(&session, search.clone());
            let (fresh_from, schedule) = {
                let search = lock(&search);
                if let Some(diverged) = search.diverged() {
                    let what = format!("the engine is not deterministic: {diverged}");
                    return Err(broken(Promise::Progress, what, search.schedule()));
                }
                (search.fresh_from(), search.schedule())
            };
            let run = run.map_err(|verdict| stuck(verdict, &schedule))?;
            self.crash_everywhere(&run, fresh_from, &mut Random::new(1))
                .map_err(|failure| failure.under(schedule))?;
            if !lock(&search).advance() {
                return Ok(());
            }
        }
    }

    /// Runs `plan` under one random interleaving.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn sampled(&mut self, plan: &Plan, seed: u64) -> Result<(), Failure> {
        let run = self.random_run(&[Session { plan, kill_after: None }], seed)?;
        self.crash_everywhere(&run, 0, &mut Random::new(seed))
            .map_err(|failure| failure.under(random_schedule(seed)))
    }

    /// Lives through `generations` of random plans: in each the process is killed at a random step
    /// and opens the pool again before the power fails. The next generation starts from one of the
    /// possible images.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn lifetime(&mut self, mixture: &Mix, generations: u32, seed: u64) -> Result<(), Failure> {
        let mut random = Random::new(seed);
        let mut stamp = 1000;
        let origin = self.pool.clone();
        let mut result = Ok(());
        for _ in 0..generations {
            result = self.generation(mixture, &mut random, &mut stamp);
            if result.is_err() {
                break;
            }
        }
        self.start_from(origin);
        result
    }

    fn generation(
        &mut self,
        mixture: &Mix,
        random: &mut Random,
        stamp: &mut Stamp,
    ) -> Result<(), Failure> {
        let plans = [mixture.plan(random, stamp), mixture.plan(random, stamp)];
        let kill_after = Some(1 + random.below(mixture.ops * 40));
        let sessions = [
            Session { plan: &plans[0], kill_after },
            Session { plan: &plans[1], kill_after: None },
        ];
        let seed = random.word();
        let run = self.random_run(&sessions, seed)?;
        self.crash_everywhere(&run, 0, random)
            .map_err(|failure| failure.under(random_schedule(seed)))?;
        let next = self.survivor(&run, random)?;
        self.start_from(next);
        Ok(())
    }

    fn start_from(&mut self, pool: Pool) {
        self.pool = pool;
        self.seen.clear();
    }

    fn random_run(&mut self, sessions: &[Session<'_>], seed: u64) -> Result<Execution, Failure> {
        let strategy = Arc::new(Mutex::new(Sampled::new(seed)));
        self.execute(sessions, strategy).map_err(|verdict| stuck(verdict, &random_schedule(seed)))
    }

    /// Cuts the power at the end of `run`, and returns the pool after recovery.
    fn survivor(&mut self, run: &Execution, random: &mut Random) -> Result<Pool, Failure> {
        let mut medium = Medium::new(&self.pool.image, self.model());
        run.trace.events().iter().for_each(|event| medium.apply(&run.trace, event));
        let set = medium.crash();
        let mut image = Vec::new();
        set.build(&set.sample(random), &mut image);
        let (image, stamps) = self
            .judge
            .recovered(&image)
            .map_err(|verdict| stuck(verdict, "the start of the next generation"))?;
        Ok(Pool { image, stamps })
    }

    fn model(&self) -> MediumModel {
        MediumModel { granule: self.effort.granule, order: self.effort.order }
    }

    /// Runs the sessions on a fresh region.
    fn execute(
        &mut self,
        sessions: &[Session<'_>],
        strategy: Arc<Mutex<dyn Strategy>>,
    ) -> Result<Execution, Verdict> {
        self.stats.executions += 1;
        let threads = sessions[0].plan.len() + self.subject.background_threads();
        let scheduler = Arc::new(Scheduler::new(threads, strategy));
        let recorder = Arc::new(Recorder::new(Some(Arc::clone(&scheduler))));
        let region = self.observed_region(&recorder)?;
        let calls = Calls::default();
        let mut volatile_cache = false;
        // Kept to the end: a killed process runs no destructors while its successor uses the
        // region.
        let mut devices = Vec::new();
        for session in sessions {
            let open = self.subject.open_alive(&region);
            let alive = open.map_err(|what| Verdict { promise: Promise::P6Recovery, what })?;
            volatile_cache = alive.device.geometry().volatile_cache;
            devices.push(Arc::clone(&alive.device));
            self.live(session, alive, &scheduler, &recorder, &calls)?;
        }
        let calls = lock(&calls).clone();
        check_reads(&calls)?;
        Ok(Execution { trace: recorder.take(), history: self.history(calls, volatile_cache) })
    }

    fn history(&self, calls: Vec<Call>, volatile_cache: bool) -> History {
        let (atomic_flush, tears) = (self.subject.atomic_flush(), self.subject.tears());
        let fua_commits = self.subject.fua_commits();
        History { calls, volatile_cache, atomic_flush, fua_commits, tears }
    }

    /// Creates a region that holds the pool; `recorder` watches it through the mutation.
    fn observed_region(&self, recorder: &Arc<Recorder>) -> Result<Arc<Region>, Verdict> {
        let observer: Arc<dyn Observer> = match self.mutation {
            None => recorder.clone(),
            Some(mutation) => Arc::new(Mutant::new(mutation, &self.pool.image, recorder.clone())?),
        };
        let region = Region::anonymous(self.pool.image.len() as u64).map_err(Verdict::outside)?;
        region.write(0, &self.pool.image).map_err(Verdict::outside)?;
        Ok(Arc::new(region.observed(observer)))
    }

    /// Runs one session: all threads to their end, or to the kill. Background threads run until the
    /// others are done.
    fn live(
        &self,
        session: &Session<'_>,
        alive: Alive,
        scheduler: &Arc<Scheduler>,
        recorder: &Arc<Recorder>,
        calls: &Calls,
    ) -> Result<(), Verdict> {
        let failed = Arc::new(Mutex::new(None));
        let acting = Arc::new(AtomicUsize::new(session.plan.len()));
        let actors = session.plan.iter().enumerate().map(|(thread, steps)| {
            let actor = Actor {
                thread,
                steps: steps.clone(),
                device: Arc::clone(&alive.device),
                recorder: Arc::clone(recorder),
                calls: Arc::clone(calls),
                failed: Arc::clone(&failed),
            };
            let acting = Arc::clone(&acting);
            Box::new(move || {
                actor.run();
                acting.fetch_sub(1, Ordering::SeqCst);
            }) as Body
        });
        let background = alive.background.into_iter().zip(session.plan.len()..);
        let background = background.map(|(work, thread)| {
            let (recorder, acting) = (Arc::clone(recorder), Arc::clone(&acting));
            Box::new(move || work_in_background(work, thread, &recorder, &acting)) as Body
        });
        let bodies: Vec<Body> = actors.chain(background).collect();
        let threads = bodies.len();
        match self.workers.run(scheduler, bodies, session.kill_after) {
            Ok(()) => {}
            Err(Stuck::Killed) => {
                let kill = recorder.killed(threads);
                let mut calls = lock(calls);
                let cut_off = calls.iter_mut().filter(|call| call.end == usize::MAX);
                cut_off.for_each(|call| call.end = kill);
            }
            Err(stuck) => {
                return Err(Verdict { promise: Promise::Progress, what: format!("{stuck:?}") });
            }
        }
        let failed = lock(&failed).take();
        failed.map_or(Ok(()), |what| Err(Verdict { promise: Promise::Progress, what }))
    }

    /// Crashes `run` at every moment from position `fresh_from` on, and checks its reads.
    fn crash_everywhere(
        &mut self,
        run: &Execution,
        fresh_from: usize,
        random: &mut Random,
    ) -> Result<(), Failure> {
        let mut medium = Medium::new(&self.pool.image, self.model());
        for (position, event) in run.trace.events().iter().enumerate() {
            if event.action == Action::Fence && position >= fresh_from {
                self.crash_at(run, &medium, position, random)?;
            }
            medium.apply(&run.trace, event);
        }
        self.crash_at(run, &medium, run.trace.events().len(), random)?;
        self.explain_reads(run)
    }

    fn explain_reads(&self, run: &Execution) -> Result<(), Failure> {
        for (lba, &initial) in (0..).zip(&self.pool.stamps) {
            if run.history.after_all(lba, initial).is_empty() {
                let what = format!("no order of the operations explains the reads of block {lba}");
                let verdict = Verdict { promise: Promise::P3Latest, what };
                return Err(self.failure(run, verdict, run.trace.events().len(), None));
            }
        }
        Ok(())
    }

    fn crash_at(
        &mut self,
        run: &Execution,
        medium: &Medium,
        position: usize,
        random: &mut Random,
    ) -> Result<(), Failure> {
        let allowed = run.history.worlds(&self.pool.stamps, position);
        let set = medium.crash();
        let Effort { exhaustive_images, sampled_images, .. } = self.effort;
        let small = set.count().is_some_and(|count| count <= exhaustive_images);
        self.stats.moments += 1;
        self.stats.moments_enumerated += u64::from(small);
        let mut try_one = |choice: &Choice| {
            self.try_image(&set, choice, &allowed, run.history.volatile_cache)
                .map_err(|verdict| (verdict, choice.clone()))
        };
        let result = if small {
            set.exhaustive(try_one)
        } else {
            let corners = [set.none(), set.all()];
            let samples = (0..sampled_images).map(|_| set.sample(random));
            corners.into_iter().chain(samples).try_for_each(|choice| try_one(&choice))
        };
        result.map_err(|(verdict, choice)| {
            self.failure(run, verdict, position, Some(set.describe(&choice)))
        })
    }

    fn try_image(
        &mut self,
        set: &CrashSet<'_>,
        choice: &Choice,
        allowed: &[World],
        volatile_cache: bool,
    ) -> Result<(), Verdict> {
        let hash = set.hash(choice);
        if !self.seen.insert((hash, requirement_hash(allowed))) {
            self.stats.repeats += 1;
            return Ok(());
        }
        self.stats.images += 1;
        let deep = mix(hash).is_multiple_of(self.effort.deep_one_in);
        let mut image = self.judge.take_buffer();
        set.build(choice, &mut image);
        let result = self.judge.judge(&image, allowed, volatile_cache, deep);
        self.judge.give_back(image);
        result
    }

    fn failure(
        &self,
        run: &Execution,
        verdict: Verdict,
        position: usize,
        image: Option<String>,
    ) -> Failure {
        let crash = image.map(|image| format!("before event {position}, keeping {image}"));
        let mut story = format!("  blocks at first: {:?}\n", self.pool.stamps);
        for call in run.history.calls.iter().filter(|call| call.begin < position) {
            let Call { thread, op, begin, end, read, .. } = call;
            let line = format_args!("  thread {thread}: {op:?} at {begin}..{end} read {read:?}\n");
            story.push_str(&line.to_string());
        }
        let first = position.saturating_sub(40);
        for event in first..=position.min(run.trace.events().len()) {
            story.push_str("    ");
            story.push_str(&run.trace.describe(event));
            story.push('\n');
        }
        Failure { verdict, schedule: String::new(), crash, story }
    }
}

impl Failure {
    fn under(mut self, schedule: String) -> Self {
        self.schedule = schedule;
        self
    }
}

fn random_schedule(seed: u64) -> String {
    format!("random, seed {seed:#x}")
}

fn broken(promise: Promise, what: String, schedule: String) -> Failure {
    let verdict = Verdict { promise, what };
    Failure { verdict, schedule, crash: None, story: String::new() }
}

fn stuck(verdict: Verdict, schedule: &str) -> Failure {
    broken(verdict.promise, verdict.what, schedule.to_owned())
}

fn requirement_hash(allowed: &[World]) -> u64 {
    let stamps = allowed.iter().flatten().flat_map(|set| set.iter().copied().chain([Stamp::MAX]));
    stamps.fold(0, |hash, stamp| mix(hash ^ u64::from(stamp)))
}

/// Fails if a read returned a torn block; such reads have the stamp [`TORN`].
fn check_reads(calls: &[Call]) -> Result<(), Verdict> {
    match calls.iter().find(|call| call.read == Some(TORN)) {
        None => Ok(()),
        Some(call) => {
            let what = format!("{:?} of thread {} returned a torn block", call.op, call.thread);
            Err(Verdict { promise: Promise::P3Latest, what })
        }
    }
}

/// Runs the test `name` with each of its [`seeds`], `count` by default; prints and returns the
/// coverage.
///
/// # Panics
/// With the first failure, and the command that replays it.
pub fn seeded(name: &str, count: usize, run: impl Fn(u64) -> Result<Stats, Failure>) -> Stats {
    let start = Instant::now();
    let mut total = Stats::default();
    for seed in seeds(name, count) {
        match run(seed) {
            Ok(stats) => total += stats,
            Err(failure) => panic!(
                "replay: TIDEGATE_SIM_SEED={seed:#x} cargo test -p tidegate-sim {name}\n{failure}"
            ),
        }
    }
    println!("{name}: {total} in {:?}", start.elapsed());
    total
}

/// A thread of an execution.
struct Actor {
    thread: usize,
    steps: Vec<Step>,
    device: Arc<dyn BlockDevice>,
    recorder: Arc<Recorder>,
    calls: Calls,
    failed: Arc<Mutex<Option<String>>>,
}

impl Actor {
    fn run(&self) {
        for step in &self.steps {
            if let Err(what) = self.step(step) {
                *lock(&self.failed) = Some(what);
                return;
            }
        }
    }

    fn step(&self, step: &Step) -> Result<(), String> {
        let (op, thread) = (step.op, self.thread);
        let begin = self.recorder.begin(step.ordinal, op.lba());
        let index = {
            let mut calls = lock(&self.calls);
            let (end, acknowledged, read) = (usize::MAX, false, None);
            calls.push(Call { thread, op, begin, end, acknowledged, read });
            calls.len() - 1
        };
        let bytes = perform(self.device.as_ref(), op)
            .map_err(|error| format!("{op:?} of thread {thread} failed: {error}"))?;
        let end = self.recorder.end();
        let read =
            bytes.map(|bytes| op.lba().and_then(|lba| stamp_of(lba, &bytes)).unwrap_or(TORN));
        let call = &mut lock(&self.calls)[index];
        (call.end, call.acknowledged, call.read) = (end, true, read);
        Ok(())
    }
}

/// Runs background thread number `thread`, until its work ends or no thread is `acting` any more.
fn work_in_background(
    mut work: Box<dyn Work>,
    thread: usize,
    recorder: &Recorder,
    acting: &AtomicUsize,
) {
    while acting.load(Ordering::SeqCst) > 0 {
        context::next_operation(thread, None);
        match work.step() {
            background::Step::Again => {}
            background::Step::Sleep { .. }
            | background::Step::Doze { .. }
            | background::Step::Yield { .. } => recorder.relax(),
            background::Step::Stop => return,
        }
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
