//! The requests of front ends whose clients are kernels: ublk and vhost-user. Checks a request, and
//! turns it into an operation.

use rustix::io::Errno;
use tidegate::device::{
    DeviceError, DeviceErrorKind, Geometry, IoBuffer, OwnedOperation, WriteFlags, ZeroFlags,
};

use crate::statistics::Kind;

/// Unit of sizes and offsets of kernels, in bytes.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Rules for the requests of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) geometry: Geometry,
    /// Refuses writes, whatever the device allows.
    pub(crate) read_only: bool,
    /// Most data of a read or a write.
    pub(crate) request_bytes_max: u32,
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Read,
    Write(WriteFlags),
    Flush,
    Discard,
    WriteZeroes(ZeroFlags),
}

/// A sound request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Rules {
    /// Returns the request for `action` in a range. A flush has no range, whatever is given.
    ///
    /// # Errors
    /// The range or the size is not allowed, or the device refuses changes.
    pub(crate) fn check(
        &self,
        action: Action,
        first_sector: u64,
        sectors: u64,
    ) -> Result<Request, Errno> {
        let (first_sector, sectors) = match action {
            Action::Flush => (0, 0),
            _ => (first_sector, sectors),
        };
        let bytes = |sectors: u64| sectors.checked_mul(SECTOR_BYTES).ok_or(Errno::INVAL);
        let request = Request { action, offset: bytes(first_sector)?, len: bytes(sectors)? };
        let changes = !matches!(action, Action::Read | Action::Flush);
        if changes && self.read_only {
            return Err(Errno::PERM);
        }
        if request.data_bytes() > self.request_bytes_max as usize {
            return Err(Errno::INVAL);
        }
        let checked = self.geometry.check(request.offset, request.len);
        checked.map_err(|error| errno_of(&error))?;
        Ok(request)
    }
}

impl Request {
    /// Returns the kind of the request, as the statistics count it.
    pub(crate) fn kind(&self) -> Kind {
        match self.action {
            Action::Read => Kind::Read,
            Action::Write(_) => Kind::Write,
            Action::Flush => Kind::Flush,
            Action::Discard => Kind::Trim,
            Action::WriteZeroes(_) => Kind::WriteZeroes,
        }
    }

    /// Returns the length of the data that a read or a write has in its buffer.
    pub(crate) fn data_bytes(&self) -> usize {
        match self.action {
            Action::Read | Action::Write(_) => usize::try_from(self.len).unwrap_or(usize::MAX),
            _ => 0,
        }
    }

    /// Returns the length as the statistics count it.
    pub(crate) fn counted_bytes(&self) -> u32 {
        u32::try_from(self.len).unwrap_or(u32::MAX)
    }

    /// Returns the operation. A read or a write takes `buffer`, which holds the data of a write.
    /// Returns `None` if the buffer is missing.
    pub(crate) fn operation(&self, buffer: &mut Option<IoBuffer>) -> Option<OwnedOperation> {
        let (offset, len) = (self.offset, self.len);
        Some(match self.action {
            Action::Flush => OwnedOperation::Flush,
            Action::Discard => OwnedOperation::Discard { offset, len },
            Action::WriteZeroes(flags) => OwnedOperation::WriteZeroes { offset, len, flags },
            Action::Read | Action::Write(_) => {
                let mut buffer = buffer.take()?;
                buffer.reset(self.data_bytes());
                match self.action {
                    Action::Write(flags) => OwnedOperation::Write { offset, buffer, flags },
                    _ => OwnedOperation::Read { offset, buffer },
                }
            }
        })
    }
}

/// Returns the kernel's number for a device's error.
pub(crate) fn errno_of(error: &DeviceError) -> Errno {
    match error.kind() {
        DeviceErrorKind::ReadOnly => Errno::PERM,
        DeviceErrorKind::NoSpace => Errno::NOSPC,
        DeviceErrorKind::Unsupported => Errno::OPNOTSUPP,
        DeviceErrorKind::OutOfRange | DeviceErrorKind::Misaligned => Errno::INVAL,
        _ => Errno::IO,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tidegate::device::BlockDevice;
    use tidegate::device::memory::MemoryDevice;

    use super::*;

    pub(crate) const MAX: u32 = 256 << 10;

    pub(crate) fn rules(block_bytes: u32, blocks: u64) -> Rules {
        let geometry = MemoryDevice::new(block_bytes, blocks).expect("a device").geometry();
        Rules { geometry, read_only: false, request_bytes_max: MAX }
    }

    #[test]
    fn ranges_outside_and_parts_of_blocks_are_refused() {
        let rules = rules(4096, 4);
        let checked = |first, sectors| rules.check(Action::Read, first, sectors);
        assert!(checked(24, 8).is_ok());
        for (first, sectors) in [(24, 16), (32, 8), (1, 8), (0, 1), (u64::MAX, 8), (0, u64::MAX)] {
            assert_eq!(checked(first, sectors), Err(Errno::INVAL), "{first} {sectors}");
        }
        let (rules, long) = (self::rules(4096, 1000), u64::from(MAX) / SECTOR_BYTES + 8);
        assert_eq!(rules.check(Action::Read, 0, long), Err(Errno::INVAL));
        assert!(rules.check(Action::Discard, 0, long).is_ok(), "a discard has no data");
        let flush = rules.check(Action::Flush, u64::MAX, u64::MAX).expect("sound");
        assert_eq!((flush.offset, flush.len), (0, 0));
    }

    #[test]
    fn a_read_only_device_refuses_changes() {
        let rules = Rules { read_only: true, ..rules(4096, 4) };
        let zeroes = Action::WriteZeroes(ZeroFlags::default());
        for action in [Action::Write(WriteFlags::default()), Action::Discard, zeroes] {
            assert_eq!(rules.check(action, 0, 8), Err(Errno::PERM));
        }
        assert!(rules.check(Action::Read, 0, 8).is_ok());
        assert!(rules.check(Action::Flush, 0, 0).is_ok());
    }
}
