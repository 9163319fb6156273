//! Runs a scheme with an amount of memory through a trace, and returns the results.

use serde::Serialize;

use crate::error::Result;
use crate::scheme::{Requests, Scheme, SchemeEntry, Sizes};
use crate::time::{Meter, SsdModel, Totals};
use crate::trace::Op;

/// Number of parts that a trace is split into, to compute the certainty of advice.
pub const PARTS: u64 = 5;

/// Results of a scheme for a trace: a row of `tidegate replay --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The scheme's name.
    pub scheme: &'static str,
    /// Number of DRAM pages of 4 KiB.
    pub dram_pages: u64,
    /// Bytes of persistent memory.
    pub pmem_bytes: u64,
    /// The programs' requests.
    #[serde(flatten)]
    pub requests: Requests,
    /// The devices' operations.
    #[serde(flatten)]
    pub totals: Totals,
    /// Peak bytes of DRAM for the index of persistent memory.
    pub index_bytes: u64,
    /// Time of all operations, one after the other.
    pub seconds: f64,
    /// Time of the operations in each of [`PARTS`] parts of the trace.
    #[serde(skip)]
    pub part_seconds: Vec<f64>,
    /// Time of flash reads in each part.
    #[serde(skip)]
    pub part_read_seconds: Vec<f64>,
}

impl Row {
    /// Returns the bytes stored in persistent memory.
    pub(crate) const fn pmem_traffic_bytes(&self) -> u64 {
        self.totals.pmem_data_bytes + self.totals.pmem_metadata_bytes
    }
}

/// A scheme while it processes a trace.
pub struct Case {
    entry: &'static SchemeEntry,
    sizes: Sizes,
    scheme: Box<dyn Scheme>,
    meter: Meter,
    /// Seconds until the end of each part, and the seconds of flash reads among them.
    ends: Vec<[f64; 2]>,
}

impl Case {
    /// Creates the scheme `entry` with memory of `sizes`.
    ///
    /// # Errors
    /// The scheme cannot be created.
    pub fn new(entry: &'static SchemeEntry, sizes: Sizes, ssd: &SsdModel) -> Result<Self> {
        let meter =
            Meter::new(ssd.clone(), sizes.pmem_media.clone(), sizes.costs.dram_copy_bytes_per_s);
        let scheme = (entry.create)(&sizes)?;
        Ok(Self { entry, sizes, scheme, meter, ends: Vec::new() })
    }

    /// Processes one operation.
    ///
    /// # Errors
    /// The errors of [`Scheme::play`].
    pub fn play(&mut self, op: &Op) -> Result<()> {
        self.scheme.play(op, &mut self.meter)?;
        self.meter.end_operation();
        Ok(())
    }

    /// Ends a part of the trace.
    pub fn end_part(&mut self) {
        self.ends.push([self.meter.seconds(), self.meter.read_seconds()]);
    }

    /// Returns the results.
    pub fn row(&self) -> Row {
        Row {
            scheme: self.entry.name,
            dram_pages: self.sizes.dram_pages,
            pmem_bytes: self.sizes.pmem_bytes,
            requests: self.scheme.requests(),
            totals: self.meter.totals,
            index_bytes: self.scheme.index_bytes_peak(),
            seconds: self.meter.seconds(),
            part_seconds: self.parts(0),
            part_read_seconds: self.parts(1),
        }
    }

    /// Returns the increase, in each part, of the number with this index in `ends`.
    fn parts(&self, number: usize) -> Vec<f64> {
        let starts = std::iter::once(&[0.0; 2]).chain(&self.ends);
        starts.zip(&self.ends).map(|(start, end)| end[number] - start[number]).collect()
    }
}
