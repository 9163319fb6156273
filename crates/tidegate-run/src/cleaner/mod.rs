//! The cleaner: a thread that makes files durable that the log has records of, and frees the log
//! behind them. Here is its loop.
//!
//! Invariants:
//! 1. It sleeps unless there is something to do: until the head comes to a position that matters, a
//!    process ends, a request comes, or, while the log has records or files are kept, [`QUIET`]
//!    passes.
//! 2. Free space is shown to writers as soon as it is retired.
//!
//! Map: [`Cleaner`] is the handle of the supervisor's loop (`handle`); `Worker` is the thread. Each
//! time `policy` says so it takes a `batch` of records and makes their files durable; `failure` is
//! for what the disk does not take, `reap` for processes that have ended. `backlog` knows what is
//! due, `kept` holds the descriptors, `writeback` syncs.

mod batch;
mod failure;
mod handle;
mod reap;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate::log::{Counter, Log};

pub(crate) use handle::{Cleaner, Event};

use super::allocator::Allocator;
use super::backlog::Backlog;
use super::copies::Copies;
use super::held::HeldFileSystems;
use super::kept::KeptFiles;
use super::policy::{Action, DiskSpeed, Policy, Situation};
use super::stats::CleanerCounts;
use failure::PAUSE_LEAST;
use handle::{Events, Job};
use reap::Unrepaired;

/// A log without an append for so long is retired. It is looked at this often while it is in use,
/// so it is clean at most twice as long after its last append.
const QUIET: Duration = Duration::from_millis(2500);

/// How often the log notes what the kernel has done, while it is in use.
const BEAT: Duration = Duration::from_millis(100);

/// How old a record of names becomes before it is retired with all others: within a second of its
/// append, if the disk takes half of that.
const NAMES_AGE: Duration = Duration::from_millis(500);

const UNREACHABLE: &str = "a program that cannot be watched was started by a process that does not reach the pool's supervisor \
     (another file system hides what the pool has in /dev/shm, say): from now on all syncs are real ones";

/// A request that waits for the log to be retired up to a position.
struct Waiter {
    ticket: u64,
    until: u64,
    from: u64,
    /// The stories of clean files were ended for it.
    has_released: bool,
}

/// The state of the cleaner's thread.
struct Worker {
    log: Arc<Log>,
    jobs: Arc<Mutex<VecDeque<Job>>>,
    counts: Arc<CleanerCounts>,
    events: Events,
    allocator: Allocator,
    policy: Policy,
    backlog: Backlog,
    kept: KeptFiles,
    held: HeldFileSystems,
    copies: Copies,
    waiters: Vec<Waiter>,
    /// What dead processes left and cannot be repaired yet: tried again.
    unrepaired: Unrepaired,
    failed_attempts: u32,
    /// The launchers were told of the failure that goes on.
    failure_told: bool,
    /// The launchers were told that nothing is logged any more.
    suspension_told: bool,
    /// A writer waits for free space.
    is_blocked: bool,
    /// When files were last looked for that need not be kept any more.
    swept_at: Instant,
    /// A head, and since when it is known to be the log's.
    quiet_since: (u64, Instant),
    /// When the log's heart has beaten last, and up to where the kernel had done all then.
    beaten: (Instant, u64),
    speed: DiskSpeed,
}

/// What the thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Look again at once.
    Again,
    /// Sleep until the head is there, for so long at most.
    Sleep {
        wake_at: u64,
        timeout: Option<Duration>,
    },
    Stop,
}

impl Worker {
    fn new(
        log: &Arc<Log>,
        jobs: &Arc<Mutex<VecDeque<Job>>>,
        counts: &Arc<CleanerCounts>,
        events: Events,
        allocator: Allocator,
    ) -> Self {
        let policy = Policy::new(log.ring().pool().ring_bytes());
        Self {
            log: Arc::clone(log),
            jobs: Arc::clone(jobs),
            counts: Arc::clone(counts),
            events,
            allocator,
            backlog: Backlog::new(log.ring().tail(), policy.segment_bytes),
            policy,
            kept: KeptFiles::default(),
            held: HeldFileSystems::default(),
            copies: Copies::default(),
            waiters: Vec::new(),
            unrepaired: Unrepaired::default(),
            failed_attempts: 0,
            failure_told: false,
            suspension_told: false,
            is_blocked: false,
            swept_at: Instant::now(),
            quiet_since: (log.ring().head(), Instant::now()),
            beaten: (Instant::now(), 0),
            speed: DiskSpeed::default(),
        }
    }

    /// Keeps the files of a supervisor that died.
    fn take_over(&mut self) {
        self.look();
        HeldFileSystems::take_over(&self.log);
        self.kept.take_over(&self.log, &self.backlog);
    }

    fn run(&mut self) {
        loop {
            // Before the look at what is to be done: what comes after it wakes us.
            let seen = self.log.ring().work();
            match self.step() {
                Step::Again => {}
                Step::Stop => return,
                Step::Sleep { wake_at, timeout } => {
                    self.log.ring().wait_for_work(seen, wake_at, timeout);
                }
            }
        }
    }

    fn step(&mut self) -> Step {
        self.note_copies();
        self.kept.keep_wanted(&self.log);
        self.held.hold_wanted(&self.log);
        if !self.take_jobs() {
            return Step::Stop;
        }
        self.repair_unrepaired();
        self.beat();
        self.sweep();
        self.tell_suspension();
        let has_blocked_writer = self.log.ring().take_blocked_writer();
        if let Err(message) = self.allocator.keep_ahead(&self.log, has_blocked_writer) {
            self.events.send(Event::Notice(message));
        }
        self.is_blocked |= has_blocked_writer && self.allocator.wake_at(&self.log).is_none();
        let mut situation = self.situation();
        if self.policy.decide(&situation) == Action::Start {
            self.look();
            situation.dirty_bytes = self.backlog.dirty_bytes();
        }
        match self.policy.decide(&situation) {
            Action::Sync => self.retire(&situation),
            Action::Start => {
                self.start_writing(u64::MAX);
                self.sleep()
            }
            Action::Nothing if situation.is_idle => {
                self.release_all();
                // The ends of stories are records too. They are no reason to wait once more.
                situation.used_bytes = self.log.ring().head() - self.log.ring().tail();
                if situation.used_bytes > 0 { self.retire(&situation) } else { self.sleep() }
            }
            Action::Nothing => self.sleep(),
        }
    }

    /// Before a file is kept: none of a file system that has copies is.
    fn note_copies(&mut self) {
        for id in self.copies.note(&self.log) {
            let uuid = uuid::Uuid::from_bytes(id);
            // First: a launcher that prints the notice finds logging suspended.
            self.events.send(Event::Copied);
            self.events.send(Event::Notice(format!(
                "several file systems with the UUID {uuid} are mounted, and after a crash nobody could tell which of them \
                 the log is about: syncs of their files are real ones until only one is mounted"
            )));
        }
    }

    /// Does what was asked for; false: the thread is to end.
    fn take_jobs(&mut self) -> bool {
        let jobs = std::mem::take(&mut *self.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        for job in jobs {
            match job {
                Job::Ended(process) => self.reap(process),
                Job::Mounts => self.copies.look(&self.log),
                Job::RetireAll { ticket } => {
                    let (until, from) = (self.log.ring().head(), self.log.ring().tail());
                    self.waiters.push(Waiter { ticket, until, from, has_released: false });
                }
                Job::Stop => return false,
            }
        }
        true
    }

    /// Notes in the pool, now and then, what the kernel has done: recovery tells by it which files
    /// were changed from outside.
    fn beat(&mut self) {
        let (beaten_at, done) = self.beaten;
        if done == self.log.ring().head() || beaten_at.elapsed() < BEAT {
            return;
        }
        // Where the memory fails, recovery relies on what the records say.
        let done = self.log.beat().unwrap_or(done);
        self.beaten = (Instant::now(), done);
    }

    /// Closes files that need not be kept any more, now and then: a removed file takes its space
    /// until then.
    fn sweep(&mut self) {
        if self.swept_at.elapsed() >= QUIET {
            self.swept_at = Instant::now();
            self.kept.release_ended(&self.log);
        }
    }

    /// No process can tell the supervisor, so this thread does, which each of them wakes.
    fn tell_suspension(&mut self) {
        if !self.suspension_told && self.log.processes().is_suspended_for_good() {
            self.suspension_told = true;
            self.events.send(Event::Notice(UNREACHABLE.into()));
        }
    }

    fn situation(&mut self) -> Situation {
        let (head, tail) = (self.log.ring().head(), self.log.ring().tail());
        if self.quiet_since.0 != head {
            self.quiet_since = (head, Instant::now());
        }
        Situation {
            used_bytes: head - tail,
            dirty_bytes: self.backlog.dirty_bytes(),
            is_wanted: self.log.ring().wanted() > tail || !self.waiters.is_empty(),
            is_blocked: self.is_blocked,
            is_idle: self.quiet_since.1.elapsed() >= QUIET,
            has_old_names: self.log.file_systems().names_age().is_some_and(|age| age >= NAMES_AGE),
        }
    }

    /// Closes all that is held of files and file systems of which the log has nothing.
    fn release_all(&mut self) {
        self.kept.release_all(&self.log);
        self.held.release_all(&self.log);
    }

    fn count(&self, counter: Counter, number: u64) {
        self.log.ring().stats().add(counter, number);
    }

    /// Answers those that waited for what is retired by now, once no file is kept of which the log
    /// has nothing.
    fn answer_waiters(&mut self) {
        let tail = self.log.ring().tail();
        if self.waiters.iter().any(|waiter| waiter.until <= tail && !waiter.has_released) {
            self.release_all();
        }
        let head = self.log.ring().head();
        for waiter in self.waiters.iter_mut().filter(|waiter| waiter.until <= tail) {
            if !waiter.has_released {
                // The ends of stories are records too.
                (waiter.until, waiter.has_released) = (head, true);
            }
        }
        if self.waiters.iter().any(|waiter| waiter.until <= tail) {
            // The ends of stories are retired by now: the log may be empty only since then.
            self.held.release_all(&self.log);
        }
        for waiter in self.waiters.extract_if(.., |waiter| waiter.until <= tail) {
            let result = Ok(tail - waiter.from);
            self.events.send(Event::Retired { ticket: waiter.ticket, result });
        }
    }

    fn sleep(&mut self) -> Step {
        let (head, tail) = (self.log.ring().head(), self.log.ring().tail());
        let is_in_use = head > tail || !self.kept.is_empty() || !self.held.is_empty();
        let timeout = match (self.unrepaired.is_empty(), is_in_use) {
            (false, _) => Some(PAUSE_LEAST),
            (true, true) if self.beaten.1 != head => Some(BEAT),
            (true, true) => Some(QUIET),
            (true, false) => None,
        };
        let names_age = self.log.file_systems().names_age().filter(|_| head > tail);
        let until_old = names_age.map(|age| NAMES_AGE.saturating_sub(age));
        let timeout = timeout.into_iter().chain(until_old).min();
        let wake_at = self.policy.wake_at(tail, head, self.backlog.scanned());
        let wake_at = wake_at.min(self.allocator.wake_at(&self.log).unwrap_or(u64::MAX));
        Step::Sleep { wake_at, timeout }
    }
}
