//! Where the bytes of an open file lie on its disk, as the kernel tells it (`FS_IOC_FIEMAP`).
#![allow(unsafe_code, reason = "no safe crate has this request")]

use std::io;
use std::mem::size_of;
use std::os::fd::AsFd;

use rustix::ioctl::{Opcode, Updater, ioctl};

const FS_IOC_FIEMAP: Opcode = 0xC020_660B;
/// Set for the last extent of a file.
const LAST: u32 = 0x0001;

/// One extent: the kernel's `struct fiemap_extent`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct MappedExtent {
    /// First byte in the file.
    pub start: u64,
    physical: u64,
    /// Length in bytes.
    pub len: u64,
    reserved: [u64; 2],
    /// The kernel's `FIEMAP_EXTENT_` flags.
    pub flags: u32,
    reserved_words: [u32; 3],
}

impl MappedExtent {
    /// An extent of `len` bytes from byte `start` on.
    pub fn new(start: u64, len: u64, flags: u32) -> Self {
        Self { start, len, flags, ..Self::default() }
    }

    /// No extent of the file is behind this one.
    pub fn is_last(&self) -> bool {
        self.flags & LAST != 0
    }

    /// First byte behind the extent.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

/// Up to `N` extents of a file: the kernel's `struct fiemap`. Takes no memory but its own.
#[repr(C)]
#[derive(Debug)]
pub struct MappedExtents<const N: usize> {
    start: u64,
    len: u64,
    flags: u32,
    found: u32,
    space: u32,
    reserved: u32,
    extents: [MappedExtent; N],
}

const _: () = assert!(size_of::<MappedExtents<1>>() == 32 + 56);

impl<const N: usize> MappedExtents<N> {
    /// The extents of the open file that have a byte of the `len` at `start`, the first `N` of
    /// them.
    ///
    /// # Errors
    /// The file system cannot tell.
    pub fn of(file: impl AsFd, start: u64, len: u64) -> io::Result<Self> {
        let space = u32::try_from(N).unwrap_or(0);
        let extents = [MappedExtent::default(); N];
        let mut this = Self { start, len, flags: 0, found: 0, space, reserved: 0, extents };
        // SAFETY: the request of this number takes this structure.
        let request = unsafe { Updater::<FS_IOC_FIEMAP, Self>::new(&mut this) };
        // SAFETY: the kernel fills as many extents as `free space` says that there are, all with
        // numbers.
        unsafe { ioctl(file, request) }?;
        Ok(this)
    }

    /// What was found, in the order of the file.
    pub fn as_slice(&self) -> &[MappedExtent] {
        &self.extents[..usize::try_from(self.found).unwrap_or(0).min(N)]
    }
}
