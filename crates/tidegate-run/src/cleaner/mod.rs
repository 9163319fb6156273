//! The cleaner: a thread that makes the changes of the log's records durable in their files, and
//! frees the log behind them. This module has its loop.
//!
//! Invariants:
//! 1. It sleeps unless there is work: until the head reaches a position that matters, a process
//!    ends, a request comes, or [`QUIET`] passes while the log has records or files are kept.
//! 2. Writers can use free space as soon as it is retired.
//!
//! Map: [`Cleaner`] is the handle of the supervisor's loop (`handle`); `Worker` is the thread. When
//! `policy` decides so, it takes a `batch` of records and makes their files durable. `failure`
//! handles errors of the disk, `reap` processes that have ended. `backlog` knows the due data,
//! `kept` holds the descriptors, `writeback` syncs.

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

/// A log without an append for so long is retired. A log in use is checked at this interval, so it
/// is clean at most twice as long after its last append.
const QUIET: Duration = Duration::from_millis(2500);

/// How often the log notes the kernel's progress, while it is in use.
const BEAT: Duration = Duration::from_millis(100);

/// A record of names that is this old is retired with all other records: within a second of its
/// append, if the disk takes half of that.
const NAMES_AGE: Duration = Duration::from_millis(500);

const UNREACHABLE: &str = "a program that cannot be watched was started by a process that does not reach the pool's supervisor \
     (another file system hides what the pool has in /dev/shm, say): from now on all syncs are real ones";

const NOT_RETIRED: &str = "a program that cannot be watched was started while the disk failed, so that the log could not be emptied: from \
     now on all syncs are real ones";

/// A request that waits for the log to be retired up to a position.
struct Waiter {
    ticket: u64,
    until: u64,
    from: u64,
    /// Whether the stories of clean files were ended for this request.
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
    /// Failed repairs of dead processes, for another attempt.
    unrepaired: Unrepaired,
    failed_attempts: u32,
    /// Whether launchers were told of the present failure.
    failure_told: bool,
    /// Whether launchers were told that nothing is logged any more.
    suspension_told: bool,
    /// Whether a writer waits for free space.
    is_blocked: bool,
    /// Time of the last search for files that need not be kept any more.
    swept_at: Instant,
    /// A head, and since when it is known to be the log's.
    quiet_since: (u64, Instant),
    /// Time of the log's last heartbeat, and the end of the kernel's operations then.
    beaten: (Instant, u64),
    speed: DiskSpeed,
}

/// The thread's next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Look again at once.
    Again,
    /// Sleep until the head reaches `wake_at`, or for `timeout`.
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

    /// Takes over the files of a dead supervisor.
    fn take_over(&mut self) {
        self.look();
        HeldFileSystems::take_over(&self.log);
        self.kept.take_over(&self.log, &self.backlog);
    }

    fn run(&mut self) {
        loop {
            // Read before the search for work: any later change of `work` ends the wait.
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
                // The ends of stories are records too. They are no reason to wait again.
                situation.used_bytes = self.log.ring().head() - self.log.ring().tail();
                if situation.used_bytes > 0 { self.retire(&situation) } else { self.sleep() }
            }
            Action::Nothing => self.sleep(),
        }
    }

    /// Reports file systems that have copies. Called before files are kept, since no file on such a
    /// file system may be kept.
    fn note_copies(&mut self) {
        for id in self.copies.note(&self.log) {
            let uuid = uuid::Uuid::from_bytes(id);
            // The order matters: a launcher that prints the notice finds logging suspended.
            self.events.send(Event::Copied);
            self.events.send(Event::Notice(format!(
                "several file systems with the UUID {uuid} are mounted, and after a crash nobody could tell which of them \
                 the log is about: syncs of their files are real ones until only one is mounted"
            )));
        }
    }

    /// Does the requested jobs. Returns `false` if the thread must end.
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

    /// Notes the kernel's progress in the pool, now and then. Recovery needs it to find files that
    /// were changed from outside.
    fn beat(&mut self) {
        let (beaten_at, done) = self.beaten;
        if done == self.log.ring().head() || beaten_at.elapsed() < BEAT {
            return;
        }
        // If the memory fails, recovery relies on the records alone.
        let done = self.log.beat().unwrap_or(done);
        self.beaten = (Instant::now(), done);
    }

    /// Closes files that need not be kept any more, now and then. A removed file takes its space
    /// until then.
    fn sweep(&mut self) {
        if self.swept_at.elapsed() >= QUIET {
            self.swept_at = Instant::now();
            self.kept.release_ended(&self.log);
        }
    }

    /// Reports a suspension that a process could not report to the supervisor, or for which the log
    /// could not be retired. Such a process wakes this thread instead.
    fn tell_suspension(&mut self) {
        if !self.suspension_told && self.log.processes().is_suspended_for_good() {
            self.suspension_told = true;
            let message = if self.failed_attempts > 0 { NOT_RETIRED } else { UNREACHABLE };
            self.events.send(Event::Notice(message.into()));
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

    /// Closes the descriptors of all files and file systems without changes in the log.
    fn release_all(&mut self) {
        self.kept.release_all(&self.log);
        self.held.release_all(&self.log);
    }

    fn count(&self, counter: Counter, number: u64) {
        self.log.ring().stats().add(counter, number);
    }

    /// Answers requests whose records are retired, once no file without changes is kept.
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
