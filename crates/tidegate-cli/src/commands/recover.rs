//! `tidegate recover`: restores files from a log that no process uses any more, or destages a pool
//! that remembers its backing and that no server has open.

use std::path::Path;

use anyhow::{Context, Result, bail};
use tidegate_run::{
    PoolPaths, RecoverOptions, Request, Session, SessionOptions, ask, existing_log,
    processes_that_map,
};

use super::backed_pool;
use super::destage::destage;
use crate::args::RecoverArgs;
use crate::output::{Terminal, line};

/// Runs the command.
///
/// # Errors
/// The pool does not exist or is in use, or a file or backing cannot be restored.
pub(crate) fn run(args: &RecoverArgs) -> Result<()> {
    if let Some(engine) = backed_pool::engine_at(&args.pool)? {
        return backed_pool::recover(engine, args);
    }
    let pool = existing_log(&args.pool)?;
    let paths = match PoolPaths::of_pool(&pool) {
        Ok(paths) => paths,
        Err(error) if !args.discard => return without_supervisors(&pool, args.salvage, error),
        Err(error) => return Err(error),
    };
    let lock = paths.lock()?;
    // A supervisor that closes the connection has just died; opening the pool recovers its log.
    if ask(&paths.socket(), &Request::Stat, &Terminal::new(false))
        .is_ok_and(|reply| reply.is_some())
    {
        bail!(
            "{} has a supervisor that lives, and needs no recovery; `tidegate flush` writes its log to the files",
            pool.display()
        );
    }
    if args.discard {
        forget_processes(&pool, &paths)?;
        discard(&pool)?;
    } else if destage_device(&pool, args.salvage)?.is_none() {
        drop(lock);
        let options = RecoverOptions { replay: args.replay, salvage: args.salvage };
        recover(&pool, &paths, options)?;
    }
    Ok(())
}

/// Destages the log's records of a device, and prints that it has. Returns `None` if the log has no
/// such records. The caller holds the pool's lock.
///
/// # Errors
/// The log is damaged; the device cannot be opened, or fails.
pub(super) fn destage_device(pool: &Path, salvage: bool) -> Result<Option<()>> {
    let Some(backing) = backed_pool::backing_of(pool)? else { return Ok(None) };
    let found = destage(pool, &backing, salvage)?;
    let shown = pool.display();
    line(format_args!("{shown}: recovered: what the log had was written to {backing}: {found}"))?;
    Ok(Some(()))
}

/// Destages the log's records of a device where no supervisor can run: it has no place for its
/// files, as in a rescue shell without a writable `/dev/shm`, for the cause `error`.
///
/// # Errors
/// `error` if the log is for files, which only a supervisor restores; else as
/// [`destage_device`].
pub(super) fn without_supervisors(pool: &Path, salvage: bool, error: anyhow::Error) -> Result<()> {
    destage_device(pool, salvage)?.ok_or(error)
}

/// Starts a supervisor that restores the files from the log, and prints the result.
///
/// # Errors
/// The recovery fails or is not complete.
pub(crate) fn recover(pool: &Path, paths: &PoolPaths, recover: RecoverOptions) -> Result<()> {
    let terminal = Terminal::new(false);
    let options = SessionOptions { recover, ..SessionOptions::default() };
    let session = Session::open(pool, paths, options, &terminal)?;
    let recovered = session.welcome.recovered.clone();
    let statistics = session.during(|| Ok(()))?.statistics;
    let shown = pool.display();
    let left = statistics.with_context(|| format!("{shown}: the recovery was broken off"))?;
    if left.log_used_bytes > 0 {
        bail!("{shown}: not all of the log could be written to the files; it still has it");
    }
    match recovered {
        Some(what) => line(format_args!("{shown}: recovered: {what}"))?,
        None => line(format_args!("{shown}: nothing to recover"))?,
    }
    Ok(())
}

/// Removes the control memory, so that only the records count. Fails if a process uses the log.
fn forget_processes(pool: &Path, paths: &PoolPaths) -> Result<()> {
    let control = paths.control();
    let processes = processes_that_map(&control);
    if let Some(first) = processes.first() {
        let number = match processes.len() {
            1 => "1 process".into(),
            number => format!("{number} processes"),
        };
        bail!(
            "{} is in use by {} whose supervisor died, {first} for one; end them first, or let `tidegate recover` \
             without options take over",
            pool.display(),
            number
        );
    }
    match std::fs::remove_file(&control) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", control.display()))
        }
        _ => Ok(()),
    }
}

/// Discards the log, after printing the loss.
fn discard(pool: &Path) -> Result<()> {
    let shown = pool.display();
    let discarded =
        tidegate_run::discard(pool, |what| Ok(line(format_args!("{shown}: discarding {what}"))?))?;
    if !discarded {
        line(format_args!("{shown}: the log was empty"))?;
    }
    Ok(())
}
