//! `afcm`: a sync copies a page whole, or its dirty lines, by what costs less space (AFCM, section
//! 3.2.2).

use super::page::LINE_BYTES;
use super::slots::{FINE_LINES, FINE_METADATA_BYTES, Kind, hybrid};
use super::{Pmem, SchemeEntry, Sizes};

/// The entry of the scheme.
pub const ENTRY: SchemeEntry = SchemeEntry {
    name: "afcm",
    about: "synced pages in persistent memory, whole or as packed cache lines",
    pmem: Pmem::Chosen,
    offer: None,
    holds_data: false,
    create: |sizes: &Sizes| Ok(hybrid(sizes, true, kind_of)),
};

/// The paper's equations 1 and 2: fine where the lines that are not stored are more than the share
/// of metadata of those that are.
fn kind_of(dirty: u64) -> Kind {
    let dirty = dirty.count_ones();
    let benefit = u64::from(64 - dirty) * LINE_BYTES;
    // Both sides times the lines of a slot.
    let is_fine = benefit * u64::from(FINE_LINES) > u64::from(dirty) * FINE_METADATA_BYTES;
    if is_fine { Kind::Fine } else { Kind::Coarse }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_55_dirty_lines_are_fine() {
        let of = |count: u32| kind_of((1 << count) - 1);
        assert_eq!(
            [of(1), of(55), of(56), of(63)],
            [Kind::Fine, Kind::Fine, Kind::Coarse, Kind::Coarse]
        );
        assert_eq!(kind_of(u64::MAX), Kind::Coarse);
    }
}
