//! Why a file, or a part of the log, could not be recovered.

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
    #[error(
        "{path}: several file systems with its UUID are mounted; unmount the copies and recover again"
    )]
    Ambiguous {
        /// The file's path.
        path: String,
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
        "{path}: the file was changed after the log's last record of it, which recovery would undo"
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
    #[error("{path}: cannot {doing}")]
    Io {
        /// The file's path.
        path: String,
        /// What was tried.
        doing: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The log could not be told that files are about to be changed.
    #[error("the log cannot be written")]
    Log(#[source] io::Error),
}

impl Failure {
    pub(super) fn io(file: &FilePlan, doing: &'static str, source: io::Error) -> Self {
        Self::Io { path: file.name(), doing, source }
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
