//! The gain of the setting `cost=auto`: reads of clean pages that are cached, and large writes that
//! overrun the cache, before a backing that may be quicker than the memory.
//!
//! Clients are threads that make one request at a time. A thread that waits for the memory keeps
//! its CPU, as with real memory; the backing leaves that CPU to other threads, as a disk does.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate::cache::CacheDevice;
use tidegate::device::{self, BlockDevice, Geometry, Operation, Request};
use tidegate::pmem::MediaModel;

use super::bed::{Pool, Subject, Variant, alone, null, reading, writes};
use super::{BACKING, Bench, CACHE, Part};
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::measure::{Amounts, Op, Series, of_policy, ratio_cells, throughput};
use crate::pattern::Pattern;
use crate::plan::size_name;
use crate::table::{Table, number_cell};
use crate::workload::{Stop, Workload};

/// Prefix of the cases' names.
pub(crate) const PREFIX: &str = "cache-cost-";
/// The measure besides the speed.
const SHARE_OF_BACKING: &str = "requests served by the backing";

/// Memories: a name, and the media model. `optane-1` is one DIMM of the six of `optane`.
const MEMORIES: [(&str, &str); 3] = [
    ("optane", "optane"),
    (
        "optane-1",
        "optane,read_bytes_per_s=6600000000,write_bytes_per_s=2300000000,\
         thread_write_bytes_per_s=2300000000",
    ),
    ("cxl", "cxl"),
];
/// Kind and size of requests.
const LOADS: [(Op, u32); 4] =
    [(Op::Read, 4 << 10), (Op::Read, 128 << 10), (Op::Write, 128 << 10), (Op::Write, 1 << 20)];
/// Clients, each with one request under way.
const CLIENTS: [usize; 2] = [2, 32];

/// A fast drive: 20 µs a request, for any number of requests at once, and 12 GB/s for all together.
const REQUEST: Duration = Duration::from_micros(20);
const BYTES_PER_S: u64 = 12_000_000_000;

/// Size of the backing, in sizes of the cache.
const BACKING_SIZES: u64 = 16;
/// Share of the cache that reads use.
const USED_PCT: u64 = 45;
/// Size of the requests that fill a cache.
const FILL_BYTES: u32 = 128 << 10;
/// Time for a cache to learn the costs, in runs.
const LEARNING: u32 = 5;
/// Length of a cell in runs: the backing alone, and two caches, each with its preparation.
const RUNS: usize = 1 + 2 * (1 + LEARNING as usize);

/// Returns the length of a repetition in runs.
pub(super) fn runs() -> f64 {
    (MEMORIES.len() * LOADS.len() * CLIENTS.len() * RUNS) as f64
}

/// Measures `cost=off` and `cost=auto` in turns, beside the backing alone.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let size = bench.args.size;
    let media = "of each row".to_owned();
    bench.found.machine_by_cost = Some(Machine { media, ..bench.args.machine() });
    for (memory, model) in MEMORIES {
        let unknown = |error| BenchError::Usage(format!("media model {model}: {error}"));
        let media: MediaModel = model.parse().map_err(unknown)?;
        let pool = Pool::on_medium(bench.args, &media, size)?;
        for (op, block_bytes) in LOADS {
            for clients in CLIENTS {
                let case = format!("{PREFIX}{memory}-{}", op.name());
                let cell = Cell { pool: &pool, case, op, block_bytes, clients, size };
                cell.all(bench)?;
            }
        }
    }
    Ok(())
}

/// One memory under one load.
struct Cell<'a> {
    pool: &'a Pool,
    case: String,
    op: Op,
    block_bytes: u32,
    clients: usize,
    size: u64,
}

impl Cell<'_> {
    fn all(&self, bench: &mut Bench<'_>) -> Result<()> {
        let steps = MEMORIES.len() * LOADS.len() * CLIENTS.len();
        let (case, clients) = (&self.case, self.clients);
        let size = size_name(u64::from(self.block_bytes));
        for repetition in 1..=bench.args.repetitions {
            let what = format!("{case} of {size}, {clients} clients, run {repetition}");
            bench.step(Part::Cost, steps, &what);
            let backing: Arc<dyn BlockDevice> = Arc::new(Drive::new(self.bytes())?);
            let workload = self.workload(bench.run_time(1.0));
            bench.turn(case, &alone(Arc::clone(&backing)), &workload)?;
            for policy in [CACHE, Variant::BY_COST.policy] {
                self.cache(bench, policy, &backing)?;
            }
        }
        Ok(())
    }

    fn workload(&self, stop: Stop) -> Workload {
        let (pattern, bytes, read_pct) = match self.op {
            Op::Read => (Pattern::Uniform, self.used_bytes(), 100),
            // The preparation wrote elsewhere: these pages have left the cache.
            _ => (Pattern::Scattered { skipped: self.half_each() }, self.bytes(), 0),
        };
        let (block_bytes, threads) = (self.block_bytes, self.clients);
        Workload { read_pct, block_bytes, threads, ..writes(pattern, bytes, stop) }
    }

    /// Returns the size of the part of the backing that reads use, which the cache holds.
    fn used_bytes(&self) -> u64 {
        let bytes = self.size * USED_PCT / 100;
        bytes - bytes % u64::from(FILL_BYTES)
    }

    /// Returns the size of the backing.
    fn bytes(&self) -> u64 {
        self.size * BACKING_SIZES
    }

    /// Returns half the number of writes until a client reaches the pages that another one wrote.
    fn half_each(&self) -> u64 {
        self.bytes() / u64::from(self.block_bytes) / self.clients as u64 / 2
    }

    /// Prepares a cache, which learns the costs: by reads that fill it and then hit, or by writes
    /// that overrun it.
    fn ready(&self, subject: &Subject, run_time: Duration) -> Result<()> {
        let workload = self.workload(Stop::After(run_time * LEARNING));
        if self.op != Op::Read {
            return subject
                .prepare(&Workload { pattern: Pattern::Scattered { skipped: 0 }, ..workload });
        }
        let (pattern, block_bytes) = (Pattern::Sequential, FILL_BYTES);
        let stop = Stop::Requests(self.used_bytes() / u64::from(block_bytes));
        let fill = Workload { pattern, block_bytes, threads: 1, stop, ..workload.clone() };
        subject.prepare(&fill)?;
        subject.prepare(&workload)
    }

    fn cache(
        &self,
        bench: &mut Bench<'_>,
        policy: &'static str,
        backing: &Arc<dyn BlockDevice>,
    ) -> Result<()> {
        let cost = if policy == CACHE { "off" } else { "auto" };
        let backing = Arc::clone(backing);
        let (subject, cache) = self.pool.with_settings(policy, &[("cost", cost)], backing)?;
        let run_time = Duration::from_secs_f64(bench.args.seconds);
        self.ready(&subject, run_time)?;
        let before = self.served_by_backing(&cache);
        let outcome = bench.turn(&self.case, &subject, &self.workload(Stop::After(run_time)))?;
        let requests = outcome.read.len() + outcome.write.len();
        let served = self.served_by_backing(&cache) - before;
        let share_pct = served as f64 * 100.0 / requests.max(1) as f64;
        let share_name = share_name(&self.case, self.block_bytes.into(), self.clients);
        bench.found.shares_of_backing.add(&share_name, "%", policy, share_pct);
        Ok(())
    }

    fn served_by_backing(&self, cache: &CacheDevice) -> u64 {
        let name = if self.op == Op::Read { "cache_reads_by_cost" } else { "cache_writes_by_cost" };
        reading(cache, name)
    }
}

fn share_name(case: &str, block_bytes: u64, clients: usize) -> String {
    format!("{case} of {}, {clients} clients: {SHARE_OF_BACKING}", size_name(block_bytes))
}

/// A drive that keeps nothing, with a latency of its own and one bandwidth for all requests.
struct Drive {
    below: Arc<dyn BlockDevice>,
    /// The end of the transfers booked so far.
    booked_until: Mutex<Instant>,
}

impl Drive {
    fn new(bytes: u64) -> Result<Self> {
        Ok(Self { below: null(bytes)?, booked_until: Mutex::new(Instant::now()) })
    }

    /// Does `work`, requests of `bytes` together, in the time of the drive.
    fn serve<T>(&self, bytes: u64, work: impl FnOnce() -> T) -> T {
        let transfer = Duration::from_nanos(bytes * 1_000_000_000 / BYTES_PER_S);
        let end = {
            let mut booked = self.booked_until.lock().unwrap_or_else(PoisonError::into_inner);
            *booked = Instant::now().max(*booked) + transfer;
            *booked + REQUEST
        };
        let answer = work();
        while Instant::now() < end {
            std::thread::yield_now();
        }
        answer
    }
}

/// Returns the bytes of data that `operation` transfers.
fn bytes_of(operation: &Operation<'_>) -> u64 {
    match operation {
        Operation::Read { buf, .. } => buf.len() as u64,
        Operation::Write { data, .. } => data.len() as u64,
        _ => 0,
    }
}

impl BlockDevice for Drive {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> device::Result<()> {
        match operation {
            Operation::Flush | Operation::Status { .. } => self.below.run(operation),
            _ => self.serve(bytes_of(operation), || self.below.run(operation)),
        }
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let bytes = batch.iter().map(|request| bytes_of(request.operation()));
        self.serve(bytes.sum(), || self.below.submit(batch));
    }
}

/// Makes the table of `cost=auto` beside `cost=off` and the backing alone.
pub(crate) fn table(series: &[Series], shares: &Amounts) -> Table {
    let auto = Variant::BY_COST.policy;
    let of_auto = |it: &&Series| it.key.policy == auto && it.key.case.starts_with(PREFIX);
    let rows = series.iter().filter(of_auto).map(|by_cost| {
        let key = &by_cost.key;
        let find = |policy: &str| of_policy(series, policy, key);
        let speed = |it: Option<&Series>| number_cell(it.map(Series::mb_per_s), 0);
        let ratio = find(CACHE).and_then(|off| by_cost.ratio(off, throughput));
        let [ratio, ratio_range] = ratio_cells(ratio);
        let share = shares.find(&share_name(&key.case, key.block_bytes, key.threads), auto);
        let memory = key.case.trim_start_matches(PREFIX);
        let memory = memory.trim_end_matches(key.op.name()).trim_end_matches('-');
        [
            ("memory", memory.to_owned()),
            ("requests", format!("{}s", key.op.name())),
            ("size", size_name(key.block_bytes)),
            ("clients", key.threads.to_string()),
            ("backing alone MB/s", speed(find(BACKING))),
            ("cost=off", speed(find(CACHE))),
            ("cost=auto", speed(Some(by_cost))),
            ("auto / off", ratio),
            ("min-max", ratio_range),
            ("to the backing %", number_cell(share.map(|it| it.median), 0)),
        ]
    });
    Table::of_rows("cache-cost", "The cache by measured cost", rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Key, Sample};

    #[test]
    fn the_memories_are_media_models() {
        for (name, model) in MEMORIES {
            model.parse::<MediaModel>().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn auto_stands_beside_off_with_its_share() {
        let series = |policy: &str, ops_per_s| Series {
            key: Key {
                policy: policy.to_owned(),
                case: format!("{PREFIX}optane-1-read"),
                op: Op::Read,
                threads: 32,
                iodepth: 1,
                block_bytes: 4096,
            },
            samples: vec![Sample { ops_per_s, ..Sample::single(1.0) }],
        };
        let all = [series(BACKING, 5e5), series(CACHE, 1e6), series("cache-cost", 1.5e6)];
        let mut shares = Amounts::default();
        shares.add(&share_name(&all[0].key.case, 4096, 32), "%", "cache-cost", 25.0);
        let table = table(&all, &shares).markdown();
        let row: Vec<_> = table.lines().nth(2).unwrap().split_whitespace().collect();
        let expected =
            "| optane-1 | reads | 4K | 32 | 2048 | 4096 | 6144 | 1.50 | 1.50-1.50 | 25 |";
        assert_eq!(row.join(" "), expected);
    }

    #[test]
    fn transfers_of_a_drive_share_its_bandwidth() {
        let drive = Drive::new(1 << 20).unwrap();
        let begun = Instant::now();
        drive.serve(12_000_000, || ());
        assert!(*drive.booked_until.lock().unwrap() >= begun + Duration::from_millis(1));
        assert!(begun.elapsed() >= Duration::from_millis(1) + REQUEST);
    }
}
