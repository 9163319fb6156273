//! One request without I/O: checks what the kernel asks for, turns it into an operation, and the
//! result into the kernel's answer.

use rustix::io::Errno;
use tidegate::device::{
    DeviceError, DeviceErrorKind, Geometry, IoBuffer, OwnedOperation, Result, WriteFlags, ZeroFlags,
};

use super::abi::{Descriptor, SECTOR_BYTES, op};
use crate::statistics::Kind;

/// Rules for the requests of a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) geometry: Geometry,
    /// Refuses writes, whatever the device allows.
    pub(super) read_only: bool,
    /// Most data of a read or a write.
    pub(super) request_bytes_max: u32,
}

/// A sound request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    action: Action,
    offset: u64,
    len: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Read,
    Write(WriteFlags),
    Flush,
    Discard,
    WriteZeroes(ZeroFlags),
}

/// Turns a descriptor into a request.
///
/// # Errors
/// The operation is unknown, or its range or size is not allowed.
pub(super) fn check(descriptor: &Descriptor, rules: &Rules) -> std::result::Result<Request, Errno> {
    let (kind, action) = action(descriptor.op_flags).ok_or(Errno::OPNOTSUPP)?;
    let (first_sector, sectors) = match action {
        // The kernel leaves any numbers in the range of a flush.
        Action::Flush => (0, 0),
        _ => (descriptor.first_sector, descriptor.sectors),
    };
    let offset = first_sector.checked_mul(SECTOR_BYTES).ok_or(Errno::INVAL)?;
    let request = Request { kind, action, offset, len: u64::from(sectors) * SECTOR_BYTES };
    let changes = !matches!(action, Action::Read | Action::Flush);
    if changes && rules.read_only {
        return Err(Errno::PERM);
    }
    if request.data_bytes() > rules.request_bytes_max as usize {
        return Err(Errno::INVAL);
    }
    rules.geometry.check(request.offset, request.len).map_err(|error| errno_of(&error))?;
    Ok(request)
}

fn action(op_flags: u32) -> Option<(Kind, Action)> {
    let has = |flag| op_flags & flag != 0;
    let fua = has(op::FLAG_FUA);
    let zeroes = ZeroFlags { fua, may_unmap: !has(op::FLAG_NO_UNMAP), fast_only: false };
    Some(match op_flags & op::MASK {
        op::READ => (Kind::Read, Action::Read),
        op::WRITE => (Kind::Write, Action::Write(WriteFlags { fua })),
        op::FLUSH => (Kind::Flush, Action::Flush),
        op::DISCARD => (Kind::Trim, Action::Discard),
        op::WRITE_ZEROES => (Kind::WriteZeroes, Action::WriteZeroes(zeroes)),
        _ => return None,
    })
}

impl Request {
    /// Returns the length of the data that a read or a write has in its buffer.
    pub(super) fn data_bytes(&self) -> usize {
        match self.action {
            Action::Read | Action::Write(_) => usize::try_from(self.len).unwrap_or(usize::MAX),
            _ => 0,
        }
    }

    /// Returns the length as the statistics count it.
    pub(super) fn counted_bytes(&self) -> u32 {
        u32::try_from(self.len).unwrap_or(u32::MAX)
    }

    /// Returns the operation. A read or a write takes `buffer`, which holds the data of a write.
    /// Returns `None` if the buffer is missing.
    pub(super) fn operation(&self, buffer: &mut Option<IoBuffer>) -> Option<OwnedOperation> {
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

    /// Returns the answer to a request that ended with `result`.
    pub(super) fn answer(&self, result: &Result<()>) -> i32 {
        match result {
            Ok(()) => i32::try_from(self.data_bytes()).unwrap_or(i32::MAX),
            Err(error) => refusal(errno_of(error)),
        }
    }
}

/// Returns the answer to a request that failed.
pub(super) fn refusal(error: Errno) -> i32 {
    -error.raw_os_error()
}

/// Returns the kernel's number for a device's error.
fn errno_of(error: &DeviceError) -> Errno {
    match error.kind() {
        DeviceErrorKind::ReadOnly => Errno::PERM,
        DeviceErrorKind::NoSpace => Errno::NOSPC,
        DeviceErrorKind::Unsupported => Errno::OPNOTSUPP,
        DeviceErrorKind::OutOfRange | DeviceErrorKind::Misaligned => Errno::INVAL,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate::device::BlockDevice;
    use tidegate::device::memory::MemoryDevice;

    use super::*;

    const MAX: u32 = 256 << 10;

    fn rules(block_bytes: u32, blocks: u64) -> Rules {
        let geometry = MemoryDevice::new(block_bytes, blocks).expect("a device").geometry();
        Rules { geometry, read_only: false, request_bytes_max: MAX }
    }

    fn descriptor(op_flags: u32, first_sector: u64, sectors: u32) -> Descriptor {
        Descriptor { op_flags, sectors, first_sector, address: 0 }
    }

    #[test]
    fn flags_keep_their_meaning() {
        let rules = rules(512, 100);
        let action = |op_flags| check(&descriptor(op_flags, 8, 8), &rules).map(|it| it.action);
        assert_eq!(action(op::READ), Ok(Action::Read));
        assert_eq!(action(op::WRITE), Ok(Action::Write(WriteFlags { fua: false })));
        assert_eq!(action(op::WRITE | op::FLAG_FUA), Ok(Action::Write(WriteFlags { fua: true })));
        assert_eq!(action(op::DISCARD), Ok(Action::Discard));
        let zeroes =
            |fua, may_unmap| Action::WriteZeroes(ZeroFlags { fua, may_unmap, fast_only: false });
        assert_eq!(action(op::WRITE_ZEROES), Ok(zeroes(false, true)));
        let both = op::WRITE_ZEROES | op::FLAG_FUA | op::FLAG_NO_UNMAP;
        assert_eq!(action(both), Ok(zeroes(true, false)));
        // A flush has no range, whatever its descriptor holds.
        let flush = check(&descriptor(op::FLUSH, u64::MAX, u32::MAX), &rules).expect("sound");
        assert_eq!((flush.offset, flush.len), (0, 0));
        assert_eq!(action(4), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn ranges_outside_and_parts_of_blocks_are_refused() {
        let rules = rules(4096, 4);
        let checked = |first, sectors| check(&descriptor(op::READ, first, sectors), &rules);
        assert!(checked(24, 8).is_ok());
        for (first, sectors) in [(24, 16), (32, 8), (1, 8), (0, 1), (u64::MAX, 8)] {
            assert_eq!(checked(first, sectors), Err(Errno::INVAL), "{first} {sectors}");
        }
        let long = check(&descriptor(op::READ, 0, MAX / 512 + 8), &self::rules(4096, 1000));
        assert_eq!(long, Err(Errno::INVAL));
        let wide = check(&descriptor(op::DISCARD, 0, MAX / 512 + 8), &self::rules(4096, 1000));
        assert!(wide.is_ok(), "a discard has no data");
    }

    #[test]
    fn a_read_only_device_refuses_changes() {
        let rules = Rules { read_only: true, ..rules(4096, 4) };
        for changing in [op::WRITE, op::DISCARD, op::WRITE_ZEROES] {
            assert_eq!(check(&descriptor(changing, 0, 8), &rules), Err(Errno::PERM));
        }
        assert!(check(&descriptor(op::READ, 0, 8), &rules).is_ok());
        assert!(check(&descriptor(op::FLUSH, 0, 0), &rules).is_ok());
    }

    #[test]
    fn answers_are_lengths_or_error_numbers() {
        let rules = rules(4096, 4);
        let read = check(&descriptor(op::READ, 0, 16), &rules).expect("sound");
        assert_eq!(read.answer(&Ok(())), 8192);
        let discard = check(&descriptor(op::DISCARD, 0, 16), &rules).expect("sound");
        assert_eq!(discard.answer(&Ok(())), 0);
        let failed = |kind| read.answer(&Err(DeviceError::new(kind, "it fails")));
        assert_eq!(failed(DeviceErrorKind::Io), -5);
        assert_eq!(failed(DeviceErrorKind::Corrupt), -5);
        assert_eq!(failed(DeviceErrorKind::NoSpace), -28);
    }

    proptest! {
        /// A request that passes is inside the device and fits the buffer; none panics.
        #[test]
        fn any_descriptor_is_checked(
            op_flags in any::<u32>(), first_sector in any::<u64>(), sectors in any::<u32>()
        ) {
            let small = rules(4096, 4);
            let geometry = Geometry { blocks: 1 << 30, ..small.geometry };
            let rules = Rules { geometry, ..small };
            if let Ok(request) = check(&descriptor(op_flags, first_sector, sectors), &rules) {
                prop_assert!(request.data_bytes() <= MAX as usize);
                prop_assert!(request.offset + request.len <= rules.geometry.size_bytes());
                let mut buffer = IoBuffer::try_new(MAX as usize);
                prop_assert!(request.operation(&mut buffer).is_some());
            }
        }
    }
}
