//! The state in which a pool left its backing: what another program's writes change.

use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

use super::layout::{BackingStateBytes, STATE_IS_KNOWN, STATE_IS_WRITING};

/// What a pool remembers of its backing, to notice that another program wrote to it. A number that
/// is not known is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingState {
    /// The identity that the backing had.
    pub said: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Size of a block in bytes, as the pool has used the backing since it is its one.
    pub block_bytes: u32,
    /// The pool wrote to the backing then: the times and checksums of this state are older.
    pub is_writing: bool,
    /// The time of this note, in nanoseconds since 1970.
    pub noted_ns: u64,
    /// When a file was changed last, in nanoseconds since 1970.
    pub modified_ns: u64,
    /// Checksum of the parts of the backing that file systems and partition tables change.
    pub areas: u64,
    /// The boot of the machine in which the next two were counted.
    pub boot: [u8; 16],
    /// The kernel's number of the disk's attachment.
    pub disk_sequence: u64,
    /// Sectors of the disk that were written or discarded since then.
    pub changed_sectors: u64,
    /// The number in the backing's mark.
    pub mark: u64,
    /// Another number that the mark may have after a power failure.
    pub mark_before: u64,
}

impl BackingState {
    pub(super) fn encode(&self) -> BackingStateBytes {
        let flags = STATE_IS_KNOWN | if self.is_writing { STATE_IS_WRITING } else { 0 };
        BackingStateBytes {
            flags: U32::new(flags),
            block_bytes: U32::new(self.block_bytes),
            said: U64::new(self.said),
            size_bytes: U64::new(self.size_bytes),
            noted_ns: U64::new(self.noted_ns),
            modified_ns: U64::new(self.modified_ns),
            areas: U64::new(self.areas),
            boot: self.boot,
            disk_sequence: U64::new(self.disk_sequence),
            changed_sectors: U64::new(self.changed_sectors),
            mark: U64::new(self.mark),
            mark_before: U64::new(self.mark_before),
            ..BackingStateBytes::new_zeroed()
        }
    }

    /// The state in a superblock whose checksum is right.
    pub(super) fn decode(bytes: &BackingStateBytes) -> Option<Self> {
        let flags = bytes.flags.get();
        (flags & STATE_IS_KNOWN != 0).then(|| Self {
            said: bytes.said.get(),
            size_bytes: bytes.size_bytes.get(),
            block_bytes: bytes.block_bytes.get(),
            is_writing: flags & STATE_IS_WRITING != 0,
            noted_ns: bytes.noted_ns.get(),
            modified_ns: bytes.modified_ns.get(),
            areas: bytes.areas.get(),
            boot: bytes.boot,
            disk_sequence: bytes.disk_sequence.get(),
            changed_sectors: bytes.changed_sectors.get(),
            mark: bytes.mark.get(),
            mark_before: bytes.mark_before.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let state = BackingState {
            said: 1,
            size_bytes: 2,
            block_bytes: 3,
            is_writing: true,
            noted_ns: 4,
            modified_ns: 5,
            areas: 6,
            boot: [7; 16],
            disk_sequence: 8,
            changed_sectors: 9,
            mark: 10,
            mark_before: 11,
        };
        for state in [state, BackingState { is_writing: false, ..state }] {
            assert_eq!(BackingState::decode(&state.encode()), Some(state));
        }
        assert_eq!(BackingState::decode(&BackingStateBytes::new_zeroed()), None);
    }
}
