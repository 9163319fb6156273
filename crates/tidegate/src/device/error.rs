//! Errors of block devices: a few kinds to match, and a context for the operator.

use rustix::io::Errno;

use crate::pmem::PmemError;

/// The kind of a failure.
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
    /// Makes an error. `context` names the object, the finding and the expectation.
    pub fn new(kind: DeviceErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// Makes an error with the error below that caused it.
    pub fn with_source(
        kind: DeviceErrorKind,
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), source: Some(source.into()) }
    }

    /// Returns the kind of the failure.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// Returns the message followed by the messages of all causes.
    pub(crate) fn with_causes(&self) -> String {
        with_causes(self)
    }

    /// Makes an error of a system call. `context` names the action and its object; kind and number
    /// come from `errno`.
    pub fn os(context: impl std::fmt::Display, errno: Errno) -> Self {
        Self::with_source(
            DeviceErrorKind::from(errno),
            format!("{context} failed with OS error {}", errno.raw_os_error()),
            std::io::Error::from(errno),
        )
    }

    /// Makes the error of a request that would change a read-only device.
    pub fn read_only(offset: u64, len: u64) -> Self {
        let context = format!(
            "request to change {len} bytes at offset {offset} of a device opened read-only"
        );
        Self::new(DeviceErrorKind::ReadOnly, context)
    }

    /// Makes the error of fast zeroes that the device would have to write as data.
    pub fn not_fast(offset: u64, len: u64) -> Self {
        let context =
            format!("{len} bytes at offset {offset} cannot be zeroed without writing zeroes");
        Self::new(DeviceErrorKind::Unsupported, context)
    }

    /// Makes the error of a request that is not made of whole blocks.
    pub fn misaligned(offset: u64, len: u64, block_bytes: u32) -> Self {
        let context = format!(
            "request of {len} bytes at offset {offset} is not made of whole blocks of {block_bytes} bytes"
        );
        Self::new(DeviceErrorKind::Misaligned, context)
    }

    /// Makes the error of a request that passes the end of the device.
    pub fn out_of_range(offset: u64, len: u64, size_bytes: u64) -> Self {
        let context = format!(
            "request of {len} bytes at offset {offset} passes the end of a device of {size_bytes} bytes"
        );
        Self::new(DeviceErrorKind::OutOfRange, context)
    }
}

/// Returns the message of `error` followed by the messages of all causes.
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
