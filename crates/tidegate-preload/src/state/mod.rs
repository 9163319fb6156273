//! Facts that hooks need: about files, descriptors, file systems and this process.
//!
//! - files: `files` (identity), `new_files`, `parents` (names and their directories), `extended`
//!   (attributes), `extents`, `record_locks`, `pins` (files that are pinned until exit);
//! - file systems: `file_systems`, `mounts`;
//! - descriptors: `descriptors`, `proc_fd`;
//! - the process: `process`, with the user's settings; `objects` (loaded libraries), `supervisor`,
//!   `suspended`, `real` (causes of real syncs).

pub(crate) mod descriptors;
pub(crate) mod extended;
pub(crate) mod extents;
pub(crate) mod file_systems;
pub(crate) mod files;
pub(crate) mod inherited;
pub(crate) mod mounts;
pub(crate) mod new_files;
pub(crate) mod objects;
pub(crate) mod parents;
pub(crate) mod pins;
pub(crate) mod proc_fd;
pub(crate) mod process;
pub(crate) mod real;
pub(crate) mod record_locks;
pub(crate) mod supervisor;
pub(crate) mod suspended;
