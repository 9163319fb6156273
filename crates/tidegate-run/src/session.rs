//! The launcher's side of a pool: it finds the live supervisor, or starts one.
//!
//! Invariants:
//! 1. At most one supervisor of a pool lives, and a launcher never joins one that is about to end.
//!    A launcher or supervisor that looks for, starts or ends one holds the pool's lock
//!    ([`PoolPaths::lock`]) until the other end has answered.
//! 2. As long as a launcher lives, its pool has a supervisor: one that dies is replaced at once.
//! 3. Once the program has ended, a signal ends the launcher. The supervisor goes on.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use tidegate::size::Size;

use super::launcher::caught_of;
use super::opening::RecoverOptions;
use super::paths::{Lock, PoolPaths};
use super::report::{Reporter, one_line};
use super::socket::{Connection, Reply, Request, Welcome};
use super::stats::Statistics;
use super::tree::pid_namespace;
use anyhow::{Context, Result, anyhow, bail};

/// A supervisor that dies so soon after it was joined may die again of the same cause. The launcher
/// gives up after so many deaths in a row.
const SHORT_LIFE: Duration = Duration::from_secs(1);
const DEATHS_MAX: u32 = 10;
/// Signals that end the wait for the log to be empty.
const INTERRUPTS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
/// How long a launcher that was interrupted waits for the size of the log.
const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(1);

/// How a launcher uses a pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct SessionOptions {
    /// Whether to measure latencies of writes.
    pub latencies: bool,
    /// How a new supervisor opens the log.
    pub recover: RecoverOptions,
}

/// A pool that this launcher uses, with a supervisor as long as one can be started.
pub struct Session<'a> {
    /// Properties of the pool.
    pub welcome: Welcome,
    pool: PathBuf,
    paths: PoolPaths,
    options: SessionOptions,
    reporter: &'a dyn Reporter,
    joined: Mutex<Joined>,
}

/// The supervisor that this launcher has joined.
struct Joined {
    connection: Arc<Connection>,
    /// The supervisor's process, if this launcher started it and must reap it.
    supervisor: Option<Child>,
    /// Whether the program has ended.
    leaves: bool,
    /// The signal that ended the wait for the supervisor.
    interrupted_by: Option<i32>,
}

/// A program that has ended, and the log behind it.
#[derive(Debug)]
pub struct Finished<T> {
    /// The program's result.
    pub returned: T,
    /// The supervisor's statistics, unless it died or the wait for it was interrupted.
    pub statistics: Option<Statistics>,
    /// The signal that ended the wait for the log to be empty.
    pub interrupted_by: Option<i32>,
}

impl<'a> Session<'a> {
    /// Joins the supervisor of `pool`, and starts one if needed. Reports the progress of recovery.
    ///
    /// # Errors
    /// Fails if the pool cannot be opened or recovered, or the supervisor cannot be started.
    pub fn open(
        pool: &Path,
        paths: &PoolPaths,
        options: SessionOptions,
        reporter: &'a dyn Reporter,
    ) -> Result<Self> {
        let (joined, welcome) = find_or_start(pool, paths, options, reporter)?;
        let (pool, paths) = (pool.to_path_buf(), paths.clone());
        let options = SessionOptions { recover: RecoverOptions::default(), ..options };
        Ok(Self { welcome, pool, paths, options, reporter, joined: Mutex::new(joined) })
    }

    /// Runs `program`. Meanwhile prints the supervisor's notices, and replaces a supervisor that
    /// dies. Returns once the log is empty, or the tree lives on without this launcher, or a signal
    /// has ended the wait for that.
    ///
    /// # Errors
    /// As for `program`.
    pub fn during<T>(self, program: impl FnOnce() -> Result<T>) -> Result<Finished<T>> {
        let (returned, farewell) = std::thread::scope(|scope| {
            let listener = scope.spawn(|| self.listen());
            let returned = program();
            let interrupts = self.leave();
            let handle = interrupts.as_ref().ok().map(Signals::handle);
            scope.spawn(|| self.await_interrupt(interrupts));
            let farewell = listener.join().ok().flatten();
            handle.inspect(Handle::close);
            (returned, farewell)
        });
        let mut joined = self.joined();
        if let (Some((0, _)), Some(supervisor)) = (&farewell, &mut joined.supervisor) {
            // The farewell was the supervisor's last step.
            let _ = supervisor.wait();
        }
        let statistics = farewell.map(|(_, statistics)| statistics);
        Ok(Finished { returned: returned?, statistics, interrupted_by: joined.interrupted_by })
    }

    /// Tells the supervisor that the program has ended. Returns the signals that end the wait for
    /// its farewell; those before the end were the program's.
    fn leave(&self) -> io::Result<Signals> {
        let interrupts = Signals::new(caught_of(&INTERRUPTS));
        let mut joined = self.joined();
        joined.leaves = true;
        // If the supervisor is gone, the listener knows it, and tells the next one.
        let _ = joined.connection.send(&Request::Leave);
        interrupts
    }

    /// Ends the wait for the supervisor at the first signal. Returns at the latest when the signals
    /// are closed. Without signals, the wait cannot be interrupted.
    fn await_interrupt(&self, interrupts: io::Result<Signals>) {
        let Some(signal) = interrupts.ok().and_then(|mut signals| signals.forever().next()) else {
            return;
        };
        let mut joined = self.joined();
        joined.interrupted_by = Some(signal);
        self.say(&self.interrupted());
        joined.connection.shut_down();
    }

    /// Returns the message of an interrupted wait.
    fn interrupted(&self) -> String {
        let (pool, left) = (self.pool.display(), self.used_bytes());
        let left = left.map_or_else(String::new, |bytes| format!(", {} of it,", Size { bytes }));
        format!(
            "interrupted: the log in {pool}{left} is not on the disks yet; its supervisor goes on \
             with that, and after a crash `tidegate recover {pool}` does it"
        )
    }

    /// Returns how much of the log is in use, if the supervisor answers in time.
    fn used_bytes(&self) -> Option<u64> {
        let connection = reach(&self.paths.socket()).ok()??;
        connection.send(&Request::Stat).ok()?;
        match connection.receive_within::<Reply>(INTERRUPT_TIMEOUT).ok()?? {
            Reply::Statistics(statistics) => Some(statistics.log_used_bytes),
            _ => None,
        }
    }

    fn joined(&self) -> MutexGuard<'_, Joined> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints notices until the farewell; `None` if the supervisor dies, and no other can start.
    fn listen(&self) -> Option<(u64, Statistics)> {
        let mut deaths = 0;
        loop {
            let since = Instant::now();
            let connection = Arc::clone(&self.joined().connection);
            if let Some(farewell) = await_farewell(&connection, self.reporter) {
                return Some(farewell);
            }
            if self.joined().interrupted_by.is_some() {
                return None;
            }
            deaths = if since.elapsed() < SHORT_LIFE { deaths + 1 } else { 1 };
            let rejoined = if deaths > DEATHS_MAX {
                Err(anyhow!("{deaths} of them died one after the other"))
            } else {
                self.rejoin()
            };
            if let Err(error) = rejoined {
                let pool = self.pool.display();
                self.say(&format!(
                    "the supervisor of {pool} died, and there is no other ({error:#}): programs go on without the log; what \
                     it still holds is written by the next `tidegate run`, or by `tidegate recover {pool}`"
                ));
                return None;
            }
        }
    }

    fn say(&self, message: &str) {
        self.reporter.notice(&one_line(message));
    }

    /// Joins the supervisor that took over from a dead one, or starts it.
    fn rejoin(&self) -> Result<()> {
        let (next, _) = find_or_start(&self.pool, &self.paths, self.options, self.reporter)?;
        let mut joined = self.joined();
        if next.supervisor.is_some() {
            let pool = self.pool.display();
            self.say(&format!("the supervisor of {pool} died; another one took over"));
            if let Some(mut dead) = joined.supervisor.take() {
                let _ = dead.wait();
            }
            joined.supervisor = next.supervisor;
        }
        joined.connection = next.connection;
        if joined.leaves {
            // If this one dies too, the listener notices.
            let _ = joined.connection.send(&Request::Leave);
        }
        Ok(())
    }
}

/// Joins the supervisor of `pool`, and starts one if there is none.
fn find_or_start(
    pool: &Path,
    paths: &PoolPaths,
    options: SessionOptions,
    reporter: &dyn Reporter,
) -> Result<(Joined, Welcome)> {
    let latencies = options.latencies;
    let _lock = paths.lock()?;
    let found = reach(&paths.socket())?;
    let found =
        found.map(|connection| join(connection, latencies, reporter)).transpose()?.flatten();
    // A supervisor without an answer is dying. The next one waits until the pool is released.
    let (connection, welcome, supervisor) = if let Some((connection, welcome)) = found {
        (connection, welcome, None)
    } else {
        let (connection, supervisor) = start(pool, options.recover)?;
        let joined = join(connection, latencies, reporter)?;
        let (connection, welcome) =
            joined.context("the supervisor of the pool ended before the pool was open")?;
        (connection, welcome, Some(supervisor))
    };
    let connection = Arc::new(connection);
    Ok((Joined { connection, supervisor, leaves: false, interrupted_by: None }, welcome))
}

/// Starts the supervisor of `pool`, without waiting for an answer.
fn start(pool: &Path, options: RecoverOptions) -> Result<(Connection, Child)> {
    let (ours, theirs) = Connection::pair().context("cannot make a socket")?;
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    // If another version was installed meanwhile, the supervisor runs this version.
    let program = if program.exists() { &program } else { Path::new("/proc/self/exe") };
    let mut command = Command::new(program);
    // The supervisor inherits neither preloaded libraries nor a directory that would stay busy.
    command.env_clear().current_dir("/");
    command.arg("supervise");
    command.args(options.replay.then_some("--replay"));
    command.args(options.salvage.then_some("--salvage"));
    command.arg("--").arg(pool);
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::inherit());
    let supervisor = command.spawn().context("cannot start the supervisor")?;
    Ok((ours, supervisor))
}

/// Joins the supervisor at the other end. Returns `None` if it has ended without an answer.
fn join(
    connection: Connection,
    latencies: bool,
    reporter: &dyn Reporter,
) -> Result<Option<(Connection, Welcome)>> {
    // If the supervisor has ended, its earlier messages tell why.
    let _ = connection.send(&Request::Join { latencies, pid_namespace: pid_namespace() });
    let welcome = await_welcome(&connection, reporter)?;
    Ok(welcome.map(|welcome| (connection, welcome)))
}

fn await_welcome(connection: &Connection, reporter: &dyn Reporter) -> Result<Option<Welcome>> {
    let welcome = loop {
        match connection.receive::<Reply>().context("the supervisor broke off")? {
            Some(Reply::Welcome(welcome)) => break Ok(Some(welcome)),
            Some(Reply::Failed { message }) => break Err(message),
            Some(Reply::Progress { done, total }) => reporter.progress(done, total),
            Some(Reply::Notice { message }) => reporter.notice(&one_line(&message)),
            Some(_) => {}
            None => break Ok(None),
        }
    };
    reporter.progress_ended();
    welcome.map_err(|message: String| anyhow!(message))
}

/// Prints notices until the farewell. Returns `None` if the supervisor dies before.
fn await_farewell(connection: &Connection, reporter: &dyn Reporter) -> Option<(u64, Statistics)> {
    loop {
        match connection.receive::<Reply>() {
            Ok(Some(Reply::Farewell { remaining, statistics })) => {
                return Some((remaining, *statistics));
            }
            Ok(Some(Reply::Notice { message })) => reporter.notice(&one_line(&message)),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Sends one request to the supervisor that listens at `socket`. Returns `None` if there is no
/// supervisor, or if it dies.
///
/// # Errors
/// Fails if the request failed.
pub fn ask(socket: &Path, request: &Request, reporter: &dyn Reporter) -> Result<Option<Reply>> {
    let reached = reach(socket)?;
    Ok(reached.map(|connection| converse(&connection, request, reporter)).transpose()?.flatten())
}

/// Outcome of a request to a pool's supervisor.
pub enum Asked {
    /// The supervisor's answer.
    Reply(Reply),
    /// The pool has no supervisor, and none is started before this is dropped.
    Unsupervised(Lock),
}

/// Sends one request to a pool's supervisor. Waits for one that starts, ends or is replaced.
///
/// # Errors
/// As for [`ask`], or if the pool's lock cannot be taken.
pub fn ask_at(paths: &PoolPaths, request: &Request, reporter: &dyn Reporter) -> Result<Asked> {
    loop {
        let lock = paths.lock()?;
        let Some(connection) = reach(&paths.socket())? else {
            return Ok(Asked::Unsupervised(lock));
        };
        // A supervisor stays as long as a connection is open.
        drop(lock);
        if let Some(reply) = converse(&connection, request, reporter)? {
            return Ok(Asked::Reply(reply));
        }
    }
}

/// Sends a request without an answer to the supervisor of a pool, if there is one.
///
/// # Errors
/// Fails if the socket cannot be used.
pub fn tell(paths: &PoolPaths, request: &Request) -> Result<()> {
    if let Some(connection) = reach(&paths.socket())? {
        // A supervisor that has ended does not need the message.
        let _ = connection.send(request);
    }
    Ok(())
}

fn reach(socket: &Path) -> Result<Option<Connection>> {
    let reached = Connection::to(socket);
    reached.with_context(|| format!("cannot reach the supervisor at {}", socket.display()))
}

fn converse(
    connection: &Connection,
    request: &Request,
    reporter: &dyn Reporter,
) -> Result<Option<Reply>> {
    // A supervisor that has ended does not answer.
    let _ = connection.send(request);
    loop {
        match connection.receive::<Reply>().context("the supervisor broke off")? {
            Some(Reply::Failed { message }) => bail!(message),
            Some(Reply::Notice { message }) => reporter.notice(&one_line(&message)),
            reply => return Ok(reply),
        }
    }
}
