//! Destages the oldest part of the log to the backing.
//!
//! Only the newest version of a block is written: the log sees all versions of a block that is
//! written often, the backing only the last. Zeroes go before data, since live data is newer.
//!
//! Damage stops the cleaner: no tail passes an acknowledged record that is missing, and no byte
//! reaches the backing that its record's checksum does not confirm. The record stays in the log, so
//! `tidegate check` names it. A newer write of its blocks makes a damaged record needless.

use std::io::IoSlice;
use std::ops::Range;

use parking_lot::MutexGuard;

use super::index::Location;
use super::{Core, GROUP_BLOCKS, append_failed};
use crate::device::waits;
use crate::device::{
    self, BlockDeviceExt, DeviceError, DeviceErrorKind, Operation, Request, Result, WriteFlags,
    ZeroFlags,
};
use crate::log::control::stats::Counter;
use crate::log::control::table;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::pool::losses::Damage;
use crate::log::pool::record::{Header, RecordKind, payload_checksum};
use crate::log::pool::scan::Scanner;
use crate::log::ring::Ticket;
use crate::sync::Ordering;
use crate::tier::ledger::Failed;

/// Most bytes of one request to the backing.
const REQUEST_BYTES_MAX: u64 = 1 << 20;

/// Memory of the cleaner, kept from batch to batch.
#[derive(Default)]
pub(super) struct Scratch {
    /// Blocks of the batch and their positions.
    blocks: Vec<(u64, u64)>,
    /// Blocks of the batch that a later record made zero: the index forgets them with the batch.
    zeroed: Vec<u64>,
    zeroes: Vec<Zeroes>,
    /// Records that hold the blocks of the batch, by position.
    records: Vec<Header>,
    data: Vec<u8>,
    /// Payload of one record.
    payload: Vec<u8>,
}

/// Blocks to make zero.
struct Zeroes {
    blocks: Range<u64>,
    /// The backing keeps their space allocated.
    keeps_space: bool,
}

/// Neighbouring blocks that one request writes: the first block, and the range in the data.
struct Run {
    first: u64,
    bytes: Range<usize>,
}

impl Core {
    /// Wakes the cleaner after an append if the log is full enough.
    ///
    /// No wake-up is lost, by the one order of sequentially consistent stores and loads: the append
    /// changes the head before this looks whether the cleaner is idle, and a cleaner that turns
    /// idle says so before it looks at the head.
    #[inline]
    pub(super) fn wake_cleaner_where_due(&self) {
        if self.is_full_enough() {
            self.waker.wake();
        }
    }

    /// Cleans after an append that may wait, if no cleaner runs and the log is full enough.
    pub(super) fn clean_where_due(&self) {
        if !self.waker.is_running()
            && self.is_full_enough()
            && let Some(mut scratch) = self.cleaning.try_lock()
        {
            // The ledger has the failure.
            let _ = self.clean(&mut scratch);
        }
    }

    pub(super) fn is_filling(&self) -> bool {
        (self.is_full_enough() || self.blocked.is_waiting()) && self.has_work()
    }

    fn is_full_enough(&self) -> bool {
        self.used_bytes() > self.clean_from_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn lock_cleaning(&self) -> MutexGuard<'_, Scratch> {
        loop {
            match self.cleaning.try_lock() {
                Some(scratch) => return scratch,
                None => self.ring.pool().region().relax(),
            }
        }
    }

    /// Returns whether the log has a record that the backing may lack.
    pub(super) fn has_work(&self) -> bool {
        let defined_end = self.defined_end.load(Ordering::Acquire);
        self.ring.head() != defined_end || self.ring.tail() < self.defined_at()
    }

    /// Returns whether the log has changes that the backing may lack. The definition of the device
    /// is a record, but no change.
    pub(super) fn has_changes(&self) -> bool {
        self.has_work() && self.index.touches(&(0..self.geometry.blocks), self.ring.tail())
    }

    fn defined_at(&self) -> u64 {
        table::entry(&self.ring.control, self.file.index).defined_at().load(Ordering::Acquire)
    }

    /// Destages the oldest batch. Returns `false` if no record is finished.
    pub(super) fn clean(&self, scratch: &mut Scratch) -> Result<bool> {
        // No write bypasses the log, so the log has all data that the backing loses.
        self.try_to_clean(scratch).map_err(|failed| self.ledger.write_back_failed(failed, false))
    }

    fn try_to_clean(&self, scratch: &mut Scratch) -> std::result::Result<bool, Failed> {
        let start = self.ring.tail();
        let end = self.collect(start, self.ring.safe_position(), scratch)?;
        if end == start {
            return Ok(false);
        }
        self.destage(scratch)?;
        let end = if self.defined_at() < end { self.define_again(end) } else { end };
        if end == start {
            return Err(append_failed(super::AppendError::Full).into());
        }
        self.retire(end, scratch)?;
        Ok(true)
    }

    /// Destages all records at opening, before any writer appends, if the log is too full for the
    /// new definition. An empty log needs no definition in between.
    pub(super) fn empty_at_opening(&self) -> Result<()> {
        let mut scratch = self.lock_cleaning();
        let head = self.ring.safe_position();
        while self.ring.tail() < head {
            let end = self.collect(self.ring.tail(), head, &mut scratch)?;
            self.destage(&mut scratch)?;
            self.retire(end, &scratch)?;
        }
        Ok(())
    }

    /// Collects a batch of records from `start` on: their blocks and zeroes that no newer record
    /// has replaced. Returns the end of the batch.
    fn collect(&self, start: u64, safe: u64, scratch: &mut Scratch) -> Result<u64> {
        scratch.blocks.clear();
        scratch.zeroed.clear();
        scratch.zeroes.clear();
        scratch.records.clear();
        // Before the records: all below are durable, or are holes that a Gap before here covers.
        let finished = self.ring.catch_up();
        let mut records = self.ring.records(start, safe);
        let (mut end, batch_bytes) = (start, self.batch_bytes.load(Ordering::Relaxed));
        while end - start < batch_bytes {
            let Some(header) = records.next() else {
                end = safe;
                break;
            };
            end = header.position + header.record_bytes();
            self.collect_record(&header, start, scratch);
        }
        if records.unreadable_bytes() > 0 {
            let lost = records.unreadable_bytes();
            let message = format!("{lost} bytes of the log cannot be read");
            return Err(DeviceError::new(DeviceErrorKind::Io, message));
        }
        self.check_losses(&mut records, end, finished)?;
        Ok(end)
    }

    /// Checks that `records`, read up to `end`, miss no record that is acknowledged. All records
    /// below `finished` are.
    fn check_losses(&self, records: &mut Scanner<'_>, end: u64, finished: u64) -> Result<()> {
        let end = end.min(finished);
        if records.doubtful_from() >= end && records.losses.missing().next().is_none() {
            return Ok(());
        }
        // A Gap that covers a hole may be behind the batch.
        records.by_ref().for_each(drop);
        let told = records.losses.missing().next().filter(|missing| missing.start < end);
        let untold = records.doubtful_from();
        let position = match &told {
            Some(missing) => missing.start,
            None if untold < end => untold,
            None => return Ok(()),
        };
        if told.is_none() {
            // Its finished position tells the next opening that the missing record was
            // acknowledged. If the log does not take it, only this run tells the loss.
            let _ = self.define();
        }
        Err(damaged(&format!(
            "an acknowledged record at position {position} of the log has lost its header"
        )))
    }

    fn collect_record(&self, header: &Header, tail: u64, scratch: &mut Scratch) {
        let block = self.block_bytes();
        let first = header.offset / block;
        match header.kind {
            RecordKind::Write => {
                let (data, blocks) = (header.position + RECORD_ALIGN_BYTES, scratch.blocks.len());
                for index in 0..u64::from(header.payload_bytes) / block {
                    let (lba, at) = (first + index, data + index * block);
                    match self.index.find(lba, tail) {
                        Location::Log(newest) if newest == at => scratch.blocks.push((lba, at)),
                        Location::Zero => scratch.zeroed.push(lba),
                        Location::Log(_) | Location::Backing => {}
                    }
                }
                if scratch.blocks.len() > blocks {
                    scratch.records.push(*header);
                }
            }
            RecordKind::Zero => {
                let blocks = first..(header.offset + header.len) / block;
                let keeps_space = header.aux != 0;
                let newest = self.index.zeroes_of(&blocks, header.position).into_iter();
                scratch.zeroes.extend(newest.map(|blocks| Zeroes { blocks, keeps_space }));
            }
            _ => {}
        }
    }

    /// Writes the batch to the backing, durably.
    fn destage(&self, scratch: &mut Scratch) -> std::result::Result<(), Failed> {
        if scratch.blocks.is_empty() && scratch.zeroes.is_empty() {
            return Ok(());
        }
        scratch.blocks.sort_unstable();
        self.load(scratch)?;
        let Scratch { blocks, zeroes, data, .. } = scratch;
        let runs = self.runs_of(blocks);
        self.announce_cleaning(blocks, zeroes);
        let _waiting = waits::begin("the cleaner of the log", "the backing");
        let block = self.block_bytes();
        let zero = |Zeroes { blocks, keeps_space }: &Zeroes| {
            let (offset, len) = (blocks.start * block, (blocks.end - blocks.start) * block);
            let flags = ZeroFlags { may_unmap: !keeps_space, ..ZeroFlags::default() };
            Request::new(Operation::WriteZeroes { offset, len, flags })
        };
        self.submit(zeroes.iter().map(zero).collect()).map_err(Failed::Below)?;
        let write = |run: &Run| {
            let (offset, flags) = (run.first * block, WriteFlags::default());
            Request::new(Operation::Write { offset, data: &data[run.bytes.clone()], flags })
        };
        self.submit(runs.iter().map(write).collect()).map_err(Failed::Below)?;
        self.backing.flush().map_err(Failed::Below)?;
        self.ring.stats().add(Counter::CleanerSyncs, 1);
        Ok(())
    }

    /// Makes readers that are reading one of these blocks from the backing read it again.
    fn announce_cleaning(&self, blocks: &[(u64, u64)], zeroes: &[Zeroes]) {
        let groups = |Zeroes { blocks, .. }: &Zeroes| {
            blocks.start / GROUP_BLOCKS..=(blocks.end - 1) / GROUP_BLOCKS
        };
        let zeroed = zeroes.iter().flat_map(groups).map(|group| group * GROUP_BLOCKS);
        for lba in zeroed.chain(blocks.iter().map(|(lba, _)| *lba)) {
            self.versions.advance(lba / GROUP_BLOCKS);
        }
    }

    fn submit(&self, mut requests: Vec<Request<'_>>) -> Result<()> {
        self.backing.submit(&mut requests);
        requests.iter_mut().try_for_each(|request| request.take_result().unwrap_or(Ok(())))
    }

    /// Copies the blocks from the log to the data, in the order of the blocks.
    ///
    /// Whole payloads are read, each once, and the bytes that were read are compared with the
    /// checksum: the medium may change between two reads.
    fn load(&self, scratch: &mut Scratch) -> Result<()> {
        let Scratch { blocks, records, data, payload, .. } = scratch;
        let block = self.geometry.block_bytes as usize;
        device::resize(data, blocks.len() * block)?;
        let mut targets: Vec<_> =
            blocks.iter().map(|(_, at)| *at).zip(data.chunks_mut(block)).collect();
        targets.sort_unstable_by_key(|(at, _)| *at);
        let mut targets = targets.into_iter().peekable();
        for header in records.iter() {
            self.read_whole(header, payload)?;
            let (start, end) = (header.data_position(), header.position + header.record_bytes());
            while let Some((at, target)) = targets.next_if(|(at, _)| *at < end) {
                let from = usize::try_from(at - start).unwrap_or(usize::MAX);
                target.copy_from_slice(&payload[from..from + block]);
            }
        }
        Ok(())
    }

    /// Reads the payload of the record with this header.
    ///
    /// # Errors
    /// The memory failed, or the bytes are not those of the header's checksum.
    fn read_whole(&self, header: &Header, payload: &mut Vec<u8>) -> Result<()> {
        device::resize(payload, header.payload_bytes as usize)?;
        self.ring.pool().read_payload(header, 0, payload)?;
        if payload_checksum(&[IoSlice::new(payload)]) == header.payload_checksum {
            return Ok(());
        }
        Err(damaged(&format!("{}, was acknowledged and is damaged", Damage::of(header))))
    }

    /// Joins neighbours among the blocks, which are in order.
    fn runs_of(&self, blocks: &[(u64, u64)]) -> Vec<Run> {
        let block = self.geometry.block_bytes as usize;
        let mut runs: Vec<Run> = Vec::new();
        for (index, (lba, _)) in blocks.iter().enumerate() {
            let bytes = index * block..(index + 1) * block;
            match runs.last_mut() {
                Some(run) if self.joins(run, *lba) => run.bytes.end = bytes.end,
                _ => runs.push(Run { first: *lba, bytes }),
            }
        }
        runs
    }

    fn joins(&self, run: &Run, lba: u64) -> bool {
        let bytes = run.bytes.len() as u64;
        run.first + bytes / self.block_bytes() == lba && bytes < REQUEST_BYTES_MAX
    }

    /// Defines the device again, behind `end`. Returns the highest tail that is allowed then.
    fn define_again(&self, end: u64) -> u64 {
        match self.define() {
            Ok(()) => end,
            Err(_) => end.min(self.defined_at()),
        }
    }

    /// Appends the definition of the device.
    pub(super) fn define(&self) -> std::result::Result<(), super::AppendError> {
        let mut ticket: Ticket<'_> = self.ring.begin_unlocked(self.file)?;
        ticket.define(&self.binding.definition())?;
        let bytes = self.binding.record_bytes();
        self.defined_end.store(self.defined_at() + bytes, Ordering::Release);
        Ok(())
    }

    fn retire(&self, end: u64, scratch: &Scratch) -> Result<()> {
        let before = self.ring.tail();
        self.ring.retire_to(end).map_err(|error| {
            DeviceError::with_source(DeviceErrorKind::Io, "the log's tail cannot be moved", error)
        })?;
        self.ring.stats().add(Counter::RetiredBytes, end - before);
        let written = scratch.blocks.iter().map(|(lba, _)| lba);
        written.chain(&scratch.zeroed).for_each(|lba| self.index.forget(*lba, end));
        self.index.forget_zeroes(end);
        Ok(())
    }
}

/// Returns the error of a batch with a damaged or missing record.
fn damaged(what: &str) -> DeviceError {
    let cure = "the log keeps it and is not destaged past it; restore from a backup, or go on \
                without it by `tidegate recover --salvage`";
    DeviceError::new(DeviceErrorKind::Corrupt, format!("{what}; {cure}"))
}
