//! Why a file, or a part of the log, could not be recovered.
//!
//! A failure of one file that a person can take out of the way ([`Failure::leaves_one_file`])
//! leaves that file for the next recovery; all others are recovered. One that takes a decision
//! about what the log has stops recovery before any file is touched.

use std::io;

use uuid::Uuid;

use super::plan::FilePlan;
use crate::log::Damage;

/// Something that could not be done. The records that tell of it must stay in the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The file's file system is not there.
    #[error(
        "{path}: its file system {file_system} is not mounted for writing; mount it and recover again"
    )]
    NotMounted {
        /// The file's path.
        path: String,
        /// UUID of the file system.
        file_system: Uuid,
    },
    /// Several file systems have the UUID of the file's.
    #[error("{path}: {copies}")]
    Ambiguous {
        /// The file's path.
        path: String,
        /// Where they are mounted.
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
    /// A record that was acknowledged is not whole any more.
    #[error(
        "{path}: {damage}, was acknowledged and is damaged; what is left without it is the file as its disk has it"
    )]
    Damaged {
        /// The file's path.
        path: String,
        /// The record.
        damage: Damage,
    },
    /// Records that were acknowledged are not there any more.
    #[error(
        "{bytes} bytes of the log from position {position} on were acknowledged and are lost, and of which files they \
         told is not known"
    )]
    Missing {
        /// Where they began.
        position: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// A part of the log can't be read.
    #[error(
        "{bytes} bytes of the log cannot be read, and what they promised of which file is not known"
    )]
    Unreadable {
        /// How many bytes.
        bytes: u64,
    },
    /// Records are about files that no record defines.
    #[error("{records} records are about files that are not defined: a part of the log is lost")]
    Undefined {
        /// How many.
        records: u64,
    },
    /// The system refused.
    #[error("{path}: cannot {doing} ({source}); {}", remedy(source))]
    Io {
        /// The file's path.
        path: String,
        /// What was tried.
        doing: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The log could not be told what recovery is about to do, or has done.
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

/// What a person can do about an error of the system.
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

    /// Only this file, or its names, cannot be recovered now, and something outside the log is in
    /// the way: all others are recovered, and the log keeps what it has of this one.
    pub fn leaves_one_file(&self) -> bool {
        matches!(
            self,
            Self::NotMounted { .. }
                | Self::Ambiguous { .. }
                | Self::Unprivileged { .. }
                | Self::Changed { .. }
                | Self::Io { .. }
        )
    }

    /// Recovery can do the rest without it.
    pub(super) fn can_be_salvaged(&self) -> bool {
        matches!(
            self,
            Self::Changed { .. }
                | Self::Damaged { .. }
                | Self::Missing { .. }
                | Self::Unreadable { .. }
                | Self::Undefined { .. }
        )
    }
}
