//! The requests of a machine that are not answered yet, in memory that outlives this process: the
//! machine's monitor keeps it, and hands it to the next server.
//!
//! The layout is the protocol's ("Inflight I/O tracking"). Each queue has a region: features (8
//! bytes), version (2), number of descriptors (2), head of the last batch (2), index of the used
//! ring (2). An entry of 16 bytes follows for each descriptor: in flight (1 byte), next of the
//! batch (2, at 6), counter (8, at 8).
//!
//! Invariants:
//! 1. A request that the server has taken, and whose answer the guest has not got, is in flight
//!    here at each moment. The mark is set before the request reaches the device.
//! 2. A request whose answer the guest has got is never run again, although the answer and the end
//!    of the mark are two stores: the head of the last batch is noted before the answer.
//! 3. The version is zero while no request is in flight and the queue rests.
//! 4. A machine has one disk until it is reset. Bytes that the protocol does not use have its mark,
//!    and tell whether acknowledged writes have ended with the last server.
//!
//! All stores are atomic, and each that ends a step has release order: a killed process leaves a
//! prefix of its stores. An answer is a batch of one.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{AtomicAccess, Bytes, GuestAddress};

use super::QUEUE_ENTRIES_MAX;
use super::chain::Fault;
use super::guest::{Guest, Part};

const VERSION: u16 = 1;
const VERSION_AT: u64 = 8;
const ENTRIES_AT: u64 = 10;
const LAST_HEAD_AT: u64 = 12;
const USED_INDEX_AT: u64 = 14;
const FRONT_BYTES: u64 = 16;
const ENTRY_BYTES: u64 = 16;
/// Where servers note their disk and themselves, in padding of the first entry of the first queue:
/// a state, and two halves of the disk's mark.
const STATE_AT: u64 = FRONT_BYTES + 1;
const MARKS_AT: [u64; 2] = [FRONT_BYTES + 2, FRONT_BYTES + 4];
/// The state of memory whose last server has lost no acknowledged write, even if it was killed.
const KEPT: u8 = 1;
/// The state of memory whose last server held acknowledged writes in memory of its own.
const HELD: u8 = 2;
const NEXT_AT: u64 = 6;
const COUNTER_AT: u64 = 8;
/// Regions begin at multiples of this.
const ALIGNMENT: u64 = 64;

/// Returns the size of a queue's region.
fn region_bytes(entries: u16) -> u64 {
    (FRONT_BYTES + ENTRY_BYTES * u64::from(entries)).next_multiple_of(ALIGNMENT)
}

/// Why a machine must not go on with a disk, until it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// The machine had another disk, whose content its guest knows.
    #[error(
        "the machine's disk was another pool, or had another size or access; reset the machine"
    )]
    OtherDisk,
    /// Its last server has ended with acknowledged writes in its memory.
    #[error(
        "the machine's last server has ended before it wrote its write cache back, and acknowledged \
         writes are lost; reset the machine"
    )]
    LostWrites,
    /// The memory is not all there.
    #[error("{0}")]
    Broken(#[from] Fault),
}

/// The requests in flight of all queues.
pub(super) struct Inflight {
    memory: Guest,
    /// Device and inode of the file.
    file: (u64, u64),
    queues: u16,
    entries: u16,
    /// Stores before the process is killed, as a test has it.
    #[cfg(test)]
    pub(super) stores_left: std::sync::atomic::AtomicU64,
}

impl Inflight {
    /// Makes the memory for `queues` of `entries` each, and returns its file and description.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn create(queues: u16, entries: u16) -> io::Result<(VhostUserInflight, File)> {
        let bytes = region_bytes(entries) * u64::from(queues);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("tidegate-inflight", flags)?);
        file.set_len(bytes)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((VhostUserInflight::new(bytes, 0, queues, entries), file))
    }

    /// Maps the memory in `file`, which this or an earlier server has made.
    ///
    /// # Errors
    /// The description does not fit the file or the protocol, or the system refuses.
    pub(super) fn open(described: &VhostUserInflight, file: File) -> io::Result<Arc<Self>> {
        let (queues, entries) = (described.num_queues, described.queue_size);
        let needed = region_bytes(entries) * u64::from(queues);
        let fits = described.mmap_size >= needed && entries <= QUEUE_ENTRIES_MAX && needed > 0;
        if !fits {
            let what = "the memory for requests in flight has another size than its queues need";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let metadata = file.metadata()?;
        let numbers = (metadata.dev(), metadata.ino());
        let part = Part {
            file,
            offset: described.mmap_offset,
            bytes: described.mmap_size,
            guest_address: 0,
            user_address: 0,
        };
        Ok(Arc::new(Self {
            memory: Guest::map(vec![part])?,
            file: numbers,
            queues,
            entries,
            #[cfg(test)]
            stores_left: u64::MAX.into(),
        }))
    }

    /// Notes that a server of the disk with `mark` uses the memory. One that does not survive a
    /// kill may lose acknowledged writes with its end, until [`confirm`](Self::confirm). The
    /// memory `is_own` if this server has claimed it before.
    ///
    /// # Errors
    /// The machine must not go on with this disk.
    pub(super) fn claim(
        &self,
        mark: u64,
        survives_a_kill: bool,
        is_own: bool,
    ) -> Result<(), Refusal> {
        let before = self.load::<u8>(STATE_AT)?;
        for (at, shift) in MARKS_AT.into_iter().zip([0, 16]) {
            let half = u16::try_from(mark >> shift & 0xffff).unwrap_or(0);
            if before == 0 {
                self.store(at, half)?;
            } else if self.load::<u16>(at)? != half {
                return Err(Refusal::OtherDisk);
            }
        }
        if before == HELD && !is_own {
            return Err(Refusal::LostWrites);
        }
        // Last: with the state, the halves of the mark are both there.
        self.store(STATE_AT, if survives_a_kill { KEPT } else { HELD })?;
        Ok(())
    }

    /// Notes that all acknowledged writes are durable, and no more will be acknowledged.
    pub(super) fn confirm(&self) {
        // Memory that is gone tells nothing to the next server.
        let _ = self.store(STATE_AT, KEPT);
    }

    /// Returns the numbers of the file.
    pub(super) fn file(&self) -> (u64, u64) {
        self.file
    }

    /// Returns the requests in flight of queue `number`, with `entries`.
    ///
    /// # Errors
    /// The memory is not for this queue.
    pub(super) fn queue(self: &Arc<Self>, number: u16, entries: u16) -> Result<Marks, Fault> {
        if number >= self.queues || entries > self.entries {
            return Err(Fault::Queue);
        }
        let at = region_bytes(self.entries) * u64::from(number);
        Ok(Marks { of: Arc::clone(self), at, entries, counter: 0 })
    }

    fn load<T: AtomicAccess>(&self, at: u64) -> Result<T, Fault> {
        self.memory.memory().load(GuestAddress(at), Ordering::Acquire).map_err(|_| Fault::Outside)
    }

    fn store<T: AtomicAccess>(&self, at: u64, value: T) -> Result<(), Fault> {
        #[cfg(test)]
        self.count_store()?;
        let stored = self.memory.memory().store(value, GuestAddress(at), Ordering::Release);
        stored.map_err(|_| Fault::Outside)
    }
}

#[cfg(test)]
impl Inflight {
    fn count_store(&self) -> Result<(), Fault> {
        let one_less = |left: u64| left.checked_sub(1);
        let counted = self.stores_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        counted.map(drop).map_err(|_| Fault::Outside)
    }
}

/// The requests in flight of one queue.
pub(super) struct Marks {
    of: Arc<Inflight>,
    at: u64,
    entries: u16,
    /// The next value of an entry's counter. It orders requests that are run again.
    counter: u64,
}

impl Marks {
    /// Begins to use the marks for a queue whose used ring has `used_index`. Returns the heads of
    /// requests that a killed server has not answered, in their order.
    ///
    /// # Errors
    /// The memory is of another queue.
    pub(super) fn begin(&mut self, used_index: u16) -> Result<Vec<u16>, Fault> {
        if self.of.load::<u16>(self.at + VERSION_AT)? == 0 {
            for head in 0..self.entries {
                self.set(head, false)?;
            }
            self.of.store(self.at + ENTRIES_AT, self.entries)?;
            self.of.store(self.at + USED_INDEX_AT, used_index)?;
            self.of.store(self.at + VERSION_AT, VERSION)?;
            return Ok(Vec::new());
        }
        if self.of.load::<u16>(self.at + ENTRIES_AT)? != self.entries {
            return Err(Fault::Queue);
        }
        self.end_last_batch(used_index)?;
        self.left()
    }

    /// Ends the marks of answers that the guest has got, and the killed server did not come to end.
    fn end_last_batch(&self, used_index: u16) -> Result<(), Fault> {
        let noted = self.of.load::<u16>(self.at + USED_INDEX_AT)?;
        let mut head = self.of.load::<u16>(self.at + LAST_HEAD_AT)?;
        for _ in 0..used_index.wrapping_sub(noted).min(self.entries) {
            self.set(head, false)?;
            head = self.of.load(self.entry(head)? + NEXT_AT)?;
        }
        self.of.store(self.at + USED_INDEX_AT, used_index)
    }

    fn left(&mut self) -> Result<Vec<u16>, Fault> {
        let mut left = Vec::new();
        for head in 0..self.entries {
            let entry = self.entry(head)?;
            if self.of.load::<u8>(entry)? != 0 {
                left.push((self.of.load::<u64>(entry + COUNTER_AT)?, head));
            }
        }
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(left.into_iter().map(|(_, head)| head).collect())
    }

    /// Notes that the server has taken the request at `head`.
    ///
    /// # Errors
    /// There is no such entry.
    pub(super) fn take(&mut self, head: u16) -> Result<(), Fault> {
        self.of.store(self.entry(head)? + COUNTER_AT, self.counter)?;
        self.counter = self.counter.wrapping_add(1);
        self.set(head, true)
    }

    /// Notes that the request at `head` is about to be answered.
    ///
    /// # Errors
    /// There is no such entry.
    pub(super) fn begin_answer(&self, head: u16) -> Result<(), Fault> {
        let last = self.of.load::<u16>(self.at + LAST_HEAD_AT)?;
        self.of.store(self.entry(head)? + NEXT_AT, last)?;
        self.of.store(self.at + LAST_HEAD_AT, head)
    }

    /// Notes that the guest has got the answer to the request at `head`. The index of the used ring
    /// is `used_index` since.
    ///
    /// # Errors
    /// There is no such entry.
    pub(super) fn end_answer(&self, head: u16, used_index: u16) -> Result<(), Fault> {
        self.set(head, false)?;
        self.of.store(self.at + USED_INDEX_AT, used_index)
    }

    /// Ends the use of the marks: no request is in flight.
    pub(super) fn end(&self) {
        // Memory that is gone tells nothing to the next server.
        let _ = self.of.store(self.at + VERSION_AT, 0_u16);
    }

    fn set(&self, head: u16, is_in_flight: bool) -> Result<(), Fault> {
        self.of.store(self.entry(head)?, u8::from(is_in_flight))
    }

    fn entry(&self, head: u16) -> Result<u64, Fault> {
        let at = self.at + FRONT_BYTES + ENTRY_BYTES * u64::from(head);
        if head < self.entries { Ok(at) } else { Err(Fault::Twice) }
    }
}
