//! Finds the records between two positions of a log.
//!
//! Records are found by position: at each step of 64 bytes the scanner asks whether the word that
//! would be a record's position says this one. Where it does and the header's checksum holds, the
//! record's length is known and its payload can be checked; where not, there is a hole: the rest of
//! a lap, or what a writer reserved and never finished.

use super::layout::RECORD_ALIGN_BYTES;
use super::pool::LogPool;
use super::record::Header;
use crate::pmem::PmemError;

/// An iterator over the whole records from one position to another, in order.
pub struct Scanner<'a> {
    pool: &'a LogPool,
    position: u64,
    end: u64,
    /// Records end within so many bytes of each lap.
    lap_bytes: u64,
    check_payloads: bool,
    torn: u64,
    changed: Vec<Header>,
    unreadable_bytes: u64,
}

impl<'a> Scanner<'a> {
    /// The records from `start` to `end`, each one checked whole. At most one lap is looked at.
    pub fn new(pool: &'a LogPool, start: u64, end: u64) -> Self {
        let end = end.min(start.saturating_add(pool.ring_bytes()));
        let position = start.next_multiple_of(RECORD_ALIGN_BYTES);
        let lap_bytes = pool.ring_bytes();
        Self {
            pool,
            position,
            end,
            lap_bytes,
            check_payloads: true,
            torn: 0,
            changed: Vec::new(),
            unreadable_bytes: 0,
        }
    }

    /// The same for records that are known to be whole, because their writers have finished them:
    /// payloads are not read.
    pub fn of_finished(pool: &'a LogPool, start: u64, end: u64) -> Self {
        Self { check_payloads: false, ..Self::new(pool, start, end) }
    }

    /// The same where only the first `lap_bytes` of the ring have space: to look behind them could
    /// ask for it.
    #[must_use]
    pub(super) fn in_laps_of(mut self, lap_bytes: u64) -> Self {
        self.lap_bytes = lap_bytes;
        self
    }

    /// Where the scanner is.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Records so far whose header is there and whose payload is not.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Those of the torn ones whose payload differs by one bit from its checksum: it was changed,
    /// or a crash cut it off and what had been there before differs by this bit.
    pub fn changed(&self) -> &[Header] {
        &self.changed
    }

    /// Bytes so far that could not be read.
    pub fn unreadable_bytes(&self) -> u64 {
        self.unreadable_bytes
    }

    /// The whole record at the present position, if there is one; moves on.
    fn step(&mut self) -> Result<Option<Header>, PmemError> {
        let ring_bytes = self.pool.ring_bytes();
        if self.position % ring_bytes >= self.lap_bytes {
            self.position += ring_bytes - self.position % ring_bytes;
            return Ok(None);
        }
        let Some(header) = self.pool.read_header(self.position)? else {
            self.position += RECORD_ALIGN_BYTES;
            return Ok(None);
        };
        self.position += header.record_bytes();
        if !self.check_payloads || self.pool.is_whole(&header)? {
            return Ok(Some(header));
        }
        self.torn += 1;
        if self.pool.is_one_bit_off(&header)? {
            self.changed.push(header);
        }
        Ok(None)
    }
}

impl Iterator for Scanner<'_> {
    type Item = Header;

    fn next(&mut self) -> Option<Header> {
        while self.position < self.end {
            let before = self.position;
            match self.step() {
                Ok(Some(header)) => return Some(header),
                Ok(None) => {}
                Err(_) => {
                    self.position = self.position.max(before + RECORD_ALIGN_BYTES);
                    self.unreadable_bytes += self.position - before;
                }
            }
        }
        None
    }
}
