//! Tidegate measured side by side with its peers.
//!
//! Every comparison is made in one run, repetition by repetition in turns, by one harness:
//!
//! - [`workload`] and [`pattern`]: the requests, from a seed, and their latencies;
//! - [`block`]: devices in this process and DRAM tiers over them, against the floor of bare copies
//!   and [`peers::libpmemblk`]; `plan` lists the cells, [`tiers`] and [`timeline`] hold results of
//!   tiers besides latencies;
//! - [`nbd`]: servers over unix sockets, driven by fio and nbdcopy;
//! - [`pmemblk`]: fio's own engine on two libraries with the same functions;
//! - [`open`]: opening after a crash;
//! - [`cache`]: the cache before slower devices;
//! - [`log`]: the log in this process, and programs under `tidegate run`;
//! - [`programs`]: databases and fio on a file system over NBD;
//! - [`measure`], [`targets`], [`report`], [`table`], [`docs`], `publish`: medians, ratios,
//!   verdicts, and their output; `published` has the results of the last release; `figures` and
//!   `plots` redraw the papers' figures;
//! - [`look`], [`page`], [`chart`]: the static page and its plots, for the report of a replay too.
//!
//! Entry points: [`args::Command`] for `tidegate bench`, [`suite::SuiteArgs`] for `make bench`.

#![allow(
    clippy::cast_precision_loss,
    reason = "measurements are reported to a few digits, far above 2^-52"
)]

pub mod args;
pub mod block;
pub mod block_args;
pub mod cache;
pub mod chart;
mod child;
pub mod common;
pub mod docs;
pub mod error;
mod figures;
mod fio;
mod floor;
mod html;
pub mod log;
pub mod look;
pub mod machine;
pub mod measure;
pub mod nbd;
pub mod open;
pub mod output;
pub mod page;
#[cfg(target_arch = "x86_64")]
pub mod paths;
pub mod pattern;
pub mod peers;
mod plan;
mod plots;
pub mod pmemblk;
pub mod policy;
pub mod program;
pub mod programs;
pub mod progress;
mod publish;
mod published;
pub mod report;
mod source;
pub mod suite;
pub mod table;
pub mod targets;
mod tier_targets;
pub mod tiers;
pub mod timeline;
mod trace;
pub mod workload;
