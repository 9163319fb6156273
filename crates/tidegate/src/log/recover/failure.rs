//! Failures to recover a file or a part of the log.
//!
//! A failure of one file with a cause outside the log ([`Failure::leaves_one_file`]) leaves that
//! file to the next recovery. All other files are recovered. A failure that requires a decision
//! about the log stops recovery before it changes any file.

use std::io;

use uuid::Uuid;

use super::plan::FilePlan;
use crate::log::Damage;

/// A failure of recovery. The records that it concerns must stay in the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The file's file system is not mounted for writing.
    #[error(
        "{path}: its file system {file_system} is not mounted for writing; mount it and recover again"
    )]
    NotMounted {
        /// The file's path.
        path: String,
        /// UUID of the file system.
        file_system: Uuid,
    },
    /// Several file systems have the UUID of the file's file system.
    #[error("{path}: {copies}")]
    Ambiguous {
        /// The file's path.
        path: String,
        /// Their mount points.
        copies: Copies,
    },
    /// The file is not at its path, and its handle can't be opened.
    #[error(
        "{path}: the file is not there, and only root can tell where it is; recover again as root"
    )]
    Unprivileged {
        /// The file's path.
        path: String,
    },
    /// A process outside changed the file since the log's last record of it.
    #[error(
        "{path}: the file was changed after the log's last record of it, which recovery would undo; to keep the file \
         as it is, recover again with --salvage"
    )]
    Changed {
        /// The file's path.
        path: String,
    },
    /// A file that the log can create again is missing, and its directory was changed since.
    #[error(
        "{path}: the file is missing, and its directory was changed after the log's last record, so that it may have \
         been removed; to give the file up, recover again with --salvage"
    )]
    Removed {
        /// The file's name.
        path: String,
    },
    /// A directory was removed after a recovery that was not completed had decided on its names.
    #[error(
        "{path}: its directory was removed after a recovery had begun; to give the name up, recover again with \
         --salvage"
    )]
    NoDirectory {
        /// The file's name.
        path: String,
    },
    /// An acknowledged record is damaged.
    #[error(
        "{path}: {damage}, was acknowledged and is damaged; what is left without it is the file as its disk has it"
    )]
    Damaged {
        /// The file's path.
        path: String,
        /// The record.
        damage: Damage,
    },
    /// Acknowledged records are missing.
    #[error(
        "{bytes} bytes of the log from position {position} on were acknowledged and are lost, and of which files they \
         told is not known"
    )]
    Missing {
        /// Position where they began.
        position: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A part of the log can't be read.
    #[error(
        "{bytes} bytes of the log cannot be read, and what they promised of which file is not known"
    )]
    Unreadable {
        /// Number of bytes.
        bytes: u64,
    },
    /// Records concern files that no record defines.
    #[error("{records} records are about files that are not defined: a part of the log is lost")]
    Undefined {
        /// Number of records.
        records: u64,
    },
    /// The system returned an error.
    #[error("{path}: cannot {doing} ({source}); {}", remedy(source))]
    Io {
        /// The file's path.
        path: String,
        /// The attempt.
        doing: &'static str,
        /// The error.
        source: io::Error,
    },
    /// A note of recovery could not be written to the log.
    #[error("the log cannot be written ({0})")]
    Log(io::Error),
}

/// Mounted file systems with one UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "several mounted file systems have the UUID {uuid} of its file system: {mounts}; which of them the log is about \
     cannot be told: unmount all but the one that the programs of this log wrote to, then recover again"
)]
pub struct Copies {
    /// The UUID.
    pub uuid: Uuid,
    /// Mount points and devices.
    pub mounts: String,
}

/// Returns the user's remedy for an error of the system.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ETXTBSY) => "end the program that runs it, then recover again",
        Some(libc::EACCES | libc::EPERM) => "recover again as root",
        Some(libc::EROFS) => "mount its file system for writing, then recover again",
        Some(libc::ENOSPC | libc::EDQUOT) => "make space on its file system, then recover again",
        Some(libc::EAGAIN) => "end the process that has a lease on it, then recover again",
        _ => "recover again when that is repaired",
    }
}

impl Failure {
    pub(super) fn io(file: &FilePlan, doing: &'static str, source: io::Error) -> Self {
        Self::Io { path: file.name(), doing, source }
    }

    /// Returns whether the failure concerns only one file or its names, and has a cause outside the
    /// log. All other files are recovered, and the log keeps its records of this one.
    pub fn leaves_one_file(&self) -> bool {
        matches!(
            self,
            Self::NotMounted { .. }
                | Self::Ambiguous { .. }
                | Self::Unprivileged { .. }
                | Self::Changed { .. }
                | Self::Removed { .. }
                | Self::NoDirectory { .. }
                | Self::Io { .. }
        )
    }

    /// Returns whether recovery may continue without the failed part.
    pub(super) fn can_be_salvaged(&self) -> bool {
        matches!(
            self,
            Self::Changed { .. }
                | Self::Removed { .. }
                | Self::NoDirectory { .. }
                | Self::Damaged { .. }
                | Self::Missing { .. }
                | Self::Unreadable { .. }
                | Self::Undefined { .. }
        )
    }
}
