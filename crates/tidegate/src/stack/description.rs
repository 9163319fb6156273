//! The description of a pool, or of a stack over a pool, for people and scripts.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::dram::{TierSummary, lines_of};
use crate::pmem::{Domain, Region};
use crate::pool::Superblock;
use crate::size::Size;
use crate::tier::{Description, Engine, Line, line};

/// A pool with the tiers before it and the device behind it; the keys are a contract with scripts.
#[derive(Debug, Clone, Serialize)]
pub struct PoolDescription {
    /// The pool's file or device.
    pub pool: String,
    /// Its engine.
    pub engine: &'static str,
    /// Size of the device that the pool makes, or of its log.
    pub size_bytes: u64,
    /// Size of a block, where there are blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u32>,
    /// Number of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// Size of the pool's file or device.
    pub pool_bytes: u64,
    /// What makes a store durable.
    pub domain: Domain,
    /// The effect of a power cut, in words.
    pub power_cut: &'static str,
    /// The media model.
    pub media: String,
    /// The engine's header, under the engine's name.
    #[serde(flatten)]
    pub header: Map<String, Value>,
    /// The device behind the pool: the present one, or the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// The result of recovery, in words; `None` if the pool was not opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovered: Option<String>,
    /// The pool refuses writes.
    #[serde(skip)]
    pub read_only: bool,
    /// The DRAM tier before the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dram: Option<TierSummary>,
    #[serde(skip)]
    pub(super) header_lines: Vec<Line>,
}

impl PoolDescription {
    pub(super) fn new(engine: &dyn Engine, region: &Region, found: Description) -> Self {
        let Description { size_bytes, blocks, header, lines } = found;
        let superblock = engine.traits().code.and_then(|_| Superblock::read(region).ok());
        let backing = superblock.and_then(|found| found.superblock.backing);
        Self {
            pool: region.name().display().to_string(),
            engine: engine.name(),
            size_bytes,
            block_bytes: blocks.map(|(block_bytes, _)| block_bytes),
            blocks: blocks.map(|(_, blocks)| blocks),
            pool_bytes: region.len_bytes(),
            domain: region.domain(),
            power_cut: region.power_cut(),
            media: region.media().to_string(),
            header: Map::from_iter([(engine.name().to_owned(), header)]),
            backing: backing.map(|backing| backing.name.to_string()),
            recovered: None,
            read_only: false,
            dram: None,
            header_lines: lines,
        }
    }

    /// Returns the lines for people, one for each fact.
    pub fn lines(&self) -> Vec<Line> {
        let access = if self.read_only { ", read-only" } else { "" };
        let mut lines = vec![
            line("pool", &self.pool),
            line("engine", format_args!("{}{access}", self.engine)),
            line("size", Size { bytes: self.size_bytes }),
        ];
        if let (Some(blocks), Some(block_bytes)) = (self.blocks, self.block_bytes) {
            lines.push(line("blocks", format_args!("{blocks} of {block_bytes} bytes")));
        }
        lines.push(line("pool size", Size { bytes: self.pool_bytes }));
        lines.extend(self.header_lines.iter().cloned());
        lines.push(line("domain", self.domain));
        lines.push(line("power cut", self.power_cut));
        lines.push(line("media", &self.media));
        lines.extend(self.backing.as_ref().map(|backing| line("backing", backing)));
        lines.extend(self.recovered.as_ref().map(|recovered| line("recovered", recovered)));
        lines.extend(self.dram.as_ref().map(lines_of).unwrap_or_default());
        lines
    }
}
