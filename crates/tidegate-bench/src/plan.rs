//! The plan of `bench block`: cells, each a workload that the policies run in turn.
//!
//! Two plans: every combination of the options ([`by_options`]), and the plots of the Caiti paper
//! with the cells that the targets of the DRAM tier need ([`paper`]).

use std::time::Duration;

use crate::block_args::BlockArgs;
use crate::pattern::Pattern;
use crate::policy::Policy;
use crate::workload::{Bursts, Stop, Workload};

/// One combination of parameters.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    /// The case of the cell's rows.
    pub(crate) case: String,
    pub(crate) workload: Workload,
    /// Size of the DRAM tier of the policies that have one.
    pub(crate) cache_bytes: u64,
    /// Whether the run starts with a full cache.
    pub(crate) overrun: bool,
    /// Whether the breakdown is in the tables, not only in the JSON.
    pub(crate) breakdown: bool,
    /// The policies that run the cell.
    pub(crate) wanted: Wanted,
}

/// The policies that run a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    All,
    /// Policies with a DRAM tier.
    Tiers,
    /// The two policies that have a target in every cell.
    TransitAndBtt,
}

impl Wanted {
    pub(crate) fn has(self, policy: Policy) -> bool {
        match self {
            Self::All => true,
            Self::Tiers => policy.has_tier(),
            Self::TransitAndBtt => ["transit", "btt"].contains(&policy.name()),
        }
    }
}

/// Length of the intervals of a timeline: some hundreds of writes, so that a stall stands out and a
/// plot is small.
const TICK: Duration = Duration::from_micros(500);

/// Returns the cells to measure, in order.
pub(crate) fn cells(args: &BlockArgs) -> Vec<Cell> {
    if args.is_paper() { paper(args) } else { by_options(args) }
}

/// Returns `args` with a working set of at least twice the largest cache.
pub(crate) fn with_working_set(args: &BlockArgs) -> BlockArgs {
    let mut args = args.clone();
    if args.policies.iter().any(|policy| policy.has_tier()) {
        let largest = cells(&args).iter().map(|cell| cell.cache_bytes).max().unwrap_or(0);
        args.common.size = args.common.size.max(2 * largest);
    }
    args
}

/// Returns every combination of the options; reads and writes come in the order of the options.
fn by_options(args: &BlockArgs) -> Vec<Cell> {
    let mut cells = Vec::new();
    for cache_bytes in or_default(&args.cache, &[64 << 20]) {
        for read_pct in or_default(&args.read_share, &[0, 100]) {
            for iodepth in or_default(&args.iodepth, &[1]) {
                for threads in or_default(&args.threads, &[1]) {
                    let mut cell = option_cell(args, cache_bytes);
                    cell.workload = Workload { read_pct, threads, iodepth, ..cell.workload };
                    cells.push(cell);
                }
            }
        }
    }
    cells
}

fn or_default<T: Copy>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

fn option_cell(args: &BlockArgs, cache_bytes: u64) -> Cell {
    let bursts = (args.burst > 0).then_some(Bursts { requests: args.burst, duty_pct: args.duty });
    let pattern = args.pattern.unwrap_or(Pattern::Uniform);
    let tiers = args.policies.iter().any(|policy| policy.has_tier());
    let case =
        if tiers { format!("{pattern}-{}", size_name(cache_bytes)) } else { pattern.to_string() };
    let stop = Stop::After(args.run_time());
    let writes = Workload::writes(pattern, args.block_size, args.common.size, stop);
    let workload = Workload {
        flush_every: args.fsync_every,
        think: Duration::from_micros(args.think_us),
        bursts,
        seed: args.seed,
        ..writes
    };
    let (overrun, breakdown, wanted) = (bursts.is_none(), true, Wanted::All);
    Cell { case, workload, cache_bytes, overrun, breakdown, wanted }
}

/// Cache sizes of the paper's plan, small to large; all other cells use the first of
/// [`MATRIX_CACHES`].
pub(crate) const CACHES: [u64; 5] = [16 << 20, 64 << 20, 128 << 20, 256 << 20, 512 << 20];
/// Caches, threads and depths; every combination has a target.
pub(crate) const MATRIX_CACHES: [u64; 2] = [64 << 20, 512 << 20];
pub(crate) const MATRIX_THREADS: [usize; 3] = [1, 2, 4];
pub(crate) const MATRIX_DEPTHS: [u32; 3] = [1, 32, 128];
/// Depths of the paper's figures 5a and 5d that matter for synchronous devices.
pub(crate) const DEPTHS: [u32; 4] = [1, 32, 128, 512];
/// Depth of the figures that do not vary it.
pub(crate) const DEPTH: u32 = 32;
/// Bytes between two flushes (figure 2b).
pub(crate) const FLUSH_BYTES: [u64; 5] = [512 << 10, 4 << 20, 16 << 20, 64 << 20, 128 << 20];
/// Duty cycles of the cells with a flush after 64 MiB.
pub(crate) const DUTIES: [u8; 2] = [20, 50];

/// Returns the case of sustained random writes that overrun a cache of `bytes`.
pub(crate) fn overrun_case(bytes: u64) -> String {
    format!("overrun-{}", size_name(bytes))
}

/// Returns the case of a flush after each `bytes` of writes.
pub(crate) fn flush_case(bytes: u64) -> String {
    format!("fsync-{}", size_name(bytes))
}

/// Returns the case of a flush after each 64 MiB of writes that come in small bursts.
pub(crate) fn duty_case(duty_pct: u8) -> String {
    format!("fsync-64M-duty-{duty_pct}")
}

/// Case of bursts that fit the cache.
pub(crate) const BURST_CASE: &str = "burst-16M";
/// Case of random reads of blocks that are not cached.
pub(crate) const READ_CASE: &str = "read-miss";
/// Case of the figure over time.
pub(crate) const TIMELINE_CASE: &str = "timeline-64M";

/// Returns the cells of the paper's plots and of the targets. Cells of one cache size stand
/// together: tiers stay open between them.
fn paper(args: &BlockArgs) -> Vec<Cell> {
    let mut cells = Vec::new();
    for cache_bytes in CACHES {
        cells.extend(overruns(args, cache_bytes));
        if cache_bytes == MATRIX_CACHES[0] {
            cells.extend([timeline(args), bursts(args), reads(args)]);
        }
        if cache_bytes == MATRIX_CACHES[1] {
            cells.extend(FLUSH_BYTES.map(|bytes| flushes(args, bytes)));
            cells.extend(DUTIES.map(|duty_pct| duty(args, duty_pct)));
        }
    }
    cells
}

/// Makes a cell of the paper: uniformly random writes, changed by `change`.
fn paper_cell(
    args: &BlockArgs,
    case: String,
    cache_bytes: u64,
    change: impl FnOnce(Workload) -> Workload,
) -> Cell {
    let cell = option_cell(args, 0);
    let workload = change(cell.workload);
    Cell { case, cache_bytes, workload, overrun: false, breakdown: false, ..cell }
}

fn overruns(args: &BlockArgs, cache_bytes: u64) -> Vec<Cell> {
    let mut cells = Vec::new();
    for iodepth in DEPTHS {
        for threads in MATRIX_THREADS {
            let breakdown = (cache_bytes, threads, iodepth) == (MATRIX_CACHES[0], 1, DEPTH);
            let change = |workload| Workload { threads, iodepth, ..workload };
            let cell = paper_cell(args, overrun_case(cache_bytes), cache_bytes, change);
            let wanted = wanted(cache_bytes, threads, iodepth);
            cells.extend(wanted.map(|wanted| Cell { overrun: true, breakdown, wanted, ..cell }));
        }
    }
    cells
}

/// Returns the policies that run the overrun of a cache with this number of threads and this depth.
fn wanted(cache_bytes: u64, threads: usize, iodepth: u32) -> Option<Wanted> {
    let main = cache_bytes == MATRIX_CACHES[0];
    match (threads, iodepth) {
        (1, _) | (_, DEPTH) if main => Some(Wanted::All),
        (1, DEPTH) if MATRIX_CACHES.contains(&cache_bytes) => Some(Wanted::All),
        (1, DEPTH) => Some(Wanted::Tiers),
        _ if MATRIX_CACHES.contains(&cache_bytes) && MATRIX_DEPTHS.contains(&iodepth) => {
            Some(Wanted::TransitAndBtt)
        }
        _ => None,
    }
}

fn timeline(args: &BlockArgs) -> Cell {
    let flush_every = (64 << 20) / u64::from(args.block_size);
    let change = |workload| Workload { flush_every, tick: TICK, ..workload };
    let cell = paper_cell(args, TIMELINE_CASE.to_owned(), MATRIX_CACHES[0], change);
    Cell { overrun: true, ..cell }
}

/// Makes the cell of bursts of a quarter of the cache, with rests four times as long.
fn bursts(args: &BlockArgs) -> Cell {
    let requests = (16 << 20) / u64::from(args.block_size);
    let bursts = Some(Bursts { requests, duty_pct: 20 });
    let stop = Stop::Requests(requests * 8);
    let change = |workload| Workload { stop, bursts, ..workload };
    let cell = paper_cell(args, BURST_CASE.to_owned(), MATRIX_CACHES[0], change);
    Cell { breakdown: true, ..cell }
}

fn reads(args: &BlockArgs) -> Cell {
    let change = |workload| Workload { read_pct: 100, ..workload };
    paper_cell(args, READ_CASE.to_owned(), MATRIX_CACHES[0], change)
}

fn flushes(args: &BlockArgs, bytes: u64) -> Cell {
    let flush_every = bytes / u64::from(args.block_size);
    let stop = Stop::Requests(flush_every.max(20_000).next_multiple_of(flush_every));
    let change = |workload| Workload { stop, flush_every, ..workload };
    paper_cell(args, flush_case(bytes), MATRIX_CACHES[1], change)
}

fn duty(args: &BlockArgs, duty_pct: u8) -> Cell {
    let flush_every = (64 << 20) / u64::from(args.block_size);
    let bursts = Some(Bursts { requests: 256, duty_pct });
    let stop = Stop::Requests(flush_every * 2);
    let change = |workload| Workload { stop, flush_every, bursts, ..workload };
    Cell { breakdown: true, ..paper_cell(args, duty_case(duty_pct), MATRIX_CACHES[1], change) }
}

/// Formats a size in its largest whole unit.
pub(crate) fn size_name(bytes: u64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}
