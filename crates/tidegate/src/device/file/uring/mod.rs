//! The edge to `io_uring`, and the only `unsafe` of the devices: transfers of whole batches here,
//! transfers that own their memory in `flights`.
//!
//! Invariant (every `unsafe` here relies on it): [`Ring::run`] borrows the memory of its jobs and
//! does not return, and cannot unwind, before the kernel has completed every transfer that it
//! accepted. Entries that the kernel did not accept are in the submission queue only, and go away
//! with the ring, which the caller drops after a failed [`Ring::run`].

#![expect(
    unsafe_code,
    reason = "the kernel reads and writes memory that the type system cannot see it borrow"
)]

use std::fs::File;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

mod flights;

pub(super) use flights::{Flights, Started};

/// Entries of a ring: the most transfers in the kernel at once for one batch.
const ENTRIES: u32 = 64;

/// The most bytes of one transfer: well under the kernel's limit of 2 GiB - 4 KiB, and a multiple
/// of every block size.
const TRANSFER_BYTES_MAX: usize = 1 << 30;

/// The data of a transfer.
pub(super) enum Memory<'a> {
    /// Read from the file into this.
    Read(&'a mut [u8]),
    /// Write this to the file, and force it to the medium if asked.
    Write(&'a [u8], Force),
    /// No data: make earlier writes durable.
    Sync,
}

/// Whether a write is to be durable when it completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Force {
    No,
    Yes,
}

/// One transfer of a batch.
pub(super) struct Job<'a> {
    memory: Memory<'a>,
    transfer: Transfer,
}

/// How far a transfer got.
struct Transfer {
    offset: u64,
    len: usize,
    done: usize,
    /// Let a kernel thread block for the transfer: set after the kernel answered `EAGAIN`.
    blocking: bool,
    end: Option<Result<(), Stop>>,
}

/// Why a job stopped early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// The operating system's error.
    Os(Errno),
    /// Nothing more could be moved.
    Ended {
        /// Bytes moved before.
        done: usize,
    },
}

impl<'a> Job<'a> {
    pub(super) fn new(offset: u64, memory: Memory<'a>) -> Self {
        let transfer = Transfer::new(offset, memory.len());
        Self { memory, transfer }
    }

    /// Returns the result; a job that never ran failed with its ring.
    pub(super) fn end(&self) -> Result<(), Stop> {
        self.transfer.end.unwrap_or(Err(Stop::Os(Errno::IO)))
    }
}

impl Memory<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read(buf) => buf.len(),
            Self::Write(data, _) => data.len(),
            Self::Sync => 0,
        }
    }

    /// Makes the entry that moves the rest of `transfer`.
    fn entry(&mut self, file: &File, transfer: &Transfer) -> squeue::Entry {
        let fd = types::Fd(file.as_raw_fd());
        let at = transfer.offset + transfer.done as u64;
        let entry = match self {
            Self::Read(buf) => {
                let rest = &mut buf[transfer.done..];
                opcode::Read::new(fd, rest.as_mut_ptr(), clamp(rest.len())).offset(at).build()
            }
            Self::Write(data, force) => {
                let rest = &data[transfer.done..];
                let flags = if *force == Force::Yes { libc::RWF_DSYNC } else { 0 };
                opcode::Write::new(fd, rest.as_ptr(), clamp(rest.len()))
                    .offset(at)
                    .rw_flags(flags)
                    .build()
            }
            Self::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        if transfer.blocking { entry.flags(squeue::Flags::ASYNC) } else { entry }
    }
}

impl Transfer {
    fn new(offset: u64, len: usize) -> Self {
        Self { offset, len, done: 0, blocking: false, end: None }
    }

    /// Takes a completion in. Returns whether the transfer has ended. A transfer that stopped
    /// inside a unit of `unit` bytes continues at the unit's start, as `O_DIRECT` requires.
    fn complete(&mut self, result: i32, unit: usize) -> bool {
        match usize::try_from(result) {
            Ok(moved) => {
                let reached = (self.done + moved).min(self.len);
                let whole = if reached == self.len { reached } else { reached - reached % unit };
                self.end = match whole {
                    whole if whole == self.len => Some(Ok(())),
                    whole if whole == self.done => Some(Err(Stop::Ended { done: whole })),
                    _ => None,
                };
                self.done = whole;
            }
            Err(_) => match Errno::from_raw_os_error(result.wrapping_neg()) {
                Errno::INTR => {}
                Errno::AGAIN if !self.blocking => self.blocking = true,
                errno => self.end = Some(Err(Stop::Os(errno))),
            },
        }
        self.end.is_some()
    }
}

fn clamp(len: usize) -> u32 {
    u32::try_from(len.min(TRANSFER_BYTES_MAX)).unwrap_or(u32::MAX)
}

/// One ring: used by one batch at a time.
pub(super) struct Ring {
    ring: IoUring,
}

impl Ring {
    pub(super) fn new() -> Result<Self, Errno> {
        let ring = IoUring::new(ENTRIES);
        ring.map(|ring| Self { ring }).map_err(|error| super::errno_of(&error))
    }

    /// Runs every job to its end. After an error the ring is unusable, and jobs without a result
    /// did not run whole.
    pub(super) fn run(
        &mut self,
        file: &File,
        jobs: &mut [Job<'_>],
        unit: usize,
    ) -> Result<(), Errno> {
        let mut flight = Flight { queue: (0..jobs.len()).rev().collect(), pushed: 0 };
        while !flight.queue.is_empty() || flight.pushed > 0 {
            self.push(file, jobs, &mut flight);
            if let Err(errno) = enter(&self.ring) {
                self.drain(jobs, &mut flight, unit);
                return Err(errno);
            }
            self.reap(jobs, &mut flight, unit);
        }
        Ok(())
    }

    /// Fills the submission queue. The completion queue is twice as long, so it cannot overflow.
    fn push(&mut self, file: &File, jobs: &mut [Job<'_>], flight: &mut Flight) {
        while flight.pushed < ENTRIES as usize {
            let Some(index) = flight.queue.pop() else { return };
            let Some(job) = jobs.get_mut(index) else { continue };
            let entry = job.memory.entry(file, &job.transfer).user_data(index as u64);
            // SAFETY: the entry points into the memory of `job`, which comes from slices, so it is
            // initialized. `run` borrows the jobs and does not return before the entry has
            // completed; an entry that the kernel never saw goes away with the ring.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                flight.queue.push(index);
                return;
            }
            flight.pushed += 1;
        }
    }

    /// Takes completions out; an unfinished job goes back to the queue.
    fn reap(&mut self, jobs: &mut [Job<'_>], flight: &mut Flight, unit: usize) {
        for completion in self.ring.completion() {
            flight.pushed = flight.pushed.saturating_sub(1);
            let index = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
            if let Some(job) = jobs.get_mut(index)
                && !job.transfer.complete(completion.result(), unit)
            {
                flight.queue.push(index);
            }
        }
    }

    /// Waits for the transfers in the kernel without entering it by the ring, which failed.
    fn drain(&mut self, jobs: &mut [Job<'_>], flight: &mut Flight, unit: usize) {
        loop {
            self.reap(jobs, flight, unit);
            if flight.pushed <= self.ring.submission().len() {
                return;
            }
            // The kernel posts completions when this thread passes through it, which yielding does.
            std::thread::yield_now();
        }
    }
}

/// Hands the submission queue of `ring` to the kernel and waits for a completion.
fn enter(ring: &IoUring) -> Result<(), Errno> {
    match ring.submit_and_wait(1) {
        Ok(_) => Ok(()),
        Err(error) => match super::errno_of(&error) {
            // An interrupted call, or a full completion queue: the next turn repeats the one and
            // empties the other.
            Errno::INTR | Errno::AGAIN | Errno::BUSY => Ok(()),
            errno => Err(errno),
        },
    }
}

/// The state of a batch in flight.
struct Flight {
    /// Jobs to push, last first.
    queue: Vec<usize>,
    /// Entries pushed and not completed.
    pushed: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: usize = 512;

    fn complete(results: &[i32]) -> (Vec<bool>, Job<'static>) {
        let mut job = Job::new(0, Memory::Write(&[0; 4096], Force::No));
        let over = results.iter().map(|result| job.transfer.complete(*result, UNIT)).collect();
        (over, job)
    }

    #[test]
    fn a_short_transfer_is_continued_at_a_whole_unit() {
        let (over, job) = complete(&[1000]);
        assert_eq!((over, job.transfer.done), (vec![false], 512));
        let (over, job) = complete(&[1024, 3072]);
        assert_eq!((over, job.end()), (vec![false, true], Ok(())));
    }

    #[test]
    fn a_transfer_that_gets_no_further_ends() {
        for results in [&[0][..], &[100], &[1024, 511]] {
            let (over, job) = complete(results);
            assert_eq!(over.last(), Some(&true), "{results:?}");
            assert_eq!(job.end(), Err(Stop::Ended { done: job.transfer.done }));
        }
    }

    #[test]
    fn more_than_was_asked_for_is_not_believed() {
        assert_eq!(complete(&[i32::MAX]).1.transfer.done, 4096);
    }

    #[test]
    fn interrupted_and_again_are_tried_again_but_not_for_ever() {
        let (intr, again) = (-libc::EINTR, -libc::EAGAIN);
        let (over, job) = complete(&[intr, intr, again, intr]);
        assert_eq!((over, job.transfer.blocking), (vec![false; 4], true));
        let (over, job) = complete(&[again, again]);
        assert_eq!((over, job.end()), (vec![false, true], Err(Stop::Os(Errno::AGAIN))));
        assert_eq!(complete(&[-libc::ENOSPC]).1.end(), Err(Stop::Os(Errno::NOSPC)));
    }

    #[test]
    fn a_file_that_cannot_be_written_fails_each_job() {
        let file = File::open("/dev/zero").unwrap();
        let data = [1; 512];
        let mut jobs: Vec<_> =
            (0..200).map(|_| Job::new(0, Memory::Write(&data, Force::No))).collect();
        Ring::new().unwrap().run(&file, &mut jobs, UNIT).unwrap();
        assert!(jobs.iter().all(|job| job.end() == Err(Stop::Os(Errno::BADF))));
    }
}
