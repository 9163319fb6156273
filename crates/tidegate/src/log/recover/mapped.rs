//! The extents of an open file on its disk, from the kernel (`FS_IOC_FIEMAP`).
#![allow(unsafe_code, reason = "no safe crate has this request")]

use std::io;
use std::mem::size_of;
use std::os::fd::AsFd;

use rustix::ioctl::{Opcode, Updater, ioctl};

const FS_IOC_FIEMAP: Opcode = 0xC020_660B;
/// Set for the last extent of a file.
const LAST: u32 = 0x0001;

/// An extent: the kernel's `struct fiemap_extent`.
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
    /// Makes an extent of `len` bytes from byte `start` on.
    pub fn new(start: u64, len: u64, flags: u32) -> Self {
        Self { start, len, flags, ..Self::default() }
    }

    /// Returns whether no extent of the file follows this one.
    pub fn is_last(&self) -> bool {
        self.flags & LAST != 0
    }

    /// Returns the first byte behind the extent.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

/// Up to `N` extents of a file: the kernel's `struct fiemap`. Allocates no memory.
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
    /// Returns the first `N` extents of the open file that overlap the `len` bytes at `start`.
    ///
    /// # Errors
    /// The file system cannot list extents.
    pub fn of(file: impl AsFd, start: u64, len: u64) -> io::Result<Self> {
        let space = u32::try_from(N).unwrap_or(0);
        let extents = [MappedExtent::default(); N];
        let mut this = Self { start, len, flags: 0, found: 0, space, reserved: 0, extents };
        // SAFETY: `FS_IOC_FIEMAP` takes a `struct fiemap`, which `Self` mirrors.
        let request = unsafe { Updater::<FS_IOC_FIEMAP, Self>::new(&mut this) };
        // SAFETY: the kernel fills at most `space` of the `N` extents, and an extent may have any
        // bits.
        unsafe { ioctl(file, request) }?;
        Ok(this)
    }

    /// Returns the extents, in the order of the file.
    pub fn as_slice(&self) -> &[MappedExtent] {
        &self.extents[..usize::try_from(self.found).unwrap_or(0).min(N)]
    }
}
