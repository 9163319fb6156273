//! A copy of an open stack at one instant, complete by itself, which is made while changes go on.
//! The pool is copied, or the backing if that holds a part of the data.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::{Result, Stack, StackError};
use crate::backing::BackingError;
use crate::device::gate::Gate;
use crate::device::moment::{Claim, Moment};
use crate::device::{BlockDevice, BlockDeviceExt, DeviceError, DeviceErrorKind, Extent, IoBuffer};
use crate::pmem::Region;
use crate::tier::Image;

/// Most bytes of one claim and read.
const READ_BYTES: u64 = 1 << 20;
/// Most extents of one answer.
const STATUS_EXTENTS: usize = 256;

/// The source of a copy.
pub struct Original {
    source: Source,
    top: Arc<dyn BlockDevice>,
    name: String,
    /// Size of the copy in bytes.
    bytes: u64,
}

enum Source {
    Backing(Arc<dyn BlockDevice>),
    Pool(Arc<Region>, Image),
}

/// Bytes of the copy, and their offset.
type Piece = (u64, IoBuffer);

impl Stack {
    /// Prepares a copy of the present content. The caller makes sure that no change is under way
    /// and that the tiers above the pool have flushed; `pool_bytes` is the size of the pool's file.
    ///
    /// # Errors
    /// [`StackError::NotDestaged`]: writes wait for a flush. [`StackError::Backing`]: the backing
    /// keeps no data. [`StackError::Uncopied`]: the engine cannot be copied while it is served, or
    /// the memory failed.
    pub fn original(&self, pool_bytes: u64) -> Result<Original> {
        for tier in &self.tiers {
            tier.check_committed().map_err(|source| self.not_destaged(&**tier, source))?;
        }
        let pool = || self.description.pool.clone();
        if let (Some(backing), Some(url)) = (&self.backing, &self.description.backing) {
            if !backing.geometry().keeps_data {
                let (url, reason) = (url.clone(), "it keeps no data that could be copied".into());
                return Err(BackingError::Unfit { url, reason }.into());
            }
            let (source, name) = (Source::Backing(Arc::clone(backing)), url.clone());
            let bytes = backing.geometry().size_bytes();
            return Ok(Original { source, top: self.top(), name, bytes });
        }
        let (lowest, _) = self.lowest_and_upper();
        let image = lowest.image().and_then(|image| {
            let message = "the engine cannot be copied while it is served: stop its server";
            image.ok_or_else(|| DeviceError::new(DeviceErrorKind::Unsupported, message))
        });
        let image = image.map_err(|source| StackError::Uncopied { pool: pool(), source })?;
        let source = Source::Pool(Arc::clone(&self.region), image);
        Ok(Original { source, top: self.top(), name: pool(), bytes: pool_bytes })
    }
}

impl Original {
    /// Returns the size of the copy in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the name of the backing or pool that is copied.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the size of `copy`, an empty file, and writes a pool's metadata to it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(&self, copy: &File) -> Result<()> {
        copy.set_len(self.bytes).map_err(|source| self.not_written(source))?;
        if let Source::Pool(_, image) = &self.source {
            for (offset, bytes) in &image.parts {
                self.write(copy, *offset, bytes)?;
            }
        }
        Ok(())
    }

    /// Copies ranges of `moment` until none is left. Ranges that changes wait for
    /// ([`Claim::Wanted`]) are read through the tiers, all others below the tiers, after
    /// [`destage`](Stack::destage).
    ///
    /// # Errors
    /// The original cannot be read, or the copy cannot be written.
    pub fn copy(&self, gate: &Arc<Gate>, moment: &Moment, which: Claim, copy: &File) -> Result<()> {
        while let Some(range) = moment.claim(which, READ_BYTES) {
            let pieces = match &self.source {
                Source::Pool(region, image) => self.read_pool(region, image, &range)?,
                Source::Backing(_) if which == Claim::Wanted => {
                    read(&*self.top, &range).map_err(|error| self.not_read(error))?
                }
                Source::Backing(backing) => {
                    read_extents(&**backing, &range).map_err(|error| self.not_read(error))?
                }
            };
            gate.saved(moment, &range);
            for (offset, piece) in pieces {
                self.write(copy, offset, piece.data())?;
            }
        }
        Ok(())
    }

    /// Reads the blocks in `range` from their offsets in the pool; neighbours are read together.
    fn read_pool(&self, region: &Region, image: &Image, range: &Range<u64>) -> Result<Vec<Piece>> {
        let block = u64::from(self.top.geometry().block_bytes);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for offset in (range.start / block..range.end / block).filter_map(|it| (image.place)(it)) {
            match runs.last_mut() {
                Some(run) if run.end == offset => run.end += image.stored_bytes,
                _ => runs.push(offset..offset + image.stored_bytes),
            }
        }
        let read = |run: Range<u64>| {
            let mut piece = buffer(run.end - run.start);
            let read = region.read(run.start, piece.data_mut());
            read.map_err(|error| self.not_read(error.into()))?;
            Ok((run.start, piece))
        };
        runs.into_iter().map(read).collect()
    }

    /// Writes the bytes unless all are zero: the file is one hole at first.
    fn write(&self, copy: &File, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        copy.write_all_at(bytes, offset).map_err(|source| self.not_written(source))
    }

    fn not_written(&self, source: io::Error) -> StackError {
        StackError::CopyNotWritten { original: self.name.clone(), source }
    }

    fn not_read(&self, source: DeviceError) -> StackError {
        StackError::Uncopied { pool: self.name.clone(), source }
    }
}

fn buffer(bytes: u64) -> IoBuffer {
    IoBuffer::new(usize::try_from(bytes).unwrap_or(usize::MAX))
}

type DeviceResult<T> = crate::device::Result<T>;

fn read(device: &dyn BlockDevice, range: &Range<u64>) -> DeviceResult<Vec<Piece>> {
    let mut piece = buffer(range.end - range.start);
    device.read(range.start, piece.data_mut())?;
    Ok(vec![(range.start, piece)])
}

/// Reads the extents that are not known to be zero.
fn read_extents(device: &dyn BlockDevice, range: &Range<u64>) -> DeviceResult<Vec<Piece>> {
    let (mut at, mut pieces) = (range.start, Vec::new());
    while at < range.end {
        for Extent { offset, len, zero, .. } in device.status(at, range.end - at, STATUS_EXTENTS)? {
            at = offset + len;
            if !zero {
                pieces.extend(read(device, &(offset..at))?);
            }
        }
    }
    Ok(pieces)
}
