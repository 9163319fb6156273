//! One request without I/O: decodes what the kernel asks for, and encodes the result.

use rustix::io::Errno;
use tidegate::device::{Result, WriteFlags, ZeroFlags};

use super::abi::{Descriptor, op};
use crate::request::{Action, Request, Rules, errno_of};

/// Turns a descriptor into a request.
///
/// # Errors
/// The operation is unknown, or its range or size is not allowed.
pub(super) fn check(descriptor: &Descriptor, rules: &Rules) -> std::result::Result<Request, Errno> {
    let action = action(descriptor.op_flags).ok_or(Errno::OPNOTSUPP)?;
    rules.check(action, descriptor.first_sector, descriptor.sectors.into())
}

fn action(op_flags: u32) -> Option<Action> {
    let has = |flag| op_flags & flag != 0;
    let fua = has(op::FLAG_FUA);
    let zeroes = ZeroFlags { fua, may_unmap: !has(op::FLAG_NO_UNMAP), fast_only: false };
    Some(match op_flags & op::MASK {
        op::READ => Action::Read,
        op::WRITE => Action::Write(WriteFlags { fua }),
        op::FLUSH => Action::Flush,
        op::DISCARD => Action::Discard,
        op::WRITE_ZEROES => Action::WriteZeroes(zeroes),
        _ => return None,
    })
}

/// Returns the answer to a request that ended with `result`.
pub(super) fn answer(request: &Request, result: &Result<()>) -> i32 {
    match result {
        Ok(()) => i32::try_from(request.data_bytes()).unwrap_or(i32::MAX),
        Err(error) => refusal(errno_of(error)),
    }
}

/// Returns the answer to a request that failed.
pub(super) fn refusal(error: Errno) -> i32 {
    -error.raw_os_error()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate::device::{DeviceError, DeviceErrorKind, Geometry, IoBuffer};

    use super::*;
    use crate::request::tests::{MAX, rules};

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
    fn answers_are_lengths_or_error_numbers() {
        let rules = rules(4096, 4);
        let read = check(&descriptor(op::READ, 0, 16), &rules).expect("sound");
        assert_eq!(answer(&read, &Ok(())), 8192);
        let discard = check(&descriptor(op::DISCARD, 0, 16), &rules).expect("sound");
        assert_eq!(answer(&discard, &Ok(())), 0);
        let failed = |kind| answer(&read, &Err(DeviceError::new(kind, "it fails")));
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
