//! Computes the time of a scheme's operations, and counts them.
//!
//! One program requests one operation after the other, as in AFCM's simulator: the times of
//! operations add up. The flash requests of an operation are in flight together, up to the
//! parallelism of the SSD; a copy to or from memory occupies the program. Persistent memory is a
//! [`MediaModel`] of the core, never faster than DRAM. Schemes on a machine in virtual time set the
//! time of their requests themselves.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use tidegate::pmem::MediaModel;

use crate::scheme::devices::{Devices, Source};
use crate::scheme::page::{ALL_LINES, LINE_BYTES, PAGE_BYTES, PageId, bytes_of, runs_of};

/// Time of a system call and the look-up of a page.
const OPERATION_NS: f64 = 500.0;
/// Time of a step through an index of cache lines, and of the setup of a small copy.
const INDEX_STEP_NS: f64 = 25.0;
/// Latency of a line that is in no CPU cache.
const DRAM_LATENCY_NS: f64 = 90.0;
/// Bytes per second that one thread copies from or to DRAM, unless measured.
pub const DRAM_BYTES_PER_S: u64 = 10_000_000_000;
/// Time of a store fence, and of write-backs before it, in memory as fast as DRAM.
const DRAM_FENCE_NS: f64 = 60.0;
const NS_PER_S: f64 = 1e9;

/// Latency, bandwidth and parallelism of flash, or of a disk.
///
/// The text form is the name of a preset, followed by any number of `,KEY=NUMBER` with the names of
/// the fields: `nvme,read_ns=60000,parallel=64`.
#[derive(Debug, Clone, PartialEq)]
pub struct SsdModel {
    /// The text that was parsed.
    pub name: String,
    /// Time to read a page.
    pub read_ns: u64,
    /// Time to write a page, into the device's write cache if it has one.
    pub write_ns: u64,
    /// Time to make earlier writes durable.
    pub flush_ns: u64,
    /// Maximum read bandwidth.
    pub read_bytes_per_s: u64,
    /// Maximum write bandwidth.
    pub write_bytes_per_s: u64,
    /// Maximum number of requests that the device serves in parallel.
    pub parallel: u64,
}

/// A preset: its name, and its fields in order.
type Preset = (&'static str, [u64; 6]);

/// The presets. `paper` stands for AFCM's two SATA disks. The paper states only their name; its
/// simulator writes page by page and never flushes. The other presets are typical of data sheets.
/// The cache of `nvme-plp` survives a power cut, so that a flush is nearly free.
const PRESETS: [Preset; 5] = [
    ("nvme", [80_000, 20_000, 500_000, 3_000_000_000, 2_000_000_000, 32]),
    ("nvme-plp", [80_000, 15_000, 5_000, 3_000_000_000, 2_000_000_000, 32]),
    ("sata-ssd", [120_000, 60_000, 1_500_000, 530_000_000, 480_000_000, 16]),
    ("hdd", [8_000_000, 8_000_000, 8_000_000, 150_000_000, 150_000_000, 1]),
    ("paper", [100_000, 100_000, 0, 500_000_000, 450_000_000, 1]),
];

impl SsdModel {
    /// Returns the fields with their names and minimums.
    fn fields(&mut self) -> [(&'static str, &mut u64, u64); 6] {
        [
            ("read_ns", &mut self.read_ns, 0),
            ("write_ns", &mut self.write_ns, 0),
            ("flush_ns", &mut self.flush_ns, 0),
            ("read_bytes_per_s", &mut self.read_bytes_per_s, 1),
            ("write_bytes_per_s", &mut self.write_bytes_per_s, 1),
            ("parallel", &mut self.parallel, 1),
        ]
    }

    fn set(&mut self, setting: &str) -> Result<(), String> {
        let fields = self.fields();
        let keys = fields.each_ref().map(|(key, ..)| *key).join(", ");
        let wrong = || format!("SSD setting `{setting}`: expected KEY=NUMBER, KEY one of {keys}");
        let (key, value) = setting.split_once('=').ok_or_else(wrong)?;
        let value: u64 = value.parse().map_err(|_| wrong())?;
        let found = fields.into_iter().find(|field| field.0 == key);
        let (_, field, least) = found.ok_or_else(wrong)?;
        if value < least {
            return Err(format!("SSD setting `{setting}`: expected at least {least}"));
        }
        *field = value;
        Ok(())
    }

    /// Returns the preset that the model is or was derived from.
    pub fn kind(&self) -> &str {
        self.name.split(',').next().unwrap_or_default()
    }

    /// Returns the time of `pages` concurrent requests of a page.
    fn batch_ns(&self, pages: u64, page_ns: u64, bytes_per_s: u64) -> f64 {
        if pages == 0 {
            return 0.0;
        }
        let rounds = pages.div_ceil(self.parallel);
        let transfer_ns = float(pages * PAGE_BYTES) / float(bytes_per_s) * NS_PER_S;
        float(rounds * page_ns).max(transfer_ns)
    }
}

impl FromStr for SsdModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let preset = parts.next().unwrap_or_default();
        let found = PRESETS.iter().find(|(name, _)| *name == preset);
        let &(_, values) = found.ok_or_else(|| {
            let names = PRESETS.map(|preset| preset.0).join(", ");
            format!("unknown SSD `{preset}`: expected one of {names}")
        })?;
        let [read_ns, write_ns, flush_ns, read_bytes_per_s, write_bytes_per_s, parallel] = values;
        let mut model = Self {
            name: text.to_owned(),
            read_ns,
            write_ns,
            flush_ns,
            read_bytes_per_s,
            write_bytes_per_s,
            parallel,
        };
        parts.try_for_each(|setting| model.set(setting))?;
        Ok(model)
    }
}

impl fmt::Display for SsdModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// Devices that count their operations and the operations' time.
#[derive(Debug, Clone)]
pub struct Meter {
    ssd: SsdModel,
    pmem: MediaModel,
    dram_bytes_per_s: u64,
    /// Time to copy a whole page from or to DRAM, precomputed for the most frequent case.
    page_copy_ns: f64,
    /// Flash requests of the current operation.
    batch: Batch,
    /// Sums of the operations so far.
    pub totals: Totals,
    ns: f64,
    /// Time spent in reads of flash, a part of `ns`.
    read_ns: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Batch {
    reads: u64,
    writes: u64,
    is_flushed: bool,
}

/// Sums over a trace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Pages written to flash.
    pub ssd_pages_written: u64,
    /// Pages read from flash.
    pub ssd_pages_read: u64,
    /// Bytes of data stored in persistent memory.
    pub pmem_data_bytes: u64,
    /// Bytes of metadata stored in persistent memory.
    pub pmem_metadata_bytes: u64,
}

impl Meter {
    /// Returns idle devices; DRAM moves `dram_bytes_per_s`.
    pub fn new(ssd: SsdModel, pmem: MediaModel, dram_bytes_per_s: u64) -> Self {
        Self {
            ssd,
            pmem,
            dram_bytes_per_s,
            page_copy_ns: copy_ns(ALL_LINES, dram_bytes_per_s),
            batch: Batch::default(),
            totals: Totals::default(),
            ns: 0.0,
            read_ns: 0.0,
        }
    }

    /// Ends an operation: adds the time of its flash requests, for which the program waits.
    pub fn end_operation(&mut self) {
        let Batch { reads, writes, is_flushed } = std::mem::take(&mut self.batch);
        let ssd = &self.ssd;
        let read_ns = ssd.batch_ns(reads, ssd.read_ns, ssd.read_bytes_per_s);
        self.read_ns += read_ns;
        self.ns += OPERATION_NS;
        self.ns += read_ns;
        self.ns += ssd.batch_ns(writes, ssd.write_ns, ssd.write_bytes_per_s);
        if is_flushed {
            self.ns += float(ssd.flush_ns);
        }
    }

    /// Returns the time of all operations so far.
    pub fn seconds(&self) -> f64 {
        self.ns / NS_PER_S
    }

    /// Returns the time of reads of flash, a part of [`seconds`](Self::seconds).
    pub fn read_seconds(&self) -> f64 {
        self.read_ns / NS_PER_S
    }

    /// Adds the time of a store of contiguous bytes to persistent memory.
    fn store(&mut self, bytes: u64) {
        let occupied =
            bytes.next_multiple_of(u64::from(self.pmem.granularity_bytes).max(LINE_BYTES));
        let limits = [self.pmem.thread_write_bytes_per_s, self.pmem.write_bytes_per_s];
        self.ns += float(occupied) / self.slowest(limits) * NS_PER_S;
    }

    /// Returns the lowest of these rates and DRAM's rate.
    fn slowest(&self, limits: [Option<u64>; 2]) -> f64 {
        limits.into_iter().flatten().map(float).fold(float(self.dram_bytes_per_s), f64::min)
    }
}

/// Returns the time to copy `lines` of a page from or to DRAM at `bytes_per_s`.
fn copy_ns(lines: u64, bytes_per_s: u64) -> f64 {
    let bytes = bytes_of(lines);
    DRAM_LATENCY_NS + float(bytes) / float(bytes_per_s) * NS_PER_S
}

#[expect(clippy::cast_precision_loss, reason = "times need no more than 53 bits")]
fn float(number: u64) -> f64 {
    number as f64
}

impl Devices for Meter {
    fn dram_copy(&mut self, _page: PageId, lines: u64) {
        let is_whole = lines == ALL_LINES;
        self.ns += if is_whole { self.page_copy_ns } else { copy_ns(lines, self.dram_bytes_per_s) };
    }

    fn ssd_read(&mut self, _page: PageId) {
        self.batch.reads += 1;
        self.totals.ssd_pages_read += 1;
    }

    fn ssd_write(&mut self, _page: PageId, _source: Source) {
        self.batch.writes += 1;
        self.totals.ssd_pages_written += 1;
    }

    fn ssd_flush(&mut self) {
        self.batch.is_flushed = true;
    }

    fn pmem_read(&mut self, _page: PageId, lines: u64) {
        let bytes = bytes_of(lines);
        let limits = [self.pmem.thread_read_bytes_per_s, self.pmem.read_bytes_per_s];
        self.ns += f64::from(self.pmem.read_latency_ns).max(DRAM_LATENCY_NS);
        self.ns += float(bytes) / self.slowest(limits) * NS_PER_S;
    }

    fn pmem_store(&mut self, _page: PageId, lines: u64) {
        self.totals.pmem_data_bytes += bytes_of(lines);
        for (_, count) in runs_of(lines) {
            self.store(u64::from(count) * LINE_BYTES);
        }
    }

    fn pmem_metadata(&mut self, bytes: u64) {
        self.totals.pmem_metadata_bytes += bytes;
        self.store(bytes);
    }

    fn pmem_fence(&mut self) {
        self.ns += f64::from(self.pmem.write_latency_ns).max(DRAM_FENCE_NS);
    }

    fn index_steps(&mut self, steps: u32) {
        self.ns += f64::from(steps) * INDEX_STEP_NS;
    }

    fn now_ns(&self) -> f64 {
        self.ns
    }

    fn set_now_ns(&mut self, now_ns: f64) {
        self.ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::FileId;

    const PAGE: PageId = PageId { file: FileId(0), page: 0 };

    fn ns_of(ssd: &str, pmem: &str, work: impl Fn(&mut Meter)) -> f64 {
        let mut meter = Meter::new(ssd.parse().unwrap(), pmem.parse().unwrap(), DRAM_BYTES_PER_S);
        work(&mut meter);
        meter.end_operation();
        (meter.seconds() * NS_PER_S).round() - OPERATION_NS
    }

    #[test]
    fn flash_works_in_parallel_and_within_its_bandwidth() {
        let ssd = "nvme,read_ns=1000,write_ns=2000,flush_ns=5000,parallel=4,\
                   read_bytes_per_s=4096000000,write_bytes_per_s=1000000000000";
        let reads =
            |count: u64| ns_of(ssd, "dram", |meter| (0..count).for_each(|_| meter.ssd_read(PAGE)));
        // Two rounds of 1000 ns, but five pages at 1000 ns each.
        assert_eq!(
            [reads(0), reads(1), reads(5)].map(f64::to_bits),
            [0.0_f64, 1000.0, 5000.0].map(f64::to_bits)
        );
        let writes = ns_of(ssd, "dram", |meter| {
            (0..5).for_each(|_| meter.ssd_write(PAGE, Source::Dram));
            meter.ssd_flush();
            meter.ssd_flush();
        });
        assert_eq!(writes.to_bits(), 9000.0_f64.to_bits());
    }

    #[test]
    fn small_stores_occupy_a_whole_unit_of_the_medium() {
        let pmem =
            "custom,granularity_bytes=256,thread_write_bytes_per_s=1000000000,write_latency_ns=100";
        let ns = ns_of("nvme", pmem, |meter| {
            meter.pmem_store(PAGE, 0b101);
            meter.pmem_metadata(8);
            meter.pmem_fence();
        });
        assert_eq!(ns.to_bits(), (3.0 * 256.0 + 100.0_f64).to_bits());
    }

    #[test]
    fn settings_of_an_ssd_are_checked() {
        let model: SsdModel = "hdd,parallel=2".parse().unwrap();
        assert_eq!(
            (model.parallel, model.read_ns, model.to_string().as_str()),
            (2, 8_000_000, "hdd,parallel=2")
        );
        for wrong in ["", "tape", "hdd,parallel", "hdd,parallel=0", "hdd,speed=9", "hdd,read_ns=-1"]
        {
            assert!(wrong.parse::<SsdModel>().is_err(), "{wrong}");
        }
    }
}
