//! What Tidegate would do for a workload from its trace, and on machines that are not
//! here.
//!
//! - [`trace`], a crate of its own: readers of traces, all of which give the same
//!   [`trace::Event`]s;
//! - [`scheme`]: tiers of DRAM, persistent memory and flash that those events are played through;
//! - [`model`]: the tiers' own state machines on N cores, in virtual time.
//! - [`report`]: the page that shows it;
//! - [`record`]: traces of running programs.
//!
//! Entry points: [`args::Command`] for `tidegate replay`, `tidegate model` and `tidegate record`.

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
pub mod time;

pub use tidegate_trace as trace;
