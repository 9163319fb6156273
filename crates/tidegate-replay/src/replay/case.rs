//! A scheme with an amount of memory, played through a trace, and what came out.

use serde::Serialize;

use crate::error::Result;
use crate::scheme::{Requests, Scheme, SchemeEntry, Sizes};
use crate::time::{Meter, SsdModel, Totals};
use crate::trace::Op;

/// Parts of a trace that are looked at by themselves, to say how sure advice is.
pub const PARTS: u64 = 5;

/// What a scheme did with a trace: a row of `tidegate replay --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Its name.
    pub scheme: &'static str,
    /// Pages of 4 KiB of DRAM that it had.
    pub dram_pages: u64,
    /// Bytes of persistent memory that it had.
    pub pmem_bytes: u64,
    /// What programs asked for.
    #[serde(flatten)]
    pub requests: Requests,
    /// What the devices did.
    #[serde(flatten)]
    pub totals: Totals,
    /// Most bytes of DRAM that said what lies where in persistent memory.
    pub index_bytes: u64,
    /// What all operations took, one after the other.
    pub seconds: f64,
    /// What the operations of each of [`PARTS`] parts of the trace took.
    #[serde(skip)]
    pub part_seconds: Vec<f64>,
    /// What reads of flash took of them.
    #[serde(skip)]
    pub part_read_seconds: Vec<f64>,
}

impl Row {
    /// Bytes stored in persistent memory.
    pub(crate) const fn pmem_traffic_bytes(&self) -> u64 {
        self.totals.pmem_data_bytes + self.totals.pmem_metadata_bytes
    }
}

/// A scheme at work.
pub struct Case {
    entry: &'static SchemeEntry,
    sizes: Sizes,
    scheme: Box<dyn Scheme>,
    meter: Meter,
    /// Seconds until the end of each part, and those of them that reads of flash took.
    ends: Vec<[f64; 2]>,
}

impl Case {
    /// `entry` with memory of `sizes`.
    ///
    /// # Errors
    /// The scheme cannot be made.
    pub fn new(entry: &'static SchemeEntry, sizes: Sizes, ssd: &SsdModel) -> Result<Self> {
        let meter = Meter::new(ssd.clone(), sizes.pmem_media.clone(), sizes.dram_bytes_per_s);
        let scheme = (entry.create)(&sizes)?;
        Ok(Self { entry, sizes, scheme, meter, ends: Vec::new() })
    }

    /// Plays one operation.
    ///
    /// # Errors
    /// As for [`Scheme::play`].
    pub fn play(&mut self, op: &Op) -> Result<()> {
        self.scheme.play(op, &mut self.meter)?;
        self.meter.end_operation();
        Ok(())
    }

    /// A part of the trace ends.
    pub fn end_part(&mut self) {
        self.ends.push([self.meter.seconds(), self.meter.read_seconds()]);
    }

    /// What came out.
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

    /// By part what grew in it of one of the numbers in `ends`.
    fn parts(&self, number: usize) -> Vec<f64> {
        let starts = std::iter::once(&[0.0; 2]).chain(&self.ends);
        starts.zip(&self.ends).map(|(start, end)| end[number] - start[number]).collect()
    }
}
