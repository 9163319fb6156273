//! The memory of a virtual machine with one queue, as its driver writes it.

use std::fs::File;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

/// Entries of the queue: four for each request.
pub(crate) const ENTRIES: u16 = 64;
/// Requests at once.
pub(crate) const SLOTS: u16 = ENTRIES / 4;
/// The monitor's address of the memory.
pub(crate) const USER_ADDRESS: u64 = 0x7000_0000_0000;
pub(crate) const MEMORY_BYTES: u64 = 64 << 20;
pub(crate) const DESCRIPTORS_AT: u64 = 0x1000;
pub(crate) const AVAILABLE_AT: u64 = 0x2000;
pub(crate) const USED_AT: u64 = 0x3000;
const SLOTS_AT: u64 = 1 << 20;
/// Memory of a request: its header and status, and behind a page its data.
const SLOT_BYTES: u64 = 3 << 20;

pub(crate) const READ: u32 = 0;
pub(crate) const WRITE: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const SERIAL: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// The memory, which lives as long as the machine.
pub(crate) struct Memory {
    pub(crate) file: File,
    pub(crate) bytes: GuestMemoryMmap,
}

/// The descriptors of a request: address, length and flags of each.
pub(crate) type Descriptors<'a> = &'a [(u64, u32, u16)];

impl Memory {
    pub(crate) fn new() -> Self {
        let file = File::from(memfd_create("machine", MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(MEMORY_BYTES).expect("memory");
        let mapped = FileOffset::new(file.try_clone().expect("a descriptor"), 0);
        let bytes = usize::try_from(MEMORY_BYTES).expect("it fits");
        let range = (GuestAddress(0), bytes, Some(mapped));
        let bytes = GuestMemoryMmap::from_ranges_with_files([range]).expect("mapped");
        Self { file, bytes }
    }

    fn put_u16(&self, at: u64, value: u16) {
        self.bytes.store(value, GuestAddress(at), Ordering::Release).expect("stored");
    }

    fn u16(&self, at: u64) -> u16 {
        self.bytes.load(GuestAddress(at), Ordering::Acquire).expect("loaded")
    }

    /// Stores descriptors at `index` of the table at `table`, each followed by the next one.
    pub(crate) fn put_descriptors(&self, table: u64, index: u16, descriptors: Descriptors<'_>) {
        for (number, (address, len, flags)) in descriptors.iter().enumerate() {
            let number = u16::try_from(number).expect("few");
            let is_last = usize::from(number) + 1 == descriptors.len();
            let has_next = !is_last && flags & INDIRECT == 0;
            let flags = flags | if has_next { NEXT } else { 0 };
            self.put_descriptor(table, index + number, (*address, *len, flags), index + number + 1);
        }
    }

    pub(crate) fn put_descriptor(
        &self,
        table: u64,
        index: u16,
        (address, len, flags): (u64, u32, u16),
        next: u16,
    ) {
        let at = table + 16 * u64::from(index);
        self.bytes.write_obj(address, GuestAddress(at)).expect("stored");
        self.bytes.write_obj(len, GuestAddress(at + 8)).expect("stored");
        self.put_u16(at + 12, flags);
        self.put_u16(at + 14, next);
    }

    /// Stores descriptors in the queue's own table.
    pub(crate) fn put_chain(&self, index: u16, descriptors: Descriptors<'_>) {
        self.put_descriptors(DESCRIPTORS_AT, index, descriptors);
    }

    /// Makes the chain at `head` available.
    pub(crate) fn make_available(&self, head: u16) {
        let index = self.u16(AVAILABLE_AT + 2);
        self.put_u16(AVAILABLE_AT + 4 + 2 * u64::from(index % ENTRIES), head);
        self.put_u16(AVAILABLE_AT + 2, index.wrapping_add(1));
    }

    /// Returns the number of answers so far.
    pub(crate) fn used(&self) -> u16 {
        self.u16(USED_AT + 2)
    }

    /// Returns the head of answer number `index`.
    pub(crate) fn used_head(&self, index: u16) -> u16 {
        let at = USED_AT + 4 + 8 * u64::from(index % ENTRIES);
        let head: u32 = self.bytes.load(GuestAddress(at), Ordering::Acquire).expect("loaded");
        u16::try_from(head).expect("a head")
    }

    /// Returns the address of the memory of slot number `slot`.
    pub(crate) fn slot_at(slot: u16) -> u64 {
        SLOTS_AT + SLOT_BYTES * u64::from(slot)
    }

    fn put_header(&self, slot: u16, kind: u32, first_sector: u64) {
        let at = Self::slot_at(slot);
        self.bytes.write_obj(kind, GuestAddress(at)).expect("stored");
        self.bytes.write_obj(0_u32, GuestAddress(at + 4)).expect("stored");
        self.bytes.write_obj(first_sector, GuestAddress(at + 8)).expect("stored");
    }

    /// Makes a request available at the head of `slot`. `data` is for the device to read, or
    /// `answer_bytes` are for it to write.
    pub(crate) fn submit(
        &self,
        slot: u16,
        kind: u32,
        first_sector: u64,
        data: &[u8],
        answer_bytes: u32,
    ) {
        let at = Self::slot_at(slot);
        self.put_header(slot, kind, first_sector);
        self.bytes.write_slice(&[0xff], GuestAddress(at + 16)).expect("stored");
        self.bytes.write_slice(data, GuestAddress(at + 4096)).expect("stored");
        let len = u32::try_from(data.len()).expect("short");
        let mut descriptors = vec![(at, 16, 0)];
        if len > 0 {
            // Two parts whose border is in no block's middle or in one's: both happen.
            let first = len / 3;
            descriptors.push((at + 4096, first, 0));
            descriptors.push((at + 4096 + u64::from(first), len - first, 0));
        } else if answer_bytes > 0 {
            let first = answer_bytes / 5;
            descriptors.push((at + 4096, first, WRITABLE));
            descriptors.push((at + 4096 + u64::from(first), answer_bytes - first, WRITABLE));
        }
        descriptors.push((at + 16, 1, WRITABLE));
        // Every other request has a table of its own.
        if slot % 2 == 1 {
            let table = at + 1024;
            self.put_descriptors(table, 0, &descriptors);
            let bytes = 16 * u32::try_from(descriptors.len()).expect("few");
            self.put_chain(4 * slot, &[(table, bytes, INDIRECT)]);
        } else {
            self.put_chain(4 * slot, &descriptors);
        }
        self.make_available(4 * slot);
    }

    /// Returns the status of the answer in `slot`: 0xff without one.
    pub(crate) fn status(&self, slot: u16) -> u8 {
        let at = GuestAddress(Self::slot_at(slot) + 16);
        self.bytes.load(at, Ordering::Acquire).expect("loaded")
    }

    /// Copies the data of the answer in `slot`.
    pub(crate) fn data(&self, slot: u16, into: &mut [u8]) {
        let at = GuestAddress(Self::slot_at(slot) + 4096);
        self.bytes.read_slice(into, at).expect("read");
    }
}
