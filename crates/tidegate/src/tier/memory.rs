//! Metrics of the persistent memory under a tier.

use crate::pmem::Region;
use crate::stats::{Collector, Metric, Unit};

const STORES: Metric =
    Metric::counter("pmem_stores", Unit::Count, "Calls that stored anything in persistent memory");
const STORED_BYTES: Metric =
    Metric::counter("pmem_stored_bytes", Unit::Bytes, "Bytes stored through the CPU caches");
const STREAMED_BYTES: Metric =
    Metric::counter("pmem_streamed_bytes", Unit::Bytes, "Bytes stored around the CPU caches");
const LINES: Metric =
    Metric::counter("pmem_lines_written_back", Unit::Count, "Cache lines of 64 bytes written back");
const FENCES: Metric = Metric::counter("pmem_fences", Unit::Count, "Store fences");
const READ_BYTES: Metric =
    Metric::counter("pmem_read_bytes", Unit::Bytes, "Bytes copied out of persistent memory");

/// Adds the counters of `region` to `collector`.
pub fn collect(region: &Region, collector: &mut Collector) {
    let counters = region.counters();
    collector.add(&STORES, counters.stores);
    collector.add(&STORED_BYTES, counters.bytes_stored);
    collector.add(&STREAMED_BYTES, counters.bytes_streamed);
    collector.add(&LINES, counters.lines_written_back);
    collector.add(&FENCES, counters.fences);
    collector.add(&READ_BYTES, counters.bytes_read);
}
