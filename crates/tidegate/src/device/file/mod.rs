//! A file or a block device as a device: the capacity tier.
//!
//! Invariants:
//! 1. The size is read once, when the device is opened. The device leaves out the tail of a file
//!    that is not made of whole blocks, unless the file is a [backing](FileOptions::as_backing).
//! 2. After a flush or a forced write has failed, every later one fails until the file is reopened
//!    (`gate` says why): bytes that the kernel dropped must never read as durable. A device that
//!    [`reopens`](FileOptions::reopens) reopens by itself; its callers keep their data until a
//!    flush succeeds. A flush that is asked for a lost write fails after the reopening too, unless
//!    another one reported the loss before.
//! 3. A transfer ends when all its bytes are moved, or with an error: short reads and writes are
//!    continued. After an error each block is old or new as far as the kernel and the medium keep
//!    blocks whole. So the default block size is the unit of the file system or of the disk.
//!
//! Map: [`FileDevice`] implements the trait; `buffered` moves data through the page cache; `direct`
//! around it, by `O_DIRECT` and the rings of `uring`; `engine` is the thread that completes started
//! requests; `space` makes and finds holes and zeroes; `gate` flushes; `reopen` opens the file
//! again.

mod buffered;
mod direct;
mod engine;
mod gate;
mod reopen;
mod space;
mod uring;

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use rustix::fs::OFlags;
use rustix::io::{Errno, retry_on_intr};

use self::direct::Direct;
use self::engine::Engine;
use self::gate::{Call, Failure, FlushGate};
use self::reopen::Reopening;
use self::uring::Started;
use super::flushes::Moment;
use super::{AsyncRequest, BlockDevice, BlockDeviceExt, DeviceError, DeviceErrorKind, Extent};
use super::{Geometry, Operation, Request, Result, WriteFlags, ZeroFlags};
use crate::durable;
use crate::opening::{self, Expected, WrongKind};

/// How data moves between a [`FileDevice`] and its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transfer {
    /// Through the page cache, by `pread` and `pwrite`.
    #[default]
    Buffered,
    /// Around the page cache, by `O_DIRECT` and `io_uring`.
    Direct,
}

/// How to open a [`FileDevice`].
#[derive(Debug, Clone, Default)]
pub struct FileOptions {
    /// Refuse every change.
    pub read_only: bool,
    /// How data moves.
    pub transfer: Transfer,
    /// Size of a block in bytes; otherwise the logical sector of a block device, or the unit of the
    /// file system up to 4096.
    pub block_bytes: Option<u32>,
    /// The file is the backing of a pool, which compares it later. Blocks get smaller, down to 512
    /// bytes, until they cover all bytes of the file. Opening changes nothing, not even times, so
    /// fast zeroing is not tried.
    pub as_backing: bool,
    /// Create the file with this size in bytes, or fail if it exists.
    pub create_bytes: Option<u64>,
    /// After a failure, reopen the path before the next request, and go on if it is the same file
    /// or disk. Only for callers that keep their data until a flush has succeeded: a failure is
    /// reported to the requests that met it, and to flushes that are asked for lost writes.
    pub reopens: bool,
    /// Returns a number that tells the disk from others; `None` if there is none. A disk that was
    /// attached again is reopened only if it has the number that the disk had when it was opened.
    pub identify: Option<fn(&File) -> Option<u64>>,
}

/// A file or a block device as a [`BlockDevice`].
pub struct FileDevice {
    /// Made by the first started request; `None` if the system has no `io_uring`.
    engine: OnceLock<Option<Engine>>,
    backing: Arc<Backing>,
    direct: Option<Direct>,
}

/// The open file and its properties.
struct Backing {
    /// Replaced when the file is opened again.
    file: RwLock<Arc<File>>,
    path: PathBuf,
    geometry: Geometry,
    gate: FlushGate,
    /// Set if the file is opened again after a failure.
    reopening: Option<Reopening>,
}

impl FileDevice {
    /// Opens the file or block device at `path`. A block device that is to be written must not be
    /// in use (mounted, or part of an array): it is opened exclusively, so drop the old device
    /// before opening a new one.
    ///
    /// # Errors
    /// Fails as [`Io`](DeviceErrorKind::Io) if the path cannot be opened; as
    /// [`Unsupported`](DeviceErrorKind::Unsupported) if it is neither a file nor a block device, if
    /// the block size does not fit, or if the kernel refuses `O_DIRECT` or `io_uring`.
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self> {
        // Checked first, so that a refusal leaves no new file.
        options.block_bytes.map_or(Ok(()), super::check_block_bytes)?;
        let file = open_file(path, options)?;
        let geometry = geometry_of(&file, path, options)?;
        let (path, gate) = (path.to_path_buf(), FlushGate::default());
        let reopening = options.reopens.then(|| Reopening::new(options, &file));
        let file = RwLock::new(Arc::new(file));
        let backing = Arc::new(Backing { file, path, geometry, gate, reopening });
        let direct = match options.transfer {
            Transfer::Buffered => None,
            Transfer::Direct => Some(Direct::new(&backing)?),
        };
        Ok(Self { engine: OnceLock::new(), backing, direct })
    }

    fn engine(&self) -> Option<&Engine> {
        let transfer = if self.direct.is_some() { Transfer::Direct } else { Transfer::Buffered };
        self.engine.get_or_init(|| Engine::start(&self.backing, transfer).ok()).as_ref()
    }

    /// Reports whether `operation` is a valid, non-empty read, write or flush.
    fn is_for_engine(&self, operation: &Operation<'_>) -> bool {
        let geometry = &self.backing.geometry;
        match operation {
            Operation::Read { .. } | Operation::Write { .. } => {
                operation.range().1 > 0 && geometry.check_operation(operation).is_ok()
            }
            Operation::Flush => !geometry.read_only,
            _ => false,
        }
    }
}

fn open_file(path: &Path, options: &FileOptions) -> Result<File> {
    let refused = |error: std::io::Error| {
        let hint = match Errno::from_io_error(&error) {
            Some(Errno::INVAL) if options.transfer == Transfer::Direct => {
                ": its file system has no O_DIRECT, use the buffered transfer"
            }
            Some(Errno::BUSY) => ": it is in use, unmount it first",
            _ => "",
        };
        let kind = match WrongKind::of(&error) {
            Some(_) => DeviceErrorKind::Unsupported,
            None => DeviceErrorKind::Io,
        };
        DeviceError::with_source(kind, format!("cannot open {}{hint}", path.display()), error)
    };
    let file = open_at(path, options).map_err(refused)?;
    if let Some(bytes) = options.create_bytes {
        file.set_len(bytes).and_then(|()| sync_new(&file, path)).map_err(refused)?;
    }
    Ok(file)
}

fn open_at(path: &Path, options: &FileOptions) -> std::io::Result<File> {
    let is_block = path.metadata().is_ok_and(|it| it.file_type().is_block_device());
    let mut flags = OFlags::CLOEXEC;
    flags.set(OFlags::DIRECT, options.transfer == Transfer::Direct);
    flags.set(OFlags::EXCL, is_block && !options.read_only);
    let mut open = std::fs::OpenOptions::new();
    open.read(true).write(!options.read_only).create_new(options.create_bytes.is_some());
    open.custom_flags(flags.bits().cast_signed());
    match options.create_bytes {
        Some(_) => open.open(path),
        None => opening::open(path, Expected::Blocks, &open),
    }
}

/// Makes a new file's name durable: flushes of the file alone do not.
fn sync_new(file: &File, path: &Path) -> std::io::Result<()> {
    file.sync_all()?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn geometry_of(file: &File, path: &Path, options: &FileOptions) -> Result<Geometry> {
    let path = path.display();
    let os = |errno: Errno| DeviceError::os(format!("inspecting {path}"), errno);
    let metadata = file.metadata().map_err(|error| os(errno_of(&error)))?;
    let is_block = metadata.file_type().is_block_device();
    let unit = if is_block {
        rustix::fs::ioctl_blksszget(file).map_err(os)?
    } else {
        u32::try_from(metadata.blksize()).unwrap_or(4096).clamp(512, 4096)
    };
    let mut block_bytes = options.block_bytes.unwrap_or(unit);
    super::check_block_bytes(block_bytes)?;
    // Seeks to the end, because the metadata of a block device has no length.
    let size = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(os)?;
    if options.as_backing && size >= super::BLOCK_BYTES_MIN.into() {
        block_bytes = whole_block_bytes(size, block_bytes).ok_or_else(|| {
            let context = format!(
                "{path} has {size} bytes, expected a multiple of 512: its last bytes are in no block"
            );
            DeviceError::new(DeviceErrorKind::Unsupported, context)
        })?;
    }
    Ok(Geometry {
        preferred_bytes: PREFERRED_BYTES,
        read_only: options.read_only,
        fast_zero: !(options.read_only || options.as_backing)
            && space::is_zeroing_fast(file, &metadata, size),
        ..Geometry::plain(block_bytes, size / u64::from(block_bytes))
    })
}

/// Returns the largest block size up to `most_bytes` that divides `size`.
fn whole_block_bytes(size: u64, most_bytes: u32) -> Option<u32> {
    let smaller = std::iter::successors(Some(most_bytes), |it| Some(it / 2));
    let mut fitting = smaller.take_while(|it| *it >= super::BLOCK_BYTES_MIN);
    fitting.find(|it| size.is_multiple_of((*it).into()))
}

/// One request of this size keeps a disk busy without holding its queue for long.
const PREFERRED_BYTES: u32 = 64 << 10;

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl Backing {
    /// Returns the open file.
    fn file(&self) -> Arc<File> {
        Arc::clone(&self.file.read())
    }

    /// Returns the open file. After a failure, reopens it first if an attempt is due.
    fn reopened_file(&self) -> Arc<File> {
        self.reopen_where_due();
        self.file()
    }

    /// Returns the moment at which a write begins, and its file.
    fn begin_write(&self) -> (Moment, Arc<File>) {
        self.reopen_where_due();
        // In this order: a file that is replaced later loses the write.
        (self.gate.now(), self.file())
    }

    /// Ends a write that began at `begun`. A forced write is durable afterwards.
    fn end_write(&self, begun: Moment, is_forced: bool) -> Result<()> {
        if is_forced {
            return self.pass_gate(Call::ForcedWrite, begun);
        }
        self.gate.wrote(begun);
        Ok(())
    }

    /// Makes the error of a failed transfer.
    fn failed(&self, what: &str, offset: u64, len: u64, errno: Errno) -> DeviceError {
        self.suspect();
        let path = self.path.display();
        DeviceError::os(format!("{what} of {len} bytes at offset {offset} of {path}"), errno)
    }

    /// Makes the error of a transfer that found the end of the file before all bytes were moved.
    fn ended(&self, what: &str, offset: u64) -> DeviceError {
        let (path, size) = (self.path.display(), self.geometry.size_bytes());
        DeviceError::new(
            DeviceErrorKind::Io,
            format!(
                "{what} stopped at offset {offset} of {path}, which had {size} bytes when opened: \
                 it was cut short, reopen it"
            ),
        )
    }

    /// Makes all data durable that was written before the moment `called`.
    fn flush(&self, called: Moment) -> Result<()> {
        self.pass_gate(Call::Flush, called)
    }

    fn pass_gate(&self, call: Call, moment: Moment) -> Result<()> {
        self.reopen_where_due();
        // The file that is open when the flush begins: another flush may have been waited for.
        let sync = || {
            let file = self.file();
            retry_on_intr(|| durable::fdatasync(&file))
        };
        self.gate.pass(call, moment, sync).map_err(|failure| self.flush_failed(failure))
    }

    fn flush_failed(&self, failure: Failure) -> DeviceError {
        self.suspect();
        let path = self.path.display();
        match failure {
            Failure::Now(errno) => DeviceError::os(format!("flush of {path}"), errno),
            Failure::Earlier(errno) => DeviceError::os(
                format!(
                    "an earlier flush or forced write of {path}, so that bytes written before it \
                     may be lost (reopen it and write them again),"
                ),
                errno,
            ),
        }
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> Geometry {
        self.backing.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let backing = &self.backing;
        backing.geometry.check_operation(operation)?;
        if let Some(direct) = self.direct.as_ref().filter(|_| is_transfer(operation)) {
            return direct.run_one(backing, operation);
        }
        match *operation {
            Operation::Read { offset, ref mut buf } => backing.read_buffered(offset, buf),
            Operation::Write { offset, data, flags } => backing.write_buffered(offset, data, flags),
            Operation::Flush if backing.geometry.read_only => Ok(()),
            Operation::Flush => backing.flush(backing.gate.now()),
            Operation::Discard { offset, len } => backing.discard(offset, len),
            Operation::WriteZeroes { offset, len, flags } => self.zero(offset, len, flags),
            Operation::Status { offset, len, most, ref mut extents } => {
                **extents = backing.status(offset, len, most)?;
                Ok(())
            }
        }
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        match &self.direct {
            Some(direct) => direct.submit(self, batch),
            None => batch.iter_mut().for_each(|request| request.run_on(self)),
        }
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        let called = self.backing.gate.now();
        self.backing.reopen_where_due();
        let is_for_engine = self.is_for_engine(&request.operation());
        let is_flush = is_for_engine && matches!(request.operation(), Operation::Flush);
        // A write goes to the file that is open from here on.
        let moment = if is_flush { called } else { self.backing.gate.now() };
        let refused = match self.engine().filter(|_| is_for_engine) {
            Some(engine) => engine.submit(Started { request, moment }),
            None => Some(request),
        };
        match refused {
            Some(request) if is_flush => {
                super::run_on_pool(request, move |_| self.backing.flush(called));
            }
            Some(request) => super::start_on_pool(self, request),
            None => {}
        }
    }
}

/// Reports whether `operation` is a read or a write.
fn is_transfer(operation: &Operation<'_>) -> bool {
    matches!(operation, Operation::Read { .. } | Operation::Write { .. })
}

impl FileDevice {
    fn zero(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        let (begun, file) = self.backing.begin_write();
        if self.backing.zero_by_kernel(&file, offset, len, flags)? == space::Zeroed::NotHere {
            self.write_plain_zeroes(offset, len, flags)?;
        }
        self.backing.end_write(begun, flags.fua)
    }

    /// Writes zeroes as data, if the kernel cannot zero the range.
    fn write_plain_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        if flags.fast_only {
            return Err(DeviceError::not_fast(offset, len));
        }
        let zeroes = vec![0; len.min(1 << 20) as usize];
        let mut done = 0;
        while done < len {
            let step = (len - done).min(1 << 20);
            self.write(offset + done, &zeroes[..step as usize], WriteFlags::default())?;
            done += step;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;
