//! The engine `btt` as the registry sees it.

use std::sync::Arc;

use serde_json::json;

use super::check::{self, Report, is_traceable};
use super::{Btt, BttOptions, Summary, Version, create, largest_fit_bytes, probe, smallest_bytes};
use crate::device::{self, BlockDeviceExt, DeviceError, is_block_bytes};
use crate::pmem::Region;
use crate::stats::{Collector, Metric, Unit};
use crate::tier::engine::{BLOCK_SIZE, block_bytes_of, one_of};
use crate::tier::{
    Checked, Description, Engine, EngineError, Image, Level, Line, OnProgress, Opened, Opening,
    OptionSpec, Options, Plan, State, Tier, Traits, counted, line, memory,
};

type Result<T> = std::result::Result<T, EngineError>;

const LBA_SIZE: OptionSpec = OptionSpec {
    name: "lba-size",
    value_name: "BYTES",
    help: "Bytes stored for a block: a block of 512 or 4096 and up to 128 bytes of metadata",
};
const VERSION: OptionSpec = OptionSpec {
    name: "btt-version",
    value_name: "VERSION",
    help: "Version of the format: 1.1 is what Linux makes of a raw namespace, 2.0 of a labelled one; libpmemblk is a pool of that library",
};
const RECOVERED_LANES: Metric = Metric::gauge(
    "btt_recovered_writes",
    Unit::Count,
    "Unfinished writes that opening the pool completed",
);

/// The engine's name and the abilities of its pools. The format is the Linux kernel's.
const TRAITS: Traits =
    Traits { options: &[BLOCK_SIZE, LBA_SIZE, VERSION], ..Traits::of("btt", "atomic blocks") };

/// The registry's entry.
pub struct BttEngine;

impl Engine for BttEngine {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn plan(&self, options: &Options) -> Result<Box<dyn Plan>> {
        let asked = block_bytes_of(options, &[512, 4096])?;
        let lba_bytes = match options.get(LBA_SIZE.name) {
            Some(text) => one_of(LBA_SIZE.name, text, &super::LBA_SIZES)?,
            None => asked.unwrap_or(4096),
        };
        let block_bytes = if lba_bytes < 4096 { 512 } else { 4096 };
        if let Some(asked) = asked.filter(|asked| *asked != block_bytes) {
            return Err(EngineError::Usage(format!(
                "--lba-size {lba_bytes} holds blocks of {block_bytes} bytes, but --block-size asks for \
                 {asked}; leave --block-size out or say {block_bytes}"
            )));
        }
        let version = options.get(VERSION.name).map_or("1.1", String::as_str);
        let version = version.parse::<Version>().map_err(|_| {
            let known = "1.1, 2.0 or libpmemblk";
            EngineError::Usage(format!("--btt-version is {version}; expected {known}"))
        })?;
        if version != Version::Libpmemblk {
            return Ok(Box::new(BttOptions { lba_bytes, version, ..BttOptions::default() }));
        }
        if lba_bytes != block_bytes {
            return Err(EngineError::Usage(format!(
                "--lba-size {lba_bytes} holds metadata, which a pool of libpmemblk does not; \
                 leave it out"
            )));
        }
        Ok(Box::new(BttOptions::libpmemblk(block_bytes)))
    }

    fn recognizes(&self, region: &Region) -> Result<bool> {
        Ok(probe(region).map_err(EngineError::pool)?.is_some())
    }

    /// Returns whether any info block of the first arena is left; the second copy is enough.
    fn is_traceable(&self, region: &Region) -> bool {
        is_traceable(region)
    }

    fn describe(&self, region: &Arc<Region>) -> Result<Description> {
        let summary = Btt::summarize(region).map_err(EngineError::pool)?;
        Ok(Description {
            size_bytes: summary.blocks * u64::from(summary.block_bytes),
            blocks: Some((summary.block_bytes, summary.blocks)),
            header: json!(summary),
            lines: lines(&summary),
        })
    }

    fn open(&self, opening: Opening) -> Result<Opened> {
        let open = if opening.force { Btt::open_forced } else { Btt::open };
        let btt = open(opening.region).map_err(EngineError::pool)?;
        expect_device(btt.summary())?;
        let recovered = counted(btt.summary().recovered_lanes.into(), "unfinished write");
        Ok(Opened { tier: Arc::new(btt), recovered })
    }

    /// Converts a pool of libpmemblk to a BTT of version 1.1.
    fn convert(&self, region: &Arc<Region>) -> Result<()> {
        let summary = Btt::summarize(region).map_err(EngineError::pool)?;
        expect_convertible(region, &summary)?;
        super::convert(region).map_err(EngineError::pool)
    }

    fn check(&self, region: Region, repair: bool, progress: OnProgress<'_>) -> Result<Checked> {
        let look = if repair { super::repair } else { check::check };
        let report = look(&region, progress).map_err(EngineError::pool)?;
        let (faults, lines) = (report.faults, report_lines(&report));
        Ok(Checked { faults, report: json!(report), lines })
    }
}

/// Refuses blocks that no block device can have.
fn expect_device(btt: &Summary) -> Result<()> {
    if is_block_bytes(btt.block_bytes) {
        return Ok(());
    }
    Err(EngineError::Refused(format!(
        "the blocks of this libpmemblk pool have {} bytes, expected a power of two from 512 to 4096: \
         no client can use them as a device; programs reach them by libpmemblk's functions",
        btt.block_bytes
    )))
}

fn expect_convertible(region: &Region, btt: &Summary) -> Result<()> {
    if btt.version != Version::Libpmemblk && !super::is_half_converted(region) {
        return Err(EngineError::Refused(format!(
            "it is a BTT of version {} already: there is nothing to convert",
            btt.version
        )));
    }
    if [512, 4096].contains(&btt.block_bytes) {
        return Ok(());
    }
    Err(EngineError::Refused(format!(
        "its blocks have {} bytes, and those of a btt pool 512 or 4096: it stays a libpmemblk pool, \
         which programs reach by that library's functions",
        btt.block_bytes
    )))
}

impl Plan for BttOptions {
    fn smallest_bytes(&self) -> u64 {
        smallest_bytes(self)
    }

    fn largest_fit_bytes(&self, bytes: u64) -> u64 {
        largest_fit_bytes(self, bytes)
    }

    fn create(&self, region: &Region) -> Result<()> {
        create(region, self).map(drop).map_err(EngineError::pool)
    }
}

fn lines(btt: &Summary) -> Vec<Line> {
    let lanes: u32 = btt.arenas.iter().map(|arena| arena.lanes).sum();
    let metadata_bytes = btt.lba_bytes - btt.block_bytes;
    let mut lines = vec![line("btt", format_args!("version {}, uuid {}", btt.version, btt.uuid))];
    if metadata_bytes > 0 {
        lines.push(line("metadata", format_args!("{metadata_bytes} bytes a block")));
    }
    let lanes = counted(lanes.into(), "lane");
    lines.push(line("arenas", format_args!("{}, with {lanes}", btt.arenas.len())));
    let failed = btt.arenas.iter().enumerate().filter(|(_, arena)| arena.failed);
    lines.extend(failed.map(|(number, arena)| {
        let offset = arena.offset_bytes;
        line("failed", format_args!("arena {number} at offset {offset}: it is read-only"))
    }));
    lines.extend(btt.damage.iter().map(|damage| line("damaged", damage)));
    lines
}

fn report_lines(report: &Report) -> Vec<String> {
    let mut lines: Vec<_> = report.findings.iter().map(ToString::to_string).collect();
    let more = report.faults - report.findings.len() as u64;
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    for (what, count) in [
        ("info blocks", report.repaired_info_blocks),
        ("flog entries of lanes", report.repaired_lanes),
        ("map entries", report.repaired_map_entries),
    ] {
        if count > 0 {
            lines.push(format!("restored {what}: {count}"));
        }
    }
    lines.extend(report.unproven.iter().map(|what| format!("not proved: {what}")));
    if report.dropped_blocks > 0 {
        lines.push(format!(
            "{} of the zero blocks were discarded while their bytes stayed, or bit 30 of their map entries changed: \
             nothing tells which",
            report.dropped_blocks
        ));
    }
    lines.push(format!(
        "{} blocks written, {} zero, {} lost to media errors; {} unfinished writes that opening completes",
        report.written_blocks, report.zero_blocks, report.error_blocks, report.unfinished_writes
    ));
    lines
}

impl Tier for Btt {
    fn state(&self) -> State {
        State {
            level: Level::Pmem,
            name: "btt".into(),
            pending_bytes: 0,
            lines: lines(self.summary()),
            details: json!(self.summary()),
        }
    }

    /// Flushes; every acknowledged write is durable, and there is no thread.
    fn drain(&self) -> device::Result<()> {
        self.flush()
    }

    fn set_error(&self, offset: u64) -> device::Result<()> {
        let block_bytes = self.summary().block_bytes;
        if !offset.is_multiple_of(block_bytes.into()) {
            return Err(DeviceError::misaligned(offset, block_bytes.into(), block_bytes));
        }
        Btt::set_error(self, offset / u64::from(block_bytes))
    }

    fn image(&self) -> device::Result<Option<Image>> {
        self.image_of_arenas().map(Some)
    }

    fn metrics(&self, collector: &mut Collector) {
        collector.add(&RECOVERED_LANES, u64::from(self.summary().recovered_lanes));
        self.requests.collect(collector);
        memory::collect(self.region(), collector);
    }
}
