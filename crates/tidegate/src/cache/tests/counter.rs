//! What is counted is what was asked and done: the requests of a client, and the pages that the
//! backing saw.

use std::sync::Arc;
use std::sync::atomic::AtomicU64 as StdAtomicU64;
use std::sync::mpsc::channel;

use strum::VariantArray as _;

use super::*;
use super::{NO_THREAD, SHARDED, binding, pool_of, pool_of_lines, work};
use crate::cache::counters::Counter;
use crate::cache::router::mode::Mode;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceErrorKind, IoBuffer, Op, OwnedOperation};
use crate::stats::{Collector, Metric, Unit, Value};
use crate::tier::Tier;

const BACKING_PAGES: u64 = 2000;
/// More pages than a batch has.
const LARGE_PAGES: u64 = 300;

/// A device that counts the pages that it reads and writes.
struct Counting {
    inner: MemoryDevice,
    read: StdAtomicU64,
    written: StdAtomicU64,
}

impl Counting {
    fn new() -> Arc<Self> {
        let inner = MemoryDevice::new(4096, BACKING_PAGES).unwrap();
        Arc::new(Self { inner, read: StdAtomicU64::new(0), written: StdAtomicU64::new(0) })
    }

    /// Pages read, and pages written.
    fn pages(&self) -> [u64; 2] {
        [&self.read, &self.written].map(|it| it.load(Ordering::Relaxed))
    }
}

fn note(count: &StdAtomicU64, offset: u64, len: u64) {
    let pages = pages_of(offset, len);
    count.fetch_add(pages.end - pages.start, Ordering::Relaxed);
}

impl BlockDevice for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let (offset, len) = operation.range();
        match operation {
            Operation::Read { .. } => note(&self.read, offset, len),
            Operation::Write { .. } | Operation::WriteZeroes { .. } => {
                note(&self.written, offset, len);
            }
            _ => {}
        }
        self.inner.run(operation)
    }
}

fn open_over(
    region: Arc<Region>,
    backing: Arc<dyn BlockDevice>,
    options: CacheDeviceOptions,
) -> Arc<CacheDevice> {
    let binding = Binding { pages: BACKING_PAGES, ..binding() };
    Arc::new(CacheDevice::open(region, backing, binding, options).unwrap())
}

fn count(device: &CacheDevice, counter: Counter) -> u64 {
    device.core.pages.counters.get(counter)
}

const READS: [Counter; 4] = [
    Counter::ReadHits,
    Counter::ReadPartialMisses,
    Counter::ReadFullMisses,
    Counter::PassThroughReads,
];
const WRITES: [Counter; 4] = [
    Counter::WriteHits,
    Counter::WritePartialMisses,
    Counter::WriteFullMisses,
    Counter::PassThroughWrites,
];

fn counts(device: &CacheDevice, counters: [Counter; 4]) -> [u64; 4] {
    counters.map(|it| count(device, it))
}

/// A client that counts its requests. It tries each as a server does: at once, then started.
struct Client {
    device: Arc<CacheDevice>,
    backing: Arc<Counting>,
    block_bytes: u64,
    requests: [u64; 2],
    random: u64,
}

impl Client {
    fn new(region: Arc<Region>, block_bytes: u64, options: CacheDeviceOptions) -> Self {
        let backing = Counting::new();
        let device = open_over(region, Arc::clone(&backing) as _, options);
        // What opening reads is no request's.
        backing.read.store(0, Ordering::Relaxed);
        Self { device, backing, block_bytes, requests: [0, 0], random: 1 }
    }

    fn below(&mut self, most: u64) -> u64 {
        self.random = self.random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (self.random >> 33) % most
    }

    fn run(&mut self, kind: usize, operation: OwnedOperation) {
        self.requests[kind] += 1;
        let (told, ended) = channel();
        let completion = move |_, result| told.send(result).unwrap();
        let request = AsyncRequest::new(operation, Context::default(), completion);
        if let Some(request) = request.attempt_on(&*self.device) {
            Arc::clone(&self.device).start(request);
        }
        ended.recv().unwrap().unwrap();
    }

    fn step(&mut self) {
        let blocks = BACKING_PAGES * PAGE_BYTES / self.block_bytes;
        let large = LARGE_PAGES * PAGE_BYTES / self.block_bytes;
        let most = if self.below(40) == 0 { large } else { 24 };
        let count = 1 + self.below(most);
        // Most requests are for a part that fits into the larger pools.
        let span = if self.below(4) == 0 { blocks } else { blocks / 16 };
        let first = self.below(span).min(blocks - count);
        let (offset, len) = (first * self.block_bytes, count * self.block_bytes);
        let buffer = || IoBuffer::new(usize::try_from(len).unwrap());
        let flags = WriteFlags { fua: self.below(8) == 0 };
        match self.below(12) {
            0 => self
                .run(1, OwnedOperation::WriteZeroes { offset, len, flags: ZeroFlags::default() }),
            1 => self.device.discard(offset, len).unwrap(),
            2 => self.device.flush().unwrap(),
            3..6 => work(&self.device),
            6..9 => self.run(0, OwnedOperation::Read { offset, buffer: buffer() }),
            _ => self.run(1, OwnedOperation::Write { offset, buffer: buffer(), flags }),
        }
    }

    fn compare(&self, case: &str) {
        let sums = [READS, WRITES].map(|it| counts(&self.device, it).iter().sum::<u64>());
        assert_eq!(sums, self.requests, "{case}: reads and writes");
        let pages = [Counter::CoreReads, Counter::CoreWrites].map(|it| count(&self.device, it));
        assert_eq!(pages, self.backing.pages(), "{case}: pages of the backing");
        let waits = count(&self.device, Counter::FullWaits);
        assert!(pages.iter().chain(&sums).all(|it| *it > 0), "{case}: {pages:?} {waits}");
    }
}

#[test]
fn counters_add_up() {
    let share = CacheDeviceOptions { backing_share_pct: Some(50), ..NO_THREAD };
    for &mode in Mode::ALL {
        for (name, region, block_bytes, options) in [
            ("pages", pool_of(SHARDED, 4096), 4096, NO_THREAD),
            ("few pages", pool_of(60, 4096), 4096, NO_THREAD),
            ("parts", pool_of(600, 512), 512, NO_THREAD),
            ("clusters", pool_of_lines(600, 64 << 10), 4096, NO_THREAD),
            ("by cost", pool_of(3000, 4096), 4096, share),
        ] {
            let mut client = Client::new(region, block_bytes, options);
            client.device.set_mode(mode).unwrap();
            (0..600).for_each(|_| client.step());
            client.device.clean_all().unwrap();
            client.compare(&format!("{mode}, {name}"));
        }
    }
}

fn write_pages(device: &CacheDevice, first: u64, pages: u64) {
    let data = vec![7; usize::try_from(pages * PAGE_BYTES).unwrap()];
    device.write(first * PAGE_BYTES, &data, WriteFlags::default()).unwrap();
}

#[test]
fn a_request_counts_once_whatever_it_takes() {
    let device = open_over(pool_of(1000, 4096), Counting::new(), NO_THREAD);
    write_pages(&device, 0, LARGE_PAGES);
    write_pages(&device, 0, LARGE_PAGES);
    write_pages(&device, LARGE_PAGES - 1, LARGE_PAGES);
    assert_eq!(counts(&device, WRITES), [1, 1, 1, 0]);
    device.set_mode(Mode::WriteInvalidate).unwrap();
    write_pages(&device, 0, LARGE_PAGES);
    assert_eq!(counts(&device, WRITES), [1, 1, 1, 1]);
    let small = open_over(pool_of(40, 4096), Counting::new(), NO_THREAD);
    write_pages(&small, 0, LARGE_PAGES);
    assert_eq!(counts(&small, WRITES), [0, 0, 1, 0], "one that waits for slots");
    assert!(count(&small, Counter::FullWaits) > 0);
}

#[test]
fn pages_that_are_kept_are_written_to_the_cache_and_unchanged_ones_are_not() {
    let device = open_over(pool_of(64, 4096), Counting::new(), NO_THREAD);
    device.set("by-content", "on").unwrap();
    device.read(0, &mut [0; 3 * PAGE]).unwrap();
    assert_eq!(count(&device, Counter::BlockWrites), 0);
    work(&device);
    assert_eq!(count(&device, Counter::BlockWrites), 3);
    write_pages(&device, 0, 1);
    write_pages(&device, 0, 1);
    assert_eq!((count(&device, Counter::BlockWrites), counts(&device, WRITES)), (4, [2, 0, 0, 0]));
}

#[test]
fn errors_of_the_backing_are_counted_by_what_failed() {
    let fault = Arc::new(Fault::new(Counting::new(), 1));
    let device = open_over(pool_of(64, 4096), Arc::clone(&fault) as _, NO_THREAD);
    let errors = || {
        [Counter::CoreReadErrors, Counter::CoreWriteErrors].map(|counter| count(&device, counter))
    };
    let fail = |op| {
        fault.heal();
        fault.add(Rule::new(&[op], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    };
    fail(Op::Read);
    device.read(0, &mut [0; PAGE]).unwrap_err();
    assert_eq!((errors(), count(&device, Counter::CoreReads)), ([1, 0], 0));
    write_pages(&device, 0, 1);
    fail(Op::Write);
    device.clean_all().unwrap_err();
    assert_eq!(errors(), [1, 1], "a batch of cleaning");
    device.set_mode(Mode::WriteInvalidate).unwrap();
    device.write(PAGE_BYTES, &[1; PAGE], WriteFlags::default()).unwrap_err();
    assert_eq!((errors(), count(&device, Counter::CoreWrites)), ([1, 2], 0));
    fail(Op::Flush);
    device.clean_all().unwrap_err();
    assert_eq!(errors(), [1, 4], "the flush of a batch, and the last one");
}

/// The counters of all IO classes together are those of the cache.
#[test]
fn counters_of_io_classes_add_up_too() {
    let mut client = Client::new(pool_of(100, 4096), 4096, NO_THREAD);
    let table = "IO class id,IO class name,Eviction priority,Allocation;1,lba:lt:400,1,1.00;2,lba:ge:400,1,1.00";
    client.device.set("io-classes", table).unwrap();
    (0..600).for_each(|_| client.step());
    client.device.clean_all().unwrap();
    client.compare("classes");
    let mut collector = Collector::default();
    client.device.metrics(&mut collector);
    let readings = collector.finish();
    let sum = |name: &str, is_of_class: bool| {
        let named = readings.iter().filter(|it| it.metric.name == name);
        let chosen = named.filter(|it| it.labels.contains_key("io_class") == is_of_class);
        let number = |value: &Value| if let Value::Whole(number) = value { *number } else { 0 };
        chosen.map(|it| number(&it.value)).sum::<u64>()
    };
    for name in [
        "cache_read_hits",
        "cache_read_partial_misses",
        "cache_read_full_misses",
        "cache_write_hits",
        "cache_write_partial_misses",
        "cache_write_full_misses",
        "cache_block_reads",
        "cache_block_writes",
        "cache_core_reads",
        "cache_core_writes",
    ] {
        assert!(sum(name, false) > 0, "{name}");
        assert_eq!(sum(name, true), sum(name, false), "{name}");
    }
}

/// The names of metrics are a contract with scripts, and people read what is said of them.
#[test]
fn the_metrics_of_counters_are_named_and_explained() {
    let device = super::open(&pool_of(64, 4096), &super::memory());
    let mut collector = Collector::default();
    device.metrics(&mut collector);
    let found: Vec<_> = collector.finish().into_iter().map(|it| it.metric).collect();
    let expected = [
        ("cache_read_hits", "Reads of which all pages were cached"),
        ("cache_read_partial_misses", "Reads of which a part was cached"),
        ("cache_read_full_misses", "Reads of which nothing was cached"),
        ("cache_write_hits", "Writes of which all pages were cached"),
        ("cache_write_partial_misses", "Writes of which a part was cached"),
        ("cache_write_full_misses", "Writes of which nothing was cached"),
        ("cache_pass_through_reads", "Reads around the cache"),
        ("cache_pass_through_writes", "Writes around the cache"),
        ("cache_block_reads", "Pages read from the cache"),
        ("cache_block_writes", "Pages written to the cache"),
        ("cache_core_reads", "Pages read from the backing"),
        ("cache_core_writes", "Pages written to the backing"),
        ("cache_evictions", "Clean pages that made place for others"),
        ("cache_full_waits", "Waits of a write for a free slot"),
        ("cache_cut_off", "Requests of long streams that were not cached"),
        ("cache_not_promoted", "Requests that promotion did not cache"),
        (
            "cache_class_full",
            "Requests that went around the cache because their IO class may not use more of it",
        ),
        (
            "cache_reads_by_cost",
            "Reads of cached pages that the backing served because the memory was slower",
        ),
        (
            "cache_writes_by_cost",
            "Large writes that went to the backing because the memory was slower",
        ),
        (
            "cache_unchanged_bytes",
            "Bytes that writes did not store, for the memory had them already",
        ),
        ("cache_groups_committed", "Groups of writes that were committed"),
        (
            "cache_groups_committed_early",
            "Groups that filled the cache, and were committed before a flush",
        ),
        ("cache_write_errors", "Batches of pages that the memory failed"),
        ("cache_core_read_errors", "Reads that the backing failed"),
        ("cache_core_write_errors", "Writes and flushes that the backing failed"),
    ];
    assert_eq!(expected.len(), Counter::VARIANTS.len());
    for (name, help) in expected {
        let unit = if name.ends_with("_bytes") { Unit::Bytes } else { Unit::Count };
        let is_it = |it: &Metric| (&*it.name, &*it.help, it.unit) == (name, help, unit);
        assert!(found.iter().any(is_it), "{name}: {help}");
    }
}
