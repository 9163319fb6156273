//! Recovery (being rewritten in another branch).
mod extents;
mod handle;
mod writing;

pub use extents::{Content, Extent};
pub use handle::{file_system_id, identity_of, mount_of};
pub use writing::{finish_writing, start_writing};
