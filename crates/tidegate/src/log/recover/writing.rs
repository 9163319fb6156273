//! Writes dirty pages back to the disk ahead of the sync that makes them durable.
#![allow(unsafe_code, reason = "no safe crate has sync_file_range")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Why a process may not rely on its syncs.
const ANSWERED: &str = "a filter of system calls answers the syncs of this process before the kernel gets them, so that \
     synced data would be lost (`tidegate run --volatile`, `systemd-nspawn --suppress-sync` and `mkosi` install such a \
     filter): run this command outside of it";

/// Checks that the kernel gets the syncs of this process.
///
/// The kernel refuses to write back a pipe. A filter that answers syncs does not know what a
/// descriptor is open on, and answers this call as any other.
///
/// # Errors
/// Fails if a filter of system calls answers syncs, or if no descriptors are left.
pub fn syncs_reach_kernel() -> io::Result<()> {
    let (pipe, _other_end) = rustix::pipe::pipe()?;
    let is_answered = start_writing(&pipe, 0, 1).is_ok();
    if is_answered { Err(io::Error::other(ANSWERED)) } else { Ok(()) }
}

/// Starts to write back the dirty pages of `len` bytes at `offset` of `file`, without waiting. The
/// next sync reports a failure.
///
/// # Errors
/// The file system does not support it.
pub fn start_writing(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    sync_range(file, offset, len, libc::SYNC_FILE_RANGE_WRITE)
}

/// Writes back the dirty pages of `len` bytes at `offset` of `file`, and waits until the disk has
/// them. They are not durable yet.
///
/// This is faster than starting now and waiting later: while other processes read from a disk, the
/// kernel gives writers that do not wait a small share of the queue.
///
/// # Errors
/// A write failed. No later call reports it again.
pub fn finish_writing(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    // With all three flags the kernel handles the writes as writes with a waiting caller.
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_range(file, offset, len, all)
}

fn sync_range(file: impl AsFd, offset: u64, len: u64, flags: libc::c_uint) -> io::Result<()> {
    let out_of_range = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let offset = libc::off64_t::try_from(offset).map_err(out_of_range)?;
    let len = libc::off64_t::try_from(len).map_err(out_of_range)?;
    let file = file.as_fd().as_raw_fd();
    // SAFETY: `file` is an open descriptor, and the call accesses no memory of this process.
    let outcome = unsafe { libc::sync_file_range(file, offset, len, flags) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_can_be_sent_ahead_and_what_is_no_range_is_refused() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 8192], 0).unwrap();
        start_writing(&file, 0, 8192).unwrap();
        finish_writing(&file, 0, 8192).unwrap();
        assert!(start_writing(&file, u64::MAX, 1).is_err());
    }
}
