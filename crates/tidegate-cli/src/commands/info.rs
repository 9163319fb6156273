//! `tidegate info`: what a pool is. Reads headers only and changes nothing.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use tidegate::btt::{Btt, Summary};
use tidegate::pmem::{Domain, Region};
use tidegate::pool::Superblock;

use crate::args::{Engine, InfoArgs};
use crate::output::{field, json, line};
use crate::pool;
use crate::size::Size;

/// What is shown of a pool; the keys are a contract with scripts.
#[derive(Debug, Serialize)]
pub(crate) struct Info<'a> {
    pool: &'a Path,
    engine: String,
    /// Size of the device that the pool makes.
    size_bytes: u64,
    block_bytes: u32,
    blocks: u64,
    /// Size of the pool's file or device.
    pool_bytes: u64,
    domain: Domain,
    power_cut: &'static str,
    #[serde(flatten)]
    header: Header,
}

/// What the engine's header says.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Header {
    Btt(Summary),
    Raw(Superblock),
}

impl Header {
    fn read(region: &Region, engine: Engine) -> Result<Self> {
        Ok(match engine {
            Engine::Btt => Self::Btt(Btt::summarize(region)?),
            Engine::Raw => Self::Raw(Superblock::read(region)?.superblock),
        })
    }

    /// Size of a block, and how many there are.
    fn blocks(&self) -> (u32, u64) {
        match self {
            Self::Btt(btt) => (btt.block_bytes, btt.blocks),
            Self::Raw(raw) => (raw.block_bytes, raw.data_bytes / u64::from(raw.block_bytes)),
        }
    }

    fn print(&self) -> io::Result<()> {
        match self {
            Self::Btt(btt) => print_btt(btt),
            Self::Raw(raw) => field("uuid", raw.uuid),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// The pool cannot be mapped, there is none, or its header is damaged.
pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode> {
    let region = pool::map(&args.pool, &args.memory, true)?;
    let info = describe(&region, &args.pool)?;
    if args.json {
        json(&info)?;
    } else {
        info.print()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Describes the pool at `path` that `region` maps.
///
/// # Errors
/// There is none, or its header is damaged.
pub(crate) fn describe<'a>(region: &Region, path: &'a Path) -> Result<Info<'a>> {
    let engine = pool::expect_engine(region)?;
    let header = Header::read(region, engine).with_context(|| pool::in_pool(region))?;
    let (block_bytes, blocks) = header.blocks();
    Ok(Info {
        pool: path,
        engine: engine.to_string(),
        size_bytes: blocks * u64::from(block_bytes),
        block_bytes,
        blocks,
        pool_bytes: region.len_bytes(),
        domain: region.domain(),
        power_cut: pool::power_cut(region),
        header,
    })
}

impl Info<'_> {
    /// Prints a line for each thing worth knowing.
    ///
    /// # Errors
    /// Standard output is closed or full.
    pub(crate) fn print(&self) -> io::Result<()> {
        field("pool", self.pool.display())?;
        field("engine", &self.engine)?;
        field("size", Size { bytes: self.size_bytes })?;
        field("blocks", format_args!("{} of {} bytes", self.blocks, self.block_bytes))?;
        field("pool size", Size { bytes: self.pool_bytes })?;
        self.header.print()?;
        field("domain", self.domain)?;
        field("power cut", self.power_cut)
    }
}

fn print_btt(btt: &Summary) -> io::Result<()> {
    let lanes: u32 = btt.arenas.iter().map(|arena| arena.lanes).sum();
    let metadata_bytes = btt.lba_bytes - btt.block_bytes;
    field("btt", format_args!("version {}, uuid {}", btt.version, btt.uuid))?;
    if metadata_bytes > 0 {
        field("metadata", format_args!("{metadata_bytes} bytes a block"))?;
    }
    field("arenas", format_args!("{}, with {lanes} lanes", btt.arenas.len()))?;
    for (number, arena) in btt.arenas.iter().enumerate().filter(|(_, arena)| arena.failed) {
        line(format_args!(
            "arena {number} at offset {} is marked as failed: read-only",
            arena.offset_bytes
        ))?;
    }
    Ok(())
}
