//! The engine `raw` as the registry sees it.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{RawDevice, RawOptions, create};
use crate::device::{self, BlockDevice, BlockDeviceExt};
use crate::pmem::Region;
use crate::pool::Superblock;
use crate::stats::Collector;
use crate::tier::engine::{BLOCK_SIZE, block_bytes_of};
use crate::tier::{
    Checked, Description, Engine, EngineCode, EngineError, Image, Level, Line, OnProgress, Opened,
    Opening, Options, Plan, State, Tier, Traits, line, memory,
};

type Result<T> = std::result::Result<T, EngineError>;

/// The number of this engine in superblocks.
pub const CODE: EngineCode = EngineCode(1);

const PAGE_BYTES: u64 = 4096;
/// Two pages of headers, one page of data, and the second header's page.
const POOL_BYTES_MIN: u64 = 4 * PAGE_BYTES;

/// The engine's name and the abilities of its pools.
const TRAITS: Traits =
    Traits { options: &[BLOCK_SIZE], code: Some(CODE), ..Traits::of("raw", "bare memory") };

/// The registry's entry.
pub struct RawEngine;

impl Engine for RawEngine {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn plan(&self, options: &Options) -> Result<Box<dyn Plan>> {
        let block_bytes = block_bytes_of(options, &[512, 4096])?.unwrap_or(4096);
        Ok(Box::new(RawPlan(RawOptions { block_bytes, ..RawOptions::default() })))
    }

    fn describe(&self, region: &Arc<Region>) -> Result<Description> {
        let superblock = Superblock::read(region).map_err(EngineError::pool)?.superblock;
        let block_bytes = superblock.block_bytes;
        let blocks = superblock.data_bytes / u64::from(block_bytes);
        Ok(Description {
            size_bytes: blocks * u64::from(block_bytes),
            blocks: Some((block_bytes, blocks)),
            header: header(&superblock),
            lines: lines(&superblock),
        })
    }

    fn open(&self, opening: Opening) -> Result<Opened> {
        let device = RawDevice::open(opening.region).map_err(EngineError::pool)?;
        Ok(Opened { tier: Arc::new(device), recovered: "nothing to recover".into() })
    }

    /// Checks the superblock: a raw pool has no other metadata.
    fn check(&self, region: Region, repair: bool, _progress: OnProgress<'_>) -> Result<Checked> {
        let found = Superblock::read(&region).map_err(EngineError::pool)?;
        let (mut findings, repaired) = found.check(&region, repair).map_err(EngineError::pool)?;
        let faults = findings.len() as u64;
        let report =
            json!({ "faults": faults, "findings": findings, "repaired_superblocks": repaired });
        if repaired > 0 {
            findings.push(format!("restored superblocks: {repaired}"));
        }
        Ok(Checked { faults, report, lines: findings })
    }
}

struct RawPlan(RawOptions);

impl Plan for RawPlan {
    fn smallest_bytes(&self) -> u64 {
        POOL_BYTES_MIN
    }

    fn create(&self, region: &Region) -> Result<()> {
        create(region, &self.0).map(drop).map_err(EngineError::pool)
    }
}

fn header(superblock: &Superblock) -> Value {
    let mut header = json!(superblock);
    header["engine"] = json!("raw");
    header
}

fn lines(superblock: &Superblock) -> Vec<Line> {
    vec![line("uuid", superblock.uuid)]
}

impl Tier for RawDevice {
    fn state(&self) -> State {
        State {
            level: Level::Pmem,
            name: "raw".into(),
            pending_bytes: 0,
            lines: lines(&self.superblock),
            details: header(&self.superblock),
        }
    }

    /// Flushes; every acknowledged write is durable, and there is no thread.
    fn drain(&self) -> device::Result<()> {
        self.flush()
    }

    fn image(&self) -> device::Result<Option<Image>> {
        let (data, block) = (self.superblock.data_offset, u64::from(self.geometry().block_bytes));
        let after = data + self.geometry().size_bytes();
        let mut parts = Vec::new();
        for part in [0..data, after..self.region.len_bytes()] {
            let len = usize::try_from(part.end.saturating_sub(part.start)).unwrap_or(0);
            let mut bytes = vec![0; len];
            self.region.read(part.start, &mut bytes)?;
            parts.push((part.start, bytes));
        }
        let place = Box::new(move |number| Some(data + number * block));
        Ok(Some(Image { parts, stored_bytes: block, place }))
    }

    fn metrics(&self, collector: &mut Collector) {
        self.requests.collect(collector);
        memory::collect(&self.region, collector);
    }
}
