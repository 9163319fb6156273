//! The launcher's side of a pool: it finds the supervisor that lives, or starts one.
//!
//! Invariant: at most one supervisor of a pool lives, and a launcher never joins one that is about to end. Who looks
//! for, starts or ends a supervisor holds the pool's lock ([`Meeting::lock`]) until the other end has answered.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;

use super::place::Meeting;
use super::socket::{Connection, Reply, Request, Welcome};
use super::stats::Statistics;
use crate::output::{one_line, progress};

/// A supervisor that this launcher has joined.
pub(crate) struct Session {
    connection: Connection,
    /// What the pool is.
    pub(crate) welcome: Welcome,
    /// The supervisor, where this launcher started it: to be reaped.
    supervisor: Option<Child>,
    pool: PathBuf,
}

impl Session {
    /// Joins the supervisor of `pool`, which is started if there is none; shows how far recovery is. With `latencies` they are
    /// measured from here on.
    ///
    /// # Errors
    /// The pool cannot be opened or recovered, or the supervisor not started.
    pub(crate) fn open(pool: &Path, meeting: &Meeting, latencies: bool) -> Result<Self> {
        let lock = meeting.lock()?;
        let found = reach(&meeting.socket())?;
        let found = found.map(|connection| join(connection, latencies)).transpose()?.flatten();
        // One that was found and says nothing is dying: the next one waits for the pool until it is gone.
        let (connection, welcome, supervisor) = if let Some((connection, welcome)) = found {
            (connection, welcome, None)
        } else {
            let (connection, supervisor) = start(pool)?;
            let joined = join(connection, latencies)?;
            let (connection, welcome) =
                joined.context("the supervisor of the pool ended before the pool was open")?;
            (connection, welcome, Some(supervisor))
        };
        drop(lock);
        Ok(Self { connection, welcome, supervisor, pool: pool.to_path_buf() })
    }

    /// Runs `program`, during which what the supervisor has to say is printed; hands back what it returned and what the
    /// supervisor counted, once the log is empty or the tree lives on without this launcher.
    ///
    /// # Errors
    /// As for `program`.
    pub(crate) fn during<T>(
        mut self,
        program: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Option<Statistics>)> {
        let (connection, pool) = (&self.connection, &self.pool);
        let (returned, farewell) = std::thread::scope(|scope| {
            let listener = scope.spawn(|| listen(connection, pool));
            let returned = program();
            // Where the supervisor is gone, the listener knows already.
            let _ = connection.send(&Request::Leave);
            (returned, listener.join().ok().flatten())
        });
        if let (Some((0, _)), Some(supervisor)) = (&farewell, &mut self.supervisor) {
            // It said its farewell as the last thing it did.
            let _ = supervisor.wait();
        }
        Ok((returned?, farewell.map(|(_, statistics)| statistics)))
    }
}

/// Starts the supervisor of `pool` and waits for nothing.
fn start(pool: &Path) -> Result<(Connection, Child)> {
    let (ours, theirs) = Connection::pair().context("cannot make a socket")?;
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    let mut command = Command::new(program);
    // Nothing of the caller's: neither preloaded libraries nor a directory that would stay busy.
    command.env_clear().current_dir("/");
    command.arg("supervise").arg("--").arg(pool);
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::inherit());
    let supervisor = command.spawn().context("cannot start the supervisor")?;
    Ok((ours, supervisor))
}

/// Joins the supervisor at the other end; none if it has ended without an answer.
fn join(connection: Connection, latencies: bool) -> Result<Option<(Connection, Welcome)>> {
    // Where it has ended, what it said before tells why.
    let _ = connection.send(&Request::Join { latencies });
    let welcome = await_welcome(&connection)?;
    Ok(welcome.map(|welcome| (connection, welcome)))
}

fn await_welcome(connection: &Connection) -> Result<Option<Welcome>> {
    let mut bar: Option<ProgressBar> = None;
    let welcome = loop {
        match connection.receive::<Reply>().context("the supervisor broke off")? {
            Some(Reply::Welcome(welcome)) => break Ok(Some(welcome)),
            Some(Reply::Failed { message }) => break Err(message),
            Some(Reply::Progress { done, total }) => {
                let bar = bar.get_or_insert_with(|| progress("recovering"));
                bar.set_length(total);
                bar.set_position(done);
            }
            Some(Reply::Notice { message }) => say(&message),
            Some(_) => {}
            None => break Ok(None),
        }
    };
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    welcome.map_err(|message: String| anyhow!(message))
}

/// Prints notices until the farewell; none, if the supervisor dies before.
fn listen(connection: &Connection, pool: &Path) -> Option<(u64, Statistics)> {
    loop {
        match connection.receive::<Reply>() {
            Ok(Some(Reply::Farewell { remaining, statistics })) => {
                return Some((remaining, *statistics));
            }
            Ok(Some(Reply::Notice { message })) => say(&message),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    let pool = pool.display();
    say(&format!(
        "the supervisor of {pool} died: programs go on without the log; what it still holds is written by the next \
         `tidegate run`, or by `tidegate recover {pool}`"
    ));
    None
}

/// Prints `message` as a line on standard error, which may be closed.
fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "tidegate: {}", one_line(message));
}

/// Asks the supervisor that listens at `socket` one thing; none, if there is no supervisor, or if it dies.
///
/// # Errors
/// What was asked for failed.
pub(crate) fn ask(socket: &Path, request: Request) -> Result<Option<Reply>> {
    let reached = reach(socket)?;
    Ok(reached.map(|connection| converse(&connection, request)).transpose()?.flatten())
}

/// The same of a pool whose supervisor may be about to start or to end.
///
/// # Errors
/// As for [`ask`], or the pool's lock cannot be had.
pub(crate) fn ask_at(meeting: &Meeting, request: Request) -> Result<Option<Reply>> {
    let lock = meeting.lock()?;
    let reached = reach(&meeting.socket())?;
    // A supervisor stays for whoever has reached it.
    drop(lock);
    Ok(reached.map(|connection| converse(&connection, request)).transpose()?.flatten())
}

fn reach(socket: &Path) -> Result<Option<Connection>> {
    let reached = Connection::to(socket);
    reached.with_context(|| format!("cannot reach the supervisor at {}", socket.display()))
}

fn converse(connection: &Connection, request: Request) -> Result<Option<Reply>> {
    // Where it has ended, it does not answer.
    let _ = connection.send(&request);
    loop {
        match connection.receive::<Reply>().context("the supervisor broke off")? {
            Some(Reply::Failed { message }) => bail!(message),
            Some(Reply::Notice { message }) => say(&message),
            reply => return Ok(reply),
        }
    }
}
