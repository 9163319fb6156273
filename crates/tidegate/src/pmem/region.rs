//! A region of persistent memory and the operations on it.
//!
//! Invariants:
//! 1. Each operation checks its range, then tells the observer (if there is one), then takes
//!    effect, then checks that it touched no failed memory.
//! 2. The implementations for the CPU are chosen when the region is opened; after that an operation
//!    costs its instructions and a few predictable branches.
//!
//! Entry points: [`Region::open`]; [`Region::read`], [`Region::write`], [`Region::write_streaming`]
//! and the words; [`Region::write_back`], [`Region::fence`].

use std::cell::Cell;
use std::fmt;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use crc_fast::{CrcAlgorithm, Digest, checksum};

use super::counters::Counting;
use super::cpu::{self, Cpu, LINE, StreamWithCrc};
use super::delay::{Delay, Start};
use super::mapping::{Kind, Mapping, os};
use super::poison::{self, PoisonWatch};
use super::writeback::DirtyPages;
use super::{Counters, Domain, LINE_BYTES, MediaModel, Observer, PmemError};

type Result<T> = std::result::Result<T, PmemError>;

/// How to open a [`Region`].
#[derive(Debug, Clone, Default)]
pub struct RegionOptions {
    /// Map for reading only.
    pub read_only: bool,
    /// Use this domain instead of the one that the mapping calls for.
    pub domain: Option<Domain>,
    /// Create the file with this size in bytes, or fail if it exists.
    pub create_bytes: Option<u64>,
    /// The medium that the memory stands for.
    pub media: MediaModel,
    /// With `create_bytes`: leave the space unallocated, except the ranges of [`Region::allocate`].
    /// Of volatile memory: the system need not have all of it.
    pub sparse: bool,
    /// The most bytes that the region can [grow](Region::grow) to; 0: it keeps its size. The limit
    /// costs addresses, and no memory. It has no effect for a devdax device, for a guest and for a
    /// read-only region.
    pub limit_bytes: u64,
    /// Join processes that have the file open, under their locks: the region takes no lock, and
    /// installs no handler for memory errors, because the process runs a foreign program.
    pub guest: bool,
}

const CRC_32C: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// A value that begins at a cache line, so that the load of a whole line touches one cache line.
#[repr(align(64))]
struct LineAligned<T>(T);

/// A mapping of persistent memory.
///
/// All offsets and lengths are bytes from the start of the region. Any thread may call any method.
/// Overlapping plain accesses of two threads may tear; the engine has to keep them apart.
///
/// Nothing is durable before the fence that follows its write-back or streaming store:
///
/// ```
/// use tidegate::pmem::Region;
///
/// let region = Region::anonymous(4096)?;
/// region.write_streaming(64, &[7; 64])?;
/// region.fence()?;
/// region.store_u64(0, 64)?; // Says where the data is, so it is stored after the data is durable.
/// region.persist(0, 8)?;
/// assert_eq!((region.load_u64(0)?, region.counters().fences), (64, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Region {
    // Declared before the mapping: the watch ends before the memory is unmapped.
    poison: Option<PoisonWatch>,
    mapping: Mapping,
    domain: Domain,
    read_only: bool,
    cpu: Cpu,
    observer: Option<Arc<dyn Observer>>,
    delay: Option<Delay>,
    dirty: Option<DirtyPages>,
    counting: Counting,
    name: PathBuf,
    media: MediaModel,
}

impl Region {
    /// Maps the file or devdax device at `path` and locks it against other openers.
    ///
    /// The domain is `adr` for a file on a DAX file system (mapped with `MAP_SYNC`), for a devdax
    /// device, and for tmpfs, which stands for persistent memory in trials; and `msync` for any
    /// other file. If the CPU cannot write lines back, `msync` takes the place of `adr`.
    ///
    /// # Errors
    /// [`PmemError::Busy`] if the file is open already, [`PmemError::Empty`] if it has no bytes,
    /// [`PmemError::NotMappable`] if it is neither a file nor a devdax device, and
    /// [`PmemError::Os`] if it cannot be opened, allocated (no space left, for one) or mapped.
    pub fn open(path: &Path, options: &RegionOptions) -> Result<Self> {
        let mapping = match options.create_bytes {
            Some(len_bytes) => {
                Mapping::create(path, len_bytes, options.sparse, options.limit_bytes)?
            }
            None if options.guest => Mapping::open_guest(path)?,
            None => Mapping::open(path, options.read_only, options.limit_bytes)?,
        };
        Self::over(mapping, path.to_path_buf(), options)
    }

    /// Makes a region of `len_bytes` zero bytes in volatile memory, for tests and simulation.
    ///
    /// # Errors
    /// [`PmemError::Empty`] for no bytes, [`PmemError::Os`] if the memory cannot be had.
    pub fn anonymous(len_bytes: u64) -> Result<Self> {
        Self::anonymous_with(len_bytes, &RegionOptions::default())
    }

    /// Makes a region of volatile memory with the given domain, medium or write protection, to try
    /// their costs. `create_bytes` has no effect.
    ///
    /// # Errors
    /// The same errors as [`anonymous`](Self::anonymous).
    pub fn anonymous_with(len_bytes: u64, options: &RegionOptions) -> Result<Self> {
        let name = PathBuf::from("(anonymous memory)");
        let mapping = if options.sparse {
            Mapping::anonymous_sparse(len_bytes)?
        } else {
            Mapping::anonymous(len_bytes, options.limit_bytes)?
        };
        Self::over(mapping, name, options)
    }

    fn over(mapping: Mapping, name: PathBuf, options: &RegionOptions) -> Result<Self> {
        let domain = possible(options.domain.unwrap_or(mapping.kind().domain()));
        let (start, len, page_bytes) = mapping.pages();
        let watch = || {
            PoisonWatch::new(start, len, page_bytes).ok_or_else(|| {
                let most = poison::MOST_REGIONS;
                let full = format!("{most} regions are open, the most there can be");
                os("watch for memory errors in", &name)(std::io::Error::other(full))
            })
        };
        let poison = if options.guest { None } else { Some(watch()?) };
        Ok(Self {
            poison,
            domain,
            read_only: options.read_only,
            cpu: Cpu::detect(),
            observer: None,
            delay: Delay::new(&options.media),
            dirty: (domain == Domain::Msync).then(|| DirtyPages::new(page_bytes as u64)),
            counting: Counting::new(),
            name,
            media: options.media.clone(),
            mapping,
        })
    }

    /// Lets `observer` watch every operation from now on: the crash simulator's seam. An observed
    /// region has no delays: its time is the simulator's.
    #[must_use]
    pub fn observed(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self.delay = None;
        self
    }

    /// Lets delays pass in simulated time only: [`super::delay::simulated`].
    #[cfg(test)]
    #[must_use]
    pub(super) fn in_simulated_time(mut self) -> Self {
        self.delay.as_mut().expect("a model with delays").simulate_time();
        self
    }

    /// Replaces the memory by private zero bytes: the process no longer has the region's memory.
    ///
    /// # Errors
    /// The kernel's error; then the memory is unchanged.
    pub fn abandon(&self) -> std::io::Result<()> {
        self.mapping.abandon()
    }

    /// Returns the addresses of the region.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        self.mapping.addresses()
    }

    /// Unmaps the region.
    ///
    /// # Safety
    /// The caller neither uses nor drops the region any more.
    pub unsafe fn unmap(&self) {
        // SAFETY: the caller neither uses nor drops the region any more.
        unsafe { self.mapping.unmap() };
    }

    /// Releases the pages of `len` bytes at `offset`, which were read once and are not needed soon:
    /// they no longer count as memory of this process. Their bytes stay, and can be read again.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`].
    pub fn release(&self, offset: u64, len: u64) -> Result<()> {
        self.at(offset, len)?;
        self.mapping.release(offset, len);
        Ok(())
    }

    /// Returns the size of the region in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }

    /// Allocates the space of `len` bytes at `offset` in the file under the region, so that no
    /// store there fails on a full file system. Does nothing if the region is no file.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`]; [`PmemError::Os`]: no space left, for one.
    pub fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.at(offset, len)?;
        self.mapping.allocate(offset, len).map_err(os("allocate space for", &self.name))
    }

    /// Allocates the space of all holes in the file under the region. Does nothing for a file
    /// without holes, and if the region is no file or is read-only.
    ///
    /// # Errors
    /// [`PmemError::Os`]: no space left, for one.
    pub fn fill_holes(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.mapping.fill_holes().map_err(os("allocate space for", &self.name))
    }

    /// Makes the region `len_bytes` bytes long. The file grows, its new space is allocated and its
    /// new size is durable; then all threads can use the new bytes, which are zero. The old bytes
    /// keep their addresses, and threads use them meanwhile. Does nothing if the region is that
    /// long already. An [`Observer`] is not told.
    ///
    /// # Errors
    /// [`PmemError::ReadOnly`]; [`PmemError::Limit`] beyond [`RegionOptions::limit_bytes`];
    /// [`PmemError::Os`]: no space left, for one. The region then has its old size.
    pub fn grow(&self, len_bytes: u64) -> Result<()> {
        if self.read_only {
            return Err(PmemError::ReadOnly);
        }
        let limit_bytes = self.mapping.limit_bytes();
        if len_bytes > limit_bytes {
            return Err(PmemError::Limit { path: self.name.clone(), len_bytes, limit_bytes });
        }
        self.mapping.grow(len_bytes).map_err(os("allocate space for", &self.name))
    }

    /// Makes the region `len_bytes` bytes long and releases the space of the file behind the new
    /// end. Threads use the region meanwhile: a late access behind the new end reads or stores
    /// bytes of this process alone. Does nothing if the region is that short already, and for a
    /// devdax device, whose size is fixed. An [`Observer`] is not told.
    ///
    /// # Errors
    /// [`PmemError::ReadOnly`]; [`PmemError::Empty`] for no bytes; [`PmemError::Os`]: the file may
    /// have its old size.
    pub fn shrink(&self, len_bytes: u64) -> Result<()> {
        if self.read_only {
            return Err(PmemError::ReadOnly);
        }
        if len_bytes == 0 {
            return Err(PmemError::Empty { path: self.name.clone() });
        }
        self.mapping.shrink(len_bytes).map_err(os("release space of", &self.name))
    }

    /// Returns the domain: the steps that make a store durable here.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// Returns the kind of memory.
    pub fn kind(&self) -> Kind {
        self.mapping.kind()
    }

    /// Returns the effect of a power cut on acknowledged writes, in words for people.
    pub fn power_cut(&self) -> &'static str {
        match (self.kind(), self.domain()) {
            (_, Domain::Volatile) | (Kind::Anonymous, _) => {
                "NOTHING SURVIVES: for tests and trials only"
            }
            (Kind::Tmpfs, _) => "the whole pool is lost (tmpfs); a killed process loses nothing",
            (Kind::File, Domain::Adr | Domain::Eadr) => {
                "what the page cache holds is lost; a killed process loses nothing (this file calls for --domain msync)"
            }
            (Kind::File, Domain::Msync) => {
                "acknowledged writes survive, if the disk keeps what was synced to it"
            }
            (Kind::Fsdax | Kind::Devdax, Domain::Eadr) => {
                "acknowledged writes survive, if the platform flushes its CPU caches then"
            }
            (Kind::Fsdax | Kind::Devdax, Domain::Adr | Domain::Msync) => {
                "acknowledged writes survive"
            }
        }
    }

    /// Returns whether the region refuses stores.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the name of the file under the region, for messages.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Returns the model of the medium.
    pub fn media(&self) -> &MediaModel {
        &self.media
    }

    /// Returns the counts of all threads' requests since the region was opened. The counts are
    /// exact once the threads have stopped.
    pub fn counters(&self) -> Counters {
        self.counting.snapshot()
    }

    /// Returns a line for people: size, kind of memory, and how far stores are durable.
    pub fn describe(&self) -> String {
        let note = match (self.mapping.kind(), self.domain) {
            (_, Domain::Volatile) => " (NOTHING SURVIVES, not even a crash of the process)",
            (Kind::Anonymous, _) => " (ANONYMOUS MEMORY: NOTHING SURVIVES)",
            (Kind::Tmpfs, _) => " (POWER LOSS LOSES tmpfs)",
            (Kind::File, Domain::Adr | Domain::Eadr) => {
                " (POWER LOSS LOSES what the page cache holds: no msync by request)"
            }
            _ => "",
        };
        format!(
            "{}: {} bytes, {}{}, domain {}{note}, {}, {} streaming, media {}",
            self.name.display(),
            self.len_bytes(),
            self.mapping.kind(),
            if self.read_only { " read-only" } else { "" },
            self.domain,
            self.cpu.write_back.name(),
            self.cpu.copies.name,
            self.media,
        )
    }

    /// Copies `buf.len()` bytes at `offset` out of the region.
    ///
    /// The loads are ordinary loads in no particular order among each other, all before a later
    /// acquire fence or load: a version that is checked after them tells whether the bytes belong
    /// together.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::Poisoned`]; then the content of `buf` is
    /// meaningless.
    #[inline]
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let len = buf.len() as u64;
        let from = self.at(offset, len)?;
        self.observe(|observer| observer.load(offset, len));
        let start = self.delay.as_ref().map(Delay::start);
        // SAFETY: `at` checked the range; the buffer is exclusive and cannot overlap the mapping.
        unsafe { self.cpu.copy(buf.as_mut_ptr(), from, buf.len()) };
        self.counting.read(len);
        if let (Some(delay), Some(start)) = (&self.delay, start) {
            delay.finish_read(start, offset, len);
        }
        self.check_whole(offset, len)
    }

    /// Stores `data` at `offset` through the cache: durable after a
    /// [`write_back`](Self::write_back) and a [`fence`](Self::fence).
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::ReadOnly`], [`PmemError::Poisoned`].
    #[inline]
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let len = data.len() as u64;
        let to = self.at_mut(offset, len)?;
        self.observe(|observer| observer.store(offset, data, false));
        // SAFETY: `at_mut` checked the range; the data cannot overlap the mapping.
        unsafe { self.cpu.copy(to, data.as_ptr(), data.len()) };
        self.counting.stored(len);
        self.check_whole(offset, len)
    }

    /// Stores `data` at `offset` around the cache: durable after a [`fence`](Self::fence) of the
    /// calling thread.
    ///
    /// Whole cache lines bypass the cache; part lines at either end are stored through it and
    /// written back. Only a fence orders these stores before later stores of this thread, even for
    /// other threads that look at both.
    ///
    /// # Errors
    /// The same errors as [`write`](Self::write).
    #[inline]
    pub fn write_streaming(&self, offset: u64, data: &[u8]) -> Result<()> {
        let len = data.len() as u64;
        let to = self.at_mut(offset, len)?;
        self.observe(|observer| observer.store(offset, data, true));
        let start = self.delay.as_ref().map(Delay::start);
        // SAFETY: `at_mut` checked the range; the data cannot overlap the mapping.
        unsafe { self.cpu.stream(to, data.as_ptr(), data.len(), self.domain == Domain::Adr) };
        self.counting.streamed(len);
        self.left_for_medium(start, offset, len);
        self.check_whole(offset, len)
    }

    /// Stores `parts`, one behind the other, as [`write_streaming`](Self::write_streaming) does.
    /// Returns the CRC-32C of the stored bytes, even if another thread changes the parts meanwhile.
    ///
    /// `offset` must be the start of a cache line, and all of the last line must be the caller's:
    /// the bytes behind the parts become zero. So no line is loaded only to be stored in part,
    /// which takes longer than a store of the line. The bytes are copied `CHUNK` at a time if there
    /// are several parts, or if the CPU cannot take the CRC of lines as it stores them.
    ///
    /// # Errors
    /// The same errors as [`write`](Self::write); [`PmemError::Misaligned`].
    #[inline]
    pub fn write_streaming_crc32c<const CHUNK: usize>(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
    ) -> Result<u32> {
        if !offset.is_multiple_of(LINE_BYTES) {
            return Err(PmemError::Misaligned { offset, align_bytes: LINE_BYTES });
        }
        match (parts, self.cpu.stream_with_crc, &self.observer) {
            ([part], Some(stream), None) if part.len() >= LINE => {
                self.stream_folded(offset, part, stream)
            }
            _ => self.stream_copied::<CHUNK>(offset, parts),
        }
    }

    /// Stores one part of at least a line.
    fn stream_folded(&self, offset: u64, part: &[u8], stream: StreamWithCrc) -> Result<u32> {
        let (lines, rest) = part.split_at(part.len() / LINE * LINE);
        let len = lines.len() as u64;
        let to = self.at_mut(offset, len)?;
        let start = self.delay.as_ref().map(Delay::start);
        // SAFETY: `at_mut` checked the range, which is whole lines; the data cannot overlap the
        // mapping.
        let mut crc = unsafe { (stream.lines)(to, lines.as_ptr(), lines.len()) };
        self.counting.streamed(len);
        self.left_for_medium(start, offset, len);
        self.check_whole(offset, len)?;
        if !rest.is_empty() {
            let mut line = LineAligned([0; LINE]);
            // SAFETY: `rest` is less than a line; `line` is a line that only this thread knows.
            unsafe { self.cpu.copy(line.0.as_mut_ptr(), rest.as_ptr(), rest.len()) };
            self.write_streaming(offset + len, &line.0)?;
            // SAFETY: the CPU has the instructions, since it has `stream`.
            crc = unsafe { (stream.rest)(crc, &line.0[..rest.len()]) };
        }
        Ok(!crc)
    }

    /// Stores parts through a buffer. The CRC of a chunk is computed after its stores, while these
    /// are on their way: 4 KiB took 607 ns instead of 781 where it was measured, and 476 without a
    /// CRC. A CRC of one piece takes half the time of a CRC in pieces.
    fn stream_copied<const CHUNK: usize>(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<u32> {
        const { assert!(CHUNK.is_multiple_of(LINE)) };
        let mut buffer = LineAligned(MaybeUninit::<[u8; CHUNK]>::uninit());
        let buffer = buffer.0.as_mut_ptr().cast::<u8>();
        let (mut at, mut filled) = (offset, 0);
        let mut digest = None;
        for mut part in parts.iter().map(|part| &**part) {
            while !part.is_empty() {
                if filled == CHUNK {
                    // SAFETY: `CHUNK` bytes were copied into the buffer.
                    let copied = unsafe { std::slice::from_raw_parts(buffer, CHUNK) };
                    self.write_streaming(at, copied)?;
                    digest.get_or_insert_with(|| Digest::new(CRC_32C)).update(copied);
                    (at, filled) = (at + CHUNK as u64, 0);
                }
                let (now, later) = part.split_at(part.len().min(CHUNK - filled));
                let to = buffer.wrapping_add(filled);
                // SAFETY: only this thread knows the buffer, which has at least `now.len()` bytes
                // behind the `filled` ones.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), to, now.len()) };
                (filled, part) = (filled + now.len(), later);
            }
        }
        let whole = filled.next_multiple_of(LINE);
        // SAFETY: the padding is less than a line, and the buffer is whole lines.
        unsafe { buffer.wrapping_add(filled).write_bytes(0, whole - filled) };
        // SAFETY: all `whole` bytes were copied there or made zero.
        let copied = unsafe { std::slice::from_raw_parts(buffer, whole) };
        if whole > 0 {
            self.write_streaming(at, copied)?;
        }
        let last = &copied[..filled];
        let crc = match &mut digest {
            Some(digest) => {
                digest.update(last);
                digest.finalize()
            }
            None => checksum(CRC_32C, last),
        };
        Ok(u32::try_from(crc).unwrap_or(u32::MAX))
    }

    /// Stores `len` zero bytes at `offset` around the cache: durable after a [`fence`](Self::fence)
    /// of the same thread.
    ///
    /// # Errors
    /// The same errors as [`write`](Self::write).
    pub fn zero_streaming(&self, offset: u64, len: u64) -> Result<()> {
        const ZEROES: [u8; 4096] = [0; 4096];
        self.at_mut(offset, len)?;
        let end = offset + len;
        let mut at = offset;
        while at < end {
            // Up to the next multiple, so that all steps but the first stream whole lines.
            let step = (ZEROES.len() as u64 - at % ZEROES.len() as u64).min(end - at);
            self.write_streaming(at, &ZEROES[..usize::try_from(step).unwrap_or(ZEROES.len())])?;
            at += step;
        }
        Ok(())
    }

    /// Loads a little-endian u32 at `offset` (a multiple of 4), atomically, with acquire ordering.
    ///
    /// # Errors
    /// [`PmemError::OutOfRange`], [`PmemError::Misaligned`], [`PmemError::Poisoned`].
    #[inline]
    pub fn load_u32(&self, offset: u64) -> Result<u32> {
        let at = self.word::<AtomicU32>(offset)?;
        self.observe(|observer| observer.load(offset, 4));
        // SAFETY: `word` checked that `at` is in range and aligned.
        let value = unsafe { &*at }.load(Ordering::Acquire);
        self.check_whole(offset, 4)?;
        Ok(u32::from_le(value))
    }

    /// Loads a little-endian u64 at `offset` (a multiple of 8), atomically, with acquire ordering.
    ///
    /// # Errors
    /// The same errors as [`load_u32`](Self::load_u32).
    #[inline]
    pub fn load_u64(&self, offset: u64) -> Result<u64> {
        let at = self.word::<AtomicU64>(offset)?;
        self.observe(|observer| observer.load(offset, 8));
        // SAFETY: `word` checked that `at` is in range and aligned.
        let value = unsafe { &*at }.load(Ordering::Acquire);
        self.check_whole(offset, 8)?;
        Ok(u64::from_le(value))
    }

    /// Stores a little-endian u32 at `offset` (a multiple of 4), atomically, with release ordering,
    /// through the cache.
    ///
    /// # Errors
    /// The same errors as [`write`](Self::write), and [`PmemError::Misaligned`].
    #[inline]
    pub fn store_u32(&self, offset: u64, value: u32) -> Result<()> {
        let at = self.word_mut::<AtomicU32>(offset)?;
        self.observe(|observer| observer.store(offset, &value.to_le_bytes(), false));
        // SAFETY: `word_mut` checked that `at` is in range and aligned.
        unsafe { &*at }.store(value.to_le(), Ordering::Release);
        self.counting.stored(4);
        self.check_whole(offset, 4)
    }

    /// Stores a little-endian u64 at `offset` (a multiple of 8), atomically, with release ordering,
    /// through the cache.
    ///
    /// # Errors
    /// The same errors as [`store_u32`](Self::store_u32).
    #[inline]
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<()> {
        let at = self.word_mut::<AtomicU64>(offset)?;
        self.observe(|observer| observer.store(offset, &value.to_le_bytes(), false));
        // SAFETY: `word_mut` checked that `at` is in range and aligned.
        unsafe { &*at }.store(value.to_le(), Ordering::Release);
        self.counting.stored(8);
        self.check_whole(offset, 8)
    }

    /// Writes the cache lines that hold `len` bytes at `offset` back to memory; ordered by the same
    /// thread's next [`fence`](Self::fence).
    ///
    /// # Errors
    /// The same errors as [`write`](Self::write).
    #[inline]
    pub fn write_back(&self, offset: u64, len: u64) -> Result<()> {
        let at = self.at_mut(offset, len)?;
        self.observe(|observer| observer.write_back(offset, len));
        let lines = lines_of(offset, len);
        let start = self.delay.as_ref().map(Delay::start);
        if self.domain == Domain::Adr {
            // SAFETY: `at_mut` checked the range, and the mapping is whole pages, so that all lines
            // are mapped.
            unsafe { self.cpu.write_back_lines(at, lines) };
        }
        self.counting.written_back(lines);
        // Whole lines leave for the medium.
        self.left_for_medium(start, offset - offset % LINE_BYTES, lines * LINE_BYTES);
        self.check_whole(offset, len)
    }

    /// Waits until all earlier streaming stores and write-backs of this thread are durable.
    ///
    /// # Errors
    /// [`PmemError::WritebackFailed`] in the msync domain, and then at every later fence.
    #[inline]
    pub fn fence(&self) -> Result<()> {
        self.observe(|observer| observer.fence());
        cpu::fence();
        self.counting.fenced();
        if let Some(delay) = &self.delay {
            delay.finish_fence();
        }
        self.dirty.as_ref().map_or(Ok(()), |dirty| dirty.sync(&self.mapping))
    }

    /// Makes `len` bytes at `offset` durable: [`write_back`](Self::write_back) and
    /// [`fence`](Self::fence).
    ///
    /// # Errors
    /// The errors of both.
    #[inline]
    pub fn persist(&self, offset: u64, len: u64) -> Result<()> {
        self.write_back(offset, len)?;
        self.fence()
    }

    /// Takes one turn of a loop that waits for another thread. Some turns yield the CPU, since the
    /// other thread may need it.
    pub fn relax(&self) {
        match &self.observer {
            Some(observer) => observer.relax(),
            None => spin_or_yield(),
        }
    }

    /// Returns a small number that differs between running threads as far as possible. Engines
    /// spread threads by it.
    #[inline]
    pub fn thread_ordinal(&self) -> usize {
        match &self.observer {
            Some(observer) => observer.thread_ordinal(),
            None => crate::sync::shard::seat(),
        }
    }

    /// Tells the observer, if there is one.
    #[inline]
    fn observe(&self, tell: impl FnOnce(&dyn Observer)) {
        if let Some(observer) = &self.observer {
            tell(&**observer);
        }
    }

    /// Notes that bytes streamed or written back since `start` are on their way: the next fence
    /// waits for their arrival.
    #[inline]
    fn left_for_medium(&self, start: Option<Start>, offset: u64, len: u64) {
        if let Some(dirty) = &self.dirty {
            dirty.record(offset, len);
        }
        if let (Some(delay), Some(start)) = (&self.delay, start) {
            delay.finish_write(start, offset, len);
        }
    }

    /// Returns the address of `len` bytes at `offset`.
    #[inline]
    fn at(&self, offset: u64, len: u64) -> Result<*mut u8> {
        let region_bytes = self.mapping.reach_bytes();
        if offset > region_bytes || len > region_bytes - offset {
            return Err(PmemError::OutOfRange { offset, len, region_bytes });
        }
        Ok(self.mapping.at(offset))
    }

    /// Returns the address for a store. Fails if the region is read-only or the memory has failed
    /// before.
    #[inline]
    fn at_mut(&self, offset: u64, len: u64) -> Result<*mut u8> {
        if self.read_only {
            return Err(PmemError::ReadOnly);
        }
        let at = self.at(offset, len)?;
        self.check_whole(offset, len)?;
        Ok(at)
    }

    /// Returns the address of a word at `offset`, which must be aligned to the word's size.
    #[inline]
    fn word<W>(&self, offset: u64) -> Result<*const W> {
        let align_bytes = size_of::<W>() as u64;
        if !offset.is_multiple_of(align_bytes) {
            return Err(PmemError::Misaligned { offset, align_bytes });
        }
        self.at(offset, align_bytes).map(|at| at.cast::<W>().cast_const())
    }

    /// Returns the address of a word for a store.
    #[inline]
    fn word_mut<W>(&self, offset: u64) -> Result<*const W> {
        let word = self.word(offset)?;
        self.at_mut(offset, size_of::<W>() as u64)?;
        Ok(word)
    }

    /// Returns whether a page of the region failed since it was opened.
    pub(crate) fn has_failed_pages(&self) -> bool {
        self.poison.as_ref().is_some_and(|poison| !poison.is_whole())
    }

    /// Fails if the `len` bytes at `offset`, just accessed or about to be, touch failed memory.
    #[inline]
    fn check_whole(&self, offset: u64, len: u64) -> Result<()> {
        // A fault of the access must come before the look at the faults.
        compiler_fence(Ordering::SeqCst);
        match &self.poison {
            Some(poison) if !poison.is_whole() && poison.touches(offset, len) => {
                Err(PmemError::Poisoned { offset, len })
            }
            _ => Ok(()),
        }
    }
}

/// Number of waiting turns until a thread yields its CPU: a few microseconds.
const SPINS: u32 = 128;

fn spin_or_yield() {
    thread_local! {
        static TURNS: Cell<u32> = const { Cell::new(0) };
    }
    let turn = TURNS.get().wrapping_add(1);
    TURNS.set(turn);
    if turn.is_multiple_of(SPINS) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({})", self.describe())
    }
}

/// Returns `domain`, or `msync` in place of `adr` if the CPU cannot write lines back.
fn possible(domain: Domain) -> Domain {
    match domain {
        Domain::Adr if !Cpu::can_write_back() => Domain::Msync,
        domain => domain,
    }
}

/// Returns the number of cache lines that hold `len` bytes at `offset`.
#[inline]
fn lines_of(offset: u64, len: u64) -> u64 {
    if len == 0 { 0 } else { (offset + len - 1) / LINE_BYTES - offset / LINE_BYTES + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a region in the msync domain whose every `msync` the kernel refuses, since it starts
    /// in the middle of a page.
    fn refusing() -> Region {
        let options = RegionOptions { domain: Some(Domain::Msync), ..RegionOptions::default() };
        let mut region = Region::anonymous_with(1 << 16, &options).unwrap();
        region.dirty = Some(DirtyPages::new(100));
        region
    }

    fn refused(result: &Result<()>) -> bool {
        matches!(result, Err(PmemError::WritebackFailed { errno: libc::EINVAL }))
    }

    #[test]
    fn a_fence_syncs_what_was_streamed() {
        let region = refusing();
        region.write_streaming(150, b"data").unwrap();
        assert!(refused(&region.fence()));
    }

    #[test]
    fn a_fence_syncs_what_was_written_back_and_fails_for_good_after_a_failure() {
        let region = refusing();
        region.write(150, b"data").unwrap();
        region.fence().unwrap();
        assert!(refused(&region.persist(150, 4)));
        assert!(refused(&region.fence()));
    }
}
