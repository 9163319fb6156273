//! A copy of the backing of an open stack that is complete by itself.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::ioctl_ficlone;

use super::{Result, Stack, StackError};
use crate::backing::BackingError;
use crate::device::{BlockDevice, Extent, IoBuffer};

/// Most bytes of one read of the backing.
const READ_BYTES: usize = 1 << 20;
/// Most bytes whose allocation is asked for at once, and most extents of an answer.
const STATUS_BYTES: u64 = 1 << 30;
const STATUS_EXTENTS: usize = 256;

impl Stack {
    /// Has every tier write what it holds to the tier below, and copies the backing to `copy`, an
    /// empty file. The copy then has all writes that were acknowledged before. The caller holds
    /// changes back meanwhile. A copy on the file system of the backing shares its extents where
    /// that can (XFS, Btrfs); elsewhere all is copied that is not known to be zero.
    ///
    /// Returns the size of the copy in bytes.
    ///
    /// # Errors
    /// [`StackError::NoBacking`], [`StackError::NotDestaged`]; or the backing cannot be read, or
    /// the copy not be written.
    pub fn copy_backing(&self, copy: &File) -> Result<u64> {
        let (Some(backing), Some(url)) = (&self.backing, &self.description.backing) else {
            return Err(StackError::NoBacking { pool: self.description.pool.clone() });
        };
        if !backing.geometry().keeps_data {
            let (url, reason) = (url.clone(), "it keeps no data that could be copied".into());
            return Err(BackingError::Unfit { url, reason }.into());
        }
        for tier in &self.tiers {
            tier.destage().map_err(|source| self.not_destaged(&**tier, source))?;
        }
        let shared = self
            .behind
            .as_ref()
            .and_then(|behind| behind.claim.as_ref())
            .is_some_and(|it| ioctl_ficlone(copy, it.file()).is_ok());
        if !shared {
            copy_extents(&**backing, copy, url)?;
        }
        Ok(backing.geometry().size_bytes())
    }
}

/// Copies what `device` holds to `copy`, which has holes for what is zero.
fn copy_extents(
    device: &dyn BlockDevice,
    copy: &File,
    url: &str,
) -> std::result::Result<(), BackingError> {
    let size_bytes = device.geometry().size_bytes();
    copy.set_len(size_bytes).map_err(|source| not_written(url, source))?;
    let mut buffer = IoBuffer::new(READ_BYTES);
    let mut at = 0;
    while at < size_bytes {
        let len = (size_bytes - at).min(STATUS_BYTES);
        for Extent { offset, len, zero, .. } in device.status(at, len, STATUS_EXTENTS)? {
            at = offset + len;
            let mut from = if zero { at } else { offset };
            while from < at {
                let rest = usize::try_from(at - from).unwrap_or(READ_BYTES);
                buffer.reset(rest.min(READ_BYTES));
                device.read(from, buffer.data_mut())?;
                copy.write_all_at(buffer.data(), from).map_err(|it| not_written(url, it))?;
                from += buffer.data().len() as u64;
            }
        }
    }
    Ok(())
}

fn not_written(url: &str, source: io::Error) -> BackingError {
    BackingError::Io { action: "write the copy of", url: url.to_owned(), source }
}
