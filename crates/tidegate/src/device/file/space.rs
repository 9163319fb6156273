//! Space of a file: holes, zeroes, and where they are.
//!
//! A discard punches a hole, on a file as on a block device. `BLKDISCARD` is not used: a disk may
//! return anything after it, while discarded blocks must read as zeroes or old bytes.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Errno, retry_on_intr};

use super::{Backing, Extent, Result, ZeroFlags};

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);

/// Whether the kernel zeroed a range.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Zeroed {
    Done,
    /// Not on this file system or disk.
    NotHere,
}

impl Backing {
    /// Frees space if the file system or the disk can; otherwise the old bytes stay, as a discard
    /// allows.
    pub(super) fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let file = self.reopened_file();
        self.fallocate(&file, PUNCH, offset, len, "discard").map(|_| ())
    }

    /// Zeroes a range of `file` without moving zeroes. The device refuses fast zeroes on a disk
    /// without a command for zeroes, because the kernel writes zeroes block by block for
    /// `ZERO_RANGE` there.
    pub(super) fn zero_by_kernel(
        &self,
        file: &File,
        offset: u64,
        len: u64,
        flags: ZeroFlags,
    ) -> Result<Zeroed> {
        let zero = |mode| self.fallocate(file, mode, offset, len, "zeroing");
        if flags.may_unmap && zero(PUNCH)? == Zeroed::Done {
            return Ok(Zeroed::Done);
        }
        zero(ZERO)
    }

    fn fallocate(
        &self,
        file: &File,
        mode: FallocateFlags,
        offset: u64,
        len: u64,
        what: &str,
    ) -> Result<Zeroed> {
        if len == 0 {
            return Ok(Zeroed::Done);
        }
        match retry_on_intr(|| rustix::fs::fallocate(file, mode, offset, len)) {
            Ok(()) => Ok(Zeroed::Done),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => Ok(Zeroed::NotHere),
            Err(errno) => Err(self.failed(what, offset, len, errno)),
        }
    }

    /// Returns the holes and the data of a range.
    pub(super) fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        let end = offset + len;
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end && extents.len() < most.max(1) {
            let (hole, stop) = self.run_at(at)?;
            // A block that holds any data counts as data.
            let block = u64::from(self.geometry.block_bytes);
            let whole = if hole { stop - stop % block } else { stop.next_multiple_of(block) };
            let stop = whole.max(at + block).min(end);
            let hole = hole && whole > at;
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.len += stop - at,
                _ => extents.push(Extent { offset: at, len: stop - at, hole, zero: hole }),
            }
            at = stop;
        }
        Ok(extents)
    }

    /// Returns whether a hole is at `at`, and where the hole or the data ends.
    fn run_at(&self, at: u64) -> Result<(bool, u64)> {
        let (file, size) = (self.reopened_file(), self.geometry.size_bytes());
        match rustix::fs::seek(&*file, SeekFrom::Data(at)) {
            Ok(data) if data > at => Ok((true, data)),
            Ok(_) => match rustix::fs::seek(&*file, SeekFrom::Hole(at)) {
                Ok(hole) if hole > at => Ok((false, hole.min(size))),
                Ok(_) | Err(Errno::INVAL | Errno::NXIO) => Ok((false, size)),
                Err(errno) => Err(self.failed("search for a hole", at, size - at, errno)),
            },
            Err(Errno::NXIO) => Ok((true, size)),
            // A block device, or a file system that does not know its holes.
            Err(Errno::INVAL) => Ok((false, size)),
            Err(errno) => Err(self.failed("search for data", at, size - at, errno)),
        }
    }
}

/// Reports whether the kernel zeroes ranges of this file without writing zeroes.
pub(super) fn is_zeroing_fast(file: &File, metadata: &Metadata, size: u64) -> bool {
    if metadata.file_type().is_block_device() {
        return has_zero_command(metadata.rdev());
    }
    // Punching a hole beyond the end changes nothing, and tests the support.
    let past = size.next_multiple_of(1 << 20);
    past < 1 << 62 && retry_on_intr(|| rustix::fs::fallocate(file, PUNCH, past, 4096)).is_ok()
}

/// Reports whether the disk has a command for zeroes.
fn has_zero_command(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has no queue; the queue of its disk is one folder up.
    ["queue", "../queue"].iter().any(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes");
        std::fs::read_to_string(path).is_ok_and(|text| text.trim() != "0")
    })
}
