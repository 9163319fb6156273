//! Reads and writes of a device whose calling thread may wait.

use std::io::IoSlice;
use std::time::Duration;

use super::index::Location;
use super::start::{SPACE, Turn, WHO};
use super::{Core, GROUP_BLOCKS, append_failed};
use crate::device::{Result, ZeroFlags, waits};
use crate::log::control::stats::Counter;
use crate::log::error::AppendError;
use crate::log::ring::Ticket;
use crate::sync::{Ordering, fence};

/// How long a write waits for free space before it looks again.
const TIMEOUT: Duration = Duration::from_secs(1);

impl Core {
    /// Appends one record once the log has the free space. `note` adds the record to the index.
    pub(super) fn append(&self, mut record: impl Record, note: impl Fn(u64)) -> Result<()> {
        if self.blocked.is_waiting() || !self.try_append(&mut record, &note)? {
            self.append_in_turn(record, note)?;
        }
        self.clean_where_due();
        Ok(())
    }

    /// Appends one record behind all writers that wait for free space.
    fn append_in_turn(&self, mut record: impl Record, note: impl Fn(u64)) -> Result<()> {
        let failures = self.ledger.failures();
        let turn = Turn::join(self);
        let _waiting = waits::begin(WHO, SPACE);
        loop {
            let space = self.ring.space_changes();
            if turn.has_come() && self.try_append(&mut record, &note)? {
                return Ok(());
            }
            self.wait_for_space(space, failures)?;
        }
    }

    /// Appends one record, which `note` adds to the index. Returns `false` without free space.
    pub(super) fn try_append(&self, record: &mut impl Record, note: &impl Fn(u64)) -> Result<bool> {
        loop {
            let appended = self.ring.begin_unlocked(self.file).and_then(|mut ticket| {
                // Noted before the ticket is dropped: invariant 1.
                record(&mut ticket).inspect(|position| {
                    debug_assert!(*position >= self.ring.tail());
                    note(*position);
                })
            });
            match appended {
                Ok(_) => {
                    self.wake_cleaner_where_due();
                    return Ok(true);
                }
                Err(AppendError::NoSlot) => self.ring.pool().region().relax(),
                Err(AppendError::Full) => return Ok(false),
                Err(error) => return Err(append_failed(error)),
            }
        }
    }

    /// Waits until the log may have free space again, after it was full when
    /// [`Ring::space_changes`] returned `space`.
    ///
    /// # Errors
    /// Fails if cleaning has failed since the count was `failures`.
    fn wait_for_space(&self, space: u32, failures: u64) -> Result<()> {
        if self.ledger.failures() != failures {
            return Err(self.full_and_failing());
        }
        self.ring.stats().add(Counter::FullWaits, 1);
        if self.waker.is_running() {
            // Also wakes a cleaner that rests after a failure.
            self.waker.wake_all();
            if self.is_scheduled {
                self.ring.pool().region().relax();
            } else {
                self.ring.wait_for_space(space, TIMEOUT);
            }
            return Ok(());
        }
        if let Some(mut scratch) = self.cleaning.try_lock() {
            return self.clean(&mut scratch).map(drop);
        }
        self.ring.pool().region().relax();
        Ok(())
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut at = offset;
        for part in data.chunks(self.record_bytes_max()) {
            self.append(write_record(at, part), self.note_write(at, part))?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Returns a function that adds the record of a write, by its position, to the index.
    pub(super) fn note_write(&self, offset: u64, data: &[u8]) -> impl Fn(u64) {
        let block = self.block_bytes();
        let (first, count) = (offset / block, data.len() as u64 / block);
        move |position| self.index.wrote(first, count, position, block)
    }

    pub(super) fn zero(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.append(zero_record(offset, len, flags), self.note_zeroes(offset, len))
    }

    /// Returns a function that adds a record of zeroes, by its position, to the index.
    pub(super) fn note_zeroes(&self, offset: u64, len: u64) -> impl Fn(u64) {
        let blocks = self.blocks_of(offset, len);
        move |position| self.index.zeroed(blocks.clone(), position)
    }

    /// Reads; `below` reads from the backing. Returns `false` if `below` did.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8], below: &impl ReadBelow) -> Result<bool> {
        let (block, block_bytes) = (self.block_bytes(), self.geometry.block_bytes as usize);
        let (mut lba, mut rest) = (offset / block, buf);
        while !rest.is_empty() {
            let in_group = GROUP_BLOCKS - lba % GROUP_BLOCKS;
            let step = usize::try_from(in_group).unwrap_or(1).saturating_mul(block_bytes);
            let (part, after) = rest.split_at_mut(step.min(rest.len()));
            loop {
                match self.read_group(lba, part, below)? {
                    GroupRead::Whole => break,
                    GroupRead::Cleaned => {}
                    GroupRead::WouldBlock => return Ok(false),
                }
            }
            lba += in_group;
            rest = after;
        }
        Ok(true)
    }

    /// Reads blocks of one group.
    fn read_group(&self, first: u64, buf: &mut [u8], below: &impl ReadBelow) -> Result<GroupRead> {
        let group = first / GROUP_BLOCKS;
        // Before the index, which still has the blocks of a cleaning in progress.
        let version = self.versions.version(group);
        let block_bytes = self.geometry.block_bytes as usize;
        let blocks = buf.len() / block_bytes;
        let tail = self.ring.tail();
        let location_of = |block: usize| self.index.find(first + block as u64, tail);
        let mut block = 0;
        let mut from_backing = false;
        while block < blocks {
            let location = location_of(block);
            let mut end = block + 1;
            if location == Location::Backing {
                while end < blocks && location_of(end) == Location::Backing {
                    end += 1;
                }
            }
            let part = &mut buf[block * block_bytes..end * block_bytes];
            match location {
                Location::Zero => part.fill(0),
                Location::Log(at) if !self.read_log(at, part)? => return Ok(GroupRead::Cleaned),
                Location::Log(_) => {}
                Location::Backing => {
                    from_backing = true;
                    if !below((first + block as u64) * self.block_bytes(), part)? {
                        return Ok(GroupRead::WouldBlock);
                    }
                }
            }
            block = end;
        }
        let is_whole = !from_backing || self.versions.unchanged(group, version);
        Ok(if is_whole { GroupRead::Whole } else { GroupRead::Cleaned })
    }

    /// Copies a block from the log. Returns `false` if its space was reused meanwhile.
    fn read_log(&self, at: u64, buf: &mut [u8]) -> Result<bool> {
        self.ring.pool().region().read(self.ring.pool().region_offset(at), buf)?;
        fence(Ordering::Acquire);
        Ok(self.ring.tail() <= at)
    }
}

/// Appends a record with a ticket, repeatedly if need be. Returns the record's position.
pub(super) trait Record:
    FnMut(&mut Ticket<'_>) -> std::result::Result<u64, AppendError>
{
}

impl<F: FnMut(&mut Ticket<'_>) -> std::result::Result<u64, AppendError>> Record for F {}

pub(super) fn write_record(offset: u64, data: &[u8]) -> impl Record {
    move |ticket: &mut Ticket<'_>| ticket.write(offset, &[IoSlice::new(data)], false)
}

pub(super) fn zero_record(offset: u64, len: u64, flags: ZeroFlags) -> impl Record {
    move |ticket: &mut Ticket<'_>| ticket.zero(offset, len, !flags.may_unmap)
}

/// Reads at an offset of the backing. Returns `false` if that would block.
pub(super) trait ReadBelow: Fn(u64, &mut [u8]) -> Result<bool> {}

impl<F: Fn(u64, &mut [u8]) -> Result<bool>> ReadBelow for F {}

/// The outcome of a read of blocks of one group.
enum GroupRead {
    /// All blocks have their newest version.
    Whole,
    /// Blocks were cleaned meanwhile: the group must be read again.
    Cleaned,
    /// The backing would block.
    WouldBlock,
}
