//! `sccm`: a sync copies whole pages to slots of 4 KiB (AFCM's conventional, coarse-grained
//! scheme).

use super::slots::{Kind, hybrid};
use super::{Pmem, SchemeEntry, Sizes};

/// The entry of the scheme.
pub const ENTRY: SchemeEntry = SchemeEntry {
    name: "sccm",
    about: "synced pages in persistent memory, whole",
    pmem: Pmem::Chosen,
    offer: None,
    holds_data: false,
    create: |sizes: &Sizes| Ok(hybrid(sizes, true, |_| Kind::Coarse)),
};
