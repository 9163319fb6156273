//! A mapping of persistent memory and the operations on it.

use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::{Observer, PmemError};

type Result<T> = std::result::Result<T, PmemError>;

/// What a store needs to become durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Domain {
    /// Power failure keeps what reached the memory controller: write lines back, then fence.
    Adr,
    /// Power failure keeps the CPU caches too: a fence is enough.
    Eadr,
    /// An ordinary file: a fence is an `msync` of what was written back.
    Msync,
    /// Nothing survives: tests and trials only.
    Volatile,
}

/// How to open a [`Region`].
#[derive(Debug, Clone, Default)]
pub struct RegionOptions {
    /// Map for reading only.
    pub read_only: bool,
    /// Use this domain instead of the one that the mapping calls for.
    pub domain: Option<Domain>,
    /// Create the file with this size in bytes, or fail if it exists.
    pub create_bytes: Option<u64>,
}

/// A mapping of persistent memory.
///
/// All offsets and lengths are bytes from the start of the region. All methods may be called from any thread;
/// overlapping plain accesses from two threads may tear, and keeping them apart is the engine's work.
pub struct Region {
    base: NonNull<u8>,
    len_bytes: u64,
    domain: Domain,
    read_only: bool,
    name: PathBuf,
    observer: Option<Arc<dyn Observer>>,
}

// SAFETY: the mapping is shared memory reached only through raw pointers inside this type; it stays mapped
// until drop, whichever thread that happens on.
unsafe impl Send for Region {}
// SAFETY: concurrent access goes through atomics or raw copies; no references into the mapping exist.
unsafe impl Sync for Region {}

impl Region {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// [`PmemError::Os`] where the file cannot be opened, sized or mapped.
    pub fn open(path: &Path, options: &RegionOptions) -> Result<Self> {
        let os = |action| {
            let path = path.to_path_buf();
            move |source: std::io::Error| PmemError::Os { action, path, source }
        };
        let mut open = std::fs::OpenOptions::new();
        open.read(true).write(!options.read_only).create_new(options.create_bytes.is_some());
        let file = open.open(path).map_err(os("open"))?;
        if let Some(bytes) = options.create_bytes {
            file.set_len(bytes).map_err(os("size"))?;
        }
        let len_bytes = file.metadata().map_err(os("inspect"))?.len();
        let prot =
            if options.read_only { ProtFlags::READ } else { ProtFlags::READ | ProtFlags::WRITE };
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                usize::try_from(len_bytes).unwrap_or(usize::MAX),
                prot,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(|errno| os("map")(errno.into()))?;
        Ok(Self {
            base: NonNull::new(base.cast()).expect("mmap returns no null pointer"),
            len_bytes,
            domain: options.domain.unwrap_or(Domain::Adr),
            read_only: options.read_only,
            name: path.to_path_buf(),
            observer: None,
        })
    }

    /// Volatile memory of `len_bytes` zero bytes, for tests and simulation.
    ///
    /// # Errors
    /// [`PmemError::Os`] where the memory cannot be had.
    pub fn anonymous(len_bytes: u64) -> Result<Self> {
        let name = PathBuf::from("(anonymous memory)");
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                usize::try_from(len_bytes).unwrap_or(usize::MAX),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|errno| PmemError::Os {
            action: "map",
            path: name.clone(),
            source: errno.into(),
        })?;
        Ok(Self {
            base: NonNull::new(base.cast()).expect("mmap returns no null pointer"),
            len_bytes,
            domain: Domain::Volatile,
            read_only: false,
            name,
            observer: None,
        })
    }

    /// Lets `observer` watch every operation from here on: the crash simulator's seam.
    #[must_use]
    pub fn observed(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Size of the region in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// What a store needs to become durable here.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// The region refuses stores.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The file under the region, for messages.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Copies `buf.len()` bytes at `offset` out of the region.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::Poisoned`].
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let from = self.at(offset, buf.len() as u64)?;
        if let Some(observer) = &self.observer {
            observer.load(offset, buf.len() as u64);
        }
        // SAFETY: `at` checked the range; the buffer is exclusive and cannot overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, buf.as_mut_ptr(), buf.len()) };
        Ok(())
    }

    /// Stores `data` at `offset` through the cache: durable after a [`write_back`](Self::write_back) and a
    /// [`fence`](Self::fence).
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::ReadOnly`], [`PmemError::Poisoned`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.copy_in(offset, data, false)
    }

    /// Stores `data` at `offset` past the cache: durable after a [`fence`](Self::fence) of the same thread.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn write_streaming(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.copy_in(offset, data, true)
    }

    /// Stores `len` zero bytes at `offset` past the cache: durable after a [`fence`](Self::fence) of the same thread.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn zero_streaming(&self, offset: u64, len: u64) -> Result<()> {
        const ZEROES: [u8; 4096] = [0; 4096];
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROES.len() as u64);
            self.copy_in(offset + done, &ZEROES[..usize::try_from(step).unwrap_or(0)], true)?;
            done += step;
        }
        Ok(())
    }

    /// Loads a little-endian u32 at `offset` (a multiple of 4), atomically, with acquire ordering.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::Poisoned`].
    pub fn load_u32(&self, offset: u64) -> Result<u32> {
        let at = self.at(offset, 4)?.cast::<AtomicU32>();
        if let Some(observer) = &self.observer {
            observer.load(offset, 4);
        }
        // SAFETY: in range, aligned by contract (debug-asserted), and only ever reached atomically.
        Ok(u32::from_le(unsafe { &*at }.load(Ordering::Acquire)))
    }

    /// Loads a little-endian u64 at `offset` (a multiple of 8), atomically, with acquire ordering.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::Poisoned`].
    pub fn load_u64(&self, offset: u64) -> Result<u64> {
        let at = self.at(offset, 8)?.cast::<AtomicU64>();
        if let Some(observer) = &self.observer {
            observer.load(offset, 8);
        }
        // SAFETY: as in `load_u32`.
        Ok(u64::from_le(unsafe { &*at }.load(Ordering::Acquire)))
    }

    /// Stores a little-endian u32 at `offset` (a multiple of 4), atomically, with release ordering, through the cache.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn store_u32(&self, offset: u64, value: u32) -> Result<()> {
        let at = self.at_mut(offset, 4)?.cast::<AtomicU32>();
        if let Some(observer) = &self.observer {
            observer.store(offset, &value.to_le_bytes(), false);
        }
        // SAFETY: as in `load_u32`.
        unsafe { &*at }.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// Stores a little-endian u64 at `offset` (a multiple of 8), atomically, with release ordering, through the cache.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<()> {
        let at = self.at_mut(offset, 8)?.cast::<AtomicU64>();
        if let Some(observer) = &self.observer {
            observer.store(offset, &value.to_le_bytes(), false);
        }
        // SAFETY: as in `load_u32`.
        unsafe { &*at }.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// Writes the cache lines that hold `len` bytes at `offset` back to memory; ordered by the same thread's next
    /// [`fence`](Self::fence).
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`].
    pub fn write_back(&self, offset: u64, len: u64) -> Result<()> {
        self.at(offset, len)?;
        if let Some(observer) = &self.observer {
            observer.write_back(offset, len);
        }
        Ok(())
    }

    /// Waits until what this thread stored past the cache or wrote back is durable.
    ///
    /// # Errors
    /// [`PmemError::WritebackFailed`] in the msync domain; then for good.
    pub fn fence(&self) -> Result<()> {
        if let Some(observer) = &self.observer {
            observer.fence();
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    /// [`write_back`](Self::write_back) and [`fence`](Self::fence).
    ///
    /// # Errors
    /// As for both.
    pub fn persist(&self, offset: u64, len: u64) -> Result<()> {
        self.write_back(offset, len)?;
        self.fence()
    }

    /// One turn of a loop that waits for another thread.
    pub fn relax(&self) {
        match &self.observer {
            Some(observer) => observer.relax(),
            None => std::hint::spin_loop(),
        }
    }

    /// A small number that differs between running threads as far as possible: engines spread threads by it.
    #[inline]
    pub fn thread_ordinal(&self) -> usize {
        match &self.observer {
            Some(observer) => observer.thread_ordinal(),
            None => ORDINAL.with(|ordinal| *ordinal),
        }
    }

    fn copy_in(&self, offset: u64, data: &[u8], non_temporal: bool) -> Result<()> {
        let to = self.at_mut(offset, data.len() as u64)?;
        if let Some(observer) = &self.observer {
            observer.store(offset, data, non_temporal);
        }
        // SAFETY: `at_mut` checked the range; the data cannot overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    fn at(&self, offset: u64, len: u64) -> Result<*const u8> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len_bytes => {}
            _ => return Err(PmemError::OutOfRange { offset, len, region_bytes: self.len_bytes }),
        }
        let offset = usize::try_from(offset).expect("the region is mapped, so offsets fit");
        // SAFETY: inside the mapping, as just checked.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }

    fn at_mut(&self, offset: u64, len: u64) -> Result<*mut u8> {
        if self.read_only {
            return Err(PmemError::ReadOnly);
        }
        self.at(offset, len).map(<*const u8>::cast_mut)
    }
}

static NEXT_ORDINAL: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static ORDINAL: usize = NEXT_ORDINAL.fetch_add(1, Ordering::Relaxed);
}

impl Drop for Region {
    fn drop(&mut self) {
        let len =
            usize::try_from(self.len_bytes).expect("the region is mapped, so its length fits");
        // SAFETY: the mapping was made by this type and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), len) };
    }
}
