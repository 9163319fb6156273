//! The causes that keep a process or a file plain, so that its syncs are real.

use serde::{Deserialize, Serialize};
use strum::{FromRepr, IntoStaticStr};

/// A cause that keeps a process or a file plain. Processes and the supervisor name it by its
/// [word](Cause::word).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, FromRepr, IntoStaticStr,
)]
#[repr(u32)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Cause {
    /// The program is linked statically.
    StaticProgram,
    /// The program is a Go program.
    GoProgram,
    /// The program makes system calls by its own instructions.
    OwnCalls,
    /// The program uses another C library than glibc.
    OtherLibc,
    /// The program is made for another kind of machine.
    OtherMachine,
    /// The program starts where it cannot find the log's memory.
    HiddenLog,
    /// The program gains rights when it starts, or may not be read.
    PrivilegedProgram,
    /// The user has declared that the program changes no file that is synced.
    Trusted,
    /// The process gave up rights.
    Rights,
    /// The process limits its address space: the log does not fit.
    MemoryLimit,
    /// The process starts programs without the preload library.
    DroppedLibrary,
    /// The file is written by `io_uring`.
    IoUring,
    /// The file is written by asynchronous I/O of the kernel.
    Libaio,
    /// The file is mapped, shared and writable.
    Mapping,
    /// The file is written by direct I/O.
    DirectIo,
    /// The file is written by a stream.
    Stream,
    /// The file is on no ext4 or XFS that has a UUID.
    FileSystem,
    /// The file's path is excluded.
    Excluded,
    /// The file is written by descriptors with `O_SYNC` or `O_DSYNC` in ways that leave each sync
    /// to the kernel.
    Synchronous,
    /// The process mounts a file system whose files lie in other file systems.
    StackedMount,
}

impl Cause {
    /// Returns the word for the cause in messages, without an allocation.
    pub fn word(self) -> &'static str {
        self.into()
    }

    /// Returns the cause as a predicate about a program, for messages.
    pub fn reason(self) -> &'static str {
        match self {
            Self::StaticProgram => "is linked statically",
            Self::GoProgram => "is a Go program, which makes its system calls itself",
            Self::OwnCalls => "makes system calls of its own, beside those of the C library",
            Self::OtherLibc => "uses another C library than glibc",
            Self::OtherMachine => "is made for another kind of machine than tidegate itself",
            Self::HiddenLog => "starts where it does not find the pool, or what /dev/shm had of it",
            Self::PrivilegedProgram => {
                "gains privileges when it starts (set-user-ID and the like), or may not be read"
            }
            Self::Trusted => "is trusted to change no file that is synced, and not watched",
            Self::Rights => "gave up rights",
            Self::MemoryLimit => {
                "has a limit of its address space, which is too small for the pool"
            }
            Self::DroppedLibrary => "starts programs without the preload library",
            Self::IoUring => "writes by io_uring",
            Self::Libaio => "writes by asynchronous I/O of the kernel",
            Self::Mapping => "writes by shared mappings, aio_write or dprintf",
            Self::DirectIo => "writes by direct I/O (O_DIRECT)",
            Self::Stream => "writes by a stream of the C library",
            Self::FileSystem => "syncs files that are not on an ext4 or XFS with a UUID",
            Self::Excluded => "syncs files that --include or --exclude keeps out",
            Self::Synchronous => "has the kernel sync its writes (O_SYNC, O_DSYNC)",
            Self::StackedMount => {
                "mounts a file system over the files of others (an overlay), which writes to them \
                 unseen until it is unmounted"
            }
        }
    }

    /// Returns the setting or action that avoids the cause for the user of `program`, if known.
    pub fn remedy(self, program: &str) -> Option<&'static str> {
        let is_mariadb = ["mariadbd", "mysqld"].contains(&program);
        match self {
            Self::IoUring | Self::Libaio if is_mariadb => Some("innodb_use_native_aio=0"),
            Self::IoUring if program == "postgres" => Some("io_method=worker"),
            // MariaDB has a setting for its log alone; MySQL has none.
            Self::DirectIo if program == "mariadbd" => Some("innodb_log_file_buffering=ON"),
            Self::DirectIo | Self::Synchronous if is_mariadb => Some("innodb_flush_method=fsync"),
            Self::Synchronous if program == "postgres" => Some("wal_sync_method=fdatasync"),
            Self::StaticProgram => Some("linking it dynamically"),
            Self::FileSystem => Some("moving them to ext4 or XFS"),
            _ => None,
        }
    }

    /// Returns whether a notice tells the user. It does if all files of the program are plain and
    /// the user has not asked for that, or if the user can change a setting that keeps some files
    /// plain. Statistics list all causes.
    pub fn is_told(self, program: &str) -> bool {
        let is_expected = matches!(
            self,
            Self::Mapping
                | Self::DirectIo
                | Self::Stream
                | Self::Excluded
                | Self::Synchronous
                | Self::Trusted
        );
        !is_expected || self.remedy(program).is_some()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_the_one_that_messages_are_read_by() {
        let mut causes = 0;
        while let Some(cause) = Cause::from_repr(causes) {
            let word = serde_json::to_value(cause).unwrap();
            assert_eq!(word.as_str(), Some(cause.word()));
            causes += 1;
        }
        assert_eq!((causes, Cause::DirectIo.word()), (20, "direct_io"));
    }

    #[test]
    fn a_user_is_told_what_can_be_changed_and_what_is_about_all_files() {
        assert!(Cause::DirectIo.is_told("mariadbd") && !Cause::DirectIo.is_told("dd"));
        assert!(Cause::Synchronous.is_told("postgres") && !Cause::Stream.is_told("cat"));
        assert!(Cause::IoUring.is_told("fio") && Cause::IoUring.remedy("fio").is_none());
        let buffered = Cause::DirectIo.remedy("mariadbd");
        assert_eq!(buffered, Some("innodb_log_file_buffering=ON"));
        assert_eq!(Cause::DirectIo.remedy("mysqld"), Some("innodb_flush_method=fsync"));
    }
}
