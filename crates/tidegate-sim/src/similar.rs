//! Blocks that differ in few lines: the blocks of a history in another code.
//!
//! Histories change each word of a block with every write. Here each line of 64 bytes carries four
//! bits of the stamp, so that most lines of a block stay unchanged from one write to the next.

use std::sync::Arc;

use tidegate::device::{BlockDevice, BlockDeviceExt, Geometry, Operation, Result};

use crate::history::{payload, stamp_of};

const LINE: usize = 64;
/// Lines that carry all bits of a stamp together.
const TURN: usize = 8;

/// The device below, with blocks in the other code.
pub(crate) struct Similar(pub(crate) Arc<dyn BlockDevice>);

impl Similar {
    /// Changes each block of `data`, which begins at byte `offset`, as `change` does.
    fn each(&self, offset: u64, data: &mut [u8], change: impl Fn(u64, &mut [u8])) {
        let block_bytes = self.0.geometry().block_bytes;
        let first = offset / u64::from(block_bytes);
        let blocks = data.chunks_mut(block_bytes as usize);
        (first..).zip(blocks).for_each(|(lba, block)| change(lba, block));
    }
}

/// Returns word `index` of a block; its line carries `bits`.
fn word(bits: u32, lba: u64, index: usize) -> [u8; 8] {
    let word = if bits == 0 { 0 } else { u64::from(bits) << 32 | lba << 16 | index as u64 };
    word.to_le_bytes()
}

fn shift(line: usize) -> usize {
    line % TURN * 4
}

/// Encodes block `lba`, as its stamp determines.
fn encode(lba: u64, block: &mut [u8]) {
    let Some(stamp) = stamp_of(lba, block) else { return };
    for (line, bytes) in block.chunks_mut(LINE).enumerate() {
        let bits = stamp >> shift(line) & 15;
        for (at, bytes) in bytes.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&word(bits, lba, line * LINE / 8 + at));
        }
    }
}

/// Decodes block `lba`; a block that matches no stamp stays torn.
fn decode(lba: u64, block: &mut [u8]) {
    let bits_of = |line: &[u8]| u32::from_le_bytes([line[4], line[5], line[6], line[7]]);
    let lines = block.chunks(LINE).take(TURN).enumerate();
    let stamp = lines.fold(0, |stamp, (line, bytes)| stamp | (bits_of(bytes) & 15) << shift(line));
    let mut expected = payload(lba, stamp, block.len());
    encode(lba, &mut expected);
    let is_whole = expected == block;
    if is_whole {
        block.copy_from_slice(&payload(lba, stamp, block.len()));
    } else {
        block.fill(0xFF);
    }
}

impl BlockDevice for Similar {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                self.0.read(offset, buf)?;
                self.each(offset, buf, decode);
                Ok(())
            }
            Operation::Write { offset, data, flags } => {
                let mut data = data.to_vec();
                self.each(offset, &mut data, encode);
                self.0.write(offset, &data, flags)
            }
            _ => self.0.run(operation),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_and_mixed_ones_are_torn() {
        for stamp in [0, 1, 2, 103, 4097, 1 << 30] {
            let expected = payload(5, stamp, 4096);
            let mut block = expected.clone();
            encode(5, &mut block);
            assert_eq!(block == expected, stamp == 0);
            let mut other = payload(5, stamp + 1, 4096);
            encode(5, &mut other);
            let changed = block.chunks(LINE).zip(other.chunks(LINE)).filter(|it| it.0 != it.1);
            assert!(changed.count() <= 2 * 4096 / LINE / TURN, "stamp {stamp}");
            let mut torn = block.clone();
            torn[2048..].copy_from_slice(&other[2048..]);
            decode(5, &mut torn);
            assert_eq!(stamp_of(5, &torn), None);
            decode(5, &mut block);
            assert_eq!(block, expected);
        }
    }
}
