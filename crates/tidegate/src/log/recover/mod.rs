//! Recovery: makes files have everything that was promised, from the records that a crash left.
//!
//! It has three steps. [`Planner`] finds the stories of files that count, from the records alone.
//! [`replay`] computes the target of one file from its story and its state on the disk. Both are
//! pure. [`apply`] changes the files, through a seam ([`FileSystem`]) that tests break at will.
//!
//! Bytes and sizes of files are restored. Names and missing files are restored if the log has
//! records of names: `named` collects these records, `decide` decides, `carry_out` carries the
//! decisions out. All other names and attributes stay as the kernel left them.
//!
//! A target is a final state, not a list of actions. So a second replay, or one after a crash in
//! the first, ends in the same files. The records stay in the log until the caller has a complete
//! [`Outcome`].

mod apply;
mod carry_out;
mod dates;
mod decide;
mod extents;
mod failure;
mod finding;
pub mod fuzzing;
mod gather;
mod groups;
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
pub use source::{Recovered, plan_pool, recover_pool, remove_reserved};
pub use writing::{finish_writing, start_writing, syncs_reach_kernel};
