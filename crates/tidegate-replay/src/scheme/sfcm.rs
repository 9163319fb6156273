//! `sfcm`: a sync copies dirty lines to slots of 56 lines (AFCM, section 3.2.1).

use super::slots::{Kind, hybrid};
use super::{Pmem, SchemeEntry, Sizes};

/// The entry of the scheme.
pub const ENTRY: SchemeEntry = SchemeEntry {
    name: "sfcm",
    about: "synced cache lines in persistent memory, packed",
    pmem: Pmem::Chosen,
    offer: None,
    holds_data: false,
    create: |sizes: &Sizes| Ok(hybrid(sizes, false, |_| Kind::Fine)),
};
