//! Histories: the operations of an execution's threads, their results, and the bytes of each write.
//!
//! Every write has a stamp of its own, and every 8 bytes of its blocks carry stamp, block and
//! position, so that a block that mixes two writes, or holds another block's bytes, is never taken
//! for a whole one.

use std::collections::BTreeSet;

use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError, WriteFlags, ZeroFlags};

use crate::model::{Effect, Interval, Stamp, TORN, outcomes};
use crate::random::Random;

/// One operation of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Write `blocks` blocks from `lba` on with `stamp`.
    Write {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
        /// The stamp, not 0.
        stamp: Stamp,
        /// Durable when acknowledged.
        fua: bool,
    },
    /// Read one block.
    Read {
        /// The block.
        lba: u64,
    },
    /// Discard one block.
    Discard {
        /// The block.
        lba: u64,
    },
    /// Write zeroes to one block.
    WriteZeroes {
        /// The block.
        lba: u64,
        /// The space may be given back.
        may_unmap: bool,
    },
    /// Flush the device.
    Flush,
}

/// An operation, and the thread number that the engine chooses a lane by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The operation.
    pub op: Op,
    /// The thread number that the engine sees.
    pub ordinal: usize,
}

/// The steps of each thread of an execution.
pub type Plan = Vec<Vec<Step>>;

/// An operation that was called.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The client that called.
    pub thread: usize,
    /// The operation.
    pub op: Op,
    /// Position of the call in the trace.
    pub begin: usize,
    /// Position of the return in the trace, or of the kill that came before it.
    pub end: usize,
    /// Whether the call returned.
    pub acknowledged: bool,
    /// The stamp that a read returned.
    pub read: Option<Stamp>,
}

/// Returns the bytes of block `lba` as `stamp` writes them.
pub fn payload(lba: u64, stamp: Stamp, block_bytes: usize) -> Vec<u8> {
    (0..block_bytes / 8).flat_map(|index| payload_word(lba, stamp, index).to_le_bytes()).collect()
}

fn payload_word(lba: u64, stamp: Stamp, index: usize) -> u64 {
    match stamp {
        0 => 0,
        _ => u64::from(stamp) << 32 | (lba & 0xffff) << 16 | index as u64,
    }
}

/// Returns the stamp of block `lba` if it is whole, or `None` if it is torn or another block's.
pub fn stamp_of(lba: u64, block: &[u8]) -> Option<Stamp> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let stamp = Stamp::try_from(word(&block[..8]) >> 32).ok()?;
    let mut words = block.chunks_exact(8).enumerate();
    words.all(|(index, bytes)| word(bytes) == payload_word(lba, stamp, index)).then_some(stamp)
}

/// Performs `op`; returns the bytes of a read.
///
/// # Errors
/// Errors of the device.
pub fn perform(device: &dyn BlockDevice, op: Op) -> Result<Option<Vec<u8>>, DeviceError> {
    let block = u64::from(device.geometry().block_bytes);
    let block_bytes = device.geometry().block_bytes as usize;
    match op {
        Op::Write { lba, blocks, stamp, fua } => {
            let data: Vec<u8> =
                (lba..lba + blocks).flat_map(|lba| payload(lba, stamp, block_bytes)).collect();
            device.write(lba * block, &data, WriteFlags { fua }).map(|()| None)
        }
        Op::Read { lba } => {
            let mut data = vec![0; block_bytes];
            device.read(lba * block, &mut data).map(|()| Some(data))
        }
        Op::Discard { lba } => device.discard(lba * block, block).map(|()| None),
        Op::WriteZeroes { lba, may_unmap } => {
            let flags = ZeroFlags { may_unmap, ..ZeroFlags::default() };
            device.write_zeroes(lba * block, block, flags).map(|()| None)
        }
        Op::Flush => device.flush().map(|()| None),
    }
}

impl Op {
    /// Returns the first block of the operation, or `None` for a flush.
    pub fn lba(self) -> Option<u64> {
        match self {
            Self::Write { lba, .. }
            | Self::Read { lba }
            | Self::Discard { lba }
            | Self::WriteZeroes { lba, .. } => Some(lba),
            Self::Flush => None,
        }
    }

    pub(crate) fn effect_on(self, block: u64, read: Option<Stamp>) -> Option<Effect> {
        match self {
            Op::Write { lba, blocks, stamp, .. } if (lba..lba + blocks).contains(&block) => {
                Some(Effect::Write(stamp))
            }
            Op::WriteZeroes { lba, .. } if lba == block => Some(Effect::Write(0)),
            Op::Discard { lba } if lba == block => Some(Effect::Discard),
            Op::Read { lba } if lba == block => read.map(Effect::Read),
            _ => None,
        }
    }

    fn zeroes(self, block: u64) -> bool {
        matches!(self, Op::Discard { lba } | Op::WriteZeroes { lba, .. } if lba == block)
    }

    pub(crate) fn durable_by_itself(self) -> bool {
        matches!(self, Op::Write { fua: true, .. })
    }
}

/// The calls of an execution, and the device's promises about them.
#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct History {
    /// The calls, of each thread in program order.
    pub calls: Vec<Call>,
    /// Acknowledged writes wait in volatile memory until the next flush.
    pub volatile_cache: bool,
    /// A crash undoes all writes that no flush covered, except FUA writes.
    pub atomic_flush: bool,
    /// A FUA write may cover the writes before it as a flush does.
    pub fua_commits: bool,
    /// A crash may tear the blocks that no flush covered.
    pub tears: bool,
}

impl History {
    /// Returns the values that block `lba`, `initial` at first, may hold after a crash at
    /// `position`.
    ///
    /// On devices whose writes are durable when they become visible, a value that a read returned
    /// survives, too. Zeroing becomes visible before it is durable (readers see the map first), so
    /// reads of a block that was zeroed do not count. Nor do any reads if writes may go to a
    /// backing that tears: the backing shows writes before it flushes them.
    pub fn after_crash(&self, lba: u64, initial: Stamp, position: usize) -> BTreeSet<Stamp> {
        let zeroed = self.calls.iter().any(|call| call.op.zeroes(lba));
        let required = |call: &Call| {
            let binding = !matches!(call.op, Op::Read { .. }) || !(zeroed || self.tears);
            binding && self.survives(call, position)
        };
        let mut stamps = outcomes(initial, &self.intervals(lba, required, position));
        if self.tears && self.calls.iter().any(|call| self.may_tear(call, lba, position)) {
            stamps.insert(TORN);
        }
        stamps
    }

    fn may_tear(&self, call: &Call, lba: u64, position: usize) -> bool {
        let writes = !matches!(call.op.effect_on(lba, call.read), None | Some(Effect::Read(_)));
        writes && call.begin < position && !self.survives(call, position)
    }

    /// Returns the values that a read of block `lba` may return after all calls. An empty set means
    /// that the recorded reads cannot be explained.
    pub fn after_all(&self, lba: u64, initial: Stamp) -> BTreeSet<Stamp> {
        outcomes(initial, &self.intervals(lba, |call| call.acknowledged, usize::MAX))
    }

    fn intervals(
        &self,
        lba: u64,
        required: impl Fn(&Call) -> bool,
        position: usize,
    ) -> Vec<Interval> {
        let begun = self.calls.iter().filter(|call| call.begin < position);
        let interval = |call: &Call| {
            let end = (call.end < position).then_some(call.end);
            let effect = call.op.effect_on(lba, call.read.filter(|_| end.is_some()))?;
            let required = required(call);
            let undone = matches!(effect, Effect::Read(_)) && !required;
            let interval =
                Interval { thread: call.thread, begin: call.begin, end, effect, required };
            (!undone).then_some(interval)
        };
        begun.filter_map(interval).collect()
    }

    /// Returns whether `call` was acknowledged before a crash at `position`, and a crash does not
    /// undo it.
    fn survives(&self, call: &Call, position: usize) -> bool {
        let flushed = || {
            let mut flushes = self.calls.iter().filter(|other| other.op == Op::Flush);
            flushes.any(|flush| flush.begin > call.end && flush.end < position)
        };
        let acknowledged = call.acknowledged && call.end < position;
        acknowledged && (!self.volatile_cache || call.op.durable_by_itself() || flushed())
    }
}

/// Shares of the operations in a random plan.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    /// Number of threads.
    pub threads: usize,
    /// Operations of each thread.
    pub ops: usize,
    /// Blocks used, not empty: with few, threads contend for the same blocks.
    pub lbas: &'static [u64],
    /// Most blocks of one write; the device must have that many blocks from each of `lbas` on.
    pub blocks_max: u64,
    /// Out of 100 operations, this many are reads.
    pub reads_pct: usize,
    /// Out of 100 operations, this many discard, this many write zeroes, and this many flush.
    pub others_pct: usize,
}

impl Mix {
    /// Makes a random plan. Stamps count on from `stamp`.
    pub fn plan(&self, random: &mut Random, stamp: &mut Stamp) -> Plan {
        let mut step = |_| Step { op: self.op(random, stamp), ordinal: random.below(4) };
        let mut thread = |_| (0..self.ops).map(&mut step).collect();
        (0..self.threads).map(&mut thread).collect()
    }

    fn op(&self, random: &mut Random, stamp: &mut Stamp) -> Op {
        let lba = *random.pick(self.lbas);
        let others = self.others_pct;
        match random.below(100) {
            dice if dice < self.reads_pct => Op::Read { lba },
            dice if dice < self.reads_pct + others => Op::Discard { lba },
            dice if dice < self.reads_pct + 2 * others => {
                Op::WriteZeroes { lba, may_unmap: random.one_in(2) }
            }
            dice if dice < self.reads_pct + 3 * others => Op::Flush,
            _ => {
                *stamp += 1;
                let blocks = 1 + random.word() % self.blocks_max;
                Op::Write { lba, blocks, stamp: *stamp, fua: random.one_in(4) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_back_and_tears_are_seen() {
        let old = payload(3, 7, 512);
        assert_eq!(stamp_of(3, &old), Some(7));
        assert_eq!(stamp_of(3, &[0; 512]), Some(0));
        assert_eq!(stamp_of(4, &old), None, "another block's bytes");
        for word in 0..64 {
            let mut torn = old.clone();
            torn[word * 8..word * 8 + 8].copy_from_slice(&payload(3, 8, 512)[word * 8..][..8]);
            assert_eq!(stamp_of(3, &torn), None, "word {word}");
        }
    }

    fn write(stamp: Stamp, begin: usize, end: usize) -> Call {
        let op = Op::Write { lba: 0, blocks: 1, stamp, fua: false };
        Call { thread: 0, op, begin, end, acknowledged: true, read: None }
    }

    #[test]
    fn durable_writes_survive_from_their_acknowledgement_on() {
        let history = History { calls: vec![write(5, 0, 4)], ..History::default() };
        assert_eq!(history.after_crash(0, 1, 4), [1, 5].into());
        assert_eq!(history.after_crash(0, 1, 5), [5].into());
        assert_eq!(history.after_crash(1, 1, 5), [1].into(), "another block");
    }

    #[test]
    fn cached_writes_survive_from_the_next_flush_on() {
        let flush = Call { op: Op::Flush, ..write(0, 5, 8) };
        let calls = vec![write(5, 0, 4), flush];
        let history = History { calls, volatile_cache: true, ..History::default() };
        assert_eq!(history.after_crash(0, 1, 8), [1, 5].into());
        assert_eq!(history.after_crash(0, 1, 9), [5].into());
    }
}
