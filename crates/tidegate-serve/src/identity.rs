//! The mark that tells a server whether an earlier one had the same pool.
//!
//! The ublk driver keeps one number for the server of each device, and a virtual machine some bytes
//! for the server of its disk, as long as these exist. So the mark is where the device is: there is
//! no file that could speak of a device that is gone.

/// Begins each mark: the upper 16 bits.
const MAGIC: u64 = 0x5447 << 48;
const HASH_MASK: u64 = (1 << 48) - 1;

/// Returns the mark of the devices of the pool that `identity` describes. Marks are the same in all
/// releases, since a newer server takes devices of an older one up.
pub(crate) fn mark_of(identity: &str) -> u64 {
    MAGIC | (fnv_1a(identity.as_bytes()) & HASH_MASK)
}

/// Returns the 64-bit FNV-1a hash of `bytes`.
fn fnv_1a(bytes: &[u8]) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_never_change() {
        // The values for these texts in the draft of FNV.
        assert_eq!(fnv_1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv_1a(b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(mark_of("foobar"), 0x5447_4171_f739_67e8);
        assert_ne!(mark_of("foobar"), mark_of("foobaz"));
    }
}
