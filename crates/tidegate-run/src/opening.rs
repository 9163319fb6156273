//! Turns a pool's file into a log in use. It makes a log if the file is blank, takes the log over
//! if its supervisor died, and recovers it if the machine crashed.
//!
//! Invariants:
//! 1. A log whose records may be needed is never started anew. Records that recovery cannot restore
//!    stay in the log, and the pool is not opened.
//! 2. A log is taken over without a replay only in the boot of its records, if no write-back has
//!    failed since it was opened.
//! 3. While processes use the log it is never replayed: they go on appending.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::time::{ClockId, Timespec, clock_gettime};
use tidegate::btt::Version;
use tidegate::locking::{LockMode, lock_within};
use tidegate::log::recover::{
    ApplyOptions, Failure, LocalFiles, NamesDone, Outcome, Progress, Recovered, plan_pool,
    recover_pool, remove_reserved, syncs_reach_kernel,
};
use tidegate::log::{
    CLOSED, CONTROL_BYTES, Log, LogError, LogOptions, LogPool, NO_BOOT, Ring, Scanner,
};
use tidegate::pmem::{PmemError, Region, RegionOptions, SharedMemory};
use tidegate::pool::{Content, PoolKind, identify};

use super::allocator::Allocator;
use super::paths::{PoolPaths, open_pool_file};
use super::tree::processes_that_map;
use tidegate::size::Size;

/// How long the kernel may take to clean up after a supervisor that was killed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// How far the clock of one boot may be behind that of another.
const CLOCK_ERROR_NS: i128 = 1_000_000_000;
/// The most files that could not be recovered in one message.
const FAILURES_TOLD: usize = 20;
/// Threads that write files at once during recovery.
const WORKERS: usize = 4;

/// A log in use by this process.
pub(crate) struct Opened {
    /// The log.
    pub(crate) log: Log,
    /// Describes the changes of recovery, if it made any.
    pub(crate) recovered: Option<String>,
    /// Whether a dead supervisor left the control memory, so that its processes may live.
    pub(crate) taken_over: bool,
}

/// Returns the context of an error inside the pool that `region` maps.
fn in_pool(region: &Region) -> String {
    format!("pool {}", region.name().display())
}

/// Maps the pool at `path` and locks it.
///
/// # Errors
/// Fails if the pool cannot be mapped, is in use, or holds no log.
fn open_pool(path: &Path, read_only: bool) -> Result<LogPool> {
    log_in(open_region(path, &RegionOptions { read_only, ..RegionOptions::default() })?)
}

/// Opens the log that `region` maps.
fn log_in(region: Region) -> Result<LogPool> {
    let region = Arc::new(region);
    LogPool::open(Arc::clone(&region)).with_context(|| in_pool(&region))
}

/// Maps the pool at `path` and locks it. A supervisor leaves its socket only if it is killed. If
/// there is one, waits until the kernel has released that supervisor's lock.
fn open_region(path: &Path, options: &RegionOptions) -> Result<Region> {
    let was_killed = || PoolPaths::of_pool(path).is_ok_and(|paths| paths.socket().exists());
    match Region::open(path, options) {
        Err(PmemError::Busy { .. }) if was_killed() && is_released(path) => {
            Ok(Region::open(path, options)?)
        }
        opened => Ok(opened?),
    }
}

/// Waits until no process has the pool at `path` locked. Returns `false` after a timeout.
fn is_released(path: &Path) -> bool {
    let locked = open_pool_file(path)
        .and_then(|file| Ok(lock_within(&file, LockMode::Shared, RELEASE_TIMEOUT)?));
    locked.is_ok()
}

/// Maps the pool at `path` and locks it. Makes a log pool if it is blank.
///
/// # Errors
/// Fails if the pool cannot be mapped, is in use, or holds something else.
fn open_or_make(path: &Path) -> Result<LogPool> {
    let region = open_region(path, &RegionOptions::default())?;
    let other = match identify(&region).with_context(|| in_pool(&region))? {
        PoolKind::Tidegate(_) => return log_in(region),
        PoolKind::Unknown(Content::Zeroes) => {
            let made = tidegate::log::create(&region, &LogOptions::default());
            made.with_context(|| in_pool(&region))?;
            return log_in(region);
        }
        PoolKind::Unknown(found) => found.to_string(),
        PoolKind::Btt(Version::Libpmemblk) => "a libpmemblk pool".into(),
        PoolKind::Btt(_) => "a btt pool".into(),
    };
    bail!("{} holds {other}, no log pool; name another path by --pool", path.display())
}

/// Options for opening a log that a crashed machine or a dead supervisor left behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecoverOptions {
    /// Replays every record, even those that the kernel has.
    pub replay: bool,
    /// Skips data that is damaged, or was changed since the boot.
    pub salvage: bool,
}

/// Opens the pool at `path`, whose supervisor shares `paths` with programs.
///
/// # Errors
/// Fails if the pool cannot be mapped, is in use, holds something else, or its log cannot be
/// restored; or if the syncs of this process do not reach the kernel.
pub(crate) fn open_log(
    path: &Path,
    paths: &PoolPaths,
    options: RecoverOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Opened> {
    syncs_reach_kernel().with_context(|| format!("{}: not opened", path.display()))?;
    let pool = open_or_make(path)?;
    let control = paths.control();
    if let Some(log) = take_over(&pool, &control, options)? {
        let left = log.ring().head().saturating_sub(log.ring().tail());
        let size = Size { bytes: left };
        let recovered =
            (left > 0).then(|| format!("{size} of log taken over from a supervisor that died"));
        return Ok(Opened { log, recovered, taken_over: true });
    }
    let recovered = recover(&pool, control.exists(), options, progress)?;
    match std::fs::remove_file(&control) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", control.display()));
        }
        _ => {}
    }
    let memory = SharedMemory::create(&control, CONTROL_BYTES)?;
    let allocated_bytes = present_bytes(&pool, path)?;
    pool.set_session(boot_id()?)?;
    let log = Ring::start(pool, memory, allocated_bytes).map(Log::over)?;
    Ok(Opened { log, recovered, taken_over: false })
}

/// Resumes the log of a dead supervisor; `None` if it must be recovered from its records.
///
/// # Errors
/// Fails if the options demand a replay, but processes use the log.
fn take_over(pool: &LogPool, control: &Path, options: RecoverOptions) -> Result<Option<Log>> {
    if !control.exists() {
        return Ok(None);
    }
    let is_whole = is_of_this_boot(pool)?;
    let processes = processes_that_map(control);
    if options.replay
        && let Some(first) = processes.first()
    {
        bail!(
            "{} is in use by {} whose supervisor died, {first} for one; end them first, or let `tidegate recover` without \
             options take over",
            pool.region().name().display(),
            match processes.len() {
                1 => "1 process".into(),
                number => format!("{number} processes"),
            }
        );
    }
    if options.replay || !is_whole && processes.is_empty() {
        return Ok(None);
    }
    // Control memory that does not fit is of no use: the pool was made anew since.
    let Ok(log) = Ring::resume(open_again(pool)?, control).map(Log::over) else { return Ok(None) };
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

/// Returns the kernel's id of this boot.
fn boot_id() -> Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let text = text.context("cannot tell which boot of the machine this is")?;
    let boot: uuid::Uuid = text.trim().parse().context("the kernel's boot id makes no sense")?;
    Ok(boot.into_bytes())
}

/// Returns the latest possible start of the machine, in nanoseconds since 1970.
///
/// A kernel sets its clock from one that counts whole seconds. So a machine that starts again at
/// once may find times from before the crash that are up to a second later than its own start.
fn booted_ns() -> i128 {
    let nanoseconds =
        |time: Timespec| i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
    let up_ns = nanoseconds(clock_gettime(ClockId::Boottime));
    nanoseconds(clock_gettime(ClockId::Realtime)) - up_ns + CLOCK_ERROR_NS
}

/// Restores the log's records in the files. Returns a description, or `None` if there was nothing
/// to do. With `is_same_boot` the records are of this boot, and programs have changed the files
/// since the machine was started.
///
/// # Errors
/// Fails if something cannot be restored. The log still has its records.
fn recover(
    pool: &LogPool,
    is_same_boot: bool,
    options: RecoverOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Option<String>> {
    // An interrupted recovery has changed files since the boot by itself, and has left no boot id.
    let is_older = matches!(pool.session()?, Some(boot) if boot != NO_BOOT && boot != boot_id()?);
    let is_older = is_older && !is_same_boot && !options.replay;
    let booted_ns = is_older.then(booted_ns);
    let options = ApplyOptions { workers: WORKERS, booted_ns, salvage: options.salvage };
    let files = LocalFiles::new().context("cannot read the list of mounts")?;
    let Some(Recovered { outcome, unreadable_bytes }) =
        recover_pool(pool, &files, options, progress)?
    else {
        return Ok(None);
    };
    if !outcome.is_complete() {
        let pool = pool.region().name().display().to_string();
        return Err(incomplete(&pool, &outcome, unreadable_bytes));
    }
    Ok(Some(format!("{}{}", describe(&outcome), lost(unreadable_bytes))))
}

/// Describes failed memory in a log, as the end of a message.
fn lost(unreadable_bytes: u64) -> String {
    match unreadable_bytes {
        0 => String::new(),
        bytes => format!(
            "; LOST: {} of the log cannot be read, and what was written there is in no file, unless the kernel has it",
            Size { bytes }
        ),
    }
}

/// Describes the failures of a recovery of `pool`, and the user's choices.
fn incomplete(pool: &str, outcome: &Outcome, unreadable_bytes: u64) -> anyhow::Error {
    let failures = &outcome.failures;
    let told: Vec<_> = failures.iter().take(FAILURES_TOLD).map(ToString::to_string).collect();
    let told = told.join("; ");
    let more = match failures.len().saturating_sub(FAILURES_TOLD) {
        0 => String::new(),
        number => format!("; and {number} more"),
    };
    if failures.iter().all(Failure::leaves_one_file) {
        let number = failures.len();
        return anyhow!(
            "recovery of {pool} is not complete: {}; it keeps what it has of {number} that could not be recovered: \
             {told}{more}; or give that up by `tidegate recover {pool} --discard`",
            describe(outcome),
        );
    }
    anyhow!(
        "recovery of {pool} is not complete: {told}{more}{}; try again, pass over what is damaged or was changed by \
         `tidegate recover {pool} --salvage`, or give up what the log has by `tidegate recover {pool} --discard`",
        lost(unreadable_bytes)
    )
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
    let gone = match outcome.files_gone {
        0 => String::new(),
        number => format!(", {number} were removed before"),
    };
    let names = describe_names(&outcome.names);
    format!("{written} written to {} files{gone}{names}{odd}", outcome.files_written)
}

/// Describes the names that recovery changed; empty if there are none.
fn describe_names(names: &NamesDone) -> String {
    let counts = [
        (names.made, "files made again"),
        (names.set, "names set"),
        (names.removed, "names removed"),
    ];
    let counts = counts.into_iter().filter(|(number, _)| *number > 0);
    let counts = counts.map(|(number, what)| format!(", {number} {what}"));
    let taken = names.taken.first().map(|first| {
        let number = names.taken.len();
        format!("; {number} names were taken by other files since, {first} for one")
    });
    counts.chain(taken).collect::<Vec<_>>().concat()
}

/// Discards the records in the log of the pool at `path`, after `tell` got their description.
/// Returns whether there were any.
///
/// # Errors
/// Fails if the pool cannot be used, or `tell` failed.
pub fn discard(path: &Path, tell: impl FnOnce(&str) -> Result<()>) -> Result<bool> {
    let pool = open_pool(path, false)?;
    let (plan, unreadable_bytes) = plan_pool(&pool)?;
    let has_some = !plan.is_empty() || unreadable_bytes > 0;
    if has_some {
        let (files, size) = (plan.files().len(), Size { bytes: plan.data_bytes() });
        let lost = lost(unreadable_bytes);
        tell(&format!("{size} of data of {files} files{lost}"))?;
    }
    if let Ok(files) = LocalFiles::new() {
        remove_reserved(&pool, &plan, &files);
    }
    pool.set_session(CLOSED)?;
    let ring_bytes = pool.ring_bytes();
    // No process shares this control memory: a start moves the tail behind all records ever
    // written.
    Ring::start(pool, SharedMemory::anonymous(CONTROL_BYTES)?, ring_bytes).map(Log::over)?;
    Ok(has_some)
}

/// Returns the bytes of the log of an unused pool at `path`, and of the records there.
///
/// # Errors
/// Fails if the pool cannot be used, or a part of its log cannot be read.
pub fn log_in_use(path: &Path) -> Result<(u64, u64)> {
    let pool = open_pool(path, true)?;
    let tail = pool.tail()?;
    let mut records = Scanner::new(&pool, tail, pool.limit()?);
    let end = records.by_ref().map(|header| header.position + header.record_bytes()).max();
    match records.unreadable_bytes() {
        0 => Ok((pool.ring_bytes(), end.map_or(0, |end| end - tail))),
        bytes => bail!("{}: {} of its log cannot be read", path.display(), Size { bytes }),
    }
}
