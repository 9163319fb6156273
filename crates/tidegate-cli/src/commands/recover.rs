//! `tidegate recover`: restores files from a log that no process uses any more, and the backing of
//! a pool that remembers it and that no server has open.

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
/// There is no such pool, it is in use, or something cannot be restored.
pub(crate) fn run(args: &RecoverArgs) -> Result<()> {
    if let Some(engine) = backed_pool::engine_at(&args.pool)? {
        return backed_pool::recover(engine, args);
    }
    let pool = existing_log(&args.pool)?;
    let paths = PoolPaths::of_pool(&pool)?;
    let lock = paths.lock()?;
    // One that breaks off has just died: what it left is found when the pool is opened.
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

/// Writes the log's records of a device to that, and says so. None: it has no such records. The
/// caller has the pool's lock.
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

/// Has a supervisor restore in the files what the log has, and says what it did.
///
/// # Errors
/// It could not.
pub(crate) fn recover(pool: &Path, paths: &PoolPaths, recover: RecoverOptions) -> Result<()> {
    let terminal = Terminal::new(false);
    let options = SessionOptions { recover, ..SessionOptions::default() };
    let session = Session::open(pool, paths, options, &terminal)?;
    let recovered = session.welcome.recovered.clone();
    let ((), statistics) = session.during(|| Ok(()))?;
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

/// Makes the log one that only its records tell of: no process uses it, and nothing is known of
/// this boot.
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

/// Throws the log away, after it was said what is lost.
fn discard(pool: &Path) -> Result<()> {
    let shown = pool.display();
    let discarded =
        tidegate_run::discard(pool, |what| Ok(line(format_args!("{shown}: discarding {what}"))?))?;
    if !discarded {
        line(format_args!("{shown}: the log was empty"))?;
    }
    Ok(())
}
