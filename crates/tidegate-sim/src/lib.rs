//! The crash simulator: the real engines on a simulated medium.
//!
//! An engine runs on a real [`Region`](tidegate::pmem::Region) whose observer records every store,
//! write-back and fence, and decides which thread goes on. The trace is replayed on a model of the
//! medium, which knows the images that a power cut may leave. The engine's own recovery opens those
//! images, and a model of the history says which values they may hold. Nothing of the engine is
//! rewritten for the simulator.
//!
//! - [`trace`]: the events of an execution, in order;
//! - [`scheduler`]: deterministic interleavings, all up to a bound or random ones;
//! - [`medium`]: which images a crash may leave;
//! - [`model`], [`history`]: operations, and which values they allow;
//! - [`explore`], [`judge`]: executions crashed everywhere, and the verdicts;
//! - [`kernel`]: the recovery of other implementations, as a second judge;
//! - [`mutations`]: planted bugs that the simulator must find;
//! - [`subject`], [`log`], [`cache`], [`run`], [`toy`]: the systems under test;
//! - [`names`]: new files and names under `tidegate run`, with the decisions of recovery;
//! - seeds come from [`random`].

pub mod cache;
mod context;
mod counted;
mod cuts;
pub mod explore;
mod files;
pub mod history;
pub mod judge;
pub mod kernel;
pub mod log;
pub mod medium;
pub mod model;
pub mod mutations;
pub mod names;
pub mod random;
pub mod run;
pub mod scheduler;
mod similar;
pub mod subject;
pub mod toy;
pub mod trace;
