//! File operations and their text form, which the interpreter executes.

use std::fmt;

use anyhow::{Context, Result, bail};

/// How an [`Operation::Write`] writes its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBy {
    /// `pwrite`.
    Call,
    /// Stores into a shared mapping.
    Mapping,
    /// `IORING_OP_WRITE`.
    Uring,
    /// `pwrite` through an `O_DIRECT` description.
    Direct,
    /// `pwrite` through an `O_SYNC` description.
    Sync,
    /// `pwrite` through an `O_DSYNC` description.
    DataSync,
    /// `pwrite` through a duplicated descriptor.
    Dup,
    /// `fwrite` and `fflush`. If files stay open and the last operation used a stream of the same
    /// file, that stream is used again.
    Stream,
    /// `pwrite` of a forked child.
    Fork,
    /// `pwrite` of a statically linked child.
    Static,
}

impl WriteBy {
    /// Every way, with its name in the text form.
    pub const ALL: [(Self, &str); 10] = [
        (Self::Call, "write"),
        (Self::Mapping, "mmap"),
        (Self::Uring, "uring-write"),
        (Self::Direct, "direct"),
        (Self::Sync, "osync"),
        (Self::DataSync, "odsync"),
        (Self::Dup, "dup"),
        (Self::Stream, "fwrite"),
        (Self::Fork, "fork write"),
        (Self::Static, "static write"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(by, _)| *by == self).map_or("", |(_, name)| name)
    }
}

/// How an [`Operation::Copy`] copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyBy {
    /// `copy_file_range`.
    Range,
    /// `sendfile`.
    Sendfile,
    /// `splice` through a pipe.
    Splice,
}

impl CopyBy {
    /// Every way, with its name in the text form.
    pub const ALL: [(Self, &str); 3] =
        [(Self::Range, "copy"), (Self::Sendfile, "sendfile"), (Self::Splice, "splice")];
}

/// Mode of an [`Operation::Fallocate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FallocateMode {
    /// Allocates and extends the file.
    Default,
    /// `FALLOC_FL_KEEP_SIZE`.
    Keep,
    /// `FALLOC_FL_PUNCH_HOLE`.
    Punch,
    /// `FALLOC_FL_ZERO_RANGE`.
    Zero,
    /// `FALLOC_FL_COLLAPSE_RANGE`.
    Collapse,
    /// `FALLOC_FL_INSERT_RANGE`.
    Insert,
}

impl FallocateMode {
    /// Every mode, with its name in the text form.
    pub const ALL: [(Self, &str); 6] = [
        (Self::Default, "default"),
        (Self::Keep, "keep"),
        (Self::Punch, "punch"),
        (Self::Zero, "zero"),
        (Self::Collapse, "collapse"),
        (Self::Insert, "insert"),
    ];
}

/// One operation. Paths are relative to the file system's root; offsets and lengths are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields say what they are")]
pub enum Operation {
    /// `open(O_CREAT | O_EXCL)`.
    Create { path: String },
    /// `open(O_CREAT | O_EXCL)`, then a write.
    New { path: String, length: u64 },
    /// Writes into an existing file, also after its end.
    Write { by: WriteBy, path: String, offset: u64, length: u64 },
    /// Writes at the end.
    Append { path: String, length: u64 },
    /// Appends through a stream, which creates the file if it does not exist. If files stay open
    /// and the last operation used a stream of the same file, that stream is used again.
    Stdio { path: String, length: u64 },
    /// `ftruncate`, down or up.
    Truncate { path: String, size: u64 },
    /// `open(O_TRUNC)`, then a write from the start.
    TruncateOpen { path: String, length: u64 },
    /// `fallocate`.
    Fallocate { path: String, mode: FallocateMode, offset: u64, length: u64 },
    /// Copies all of one file over the start of another, which is created if it does not exist.
    Copy { by: CopyBy, from: String, to: String },
    /// Makes a new file that shares all blocks of another (`FICLONE`).
    Reflink { from: String, to: String },
    /// Gives a file another name.
    Link { from: String, to: String },
    /// Makes a symbolic link at `path`.
    Symlink { target: String, path: String },
    /// Removes a name.
    Unlink { path: String },
    /// Renames a file or directory, also over an existing name; by `io_uring` if `uring`.
    Rename { from: String, to: String, uring: bool },
    /// `RENAME_EXCHANGE`.
    Exchange { from: String, to: String },
    /// Makes a directory.
    Mkdir { path: String },
    /// Removes an empty directory.
    Rmdir { path: String },
    /// Makes a file by `O_TMPFILE`, a write, an fsync if `synced`, and `linkat`.
    Tmpfile { path: String, length: u64, synced: bool },
    /// Sets the extended attribute `user.crashtest` to the operation's number.
    SetXattr { path: String },
    /// Sets a capability (`security.capability`).
    SetCapability { path: String },
    /// Sets an access control list that makes the mode 644.
    SetAcl { path: String },
    /// `FS_APPEND_FL`: from now on bytes can only be appended.
    AppendOnly { path: String },
    /// `chmod`.
    Chmod { path: String, mode: u32 },
    /// `fchown` to the owner that the file has.
    Chown { path: String },
    /// `utimensat`.
    Utime { path: String },
}

impl Operation {
    /// Returns whether `tidegate run` does not see all changes, so that files leave the log first.
    pub fn is_unseen(&self) -> bool {
        use WriteBy::{Direct, Mapping, Static, Stream, Uring};
        match self {
            Self::Write { by, .. } => matches!(by, Mapping | Uring | Direct | Static | Stream),
            Self::Stdio { .. }
            | Self::Copy { .. }
            | Self::Reflink { .. }
            | Self::Fallocate { .. } => true,
            Self::Rename { uring, .. } => *uring,
            _ => false,
        }
    }
}

impl Operation {
    /// Returns whether the program itself makes all calls that change the file, each by one
    /// function of the C library. It can then make them in any [`Way`](crate::sequence::Way).
    pub fn has_ways(&self) -> bool {
        use WriteBy::{Static, Stream, Uring};
        match self {
            Self::Write { by, .. } => !matches!(by, Uring | Static | Stream),
            Self::Rename { uring, .. } => !uring,
            Self::Stdio { .. } | Self::AppendOnly { .. } | Self::Reflink { .. } => false,
            _ => true,
        }
    }

    /// Returns whether another program can make the operation unseen by the first one, which
    /// follows its files to other names.
    pub fn can_be_of_others(&self) -> bool {
        match self {
            Self::Write { by, .. } => *by == WriteBy::Call,
            Self::Rename { uring, .. } => !uring,
            Self::Append { .. }
            | Self::Truncate { .. }
            | Self::TruncateOpen { .. }
            | Self::Unlink { .. }
            | Self::Chmod { .. }
            | Self::New { .. } => true,
            _ => false,
        }
    }

    /// Returns whether a process can be killed in the middle: one system call makes the change.
    pub fn can_be_killed_in(&self) -> bool {
        match self {
            Self::Write { by, .. } => *by == WriteBy::Call,
            Self::Rename { uring, .. } => !uring,
            Self::New { .. }
            | Self::Stdio { .. }
            | Self::TruncateOpen { .. }
            | Self::Fallocate { .. }
            | Self::Copy { .. }
            | Self::AppendOnly { .. }
            | Self::Reflink { .. }
            | Self::Tmpfile { .. } => false,
            _ => true,
        }
    }

    /// Returns the paths that the operation names.
    pub fn paths(&self) -> Vec<&str> {
        match self {
            Self::Copy { from, to, .. }
            | Self::Reflink { from, to }
            | Self::Link { from, to }
            | Self::Rename { from, to, .. }
            | Self::Exchange { from, to } => vec![from, to],
            Self::Create { path }
            | Self::New { path, .. }
            | Self::Write { path, .. }
            | Self::Append { path, .. }
            | Self::Stdio { path, .. }
            | Self::Truncate { path, .. }
            | Self::TruncateOpen { path, .. }
            | Self::Fallocate { path, .. }
            | Self::Symlink { path, .. }
            | Self::Unlink { path }
            | Self::Mkdir { path }
            | Self::Rmdir { path }
            | Self::Tmpfile { path, .. }
            | Self::SetXattr { path }
            | Self::SetCapability { path }
            | Self::SetAcl { path }
            | Self::AppendOnly { path }
            | Self::Chmod { path, .. }
            | Self::Chown { path }
            | Self::Utime { path } => vec![path],
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create { path } => write!(out, "create {path}"),
            Self::New { path, length } => write!(out, "new {path} {length}"),
            Self::Write { by, path, offset, length } => {
                write!(out, "{} {path} {offset} {length}", by.name())
            }
            Self::Append { path, length } => write!(out, "append {path} {length}"),
            Self::Stdio { path, length } => write!(out, "stdio {path} {length}"),
            Self::Truncate { path, size } => write!(out, "truncate {path} {size}"),
            Self::TruncateOpen { path, length } => write!(out, "truncate-open {path} {length}"),
            Self::Fallocate { path, mode, offset, length } => {
                let name = name_in(&FallocateMode::ALL, *mode);
                write!(out, "fallocate {path} {name} {offset} {length}")
            }
            Self::Copy { by, from, to } => {
                write!(out, "{} {from} {to}", name_in(&CopyBy::ALL, *by))
            }
            Self::Reflink { from, to } => write!(out, "reflink {from} {to}"),
            Self::Link { from, to } => write!(out, "link {from} {to}"),
            Self::Symlink { target, path } => write!(out, "symlink {target} {path}"),
            Self::Unlink { path } => write!(out, "unlink {path}"),
            Self::Rename { from, to, uring: false } => write!(out, "rename {from} {to}"),
            Self::Rename { from, to, uring: true } => write!(out, "uring-rename {from} {to}"),
            Self::Exchange { from, to } => write!(out, "exchange {from} {to}"),
            Self::Mkdir { path } => write!(out, "mkdir {path}"),
            Self::Rmdir { path } => write!(out, "rmdir {path}"),
            Self::Tmpfile { path, length, synced: false } => write!(out, "tmpfile {path} {length}"),
            Self::Tmpfile { path, length, .. } => write!(out, "tmpfile {path} {length} fsync"),
            Self::SetXattr { path } => write!(out, "setxattr {path}"),
            Self::SetCapability { path } => write!(out, "setcap {path}"),
            Self::SetAcl { path } => write!(out, "setfacl {path}"),
            Self::AppendOnly { path } => write!(out, "append-only {path}"),
            Self::Chmod { path, mode } => write!(out, "chmod {path} {mode:o}"),
            Self::Chown { path } => write!(out, "chown {path}"),
            Self::Utime { path } => write!(out, "utime {path}"),
        }
    }
}

fn name_in<T: Copy + PartialEq>(all: &[(T, &'static str)], wanted: T) -> &'static str {
    all.iter().find(|(value, _)| *value == wanted).map_or("", |(_, name)| name)
}

impl Operation {
    /// Returns the operation's name: the first words of its text form.
    pub fn name(&self) -> String {
        let text = self.to_string();
        let mut words = text.split(' ');
        let first = words.next().unwrap_or_default();
        match self {
            Self::Fallocate { mode, .. } => {
                format!("fallocate {}", name_in(&FallocateMode::ALL, *mode))
            }
            Self::Write { by, .. } => by.name().to_owned(),
            _ => first.to_owned(),
        }
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// The line is no operation.
    pub fn parse(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        Self::of_words(&words).with_context(|| format!("{line:?} is no operation"))
    }

    fn of_words(words: &[&str]) -> Result<Self> {
        let path = |index: usize| {
            words.get(index).map(|word| (*word).to_owned()).context("a path is missing")
        };
        let number = |index: usize| -> Result<u64> {
            Ok(words.get(index).context("a number is missing")?.parse()?)
        };
        if let Some(write) = write_of_words(words)? {
            return Ok(write);
        }
        let name = *words.first().context("it is empty")?;
        if let Some((by, _)) = CopyBy::ALL.iter().find(|(_, copy)| *copy == name) {
            return Ok(Self::Copy { by: *by, from: path(1)?, to: path(2)? });
        }
        Ok(match name {
            "create" => Self::Create { path: path(1)? },
            "new" => Self::New { path: path(1)?, length: number(2)? },
            "append" => Self::Append { path: path(1)?, length: number(2)? },
            "stdio" => Self::Stdio { path: path(1)?, length: number(2)? },
            "truncate" => Self::Truncate { path: path(1)?, size: number(2)? },
            "truncate-open" => Self::TruncateOpen { path: path(1)?, length: number(2)? },
            "fallocate" => {
                let mode = words.get(2).context("a mode is missing")?;
                let found = FallocateMode::ALL.iter().find(|(_, name)| name == mode);
                let mode = found.context("no such mode")?.0;
                Self::Fallocate { path: path(1)?, mode, offset: number(3)?, length: number(4)? }
            }
            "reflink" => Self::Reflink { from: path(1)?, to: path(2)? },
            "link" => Self::Link { from: path(1)?, to: path(2)? },
            "symlink" => Self::Symlink { target: path(1)?, path: path(2)? },
            "unlink" => Self::Unlink { path: path(1)? },
            "rename" => Self::Rename { from: path(1)?, to: path(2)?, uring: false },
            "uring-rename" => Self::Rename { from: path(1)?, to: path(2)?, uring: true },
            "exchange" => Self::Exchange { from: path(1)?, to: path(2)? },
            "mkdir" => Self::Mkdir { path: path(1)? },
            "rmdir" => Self::Rmdir { path: path(1)? },
            "tmpfile" => {
                Self::Tmpfile { path: path(1)?, length: number(2)?, synced: words.len() > 3 }
            }
            "setxattr" => Self::SetXattr { path: path(1)? },
            "setcap" => Self::SetCapability { path: path(1)? },
            "setfacl" => Self::SetAcl { path: path(1)? },
            "append-only" => Self::AppendOnly { path: path(1)? },
            "chown" => Self::Chown { path: path(1)? },
            "utime" => Self::Utime { path: path(1)? },
            "chmod" => Self::Chmod { path: path(1)?, mode: u32::from_str_radix(&path(2)?, 8)? },
            _ => bail!("no such name"),
        })
    }
}

fn write_of_words(words: &[&str]) -> Result<Option<Operation>> {
    for (by, name) in WriteBy::ALL {
        let name: Vec<&str> = name.split(' ').collect();
        if let Some([path, offset, length]) = words.strip_prefix(name.as_slice()) {
            let (offset, length) = (offset.parse()?, length.parse()?);
            return Ok(Some(Operation::Write { by, path: (*path).to_owned(), offset, length }));
        }
    }
    Ok(None)
}
