//! The cleaner: a thread that makes the files catch up with the log, and frees the log behind them. Here is its loop.
//!
//! Invariants:
//! 1. It sleeps unless there is something to do: until the head comes to a position that matters, a process ends, somebody
//!    asks, or, where records wait, [`IDLE`] passes.
//!
//! Map: [`Cleaner`] is the handle of the supervisor's loop (`handle`); `Worker` is the thread. Each time `policy` says so it takes
//! a `batch` of records, whose files are brought to the disk while writers are shown `room`; `failure` is for what the disk does not
//! take, `dead` for processes that have ended. `backlog` knows what is due, `writeback` syncs it, `redo` minds the dead and the failed.

mod batch;
mod dead;
mod failure;
mod handle;
mod room;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate::log::{Counter, FileRef, Log};

pub(crate) use handle::{Cleaner, Outcome};

use super::absorbed::AbsorbedFiles;
use super::allocator::Allocator;
use super::backlog::Backlog;
use super::pace::DiskSpeed;
use super::policy::{Action, Policy, Situation};
use super::stats::CleanerCounts;
use super::writeback::Writeback;
use dead::Unmended;
use failure::PAUSE_LEAST;
use handle::{Job, Voice};

/// How long a log with records in it is left alone after the last append.
const IDLE: Duration = Duration::from_secs(5);
/// Writers that have not waited for room for so long do not need it held back.
const PRESSURE: Duration = Duration::from_millis(100);

/// Somebody waits for the log to be retired up to a position.
struct Waiter {
    ticket: u64,
    until: u64,
    from: u64,
}

struct Worker {
    log: Arc<Log>,
    jobs: Arc<Mutex<VecDeque<Job>>>,
    counts: Arc<CleanerCounts>,
    voice: Voice,
    allocator: Allocator,
    policy: Policy,
    backlog: Backlog,
    writeback: Writeback,
    absorbed: AbsorbedFiles,
    waiters: Vec<Waiter>,
    /// The persistent tail: writers may have been shown less.
    retired: u64,
    /// Absorbed files that could not be settled: tried again.
    unsettled: Vec<FileRef>,
    /// What dead processes left and cannot be had yet: tried again.
    unmended: Unmended,
    failed_attempts: u32,
    /// The launchers were told of the failure that goes on.
    failure_told: bool,
    /// The head when the thread went to sleep, and when that was.
    asleep: Option<(u64, Instant)>,
    speed: DiskSpeed,
    /// When a writer was last known to wait for room.
    pressed: Option<Instant>,
    /// What times are counted from.
    begun: Instant,
    /// When room was shown last.
    shown_at: Duration,
}

/// What the thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Look again at once.
    Again,
    /// Sleep until the head is there, for so long at most.
    Sleep {
        wake_at: u64,
        patience: Option<Duration>,
    },
    Stop,
}

impl Worker {
    fn new(
        log: &Arc<Log>,
        jobs: &Arc<Mutex<VecDeque<Job>>>,
        counts: &Arc<CleanerCounts>,
        voice: Voice,
        (allocator, absorbed): (Allocator, AbsorbedFiles),
    ) -> Self {
        let policy = Policy::new(log.pool().ring_bytes());
        Self {
            log: Arc::clone(log),
            jobs: Arc::clone(jobs),
            counts: Arc::clone(counts),
            voice,
            allocator,
            backlog: Backlog::new(log.tail(), policy.segment_bytes),
            policy,
            writeback: Writeback::default(),
            absorbed,
            waiters: Vec::new(),
            retired: log.pool().tail().map_or(log.tail(), |tail| tail.max(log.tail())),
            unsettled: Vec::new(),
            unmended: Unmended::default(),
            failed_attempts: 0,
            failure_told: false,
            asleep: None,
            speed: DiskSpeed::default(),
            pressed: None,
            begun: Instant::now(),
            shown_at: Duration::ZERO,
        }
    }

    fn run(&mut self) {
        loop {
            // Before the look at what is to be done: what comes after it wakes us.
            let seen = self.log.work();
            match self.step() {
                Step::Again => {}
                Step::Stop => return,
                Step::Sleep { wake_at, patience } => {
                    self.asleep = Some((self.log.head(), Instant::now()));
                    self.log.wait_for_work(seen, wake_at, patience);
                }
            }
        }
    }

    fn step(&mut self) -> Step {
        let jobs = std::mem::take(&mut *self.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        for job in jobs {
            match job {
                Job::Ended(process) => self.mend_after(process),
                Job::Settle { file, ticket } => self.settle(file, ticket, false),
                Job::RetireAll { ticket } => {
                    let (until, from) = (self.log.head(), self.log.tail());
                    self.waiters.push(Waiter { ticket, until, from });
                }
                Job::Stop => return Step::Stop,
            }
        }
        self.mend_unmended();
        self.settle_unsettled();
        let mut situation = self.situation();
        if let Err(message) = self.allocator.keep_ahead(&self.log, situation.starving) {
            self.voice.say(Outcome::Notice(message));
        }
        if self.policy.decide(&situation) == Action::Start {
            self.look();
            situation.dirty_bytes = self.backlog.dirty_bytes();
        }
        match self.policy.decide(&situation) {
            Action::Sync => self.retire(&situation),
            Action::Start => {
                self.start_writing();
                self.sleep()
            }
            Action::Nothing => self.sleep(),
        }
    }

    fn situation(&mut self) -> Situation {
        let (head, tail) = (self.log.head(), self.log.tail());
        let owed_bytes = self.retired - tail;
        let mut starving = self.log.take_starving();
        if starving {
            self.pressed = Some(Instant::now());
        }
        // Those who wait and have been shown nothing since do not say so again.
        starving |= owed_bytes > 0 && self.is_pressed();
        let idle =
            self.asleep.take().is_some_and(|(at, since)| at == head && since.elapsed() >= IDLE);
        let waiters = self.waiters.iter().map(|waiter| waiter.until).max();
        Situation {
            used_bytes: head - tail,
            dirty_bytes: self.backlog.dirty_bytes(),
            wanted: self.log.wanted() > tail || waiters.is_some(),
            owed_bytes,
            starving,
            idle,
        }
    }

    fn is_pressed(&self) -> bool {
        self.pressed.is_some_and(|last| last.elapsed() < PRESSURE)
    }

    fn count(&self, counter: Counter, number: u64) {
        self.log.stats().add(counter, number);
    }

    /// Somebody waits for these, and has waited in vain.
    fn settle_unsettled(&mut self) {
        let wanted = self.log.wanted_settled();
        for file in std::mem::take(&mut self.unsettled).into_iter().chain(wanted) {
            self.settle(file, None, true);
        }
    }

    fn settle(&mut self, file: FileRef, ticket: Option<u64>, again: bool) {
        let result = self.absorbed.settle(file, self.backlog.scanned());
        if let Ok(unreadable_bytes @ 1..) = result {
            self.voice.say(Outcome::Notice(format!(
                "{unreadable_bytes} bytes of the log cannot be read; a file is left without what they may have had of it"
            )));
        }
        if result.is_ok() {
            // The description is the program's alone again: locks go with it when the program closes it.
            self.writeback.let_go(self.log.id_of(file));
        } else if ticket.is_none() && !self.unsettled.contains(&file) {
            self.unsettled.push(file);
        }
        if let Some(ticket) = ticket {
            let result = result.map(|_| ()).map_err(|error| error.to_string());
            self.voice.say(Outcome::Settled { ticket, result });
        } else if let Err(error) = result
            && !again
        {
            let name = self.name_of(self.log.id_of(file));
            let message =
                format!("{name} cannot take what was written to it, the log keeps it: {error}");
            self.voice.say(Outcome::Notice(message));
        }
    }

    /// A name of the file with this id, for people.
    fn name_of(&self, id: u64) -> String {
        let name = self.backlog.file(id).and_then(|file| file.names.first());
        name.map_or_else(|| "a file".into(), |name| name.display().to_string())
    }

    fn answer_waiters(&mut self) {
        let tail = self.log.tail();
        for waiter in self.waiters.extract_if(.., |waiter| waiter.until <= tail) {
            let result = Ok(tail - waiter.from);
            self.voice.say(Outcome::Retired { ticket: waiter.ticket, result });
        }
    }

    fn sleep(&mut self) -> Step {
        if self.retired > self.log.tail() && self.is_pressed() {
            self.show_for_next();
            return Step::Sleep { wake_at: u64::MAX, patience: Some(PRESSURE) };
        }
        self.show(self.retired);
        let (head, tail) = (self.log.head(), self.log.tail());
        let patience = (head > tail).then_some(IDLE);
        let has_to_retry = !self.unsettled.is_empty() || !self.unmended.is_empty();
        let patience = if has_to_retry { Some(PAUSE_LEAST) } else { patience };
        let wake_at = self.policy.wake_at(tail, head, self.backlog.scanned());
        let wake_at = wake_at.min(self.allocator.wake_at(&self.log).unwrap_or(u64::MAX));
        Step::Sleep { wake_at, patience }
    }
}
