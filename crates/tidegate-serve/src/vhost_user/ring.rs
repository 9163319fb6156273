//! The requests of one queue of a virtual machine, without its thread.
//!
//! Invariants:
//! 1. Each request that is taken from the queue gets exactly one answer, which is in the guest's
//!    memory before the guest is notified.
//! 2. The thread never waits for the device: a request that has to wait is started.
//! 3. A turn ends, whatever the guest does meanwhile: it takes at most as many requests as there
//!    are entries in the queue.
//! 4. After a [`Fault`] of the guest no more requests are taken. Those at the device are answered.
//! 5. A request in flight is marked in the machine's memory (`inflight`), if the machine has some.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLock};
use tidegate::device;
use tidegate::device::wake::Wake;
use tidegate::device::{
    BUFFER_EXTRA_BYTES, BlockDevice, Context, DeviceError, DeviceErrorKind, IoBuffer,
    OwnedOperation, WriteFlags, ZeroFlags,
};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;
use zerocopy::{FromZeros, IntoBytes};

use super::abi::{Header, Range, SERIAL_BYTES, Status, feature, kind};
use super::chain::{Chain, Fault, Table};
use super::event::Event;
use super::guest::Guest;
use super::inflight::Marks;
use super::{PAYLOADS_KEPT_BYTES, QUEUE_ENTRIES_MAX};
use crate::budget::Lease;
use crate::headroom;
use crate::mailbox::Mailbox;
use crate::payload::PayloadPool;
use crate::queue::{DeviceQueue, Done, Then};
use crate::request::{Action, Request, Rules, SECTOR_BYTES};
use crate::statistics::{RequestCounters, Tally};

/// Memory of a request without its data.
const JOB_BYTES: usize = 1024;

/// A request at the device.
pub(super) struct Job {
    request: Request,
    chain: Chain,
}

impl Job {
    /// Returns the bytes of the server's budget that the request takes.
    fn memory_bytes(&self) -> usize {
        JOB_BYTES + self.request.data_bytes() + BUFFER_EXTRA_BYTES
    }
}

/// The mailbox of a queue's complete requests.
pub(super) type Mail = Mailbox<Done<Job>>;

/// The device, as the queues of all machines see it.
pub(super) struct Disk {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) rules: Rules,
    pub(super) serial: [u8; SERIAL_BYTES],
    pub(super) counters: Arc<RequestCounters>,
}

/// The parts of a queue.
pub(super) struct Parts {
    pub(super) number: u16,
    pub(super) queue: Queue,
    pub(super) guest: Arc<RwLock<Arc<Guest>>>,
    pub(super) call: Arc<Mutex<Option<Event>>>,
    pub(super) marks: Option<Marks>,
    /// The guest sends no flushes: each write is durable when it is answered.
    pub(super) writes_through: bool,
    pub(super) mailbox: Arc<Mail>,
    pub(super) lease: Lease,
}

/// Returns a queue with `entries`, whose descriptors, available ring and used ring are at
/// `addresses`, for a guest that has `features`.
///
/// # Errors
/// The protocol does not allow the size or an address.
pub(super) fn queue(
    entries: u16,
    addresses: [GuestAddress; 3],
    features: u64,
    next_available: u16,
) -> Result<Queue, virtio_queue::Error> {
    let mut queue = Queue::new(QUEUE_ENTRIES_MAX)?;
    let [descriptors, available, used] = addresses;
    queue.try_set_size(entries)?;
    queue.try_set_desc_table_address(descriptors)?;
    queue.try_set_avail_ring_address(available)?;
    queue.try_set_used_ring_address(used)?;
    queue.set_event_idx(features & feature::EVENT_INDEX != 0);
    queue.set_next_avail(next_available);
    queue.set_ready(true);
    Ok(queue)
}

/// What a chain of descriptors asks for.
enum Asked {
    Device(Request),
    Serial,
    Refused,
    Unknown,
}

/// A queue.
pub(super) struct Ring {
    disk: Arc<Disk>,
    parts: Parts,
    device: DeviceQueue<Job>,
    done: Vec<Done<Job>>,
    /// Heads of requests that a killed server left, in their order.
    left: VecDeque<u16>,
    /// A request that waits for the server's memory.
    waiting: Option<Job>,
    /// Whether the request at each head is taken and not answered.
    taken: Vec<bool>,
    leased_bytes: usize,
    pool: PayloadPool,
    tally: Tally,
    fault: Option<Fault>,
    has_answered: bool,
    has_more: bool,
}

impl Ring {
    /// Returns the ring of a queue, and takes the requests up that a killed server left.
    pub(super) fn new(disk: Arc<Disk>, parts: Parts) -> Self {
        let context = Context { queue: parts.number.into(), class: 0 };
        let mailbox = Arc::clone(&parts.mailbox);
        let device = DeviceQueue::new(Arc::clone(&disk.device), context, mailbox);
        let mut ring = Self {
            disk,
            device,
            done: Vec::new(),
            left: VecDeque::new(),
            waiting: None,
            taken: vec![false; parts.queue.size().into()],
            leased_bytes: 0,
            pool: PayloadPool::new(PAYLOADS_KEPT_BYTES),
            tally: Tally::default(),
            fault: None,
            has_answered: false,
            has_more: true,
            parts,
        };
        ring.fault = ring.take_up().err();
        ring
    }

    /// Takes the requests up that a killed server has not answered.
    fn take_up(&mut self) -> Result<(), Fault> {
        let guest = self.guest();
        let queue = &mut self.parts.queue;
        let used = queue.used_idx(guest.memory(), Ordering::Acquire).map_err(|_| Fault::Queue)?.0;
        queue.set_next_used(used);
        let Some(marks) = &mut self.parts.marks else { return Ok(()) };
        let left = marks.begin(used)?;
        // Each request that was taken is answered or left.
        let left_number = u16::try_from(left.len()).map_err(|_| Fault::Queue)?;
        queue.set_next_avail(used.wrapping_add(left_number));
        self.left = left.into();
        Ok(())
    }

    fn guest(&self) -> Arc<Guest> {
        Arc::clone(&self.parts.guest.read())
    }

    /// Returns the event that requests are complete, or that the server has memory again.
    pub(super) fn wake(&self) -> &Wake {
        self.parts.mailbox.wake()
    }

    /// Returns the number of requests that are taken and not answered.
    pub(super) fn in_flight(&self) -> usize {
        self.device.in_flight() + usize::from(self.waiting.is_some()) + self.left.len()
    }

    /// Returns whether the queue may have more requests, and the ring can take them.
    pub(super) fn has_more(&self) -> bool {
        self.has_more && self.may_take()
    }

    /// Returns whether the ring can take more requests.
    pub(super) fn may_take(&self) -> bool {
        self.waiting.is_none() && self.fault.is_none()
    }

    /// Returns how the guest broke the rules, if it did.
    pub(super) fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Answers the requests that are complete, and takes new ones unless `is_leaving`. Notifies the
    /// guest of answers.
    pub(super) fn turn(&mut self, is_leaving: bool) {
        let guest = self.guest();
        let turned = self.answer_done(&guest).and_then(|()| self.take_all(&guest, is_leaving));
        let is_whole = if guest.is_whole() { Ok(()) } else { Err(Fault::Outside) };
        if let Err(fault) = turned.and(is_whole) {
            self.fault = self.fault.or(Some(fault));
            self.left.clear();
        }
        self.notify(&guest);
    }

    fn answer_done(&mut self, guest: &Guest) -> Result<(), Fault> {
        let mut done = std::mem::take(&mut self.done);
        self.device.collect(&mut done);
        let mut answered = Ok(());
        for Done { tag, result, operation } in done.drain(..) {
            answered = answered.and(self.end(guest, &tag, operation, &result));
        }
        self.done = done;
        answered
    }

    fn take_all(&mut self, guest: &Guest, is_leaving: bool) -> Result<(), Fault> {
        if let Some(job) = self.waiting.take() {
            self.start(guest, job)?;
        }
        while self.may_take()
            && let Some(head) = self.left.pop_front()
        {
            self.arrive(guest, head)?;
        }
        self.has_more = false;
        // A guest may ask for more as long as it gets answers: others have to go on meanwhile.
        for _ in 0..self.taken.len() {
            if !self.may_take() || is_leaving {
                return Ok(());
            }
            let Some(head) = self.next_head(guest)? else {
                let queue = &mut self.parts.queue;
                let more = queue.enable_notification(guest.memory()).map_err(|_| Fault::Queue)?;
                self.has_more = more;
                return Ok(());
            };
            if let Some(marks) = &mut self.parts.marks {
                marks.take(head)?;
            }
            self.arrive(guest, head)?;
        }
        self.has_more = true;
        Ok(())
    }

    /// Returns the head of the next request in the queue.
    fn next_head(&mut self, guest: &Guest) -> Result<Option<u16>, Fault> {
        let queue = &mut self.parts.queue;
        let mut available = queue.iter(guest.memory()).map_err(|_| Fault::Queue)?;
        Ok(available.next().map(|chain| chain.head_index()))
    }

    /// Begins the request at `head`.
    fn arrive(&mut self, guest: &Guest, head: u16) -> Result<(), Fault> {
        let taken = self.taken.get_mut(usize::from(head)).ok_or(Fault::Twice)?;
        if std::mem::replace(taken, true) {
            return Err(Fault::Twice);
        }
        let queue = &self.parts.queue;
        let table = Table::of_queue(queue.desc_table(), queue.size());
        let chain = Chain::collect(guest.memory(), table, head)?;
        match self.asked(guest, &chain)? {
            Asked::Device(request) => self.start(guest, Job { request, chain }),
            Asked::Serial => {
                let len = chain.answer_bytes()?.min(SERIAL_BYTES);
                let serial = self.disk.serial;
                chain.writable.write(guest.memory(), 0, &serial[..len])?;
                self.answer(guest, &chain, len, Status::Done)
            }
            Asked::Refused => {
                self.tally.refused(None);
                self.answer(guest, &chain, 0, Status::Failed)
            }
            Asked::Unknown => {
                self.tally.refused(None);
                self.answer(guest, &chain, 0, Status::Unsupported)
            }
        }
    }

    fn asked(&self, guest: &Guest, chain: &Chain) -> Result<Asked, Fault> {
        let answer_bytes = chain.answer_bytes()?;
        let mut header = Header::new_zeroed();
        chain.readable.read(guest.memory(), 0, header.as_mut_bytes())?;
        let data_bytes = chain.readable.len() - size_of::<Header>();
        let of_data = |action, bytes: usize| {
            let bytes = bytes as u64;
            if !bytes.is_multiple_of(SECTOR_BYTES) {
                return Asked::Refused;
            }
            self.checked(action, header.first_sector.get(), bytes / SECTOR_BYTES)
        };
        Ok(match header.kind.get() {
            kind::READ => of_data(Action::Read, answer_bytes),
            kind::WRITE => {
                of_data(Action::Write(WriteFlags { fua: self.parts.writes_through }), data_bytes)
            }
            kind::FLUSH => self.checked(Action::Flush, 0, 0),
            kind::SERIAL => Asked::Serial,
            kind @ (kind::DISCARD | kind::WRITE_ZEROES) => {
                if data_bytes != size_of::<Range>() {
                    return Ok(Asked::Refused);
                }
                let mut range = Range::new_zeroed();
                chain.readable.read(guest.memory(), size_of::<Header>(), range.as_mut_bytes())?;
                self.of_range(kind, &range)
            }
            _ => Asked::Unknown,
        })
    }

    fn of_range(&self, kind: u32, range: &Range) -> Asked {
        let flags = range.flags.get();
        let zeroes = ZeroFlags {
            fua: self.parts.writes_through,
            may_unmap: flags & Range::UNMAP != 0,
            fast_only: false,
        };
        let (action, allowed) = match kind {
            kind::DISCARD => (Action::Discard, 0),
            _ => (Action::WriteZeroes(zeroes), Range::UNMAP),
        };
        if flags & !allowed != 0 {
            return Asked::Unknown;
        }
        self.checked(action, range.first_sector.get(), range.sectors.get().into())
    }

    fn checked(&self, action: Action, first_sector: u64, sectors: u64) -> Asked {
        match self.disk.rules.check(action, first_sector, sectors) {
            Ok(request) => Asked::Device(request),
            Err(_) => Asked::Refused,
        }
    }

    /// Runs a request at once or starts it; keeps it if the server's memory is used up.
    fn start(&mut self, guest: &Guest, job: Job) -> Result<(), Fault> {
        if !self.parts.lease.grow(job.memory_bytes()) {
            self.waiting = Some(job);
            return Ok(());
        }
        self.leased_bytes += job.memory_bytes();
        let Some(mut buffer) = self.buffer_for(&job) else {
            self.release(&job);
            self.tally.failed(Some(job.request.kind()));
            return self.answer(guest, &job.chain, 0, Status::Failed);
        };
        if let Action::Write(_) = job.request.action {
            let data = buffer.as_mut().map_or(&mut [][..], IoBuffer::data_mut);
            let read = job.chain.readable.read(guest.memory(), size_of::<Header>(), data);
            read.inspect_err(|_| self.release(&job))?;
        }
        // A request with data has its buffer.
        let Some(mut operation) = job.request.operation(&mut buffer) else {
            self.release(&job);
            return Err(Fault::Queue);
        };
        if let Some(result) = self.device.attempt(&mut operation.borrow()) {
            return self.end(guest, &job, operation, &result);
        }
        self.device.start(job, operation, Then::Complete);
        Ok(())
    }

    /// Returns the buffer of a request, if it needs one. Returns `None` without memory.
    #[expect(clippy::option_option, reason = "no memory is not the same as no need")]
    fn buffer_for(&mut self, job: &Job) -> Option<Option<IoBuffer>> {
        if !matches!(job.request.action, Action::Read | Action::Write(_)) {
            return Some(None);
        }
        let bytes = job.request.data_bytes();
        let buffer = headroom::for_request(bytes).then(|| self.pool.take(bytes)).flatten();
        buffer.map(Some)
    }

    /// Gives the memory of a request back.
    fn release(&mut self, job: &Job) {
        self.leased_bytes = self.leased_bytes.saturating_sub(job.memory_bytes());
        self.parts.lease.shrink_to(self.leased_bytes);
    }

    /// Answers a request that the device has ended.
    fn end(
        &mut self,
        guest: &Guest,
        job: &Job,
        operation: OwnedOperation,
        result: &device::Result<()>,
    ) -> Result<(), Fault> {
        let request = &job.request;
        match result {
            Ok(()) => self.tally.done(Some(request.kind()), request.counted_bytes()),
            Err(error) => self.tally.ended_with(Some(request.kind()), error),
        }
        let buffer = operation.into_buffer();
        let mut data_bytes = 0;
        let mut delivered = Ok(());
        if let (Ok(()), Action::Read, Some(buffer)) = (result, request.action, &buffer) {
            data_bytes = buffer.data().len();
            delivered = job.chain.writable.write(guest.memory(), 0, buffer.data());
        }
        if let Some(buffer) = buffer {
            self.pool.put(buffer);
        }
        self.release(job);
        delivered?;
        let status = match result.as_ref().map_err(DeviceError::kind) {
            Ok(()) => Status::Done,
            Err(DeviceErrorKind::Unsupported) => Status::Unsupported,
            Err(_) => Status::Failed,
        };
        self.answer(guest, &job.chain, data_bytes, status)
    }

    /// Puts the answer into the guest's memory: `data_bytes` of data are there, and the status is
    /// the last byte.
    fn answer(
        &mut self,
        guest: &Guest,
        chain: &Chain,
        data_bytes: usize,
        status: Status,
    ) -> Result<(), Fault> {
        let head = chain.head;
        chain.writable.write(guest.memory(), chain.answer_bytes()?, &[status as u8])?;
        // With an error the space between stays as it was: the guest looks at the status first.
        let written = if status == Status::Done { data_bytes + 1 } else { 1 };
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        // A guest that has its answer finds it counted.
        self.disk.counters.add(&mut self.tally);
        if let Some(marks) = &self.parts.marks {
            marks.begin_answer(head)?;
        }
        let queue = &mut self.parts.queue;
        queue.add_used(guest.memory(), head, written).map_err(|_| Fault::Queue)?;
        let used = queue.next_used();
        if let Some(marks) = &self.parts.marks {
            marks.end_answer(head, used)?;
        }
        self.taken[usize::from(head)] = false;
        self.has_answered = true;
        Ok(())
    }

    /// Notifies the guest of answers, if it wants that.
    fn notify(&mut self, guest: &Guest) {
        if !std::mem::take(&mut self.has_answered) {
            return;
        }
        // A guest whose queue is broken is notified rather too often.
        if self.parts.queue.needs_notification(guest.memory()).unwrap_or(true)
            && let Some(call) = &*self.parts.call.lock()
        {
            call.signal();
        }
    }

    /// Ends the use of the queue once no request is in flight. Returns the index of the next
    /// request.
    pub(super) fn finish(self) -> u16 {
        if let Some(marks) = &self.parts.marks {
            marks.end();
        }
        self.parts.queue.next_avail()
    }
}
