//! Events: what a recorded program did, as eight words and a text.
//!
//! An event has the time at which its call returned; one of a sync has the time at which it began,
//! so that what other threads write meanwhile is behind it.

/// Bytes of an event without its text.
pub const EVENT_BYTES: u64 = 64;
/// Words of an event.
pub(crate) const WORDS: usize = 8;
/// The longest text of an event: two paths, each of a directory and a name.
pub const TEXT_BYTES_MAX: usize = 4 * 4096 + 8;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// What was done.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $name = $number,)* }

        impl Kind {
            fn of(number: u64) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// A process runs a program that is recorded. The text is the program's path.
    Started = 1,
    /// A process is about to execute a program. The text is the directory, if the path is relative,
    /// and the path, parted by a NUL byte.
    Executed = 2,
    /// It was not executed.
    NotExecuted = 3,
    /// A descriptor is seen for the first time: the file has this number from now on.
    /// Arguments: descriptor, device, inode, time of creation in nanoseconds, flags of `open`.
    /// The text is the path.
    Opened = 4,
    /// A descriptor is one more of the file. Arguments: descriptor.
    Copied = 5,
    /// A descriptor was closed. Arguments: descriptor.
    Closed = 6,
    /// Bytes were read. Arguments: offset, length in bytes.
    Read = 7,
    /// Bytes were written. Arguments: offset, length in bytes; [`FLAG`]: and synced.
    Write = 8,
    /// A file is made durable: `fdatasync`, or with [`FLAG`] `fsync`.
    Sync = 9,
    /// The sync that the thread began last has failed.
    SyncFailed = 10,
    /// All files are made durable: `sync`, or with [`FLAG`] `syncfs`.
    SyncAll = 11,
    /// Write-back of a range was asked for. Arguments: offset, length in bytes.
    SyncRange = 12,
    /// Space was allocated or released. Arguments: offset, length in bytes.
    Allocated = 13,
    /// A file has another length. Arguments: length in bytes.
    Resized = 14,
    /// So has a file that is not open. Arguments: length in bytes, device, inode, time of creation.
    /// The text is as for [`Kind::Removed`].
    ResizedPath = 15,
    /// A name was removed. Arguments: device, inode, time of creation, number of names before. The
    /// text is the directory, if the path is relative, and the path, parted by a NUL byte.
    Removed = 16,
    /// A file has one more name. Arguments and text as for [`Kind::Removed`].
    Linked = 17,
    /// A name was changed. Arguments: device, then inode and time of creation of the file and of
    /// the one that had the new name, or zeroes; [`FLAG`]: both changed names; [`FOLDER`]. The text
    /// is directory, path, new directory and new path, parted by NUL bytes.
    Renamed = 18,
    /// A process has ended by itself.
    Ended = 20,
    /// Something that is no event: what, is in the arguments, one of [`Unseen`].
    Unseen = 19,
}

/// What a kind of event has a flag for.
pub const FLAG: u8 = 1;
/// What was renamed is a folder.
pub const FOLDER: u8 = 2;

macro_rules! unseen {
    ($($(#[$doc:meta])* $name:ident = $number:literal: $words:literal,)*) => {
        /// What hooks see that it is done, and not what it does.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Unseen { $($(#[$doc])* $name = $number,)* }

        impl Unseen {
            /// What the number stands for.
            #[must_use]
            pub fn of(number: u64) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }

            /// What it is, for people.
            #[must_use]
            pub const fn words(self) -> &'static str {
                match self { $(Self::$name => $words,)* }
            }
        }
    };
}

unseen! {
    /// A file was mapped.
    Mapping = 1: "mappings of files (their loads and stores)",
    /// `io_uring` was set up.
    IoUring = 2: "set-ups of io_uring (its requests)",
    /// The kernel's asynchronous I/O was set up.
    Libaio = 3: "set-ups of the kernel's asynchronous I/O (its requests)",
    /// POSIX asynchronous I/O.
    PosixAio = 4: "requests of POSIX asynchronous I/O",
    /// The process restricts its own system calls: it is not recorded from then on.
    Seccomp = 5: "processes that restrict their system calls (all that they do from then on)",
    /// A descriptor whose number is too large to be noted.
    Descriptor = 6: "operations on descriptors of large numbers",
    /// A system call by its number.
    ByNumber = 7: "file operations by the function syscall",
    /// A standard stream leads to a file, or a stream is on a descriptor of a large number.
    Stream = 8: "standard streams that lead to files (what the C library writes)",
}

/// What is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds of the clock that only goes forwards.
    pub time_ns: u64,
    /// What was done.
    pub kind: Kind,
    /// [`FLAG`] and [`FOLDER`].
    pub flags: u8,
    /// The thread, as the kernel numbers it.
    pub thread: u32,
    /// The number of the file, where there is one.
    pub file: u32,
    /// The process, where that matters.
    pub process: u32,
    /// By kind.
    pub arguments: [u64; 5],
}

impl Event {
    /// An event of `kind`, to be completed.
    #[must_use]
    pub const fn new(kind: Kind) -> Self {
        Self { time_ns: 0, kind, flags: 0, thread: 0, file: 0, process: 0, arguments: [0; 5] }
    }

    /// The same event of a file.
    #[must_use]
    pub const fn of_file(self, file: u32) -> Self {
        Self { file, ..self }
    }

    /// The same event with as many arguments as are given.
    #[must_use]
    pub fn with<const N: usize>(mut self, given: [u64; N]) -> Self {
        for (argument, given) in self.arguments.iter_mut().zip(given) {
            *argument = given;
        }
        self
    }

    /// The same event, with [`FLAG`] where `is_set`.
    #[must_use]
    pub const fn flagged(self, is_set: bool) -> Self {
        Self { flags: if is_set { self.flags | FLAG } else { self.flags }, ..self }
    }

    /// Whether it has [`FLAG`].
    #[must_use]
    pub const fn is_flagged(&self) -> bool {
        self.flags & FLAG != 0
    }

    /// As words, with the length of a text.
    pub(crate) fn words(&self, text_bytes: usize) -> [u64; WORDS] {
        let text_bytes = u64::try_from(text_bytes).unwrap_or(0) & 0xffff;
        let head = u64::from(self.kind as u8)
            | u64::from(self.flags) << 8
            | text_bytes << 16
            | u64::from(self.thread) << 32;
        let numbers = u64::from(self.file) | u64::from(self.process) << 32;
        let mut words = [self.time_ns, head, numbers, 0, 0, 0, 0, 0];
        words[WORDS - self.arguments.len()..].copy_from_slice(&self.arguments);
        words
    }

    /// What the words say, and the length of the text in bytes; none if they are no event.
    pub(crate) fn of_words(words: [u64; WORDS]) -> Option<(Self, usize)> {
        let [time_ns, head, numbers, arguments @ ..] = words;
        let event = Self {
            time_ns,
            kind: Kind::of(head & 0xff)?,
            flags: u8::try_from(head >> 8 & 0xff).unwrap_or(0),
            thread: high_half(head),
            file: high_half(numbers << 32),
            process: high_half(numbers),
            arguments,
        };
        Some((event, usize::try_from(head >> 16 & 0xffff).ok()?))
    }
}

fn high_half(word: u64) -> u32 {
    u32::try_from(word >> 32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_what_its_words_say() {
        let event = Event {
            time_ns: u64::MAX,
            kind: Kind::Renamed,
            flags: FLAG,
            thread: u32::MAX,
            file: 7,
            process: u32::MAX - 1,
            arguments: [1, 2, 3, 4, u64::MAX],
        };
        assert_eq!(Event::of_words(event.words(TEXT_BYTES_MAX)), Some((event, TEXT_BYTES_MAX)));
        assert_eq!(Event::of_words([0; WORDS]), None);
        assert_eq!(Event::of_words([u64::MAX; WORDS]), None);
    }
}
