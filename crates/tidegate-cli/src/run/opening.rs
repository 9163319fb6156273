//! From a pool's file to a log in use: made where it is blank, taken over where its supervisor died, recovered where the
//! machine did, or a file system.
//!
//! Invariants:
//! 1. A log whose records may be needed is never started anew. What recovery cannot put into the files stays in the log, and
//!    the pool is not opened.
//! 2. A log is taken over without a replay only while the kernel has all that it was told: in the boot of its records, if no
//!    write-back has failed since it was opened, and no file system of its files was mounted anew.
//! 3. While processes use the log it is never replayed: they go on appending to it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::FlockOperation;
use tidegate::log::recover::{
    ApplyOptions, LocalFiles, Outcome, Progress, Recovered, plan_pool, recover_pool,
};
use tidegate::log::{
    CLOSED, CONTROL_BYTES, Log, LogError, LogOptions, LogPool, NO_BOOT, Scanner,
};
use tidegate::pmem::{PmemError, Region, RegionOptions, SharedMemory};
use tidegate::pool::{Content, PoolKind, identify};

use super::allocator::Allocator;
use super::mounts::{self, Now};
use super::place::Meeting;
use super::tree::processes_that_map;
use crate::pool::in_pool;
use tidegate::size::Size;

/// How long the kernel may take to clean up after a supervisor that was killed.
const PATIENCE_WITH_DYING: Duration = Duration::from_secs(10);
/// Threads that write files at once during recovery.
const WORKERS: usize = 4;

/// A log in use by this process.
pub(crate) struct Opened {
    /// The log.
    pub(crate) log: Log,
    /// What recovery did, if there was something to do.
    pub(crate) recovered: Option<String>,
    /// Its processes may still live: the control memory is that of a supervisor that died.
    pub(crate) taken_over: bool,
}

/// Maps the pool at `path` and locks it.
///
/// # Errors
/// It cannot be mapped, is in use, or holds no log.
fn open_pool(path: &Path, read_only: bool) -> Result<LogPool> {
    let options = RegionOptions { read_only, ..RegionOptions::default() };
    let region = Arc::new(open_region(path, &options)?);
    let pool = LogPool::open(Arc::clone(&region));
    pool.with_context(|| in_pool(&region))
}

/// Maps what is at `path` and locks it; where a supervisor has left its socket, which it does only when it is killed, once the
/// kernel has taken the pool from it.
fn open_region(path: &Path, options: &RegionOptions) -> Result<Region> {
    let was_killed = || Meeting::of_pool(path).is_ok_and(|meeting| meeting.socket().exists());
    match Region::open(path, options) {
        Err(PmemError::Busy { .. }) if was_killed() && is_let_go(path) => {
            Ok(Region::open(path, options)?)
        }
        opened => Ok(opened?),
    }
}

/// Waits until nobody has the pool at `path` locked any more: whether that was so in time.
fn is_let_go(path: &Path) -> bool {
    let (sender, receiver) = std::sync::mpsc::channel();
    let path = path.to_path_buf();
    // A thread, since this wait has no end of its own.
    std::thread::spawn(move || {
        let locked = File::open(path).and_then(|file| {
            rustix::fs::flock(&file, FlockOperation::LockShared)?;
            Ok(())
        });
        // Whoever asked may be gone.
        let _ = sender.send(locked.is_ok());
    });
    receiver.recv_timeout(PATIENCE_WITH_DYING).unwrap_or(false)
}

/// Makes a log pool of the file at `path` if it is blank.
///
/// # Errors
/// It cannot be mapped, is in use, or holds something else.
fn make_where_blank(path: &Path) -> Result<()> {
    let region = open_region(path, &RegionOptions::default())?;
    let found = match identify(&region).with_context(|| in_pool(&region))? {
        PoolKind::Tidegate(_) => return Ok(()),
        PoolKind::Unknown(Content::Zeroes) => {
            let made = tidegate::log::create(&region, &LogOptions::default());
            made.with_context(|| in_pool(&region))?;
            return Ok(());
        }
        PoolKind::Unknown(found) => found.to_string(),
        PoolKind::Btt(_) => "a btt pool".into(),
    };
    bail!("{} holds {found}, no log pool; name another path by --pool", path.display())
}

/// Opens the pool at `path` for a supervisor that meets others at `meeting`.
///
/// # Errors
/// It cannot be mapped, is in use, holds something else, or what the log has cannot be brought into the files.
pub(crate) fn open_log(
    path: &Path,
    meeting: &Meeting,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Opened> {
    make_where_blank(path)?;
    let pool = open_pool(path, false)?;
    if let Some(log) = take_over(&pool, meeting)? {
        let tail = log.tail();
        let left = log.head().saturating_sub(tail);
        let size = Size { bytes: left };
        let recovered =
            (left > 0).then(|| format!("{size} of log taken over from a supervisor that died"));
        return Ok(Opened { log, recovered, taken_over: true });
    }
    let recovered = recover(&pool, progress)?;
    let control = meeting.control();
    match std::fs::remove_file(&control) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", control.display()));
        }
        _ => {}
    }
    let memory = SharedMemory::create(&control, CONTROL_BYTES)?;
    let allocated_bytes = present_bytes(&pool, path)?;
    pool.set_session(boot_id()?)?;
    let log = Log::start(pool, memory, allocated_bytes)?;
    Ok(Opened { log, recovered, taken_over: false })
}

/// The log as a supervisor left it that died; none, where it has to be recovered from its records.
///
/// # Errors
/// It has to be recovered, but processes use it.
fn take_over(pool: &LogPool, meeting: &Meeting) -> Result<Option<Log>> {
    let control = meeting.control();
    if !control.exists() {
        return Ok(None);
    }
    let is_whole = is_of_this_boot(pool)?;
    let processes = processes_that_map(&control);
    if !is_whole && processes.is_empty() {
        return Ok(None);
    }
    // One that does not fit is no use to anybody: its pool was made anew since.
    let Ok(log) = Log::resume(open_again(pool)?, &control) else { return Ok(None) };
    let now = mounts::of_log(&log);
    let Some(process) = processes.first() else {
        return Ok((is_whole && now == Now::Same).then_some(log));
    };
    if let Now::Younger(path) = now {
        bail!(
            "{} was mounted anew since {} has records of it, and {} processes use that, {process} for one; end them first",
            path.display(),
            pool.region().name().display(),
            processes.len()
        );
    }
    if !is_whole {
        log.distrust_all_files();
    }
    Ok(Some(log))
}

fn open_again(pool: &LogPool) -> Result<LogPool, LogError> {
    LogPool::open(Arc::clone(pool.region()))
}

fn present_bytes(pool: &LogPool, path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path)?;
    let whole = metadata.blocks() * 512 >= metadata.len();
    Ok(Allocator::present_bytes(pool.region().kind(), whole, pool.ring_bytes()))
}

fn is_of_this_boot(pool: &LogPool) -> Result<bool> {
    Ok(pool.session()? == Some(boot_id()?))
}

/// What the kernel calls this boot of the machine.
fn boot_id() -> Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let text = text.context("cannot tell which boot of the machine this is")?;
    let boot: uuid::Uuid = text.trim().parse().context("the kernel's boot id makes no sense")?;
    Ok(boot.into_bytes())
}

/// When the machine was started, in nanoseconds since 1970, if that was after the log was written.
fn booted_since(pool: &LogPool) -> Result<Option<i128>> {
    match pool.session()? {
        Some(boot) if boot != NO_BOOT && boot != boot_id()? => {}
        _ => return Ok(None),
    }
    let text = std::fs::read_to_string("/proc/stat");
    let text = text.context("cannot tell when the machine was started")?;
    let seconds = text.lines().find_map(|line| line.strip_prefix("btime ")?.parse::<i128>().ok());
    let seconds = seconds.context("the kernel's time of the boot makes no sense")?;
    Ok(Some(seconds * 1_000_000_000))
}

/// Brings what the log has into the files: what was done, if there was something to do.
///
/// # Errors
/// Something cannot be brought there; the log still has it.
fn recover(pool: &LogPool, progress: &(dyn Fn(Progress) + Sync)) -> Result<Option<String>> {
    let files = LocalFiles::new().context("cannot read the list of mounts")?;
    let booted_ns = booted_since(pool)?;
    let options = ApplyOptions { workers: WORKERS, booted_ns, salvage: false };
    let Some(Recovered { outcome, unreadable_bytes }) =
        recover_pool(pool, &files, options, progress)?
    else {
        return Ok(None);
    };
    if let Some(first) = outcome.failures.first() {
        let more = match outcome.failures.len() {
            1 => String::new(),
            number => format!(" and {} more", number - 1),
        };
        let pool = pool.region().name().display();
        return Err(anyhow!(
            "recovery of {pool} is not complete: {first}{}{more}{}; mend that and try again, or give up what the log has by \
             `tidegate recover {pool} --discard`",
            cause(first),
            lost(unreadable_bytes)
        ));
    }
    Ok(Some(format!("{}{}", describe(&outcome), lost(unreadable_bytes))))
}

/// What is to be said of failed memory in a log, behind what is said of the rest.
fn lost(unreadable_bytes: u64) -> String {
    match unreadable_bytes {
        0 => String::new(),
        bytes => format!(
            "; LOST: {} of the log cannot be read, and what was written there is in no file, unless the kernel has it",
            Size { bytes }
        ),
    }
}

fn cause(error: &dyn std::error::Error) -> String {
    error.source().map(|source| format!(" ({source})")).unwrap_or_default()
}

fn describe(outcome: &Outcome) -> String {
    let written = match outcome.written_bytes {
        0 => "nothing".into(),
        bytes => Size { bytes }.to_string(),
    };
    let odd = match outcome.findings.kept().first() {
        None => String::new(),
        Some(first) => {
            format!("; {} things were odd, the first: {first}", outcome.findings.total())
        }
    };
    format!(
        "{written} written to {} files, {} more are gone{odd}",
        outcome.files_written, outcome.files_gone
    )
}

/// Throws away what the log of the pool at `path` has, after `tell` was told what that is; whether there was something.
///
/// # Errors
/// The pool cannot be used, or `tell` failed.
pub(crate) fn discard(path: &Path, tell: impl FnOnce(&str) -> Result<()>) -> Result<bool> {
    let pool = open_pool(path, false)?;
    let (plan, unreadable_bytes) = plan_pool(&pool)?;
    let has_some = !plan.is_empty() || unreadable_bytes > 0;
    if has_some {
        let records: u64 = plan.files().iter().map(|file| file.steps.len() as u64).sum();
        let (files, size) = (plan.files().len(), Size { bytes: plan.data_bytes() });
        let lost = lost(unreadable_bytes);
        tell(&format!("{records} records about {files} files, with {size} of data{lost}"))?;
    }
    pool.set_session(CLOSED)?;
    let ring_bytes = pool.ring_bytes();
    // Nobody shares this control memory: to start a log moves the tail behind all that was ever written.
    Log::start(pool, SharedMemory::anonymous(CONTROL_BYTES)?, ring_bytes)?;
    Ok(has_some)
}

/// Bytes of the log of the pool at `path`, and of the records in it, while nobody uses it.
///
/// # Errors
/// The pool cannot be used, or a part of its log not be read.
pub(crate) fn log_in_use(path: &Path) -> Result<(u64, u64)> {
    let pool = open_pool(path, true)?;
    let tail = pool.tail()?;
    let mut records = Scanner::new(&pool, tail, pool.limit()?);
    let end = records.by_ref().map(|header| header.position + header.record_bytes()).max();
    match records.unreadable_bytes() {
        0 => Ok((pool.ring_bytes(), end.map_or(0, |end| end - tail))),
        bytes => bail!("{}: {} of its log cannot be read", path.display(), Size { bytes }),
    }
}
