//! How a path becomes mapped memory, and the kind of that memory.
//!
//! Invariants:
//! 1. The mapping covers `len_bytes` bytes from `base` as long as the [`Mapping`] lives. A mapping
//!    that may grow covers the addresses up to its limit from the start, so that no byte ever
//!    moves: the kernel backs the addresses behind the end of the file with memory only when the
//!    file has grown. After the file was cut, private zero bytes cover the addresses from its end
//!    to the longest length that it had, so that a late access finds memory.
//! 2. A pool file is locked (advisory, exclusive for writing) as long.
//! 3. A file that is made here has all of its space allocated, so that no store fails on a full
//!    file system.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::FlockOperation;
use rustix::mm::{MapFlags, ProtFlags};

use super::{Domain, PmemError};
use crate::locking::{self, LockMode};
use crate::opening::{self, Expected, WrongKind, devdax_bytes, devdax_number};

type Result<T> = std::result::Result<T, PmemError>;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Alignment of a devdax device's mappings, if the device does not tell it.
const DEVDAX_ALIGN_BYTES: u64 = 2 << 20;
/// Size of a huge page. Huge pages of other sizes are not used.
const HUGE_BYTES: u64 = 2 << 20;
/// The kernel's number, since Linux 6.1; the crate libc lacks it.
const MADV_COLLAPSE: libc::c_int = 25;

/// The kind of memory under a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum Kind {
    /// A file on a DAX file system, mapped with `MAP_SYNC`: stores reach the medium without the
    /// kernel.
    #[strum(serialize = "fsdax (MAP_SYNC)")]
    Fsdax,
    /// A devdax character device.
    #[strum(serialize = "devdax")]
    Devdax,
    /// A file in tmpfs, which stands for persistent memory.
    #[strum(serialize = "tmpfs")]
    Tmpfs,
    /// A file behind the page cache.
    #[strum(serialize = "ordinary file")]
    File,
    /// Memory of this process.
    #[strum(serialize = "anonymous memory")]
    Anonymous,
}

impl Kind {
    /// Returns the domain for this kind of memory.
    pub(super) fn domain(self) -> Domain {
        match self {
            Self::Fsdax | Self::Devdax | Self::Tmpfs => Domain::Adr,
            Self::File => Domain::Msync,
            Self::Anonymous => Domain::Volatile,
        }
    }
}

/// Mapped memory.
pub(super) struct Mapping {
    base: NonNull<u8>,
    /// The length; never beyond the mapped bytes.
    len_bytes: AtomicU64,
    /// The longest length so far: all of its bytes can be accessed.
    reach_bytes: AtomicU64,
    /// Number of mapped bytes.
    limit_bytes: u64,
    /// Bytes whose memory is the file, even behind the file's end. Locked while the length changes.
    backed_bytes: Mutex<u64>,
    kind: Kind,
    page_bytes: u64,
    /// Holds the lock, and allocates space.
    file: Option<File>,
}

// SAFETY: the mapping is shared memory that is reached only through raw pointers. It stays mapped
// until its drop, on whichever thread that happens.
unsafe impl Send for Mapping {}
// SAFETY: the mapping never moves, and gives out raw pointers only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the file or device at `path`; a file so that it can grow to `limit_bytes`.
    pub(super) fn open(path: &Path, read_only: bool, limit_bytes: u64) -> Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(!read_only);
        let file = opening::open(path, Expected::Pool, options).map_err(not_opened(path))?;
        let metadata = file.metadata().map_err(os("inspect", path))?;
        lock(&file, path, read_only)?;
        if metadata.file_type().is_char_device() {
            Self::of_devdax(file, path, metadata.rdev(), read_only)
        } else {
            Self::of_file(file, path, read_only, limit_bytes)
        }
    }

    /// Creates the file at `path` with `len_bytes` bytes of allocated space, and maps it so that it
    /// can grow to `limit_bytes`. Removes the file again if the space cannot be had.
    pub(super) fn create(
        path: &Path,
        len_bytes: u64,
        sparse: bool,
        limit_bytes: u64,
    ) -> Result<Self> {
        let file = create_file(path, len_bytes)?;
        lock(&file, path, false)?;
        let made = if sparse { file.set_len(len_bytes) } else { allocate(&file, 0, len_bytes) };
        let made = made
            .and_then(|()| file.sync_all())
            .and_then(|()| sync_parent(path))
            .map_err(os("allocate space for", path))
            .and_then(|()| Self::of_file(file, path, false, limit_bytes));
        if made.is_err() {
            // Best effort: the caller gets the error that matters.
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Maps the pool file at `path` beside processes that have it open.
    pub(super) fn open_guest(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path).map_err(os("open", path))?;
        let metadata = file.metadata().map_err(os("inspect", path))?;
        if metadata.file_type().is_char_device() {
            return Self::of_devdax(file, path, metadata.rdev(), false).map(Self::closed);
        }
        Self::of_file(file, path, false, 0).map(Self::closed)
    }

    /// Closes the file's descriptor, which a program that only uses the memory does not need.
    fn closed(mut self) -> Self {
        self.file = None;
        self
    }

    /// Creates the file at `path` with `len_bytes` zero bytes, for its owner alone. The file system
    /// has space for all of them: a store to a hole in a full one would end the process.
    pub(super) fn create_shared(path: &Path, len_bytes: u64) -> Result<Self> {
        let file = create_file(path, len_bytes)?;
        let made = allocate(&file, 0, len_bytes).map_err(os("allocate space for", path));
        made.and_then(|()| Self::of_file(file, path, false, 0)).inspect_err(|_| {
            // The first error is returned.
            let _ = std::fs::remove_file(path);
        })
    }

    /// Maps a file that the caller owns and that no other user can write.
    pub(super) fn open_shared(path: &Path) -> Result<Self> {
        let mut open = File::options();
        let open = open.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let file = open.open(path).map_err(os("open", path))?;
        let metadata = file.metadata().map_err(os("inspect", path))?;
        let owner = rustix::process::geteuid().as_raw();
        if metadata.uid() != owner || metadata.mode() & 0o022 != 0 {
            let found = format!("it has owner {} and mode {:o}", metadata.uid(), metadata.mode());
            let source = io::Error::new(io::ErrorKind::PermissionDenied, found);
            return Err(os("trust", path)(source));
        }
        Self::of_file(file, path, false, 0).map(Self::closed)
    }

    /// Maps `len_bytes` zero bytes of this process and its forks.
    pub(super) fn anonymous_shared(len_bytes: u64) -> Result<Self> {
        Self::anonymous_with(len_bytes, 0, MapFlags::SHARED)
    }

    /// Maps `len_bytes` zero bytes of this process, which can grow to `limit_bytes`.
    pub(super) fn anonymous(len_bytes: u64, limit_bytes: u64) -> Result<Self> {
        Self::anonymous_with(len_bytes, limit_bytes, MapFlags::PRIVATE)
    }

    /// Maps `len_bytes` zero bytes of this process, of which the system need not have memory before
    /// they are written.
    pub(super) fn anonymous_sparse(len_bytes: u64) -> Result<Self> {
        Self::anonymous_with(len_bytes, 0, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    fn anonymous_with(len_bytes: u64, limit_bytes: u64, flags: MapFlags) -> Result<Self> {
        let path = PathBuf::from("(anonymous memory)");
        if len_bytes == 0 {
            return Err(PmemError::Empty { path });
        }
        let limit_bytes = limit_bytes.max(len_bytes);
        let (at, len) = (std::ptr::null_mut(), to_usize(limit_bytes));
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no other memory.
        let mapped = unsafe { rustix::mm::mmap_anonymous(at, len, READ_WRITE, flags) };
        let base = mapped.map_err(|errno| os("map", &path)(errno.into()))?;
        Ok(Self::new(base, (len_bytes, limit_bytes), Kind::Anonymous, page_bytes(), None))
    }

    /// Asks for huge pages, which need fewer translations for random accesses. Best effort.
    pub(super) fn prefer_huge_pages(&self) {
        let (base, len) = (self.base.as_ptr().cast(), to_usize(self.len_bytes()));
        // SAFETY: the pages are this mapping's own; the advice changes no memory.
        let _ = unsafe { rustix::mm::madvise(base, len, rustix::mm::Advice::LinuxHugepage) };
    }

    fn of_file(file: File, path: &Path, read_only: bool, limit_bytes: u64) -> Result<Self> {
        let len_bytes = file.metadata().map_err(os("inspect", path))?.len();
        if len_bytes == 0 {
            return Err(PmemError::Empty { path: path.to_path_buf() });
        }
        let limit_bytes = limit_bytes.max(len_bytes);
        let (limit_bytes, (base, synced)) = match map_file(&file, limit_bytes, read_only) {
            // The process may not have so many addresses.
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                (len_bytes, map_file(&file, len_bytes, read_only).map_err(os("map", path))?)
            }
            mapped => (limit_bytes, mapped.map_err(os("map", path))?),
        };
        let kind = match synced {
            true => Kind::Fsdax,
            false if on_tmpfs(&file).map_err(os("inspect", path))? => Kind::Tmpfs,
            false => Kind::File,
        };
        Ok(Self::new(base, (len_bytes, limit_bytes), kind, page_bytes(), Some(file)))
    }

    fn of_devdax(file: File, path: &Path, device: u64, read_only: bool) -> Result<Self> {
        let Some(len_bytes) = devdax_bytes(device) else {
            let found = "a character device that is no devdax device";
            return Err(PmemError::NotMappable { path: path.to_path_buf(), found });
        };
        let align_bytes = devdax_number(device, "align").unwrap_or(DEVDAX_ALIGN_BYTES);
        let base = map(&file, len_bytes, read_only, MapFlags::SHARED).map_err(os("map", path))?;
        Ok(Self::new(base, (len_bytes, len_bytes), Kind::Devdax, align_bytes, Some(file)))
    }

    fn new(
        base: *mut std::ffi::c_void,
        (len_bytes, limit_bytes): (u64, u64),
        kind: Kind,
        page_bytes: u64,
        file: Option<File>,
    ) -> Self {
        // The handler of memory errors makes pointers from fault addresses.
        base.expose_provenance();
        let base = NonNull::new(base.cast()).expect("mmap returns no null pointer");
        let (reach_bytes, backed_bytes) = (AtomicU64::new(len_bytes), Mutex::new(limit_bytes));
        let len_bytes = AtomicU64::new(len_bytes);
        Self { base, len_bytes, reach_bytes, limit_bytes, backed_bytes, kind, page_bytes, file }
    }

    #[inline]
    pub(super) fn len_bytes(&self) -> u64 {
        // Acquire: the bytes that a grown length makes reachable are there.
        self.len_bytes.load(Ordering::Acquire)
    }

    /// Returns the most bytes that the mapping can have.
    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Returns the most bytes that the mapping had so far; they can be accessed.
    #[inline]
    pub(super) fn reach_bytes(&self) -> u64 {
        // Acquire: the bytes that a grown length makes reachable are there.
        self.reach_bytes.load(Ordering::Acquire)
    }

    /// Makes the mapping `len_bytes` bytes long, at most the limit: allocates the space of the
    /// file, then makes its new size durable, then lets threads reach the bytes. Does nothing if
    /// the mapping is that long already.
    pub(super) fn grow(&self, len_bytes: u64) -> io::Result<()> {
        let mut backed_bytes = self.backed_bytes.lock();
        let old_bytes = self.len_bytes();
        if len_bytes <= old_bytes {
            return Ok(());
        }
        if let Some(file) = &self.file {
            let grown = allocate(file, old_bytes, len_bytes - old_bytes);
            let mapped = grown.and_then(|()| file.sync_all());
            let mapped = mapped.and_then(|()| self.map_again(file, *backed_bytes, len_bytes));
            if let Err(error) = mapped {
                // Best effort: no thread can reach the bytes behind the old end.
                let _ = file.set_len(old_bytes);
                return Err(error);
            }
        }
        *backed_bytes = (*backed_bytes).max(self.page_end(len_bytes));
        self.len_bytes.store(len_bytes, Ordering::Release);
        self.reach_bytes.fetch_max(len_bytes, Ordering::Release);
        Ok(())
    }

    /// Makes the mapping `len_bytes` bytes long and releases the space of the file behind the new
    /// end. Does nothing if the mapping is that short already, and for devices, whose size is
    /// fixed.
    pub(super) fn shrink(&self, len_bytes: u64) -> io::Result<()> {
        let mut backed_bytes = self.backed_bytes.lock();
        if len_bytes >= self.len_bytes() || self.kind == Kind::Devdax {
            return Ok(());
        }
        let end_bytes = self.page_end(len_bytes);
        // This comes before the file is cut, so that a late access still finds mapped memory.
        self.abandon_from(end_bytes)?;
        *backed_bytes = end_bytes;
        self.len_bytes.store(len_bytes, Ordering::Release);
        if let Some(file) = &self.file {
            file.set_len(len_bytes)?;
            file.sync_all()?;
        }
        Ok(())
    }

    /// Rounds `bytes` up to whole pages.
    fn page_end(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.page_bytes)
    }

    /// Maps the file, which is to be `len_bytes` long, again from byte `from` on, the first of a
    /// page.
    fn map_again(&self, file: &File, from: u64, len_bytes: u64) -> io::Result<()> {
        let len = to_usize(self.page_end(len_bytes).saturating_sub(from));
        if len == 0 {
            return Ok(());
        }
        let shared = match self.kind {
            Kind::Fsdax => MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
            _ => MapFlags::SHARED,
        };
        let (at, flags) = (self.at(from).cast(), shared | MapFlags::FIXED);
        // SAFETY: the pages are this mapping's own and stay mapped. They are reached only through
        // raw pointers, as memory that other threads and processes change at any time.
        unsafe { rustix::mm::mmap(at, len, READ_WRITE, flags, file, from) }?;
        Ok(())
    }

    /// Allocates space of the file under the mapping, if there is a file.
    pub(super) fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.file {
            Some(file) if self.kind != Kind::Devdax => allocate(file, offset, len)?,
            _ => return Ok(()),
        }
        if self.kind == Kind::Tmpfs {
            self.collapse(offset, len);
        }
        Ok(())
    }

    /// Allocates space for all holes of the file under the mapping, if there is a file.
    pub(super) fn fill_holes(&self) -> io::Result<()> {
        let len_bytes = self.len_bytes();
        match &self.file {
            Some(file) if self.kind != Kind::Devdax && has_holes(file, len_bytes) => {
                allocate(file, 0, len_bytes)
            }
            _ => Ok(()),
        }
    }

    /// Asks the kernel for a huge page in each 2 MiB whose last byte is among the `len` bytes at
    /// `offset`, whatever the mount option for huge pages is: all space before them is allocated.
    /// Each process that maps the file then has one page fault instead of 512; persistent memory
    /// has such pages too. Best effort.
    ///
    /// The first 2 MiB are left out: they hold headers, which are in use already, and a pool that
    /// is little used needs no more.
    fn collapse(&self, offset: u64, len: u64) {
        let (first, end) = ((offset / HUGE_BYTES).max(1), (offset + len) / HUGE_BYTES);
        for block in first..end {
            let at = self.at(block * HUGE_BYTES).cast();
            // SAFETY: the pages are this mapping's own, and their bytes do not change.
            let _ = unsafe { libc::madvise(at, to_usize(HUGE_BYTES), MADV_COLLAPSE) };
        }
    }

    /// Takes the pages of `len` bytes at `offset` out of this process's page tables. Their bytes
    /// stay in the file, and the next access finds them there. Best effort.
    ///
    /// Does nothing for anonymous memory, whose bytes are nowhere else.
    pub(super) fn release(&self, offset: u64, len: u64) {
        if self.kind == Kind::Anonymous {
            return;
        }
        let (start, end) = (offset - offset % self.page_bytes, offset + len);
        let len = (end - end % self.page_bytes).saturating_sub(start);
        let advice = rustix::mm::Advice::LinuxDontNeed;
        // SAFETY: the pages belong to this shared mapping of a file, and their bytes do not change.
        let _ = unsafe { rustix::mm::madvise(self.at(start).cast(), to_usize(len), advice) };
    }

    /// Replaces the memory by private zero bytes: the process no longer has the file's memory.
    pub(super) fn abandon(&self) -> io::Result<()> {
        self.abandon_from(0)
    }

    pub(super) fn addresses(&self) -> std::ops::Range<usize> {
        let (start, len, _) = self.pages();
        start..start + len
    }

    /// Unmaps the memory.
    ///
    /// # Safety
    /// The caller neither uses nor drops the mapping any more.
    pub(super) unsafe fn unmap(&self) {
        let (_, len, _) = self.pages();
        // SAFETY: the caller uses the pages of this mapping no more. If the kernel refuses, they
        // stay.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), len) };
    }

    /// Replaces the memory from byte `from` on, the first of a page, by private zero bytes.
    fn abandon_from(&self, from: u64) -> io::Result<()> {
        let (_, mapped_len, _) = self.pages();
        let len = mapped_len.saturating_sub(to_usize(from));
        if len == 0 {
            return Ok(());
        }
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let at = self.at(from).cast();
        // SAFETY: the pages are this mapping's own and stay mapped. They are reached only through
        // raw pointers, as memory that other threads and processes change at any time.
        unsafe { rustix::mm::mmap_anonymous(at, len, READ_WRITE, flags) }?;
        Ok(())
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the mapped pages, in bytes: address, length, page size.
    pub(super) fn pages(&self) -> (usize, usize, usize) {
        let len = self.limit_bytes.next_multiple_of(self.page_bytes);
        (self.base.as_ptr().addr(), to_usize(len), to_usize(self.page_bytes))
    }

    /// Returns the address of the byte at `offset`, at most the end.
    #[inline]
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.limit_bytes);
        self.base.as_ptr().wrapping_add(to_usize(offset))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // A close does not unlock the file while a child between fork and exec has it open too.
            let _ = rustix::fs::flock(file, FlockOperation::Unlock);
        }
        let len = to_usize(self.limit_bytes);
        // SAFETY: this type made the mapping, and nothing refers to it after the drop.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), len) };
    }
}

/// Converts a length or offset of mapped memory. Lengths that cannot be mapped make `mmap` fail.
#[inline]
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Makes the error of a failed `action` on the file at `path` from the operating system's error.
pub(super) fn os(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PmemError {
    move |source| PmemError::Os { action, path: path.to_path_buf(), source }
}

/// Makes the error as [`os`] does, or tells that only the target of a symbolic link is missing.
fn not_there(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PmemError {
    move |source| match std::fs::read_link(path) {
        Ok(target) if !path.exists() => {
            PmemError::DanglingLink { path: path.to_path_buf(), target }
        }
        _ => os(action, path)(source),
    }
}

fn not_opened(path: &Path) -> impl FnOnce(io::Error) -> PmemError {
    move |error| match WrongKind::of(&error) {
        Some(WrongKind { found, .. }) => PmemError::NotMappable { path: path.to_path_buf(), found },
        None => not_there("open", path)(error),
    }
}

/// Locks the file against other openers until the mapping is dropped.
fn lock(file: &File, path: &Path, read_only: bool) -> Result<()> {
    let mode = if read_only { LockMode::Shared } else { LockMode::Exclusive };
    locking::lock(file, mode).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => PmemError::Busy { path: path.to_path_buf() },
        _ => os("lock", path)(error),
    })
}

/// Creates the file at `path`, which must not exist, for its owner alone.
fn create_file(path: &Path, len_bytes: u64) -> Result<File> {
    if len_bytes == 0 {
        return Err(PmemError::Empty { path: path.to_path_buf() });
    }
    let mut open = File::options();
    let open = open.read(true).write(true).create_new(true).mode(0o600);
    open.open(path).map_err(not_there("create", path))
}

/// Returns whether the first `len_bytes` bytes of the file may have holes. A file system that
/// cannot tell holes has none.
fn has_holes(file: &File, len_bytes: u64) -> bool {
    rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0)).is_ok_and(|hole| hole < len_bytes)
}

/// Allocates space, by a write to each block if the file system has no better way.
fn allocate(file: &File, offset: u64, len_bytes: u64) -> io::Result<()> {
    let too_big = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(offset).map_err(too_big)?;
    let len = libc::off_t::try_from(len_bytes).map_err(too_big)?;
    // SAFETY: a system call on an open descriptor touches no memory.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset, len) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Makes the name of a new file durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Maps a file, with `MAP_SYNC` if the file system grants it. Returns the address, and whether it
/// did.
fn map_file(
    file: &File,
    len_bytes: u64,
    read_only: bool,
) -> io::Result<(*mut std::ffi::c_void, bool)> {
    match map(file, len_bytes, read_only, MapFlags::SHARED_VALIDATE | MapFlags::SYNC) {
        Ok(base) => Ok((base, true)),
        // Kernels before 4.15 answer EINVAL.
        Err(error)
            if [libc::EOPNOTSUPP, libc::EINVAL].contains(&error.raw_os_error().unwrap_or(0)) =>
        {
            Ok((map(file, len_bytes, read_only, MapFlags::SHARED)?, false))
        }
        Err(error) => Err(error),
    }
}

fn map(
    file: &File,
    len_bytes: u64,
    read_only: bool,
    flags: MapFlags,
) -> io::Result<*mut std::ffi::c_void> {
    let prot = if read_only { ProtFlags::READ } else { READ_WRITE };
    let len = to_usize(len_bytes);
    // SAFETY: a fresh mapping touches no other memory: the kernel chooses the address if the
    // proposed one is taken.
    let base = unsafe { rustix::mm::mmap(address_for(len_bytes), len, prot, flags, file, 0) };
    base.map_err(io::Error::from)
}

/// Returns a free address at which a mapping of so many bytes can use huge pages of the file; NULL
/// for small mappings. Another thread may take the address at any moment.
fn address_for(len_bytes: u64) -> *mut std::ffi::c_void {
    let (len, nowhere) = (to_usize(len_bytes + HUGE_BYTES), std::ptr::null_mut());
    if len_bytes < HUGE_BYTES {
        return nowhere;
    }
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no other memory.
    let found = unsafe { rustix::mm::mmap_anonymous(nowhere, len, ProtFlags::empty(), flags) };
    let Ok(found) = found else { return nowhere };
    // SAFETY: the mapping was made just now and is unused.
    let _ = unsafe { rustix::mm::munmap(found, len) };
    found.wrapping_byte_add(found.align_offset(to_usize(HUGE_BYTES)))
}

fn on_tmpfs(file: &File) -> io::Result<bool> {
    let magic = rustix::fs::fstatfs(file)?.f_type;
    Ok(u64::try_from(magic) == Ok(TMPFS_MAGIC))
}
