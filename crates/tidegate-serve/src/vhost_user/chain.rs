//! The memory of one request: a chain of descriptors in the guest's memory.
//!
//! Invariants:
//! 1. A guest may change its descriptors at any time: each is read once, and checked then.
//! 2. A chain has at most [`DESCRIPTORS_MAX`] descriptors, and all of its memory exists.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use super::SEGMENTS_MAX;

/// Size of a descriptor.
const DESCRIPTOR_BYTES: u32 = 16;
/// Most descriptors of a chain: its data, header, status, and a reference to a table.
const DESCRIPTORS_MAX: u32 = SEGMENTS_MAX + 3;

/// How a guest broke the rules of its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    /// There are more descriptors than the device allows, such as in a loop.
    #[error("a chain has too many descriptors")]
    TooMany,
    /// A table of descriptors is in another one, or has no whole descriptors.
    #[error("a table of descriptors is not allowed")]
    Indirect,
    /// A descriptor for the device to read follows one for it to write.
    #[error("a chain has data for the device behind space for its answer")]
    Disorder,
    /// A descriptor is of memory that the machine does not have.
    #[error("a descriptor is outside the memory")]
    Outside,
    /// The request has no header, or no space for its status.
    #[error("a request is too short")]
    Short,
    /// A request is made anew before it was answered, or has a number outside the queue.
    #[error("a chain is used twice")]
    Twice,
    /// The queue itself is outside the memory, or has more requests than entries.
    #[error("the queue is broken")]
    Queue,
}

/// A part of the guest's memory.
#[derive(Debug, Clone, Copy)]
struct Segment {
    at: GuestAddress,
    len: usize,
}

/// Segments of memory as one row of bytes.
#[derive(Debug, Default)]
pub(super) struct Segments {
    all: Vec<Segment>,
    len: usize,
}

impl Segments {
    /// Returns the number of bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn push(&mut self, segment: Segment) {
        self.len += segment.len;
        self.all.push(segment);
    }

    /// Copies the bytes at `offset` to `into`.
    pub(super) fn read(
        &self,
        memory: &GuestMemoryMmap,
        offset: usize,
        into: &mut [u8],
    ) -> Result<(), Fault> {
        let mut done = 0;
        for segment in self.parts(offset, into.len()) {
            let part = into.get_mut(done..done + segment.len).ok_or(Fault::Short)?;
            memory.read_slice(part, segment.at).map_err(|_| Fault::Outside)?;
            done += segment.len;
        }
        if done == into.len() { Ok(()) } else { Err(Fault::Short) }
    }

    /// Copies `from` to the bytes at `offset`.
    pub(super) fn write(
        &self,
        memory: &GuestMemoryMmap,
        offset: usize,
        from: &[u8],
    ) -> Result<(), Fault> {
        let mut done = 0;
        for segment in self.parts(offset, from.len()) {
            let part = from.get(done..done + segment.len).ok_or(Fault::Short)?;
            memory.write_slice(part, segment.at).map_err(|_| Fault::Outside)?;
            done += segment.len;
        }
        if done == from.len() { Ok(()) } else { Err(Fault::Short) }
    }

    /// Returns the memory of at most `len` bytes at `offset`.
    fn parts(&self, offset: usize, len: usize) -> impl Iterator<Item = Segment> {
        let (mut skip, mut left) = (offset, len);
        self.all.iter().filter_map(move |segment| {
            let skipped = skip.min(segment.len);
            skip -= skipped;
            let taken = left.min(segment.len - skipped);
            left -= taken;
            let at = GuestAddress(segment.at.0 + skipped as u64);
            (taken > 0).then_some(Segment { at, len: taken })
        })
    }
}

/// The memory of one request.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) head: u16,
    /// Memory that the device reads.
    pub(super) readable: Segments,
    /// Memory that the device writes.
    pub(super) writable: Segments,
}

/// A table of descriptors in the guest's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table {
    at: GuestAddress,
    entries: u32,
    is_indirect: bool,
}

impl Table {
    /// Returns the table of a queue with `entries`.
    pub(super) fn of_queue(at: u64, entries: u16) -> Self {
        Self { at: GuestAddress(at), entries: entries.into(), is_indirect: false }
    }

    /// Returns the table that `descriptor` refers to.
    fn indirect(&self, descriptor: &Descriptor) -> Result<Self, Fault> {
        let entries = descriptor.len() / DESCRIPTOR_BYTES;
        if self.is_indirect || entries == 0 || !descriptor.len().is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(Fault::Indirect);
        }
        Ok(Self { at: descriptor.addr(), entries, is_indirect: true })
    }

    fn read(&self, memory: &GuestMemoryMmap, index: u16) -> Result<Descriptor, Fault> {
        if u32::from(index) >= self.entries {
            return Err(Fault::Outside);
        }
        let offset = u64::from(index) * u64::from(DESCRIPTOR_BYTES);
        let at = self.at.checked_add(offset).ok_or(Fault::Outside)?;
        memory.read_obj(at).map_err(|_| Fault::Outside)
    }
}

impl Chain {
    /// Collects the memory of the chain that begins at `head` of `table`.
    ///
    /// # Errors
    /// The chain breaks the rules.
    pub(super) fn collect(
        memory: &GuestMemoryMmap,
        mut table: Table,
        head: u16,
    ) -> Result<Self, Fault> {
        let mut chain = Self { head, ..Self::default() };
        let mut next = Some(head);
        let mut left = DESCRIPTORS_MAX;
        while let Some(index) = next {
            // So a loop ends, too.
            left = left.checked_sub(1).ok_or(Fault::TooMany)?;
            let descriptor = table.read(memory, index)?;
            if descriptor.refers_to_indirect_table() {
                table = table.indirect(&descriptor)?;
                next = Some(0);
                continue;
            }
            chain.add(memory, &descriptor)?;
            next = descriptor.has_next().then(|| descriptor.next());
        }
        Ok(chain)
    }

    fn add(&mut self, memory: &GuestMemoryMmap, descriptor: &Descriptor) -> Result<(), Fault> {
        let segment = Segment { at: descriptor.addr(), len: descriptor.len() as usize };
        let is_writable = descriptor.is_write_only();
        if !is_writable && self.writable.len() > 0 {
            return Err(Fault::Disorder);
        }
        let access = if is_writable { Permissions::Write } else { Permissions::Read };
        let is_there = segment.len == 0 || memory.check_range(segment.at, segment.len, access);
        if !is_there {
            return Err(Fault::Outside);
        }
        let segments = if is_writable { &mut self.writable } else { &mut self.readable };
        segments.push(segment);
        Ok(())
    }

    /// Returns the number of bytes for the answer's data: all but its status.
    ///
    /// # Errors
    /// There is no space for the status.
    pub(super) fn answer_bytes(&self) -> Result<usize, Fault> {
        self.writable.len().checked_sub(1).ok_or(Fault::Short)
    }
}
