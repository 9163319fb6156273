//! Engine `log`: a write log on persistent memory, for files and for blocks.
//!
//! A record is durable with one fence, and its checksums tell whether it is whole (`pool`). Many
//! processes append without a lock between them (`ring`). Beside the pool they share the control
//! memory (`control`): slots of operations in progress, and the table of files. A device (`device`)
//! needs no more. `tidegate run` uses `files` on top, and [`cover`] has the rules for appends of
//! processes. One process, the supervisor, retires records that the files have. After a crash,
//! [`Scanner`] finds the records. The design is that of the `NVCache` paper, whose log has fixed
//! entries of 4 KiB, two fences a write and one process; docs/walks/log.md explains the
//! differences.
//!
//! Entry points: [`create`], [`LogPool::open`], [`Ring::start`], [`Ring::attach`]; [`Log::lock`],
//! [`FileGuard::begin`], [`Ticket::write`]; [`Ring::safe_position`], [`Ring::retire_to`];
//! [`Scanner`].

mod check;
mod control;
pub mod cover;
pub mod device;
mod engine;
mod error;
mod files;
mod pool;
pub mod recover;
mod ring;
#[cfg(test)]
mod tests;

pub use control::owner::{after_fork, current_process, process_of, thread_of};
pub use control::stats::{BUCKETS, Counter, Stats};
pub use control::table::{FileKey, FileRef};
pub use control::{CONTROL_BYTES, Control, FILES_MAX, SLOTS};
pub use engine::LogEngine;
pub use error::{AppendError, LockError, LogError};
pub use files::copy::{can_write_in_place, copy_to_file, write_in_place};
pub use files::file_systems::{ChangeNumbers, FileSystemRef};
pub use files::lanes::{InFlight, PlainCall};
pub use files::naming::NamesGuard;
pub use files::operations::{Interrupted, RepairError};
pub use files::processes::ProgramVersion;
pub use files::real_syncs::{PATH_END_BYTES, PROGRAM_BYTES, RealSync, RealSyncs, SyncNames};
pub use files::story::{Change, CoverState};
pub use files::{FileGuard, FileSystems, Keepers, Lanes, Log, Operations, Processes, RealSyncList};
pub use pool::heartbeat::Heartbeat;
pub use pool::layout::{self, CODE};
pub use pool::losses::{Damage, DeviceLoss};
pub use pool::names::{
    Attributes, Extended, Make, NameAt, NameChange, NameRecord, Timestamp, put_extended,
};
pub use pool::record::{
    Definition, FileHandle, FileSystemId, Header, RecordKind, checked_path, identity,
};
pub use pool::scan::Scanner;
pub use pool::{CLOSED, HeaderFault, LogOptions, LogPool, NO_BOOT, RING_BYTES_MIN, create};
pub use ring::{Ring, Supervision, Ticket};
