//! The state of a backing when its pool last used it. Writes of other programs change that state.

use zerocopy::little_endian::{U32, U64};

use super::layout::{BackingStateBytes, STATE_IS_KNOWN, STATE_IS_WRITING};

/// A pool's record of its backing's state, to detect writes of other programs. Unknown numbers are
/// 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingState {
    /// The backing's identity.
    pub said: u64,
    /// The backing's size in bytes.
    pub size_bytes: u64,
    /// Size of a block in bytes, as the pool has used it for as long as this has been its backing.
    pub block_bytes: u32,
    /// The pool was writing to the backing. The times and checksums in this state are then older.
    pub is_writing: bool,
    /// The time of this record, in nanoseconds since 1970.
    pub noted_ns: u64,
    /// The last modification of a backing file, in nanoseconds since 1970.
    pub modified_ns: u64,
    /// Checksum of the areas of the backing that file systems and partition tables change.
    pub areas: u64,
    /// The id of the machine's boot for the next two fields.
    pub boot: [u8; 16],
    /// The kernel's number for the attachment of the disk.
    pub disk_sequence: u64,
    /// Number of sectors of the disk that were written or discarded since its attachment.
    pub changed_sectors: u64,
    /// The number in the backing's mark.
    pub mark: u64,
    /// Another number that the mark may have after a power failure.
    pub mark_before: u64,
    /// While the pool writes: another identity that the backing may have after a power failure.
    pub said_before: u64,
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
            said_before: U64::new(self.said_before),
        }
    }

    /// Decodes the state in a superblock with a correct checksum, or `None` if it is unknown.
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
            said_before: bytes.said_before.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

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
            said_before: 12,
        };
        for state in [state, BackingState { is_writing: false, ..state }] {
            assert_eq!(BackingState::decode(&state.encode()), Some(state));
        }
        assert_eq!(BackingState::decode(&BackingStateBytes::new_zeroed()), None);
    }
}
