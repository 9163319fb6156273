//! What is counted and measured: latency histograms.

pub mod histogram;
