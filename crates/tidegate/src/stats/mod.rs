//! What is counted and measured: counters, gauges and latency histograms of every tier.
//!
//! - [`baseline`]: what was counted before a reset;
//! - [`histogram`]: latencies, sharded by thread;
//! - [`metric`]: names, units and help texts, and the readings that pages print;
//! - [`requests`]: the counters that every block device has.

pub mod baseline;
pub mod histogram;
pub mod metric;
pub mod requests;

pub use baseline::Baseline;
pub use histogram::{Bucket, Histogram, Latencies};
pub use metric::{Collector, Kind, Metric, Reading, Unit, Value};
pub use requests::{Begun, RequestKind, Requests, Running, SAMPLE_ONE_IN};
