//! Opens pools: from a path to a region, from a region to the engine that its header names.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use tidegate::btt::{Btt, BttError};
use tidegate::device::BlockDevice;
use tidegate::pmem::{Domain, Kind, Region, RegionOptions};
use tidegate::pool::{Content, PoolError, PoolKind, identify};
use tidegate::raw::RawDevice;

use crate::args::{Engine, MemoryArgs};

/// Maps the pool at `path`, which must exist.
///
/// # Errors
/// It cannot be opened or mapped, or is in use.
pub(crate) fn map(path: &Path, memory: &MemoryArgs, read_only: bool) -> Result<Region> {
    Ok(Region::open(path, &RegionOptions { read_only, ..memory.region_options() })?)
}

/// The engine of the pool in `region`; the rest of the pool may be damaged.
///
/// # Errors
/// There is no pool, its header cannot be used, or the memory failed.
pub(crate) fn expect_engine(region: &Region) -> Result<Engine> {
    match identify(region).with_context(|| in_pool(region))? {
        PoolKind::Btt(_) => Ok(Engine::Btt),
        PoolKind::Tidegate(_) => Ok(Engine::Raw),
        PoolKind::Unknown(found) => Err(no_pool(region, found)),
    }
}

fn no_pool(region: &Region, found: Content) -> anyhow::Error {
    anyhow!(
        "{} holds no pool: it starts with {found}, a btt or raw header is expected; make a pool with `tidegate create`, \
         or try `tidegate check` if one was there",
        region.name().display()
    )
}

/// The context of an error inside the pool that `region` maps.
pub(crate) fn in_pool(region: &Region) -> String {
    format!("pool {}", region.name().display())
}

/// An open pool.
pub(crate) struct Pool {
    /// The pool as a block device.
    pub(crate) device: Arc<dyn BlockDevice>,
    /// Which engine it is.
    pub(crate) engine: Engine,
    /// The memory under it.
    pub(crate) region: Arc<Region>,
    /// Writes that recovery completed.
    pub(crate) recovered_lanes: u32,
}

/// Opens the pool at `path`, and so recovers it.
///
/// # Errors
/// It cannot be mapped, holds no pool, or is damaged.
pub(crate) fn open(path: &Path, memory: &MemoryArgs, read_only: bool) -> Result<Pool> {
    let region = Arc::new(map(path, memory, read_only)?);
    let engine = expect_engine(&region)?;
    let (device, recovered_lanes) = match engine {
        Engine::Btt => open_btt(&region).with_context(|| in_pool(&region))?,
        Engine::Raw => open_raw(&region).with_context(|| in_pool(&region))?,
    };
    Ok(Pool { device, engine, region, recovered_lanes })
}

type Opened = (Arc<dyn BlockDevice>, u32);

fn open_raw(region: &Arc<Region>) -> Result<Opened, PoolError> {
    Ok((Arc::new(RawDevice::open(Arc::clone(region))?), 0))
}

fn open_btt(region: &Arc<Region>) -> Result<Opened, BttError> {
    let btt = Btt::open(Arc::clone(region))?;
    let recovered_lanes = btt.summary().recovered_lanes;
    Ok((Arc::new(btt), recovered_lanes))
}

/// What a power cut means for acknowledged writes on `region`, in words.
pub(crate) fn power_cut(region: &Region) -> &'static str {
    match (region.kind(), region.domain()) {
        (_, Domain::Volatile) | (Kind::Anonymous, _) => {
            "NOTHING SURVIVES: for tests and trials only"
        }
        (Kind::Tmpfs, _) => "the whole pool is lost (tmpfs); a killed process loses nothing",
        (Kind::File, Domain::Adr | Domain::Eadr) => {
            "what the page cache holds is lost; a killed process loses nothing (this file calls for --domain msync)"
        }
        (Kind::File, Domain::Msync) => {
            "acknowledged writes survive, if the disk keeps what was synced to it"
        }
        (Kind::Fsdax | Kind::Devdax, Domain::Eadr) => {
            "acknowledged writes survive, if the platform flushes its CPU caches then"
        }
        (Kind::Fsdax | Kind::Devdax, Domain::Adr | Domain::Msync) => "acknowledged writes survive",
    }
}
