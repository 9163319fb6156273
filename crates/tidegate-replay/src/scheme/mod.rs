//! Schemes distribute data over DRAM, persistent memory and flash, for the events of a trace.
//!
//! A scheme is a state machine without clock, thread or I/O: it receives [`Op`]s, and requests
//! operations of [`Devices`]. [`SCHEMES`] lists all schemes.
//!
//! `dram`, `sccm`, `sfcm` and `afcm` are the schemes of the AFCM paper (Chen, Lu, Chen, Shu:
//! Efficient and Consistent NVMM Cache for SSD-Based File System). DRAM has pages in the order of
//! their last use ([`page_cache`]). A sync copies the dirty lines of a file to persistent memory
//! ([`slots`]), which keeps no page that DRAM does not have. The other schemes run engines of
//! Tidegate ([`shipped`]).

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
use crate::model::costs::Costs;
use crate::trace::Op;
pub use devices::{Devices, Source};
pub use page::PageId;
use shipped::cache::{self, Cache};
use shipped::log::Log;
use shipped::scheme_over;
use shipped::tiers::{self, tier};
use slots::{Kind, cheaper, hybrid};

/// Amounts and kinds of a scheme's memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// Pages of 4 KiB in DRAM; at least 1.
    pub dram_pages: u64,
    /// Bytes of persistent memory.
    pub pmem_bytes: u64,
    /// The model of persistent memory, for schemes that compute their own time.
    pub pmem_media: MediaModel,
    /// Costs of the machine beside its storage and persistent memory.
    pub costs: Costs,
    /// Distinct pages that the trace touches, a limit for the size of tables.
    pub footprint_pages: u64,
    /// Whether a crash keeps all or nothing of a sync. Schemes without atomic syncs ignore this.
    pub atomic: bool,
}

/// Requests of programs, and their hits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// Pages that reads covered.
    pub reads: u64,
    /// Read pages that were in DRAM or in persistent memory.
    pub read_hits: u64,
    /// Pages that writes covered, whole or in part.
    pub writes: u64,
    /// Number of syncs.
    pub syncs: u64,
    /// Pages that were dirty at a sync of their file.
    pub synced_pages: u64,
}

/// A scheme with its memory.
pub trait Scheme {
    /// Processes one operation.
    ///
    /// # Errors
    /// The shipped engine of the scheme has failed.
    fn play(&mut self, op: &Op, devices: &mut dyn Devices) -> Result<()>;

    /// Returns the requests so far.
    fn requests(&self) -> Requests;

    /// Returns the peak bytes of DRAM for the index of persistent memory.
    fn index_bytes_peak(&self) -> u64;
}

/// The amount of a scheme's persistent memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmem {
    /// No persistent memory.
    None,
    /// The amount that users choose.
    Chosen,
    /// The amount that all data takes.
    AllData,
}

impl Pmem {
    /// Returns the bytes, given the users' choice and the number of pages in the trace.
    pub fn bytes(self, chosen_bytes: u64, footprint_pages: u64) -> u64 {
        match self {
            Self::None => 0,
            Self::Chosen => chosen_bytes,
            Self::AllData => footprint_pages.saturating_mul(page::PAGE_BYTES),
        }
    }
}

/// A function that creates a scheme.
pub type Create = fn(&Sizes) -> Result<Box<dyn Scheme>>;

/// A scheme that users can choose.
pub struct SchemeEntry {
    /// The name on the command line.
    pub name: &'static str,
    /// Amount of persistent memory.
    pub pmem: Pmem,
    /// The configuration that users choose for the scheme; `None` if Tidegate does not offer it.
    pub offer: Option<&'static str>,
    /// Whether the scheme stores data, and allocates memory for its persistent memory.
    pub holds_data: bool,
    /// Creates the scheme.
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
/// Returns the entry of a DRAM tier called `name`.
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

/// Returns the scheme called `name`.
pub fn scheme(name: &str) -> Option<&'static SchemeEntry> {
    SCHEMES.iter().find(|entry| entry.name == name)
}
