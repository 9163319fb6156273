//! The files of a kernel, as recovery opens them.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidegate::log::recover::{Access, Failure, FilePlan, FileState, FileSystem, Ranges};

use super::{Kernel, PAGE_BYTES};

/// The files of a kernel as recovery sees them, until it is interrupted.
pub(crate) struct Mounted {
    kernel: Mutex<Kernel>,
    /// Calls that still succeed.
    calls_left: Mutex<usize>,
}

impl Mounted {
    pub(crate) fn new(kernel: Kernel, calls_left: usize) -> Self {
        Self { kernel: Mutex::new(kernel), calls_left: Mutex::new(calls_left) }
    }

    pub(crate) fn into_kernel(self) -> Kernel {
        self.kernel.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self) -> io::Result<MutexGuard<'_, Kernel>> {
        let mut left = self.calls_left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(1).ok_or(io::ErrorKind::Interrupted)?;
        Ok(self.kernel.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl FileSystem for Mounted {
    type File = usize;

    fn open(&self, file: &FilePlan, _: Access) -> Result<Option<usize>, Failure> {
        Ok(Some(to_usize(file.identity - 1)))
    }

    fn state(&self, file: &usize) -> io::Result<FileState> {
        let size_bytes = self.call()?.bytes(*file).len() as u64;
        Ok(FileState { size_bytes, block_bytes: PAGE_BYTES as u64, changed_ns: 0, modified_ns: 0 })
    }

    fn written(&self, file: &usize, _size_bytes: u64) -> io::Result<Ranges> {
        Ok(self.call()?.written(*file))
    }

    fn set_size(&self, file: &usize, size_bytes: u64) -> io::Result<()> {
        self.call()?.set_size(*file, to_usize(size_bytes));
        Ok(())
    }

    fn write(&self, file: &usize, offset: u64, data: &[u8]) -> io::Result<()> {
        self.call()?.write(*file, to_usize(offset), data);
        Ok(())
    }

    fn zero(&self, file: &usize, offset: u64, len: u64) -> io::Result<()> {
        self.call()?.write(*file, to_usize(offset), &vec![0; to_usize(len)]);
        Ok(())
    }

    fn start_sync(&self, _file: &usize, _offset: u64, _len: u64) {}

    fn sync(&self, file: &usize) -> io::Result<()> {
        self.call()?.sync(*file, false);
        Ok(())
    }
}
