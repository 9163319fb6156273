//! Errors of block devices: few kinds to match, a context to act on.

use rustix::io::Errno;

use crate::pmem::PmemError;

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// Offset or length is not a multiple of the block size.
    Misaligned,
    /// The request passes the end of the device.
    OutOfRange,
    /// The device is read-only.
    ReadOnly,
    /// The device does not do this operation.
    Unsupported,
    /// No space is left below.
    NoSpace,
    /// The medium or the layer below failed.
    Io,
    /// Metadata on the medium makes no sense.
    Corrupt,
}

impl From<Errno> for DeviceErrorKind {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Self::NoSpace,
            Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY => Self::Unsupported,
            Errno::ROFS => Self::ReadOnly,
            _ => Self::Io,
        }
    }
}

/// An error of a [`BlockDevice`](super::BlockDevice).
#[derive(Debug, thiserror::Error)]
#[error("{context}")]
pub struct DeviceError {
    kind: DeviceErrorKind,
    context: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl DeviceError {
    /// An error of `kind` whose `context` names the object, what was found and what was expected.
    pub fn new(kind: DeviceErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// An error of `kind` with the error below that caused it.
    pub fn with_source(
        kind: DeviceErrorKind,
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), source: Some(source.into()) }
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// The message, and those of what caused it.
    pub(crate) fn with_causes(&self) -> String {
        with_causes(self)
    }

    /// The operating system refused: `context` says what was tried on what, the kind and the number
    /// follow `errno`.
    pub fn os(context: impl std::fmt::Display, errno: Errno) -> Self {
        Self::with_source(
            DeviceErrorKind::from(errno),
            format!("{context} failed with OS error {}", errno.raw_os_error()),
            std::io::Error::from(errno),
        )
    }

    /// The request would change a read-only device.
    pub fn read_only(offset: u64, len: u64) -> Self {
        let context = format!(
            "request to change {len} bytes at offset {offset} of a device opened read-only"
        );
        Self::new(DeviceErrorKind::ReadOnly, context)
    }

    /// Zeroes that were to be fast would have to be written.
    pub fn not_fast(offset: u64, len: u64) -> Self {
        let context =
            format!("{len} bytes at offset {offset} cannot be zeroed without writing zeroes");
        Self::new(DeviceErrorKind::Unsupported, context)
    }

    /// The request is not made of whole blocks.
    pub fn misaligned(offset: u64, len: u64, block_bytes: u32) -> Self {
        let context = format!(
            "request of {len} bytes at offset {offset} is not made of whole blocks of {block_bytes} bytes"
        );
        Self::new(DeviceErrorKind::Misaligned, context)
    }

    /// The request passes the end of the device.
    pub fn out_of_range(offset: u64, len: u64, size_bytes: u64) -> Self {
        let context = format!(
            "request of {len} bytes at offset {offset} passes the end of a device of {size_bytes} bytes"
        );
        Self::new(DeviceErrorKind::OutOfRange, context)
    }
}

/// The message of an error, and those of what caused it.
pub(super) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

impl From<PmemError> for DeviceError {
    fn from(error: PmemError) -> Self {
        let kind = match &error {
            PmemError::OutOfRange { .. } | PmemError::Misaligned { .. } => DeviceErrorKind::Corrupt,
            PmemError::ReadOnly => DeviceErrorKind::ReadOnly,
            PmemError::Limit { .. } => DeviceErrorKind::NoSpace,
            PmemError::Poisoned { .. }
            | PmemError::WritebackFailed { .. }
            | PmemError::Busy { .. }
            | PmemError::DanglingLink { .. }
            | PmemError::Empty { .. }
            | PmemError::NotMappable { .. }
            | PmemError::Os { .. } => DeviceErrorKind::Io,
        };
        Self::with_source(kind, "persistent memory failed", error)
    }
}
