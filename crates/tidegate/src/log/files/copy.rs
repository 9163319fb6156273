//! Copies bytes of the log into a file, to write data again that the kernel may have dropped.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

use crate::log::pool::LogPool;

/// Copies `len` bytes at `position` of the log to byte `offset` of `file`, in steps of `buf`.
/// Ignores the append mode of the descriptor. Allocates nothing.
///
/// # Errors
/// The kernel's error; part of the bytes may be written. `EIO` if the log's memory fails.
pub fn copy_to_file(
    pool: &LogPool,
    position: u64,
    len: u64,
    file: BorrowedFd<'_>,
    offset: u64,
    buf: &mut [u8],
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let step = (len - done).min(buf.len() as u64);
        let part = &mut buf[..usize::try_from(step).unwrap_or(0)];
        if part.is_empty() {
            return Err(Errno::INVAL.into());
        }
        read(pool, position + done, part)?;
        write_in_place(file, offset + done, part)?;
        done += step;
    }
    Ok(())
}

fn read(pool: &LogPool, position: u64, buf: &mut [u8]) -> io::Result<()> {
    let read = pool.region().read(pool.region_offset(position), buf);
    read.map_err(|_| Errno::IO.into())
}

/// Writes all of `bytes` at byte `offset` of `file`, even through a descriptor in append mode.
///
/// # Errors
/// The kernel's error; part of the bytes may be written.
pub fn write_in_place(file: BorrowedFd<'_>, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match pwrite_in_place(file, bytes, offset) {
            Ok(0) => return Err(Errno::IO.into()),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// `RWF_NOAPPEND`, since Linux 6.9.
const NO_APPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);

fn pwrite_in_place(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> rustix::io::Result<usize> {
    if rustix::fs::fcntl_getfl(file)?.contains(OFlags::APPEND) {
        rustix::io::pwritev2(file, &[IoSlice::new(bytes)], offset, NO_APPEND)
    } else {
        rustix::io::pwrite(file, bytes, offset)
    }
}

/// Returns whether [`write_in_place`] works on this descriptor; append mode needs Linux 6.9.
pub fn can_write_in_place(file: BorrowedFd<'_>) -> bool {
    pwrite_in_place(file, &[], 0).is_ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_same_bytes_can_be_written_again_through_a_descriptor_that_appends() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = std::fs::File::options();
        let file = options.append(true).create(true).open(dir.path().join("file")).unwrap();
        assert!(can_write_in_place(file.as_fd()));
        for _ in 0..2 {
            write_in_place(file.as_fd(), 0, b"once").unwrap();
            write_in_place(file.as_fd(), 4, b"more").unwrap();
        }
        assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"oncemore");
    }
}
