//! The matrix of Lin et al., "When Caching Systems Meet Emerging Storage Devices: A Case Study"
//! (`HotStorage` 2023): a file of a size below or above that of the cache is written twice, in
//! order, by writes of one size.
//!
//! The study's cache has 4 GiB, and its cleaner was off. Ours cleans as in production. Both are
//! measured with lines of 4, 16 and 64 KiB; ours of 4 KiB also with the setting `cost=auto`.
//!
//! The study's requests come one at a time. Some cells are also measured with 32 at a time.

use std::sync::Arc;

use tidegate::device::BlockDevice;

use super::bed::{DISK, Pool, Subject, Variant, alone, btt, copy, slow, writes};
use super::behind::Batches;
use super::{BACKING, Bench, CACHE, Part};
use crate::error::Result;
use crate::figures::{Column, Figure, Style};
use crate::measure::{Key, Op, Series, Traffic, throughput};
use crate::pattern::Pattern;
use crate::plan::size_name;
use crate::table::{Table, number_cell};
use crate::workload::{Stop, Workload};

/// Prefix of the cases' names.
pub(super) const PREFIX: &str = "study-";

/// Sizes of a write.
pub(super) const WRITES_BYTES: [u32; 5] = [4 << 10, 16 << 10, 64 << 10, 512 << 10, 1 << 20];
/// Sizes of the file, as shares of the cache.
pub(super) const FILES_PCT: [u64; 4] = [50, 75, 125, 150];
/// Requests at a time of the deep cells, with the sizes of their writes and files.
pub(super) const DEPTH: u32 = 32;
pub(super) const DEEP_WRITES_BYTES: [u32; 3] = [4 << 10, 128 << 10, 1 << 20];
pub(super) const DEEP_FILES_PCT: [u64; 2] = [50, 125];
/// Writes of this size and above are also measured back to back on the backing.
const ALONE_FROM_BYTES: u32 = 128 << 10;
/// The backing alone, which gets all requests of a batch at once.
pub(super) const BACKING_AT_ONCE: &str = "backing-32";
/// Divisor of `--size` for the cache of the study.
const SHARE: u64 = 4;

/// Returns whether `key` belongs to a cell of the matrix.
pub(crate) fn is_study(key: &Key) -> bool {
    key.case.starts_with(PREFIX)
}

/// The first or the second pass over the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    First,
    Second,
}

impl Access {
    pub(super) const ALL: [Self; 2] = [Self::First, Self::Second];

    fn name(self) -> &'static str {
        match self {
            Self::First => "1st",
            Self::Second => "2nd",
        }
    }
}

/// Returns the case of an access to a file of `file_pct` percent of the cache.
pub(super) fn case(file_pct: u64, access: Access) -> String {
    format!("{PREFIX}{file_pct}pct-{}", access.name())
}

/// Measures the matrix.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let size = bench.args.size / SHARE;
    let pool = Pool::new(bench.args, size)?;
    let largest = size * 2;
    let backing = slow(largest, DISK)?;
    let peers =
        [copy(bench.args, largest)?, btt(bench.args, largest)?, alone(Arc::clone(&backing))];
    for block_bytes in WRITES_BYTES {
        for file_pct in FILES_PCT {
            let file = File::new(bench, file_pct, block_bytes);
            for repetition in 1..=bench.args.repetitions {
                for peer in &peers {
                    file.twice(bench, peer, repetition)?;
                }
                for variant in Variant::ALL {
                    let cache = pool.variant(&variant, Arc::clone(&backing))?;
                    file.twice(bench, &cache, repetition)?;
                }
            }
        }
    }
    let [_, btt, alone] = peers;
    deep(bench, &pool, &backing, &[btt, alone])
}

/// Measures some cells of the matrix with many requests at a time.
fn deep(
    bench: &mut Bench<'_>,
    pool: &Pool,
    backing: &Arc<dyn BlockDevice>,
    peers: &[Subject],
) -> Result<()> {
    let batches = Subject::plain(BACKING_AT_ONCE, Arc::new(Batches::before(Arc::clone(backing))));
    for block_bytes in DEEP_WRITES_BYTES {
        for file_pct in DEEP_FILES_PCT {
            let File { workload, .. } = File::new(bench, file_pct, block_bytes);
            let workload = Workload { iodepth: DEPTH, ..workload };
            let at_once = Workload { flush_every: DEPTH.into(), ..workload.clone() };
            let [file, at_once] = [workload, at_once].map(|workload| File { file_pct, workload });
            // Smaller writes take the backing as long back to back as one at a time.
            let peers = if block_bytes < ALONE_FROM_BYTES { &peers[..1] } else { peers };
            for repetition in 1..=bench.args.repetitions {
                for peer in peers {
                    file.twice(bench, peer, repetition)?;
                }
                at_once.twice(bench, &batches, repetition)?;
                let cache = pool.subject(CACHE, Arc::clone(backing))?;
                file.twice(bench, &cache, repetition)?;
            }
        }
    }
    Ok(())
}

/// One file, written by writes of one size.
struct File {
    file_pct: u64,
    workload: Workload,
}

impl File {
    fn new(bench: &Bench<'_>, file_pct: u64, block_bytes: u32) -> Self {
        let file_bytes = bench.args.size / SHARE * file_pct / 100;
        let requests = Stop::Requests(file_bytes / u64::from(block_bytes));
        let workload = writes(Pattern::Sequential, file_bytes, requests);
        Self { file_pct, workload: Workload { block_bytes, ..workload } }
    }

    fn twice(&self, bench: &mut Bench<'_>, subject: &Subject, repetition: u32) -> Result<()> {
        let deep = DEEP_WRITES_BYTES.len() * DEEP_FILES_PCT.len() * 4;
        let steps = WRITES_BYTES.len() * FILES_PCT.len() * (3 + Variant::ALL.len()) + deep;
        let size = size_name(u64::from(self.workload.block_bytes));
        let (policy, pct) = (subject.policy, self.file_pct);
        let what = format!("{policy} file of {pct} %, writes of {size}, run {repetition}");
        bench.step(Part::Study, steps, &what);
        for access in Access::ALL {
            bench.turn(&case(self.file_pct, access), subject, &self.workload)?;
        }
        Ok(())
    }
}

/// Returns the curves: for each size of a write the speed by file and access.
pub(crate) fn figures() -> Vec<Figure> {
    const FIGURES: [(&str, &str); WRITES_BYTES.len()] = [
        ("study-4k", "Writes of 4 KiB, MB/s"),
        ("study-16k", "Writes of 16 KiB, MB/s"),
        ("study-64k", "Writes of 64 KiB, MB/s"),
        ("study-512k", "Writes of 512 KiB, MB/s"),
        ("study-1m", "Writes of 1 MiB, MB/s"),
    ];
    let policies = [&Variant::ALL.map(|it| it.policy)[..], &["btt", BACKING]].concat();
    let figure = |((name, title), block_bytes)| {
        let block_bytes = u64::from(block_bytes);
        let column = |(access, file_pct): (Access, u64)| {
            let label = format!("{file_pct} % {}", access.name());
            Column::new(label, case(file_pct, access), Op::Write, 1, 1).of_blocks(block_bytes)
        };
        let all = Access::ALL.into_iter().flat_map(|it| FILES_PCT.map(|pct| (it, pct)));
        Figure {
            name,
            title,
            axis: "size of the file in percent of the cache, and access",
            policies: policies.clone(),
            columns: all.map(column).collect(),
            value: throughput,
            scale: block_bytes as f64 / 1e6,
            style: Style::Lines,
        }
    };
    FIGURES.into_iter().zip(WRITES_BYTES).map(figure).collect()
}

/// The study's figures of Open CAS for writes of one line, by sizes of 4, 16 and 64 KiB.
const OPEN_CAS: &str = "Open CAS, in the study";
/// Slowdown of the first access against the second, below the capacity, in percent: an Optane
/// before a PM9A3 (3.3.1).
const GAP_PCT: [f64; 3] = [40.0, 25.0, 14.0];
/// Bytes of metadata of a miss: a block of 4 KiB (3.3.1).
const MISS_METADATA_BYTES: f64 = 4096.0;
/// Bytes of metadata of a miss that evicts: two blocks (3.3.2).
const EVICT_METADATA_BYTES: f64 = 8192.0;

/// Makes the table of our figures beside the study's.
pub(crate) fn table(series: &[Series]) -> Table {
    let headers = ["what", "of", "4 KiB", "16 KiB", "64 KiB"];
    let mut table = Table::new("study-paper", "Beside the figures of the study", &headers);
    let sizes = [WRITES_BYTES[0], WRITES_BYTES[1], WRITES_BYTES[2]].map(u64::from);
    let mut push = |what: &str, ours: [Option<f64>; 3], theirs: [f64; 3]| {
        if ours.iter().all(Option::is_none) {
            return;
        }
        for (of, values) in [(CACHE, ours), (OPEN_CAS, theirs.map(Some))] {
            let values = values.map(|value| number_cell(value, 2));
            let cells = [what.to_owned(), of.to_owned()].into_iter().chain(values);
            table.push(cells.collect());
        }
    };
    let (below, above) = (FILES_PCT[0], FILES_PCT[2]);
    let amplified = |bytes: f64| sizes.map(|size| 1.0 + bytes / size as f64);
    let gaps = sizes.map(|size| gap_pct(series, below, size));
    push("1st access slower than the 2nd, file of 50 %, in %", gaps, GAP_PCT);
    let missed = sizes.map(|size| amplification(series, &case(below, Access::First), size));
    push("bytes to the memory a byte, 1st access, 50 %", missed, amplified(MISS_METADATA_BYTES));
    let hit = sizes.map(|size| amplification(series, &case(below, Access::Second), size));
    push("bytes to the memory a byte, 2nd access, 50 %", hit, [1.0; 3]);
    let evicted = sizes.map(|size| amplification(series, &case(above, Access::Second), size));
    push("bytes to the memory a byte, 2nd access, 125 %", evicted, amplified(EVICT_METADATA_BYTES));
    table
}

/// Makes the table of the cells with many requests at a time.
pub(crate) fn deep_table(series: &[Series]) -> Table {
    let title = format!("The study's matrix, {DEPTH} requests at a time");
    let rows = deep_cells().filter_map(|(block_bytes, file_pct, access)| {
        let case = case(file_pct, access);
        let policies = [CACHE, "btt", BACKING, BACKING_AT_ONCE];
        let found = policies.map(|it| find(series, it, &case, (block_bytes, DEPTH)));
        let [cache, btt, backing, at_once] = found;
        let speed = |it: Option<&Series>| number_cell(it.map(Series::mb_per_s), 0);
        let ratio = |to: Option<&Series>| {
            let ratio = to.and_then(|to| cache?.ratio(to, throughput));
            ratio.map_or(String::new(), |it| format!("{:.2} ({})", it.median, it.range(2)))
        };
        cache.is_some().then(|| {
            [
                ("write", size_name(block_bytes)),
                ("file", format!("{file_pct} %")),
                ("access", access.name().to_owned()),
                ("cache MB/s", speed(cache)),
                ("btt", speed(btt)),
                ("backing", speed(backing)),
                (BACKING_AT_ONCE, speed(at_once)),
                ("cache / btt", ratio(btt)),
                ("/ backing", ratio(backing)),
                ("/ backing-32", ratio(at_once)),
            ]
        })
    });
    Table::of_rows("study-deep", title, rows)
}

/// Returns size of a write, file and access of each cell with many requests at a time.
pub(super) fn deep_cells() -> impl Iterator<Item = (u64, u64, Access)> {
    let files = || DEEP_FILES_PCT.into_iter().flat_map(|pct| Access::ALL.map(|it| (pct, it)));
    let sizes = DEEP_WRITES_BYTES.into_iter();
    sizes.flat_map(move |bytes| files().map(move |(pct, it)| (u64::from(bytes), pct, it)))
}

/// Finds the series of `policy` in `case` with writes of a size and an I/O depth.
pub(super) fn find<'a>(
    series: &'a [Series],
    policy: &str,
    case: &str,
    writes: (u64, u32),
) -> Option<&'a Series> {
    let (block_bytes, iodepth) = writes;
    let key = Key { iodepth, ..Key::new(policy, case, Op::Write, block_bytes) };
    series.iter().find(|it| it.key == key)
}

fn gap_pct(series: &[Series], file_pct: u64, block_bytes: u64) -> Option<f64> {
    let of = |access| find(series, CACHE, &case(file_pct, access), (block_bytes, 1));
    let ratio = of(Access::First)?.ratio(of(Access::Second)?, throughput)?;
    Some((1.0 - ratio.median) * 100.0)
}

fn amplification(series: &[Series], case: &str, block_bytes: u64) -> Option<f64> {
    let found = find(series, CACHE, case, (block_bytes, 1))?;
    found.traffic_per_op(Traffic::bytes).map(|bytes| bytes / block_bytes as f64)
}
