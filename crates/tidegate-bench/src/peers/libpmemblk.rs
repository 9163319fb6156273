//! libpmemblk of PMDK 1.x (removed in 2.0), loaded at run time and driven through [`BlockDevice`].
//!
//! Invariants:
//! 1. A pool handle is a valid `PMEMblkpool` from `pmemblk_create` until drop, and the library
//!    stays loaded as long.
//! 2. Buffers handed over hold exactly one block, and block numbers are below `pmemblk_nblock`.
//! 3. libpmem takes its decision between streaming stores and `msync` when it is loaded, from the
//!    environment: off a DAX file system it would call `msync` for each store. So
//!    [`prepare_process`] must have run first.
//!
//! Entry points: [`prepare_process`], then [`PmemBlk::create`].

// An FFI edge: every function of the library is called here and nowhere else.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_longlong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::ptr::NonNull;

use libloading::Library;
use tidegate::device::{self, BlockDevice, DeviceError, DeviceErrorKind, Geometry, Operation};

use crate::child::this_program;
use crate::error::{BenchError, Result};
use crate::floor::geometry;

/// Shared library of the Debian package `libpmemblk1`.
const LIBRARY: &str = "libpmemblk.so.1";

/// Tells libpmem that stores need no `msync` although the file is not on DAX.
const FORCE: &str = "PMEM_IS_PMEM_FORCE";

/// Makes libpmem use streaming stores: starts the running program again with `PMEM_IS_PMEM_FORCE=1`
/// unless the variable is set. Call it before anything else; if it returns `Ok`, the variable is
/// set.
///
/// A program cannot safely change its own environment once a thread may be reading it, and libpmem
/// reads it when loaded.
///
/// # Errors
/// Fails as [`BenchError::Os`] if the program cannot be started again.
pub fn prepare_process() -> Result<()> {
    if forced() {
        return Ok(());
    }
    let program = this_program()?;
    let mut again = std::process::Command::new(&program);
    again.args(std::env::args_os().skip(1)).env(FORCE, "1");
    Err(BenchError::os("start again", program)(again.exec()))
}

fn forced() -> bool {
    std::env::var_os(FORCE).is_some_and(|value| value == "1")
}

/// A pool of libpmemblk.
pub struct PmemBlk {
    pool: NonNull<c_void>,
    api: Api,
    blocks: u64,
    block_bytes: u32,
}

// SAFETY: libpmemblk documents its pools as usable by any number of threads at once, and `pool` is
// only passed to libpmemblk.
unsafe impl Send for PmemBlk {}
// SAFETY: libpmemblk documents its pools as usable by any number of threads at once.
unsafe impl Sync for PmemBlk {}

/// The functions, and the library that must outlive them.
struct Api {
    create: unsafe extern "C" fn(*const c_char, usize, usize, mode: u32) -> *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    blocks: unsafe extern "C" fn(*mut c_void) -> usize,
    read: unsafe extern "C" fn(*mut c_void, *mut c_void, c_longlong) -> c_int,
    write: unsafe extern "C" fn(*mut c_void, *const c_void, c_longlong) -> c_int,
    set_zero: unsafe extern "C" fn(*mut c_void, c_longlong) -> c_int,
    error_message: unsafe extern "C" fn() -> *const c_char,
    _library: Library,
}

impl Api {
    fn load(name: &str) -> Result<Self> {
        let missing = |_| BenchError::Missing { what: name.to_owned(), package: "libpmemblk1" };
        // SAFETY: the initialisers of libpmemblk and libpmem only read the environment and the
        // CPU's features.
        let library = unsafe { Library::new(name) }.map_err(missing)?;
        Ok(Self {
            create: symbol(&library, "pmemblk_create")?,
            close: symbol(&library, "pmemblk_close")?,
            blocks: symbol(&library, "pmemblk_nblock")?,
            read: symbol(&library, "pmemblk_read")?,
            write: symbol(&library, "pmemblk_write")?,
            set_zero: symbol(&library, "pmemblk_set_zero")?,
            error_message: symbol(&library, "pmemblk_errormsg")?,
            _library: library,
        })
    }

    fn last_error(&self) -> String {
        // SAFETY: the function returns the calling thread's message, null or a C string that lives
        // until the thread's next call.
        let message = unsafe { (self.error_message)() };
        if message.is_null() {
            return "no reason given".to_owned();
        }
        // SAFETY: `message` is not null, and libpmemblk terminates it with a NUL.
        unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
    }
}

fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F> {
    // SAFETY: each caller names the type of the function's declaration in libpmemblk.h.
    let found = unsafe { library.get::<F>(name) };
    let function =
        found.map_err(|_| BenchError::program(LIBRARY, format!("has no function {name}")))?;
    Ok(*function)
}

impl PmemBlk {
    /// Creates a pool at `path` in a file of `size_bytes`, with blocks of `block_bytes`.
    ///
    /// # Errors
    /// Fails as [`BenchError::Missing`] without the library, as [`BenchError::Usage`] without a
    /// call of [`prepare_process`], and as [`BenchError::Program`] with the library's message.
    pub fn create(path: &Path, size_bytes: u64, block_bytes: u32) -> Result<Self> {
        if !forced() {
            let message = format!("set {FORCE}=1 before the start: libpmem would use msync");
            return Err(BenchError::Usage(message));
        }
        let api = Api::load(LIBRARY)?;
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| BenchError::Usage(format!("path {} has a NUL", path.display())))?;
        let size = usize::try_from(size_bytes).unwrap_or(usize::MAX);
        // SAFETY: the path is a C string; the other arguments are plain numbers.
        let pool = unsafe { (api.create)(c_path.as_ptr(), block_bytes as usize, size, 0o600) };
        let Some(pool) = NonNull::new(pool) else {
            let found = format!("cannot create {}: {}", path.display(), api.last_error());
            return Err(BenchError::program(LIBRARY, found));
        };
        // SAFETY: `pmemblk_create` has just returned `pool`.
        let blocks = unsafe { (api.blocks)(pool.as_ptr()) } as u64;
        Ok(Self { pool, api, blocks, block_bytes })
    }

    /// Applies `access` to each whole block of a request, with its number and the offset in the
    /// buffer.
    fn each_block(
        &self,
        offset: u64,
        len: usize,
        mut access: impl FnMut(c_longlong, usize) -> c_int,
    ) -> device::Result<()> {
        self.geometry().check(offset, len as u64)?;
        let first = offset / u64::from(self.block_bytes);
        for (number, at) in (first..).zip((0..len).step_by(self.block_bytes as usize)) {
            let number = c_longlong::try_from(number).unwrap_or(c_longlong::MAX);
            if access(number, at) != 0 {
                let context = format!("libpmemblk, block {number}: {}", self.api.last_error());
                return Err(DeviceError::new(DeviceErrorKind::Io, context));
            }
        }
        Ok(())
    }
}

impl BlockDevice for PmemBlk {
    fn geometry(&self) -> Geometry {
        let shape = geometry(self.block_bytes, self.blocks);
        Geometry { atomic_block: true, fast_zero: true, ..shape }
    }

    fn run(&self, operation: &mut Operation<'_>) -> device::Result<()> {
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                self.each_block(offset, buf.len(), |number, at| {
                    let to = buf[at..][..self.block_bytes as usize].as_mut_ptr();
                    // SAFETY: the pool is live (invariant 1), `to` has one block, `number` is in
                    // range (invariant 2).
                    unsafe { (self.api.read)(self.pool.as_ptr(), to.cast(), number) }
                })
            }
            Operation::Write { offset, data, .. } => {
                self.each_block(offset, data.len(), |number, at| {
                    let from = data[at..][..self.block_bytes as usize].as_ptr();
                    // SAFETY: the pool is live (invariant 1), `from` has one block, which is only
                    // read, and `number` is in range (invariant 2).
                    unsafe { (self.api.write)(self.pool.as_ptr(), from.cast(), number) }
                })
            }
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                self.each_block(offset, usize::try_from(len).unwrap_or(usize::MAX), |number, _| {
                    // SAFETY: the pool is live (invariant 1), `number` is in range (invariant 2).
                    unsafe { (self.api.set_zero)(self.pool.as_ptr(), number) }
                })
            }
            // Every write is durable when answered.
            Operation::Flush => Ok(()),
            Operation::Status { .. } => {
                operation.report_data();
                Ok(())
            }
        }
    }
}

impl Drop for PmemBlk {
    fn drop(&mut self) {
        // SAFETY: the pool is live (invariant 1), and nothing uses it afterwards.
        unsafe { (self.api.close)(self.pool.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_the_package() {
        let error = Api::load("libpmemblk-of-nobody.so.1").err().expect("there is no such library");
        let message = error.to_string();
        assert!(message.contains("libpmemblk-of-nobody.so.1"), "{message}");
        assert!(message.contains("package libpmemblk1"), "{message}");
    }
}
