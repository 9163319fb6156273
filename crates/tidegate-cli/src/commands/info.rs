//! `tidegate info`: what a pool is. Reads headers only and changes nothing.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde::Serialize;
use tidegate::btt::{Btt, Summary};
use tidegate::dram::{self, Policy, TierSpec, TierSummary};
use tidegate::pmem::{Domain, Region};
use tidegate::pool::Superblock;
use tidegate::size::Size;

use crate::args::{Engine, InfoArgs};
use crate::log_pool;
use crate::output::{counted, field, json, line};
use crate::pool;

/// What is shown of a pool; the keys are a contract with scripts.
#[derive(Debug, Serialize)]
pub(crate) struct Info<'a> {
    pool: &'a Path,
    engine: String,
    /// Size of the device that the pool makes, or of its log.
    size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_bytes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<u64>,
    /// Size of the pool's file or device.
    pool_bytes: u64,
    domain: Domain,
    power_cut: &'static str,
    #[serde(flatten)]
    header: Header,
    /// The write cache that was asked about.
    #[serde(skip_serializing_if = "Option::is_none")]
    dram: Option<TierSummary>,
}

/// What the engine's header says.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Header {
    Btt(Summary),
    Raw(Superblock),
    Log(log_pool::Summary),
}

impl Header {
    fn read(region: &Arc<Region>, engine: Engine) -> Result<Self> {
        Ok(match engine {
            Engine::Btt => Self::Btt(Btt::summarize(region)?),
            Engine::Raw => Self::Raw(Superblock::read(region)?.superblock),
            Engine::Log => Self::Log(log_pool::Summary::of(region)?),
        })
    }

    /// Size of a block, and how many there are, where there are blocks.
    fn blocks(&self) -> Option<(u32, u64)> {
        match self {
            Self::Btt(btt) => Some((btt.block_bytes, btt.blocks)),
            Self::Raw(raw) => Some((raw.block_bytes, raw.data_bytes / u64::from(raw.block_bytes))),
            Self::Log(_) => None,
        }
    }

    /// Bytes for users.
    fn size_bytes(&self) -> u64 {
        match (self, self.blocks()) {
            (Self::Log(log), _) => log.ring_bytes,
            (_, blocks) => blocks.map_or(0, |(bytes, number)| number * u64::from(bytes)),
        }
    }

    fn print(&self) -> io::Result<()> {
        match self {
            Self::Btt(btt) => print_btt(btt),
            Self::Raw(raw) => field("uuid", raw.uuid),
            Self::Log(log) => log.print(),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// The pool cannot be mapped, there is none, or its header is damaged.
pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode> {
    let region = Arc::new(pool::map(&args.pool, &args.memory, true)?);
    let mut info = describe(&region, &args.pool)?;
    info.dram = tier(args, &region)?;
    if args.json {
        json(&info)?;
    } else {
        info.print()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The DRAM tier that is asked about, as it would be before the pool.
fn tier(args: &InfoArgs, region: &Arc<Region>) -> Result<Option<TierSummary>> {
    let TierSpec { policy, bytes } = args.dram;
    if policy == Policy::None {
        return Ok(None);
    }
    let (device, _) = pool::open_engine(region, pool::expect_engine(region)?)?;
    let tier = dram::describe(policy, bytes, device.geometry())
        .with_context(|| format!("there is no DRAM tier {}", args.dram))?;
    Ok(Some(tier))
}

/// Describes the pool at `path` that `region` maps.
///
/// # Errors
/// There is none, or its header is damaged.
pub(crate) fn describe<'a>(region: &Arc<Region>, path: &'a Path) -> Result<Info<'a>> {
    let engine = pool::expect_engine(region)?;
    let header = Header::read(region, engine).with_context(|| pool::in_pool(region))?;
    let blocks = header.blocks();
    Ok(Info {
        pool: path,
        engine: engine.to_string(),
        size_bytes: header.size_bytes(),
        block_bytes: blocks.map(|(bytes, _)| bytes),
        blocks: blocks.map(|(_, number)| number),
        pool_bytes: region.len_bytes(),
        domain: region.domain(),
        power_cut: region.power_cut(),
        header,
        dram: None,
    })
}

impl Info<'_> {
    /// Prints a line for each thing worth knowing.
    ///
    /// # Errors
    /// Standard output is full.
    pub(crate) fn print(&self) -> io::Result<()> {
        field("pool", self.pool.display())?;
        field("engine", &self.engine)?;
        field("size", Size { bytes: self.size_bytes })?;
        if let (Some(number), Some(bytes)) = (self.blocks, self.block_bytes) {
            field("blocks", format_args!("{number} of {bytes} bytes"))?;
        }
        field("pool size", Size { bytes: self.pool_bytes })?;
        self.header.print()?;
        field("domain", self.domain)?;
        field("power cut", self.power_cut)?;
        self.dram.as_ref().map_or(Ok(()), print_tier)
    }
}

/// Prints what a DRAM tier is and what it costs.
///
/// # Errors
/// Standard output is full.
pub(crate) fn print_tier(tier: &TierSummary) -> io::Result<()> {
    let TierSummary { policy, block_bytes, slots, sets, threads, .. } = tier;
    let size = Size { bytes: tier.capacity_bytes };
    let metadata_bytes = tier.metadata_bytes_per_slot;
    let (slots, sets) = (counted(*slots, "slot"), counted((*sets).into(), "set"));
    let threads = counted((*threads).into(), "thread");
    field(
        "dram tier",
        format_args!(
            "{policy} of {size}: {slots} of {block_bytes} bytes in {sets}, \
             {metadata_bytes:.1} bytes of metadata a slot, {threads}"
        ),
    )
}

fn print_btt(btt: &Summary) -> io::Result<()> {
    let lanes: u32 = btt.arenas.iter().map(|arena| arena.lanes).sum();
    let metadata_bytes = btt.lba_bytes - btt.block_bytes;
    field("btt", format_args!("version {}, uuid {}", btt.version, btt.uuid))?;
    if metadata_bytes > 0 {
        field("metadata", format_args!("{metadata_bytes} bytes a block"))?;
    }
    field("arenas", format_args!("{}, with {}", btt.arenas.len(), counted(lanes.into(), "lane")))?;
    for (number, arena) in btt.arenas.iter().enumerate().filter(|(_, arena)| arena.failed) {
        line(format_args!(
            "arena {number} at offset {} is marked as failed: read-only",
            arena.offset_bytes
        ))?;
    }
    Ok(())
}
