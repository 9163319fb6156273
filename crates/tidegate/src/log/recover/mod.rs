//! Recovery: from the records that a crash left to files that have all they tell of.
//!
//! Two steps. [`Planner`] takes the valid records and computes a [`Plan`]: what each file's bytes, size and names must be, and
//! what may stand at each path. It is pure: no file is looked at. [`apply`] makes the file system match a plan, through a
//! seam ([`FileSystem`]) that tests break at will.
//!
//! A plan says what must be, not what to do next, so that applying it twice, or again after a crash inside it, ends in the
//! same files. The records stay in the log until the caller has seen an [`Outcome`] that is complete.

mod apply;
mod extents;
mod file_system;
pub mod fuzzing;
mod gather;
mod handle;
mod parallel;
mod plan;
mod source;
mod writing;

#[cfg(test)]
mod tests;

pub use apply::{
    ApplyOptions, Failure, FileSystem, Found, FoundKind, NewIdentity, Outcome, Progress, apply,
};
pub(super) use extents::ExtentMap;
pub use extents::{Content, Extent};
pub use file_system::LocalFiles;
pub(super) use gather::gather;
pub use handle::{identity_of, mount_of};
pub use plan::{Fate, FilePlan, Finding, Findings, Name, PathPlan, Plan, Planner};
pub use source::{LogData, Recovered, plan_pool, recover_pool};
pub use writing::{finish_writing, start_writing};
