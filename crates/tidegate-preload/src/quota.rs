//! What quotas leave.
#![allow(unsafe_code)] // a system call

use std::ffi::c_int;

use crate::raw::{self, words};

/// Whose quota.
pub(crate) const USER: c_int = 0;
pub(crate) const GROUP: c_int = 1;

/// `Q_GETQUOTA`.
const GET: c_int = 0x0080_0007;
/// Limits are in these.
const UNIT_BYTES: u64 = 1024;

/// The kernel's structure.
#[repr(C)]
#[derive(Default)]
struct Quota {
    hard_blocks: u64,
    soft_blocks: u64,
    used_bytes: u64,
    rest: [u64; 6],
}

/// Bytes that the quota of this user or group leaves on the file system of `fd`; all where there is none, none where it
/// is not told.
pub(crate) fn left_bytes(fd: c_int, whose: c_int, id: u32) -> u64 {
    let mut quota = Quota::default();
    let place = &raw mut quota;
    let arguments = words![fd, GET << 8 | whose, id, place];
    // SAFETY: room for the kernel's answer.
    match raw::checked(unsafe { raw::call(libc::SYS_quotactl_fd, arguments) }) {
        Ok(_) => left(&quota),
        Err(libc::EPERM | libc::EACCES) => 0,
        // No quotas are kept there, or the kernel has no such call.
        Err(_) => u64::MAX,
    }
}

fn left(quota: &Quota) -> u64 {
    let limits = [quota.hard_blocks, quota.soft_blocks].into_iter().filter(|blocks| *blocks != 0);
    let limit = limits.min().map(|blocks| blocks.saturating_mul(UNIT_BYTES));
    limit.map_or(u64::MAX, |limit| limit.saturating_sub(quota.used_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_limit_counts_and_0_is_none() {
        let left = |hard_blocks, soft_blocks, used_bytes| {
            left(&Quota { hard_blocks, soft_blocks, used_bytes, rest: [0; 6] })
        };
        assert_eq!(left(0, 0, 5), u64::MAX);
        assert_eq!(left(10, 0, 240), 10_000);
        assert_eq!(left(10, 4, 96), 4000);
        assert_eq!(left(10, 4, 5000), 0);
    }
}
