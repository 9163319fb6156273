//! Block devices: the one trait that every tier, front end and layer shares.
//!
//! Invariants of [`BlockDevice`]:
//! 1. Offsets and lengths are bytes and whole blocks of [`Geometry::block_bytes`]; the device
//!    refuses others with [`DeviceErrorKind::Misaligned`] or [`DeviceErrorKind::OutOfRange`] before
//!    any block changes.
//! 2. Each block is written all or not at all ([`Geometry::atomic_block`] says whether a crash
//!    keeps this).
//! 3. A read returns, block by block, the last acknowledged write.
//! 4. After an acknowledged [`Operation::Flush`], every write acknowledged before it started is
//!    durable; a write with [`WriteFlags::fua`] is durable by itself when acknowledged.
//! 5. All methods may be called from any number of threads at once.
//!
//! Devices: [`memory`] and [`null`](mod@null) in memory, [`file`](mod@file) over a file or a block
//! device, [`nbd`] over a server's export. Layers, each a device over another: [`fault`] injects
//! failures, [`delay`] slows down, [`watch`] reports failures of the device below, and [`gate`] can
//! hold changes back, and keep the content of one instant (a [`moment`]) for a copy.
//!
//! A server handles a request in two steps, as the fast path of Open CAS does (ocf
//! `src/engine/engine_fast.c`): [`BlockDevice::attempt`] runs it on the server's thread if it waits
//! for nothing slower than memory; else [`BlockDevice::start`] starts it, and the
//! [`AsyncRequest`]'s completion gets the result. Callers with nothing else to do block in
//! [`BlockDevice::run`], by the calls of [`BlockDeviceExt`], and in [`BlockDevice::submit`] for
//! many requests at once.

mod asynchronous;
mod buffer;
#[cfg(any(test, feature = "test-support"))]
pub mod conformance;
pub mod delay;
mod error;
pub mod fault;
pub mod file;
mod flushes;
pub mod gate;
pub mod memory;
#[cfg(test)]
mod model_tests;
pub mod moment;
pub mod nbd;
pub mod null;
mod pool;
mod request;
pub mod spell;
mod timer;
pub mod waits;
pub mod wake;
pub mod watch;

use std::sync::Arc;

pub use asynchronous::{AsyncRequest, OwnedOperation};
pub use buffer::{BUFFER_ALIGN_BYTES, BUFFER_EXTRA_BYTES, BUFFER_HEADER_BYTES, IoBuffer};
pub use error::{DeviceError, DeviceErrorKind};
pub use request::{Attempt, Context, Op, Operation, Request};

/// Result of a device operation.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// Shape and promises of a device. Constant while the device is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub struct Geometry {
    /// Size of a block in bytes, a power of two from 512 to 4096. Every offset and length is a
    /// multiple.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Best size of a request in bytes (at least a block).
    pub preferred_bytes: u32,
    /// Writes are refused with [`DeviceErrorKind::ReadOnly`].
    pub read_only: bool,
    /// A crash leaves each block all old or all new (P2).
    pub atomic_block: bool,
    /// Acknowledged writes wait in volatile memory until the next flush or FUA.
    pub volatile_cache: bool,
    /// [`Operation::WriteZeroes`] is faster than writing zeroes. If false, [`ZeroFlags::fast_only`]
    /// always fails.
    pub fast_zero: bool,
    /// Reads return the written data. False only for devices for measurements, which discard it.
    pub keeps_data: bool,
}

impl Geometry {
    /// Returns the geometry of a device in memory, without promises about crashes.
    fn in_memory(block_bytes: u32, blocks: u64) -> Result<Self> {
        check_block_bytes(block_bytes)?;
        if blocks.checked_mul(u64::from(block_bytes)).is_none() {
            return Err(DeviceError::new(
                DeviceErrorKind::Unsupported,
                format!("{blocks} blocks of {block_bytes} bytes are more than 2^64 bytes"),
            ));
        }
        Ok(Self::plain(block_bytes, blocks))
    }

    /// Returns the geometry of a writable device with only the promises that all devices make.
    pub(crate) fn plain(block_bytes: u32, blocks: u64) -> Self {
        Self {
            block_bytes,
            blocks,
            preferred_bytes: 4096,
            read_only: false,
            atomic_block: false,
            volatile_cache: true,
            fast_zero: true,
            keeps_data: true,
        }
    }

    /// Returns the size of the device in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// Checks that `len` bytes at `offset` are whole blocks inside the device.
    ///
    /// # Errors
    /// Fails as [`DeviceErrorKind::Misaligned`] or [`DeviceErrorKind::OutOfRange`] if they are not.
    pub fn check(&self, offset: u64, len: u64) -> Result<()> {
        let block_bytes = u64::from(self.block_bytes);
        if !offset.is_multiple_of(block_bytes) || !len.is_multiple_of(block_bytes) {
            return Err(DeviceError::misaligned(offset, len, self.block_bytes));
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.size_bytes() => Ok(()),
            _ => Err(DeviceError::out_of_range(offset, len, self.size_bytes())),
        }
    }

    /// Checks the range of a request that changes blocks.
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does, or as [`DeviceErrorKind::ReadOnly`].
    pub fn check_write(&self, offset: u64, len: u64) -> Result<()> {
        if self.read_only {
            return Err(DeviceError::read_only(offset, len));
        }
        self.check(offset, len)
    }

    /// Checks the range of an operation, that the device is writable if the operation changes
    /// blocks, and that the device has fast zeroes if the operation requires them.
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) or [`check_write`](Self::check_write) does, and as
    /// [`DeviceErrorKind::Unsupported`] if the device lacks the required fast zeroes.
    pub fn check_operation(&self, operation: &Operation<'_>) -> Result<()> {
        let (offset, len) = operation.range();
        match operation {
            Operation::Flush => Ok(()),
            Operation::Read { .. } | Operation::Status { .. } => self.check(offset, len),
            Operation::Write { .. } | Operation::Discard { .. } => self.check_write(offset, len),
            Operation::WriteZeroes { flags, .. } => self.check_zeroes(offset, len, *flags),
        }
    }

    /// Checks a request that writes zeroes: range, writability and fast zeroes.
    pub(crate) fn check_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.check_write(offset, len)?;
        if flags.fast_only && !self.fast_zero {
            return Err(DeviceError::not_fast(offset, len));
        }
        Ok(())
    }
}

/// Refuses a block size that no device has.
fn check_block_bytes(block_bytes: u32) -> Result<()> {
    if is_block_bytes(block_bytes) {
        return Ok(());
    }
    Err(DeviceError::new(
        DeviceErrorKind::Unsupported,
        format!("block size of {block_bytes} bytes; it must be 512, 1024, 2048 or 4096"),
    ))
}

/// The smallest block in bytes.
pub(crate) const BLOCK_BYTES_MIN: u32 = 512;

/// Returns whether `block_bytes` is a power of two from 512 to 4096.
pub(crate) fn is_block_bytes(block_bytes: u32) -> bool {
    block_bytes.is_power_of_two() && (BLOCK_BYTES_MIN..=4096).contains(&block_bytes)
}

/// Options of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteFlags {
    /// Force unit access: durable when acknowledged.
    pub fua: bool,
}

/// Options of a request that writes zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroFlags {
    /// Force unit access: durable when acknowledged.
    pub fua: bool,
    /// The device may free the space (a hole); otherwise the space stays allocated, on devices that
    /// distinguish.
    pub may_unmap: bool,
    /// Fail with [`DeviceErrorKind::Unsupported`] rather than write zeroes slowly.
    pub fast_only: bool,
}

impl ZeroFlags {
    /// The flags of zeroes that replace a discard.
    pub(crate) const DISCARD: Self = Self { fua: false, may_unmap: true, fast_only: false };
}

/// A run of blocks with one allocation state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// No storage is held for these blocks.
    pub hole: bool,
    /// These blocks read as zeroes.
    pub zero: bool,
}

impl Extent {
    /// Returns an extent of blocks that hold data, as far as a device knows.
    pub fn data(offset: u64, len: u64) -> Self {
        Self { offset, len, hole: false, zero: false }
    }
}

/// Rounds `extents`, which are adjacent, to whole blocks of `block_bytes`. A block of several
/// states counts as allocated unless the whole block is a hole, and as data unless the whole block
/// is zero. Drops a partial block at the end.
pub(crate) fn in_whole_blocks(
    extents: impl IntoIterator<Item = Extent>,
    block_bytes: u32,
) -> Vec<Extent> {
    let block = u64::from(block_bytes);
    let mut whole: Vec<Extent> = Vec::new();
    // The beginning of a block that is not yet complete.
    let mut begun: Option<Extent> = None;
    let mut add = |extent: Extent| match whole.last_mut() {
        _ if extent.len == 0 => {}
        Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => {
            last.len += extent.len;
        }
        _ => whole.push(extent),
    };
    for mut extent in extents {
        if let Some(mut first) = begun.take() {
            let taken = extent.len.min(block - first.len);
            first.len += taken;
            (first.hole, first.zero) = (first.hole && extent.hole, first.zero && extent.zero);
            extent = Extent { offset: extent.offset + taken, len: extent.len - taken, ..extent };
            if first.len < block {
                begun = Some(first);
                continue;
            }
            add(first);
        }
        let rest = extent.len % block;
        let end = extent.offset + extent.len;
        add(Extent { len: extent.len - rest, ..extent });
        begun = (rest > 0).then_some(Extent { offset: end - rest, len: rest, ..extent });
    }
    whole
}

#[cfg(all(test, not(loom)))]
mod whole_blocks {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with the states of all units: a block has a state if all its units have it.
        #[test]
        fn extents_in_whole_blocks_say_of_a_block_what_holds_for_all_of_it(
            runs in prop::collection::vec((1_u64..20, any::<bool>(), any::<bool>()), 0..40),
            units in prop::sample::select(vec![1_u64, 2, 4, 8]),
        ) {
            const UNIT_BYTES: u64 = 512;
            let (mut at, mut extents, mut states) = (4096 * 5, Vec::new(), Vec::new());
            for (count, hole, zero) in runs {
                let len = count * UNIT_BYTES;
                extents.push(Extent { offset: at, len, hole, zero });
                states.extend(std::iter::repeat_n((hole, zero), usize::try_from(count).unwrap()));
                at += len;
            }
            let block_bytes = u32::try_from(units * UNIT_BYTES).unwrap();
            let whole = in_whole_blocks(extents, block_bytes);
            let blocks = states.chunks_exact(usize::try_from(units).unwrap());
            let expected: Vec<_> = blocks
                .map(|block| (block.iter().all(|it| it.0), block.iter().all(|it| it.1)))
                .collect();
            let (mut found, mut at) = (Vec::new(), 4096 * 5);
            for Extent { offset, len, hole, zero } in whole {
                prop_assert!(len > 0 && len.is_multiple_of(block_bytes.into()));
                prop_assert_eq!(offset, at);
                at += len;
                let count = usize::try_from(len / u64::from(block_bytes)).unwrap();
                found.extend(std::iter::repeat_n((hole, zero), count));
            }
            prop_assert_eq!(found, expected);
        }
    }
}

/// A device of equal blocks. See the module's invariants.
///
/// ```
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceErrorKind, WriteFlags};
///
/// let device: &dyn BlockDevice = &MemoryDevice::new(512, 2048)?;
/// assert_eq!(device.geometry().size_bytes(), 1 << 20);
/// device.write(1024, &[1; 512], WriteFlags { fua: true })?;
/// let mut blocks = [9; 1024];
/// device.read(512, &mut blocks)?;
/// assert_eq!((blocks[0], blocks[512]), (0, 1));
/// let misaligned = device.read(1, &mut blocks).unwrap_err();
/// assert_eq!(misaligned.kind(), DeviceErrorKind::Misaligned);
/// # Ok::<(), tidegate::device::DeviceError>(())
/// ```
pub trait BlockDevice: Send + Sync {
    /// Shape and promises of the device.
    fn geometry(&self) -> Geometry;

    /// Runs `operation` to its end.
    ///
    /// # Errors
    /// Fails as documented at each variant of [`Operation`].
    fn run(&self, operation: &mut Operation<'_>) -> Result<()>;

    /// Runs every request of `batch` to its end and stores each result in the request. On a device
    /// with a queue this is faster than one call each.
    ///
    /// The requests run at once and in any order, so they must not overlap. Only an
    /// [`Operation::Flush`] is a barrier: it covers the requests before it, and those after it
    /// start when it is done.
    fn submit(&self, batch: &mut [Request<'_>]) {
        for request in batch {
            request.run_on(self);
        }
    }

    /// Runs `operation` on this thread if no part of it has to wait for anything slower than
    /// memory, as far as the device can tell beforehand. A result of [`Attempt::WouldBlock`] means
    /// that the operation had no effect that running it again would not have.
    ///
    /// The default implementation always returns [`Attempt::WouldBlock`].
    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let _ = (operation, context);
        Attempt::WouldBlock
    }

    /// Starts `request` and returns without waiting. Any thread completes the request, exactly
    /// once, maybe before this call returns. Started requests run in any order; a flush covers
    /// those that were complete when it was started.
    ///
    /// This thread does none of the request's work. A device without asynchrony of its own uses a
    /// small pool of threads that all such devices share.
    fn start(self: Arc<Self>, request: AsyncRequest)
    where
        Self: 'static,
    {
        start_on_pool(self, request);
    }
}

/// One blocking call for each operation.
pub trait BlockDeviceExt: BlockDevice {
    /// Reads `buf.len()` bytes at `offset`: [`Operation::Read`].
    ///
    /// # Errors
    /// Fails as [`Operation::Read`] does.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.run(&mut Operation::Read { offset, buf })
    }

    /// Writes `data` at `offset`: [`Operation::Write`].
    ///
    /// # Errors
    /// Fails as [`Operation::Write`] does.
    fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.run(&mut Operation::Write { offset, data, flags })
    }

    /// Makes acknowledged writes durable: [`Operation::Flush`].
    ///
    /// # Errors
    /// Fails as [`Operation::Flush`] does.
    fn flush(&self) -> Result<()> {
        self.run(&mut Operation::Flush)
    }

    /// Discards `len` bytes at `offset`: [`Operation::Discard`].
    ///
    /// # Errors
    /// Fails as [`Operation::Discard`] does.
    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.run(&mut Operation::Discard { offset, len })
    }

    /// Zeroes `len` bytes at `offset`: [`Operation::WriteZeroes`].
    ///
    /// # Errors
    /// Fails as [`Operation::WriteZeroes`] does.
    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.run(&mut Operation::WriteZeroes { offset, len, flags })
    }

    /// Returns the allocation state of `len` bytes at `offset`: [`Operation::Status`].
    ///
    /// # Errors
    /// Fails as [`Operation::Status`] does.
    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        self.run(&mut Operation::Status { offset, len, most, extents: &mut extents })?;
        Ok(extents)
    }
}

impl<D: BlockDevice + ?Sized> BlockDeviceExt for D {}

/// Makes `memory` `len` bytes long, with any content.
///
/// # Errors
/// Fails as [`DeviceErrorKind::Io`] if the system does not have the memory.
pub(crate) fn resize(memory: &mut Vec<u8>, len: usize) -> Result<()> {
    memory.try_reserve(len.saturating_sub(memory.len())).map_err(|error| {
        let context = format!("{len} bytes of memory cannot be had");
        DeviceError::with_source(DeviceErrorKind::Io, context, error)
    })?;
    memory.resize(len, 0);
    Ok(())
}

/// Runs `request` on `device` by the pool of threads that devices share.
pub(crate) fn start_on_pool<D>(device: Arc<D>, request: AsyncRequest)
where
    D: BlockDevice + ?Sized + 'static,
{
    run_on_pool(request, move |operation| device.run(operation));
}

/// Runs `request` by `run`, on the pool of threads that devices share.
pub(crate) fn run_on_pool(
    request: AsyncRequest,
    run: impl FnOnce(&mut Operation<'_>) -> Result<()> + Send + 'static,
) {
    pool::run(move || request.run_by(run));
}

/// Reports whether requests of `device` run at the speed of memory, on the caller's CPU.
pub(crate) fn is_memory_speed(device: &dyn BlockDevice) -> bool {
    let mut nothing = Operation::Read { offset: 0, buf: &mut [] };
    device.attempt(&mut nothing, Context::default()).done().is_some()
}
