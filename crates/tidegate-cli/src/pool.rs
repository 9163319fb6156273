//! Opens pools: from a path to a region, from a region to the engine that its header names.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use tidegate::btt::Btt;
use tidegate::device::BlockDevice;
use tidegate::log::LogPool;
use tidegate::log::device::{LogDevice, LogDeviceError, LogDeviceOptions, has_records_of};
use tidegate::pmem::{Region, RegionOptions};
use tidegate::pool::{Content, PoolKind, identify};
use tidegate::raw::RawDevice;

use crate::args::{Engine, MemoryArgs, ServeArgs};
use crate::backing::{self, Backing};
use crate::output::counted;
use tidegate::size::Size;

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
        PoolKind::Tidegate(found) => Ok(match found.superblock.engine {
            tidegate::pool::Engine::Log => Engine::Log,
            _ => Engine::Raw,
        }),
        PoolKind::Unknown(found) => Err(no_pool(region, found)),
    }
}

fn no_pool(region: &Region, found: Content) -> anyhow::Error {
    anyhow!(
        "{} holds no pool: it starts with {found}, a btt, raw or log header is expected; make a pool with `tidegate create`, \
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
    /// What recovery found, in words.
    pub(crate) recovered: String,
    /// The log, where the pool is one.
    pub(crate) log: Option<Arc<LogDevice>>,
    /// Keeps others from the backing of the log.
    _backing: Option<File>,
}

impl Pool {
    /// Brings what a log holds to its backing, which then has all by itself.
    ///
    /// # Errors
    /// The backing failed; the log keeps what it did not take.
    pub(crate) fn close(&self) -> Result<()> {
        let Some(log) = &self.log else { return Ok(()) };
        log.shutdown().with_context(|| {
            let pool = self.region.name().display();
            format!("what {pool} holds cannot be brought to its backing: it stays in the log, serve it again")
        })
    }
}

/// Opens the pool that `args` name, and so recovers it.
///
/// # Errors
/// It cannot be mapped, holds no pool, or is damaged; a log lacks its backing, or another pool has one.
pub(crate) fn open(args: &ServeArgs) -> Result<Pool> {
    let region = Arc::new(map(&args.pool, &args.memory, args.read_only)?);
    let engine = expect_engine(&region)?;
    if engine == Engine::Log {
        return open_log(args, region);
    }
    if args.backing.is_some() {
        bail!(
            "{} is a {engine} pool, which needs no --backing: it holds all blocks itself",
            args.pool.display()
        );
    }
    let (device, lanes) = open_engine(&region, engine)?;
    let recovered = counted(lanes.into(), "unfinished write");
    Ok(Pool { device, engine, region, recovered, log: None, _backing: None })
}

/// Opens the pool that `region` maps, whose engine is known, and says how many writes recovery completed; of a
/// read-only region it changes nothing.
///
/// # Errors
/// It is damaged.
pub(crate) fn open_engine(region: &Arc<Region>, engine: Engine) -> Result<Opened> {
    match engine {
        Engine::Btt => open_btt(region).with_context(|| in_pool(region)),
        Engine::Raw => open_raw(region).with_context(|| in_pool(region)),
        Engine::Log => {
            bail!("{} is a log pool, which holds no blocks of its own", region.name().display())
        }
    }
}

type Opened = (Arc<dyn BlockDevice>, u32);

fn open_raw(region: &Arc<Region>) -> Result<Opened> {
    Ok((Arc::new(RawDevice::open(Arc::clone(region))?), 0))
}

fn open_btt(region: &Arc<Region>) -> Result<Opened> {
    let btt = Btt::open(Arc::clone(region))?;
    let recovered_lanes = btt.summary().recovered_lanes;
    Ok((Arc::new(btt), recovered_lanes))
}

fn open_log(args: &ServeArgs, region: Arc<Region>) -> Result<Pool> {
    let pool = args.pool.display();
    let Some(address) = &args.backing else {
        bail!(
            "{pool} is a log pool: name the file or block device behind the log by --backing, or use it for `tidegate run`"
        );
    };
    if args.read_only {
        bail!(
            "{pool} is a log pool, which cannot be served --read-only: its backing may lack what the log holds"
        );
    }
    let backing = backing::open(address, &args.pool)?;
    let opened = LogPool::open(Arc::clone(&region)).map_err(LogDeviceError::from);
    let opened = opened.map_err(|error| refused(error, args))?;
    // One that this log was before already may hold whatever was written to it.
    if !args.force
        && let Some(found) = backing::pool_in(address, &backing)?
        && !has_records_of(&opened, &backing.binding).map_err(|error| refused(error, args))?
    {
        bail!(
            "the backing {address} holds {found}, which the writes to the log would destroy; --force uses it all the same"
        );
    }
    let options = LogDeviceOptions { adopt_foreign: args.force, ..LogDeviceOptions::default() };
    let Backing { device: backing, binding, lock } = backing;
    let device = LogDevice::open(opened, Arc::new(backing), binding, options);
    let device = Arc::new(device.map_err(|error| refused(error, args))?);
    let found = device.recovered();
    let recovered = format!(
        "{} ({}) that the backing may lack",
        counted(found.records, "write"),
        Size { bytes: found.bytes }
    );
    let log = Some(Arc::clone(&device));
    Ok(Pool { device, engine: Engine::Log, region, recovered, log, _backing: Some(lock) })
}

fn refused(error: LogDeviceError, args: &ServeArgs) -> anyhow::Error {
    let hint = match error {
        LogDeviceError::OtherBacking { .. } => {
            "; --force brings what the log holds to this one, `tidegate recover --discard` throws it away"
        }
        _ => "",
    };
    anyhow!(error).context(format!("cannot serve {}{hint}", args.pool.display()))
}
