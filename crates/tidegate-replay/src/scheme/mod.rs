//! Schemes: which of DRAM, persistent memory and flash hold what, for the events of a trace.
//!
//! A scheme is a state machine without clock, thread or I/O: it is told of [`Op`]s, and asks for
//! work of [`Devices`]. [`SCHEMES`] lists them.
//!
//! `dram`, `sccm`, `sfcm` and `afcm` are those of the AFCM paper (Chen, Lu, Chen, Shu: Efficient
//! and Consistent NVMM Cache for SSD-Based File System). DRAM has pages in the order of their last
//! use ([`page_cache`]); a sync copies what is dirty of a file to persistent memory ([`slots`]),
//! which keeps no page that DRAM does not have. The others run engines of Tidegate ([`shipped`]).

pub mod devices;
pub mod dram;
mod hybrid;
pub mod page;
pub mod page_cache;
mod page_table;
pub mod shipped;
pub mod slots;
pub mod tcow;
#[cfg(test)]
mod tests;

use serde::Serialize;
use tidegate::dram::Policy;
use tidegate::pmem::MediaModel;

use crate::error::Result;
use crate::trace::Op;
pub use devices::{Devices, Source};
pub use page::PageId;
use shipped::cache::{self, Cache};
use shipped::log::Log;
use shipped::scheme_over;
use shipped::tiers::{self, tier};
use slots::{Kind, cheaper, hybrid};

/// How much memory a scheme has, and of which kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// Pages of 4 KiB in DRAM; at least 1.
    pub dram_pages: u64,
    /// Bytes of persistent memory.
    pub pmem_bytes: u64,
    /// The persistent memory, for schemes that are timed by their own machine.
    pub pmem_media: MediaModel,
    /// What one thread copies from or to DRAM in a second.
    pub dram_bytes_per_s: u64,
    /// Different pages that the trace touches: tables need not be larger.
    pub footprint_pages: u64,
    /// All that a sync covers is there after a crash, or nothing of it. Schemes that cannot do that
    /// do without.
    pub atomic: bool,
}

/// What programs asked for, and what became of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// Pages that reads covered.
    pub reads: u64,
    /// Those of them that were in DRAM or in persistent memory.
    pub read_hits: u64,
    /// Pages that writes covered, whole or in part.
    pub writes: u64,
    /// Syncs.
    pub syncs: u64,
    /// Pages that were dirty at a sync of theirs.
    pub synced_pages: u64,
}

/// A scheme with its memory.
pub trait Scheme {
    /// Plays one operation.
    ///
    /// # Errors
    /// The shipped engine that runs inside gave one.
    fn play(&mut self, op: &Op, devices: &mut dyn Devices) -> Result<()>;

    /// What was asked for so far.
    fn requests(&self) -> Requests;

    /// Most bytes of DRAM so far that said what lies where in persistent memory.
    fn index_bytes_peak(&self) -> u64;
}

/// How much persistent memory a scheme has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmem {
    /// None.
    None,
    /// As much as users say.
    Chosen,
    /// As much as all data takes.
    AllData,
}

impl Pmem {
    /// Bytes of it, where `chosen_bytes` are chosen and the trace touches `footprint_pages` pages.
    pub fn bytes(self, chosen_bytes: u64, footprint_pages: u64) -> u64 {
        match self {
            Self::None => 0,
            Self::Chosen => chosen_bytes,
            Self::AllData => footprint_pages.saturating_mul(page::PAGE_BYTES),
        }
    }
}

/// Makes a scheme.
pub type Create = fn(&Sizes) -> Result<Box<dyn Scheme>>;

/// A scheme that users can choose.
pub struct SchemeEntry {
    /// The name on the command line.
    pub name: &'static str,
    /// How much persistent memory it has.
    pub pmem: Pmem,
    /// What users choose to have it; none where Tidegate does not offer it.
    pub offer: Option<&'static str>,
    /// It stores data: it takes as much memory of this machine as it has persistent memory.
    pub holds_data: bool,
    /// Makes the scheme.
    pub create: Create,
}

const DRAM: SchemeEntry = SchemeEntry {
    name: "dram",
    pmem: Pmem::None,
    offer: Some("no persistent memory"),
    holds_data: false,
    create: |sizes| Ok(dram::dram(sizes)),
};
const AFCM: SchemeEntry = SchemeEntry {
    name: "afcm",
    pmem: Pmem::Chosen,
    offer: None,
    create: |sizes| Ok(hybrid(sizes, true, cheaper)),
    ..DRAM
};
const CACHE: SchemeEntry = SchemeEntry {
    name: "tidegate",
    pmem: Pmem::Chosen,
    offer: Some(cache::OFFER),
    holds_data: true,
    create: |sizes| scheme_over(sizes, Cache::new),
};
const BTT: SchemeEntry = SchemeEntry {
    name: "btt",
    pmem: Pmem::AllData,
    offer: Some("a block translation table (`tidegate create --engine btt`) for all data"),
    create: |sizes| tier(sizes, Policy::None),
    ..DRAM
};
/// The scheme `name` of a DRAM tier.
const fn tiered(name: &'static str, create: Create) -> SchemeEntry {
    SchemeEntry { name, offer: Some(tiers::OFFER), create, ..BTT }
}

/// All schemes.
pub static SCHEMES: &[SchemeEntry] = &[
    DRAM,
    SchemeEntry { name: "sccm", create: |it| Ok(hybrid(it, true, |_| Kind::Coarse)), ..AFCM },
    SchemeEntry { name: "sfcm", create: |it| Ok(hybrid(it, false, |_| Kind::Fine)), ..AFCM },
    AFCM,
    CACHE,
    SchemeEntry {
        name: "log",
        offer: Some("a log (`tidegate create --engine log`)"),
        create: |sizes| scheme_over(sizes, Log::new),
        ..CACHE
    },
    BTT,
    tiered("transit", |sizes| tier(sizes, Policy::Transit)),
    tiered("transit-no-eager", |sizes| tier(sizes, Policy::TransitNoEager)),
    tiered("transit-no-bypass", |sizes| tier(sizes, Policy::TransitNoBypass)),
    tiered("pmbd", |sizes| tier(sizes, Policy::Pmbd)),
    tiered("pmbd70", |sizes| tier(sizes, Policy::Pmbd70)),
    tiered("lru", |sizes| tier(sizes, Policy::Lru)),
    tiered("coactive", |sizes| tier(sizes, Policy::Coactive)),
];

/// The scheme called `name`.
pub fn scheme(name: &str) -> Option<&'static SchemeEntry> {
    SCHEMES.iter().find(|entry| entry.name == name)
}
