//! Transfers through the page cache.
//!
//! A forced write is a write and a flush of the file, not `RWF_DSYNC`: one of two concurrent
//! `RWF_DSYNC` writes can consume the write-back error of the other (see [`gate`](super::gate)),
//! while callers of the gate share one flush.

use rustix::io::retry_on_intr;

use super::{Backing, Result, WriteFlags};

impl Backing {
    pub(super) fn read_buffered(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let (file, len) = (self.reopened_file(), buf.len());
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let rest = &mut buf[done..];
            match retry_on_intr(|| rustix::io::pread(&*file, &mut *rest, at)) {
                Ok(0) => return Err(self.ended("read", at)),
                Ok(moved) => done += moved,
                Err(errno) => return Err(self.failed("read", offset, len as u64, errno)),
            }
        }
        Ok(())
    }

    pub(super) fn write_buffered(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        let (begun, file) = self.begin_write();
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            match retry_on_intr(|| rustix::io::pwrite(&*file, &data[done..], at)) {
                Ok(0) => return Err(self.ended("write", at)),
                Ok(moved) => done += moved,
                Err(errno) => return Err(self.failed("write", offset, data.len() as u64, errno)),
            }
        }
        self.end_write(begun, flags.fua)
    }
}
