//! From a device's geometry to the parameters that the kernel gets, and back for comparison.

use tidegate::device::Geometry;
use zerocopy::FromZeros;

use super::abi::{Parameters, attribute, group};
use crate::request::SECTOR_BYTES;

/// Most data of a request, in bytes. Each tag of a queue has a buffer of this size.
pub(super) const REQUEST_BYTES_MAX: u32 = 256 << 10;

/// Most bytes of a discard or of zeroes: a stop waits for those in progress.
const RANGE_BYTES_MAX: u64 = 64 << 20;

/// Returns the parameters of a device of `geometry`, which refuses writes if `read_only` is set.
pub(super) fn parameters(geometry: &Geometry, read_only: bool) -> Parameters {
    let block_shift = shift(geometry.block_bytes);
    let range_sectors = sectors(RANGE_BYTES_MAX);
    let mut parameters = Parameters {
        len: Parameters::BYTES,
        groups: group::BASIC,
        attributes: attributes(geometry, read_only),
        logical_block_shift: block_shift,
        physical_block_shift: block_shift,
        least_shift: block_shift,
        best_shift: shift(geometry.preferred_bytes).max(block_shift),
        max_sectors: sectors(REQUEST_BYTES_MAX.into()),
        sectors: geometry.size_bytes() / SECTOR_BYTES,
        ..Parameters::new_zeroed()
    };
    if parameters.attributes & attribute::READ_ONLY == 0 {
        parameters.groups |= group::DISCARD;
        parameters.discard_granularity = geometry.block_bytes;
        parameters.max_discard_sectors = range_sectors;
        parameters.max_zeroes_sectors = range_sectors;
        parameters.max_discard_segments = 1;
    }
    parameters
}

fn attributes(geometry: &Geometry, read_only: bool) -> u32 {
    let cache = attribute::VOLATILE_CACHE | attribute::FUA;
    let cache = if geometry.volatile_cache { cache } else { 0 };
    let access = if geometry.read_only || read_only { attribute::READ_ONLY } else { 0 };
    cache | access
}

/// Returns the number of the highest bit of `bytes`.
fn shift(bytes: u32) -> u8 {
    u8::try_from(bytes.checked_ilog2().unwrap_or(0)).unwrap_or(0)
}

fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX)
}

/// Returns how a device with the parameters `found` differs from one with `wanted`, for people.
/// Returns `None` if users of the first one do not notice that they have the second one.
pub(super) fn difference(found: &Parameters, wanted: &Parameters) -> Option<String> {
    let bytes = |of: &Parameters| of.sectors.saturating_mul(SECTOR_BYTES);
    let block = |of: &Parameters| 1_u64.checked_shl(of.logical_block_shift.into()).unwrap_or(0);
    let has = |of: &Parameters, flag| of.attributes & flag != 0;
    let flag = |flag, name: &str| {
        let differs = has(found, flag) != has(wanted, flag);
        differs.then(|| format!("{name}: {} before, {} now", has(found, flag), has(wanted, flag)))
    };
    let number = |name: &str, found: u64, wanted: u64| {
        (found != wanted).then(|| format!("{name}: {found} before, {wanted} now"))
    };
    number("bytes", bytes(found), bytes(wanted))
        .or_else(|| number("bytes of a block", block(found), block(wanted)))
        .or_else(|| flag(attribute::READ_ONLY, "read-only"))
        .or_else(|| flag(attribute::VOLATILE_CACHE, "needs flushes"))
}

#[cfg(test)]
mod tests {
    use tidegate::device::BlockDevice;
    use tidegate::device::memory::MemoryDevice;

    use super::*;

    fn geometry(block_bytes: u32, blocks: u64) -> Geometry {
        MemoryDevice::new(block_bytes, blocks).expect("a device").geometry()
    }

    #[test]
    fn sizes_and_limits_follow_the_geometry() {
        for (block_bytes, block_shift) in [(512, 9), (4096, 12)] {
            let found = parameters(&geometry(block_bytes, 100), false);
            assert_eq!(
                (found.logical_block_shift, found.physical_block_shift),
                (block_shift, block_shift)
            );
            assert_eq!((found.least_shift, found.best_shift), (block_shift, 12));
            assert_eq!(found.sectors, u64::from(block_bytes) * 100 / 512);
            assert_eq!(u64::from(found.max_sectors) * 512, u64::from(REQUEST_BYTES_MAX));
            assert_eq!(found.discard_granularity, block_bytes);
            assert_eq!(found.groups, group::BASIC | group::DISCARD);
        }
    }

    #[test]
    fn flushes_are_asked_for_if_the_device_needs_them() {
        let volatile = geometry(4096, 8);
        let flags = attribute::VOLATILE_CACHE | attribute::FUA;
        assert_eq!(parameters(&volatile, false).attributes, flags);
        let durable = Geometry { volatile_cache: false, ..volatile };
        assert_eq!(parameters(&durable, false).attributes, 0);
    }

    #[test]
    fn a_read_only_device_takes_no_discards() {
        let plain = geometry(4096, 8);
        let of_device = parameters(&Geometry { read_only: true, ..plain }, false);
        for found in [parameters(&plain, true), of_device] {
            assert_ne!(found.attributes & attribute::READ_ONLY, 0);
            assert_eq!((found.groups, found.max_discard_sectors), (group::BASIC, 0));
        }
    }

    #[test]
    fn users_of_a_device_notice_another_size_block_access_and_durability() {
        let plain = geometry(4096, 8);
        let found = parameters(&plain, false);
        assert_eq!(difference(&found, &found), None);
        let said = |wanted: Parameters| difference(&found, &wanted).expect("they differ");
        let longer = parameters(&Geometry { blocks: 9, ..plain }, false);
        assert_eq!(said(longer), "bytes: 32768 before, 36864 now");
        let finer = parameters(&Geometry { blocks: 64, block_bytes: 512, ..plain }, false);
        assert_eq!(said(finer), "bytes of a block: 4096 before, 512 now");
        assert_eq!(said(parameters(&plain, true)), "read-only: false before, true now");
        let durable = parameters(&Geometry { volatile_cache: false, ..plain }, false);
        assert_eq!(said(durable), "needs flushes: true before, false now");
    }
}
