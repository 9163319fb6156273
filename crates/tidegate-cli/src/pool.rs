//! Maps pools, and names them in errors.

use std::path::Path;

use anyhow::Result;
use tidegate::pmem::{Region, RegionOptions};

use crate::args::MemoryArgs;

/// The most bytes that a pool can grow to while it is open: reserves addresses, and no memory.
const LIMIT_BYTES: u64 = 1 << 40;

/// Maps the pool at `path`, which must exist, with addresses in reserve so that it can grow.
///
/// # Errors
/// The pool cannot be opened or mapped, or is in use.
pub(crate) fn map_to_resize(path: &Path, options: RegionOptions) -> Result<Region> {
    Ok(Region::open(path, &RegionOptions { limit_bytes: LIMIT_BYTES, ..options })?)
}

/// Maps the pool at `path`, which must exist.
///
/// # Errors
/// The pool cannot be opened or mapped, or is in use.
pub(crate) fn map(path: &Path, memory: &MemoryArgs, read_only: bool) -> Result<Region> {
    Ok(Region::open(path, &RegionOptions { read_only, ..memory.region_options() })?)
}

/// Returns the context of an error inside the pool that `region` maps.
pub(crate) fn in_pool(region: &Region) -> String {
    format!("pool {}", region.name().display())
}
