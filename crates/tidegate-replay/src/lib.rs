//! Predicts Tidegate's behaviour for a traced workload, and on machines that are not at hand.
//!
//! - [`trace`], a separate crate: readers of traces, which all give the same [`trace::Event`]s;
//! - [`scheme`]: tiers of DRAM, persistent memory and flash that process those events;
//! - [`model`]: the tiers' own state machines on N cores, in virtual time;
//! - [`report`]: the page with the results;
//! - [`record`]: traces of running programs.
//!
//! Entry points: [`args::Command`] for `tidegate replay`, `tidegate model` and `tidegate record`.

#![deny(clippy::print_stdout)] // it panics where standard output is closed

pub mod args;
pub mod error;
pub mod measured;
pub mod model;
mod papers;
mod parallel;
pub mod profile;
pub mod record;
pub mod replay;
pub mod report;
pub mod scheme;
mod stdout;
pub mod time;

pub use tidegate_trace as trace;
