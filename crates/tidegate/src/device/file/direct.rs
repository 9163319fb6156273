//! Transfers around the page cache: `O_DIRECT` through `io_uring`.
//!
//! Invariants:
//! 1. A ring serves one batch at a time. A device makes rings as needed, at most [`RINGS_MAX`]; a
//!    batch that finds none free waits for one.
//! 2. Memory that is not aligned to a block is copied through aligned memory.
//! 3. A forced write is `RWF_DSYNC` (one command with FUA on a disk that supports FUA). A failed
//!    one may mean that other data in the disk's cache is lost too, so it closes the gate and
//!    counts as a loss, as a failed flush does.

use std::fs::File;

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::uring::{Force, Job, Memory, Ring, Stop};
use super::{Backing, DeviceError, DeviceErrorKind, FileDevice, Result, is_transfer};
use crate::device::{IoBuffer, Operation, Request};

/// Most rings of a device: more batches than any disk serves at once.
const RINGS_MAX: usize = 16;

/// The rings of a device.
pub(super) struct Direct {
    pool: Mutex<Pool>,
    returned: Condvar,
}

struct Pool {
    idle: Vec<Ring>,
    made: usize,
}

impl Direct {
    /// Makes the first ring and tries a read with it.
    pub(super) fn new(backing: &Backing) -> Result<Self> {
        let ring = Ring::new().map_err(|errno| refused(backing, "io_uring", errno))?;
        let pool = Mutex::new(Pool { idle: vec![ring], made: 1 });
        let this = Self { pool, returned: Condvar::new() };
        if backing.geometry.blocks > 0 {
            this.try_first_block(backing)?;
        }
        Ok(this)
    }

    fn try_first_block(&self, backing: &Backing) -> Result<()> {
        let block = backing.geometry.block_bytes as usize;
        let mut first = IoBuffer::new(block);
        let mut jobs = [Job::new(0, Memory::Read(first.data_mut()))];
        self.run(backing, &backing.file(), &mut jobs)
            .map_err(|errno| refused(backing, "io_uring", errno))?;
        match jobs[0].end() {
            Err(Stop::Os(Errno::INVAL)) => {
                Err(refused(backing, &format!("O_DIRECT in blocks of {block} bytes"), Errno::INVAL))
            }
            // A medium that fails here will fail later reads, each with its own error.
            _ => Ok(()),
        }
    }

    /// Runs one read or write.
    pub(super) fn run_one(&self, backing: &Backing, operation: &mut Operation<'_>) -> Result<()> {
        let mut request = [Request::new(operation.reborrow())];
        self.transfer(backing, &mut request);
        request[0].take_result().expect("a transfer stores a result")
    }

    /// Runs a batch: consecutive reads and writes as one transfer, other requests alone, in order.
    pub(super) fn submit(&self, device: &FileDevice, batch: &mut [Request<'_>]) {
        let is_ours = |request: &Request<'_>| is_transfer(&request.operation);
        for run in batch.chunk_by_mut(|one, other| is_ours(one) && is_ours(other)) {
            if is_ours(&run[0]) {
                self.transfer(&device.backing, run);
            } else {
                run[0].run_on(device);
            }
        }
    }

    /// Runs reads and writes at once and stores their results.
    fn transfer(&self, backing: &Backing, requests: &mut [Request<'_>]) {
        for request in &mut *requests {
            request.result = Some(backing.geometry.check_operation(&request.operation));
        }
        let mut flights: Vec<_> = requests
            .iter_mut()
            .filter(|it| matches!(it.result, Some(Ok(()))) && it.operation.range().1 > 0)
            .map(|request| (bounce_for(request, backing), request))
            .collect();
        let mut jobs: Vec<_> = flights
            .iter_mut()
            .map(|(bounce, request)| job_of(&mut request.operation, bounce.as_mut()))
            .collect();
        let (begun, file) = backing.begin_write();
        let ran = self.run(backing, &file, &mut jobs);
        let ends: Vec<_> = jobs.iter().map(Job::end).collect();
        drop(jobs);
        for ((bounce, request), end) in flights.iter_mut().zip(ends) {
            request.result = Some(finish(backing, request, bounce.as_ref(), end, ran));
            if is_unforced_write(&request.operation) && end.is_ok() {
                backing.gate.wrote(begun);
            }
        }
    }

    fn run(
        &self,
        backing: &Backing,
        file: &File,
        jobs: &mut [Job<'_>],
    ) -> std::result::Result<(), Errno> {
        if jobs.is_empty() {
            return Ok(());
        }
        let mut ring = self.take_ring()?;
        let ran = ring.run(file, jobs, backing.geometry.block_bytes as usize);
        self.give_back(ran.is_ok().then_some(ring));
        ran
    }

    fn take_ring(&self) -> std::result::Result<Ring, Errno> {
        let mut pool = self.pool.lock();
        loop {
            if let Some(ring) = pool.idle.pop() {
                return Ok(ring);
            }
            if pool.made < RINGS_MAX {
                break;
            }
            self.returned.wait(&mut pool);
        }
        pool.made += 1;
        drop(pool);
        Ring::new().inspect_err(|_| self.give_back(None))
    }

    /// Returns a ring to the pool; `None` if the ring was dropped.
    fn give_back(&self, ring: Option<Ring>) {
        let mut pool = self.pool.lock();
        match ring {
            Some(ring) => pool.idle.push(ring),
            None => pool.made -= 1,
        }
        self.returned.notify_one();
    }
}

fn is_unforced_write(operation: &Operation<'_>) -> bool {
    matches!(operation, Operation::Write { flags, .. } if !flags.fua)
}

fn job_of<'a>(operation: &'a mut Operation<'_>, bounce: Option<&'a mut IoBuffer>) -> Job<'a> {
    match operation {
        Operation::Read { offset, buf } => {
            Job::new(*offset, Memory::Read(bounce.map_or(&mut **buf, IoBuffer::data_mut)))
        }
        Operation::Write { offset, data, flags } => {
            let force = if flags.fua { Force::Yes } else { Force::No };
            let data = bounce.map_or(*data, |bounce| bounce.data());
            Job::new(*offset, Memory::Write(data, force))
        }
        _ => unreachable!("only reads and writes are transfers"),
    }
}

/// Ends a transfer: copies a read's data out of its bounce buffer, or makes the error.
fn finish(
    backing: &Backing,
    request: &mut Request<'_>,
    bounce: Option<&IoBuffer>,
    end: std::result::Result<(), Stop>,
    ran: std::result::Result<(), Errno>,
) -> Result<()> {
    let (offset, len) = request.operation.range();
    let (what, fua) = match &mut request.operation {
        Operation::Read { buf, .. } => {
            if let (Some(bounce), Ok(())) = (bounce, end) {
                buf.copy_from_slice(bounce.data());
            }
            ("read", false)
        }
        Operation::Write { flags, .. } => ("write", flags.fua),
        _ => unreachable!("only reads and writes are transfers"),
    };
    let stop = match (end, ran) {
        (Ok(()), _) => return Ok(()),
        (Err(_), Err(errno)) => Stop::Os(errno),
        (Err(stop), Ok(())) => stop,
    };
    Err(backing.transfer_failed(what, offset, len, stop, fua))
}

impl Backing {
    /// Makes the error of a transfer around the page cache. A failed forced write closes the gate,
    /// because other data in the disk's cache may be lost too.
    pub(super) fn transfer_failed(
        &self,
        what: &str,
        offset: u64,
        len: u64,
        stop: Stop,
        is_forced: bool,
    ) -> DeviceError {
        match stop {
            Stop::Ended { done } => self.ended(what, offset + done as u64),
            Stop::Os(errno) => {
                if is_forced && DeviceErrorKind::from(errno) == DeviceErrorKind::Io {
                    self.gate.fail(errno);
                }
                self.failed(what, offset, len, errno)
            }
        }
    }
}

fn refused(backing: &Backing, what: &str, errno: Errno) -> DeviceError {
    let (path, number) = (backing.path.display(), errno.raw_os_error());
    DeviceError::with_source(
        DeviceErrorKind::Unsupported,
        format!(
            "the kernel refuses {what} for {path} (OS error {number}): use the buffered transfer"
        ),
        std::io::Error::from(errno),
    )
}

/// Returns aligned memory for `O_DIRECT` if the request's own is not aligned. For a write it holds
/// the data.
fn bounce_for(request: &Request<'_>, backing: &Backing) -> Option<IoBuffer> {
    let is_aligned =
        |at: *const u8| at.addr().is_multiple_of(backing.geometry.block_bytes as usize);
    match &request.operation {
        Operation::Read { buf, .. } if !is_aligned(buf.as_ptr()) => Some(IoBuffer::new(buf.len())),
        Operation::Write { data, .. } if !is_aligned(data.as_ptr()) => {
            let mut bounce = IoBuffer::new(data.len());
            bounce.data_mut().copy_from_slice(data);
            Some(bounce)
        }
        _ => None,
    }
}
