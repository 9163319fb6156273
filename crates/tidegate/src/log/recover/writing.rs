//! Dirty pages on their way to the disk, ahead of the sync that makes them durable.
#![allow(unsafe_code, reason = "no safe crate has sync_file_range")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Starts to write the dirty pages of `len` bytes at `offset` of `file` to its disk, and does not
/// wait for them. A failure is told to the next sync.
///
/// # Errors
/// The file system cannot do that.
pub fn start_writing(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    sync_range(file, offset, len, libc::SYNC_FILE_RANGE_WRITE)
}

/// Has the disk take the dirty pages of `len` bytes at `offset` of `file`, and waits for that; they
/// are not durable by it.
///
/// Sooner than one that starts to write and waits later: of a disk that others read from, the
/// kernel gives writers that do not wait a small part of the queue.
///
/// # Errors
/// A write failed: no later call will say so once more.
pub fn finish_writing(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    // The kernel takes all three together for a write that a caller waits for.
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
    // SAFETY: a system call on an open descriptor.
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
