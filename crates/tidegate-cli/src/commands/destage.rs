//! `tidegate flush` and `tidegate recover` for a pool that holds data of a device.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use tidegate::pmem::RegionOptions;
use tidegate::stack::{REGISTRY, Stack, StackOptions};
use tidegate::tier::Purged;

use crate::pool::map_to_resize;

/// Destages the pool to the device `backing`, and returns the recovery's description. With
/// `salvage` the recovery goes on without records that the pool has lost.
///
/// # Errors
/// The backing cannot be opened, or fails.
pub(super) fn destage(pool: &Path, backing: &str, salvage: bool) -> Result<String> {
    let stack = open(pool, backing, salvage)?;
    stack.drain()?;
    Ok(stack.description().recovered.clone().unwrap_or_default())
}

/// Destages the pool to the device `backing`, and removes its pages.
///
/// # Errors
/// The backing cannot be opened, or fails.
pub(super) fn purge(pool: &Path, backing: &str) -> Result<Purged> {
    let stack = open(pool, backing, false)?;
    let purged = stack.purge()?;
    stack.drain()?;
    Ok(purged)
}

/// Opens the pool over the device `backing`, without a server.
///
/// # Errors
/// The pool or the backing cannot be opened.
pub(super) fn open(pool: &Path, backing: &str, salvage: bool) -> Result<Stack> {
    let shown = pool.display();
    let url = backing.parse().map_err(|error| anyhow!("{shown}: {error}"))?;
    let region = Arc::new(map_to_resize(pool, RegionOptions::default())?);
    let alone = StackOptions::alone(region, pool.to_path_buf());
    Ok(REGISTRY.open(StackOptions { backing: Some(url), salvage, ..alone })?)
}
