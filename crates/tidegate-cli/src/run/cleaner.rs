//! The cleaner: a thread that makes the files catch up with the log, and frees the log behind them.
//!
//! Invariants:
//! 1. The tail moves to a position only after a sync without failures of all files and directories that the records
//!    before it name, begun when the kernel had done all their operations.
//! 2. What cannot be synced stays in the log, is written to its file once more from there, and tried again later.
//! 3. It sleeps unless there is something to do: until the head comes to a position that matters, a process ends, somebody
//!    asks, or, where records wait, [`IDLE`] passes.
//!
//! Map: [`Cleaner`] is the handle of the supervisor's loop; `Worker` is the thread; `policy` says what is to be done
//! when; `backlog` knows what is due, `writeback` syncs it, `redo` minds the dead and the failed.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Pid;
use tidegate::log::{Counter, FileRef, Log, RecordKind};

use super::absorbed::AbsorbedFiles;
use super::allocator::Allocator;
use super::backlog::{Backlog, Due, Window};
use super::leases::Leases;
use super::mounts;
use super::pace::{DiskSpeed, PART_BYTES, Pace, Part};
use super::policy::{Action, Policy, Situation};
use super::redo;
use super::stats::CleanerCounts;
use super::writeback::{Failure, Writeback};

/// How long a log with records in it is left alone after the last append.
const IDLE: Duration = Duration::from_secs(5);
/// Pause after a failure; it doubles up to [`PAUSE_MOST`].
const PAUSE_LEAST: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(5);
/// How long a process may take to settle a file itself, when no supervisor lives.
const PATIENCE_WITH_SETTLING: Duration = Duration::from_secs(60);
/// With more parts of files to write than this, waiting for each would cost more than it brings.
const PARTS_PACED: usize = 256;
/// How long a batch may take where no room is left to be shown meanwhile.
const BATCH: Duration = Duration::from_millis(40);
/// Writers that have not waited for room for so long do not need it held back.
const PRESSURE: Duration = Duration::from_millis(100);
/// Pause where a writer is in the middle of an operation that somebody waits for.
const PAUSE_FOR_WRITER: Duration = Duration::from_millis(1);
/// Syncs of the same records that may fail before whoever waits is told.
const ATTEMPTS: u32 = 3;

/// What the thread has to say.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Something that people should know.
    Notice(String),
    /// The log was retired as [`Cleaner::retire_all`] asked.
    Retired {
        /// Who asked.
        ticket: u64,
        /// Bytes that became free, or why it cannot be done now.
        result: Result<u64, String>,
    },
    /// A file was settled as [`Cleaner::settle`] asked.
    Settled {
        /// Who asked.
        ticket: u64,
        /// Or why it cannot be done now.
        result: Result<(), String>,
    },
}

/// What the thread is told.
#[derive(Debug)]
enum Job {
    Ended(Pid),
    Settle { file: FileRef, ticket: Option<u64> },
    RetireAll { ticket: u64 },
    Stop,
}

/// The cleaner of a log.
pub(crate) struct Cleaner {
    log: Arc<Log>,
    jobs: Arc<Mutex<VecDeque<Job>>>,
    outcomes: Receiver<Outcome>,
    ready: Arc<OwnedFd>,
    counts: Arc<CleanerCounts>,
    leases: Leases,
    thread: JoinHandle<()>,
}

impl AsFd for Cleaner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

impl Cleaner {
    /// Starts the thread, which takes the right to clean `log`. `leases` are those of a supervisor that died.
    ///
    /// # Errors
    /// No thread or descriptor is left, or somebody else cleans the log.
    pub(crate) fn start(log: Arc<Log>, allocator: Allocator, leases: Leases) -> io::Result<Self> {
        let jobs = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, outcomes) = channel();
        let ready = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let counts = Arc::new(CleanerCounts::default());
        let voice = Voice { sender, ready: Arc::clone(&ready) };
        let (started, wait_started) = channel();
        let absorbed = AbsorbedFiles::new(&log, leases.clone());
        let mut worker = Worker::new(&log, &jobs, &counts, voice, (allocator, absorbed));
        let thread = std::thread::Builder::new().name("cleaner".into()).spawn(move || {
            let log = Arc::clone(&worker.log);
            let supervision = log.supervise(PATIENCE_WITH_SETTLING);
            // Whoever starts the thread waits for this.
            let _ = started.send(supervision.is_ok());
            if supervision.is_ok() {
                worker.absorbed.note_settled();
                worker.run();
            }
        })?;
        if wait_started.recv() != Ok(true) {
            return Err(io::Error::other("another process cleans the log"));
        }
        Ok(Self { log, jobs, outcomes, ready, counts, leases, thread })
    }

    /// The process ended: what it left half done is to be done.
    pub(crate) fn process_ended(&self, process: Pid) {
        self.post(Job::Ended(process));
    }

    /// Has the kernel told of all that was kept from it about a file.
    pub(crate) fn settle(&self, file: FileRef, ticket: Option<u64>) {
        self.post(Job::Settle { file, ticket });
    }

    /// The leases on absorbed files.
    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Has all records retired that the log has by now.
    pub(crate) fn retire_all(&self, ticket: u64) {
        self.post(Job::RetireAll { ticket });
    }

    /// What the thread has said since this was called last.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        // Nothing to read means that it was read before.
        let _ = rustix::io::read(&*self.ready, &mut [0_u8; 8]);
        self.outcomes.try_iter().collect()
    }

    /// The log.
    pub(crate) fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// What was counted here.
    pub(crate) fn counts(&self) -> &CleanerCounts {
        &self.counts
    }

    /// Ends the thread.
    pub(crate) fn stop(self) -> Arc<Log> {
        self.post(Job::Stop);
        // A panic of the thread was printed; the log has all that it did not write back.
        let _ = self.thread.join();
        self.log
    }

    fn post(&self, job: Job) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
        self.log.wake_cleaner();
    }
}

/// How the thread reaches the supervisor's loop.
struct Voice {
    sender: Sender<Outcome>,
    ready: Arc<OwnedFd>,
}

impl Voice {
    fn say(&self, outcome: Outcome) {
        // The receiver is gone only after the thread.
        let _ = self.sender.send(outcome);
        // Any number but 0 in any byte order will do.
        let _ = rustix::io::write(&*self.ready, &[1_u8; 8]);
    }
}

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

    /// Sums up what can be retired by now: how far that is.
    fn look(&mut self) -> u64 {
        let safe = self.log.safe_position();
        self.scan(safe);
        safe
    }

    /// Has the kernel start to write what will not be written again soon, until somebody waits for room.
    fn start_writing(&mut self) {
        self.absorbed.lend(&mut self.writeback);
        for (id, window) in self.backlog.worth_starting() {
            let Some(file) = self.backlog.file(id) else { continue };
            for part in window.parts(PART_BYTES) {
                if self.log.is_starving() {
                    return;
                }
                let Window { start, end, .. } = part;
                self.writeback.start(file, Part { id, start, end, bytes: 0 });
            }
        }
    }

    fn scan(&mut self, until: u64) {
        let mut payload = Vec::new();
        let mut records = self.log.records(self.backlog.scanned(), until);
        for header in records.by_ref() {
            payload.clear();
            let names =
                [RecordKind::Define, RecordKind::Link, RecordKind::Unlink, RecordKind::Rename];
            if names.contains(&header.kind) {
                payload.resize(header.payload_bytes as usize, 0);
                if self.log.pool().read_payload(&header, 0, &mut payload).is_err() {
                    // Failed memory under a name: its file is synced with its file system.
                    payload.clear();
                }
            }
            self.backlog.add(&header, &payload);
            self.absorbed.add(&header);
        }
        let unreadable_bytes = records.unreadable_bytes();
        self.backlog.reached(until);
        if unreadable_bytes > 0 {
            // Whatever files they are about: the kernel has done what they say, but for what was absorbed.
            rustix::fs::sync();
            self.voice.say(Outcome::Notice(format!(
                "{unreadable_bytes} bytes of the log cannot be read; what programs wrote is on its way to the disk without them"
            )));
        }
    }

    /// Makes the files durable and frees the log up to where that holds.
    fn retire(&mut self, situation: &Situation) -> Step {
        let started = Instant::now();
        let safe = self.look();
        // Before anything is opened: to open a file that is lent would break its lease.
        self.absorbed.lend(&mut self.writeback);
        let (goal, due) = self.choose(situation, safe);
        if goal <= self.retired
            && situation.starving
            && !situation.wanted
            && situation.owed_bytes > 0
        {
            // Writers are in the middle of what would be next. They do not tell when they have done it.
            self.show_for_next();
            return Step::Sleep { wake_at: u64::MAX, patience: Some(PAUSE_FOR_WRITER) };
        }
        let (failures, shown) = self.bring(situation, goal, &due);
        if !failures.is_empty() {
            return self.failed(&failures);
        }
        let failures = self.rewrite(self.log.take_dropped());
        if !failures.is_empty() {
            return self.failed(&failures);
        }
        let files: Vec<_> = due.files.keys().filter_map(|id| self.backlog.file(*id)).collect();
        if let Some(name) = mounts::mounted_anew(&self.log, &files) {
            let error = io::Error::other("its file system was mounted anew");
            return self.failed(&[Failure { file: None, name, error }]);
        }
        let synced_from = Instant::now();
        if files.len() < due.files.len() {
            // Of a file that no record defines nothing is known but that it is somewhere.
            rustix::fs::sync();
        }
        let synced = self.writeback.sync(&files, &due.directories);
        self.count(Counter::CleanerSyncs, synced.calls);
        self.count(Counter::CleanerSyncNs, nanoseconds(synced_from.elapsed()));
        if !synced.failures.is_empty() {
            return self.failed(&synced.failures);
        }
        (self.failed_attempts, self.failure_told) = (0, false);
        self.log.stats().raise(Counter::HighWaterBytes, situation.used_bytes);
        let retired = goal > self.retired && self.retire_to(goal);
        if retired {
            self.speed.measured(due.dirty_bytes(), started.elapsed());
            self.counts.written_back(due.dirty_bytes(), self.backlog.files_seen());
        }
        // Or has begun to wait meanwhile.
        let starving = situation.starving || self.log.is_starving();
        let situation = Situation { starving, ..*situation };
        if situation.is_paced(self.retired - self.log.tail(), due.dirty_bytes()) {
            self.show(shown);
            // Who was not woken by that does not say again that he waits.
            self.pressed = Some(Instant::now());
        } else {
            if retired {
                // Who has asked so far is woken by what follows, and asks again if that is not enough.
                self.log.take_starving();
            }
            self.show(self.retired);
        }
        self.answer_waiters();
        if !retired {
            // A writer is in the middle of something: it does not tell when it has done it. Each look asks writers for newer
            // definitions, so there must not be too many.
            let patience = Some(PAUSE_FOR_WRITER);
            return Step::Sleep { wake_at: u64::MAX, patience };
        }
        Step::Again
    }

    fn count(&self, counter: Counter, number: u64) {
        self.log.stats().add(counter, number);
    }

    /// Moves the tail to `position`, whose room writers are not shown yet.
    fn retire_to(&mut self, position: u64) -> bool {
        match self.log.retire_unseen(position) {
            Ok(()) => {
                self.count(Counter::RetiredBytes, position - self.retired);
                self.retired = position;
                self.backlog.retired(position);
                self.absorbed.retired(position);
                true
            }
            Err(error) => {
                self.voice.say(Outcome::Notice(format!("the log's tail cannot be moved: {error}")));
                false
            }
        }
    }

    /// Up to where records are retired next, and what is due for them.
    ///
    /// Not all that could be, where writers would wait for all of it with nothing to be shown meanwhile. Only of streams: what is
    /// written again and again is not to reach the disk with each part of the log. And only where bytes are brought: what
    /// the kernel has, a sync writes anyway.
    fn choose(&self, situation: &Situation, safe: u64) -> (u64, Due) {
        let due = self.backlog.due();
        let live_bytes = safe.saturating_sub(self.retired);
        let is_stream = due.dirty_bytes().saturating_mul(2) > live_bytes;
        let is_limited = is_stream && !situation.wanted && situation.owed_bytes == 0;
        if is_limited && self.absorbed.has_unbrought() {
            let limit = self.policy.batch_bytes(situation, self.speed.bytes_in(BATCH));
            let may_be_goal = |position| {
                self.retired < position && position <= safe && self.log.may_retire_to(position)
            };
            return self.backlog.due_for(limit, may_be_goal).unwrap_or((safe, due));
        }
        (safe, due)
    }

    /// Gives the kernel what was absorbed before `goal`, and the disk what is due of it, while writers are shown the room of the
    /// last batch. What failed, and up to where room may be shown when all is durable.
    fn bring(&mut self, situation: &Situation, goal: u64, due: &Due) -> (Vec<Failure>, u64) {
        let (shown, owed) = (self.log.tail(), self.retired - self.log.tail());
        let brought = self.absorbed.bytes_to_bring(goal);
        let parts = parts(due, &brought);
        let is_paced = owed > 0 && situation.is_paced(owed, due.dirty_bytes());
        let is_in_parts = is_paced && parts.len() <= PARTS_PACED;
        let mut room = owed;
        if is_paced {
            room = self.policy.room_to_show(owed, goal.saturating_sub(self.retired));
        } else {
            self.show(self.retired);
        }
        let own_bytes = if is_in_parts { parts.iter().map(|part| part.bytes).sum() } else { 0 };
        let batch_bytes = brought.values().sum::<u64>() + own_bytes;
        let mut feed = Feed {
            log: &self.log,
            backlog: &self.backlog,
            writeback: &mut self.writeback,
            pace: Pace::new(shown, if is_paced { room } else { 0 }, batch_bytes, self.shown_at),
            begun: self.begun,
        };
        let scanned = self.backlog.scanned();
        let mut failures =
            self.absorbed.bring(goal, scanned, &mut |part| feed.give(part, part.bytes));
        if is_in_parts {
            failures.extend(parts.iter().find_map(|part| feed.give(*part, part.bytes).err()));
        }
        self.shown_at = feed.pace.shown_at();
        (failures, shown + room)
    }

    /// Shows writers the room for the next batch: the rest is for the time that it takes.
    fn show_for_next(&mut self) {
        let (shown, head) = (self.log.tail(), self.log.head());
        let room = self.policy.room_for_next(self.retired - shown, head - shown);
        self.show(shown + room.next_multiple_of(64).min(self.retired - shown));
    }

    /// Shows writers the room up to `position`, which was retired.
    fn show(&mut self, position: u64) {
        if position > self.log.tail() {
            self.log.show_room(position);
            self.shown_at = self.begun.elapsed();
        }
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
            let message =
                format!("a file cannot take what was written to it, the log keeps it: {error}");
            self.voice.say(Outcome::Notice(message));
        }
    }

    fn answer_waiters(&mut self) {
        let tail = self.log.tail();
        for waiter in self.waiters.extract_if(.., |waiter| waiter.until <= tail) {
            let result = Ok(tail - waiter.from);
            self.voice.say(Outcome::Retired { ticket: waiter.ticket, result });
        }
    }

    /// Notes what could not be synced, so that it is written once more, and pauses.
    fn failed(&mut self, failures: &[Failure]) -> Step {
        self.counts.failed();
        // Nothing is written meanwhile that it could be kept for.
        self.show(self.retired);
        self.failed_attempts += 1;
        let message = describe(failures);
        let is_passing = failures.iter().all(Failure::is_passing);
        if !self.failure_told && (!is_passing || self.failed_attempts >= ATTEMPTS) {
            self.failure_told = true;
            self.voice.say(Outcome::Notice(format!(
                "{message}; the log keeps it, and it is tried again"
            )));
        }
        if !is_passing {
            self.log.distrust_kernel();
        }
        let failed = failures.iter().filter(|failure| !failure.is_passing());
        let ids = failed.filter_map(|failure| failure.file);
        for entry in self.log.files_with_ids(ids).into_values() {
            // The next sync of the program will tell it; a file that is gone from the table has no program.
            let _ = self.log.note_failure(entry);
        }
        if self.failed_attempts >= ATTEMPTS {
            for waiter in self.waiters.drain(..) {
                let result = Err(message.clone());
                self.voice.say(Outcome::Retired { ticket: waiter.ticket, result });
            }
        }
        let doubled = PAUSE_LEAST.saturating_mul(1 << (self.failed_attempts - 1).min(8));
        Step::Sleep { wake_at: u64::MAX, patience: Some(doubled.min(PAUSE_MOST)) }
    }

    /// Writes all that the log has of these files to them once more: what failed.
    fn rewrite(&mut self, files: Vec<u64>) -> Vec<Failure> {
        let mut failures = Vec::new();
        let entries = self.log.files_with_ids(files.iter().copied());
        for file in files.into_iter().filter_map(|id| self.backlog.file(id)) {
            // One that is gone from the table has nothing left to be written.
            let Some(&entry) = entries.get(&file.id) else { continue };
            let lent = self.absorbed.lent(entry);
            if lent.as_ref().is_some_and(|file| appends(file)) {
                // What was absorbed is brought again; the rest, which would be appended, is left to the kernel.
                continue;
            }
            // Opened before: what goes wrong with what is written now is then told to the next sync.
            match &lent {
                Some(lent) => self.writeback.adopt(file.id, lent),
                None => self.writeback.keep_open(file),
            }
            if let Err(error) = redo::rewrite(&self.log, file, entry, lent.as_deref()) {
                let name = file.names.first().cloned().unwrap_or_default();
                let failure = Failure { file: Some(file.id), name, error };
                if failure.is_passing() {
                    // As above.
                    let _ = self.log.drop_again(entry);
                }
                failures.push(failure);
            }
        }
        failures
    }

    fn sleep(&mut self) -> Step {
        if self.retired > self.log.tail() && self.is_pressed() {
            self.show_for_next();
            return Step::Sleep { wake_at: u64::MAX, patience: Some(PRESSURE) };
        }
        self.show(self.retired);
        let (head, tail) = (self.log.head(), self.log.tail());
        let patience = (head > tail).then_some(IDLE);
        let patience = if self.unsettled.is_empty() { patience } else { Some(PAUSE_LEAST) };
        let wake_at = self.policy.wake_at(tail, head, self.backlog.scanned());
        let wake_at = wake_at.min(self.allocator.wake_at(&self.log).unwrap_or(u64::MAX));
        Step::Sleep { wake_at, patience }
    }

    fn mend_after(&mut self, process: Pid) {
        let process = process.as_raw_nonzero().get().unsigned_abs();
        for message in redo::mend_after(&self.log, process) {
            self.voice.say(Outcome::Notice(message));
        }
        self.log.stop_keeping_of(process);
        let absorbed: Vec<_> = self.log.absorbed_by(Some(process)).collect();
        for file in absorbed {
            self.settle(file, None, false);
        }
    }
}

/// What is due, in parts, but for files whose bytes are `brought`.
fn parts(due: &Due, brought: &HashMap<u64, u64>) -> Vec<Part> {
    let own = due.parts(PART_BYTES.max(due.dirty_bytes() / PARTS_PACED as u64 * 2));
    let own: Vec<_> = own.into_iter().filter(|(id, _)| !brought.contains_key(id)).collect();
    let bytes = due.dirty_bytes() / (own.len() as u64).max(1);
    own.into_iter().map(|(id, Window { start, end, .. })| Part { id, start, end, bytes }).collect()
}

/// Parts of files on their way to the disk.
struct Feed<'a> {
    log: &'a Log,
    backlog: &'a Backlog,
    writeback: &'a mut Writeback,
    pace: Pace,
    begun: Instant,
}

impl Feed<'_> {
    /// Has the disk take a part, and shows room for `bytes` of it.
    ///
    /// # Errors
    /// The disk does not take it.
    fn give(&mut self, part: Part, bytes: u64) -> Result<(), Failure> {
        let known = self.backlog.file(part.id);
        let finished = known.map_or(Ok(()), |file| self.writeback.finish(file, part));
        if let Some(position) = self.pace.took(bytes, self.begun.elapsed()) {
            self.log.show_room(position);
        }
        finished
    }
}

fn appends(file: &std::fs::File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn describe(failures: &[Failure]) -> String {
    let Some(first) = failures.first() else { return String::new() };
    let more = match failures.len() {
        1 => String::new(),
        number => format!(", and {} more", number - 1),
    };
    format!("{} cannot be written back ({}){more}", first.name.display(), first.error)
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::super::trial::Trial;
    use super::*;

    /// How the retirement with this ticket ends.
    fn retired(cleaner: &Cleaner, wanted: u64) -> Result<u64, String> {
        cleaner.retire_all(wanted);
        loop {
            poll(&mut [PollFd::new(cleaner, PollFlags::IN)], None).unwrap();
            for outcome in cleaner.outcomes() {
                if let Outcome::Retired { ticket, result } = outcome
                    && ticket == wanted
                {
                    return result;
                }
            }
        }
    }

    /// Else the program's next sync would tell of an error, and its database be given up for it.
    #[test]
    fn a_lock_that_is_held_is_no_failure_of_the_file() {
        let trial = Trial::new();
        let file = trial.file("file", b"0123456789");
        trial.write(&file, "file", 0, b"abc");
        trial.log.distrust_all_files();
        let allocator = Allocator::begin(&trial.log).unwrap();
        let guard = trial.lock(&file);
        let cleaner = Cleaner::start(Arc::clone(&trial.log), allocator, Leases::default()).unwrap();
        retired(&cleaner, 1).unwrap_err();
        assert!(!guard.take_failure());
        drop(guard);
        retired(&cleaner, 2).unwrap();
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"abc3456789");
        cleaner.stop();
    }
}
