//! The supervisor of a pool: it knows and answers the pool's processes, and ends with the last one.
//!
//! Invariants:
//! 1. The pool is held, and its log cleaned, from the welcome to the farewell.
//! 2. The tree is empty when no process that announced itself lives, and all open connections are
//!    of launchers that have sent [`Request::Leave`]. The supervisor ends only then, after the log
//!    is retired, and under the pool's lock, so that no process finds it meanwhile. A launcher that
//!    joins before that keeps the supervisor.
//! 3. It waits in one place, for events. A peer that does not read or sends nonsense is dropped,
//!    never waited for.
//!
//! Map: [`Supervisor::new`] · [`Supervisor::run`], the loop · [`Supervisor::end`] · `cleaner` does
//! the work.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, getrlimit, test_kill_process};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use signal_hook::consts::{SIGINT, SIGTERM};
use tidegate::log::cover::Cause;
use tidegate::log::{CLOSED, NO_BOOT};

use super::cleaner::{Cleaner, Event};
use super::mount::Mount;
use super::paths::{Lock, PoolPaths};
use super::socket::{Connection, Listener, Reply, Request, SESSION, Welcome};
use super::stats::{FileSyncs, Statistics, UNSUPPORTED};
use super::suspension::{Suspensions, named_by};
use super::tree::{
    Announced, Tree, is_out_of_descriptors, maps, name_of, pid_namespace, processes_that_map,
};

const LISTENER: u64 = 0;
const CLEANER: u64 = 1;
const TIMER: u64 = 2;
const SIGNAL: u64 = 3;
const MOUNTS: u64 = 4;
/// Keys of connections and tickets start here; keys of processes have the highest bit.
const FIRST_KEY: u64 = 16;
const PROCESS: u64 = 1 << 63;
const EVENTS_AT_ONCE: usize = 64;
/// How long to wait before asking again for a lock that a launcher holds.
const LOCK_RETRY_NS: i64 = 20_000_000;
/// How long to wait before asking again whether a hidden process lives.
const HIDDEN_RETRY_NS: i64 = 900_000_000;
/// How long to wait before asking again whether a member without a pidfd lives.
const POLL_NS: i64 = 100_000_000;

/// The pool in a supervisor's charge, with its cleaner.
pub(crate) struct Charge {
    /// The pool's path, for messages.
    pub(crate) pool: PathBuf,
    /// Paths that the supervisor shares with programs.
    pub(crate) paths: PoolPaths,
    /// Properties of the pool, for launchers.
    pub(crate) welcome: Welcome,
    /// Whether processes may be older than this supervisor, since their former one died.
    pub(crate) taken_over: bool,
    /// The thread that cleans the log.
    pub(crate) cleaner: Cleaner,
}

/// A pool's supervisor while it is at work.
pub(crate) struct Supervisor {
    charge: Charge,
    listener: Listener,
    tree: Tree,
    peers: HashMap<u64, Peer>,
    next_key: u64,
    ending: Ending,
    epoll: OwnedFd,
    timer: OwnedFd,
    signals: UnixStream,
    /// Keeps the kernel's event for each change of the mounts.
    _mounts: File,
    suspensions: Suspensions,
    /// Tickets of requests to suspend logging that wait for the log to be retired.
    suspending: HashSet<u64>,
    /// Tickets of suspensions that end the stories of a file system with copies.
    separating: HashSet<u64>,
    /// File systems that programs of the tree have frozen.
    frozen: u64,
    /// Plain programs, with the reasons that were reported.
    told: HashSet<(String, Cause)>,
}

/// The other end of a connection.
struct Peer {
    connection: Connection,
    process: Pid,
    role: Role,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It has sent nothing yet. If it closes like this, it has announced itself.
    Unknown,
    /// It launches a program.
    Launcher,
    /// A launcher whose program has ended, and which waits for the log to be empty.
    Leaving,
    /// It sends other requests.
    Client,
}

/// Progress of the supervisor's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    No,
    /// The cleaner retires the log, as the request with this ticket asks.
    Retiring(u64),
    /// The log was retired, or cannot be, and the reason was reported.
    Retired,
}

impl Supervisor {
    /// Makes a supervisor whose first peer is the launcher that started it.
    ///
    /// # Errors
    /// Fails if no descriptors are left, or the socket cannot be made.
    pub(crate) fn new(charge: Charge, first: Connection) -> io::Result<Self> {
        let listener = Listener::bind(&charge.paths.socket())?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let watch = |source: BorrowedFd<'_>, key| {
            epoll::add(&epoll, source, EventData::new_u64(key), EventFlags::IN)
        };
        watch(listener.as_fd(), LISTENER)?;
        watch(charge.cleaner.as_fd(), CLEANER)?;
        watch(timer.as_fd(), TIMER)?;
        let signals = catch_signals()?;
        watch(signals.as_fd(), SIGNAL)?;
        let mounts = File::open("/proc/self/mountinfo")?;
        epoll::add(&epoll, &mounts, EventData::new_u64(MOUNTS), EventFlags::PRI)?;
        charge.cleaner.mounts_changed();
        let tree = Tree::new(getrlimit(Resource::Nofile).current);
        let (peers, ending) = (HashMap::new(), Ending::No);
        let next_key = FIRST_KEY;
        let mut supervisor = Self {
            charge,
            listener,
            tree,
            peers,
            next_key,
            ending,
            epoll,
            timer,
            signals,
            _mounts: mounts,
            suspensions: Suspensions::default(),
            suspending: HashSet::new(),
            separating: HashSet::new(),
            frozen: 0,
            told: HashSet::new(),
        };
        if supervisor.charge.taken_over {
            supervisor.take_over()?;
        }
        let process = first.peer()?;
        supervisor.admit(Peer { connection: first, process, role: Role::Unknown })?;
        Ok(supervisor)
    }

    /// Finds the processes and suspensions of a dead supervisor, and reaps the processes that have
    /// ended since.
    fn take_over(&mut self) -> io::Result<()> {
        let (log, control) = (self.charge.cleaner.log(), self.charge.paths.control());
        let unwatched = self.suspensions.take_over(log, &control);
        self.announce_all()?;
        unwatched.into_iter().try_for_each(|process| self.announce(process))?;
        self.reap_unannounced()
    }

    /// Finds all processes that use the log.
    fn announce_all(&mut self) -> io::Result<()> {
        for process in processes_that_map(&self.charge.paths.control()) {
            if process != rustix::process::getpid() {
                self.announce(process)?;
            }
        }
        Ok(())
    }

    /// Returns the number of [`others`](Self::others). If it is 0, first searches for processes
    /// that could not announce themselves, because they run as another user now, say.
    fn others_found(&mut self) -> io::Result<u64> {
        if self.others() == 0 && self.charge.cleaner.log().processes().has_unannounced() {
            self.announce_all()?;
        }
        Ok(self.others())
    }

    /// Makes the cleaner repair interrupted operations of dead processes that did not announce
    /// themselves. Tries again later if this user may not know whether a process lives.
    ///
    /// # Errors
    /// Fails if the timer cannot be set.
    fn reap_unannounced(&self) -> io::Result<()> {
        let log = self.charge.cleaner.log();
        let in_the_middle = log.operations().all().map(|it| it.process);
        let owners: BTreeSet<_> = in_the_middle.chain(log.keepers().processes()).collect();
        let owners = owners.into_iter().map(u32::cast_signed);
        let mut all_told = true;
        // The tree reports the end of its own members.
        let unknown = |process: &Pid| !self.tree.contains(*process);
        for process in owners.filter_map(Pid::from_raw).filter(unknown) {
            if is_hidden(process) {
                all_told = false;
            } else if !maps(process, &self.charge.paths.control()) {
                self.charge.cleaner.process_ended(process);
            }
        }
        if all_told { Ok(()) } else { self.set_timer(HIDDEN_RETRY_NS) }
    }

    /// Sets the timer: [`TIMER`] comes after so many nanoseconds.
    fn set_timer(&self, nanoseconds: i64) -> io::Result<()> {
        let it_value = Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        let it_interval = Timespec::default();
        let once = Itimerspec { it_interval, it_value };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    /// Supervises until no process uses the pool any more.
    ///
    /// # Errors
    /// Fails if the kernel refuses a call that every supervisor needs.
    pub(crate) fn run(mut self) -> io::Result<Ended> {
        let mut events = Vec::with_capacity(EVENTS_AT_ONCE);
        loop {
            if let Some(lock) = self.end()? {
                let plain = self.plain();
                let leaving = self.peers.into_values().map(|peer| peer.connection).collect();
                return Ok(Ended { charge: self.charge, plain, leaving, lock });
            }
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Err(rustix::io::Errno::INTR) => {}
                waited => drop(waited?),
            }
            for event in events.drain(..) {
                self.handle(event.data.u64())?;
            }
        }
    }

    fn handle(&mut self, key: u64) -> io::Result<()> {
        match key {
            LISTENER => self.accept()?,
            CLEANER => self.hear_cleaner(),
            TIMER => {
                // Read, so that it is not ready any more. `end` asks for the lock after all events.
                let _ = rustix::io::read(&self.timer, &mut [0_u8; 8]);
                self.reap_unannounced()?;
                self.poll_members()?;
            }
            // The machine may be going down: destages now, and the rest when the tree has ended.
            SIGNAL => {
                let _ = rustix::io::read(&self.signals, &mut [0_u8; 64]);
                self.charge.cleaner.retire_all(SIGNAL);
            }
            MOUNTS => self.charge.cleaner.mounts_changed(),
            key if key & PROCESS != 0 => self.reap()?,
            key => self.hear(key)?,
        }
        Ok(())
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let connection = match self.listener.accept() {
                Ok(Some(connection)) => connection,
                Ok(None) => return Ok(()),
                // The peers that wait are accepted when others have closed.
                Err(error) if is_out_of_descriptors(&error) => return Ok(()),
                Err(error) => return Err(error),
            };
            // A process that is gone already has no peer to answer.
            let Ok(process) = connection.peer() else { continue };
            self.admit(Peer { connection, process, role: Role::Unknown })?;
        }
    }

    /// Adds `peer`, and answers the messages that it has already sent.
    fn admit(&mut self, peer: Peer) -> io::Result<()> {
        let key = self.new_key();
        epoll::add(&self.epoll, &peer.connection, EventData::new_u64(key), EventFlags::IN)?;
        self.peers.insert(key, peer);
        self.hear(key)
    }

    fn new_key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    /// Answers all messages of the peer; forgets it when it has closed.
    fn hear(&mut self, key: u64) -> io::Result<()> {
        while let Some(peer) = self.peers.get(&key) {
            match peer.connection.receive_now::<Request>() {
                Ok(Some(request)) => self.answer(key, request)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Ok(None) if peer.role == Role::Unknown => {
                    let process = peer.process;
                    self.peers.remove(&key);
                    self.suspensions.announced(self.charge.cleaner.log(), process);
                    self.announce(process)?;
                }
                Ok(None) | Err(_) => {
                    self.peers.remove(&key);
                }
            }
        }
        Ok(())
    }

    fn announce(&mut self, process: Pid) -> io::Result<()> {
        if self.tree.remove_if_ended(process) {
            self.ended(process)?;
        }
        match self.tree.announce(process)? {
            Announced::New => self.watch(process),
            Announced::Known => Ok(()),
            Announced::Polled => self.set_timer(POLL_NS),
            // The process had time to leave an interrupted operation.
            Announced::Gone => self.ended(process),
        }
    }

    /// Watches for the end of a member with a pidfd.
    fn watch(&self, process: Pid) -> io::Result<()> {
        if let Some(handle) = self.tree.handle(process) {
            let key = PROCESS | u64::from(process.as_raw_nonzero().get().unsigned_abs());
            epoll::add(&self.epoll, handle, EventData::new_u64(key), EventFlags::IN)?;
        }
        Ok(())
    }

    /// Forgets processes that have ended.
    fn reap(&mut self) -> io::Result<()> {
        for process in self.tree.remove_ended() {
            self.ended(process)?;
        }
        Ok(())
    }

    /// Looks for ends of the members without a pidfd, and watches those that get one now.
    fn poll_members(&mut self) -> io::Result<()> {
        if self.tree.has_polled() {
            self.reap()?;
            for process in self.tree.open_polled() {
                self.watch(process)?;
            }
            self.set_timer(POLL_NS)?;
        }
        Ok(())
    }

    /// Handles the end of a process: the cleaner repairs its interrupted operations, and its
    /// suspension of logging ends.
    fn ended(&mut self, process: Pid) -> io::Result<()> {
        self.charge.cleaner.process_ended(process);
        let (log, control) = (self.charge.cleaner.log(), self.charge.paths.control());
        let started = self.suspensions.ended(log, process, &control);
        started.into_iter().try_for_each(|process| self.announce(process))
    }

    fn answer(&mut self, key: u64, request: Request) -> io::Result<()> {
        match request {
            Request::Join { pid_namespace: theirs, .. } if is_foreign(theirs) => {
                self.set_role(key, Role::Client);
                let message = self.foreign();
                self.reply(key, &Reply::Failed { message });
            }
            Request::Join { latencies, .. } => self.join(key, latencies),
            Request::Stat => {
                self.set_role(key, Role::Client);
                let statistics = Box::new(self.statistics());
                self.reply(key, &Reply::Statistics(statistics));
            }
            Request::Flush => {
                self.set_role(key, Role::Client);
                self.charge.cleaner.retire_all(key);
            }
            Request::Suspend { process, cause, program } => {
                self.set_role(key, Role::Client);
                self.suspend(key, process, cause, program)?;
            }
            Request::Resume { process } => {
                self.set_role(key, Role::Client);
                self.resume(key, process);
            }
            Request::Plain { cause, program } => {
                self.set_role(key, Role::Client);
                if let Some(peer) = self.peers.get(&key) {
                    self.tell_plain(&program.unwrap_or_else(|| name_of(peer.process)), cause);
                }
            }
            Request::Leave => {
                self.set_role(key, Role::Leaving);
                self.release_launcher(key);
                // Processes that came and went just before count as ended.
                self.accept()?;
                self.reap()?;
                let remaining = self.others_found()?;
                if remaining > 0 {
                    let statistics = Box::new(self.statistics());
                    self.reply(key, &Reply::Farewell { remaining, statistics });
                    self.peers.remove(&key);
                }
            }
        }
        Ok(())
    }

    /// Welcomes a launcher.
    fn join(&mut self, key: u64, latencies: bool) {
        self.set_role(key, Role::Launcher);
        if latencies {
            self.charge.cleaner.log().ring().stats().want_latencies();
        }
        let welcome = self.charge.welcome.clone();
        // The next launcher finds nothing recovered.
        self.charge.welcome.recovered = None;
        self.reply(key, &Reply::Welcome(welcome));
    }

    /// Returns the answer to a launcher of another PID namespace.
    fn foreign(&self) -> String {
        format!(
            "{} is in use by a run in another PID namespace (of a container, say), whose process numbers are others: \
             start this one there, wait for the end of that run, or name another pool by --pool",
            self.charge.pool.display()
        )
    }

    /// Suspends logging while a process lives, and answers when all records are retired.
    fn suspend(
        &mut self,
        key: u64,
        process: i32,
        cause: Option<Cause>,
        program: Option<String>,
    ) -> io::Result<()> {
        let Some(peer) = self.peers.get(&key).map(|peer| peer.process) else { return Ok(()) };
        let named = named_by(peer, process);
        if process == SESSION && cause.is_none() {
            self.frozen += 1;
            self.charge.cleaner.log().processes().suspend();
        } else if process == SESSION {
            self.charge.cleaner.log().processes().suspend_for_session();
        } else if let Some(named) = named {
            self.suspend_for(named)?;
        } else {
            self.suspend_for_lost_child(peer)?;
        }
        if let Some(cause) = cause {
            let program = program.unwrap_or_else(|| name_of(named.unwrap_or(peer)));
            self.tell_plain(&program, cause);
        }
        self.suspending.insert(key);
        self.charge.cleaner.retire_all(key);
        Ok(())
    }

    /// Takes one suspension for `process` back, or that of a file system that was frozen. The thaw
    /// of a file system that no program of the tree froze changes nothing.
    fn resume(&mut self, key: u64, process: i32) {
        let peer = self.peers.get(&key).map(|peer| peer.process);
        if process == SESSION && self.frozen > 0 {
            self.frozen -= 1;
            self.charge.cleaner.log().processes().resume_logging();
        } else if let Some(process) = peer.and_then(|peer| named_by(peer, process)) {
            self.suspensions.remove(self.charge.cleaner.log(), process);
        }
        self.reply(key, &Reply::Resumed);
    }

    /// Suspends logging while `process` lives.
    fn suspend_for(&mut self, process: Pid) -> io::Result<()> {
        self.suspensions.add(self.charge.cleaner.log(), process);
        self.announce(process)
    }

    /// Suspends logging for the processes that a child of `parent` left, which has ended before its
    /// parent could name it. Also for the parent, until it takes that back: it may be a child whose
    /// number it does not know.
    fn suspend_for_lost_child(&mut self, parent: Pid) -> io::Result<()> {
        let (log, control) = (self.charge.cleaner.log(), self.charge.paths.control());
        let started = self.suspensions.add_found(log, &control);
        self.suspend_for(parent)?;
        started.into_iter().try_for_each(|process| self.announce(process))
    }

    /// Releases a launcher that leaves and was counted as a process that cannot be watched: its
    /// program has ended.
    fn release_launcher(&mut self, key: u64) {
        let Some(process) = self.peers.get(&key).map(|peer| peer.process) else { return };
        if self.suspensions.contains(process) {
            self.tree.remove(process);
            let (log, control) = (self.charge.cleaner.log(), self.charge.paths.control());
            for started in self.suspensions.ended(log, process, &control) {
                // Without a descriptor it stays unwatched, and so the suspension goes on.
                let _ = self.announce(started);
            }
        }
    }

    /// Notes why a program's syncs are real. Tells launchers once, if users may want to know.
    fn tell_plain(&mut self, program: &str, cause: Cause) {
        let program = Path::new(program).file_name().unwrap_or(program.as_ref());
        let program = program.to_string_lossy().into_owned();
        let is_new = self.told.insert((program.clone(), cause));
        if is_new && cause.is_told(&program) {
            let mount = (cause == Cause::FileSystem).then(|| self.mount_synced_by(&program));
            let mount = mount.flatten();
            let command = mount.as_ref().and_then(Mount::uuid_command);
            let command = command.map(|it| format!("`{it}`, while it is not mounted,"));
            let remedy = command.or_else(|| cause.remedy(&program).map(str::to_owned));
            let remedy = remedy.map(|it| format!("; {it} changes that")).unwrap_or_default();
            let place = mount.map(|it| format!(", but on {} ({})", it.point.display(), it.kind));
            let (reason, place) = (cause.reason(), place.unwrap_or_default());
            self.tell_launchers(&format!(
                "{program} {reason}{place}: its syncs are real ones{remedy}"
            ));
        }
    }

    /// Returns the mount of a file that `program` syncs and that cannot be covered there, if the
    /// log knows a whole path.
    fn mount_synced_by(&self, program: &str) -> Option<Mount> {
        let listed = self.charge.statistics().real_syncs_by_file;
        let is_of = |it: &&FileSyncs| it.cause == UNSUPPORTED && it.program == program;
        Mount::of(Path::new(&listed.iter().find(is_of)?.file))
    }

    fn set_role(&mut self, key: u64, role: Role) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.role = role;
        }
    }

    /// Sends `reply`; a peer that does not read is dropped.
    fn reply(&mut self, key: u64, reply: &Reply) {
        let sent = self.peers.get(&key).map(|peer| peer.connection.send(reply));
        if let Some(Err(_)) = sent {
            self.peers.remove(&key);
        }
    }

    fn hear_cleaner(&mut self) {
        for event in self.charge.cleaner.events() {
            match event {
                Event::Notice(message) => self.tell_launchers(&message),
                Event::Copied => self.separate(),
                Event::Retired { ticket, result } if self.separating.remove(&ticket) => {
                    match result {
                        Ok(_) => self.charge.cleaner.log().processes().resume_logging(),
                        // Logging stays suspended: records may be about either file system.
                        Err(message) => self.tell_launchers(&message),
                    }
                }
                Event::Retired { ticket, result } if self.ending == Ending::Retiring(ticket) => {
                    if let Err(message) = result {
                        self.tell_launchers(&message);
                    }
                    self.ending = Ending::Retired;
                }
                Event::Retired { ticket, result } => {
                    let is_suspension = self.suspending.remove(&ticket);
                    let reply = match result {
                        Ok(_) if is_suspension => Reply::Suspended,
                        Ok(retired_bytes) => Reply::Flushed { retired_bytes },
                        Err(message) => Reply::Failed { message },
                    };
                    self.reply(ticket, &reply);
                }
            }
        }
    }

    /// Ends the stories of all files. They begin again where they may.
    fn separate(&mut self) {
        let ticket = self.new_key();
        self.charge.cleaner.log().processes().suspend();
        self.separating.insert(ticket);
        self.charge.cleaner.retire_all(ticket);
    }

    fn tell_launchers(&mut self, message: &str) {
        let launchers = [Role::Launcher, Role::Leaving];
        for peer in self.peers.values().filter(|peer| launchers.contains(&peer.role)) {
            // A launcher that does not read misses the notice.
            let _ = peer.connection.send(&Reply::Notice { message: message.to_owned() });
        }
    }

    fn statistics(&self) -> Statistics {
        let processes = u64::try_from(self.tree.len()).unwrap_or(u64::MAX);
        Statistics { processes, plain: self.plain(), ..self.charge.statistics() }
    }

    /// Returns the plain programs with the reasons, by name.
    fn plain(&self) -> Vec<(String, Cause)> {
        let mut plain: Vec<_> = self.told.iter().cloned().collect();
        plain.sort_by(|one, two| (&one.0, one.1.reason()).cmp(&(&two.0, two.1.reason())));
        plain
    }

    /// Returns the number of members of the tree, without launchers that are leaving.
    fn others(&self) -> u64 {
        let peers = self.peers.values().filter(|peer| peer.role != Role::Leaving).count();
        u64::try_from(self.tree.len() + peers).unwrap_or(u64::MAX)
    }

    /// Ends the supervisor if no process uses the pool, a step at a time. When that is done,
    /// returns the lock that keeps other processes out.
    fn end(&mut self) -> io::Result<Option<Lock>> {
        if self.others_found()? > 0 {
            self.ending = Ending::No;
            return Ok(None);
        }
        match self.ending {
            Ending::No => {
                let ticket = self.new_key();
                self.ending = Ending::Retiring(ticket);
                self.reap_unannounced()?;
                self.charge.cleaner.retire_all(ticket);
                Ok(None)
            }
            Ending::Retiring(_) => Ok(None),
            Ending::Retired => self.close(),
        }
    }

    /// Closes the socket, unless a process came or is about to come.
    fn close(&mut self) -> io::Result<Option<Lock>> {
        let lock = self.charge.paths.try_lock().map_err(io::Error::other)?;
        if lock.is_none() {
            self.set_timer(LOCK_RETRY_NS)?;
            return Ok(None);
        }
        self.accept()?;
        if self.others_found()? > 0 {
            return Ok(None);
        }
        // If it cannot be removed, the next supervisor replaces it.
        let _ = std::fs::remove_file(self.charge.paths.socket());
        Ok(lock)
    }
}

impl Charge {
    fn statistics(&self) -> Statistics {
        Statistics::of(&self.pool, self.cleaner.log(), self.cleaner.counts())
    }
}

/// A supervisor that has ended, and must still release the pool.
pub(crate) struct Ended {
    charge: Charge,
    /// Plain programs, with the reasons.
    plain: Vec<(String, Cause)>,
    leaving: Vec<Connection>,
    lock: Lock,
}

impl Ended {
    /// Releases the pool, and then the launchers that wait for that.
    pub(crate) fn finish(self) {
        let statistics = Statistics { plain: self.plain, ..self.charge.statistics() };
        let control = self.charge.paths.control();
        let log = self.charge.cleaner.stop();
        let is_empty = log.ring().tail() == log.ring().head();
        let session = if is_empty { CLOSED } else { NO_BOOT };
        if log.ring().pool().set_session(session).is_ok() {
            // No process maps it any more. If it stays, it belongs to no session.
            let _ = std::fs::remove_file(control);
        }
        drop(log);
        for launcher in self.leaving {
            let statistics = Box::new(statistics.clone());
            // A launcher that does not wait misses the farewell.
            let _ = launcher.send(&Reply::Farewell { remaining: 0, statistics });
        }
        drop(self.lock);
    }
}

/// Returns whether a launcher is known to be in another PID namespace than this process. The log
/// names processes by the numbers that they have for themselves, and the socket by those that they
/// have here.
fn is_foreign(theirs: Option<u64>) -> bool {
    theirs.is_some() && pid_namespace().is_some_and(|ours| theirs != Some(ours))
}

/// Returns whether `process` lives, but this user may not read its mappings.
fn is_hidden(process: Pid) -> bool {
    match std::fs::File::open(format!("/proc/{process}/maps")) {
        Ok(_) => false,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => true,
        Err(error) if is_out_of_descriptors(&error) => true,
        Err(_) => test_kill_process(process) == Err(Errno::PERM),
    }
}

/// Catches SIGTERM and SIGINT. The stream gets a byte for each signal.
fn catch_signals() -> io::Result<UnixStream> {
    let (signals, raise) = UnixStream::pair()?;
    signals.set_nonblocking(true)?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, raise.try_clone()?)?;
    }
    Ok(signals)
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CapabilitySet, CapabilitySets};

    use super::*;

    #[test]
    fn a_process_that_this_user_may_not_look_at_is_not_taken_for_dead() {
        assert!(!is_hidden(rustix::process::getpid()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let dead = Pid::from_child(&child);
        child.wait().unwrap();
        assert!(!is_hidden(dead));
        let powerless = || {
            let none = CapabilitySet::empty();
            let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
            rustix::thread::set_capabilities(None, none).unwrap();
            is_hidden(Pid::INIT)
        };
        assert!(std::thread::spawn(powerless).join().unwrap());
    }
}
