//! A copy of a pool that is served, as it is at one instant.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tidegate::device::gate::Gate;

/// What a copy of a served pool needs.
#[derive(Clone)]
pub(crate) struct Source {
    /// The pool's file.
    pub(crate) pool: PathBuf,
    /// Through which all changes by clients go; none where a device behind the pool has a part of
    /// the data.
    pub(crate) gate: Option<Arc<Gate>>,
}

/// A copy that was made.
pub(crate) struct Made {
    pub(crate) bytes: u64,
    /// How long writes of clients had to wait.
    pub(crate) held: Duration,
}

impl Source {
    /// Copies the pool to `file`: holds changes of clients back, has the tiers above the pool write
    /// what they hold, and copies. On a file system that can, the copy shares its extents.
    ///
    /// # Errors
    /// The pool is no file or has a backing; there is a file already; a tier or the disk fails.
    pub(crate) fn copy_to(&self, file: &Path) -> Result<Made> {
        let (pool, to) = (self.pool.display(), file.display());
        let Some(gate) = &self.gate else {
            bail!(
                "{pool} has a backing, whose blocks no copy of the pool has: stop its server, \
                 `tidegate flush` the pool, and copy the backing, which then is complete by itself"
            );
        };
        let mut from = File::open(&self.pool).with_context(|| format!("cannot open {pool}"))?;
        if !from.metadata().is_ok_and(|found| found.is_file()) {
            bail!("{pool} is a device, which cannot be read as a file: stop its server to copy it");
        }
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let mut copy = options.open(file).with_context(|| format!("cannot make {to}"))?;
        let made = copy_held(gate, &mut from, &mut copy);
        if made.is_err() {
            // Half a copy is none.
            let _ = std::fs::remove_file(file);
        }
        made.with_context(|| format!("cannot copy {pool} to {to}"))
    }
}

fn copy_held(gate: &Arc<Gate>, from: &mut File, copy: &mut File) -> Result<Made> {
    let began = Instant::now();
    let held = gate.hold();
    gate.below().flush()?;
    let bytes = io::copy(from, copy)?;
    drop(held);
    let held = began.elapsed();
    copy.sync_all()?;
    Ok(Made { bytes, held })
}
