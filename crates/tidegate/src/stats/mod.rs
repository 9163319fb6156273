//! Counts and measurements: counters, gauges and latency histograms of every tier.
//!
//! - [`baseline`]: the counts before a reset;
//! - [`histogram`]: latencies, sharded by thread;
//! - [`metric`]: names, units and help texts, and the readings that pages print;
//! - [`requests`]: the counters of every block device.

pub mod baseline;
pub mod histogram;
pub mod metric;
pub mod requests;

pub use baseline::Baseline;
pub use histogram::{Bucket, Histogram, Latencies};
pub use metric::{Collector, Kind, Metric, Reading, Unit, Value};
pub use requests::{Begun, RequestKind, Requests, Running, SAMPLE_ONE_IN};
