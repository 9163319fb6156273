//! The supervisor's process, from its start by a launcher to its end.

use std::fs::File;
use std::io::{self, stdin};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, setsid};
use signal_hook::consts::SIGXFSZ;
use tidegate::log::CONTROL_BYTES;
use tidegate::log::recover::Progress;
use tidegate::size::Size;

use super::allocator::Allocator;
use super::cleaner::Cleaner;
use super::kernel::close_inherited;
use super::opening::{Opened, RecoverOptions, open_log};
use super::paths::{PoolPaths, existing_pool};
use super::report::one_line;
use super::socket::{Connection, Reply, Welcome};
use super::supervisor::{Charge, Supervisor};

/// Supervises the pool at `pool`. Standard input is the connection to the launcher, which gets the
/// errors of the start.
///
/// # Errors
/// Fails if there is no launcher.
pub fn supervise(pool: &Path, options: RecoverOptions) -> Result<()> {
    // Without the cleaner's thread programs would wait for free space forever. So a panic of any
    // thread ends the supervisor.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
    detach();
    let launcher = stdin().as_fd().try_clone_to_owned().context("there is no launcher")?;
    let told = stdin().as_fd().try_clone_to_owned().context("there is no launcher")?;
    let told = Connection::over(told);
    let started = lift_limits().and_then(|()| take_charge(pool, options, &told));
    let started = started.and_then(|charge| {
        // From here on errors go over connections to the launchers that live.
        let nowhere = File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stderr(&nowhere)?;
        rustix::stdio::dup2_stdin(&nowhere)?;
        Ok(Supervisor::new(charge, Connection::over(launcher))?)
    });
    match started {
        Ok(supervisor) => {
            // The launcher must see when the supervisor closes the other copy.
            drop(told);
            supervisor.run()?.finish();
        }
        Err(error) => {
            let message = one_line(&format!("{error:#}"));
            // Without a launcher nothing receives the message.
            let _ = told.send(&Reply::Failed { message });
        }
    }
    Ok(())
}

/// Leaves the launcher's terminal and its descriptors.
fn detach() {
    // Fails on an old kernel: descriptors inherited from the launcher's caller then stay open as
    // long as this process lives.
    let _ = close_inherited();
    // Fails only for the leader of a group, which has no terminal to lose.
    let _ = setsid();
}

/// Leaves the launcher's limits, as far as this user may.
fn lift_limits() -> Result<()> {
    raise_limit(Resource::Nofile).context("cannot raise the number of open files")?;
    // These limits are meant for the program, not for the supervisor.
    lift_limit(Resource::Cpu).context("cannot raise the time of the processor")?;
    lift_limit(Resource::Fsize).context("cannot raise the size of files")?;
    // A write beyond the limit fails instead of ending this process.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("cannot catch a signal")?;
    check_file_size(getrlimit(Resource::Fsize).current)
}

/// Raises a soft limit to the hard one.
fn raise_limit(resource: Resource) -> io::Result<()> {
    let limit = getrlimit(resource);
    Ok(setrlimit(resource, Rlimit { current: limit.maximum, ..limit })?)
}

/// Removes a limit, or raises it to the hard one if this user may not remove that.
fn lift_limit(resource: Resource) -> io::Result<()> {
    let unlimited = Rlimit { current: None, maximum: None };
    setrlimit(resource, unlimited).map_err(io::Error::from).or_else(|_| raise_limit(resource))
}

/// Fails if files of at most `limit` bytes are too small for the memory that the supervisor shares
/// with programs.
fn check_file_size(limit: Option<u64>) -> Result<()> {
    match limit {
        Some(bytes) if bytes < CONTROL_BYTES => bail!(
            "files may have {} (`ulimit -Hf`), but the pool's supervisor needs one of {} in /dev/shm: raise that limit, or \
             start the first run on the pool without it",
            Size { bytes },
            Size { bytes: CONTROL_BYTES }
        ),
        _ => Ok(()),
    }
}

/// Opens the pool and starts to clean its log.
fn take_charge(pool: &Path, options: RecoverOptions, launcher: &Connection) -> Result<Charge> {
    let pool = existing_pool(pool)?;
    let paths = PoolPaths::of_pool(&pool)?;
    let told_pct = AtomicU64::new(0);
    let tell = |progress: Progress| {
        let Progress { done_bytes: done, total_bytes: total } = progress;
        let pct = done.saturating_mul(100).checked_div(total).unwrap_or(0);
        // So rarely that an unread socket holds all these messages and the welcome.
        if told_pct.fetch_max(pct, Ordering::Relaxed) < pct {
            let _ = launcher.send(&Reply::Progress { done, total });
        }
    };
    let opened = open_log(&pool, &paths, options, &tell)?;
    let taken_over = opened.taken_over;
    let (welcome, cleaner) = start_cleaner(opened).inspect_err(|_| {
        if !taken_over {
            // No process has mapped the control memory, which would look like a dead supervisor's.
            let _ = std::fs::remove_file(paths.control());
        }
    })?;
    Ok(Charge { pool, paths, welcome, taken_over, cleaner })
}

fn start_cleaner(opened: Opened) -> Result<(Welcome, Cleaner)> {
    let log = Arc::new(opened.log);
    let allocator = Allocator::begin(&log).context("there is no space for the log")?;
    let region = log.ring().pool().region();
    let welcome = Welcome {
        pool_bytes: region.len_bytes(),
        kind: region.kind().to_string(),
        power_cut: region.power_cut().to_owned(),
        recovered: opened.recovered,
    };
    let cleaner = Cleaner::start(log, allocator).context("cannot clean the log")?;
    Ok((welcome, cleaner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_on_the_size_of_files_is_named() {
        check_file_size(None).unwrap();
        check_file_size(Some(CONTROL_BYTES)).unwrap();
        let error = check_file_size(Some(CONTROL_BYTES - 1)).unwrap_err().to_string();
        assert!(error.contains("ulimit -Hf"), "{error}");
    }
}
