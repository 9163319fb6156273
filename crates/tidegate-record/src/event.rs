//! Events: the operations of a recorded program, as eight words and a text.
//!
//! The time of an event is when its call returned. The time of a sync is when the call began, so
//! that concurrent writes of other threads come after the sync.

/// Bytes of an event without text.
pub const EVENT_BYTES: u64 = 64;
/// Words of an event.
pub(crate) const WORDS: usize = 8;
/// The maximum length of a text: two paths, each of a directory and a name.
pub const TEXT_BYTES_MAX: usize = 4 * 4096 + 8;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// The kind of an operation.
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
    /// A process begins to run a recorded program. The text is the program's path.
    Started = 1,
    /// A process is about to execute a program. The text is the directory, if the path is relative,
    /// and the path, separated by a NUL byte.
    Executed = 2,
    /// The execution has failed.
    NotExecuted = 3,
    /// A descriptor is seen for the first time, and its file gets the event's number. Arguments:
    /// descriptor, device, inode, creation time in nanoseconds, flags of `open`. The text is the
    /// path.
    Opened = 4,
    /// A descriptor is a duplicate for the file. Arguments: descriptor.
    Copied = 5,
    /// A descriptor was closed. Arguments: descriptor.
    Closed = 6,
    /// Bytes were read. Arguments: offset, length in bytes.
    Read = 7,
    /// Bytes were written. Arguments: offset, length in bytes. [`FLAG`]: the write was also synced.
    Write = 8,
    /// A file is made durable: `fdatasync`, or with [`FLAG`] `fsync`.
    Sync = 9,
    /// The last sync that the thread began has failed.
    SyncFailed = 10,
    /// All files are made durable: `sync`, or with [`FLAG`] `syncfs`.
    SyncAll = 11,
    /// The program asked for write-back of a range. Arguments: offset, length in bytes.
    SyncRange = 12,
    /// Space was allocated or released. Arguments: offset, length in bytes.
    Allocated = 13,
    /// The length of a file has changed. Arguments: length in bytes.
    Resized = 14,
    /// The length of a file has changed through its path. Arguments: length in bytes, device,
    /// inode, creation time. The text is that of [`Kind::Removed`].
    ResizedPath = 15,
    /// A name was removed. Arguments: device, inode, creation time, number of names before. The
    /// text is the directory, if the path is relative, and the path, separated by a NUL byte.
    Removed = 16,
    /// A name was added to a file. Arguments: device, inode, creation time. The text is that of
    /// [`Kind::Removed`].
    Linked = 17,
    /// A name was changed. Arguments: device, then inode and creation time of the file and of the
    /// file that had the new name, or zeroes. [`FLAG`]: the files exchanged names. [`FOLDER`]: a
    /// directory is involved. The text is directory, path, new directory and new path, separated by
    /// NUL bytes.
    Renamed = 18,
    /// A process exits by itself.
    Ended = 20,
    /// An operation whose effect no event reports. Arguments: one of [`Unseen`].
    Unseen = 19,
}

/// A flag whose meaning depends on the kind.
pub const FLAG: u8 = 1;
/// A renamed or replaced file is a directory.
pub const FOLDER: u8 = 2;

macro_rules! unseen {
    ($($(#[$doc:meta])* $name:ident = $number:literal: $words:literal,)*) => {
        /// Operations that hooks count without knowing their effect.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Unseen { $($(#[$doc])* $name = $number,)* }

        impl Unseen {
            /// Returns the variant with this number, if any.
            #[must_use]
            pub fn of(number: u64) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }

            /// Returns a description for users.
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
    /// POSIX asynchronous I/O was requested.
    PosixAio = 4: "requests of POSIX asynchronous I/O",
    /// The process restricts its own system calls. It is not recorded from then on.
    Seccomp = 5: "processes that restrict their system calls (all that they do from then on)",
    /// An operation used a descriptor whose number is too large for the table.
    Descriptor = 6: "operations on descriptors of large numbers",
    /// A file operation was made through `syscall`.
    ByNumber = 7: "file operations by the function syscall",
    /// A standard stream leads to a file, or a stream is on a descriptor with a large number.
    Stream = 8: "standard streams that lead to files (what the C library writes)",
}

/// An operation that a hook reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// The kind of the operation.
    pub kind: Kind,
    /// [`FLAG`] and [`FOLDER`].
    pub flags: u8,
    /// The thread, as the kernel numbers it.
    pub thread: u32,
    /// The number of the file, if any.
    pub file: u32,
    /// The process, if the kind has one.
    pub process: u32,
    /// Arguments, by [`Kind`].
    pub arguments: [u64; 5],
}

impl Event {
    /// Returns an event of `kind` without arguments.
    #[must_use]
    pub const fn new(kind: Kind) -> Self {
        Self { time_ns: 0, kind, flags: 0, thread: 0, file: 0, process: 0, arguments: [0; 5] }
    }

    /// Returns the event with the number of its file.
    #[must_use]
    pub const fn of_file(self, file: u32) -> Self {
        Self { file, ..self }
    }

    /// Returns the event with `given` as its first arguments.
    #[must_use]
    pub fn with<const N: usize>(mut self, given: [u64; N]) -> Self {
        for (argument, given) in self.arguments.iter_mut().zip(given) {
            *argument = given;
        }
        self
    }

    /// Returns the event, with [`FLAG`] set if `is_set`.
    #[must_use]
    pub const fn flagged(self, is_set: bool) -> Self {
        Self { flags: if is_set { self.flags | FLAG } else { self.flags }, ..self }
    }

    /// Returns whether [`FLAG`] is set.
    #[must_use]
    pub const fn is_flagged(&self) -> bool {
        self.flags & FLAG != 0
    }

    /// Encodes the event, with the length of its text, as words.
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

    /// Decodes an event and the length of its text in bytes; `None` if the words are no event.
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
