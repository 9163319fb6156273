//! Recovery: from the records that a crash left to files that have all that was promised.
//!
//! Three steps. [`Planner`] takes the records and tells which stories of files count; no file is
//! looked at. [`replay`] computes what one file must be, from its story and from what the disk has
//! of it; it is pure, too. [`apply`] makes the files so, through a seam ([`FileSystem`]) that tests
//! break at will.
//!
//! Bytes and sizes of files are restored; names, and files that are not there, where the log has
//! records of them: `named` has what these say, `decide` what is done, `carry_out` does it. All
//! other names and attributes are what the kernel has left.
//!
//! A target says what must be, not what to do next, so that applying it twice, or again after a
//! crash inside it, ends in the same files. The records stay in the log until the caller has seen
//! an [`Outcome`] that is complete.

mod apply;
mod carry_out;
mod dates;
mod decide;
mod extents;
mod failure;
mod finding;
pub mod fuzzing;
mod gather;
mod handle;
mod local;
mod local_names;
mod log_data;
mod mapped;
mod named;
mod parallel;
mod plan;
mod protection;
mod ranges;
mod replay;
mod saved;
mod source;
mod writing;

#[cfg(all(test, not(loom)))]
mod tests;

pub use apply::{Access, ApplyOptions, FileState, FileSystem, Outcome, Progress, apply};
pub use carry_out::{NameSystem, NamesDone, Notes};
pub use decide::{Decisions, DiskNames, NameFact, NameStories, Source};
pub use extents::{Content, Extent};
pub use failure::{Copies, Failure};
pub use finding::{Finding, Findings};
pub use handle::{
    EXT_MAGIC, XFS_MAGIC, file_system_id, handle_of, identity_of, keeps_identities, mount_of,
    open_by_handle, written_ranges,
};
pub use local::{LocalFiles, MountedIds};
pub use log_data::LogData;
pub use mapped::{MappedExtent, MappedExtents};
pub use named::{MadeFile, NamedFile, NamedPlan, Place};
pub use plan::{FilePlan, Operation, Payload, Plan, Planner, Step};
pub use ranges::Ranges;
pub use replay::{Disk, Target, replay};
pub use saved::Saved;
pub use source::{Recovered, plan_pool, recover_pool};
pub use writing::{finish_writing, start_writing};
