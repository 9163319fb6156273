//! A copy of a pool that is served, or of its backing, as it is at one instant.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::served::Served;

/// A copy that was made.
pub(crate) struct Made {
    pub(crate) bytes: u64,
    /// How long writes of clients had to wait.
    pub(crate) held: Duration,
    /// The backing that was copied; none where the pool was.
    pub(crate) backing: Option<String>,
}

impl Served {
    /// Copies the pool to `file`: holds changes of clients back, has the tiers above the pool write
    /// what they hold, and copies. Where a backing has a part of the data, all tiers write what
    /// they hold to it, and the backing is copied. On a file system that can, the copy shares
    /// extents.
    ///
    /// # Errors
    /// The pool is no file; there is a file already; a tier or a disk fails.
    pub(crate) fn copy_to(&self, file: &Path) -> Result<Made> {
        let (pool, to) = (self.plan.pool.display(), file.display());
        let pool_file = match self.stack.description().backing {
            Some(_) => None,
            None => Some(self.open_pool()?),
        };
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let copy = options.open(file).with_context(|| format!("cannot make {to}"))?;
        let made = self.copy_held(pool_file, &copy);
        if made.is_err() {
            // Half a copy is none.
            let _ = std::fs::remove_file(file);
        }
        made.with_context(|| format!("cannot copy {pool} to {to}"))
    }

    fn open_pool(&self) -> Result<File> {
        let pool = self.plan.pool.display();
        // With a position of its own.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = File::open(path).with_context(|| format!("cannot open {pool}"))?;
        if !file.metadata().is_ok_and(|found| found.is_file()) {
            bail!("{pool} is a device, which cannot be read as a file: stop its server to copy it");
        }
        Ok(file)
    }

    /// Copies `pool_file`, or else the backing.
    fn copy_held(&self, pool_file: Option<File>, mut copy: &File) -> Result<Made> {
        let began = Instant::now();
        let held = self.gate.hold();
        let bytes = match pool_file {
            Some(mut pool_file) => {
                self.gate.below().flush()?;
                io::copy(&mut pool_file, &mut copy)?
            }
            None => self.stack.copy_backing(copy)?,
        };
        drop(held);
        let held = began.elapsed();
        copy.sync_all()?;
        Ok(Made { bytes, held, backing: self.stack.description().backing.clone() })
    }
}
