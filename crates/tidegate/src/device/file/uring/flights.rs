//! Transfers in the kernel that own their memory.
//!
//! Invariant (every `unsafe` here relies on it): a request stays in its slot, untouched, from the
//! moment its entry is in the submission queue until its completion was taken out. Its memory is on
//! the heap and does not move with the slot. If the ring is given up first, that memory is leaked,
//! since the kernel may still write to it, and the request gets other memory.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

use super::{ENTRIES, Force, Memory, Stop, Transfer, enter};
use crate::device::flushes::Moment;
use crate::device::{AsyncRequest, Operation};

/// The number of the entry that polls the wake-up event.
const WAKE: u64 = u64::MAX;

/// A started request.
pub(in crate::device::file) struct Started {
    pub(in crate::device::file) request: AsyncRequest,
    /// The moment of the start.
    pub(in crate::device::file) moment: Moment,
}

/// A request on its way.
struct Flight {
    started: Started,
    force: Force,
    transfer: Transfer,
}

/// The transfers of one thread's ring.
pub(in crate::device::file) struct Flights {
    ring: IoUring,
    slots: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// Slots to hand to the kernel, in order of arrival.
    ready: std::collections::VecDeque<usize>,
    in_kernel: usize,
    is_armed: bool,
}

/// A request whose transfer has ended, and the result.
pub(in crate::device::file) type Landed = (Started, Result<(), Stop>);

impl Flights {
    pub(in crate::device::file) fn new() -> Result<Self, Errno> {
        let ring = IoUring::new(ENTRIES).map_err(|error| super::super::errno_of(&error))?;
        Ok(Self {
            ring,
            slots: Vec::new(),
            free: Vec::new(),
            ready: std::collections::VecDeque::new(),
            in_kernel: 0,
            is_armed: false,
        })
    }

    /// Returns whether no request is in flight.
    pub(in crate::device::file) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Adds a read, a write or a flush; a write is forced to the medium if `force` says so.
    pub(in crate::device::file) fn add(&mut self, mut started: Started, force: Force) {
        let (offset, len) = started.request.operation().range();
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let flight = Some(Flight { started, force, transfer: Transfer::new(offset, len) });
        let slot = self.free.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(flight);
        } else {
            self.slots[slot] = flight;
        }
        self.ready.push_back(slot);
    }

    /// Hands ready transfers to the kernel, waits until one completes or `wake` is readable, and
    /// adds the ended ones to `landed`. After an error the ring is unusable.
    pub(in crate::device::file) fn turn(
        &mut self,
        file: &File,
        unit: usize,
        wake: BorrowedFd<'_>,
        landed: &mut Vec<Landed>,
    ) -> Result<(), Errno> {
        self.arm(wake);
        self.push(file);
        enter(&self.ring)?;
        self.reap(unit, landed);
        Ok(())
    }

    /// Returns all requests, and leaks the memory of those that the kernel still holds.
    pub(in crate::device::file) fn abandon(&mut self) -> Vec<AsyncRequest> {
        let ready = std::mem::take(&mut self.ready);
        let flights = ready.into_iter().filter_map(|slot| self.land(slot));
        let mut requests: Vec<_> = flights.map(|flight| flight.started.request).collect();
        self.free.clear();
        let held = std::mem::take(&mut self.slots).into_iter().flatten();
        requests.extend(held.map(|mut flight| {
            flight.started.request.leak_memory();
            flight.started.request
        }));
        requests
    }

    fn arm(&mut self, wake: BorrowedFd<'_>) {
        if self.is_armed {
            return;
        }
        let fd = types::Fd(wake.as_raw_fd());
        let events = libc::POLLIN.unsigned_abs().into();
        let entry = opcode::PollAdd::new(fd, events).build().user_data(WAKE);
        // SAFETY: the entry refers to no memory.
        self.is_armed = unsafe { self.ring.submission().push(&entry) }.is_ok();
    }

    /// Fills the submission queue, except one entry for the wake-up. The completion queue is twice
    /// as long, so it cannot overflow.
    fn push(&mut self, file: &File) {
        while self.in_kernel < ENTRIES as usize - 1 {
            let Some(slot) = self.ready.pop_front() else { return };
            let Some(flight) = &mut self.slots[slot] else { continue };
            let Flight { started, force, transfer } = flight;
            let mut memory = match started.request.operation() {
                Operation::Read { buf, .. } => Memory::Read(buf),
                Operation::Write { data, .. } => Memory::Write(data, *force),
                _ => Memory::Sync,
            };
            let entry = memory.entry(file, transfer).user_data(slot as u64);
            // SAFETY: the entry points into heap memory of a request that stays in its slot until
            // the entry's completion is taken out (module invariant), so the memory outlives the
            // entry.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                self.ready.push_front(slot);
                return;
            }
            self.in_kernel += 1;
        }
    }

    fn reap(&mut self, unit: usize, landed: &mut Vec<Landed>) {
        let completions: Vec<_> =
            self.ring.completion().map(|it| (it.user_data(), it.result())).collect();
        for (number, result) in completions {
            if number == WAKE {
                self.is_armed = false;
                continue;
            }
            self.in_kernel = self.in_kernel.saturating_sub(1);
            let slot = usize::try_from(number).unwrap_or(usize::MAX);
            let Some(Some(flight)) = self.slots.get_mut(slot) else { continue };
            if !flight.transfer.complete(result, unit) {
                self.ready.push_back(slot);
            } else if let Some(flight) = self.land(slot) {
                landed.push((flight.started, flight.transfer.end.unwrap_or(Ok(()))));
            }
        }
    }

    fn land(&mut self, slot: usize) -> Option<Flight> {
        let flight = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(flight)
    }
}

impl Drop for Flights {
    /// Fails the requests that are left: those of a thread that panicked.
    fn drop(&mut self) {
        drop(self.abandon());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc::channel;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::device::{Context, DeviceError, DeviceErrorKind, IoBuffer, OwnedOperation};

    /// A read of an empty pipe stays in the kernel.
    #[test]
    fn a_request_in_the_kernel_ends_with_its_ring() {
        let (file, _writer) = std::io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(file));
        let wake = eventfd(1, EventfdFlags::empty()).unwrap();
        let mut flights = Flights::new().unwrap();
        let (ended, ends) = channel();
        for is_ended_by_drop in [false, true] {
            let ended = ended.clone();
            let operation = OwnedOperation::Read { offset: 0, buffer: IoBuffer::new(4096) };
            let completion = move |operation: OwnedOperation, result: Result<(), DeviceError>| {
                ended.send((operation.into_buffer(), result)).unwrap();
            };
            let request = AsyncRequest::new(operation, Context::default(), completion);
            flights.add(Started { request, moment: Moment::default() }, Force::No);
            flights.turn(&file, 1, wake.as_fd(), &mut Vec::new()).unwrap();
            assert!(ends.try_recv().is_err() && flights.in_kernel == 1);
            let error = || DeviceError::new(DeviceErrorKind::Io, "the ring failed");
            if is_ended_by_drop {
                drop(flights);
                let (buffer, result) = ends.try_recv().unwrap();
                assert!(buffer.is_some() && result.is_err());
                return;
            }
            flights.abandon().into_iter().for_each(|request| request.complete(Err(error())));
            let (buffer, result) = ends.try_recv().unwrap();
            assert!(buffer.is_some_and(|buffer| buffer.data().len() == 4096) && result.is_err());
            flights = Flights::new().unwrap();
        }
    }
}
