//! Hook: `syscall`.
//!
//! Invariant: a system call that changes files or descriptors is made by the hook that has its name, so that it makes no difference how
//! the program makes it. One that no hook has is made as it is.
#![allow(unsafe_code)] // C's calling convention
#![allow(clippy::cast_possible_wrap, clippy::cast_lossless, trivial_numeric_casts)] // results of all types become a word

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::ptr;

use crate::close::appeared;
use crate::logged::Open;
use crate::raw;
use crate::{
    attributes, close, exec, fork, mapping, message, names, open, process, read, readable, seccomp,
    stat, sync, transfer, unseen, write,
};

/// The words that the program gave, as what the hooks take.
#[derive(Clone, Copy)]
struct Arguments([usize; 6]);

impl Arguments {
    fn int(self, at: usize) -> c_int {
        let [a, b, c, d, ..] = self.0[at].to_le_bytes();
        c_int::from_le_bytes([a, b, c, d])
    }

    fn uint(self, at: usize) -> c_uint {
        self.int(at).cast_unsigned()
    }

    fn long(self, at: usize) -> i64 {
        self.0[at].cast_signed() as i64
    }

    fn pointer<T>(self, at: usize) -> *mut T {
        ptr::with_exposed_provenance_mut(self.0[at])
    }

    fn path(self, at: usize) -> *const c_char {
        self.pointer::<c_char>(at)
    }
}

#[unsafe(no_mangle)]
#[allow(clippy::many_single_char_names)] // seven words without names of their own
unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let given = Arguments([a, b, c, d, e, f]);
    if process::log().is_some() {
        // SAFETY: the program's own arguments of that call.
        if let Some(result) = unsafe { by_hook(number, given) } {
            return result;
        }
    }
    // SAFETY: the program's own arguments of that call.
    raw::returned(unsafe { raw::call(number, given.0) }) as c_long
}

/// Makes a call by a hook.
macro_rules! hook {
    ($call:expr) => {{
        // SAFETY: the program's own arguments of the same call.
        let result = unsafe { $call };
        result as c_long
    }};
}

/// # Safety
/// As for the call.
unsafe fn by_hook(number: c_long, given: Arguments) -> Option<c_long> {
    // SAFETY: as promised.
    unsafe { of_data(number, given) }
        // SAFETY: as promised.
        .or_else(|| unsafe { of_descriptors(number, given) })
        // SAFETY: as promised.
        .or_else(|| unsafe { of_names(number, given) })
        // SAFETY: as promised.
        .or_else(|| unsafe { of_attributes(number, given) })
        // SAFETY: as promised.
        .or_else(|| unsafe { of_memory(number, given) })
}

/// Calls that write or sync.
///
/// # Safety
/// As for the call.
unsafe fn of_data(number: c_long, given: Arguments) -> Option<c_long> {
    let (fd, at, len) = (given.int(0), given.pointer::<c_void>(1), given.0[2]);
    let (vector, count) = (given.pointer::<libc::iovec>(1).cast_const(), given.int(2));
    let (second, third, fourth) = (given.pointer(1), given.pointer(2), given.pointer(3));
    let offset = given.long(3);
    Some(match number {
        libc::SYS_read => hook!(read::read(fd, at, len)),
        libc::SYS_pread64 => hook!(read::pread64(fd, at, len, offset)),
        libc::SYS_readv => hook!(read::readv(fd, vector, count)),
        libc::SYS_preadv => hook!(read::preadv64(fd, vector, count, offset)),
        libc::SYS_preadv2 => hook!(read::preadv64v2(fd, vector, count, offset, given.int(5))),
        libc::SYS_lseek => read::lseek64(fd, given.long(1), given.int(2)),
        libc::SYS_fstat => hook!(stat::fstat64(fd, given.pointer(1))),
        libc::SYS_newfstatat => {
            hook!(stat::fstatat64(fd, given.path(1), given.pointer(2), given.int(3)))
        }
        libc::SYS_statx => {
            let (path, flags, mask) = (given.path(1), given.int(2), given.uint(3));
            hook!(stat::statx(fd, path, flags, mask, given.pointer(4)))
        }
        libc::SYS_write => hook!(write::write(fd, at, len)),
        libc::SYS_pwrite64 => hook!(write::pwrite64(fd, at, len, offset)),
        libc::SYS_writev => hook!(write::writev(fd, vector, count)),
        libc::SYS_pwritev => hook!(write::pwritev64(fd, vector, count, offset)),
        libc::SYS_pwritev2 => hook!(write::pwritev64v2(fd, vector, count, offset, given.int(5))),
        libc::SYS_fsync => hook!(sync::fsync(fd)),
        libc::SYS_fdatasync => hook!(sync::fdatasync(fd)),
        libc::SYS_syncfs => hook!(sync::syncfs(fd)),
        libc::SYS_sync_file_range => {
            hook!(sync::sync_file_range(fd, given.long(1), given.long(2), given.uint(3)))
        }
        libc::SYS_sendfile => hook!(transfer::sendfile64(fd, given.int(1), third, given.0[3])),
        libc::SYS_copy_file_range => hook!(transfer::copy_file_range(
            fd,
            second,
            given.int(2),
            fourth,
            given.0[4],
            given.uint(5)
        )),
        libc::SYS_splice => {
            hook!(transfer::splice(fd, second, given.int(2), fourth, given.0[4], given.uint(5)))
        }
        _ => return None,
    })
}

/// Calls that give descriptors out, or take them back.
///
/// # Safety
/// As for the call.
unsafe fn of_descriptors(number: c_long, given: Arguments) -> Option<c_long> {
    let (first, second) = (given.int(0), given.int(1));
    Some(match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open => hook!(open::open64(given.path(0), second, given.uint(2))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_creat => hook!(open::creat64(given.path(0), given.uint(1))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_dup2 => hook!(close::dup2(first, second)),
        libc::SYS_openat => {
            hook!(open::open_at(first, given.path(1), given.int(2), given.uint(3)))
        }
        libc::SYS_openat2 => hook!(open_2(given)),
        libc::SYS_open_by_handle_at => {
            hook!(open::open_by_handle_at(first, given.pointer(1), given.int(2)))
        }
        libc::SYS_close => hook!(close::close(first)),
        libc::SYS_close_range => {
            hook!(close::close_range(given.uint(0), given.uint(1), given.int(2)))
        }
        libc::SYS_dup => hook!(close::dup(first)),
        libc::SYS_dup3 => hook!(close::dup3(first, second, given.int(2))),
        libc::SYS_fcntl => hook!(close::fcntl64(first, second, given.0[2])),
        libc::SYS_flock => hook!(close::flock(first, second)),
        libc::SYS_sendmsg => hook!(message::sendmsg(first, given.pointer(1), given.int(2))),
        libc::SYS_sendmmsg => {
            hook!(message::sendmmsg(first, given.pointer(1), given.uint(2), given.int(3)))
        }
        libc::SYS_ioctl => hook!(transfer::ioctl(first, given.0[1] as _, given.0[2])),
        libc::SYS_io_setup | libc::SYS_io_uring_setup => {
            unseen::all();
            return None;
        }
        _ => return None,
    })
}

/// `openat2` has no function in the C library.
///
/// # Safety
/// As for the call.
unsafe fn open_2(given: Arguments) -> c_int {
    // SAFETY: as promised.
    let fd = raw::returned_int(unsafe { raw::call(libc::SYS_openat2, given.0) });
    if fd < 0 {
        return fd;
    }
    appeared(fd);
    // SAFETY: the kernel has read them.
    let flags = unsafe { *given.pointer::<u64>(2) };
    let has = |flag: c_int| flags & u64::from(flag.cast_unsigned()) != 0;
    if has(libc::O_CREAT)
        && let Some(log) = process::log()
    {
        names::appeared(log, fd);
    }
    // It is empty by now, which the log does not have.
    if has(libc::O_TRUNC)
        && let Some(open) = Open::of(fd)
    {
        open.unseen(|| 0);
    }
    fd
}

/// Calls that change names and sizes, by the hooks that stand under the names of the C library's functions.
///
/// # Safety
/// As for the call.
unsafe fn of_names(number: c_long, given: Arguments) -> Option<c_long> {
    let (first, second, fourth) = (given.path(0), given.path(1), given.path(3));
    let (from, to) = (given.int(0), given.int(2));
    Some(match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rename => hook!(libc::rename(first, second)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_unlink => hook!(libc::unlink(first)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_link => hook!(libc::link(first, second)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_symlink => hook!(libc::symlink(first, second)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_mkdir => hook!(libc::mkdir(first, given.uint(1))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rmdir => hook!(libc::rmdir(first)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_renameat => hook!(libc::renameat(from, second, to, fourth)),
        libc::SYS_renameat2 => hook!(libc::renameat2(from, second, to, fourth, given.uint(4))),
        libc::SYS_unlinkat => hook!(libc::unlinkat(from, second, to)),
        libc::SYS_linkat => hook!(libc::linkat(from, second, to, fourth, given.int(4))),
        libc::SYS_symlinkat => hook!(libc::symlinkat(first, given.int(1), given.path(2))),
        libc::SYS_mkdirat => hook!(libc::mkdirat(from, second, given.uint(2))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_mknod => hook!(libc::mknod(first, given.uint(1), given.0[2] as u64)),
        libc::SYS_mknodat => {
            hook!(libc::mknodat(from, second, given.uint(2), given.0[3] as u64))
        }
        libc::SYS_chroot => hook!(libc::chroot(first)),
        libc::SYS_truncate => hook!(libc::truncate64(first, given.long(1))),
        libc::SYS_ftruncate => hook!(libc::ftruncate64(from, given.long(1))),
        libc::SYS_setrlimit => hook!(libc::setrlimit(given.uint(0), given.pointer(1))),
        libc::SYS_prlimit64 => {
            hook!(libc::prlimit64(from, given.uint(1), given.pointer(2), given.pointer(3)))
        }
        libc::SYS_fallocate => {
            hook!(libc::fallocate64(from, given.int(1), given.long(2), given.long(3)))
        }
        _ => return None,
    })
}

/// Calls that change attributes of files.
///
/// # Safety
/// As for the call.
unsafe fn of_attributes(number: c_long, given: Arguments) -> Option<c_long> {
    let (fd, flags) = (given.int(0), given.int(4));
    let (first, second) = (given.path(0), given.path(1));
    let (value, len) = (given.pointer::<c_void>(2).cast_const(), given.0[3]);
    Some(match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod => hook!(attributes::chmod(first, given.uint(1))),
        libc::SYS_fchmod => hook!(attributes::fchmod(fd, given.uint(1))),
        libc::SYS_fchmodat => hook!(attributes::fchmodat(fd, second, given.uint(2), 0)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chown => hook!(attributes::chown(first, given.uint(1), given.uint(2))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_lchown => hook!(attributes::lchown(first, given.uint(1), given.uint(2))),
        libc::SYS_fchown => hook!(attributes::fchown(fd, given.uint(1), given.uint(2))),
        libc::SYS_fchownat => {
            hook!(attributes::fchownat(fd, second, given.uint(2), given.uint(3), flags))
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_utime => hook!(attributes::utime(first, given.pointer(1))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_utimes => hook!(attributes::utimes(first, given.pointer(1))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat => hook!(attributes::futimesat(fd, second, given.pointer(2))),
        // The C library has another function for the descriptor itself.
        libc::SYS_utimensat if second.is_null() => {
            hook!(attributes::futimens(fd, given.pointer(2)))
        }
        libc::SYS_utimensat => {
            hook!(attributes::utimensat(fd, second, given.pointer(2), given.int(3)))
        }
        libc::SYS_setxattr => hook!(attributes::setxattr(first, second, value, len, flags)),
        libc::SYS_lsetxattr => hook!(attributes::lsetxattr(first, second, value, len, flags)),
        libc::SYS_fsetxattr => hook!(attributes::fsetxattr(fd, second, value, len, flags)),
        libc::SYS_removexattr => hook!(attributes::removexattr(first, second)),
        libc::SYS_lremovexattr => hook!(attributes::lremovexattr(first, second)),
        libc::SYS_fremovexattr => hook!(attributes::fremovexattr(fd, second)),
        _ => return None,
    })
}

const SECCOMP_SET_MODE_STRICT: c_int = 0;

/// Calls that map memory, fork, start programs, or give rights up.
///
/// # Safety
/// As for the call.
unsafe fn of_memory(number: c_long, given: Arguments) -> Option<c_long> {
    let (at, len, protection) = (given.pointer::<c_void>(0), given.0[1], given.int(2));
    Some(match number {
        libc::SYS_mmap => {
            let (flags, fd, offset) = (given.int(3), given.int(4), given.long(5));
            hook!(mapping::map(at, len, protection, (flags, fd, offset)).addr())
        }
        libc::SYS_mremap => {
            hook!(mapping::mremap(at, len, given.0[2], given.int(3), given.pointer(4)).addr())
        }
        libc::SYS_shmdt => hook!(mapping::shmdt(at)),
        libc::SYS_prctl => {
            let [_, second, third, fourth, fifth, _] = given.0.map(|word| word as _);
            hook!(seccomp::prctl(given.int(0), second, third, fourth, fifth))
        }
        libc::SYS_seccomp if given.int(0) == SECCOMP_SET_MODE_STRICT => {
            // SAFETY: the program's own arguments.
            raw::returned(seccomp::strictly(|| unsafe { raw::call(number, given.0) })) as c_long
        }
        libc::SYS_unshare => hook!(fork::unshare(given.int(0))),
        libc::SYS_munmap => hook!(mapping::munmap(at, len)),
        libc::SYS_mprotect => hook!(mapping::mprotect(at, len, protection)),
        libc::SYS_pkey_mprotect => {
            hook!(mapping::pkey_mprotect(at, len, protection, given.int(3)))
        }
        libc::SYS_execve => {
            hook!(exec::execve(given.path(0), given.pointer(1), given.pointer(2)))
        }
        libc::SYS_execveat => {
            let (argv, envp) = (given.pointer(2), given.pointer(3));
            hook!(exec::execveat(given.int(0), given.path(1), argv, envp, given.int(4)))
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => forking(number, given),
        // It would return over the caller's frames: a fork is one that does not.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => forking(libc::SYS_fork, given),
        libc::SYS_clone if given.int(0) & libc::CLONE_VM == 0 => forking(number, given),
        libc::SYS_clone3 if clone_flags(given) & libc::CLONE_VM as u64 == 0 => {
            forking(number, given)
        }
        _ => return None,
    })
}

/// A fork that the C library does not know of.
fn forking(number: c_long, given: Arguments) -> c_long {
    // SAFETY: the program's own arguments.
    raw::returned(fork::forking(|| unsafe { raw::call(number, given.0) })) as c_long
}

/// The flags of a `clone3`.
fn clone_flags(given: Arguments) -> u64 {
    let at = given.pointer::<u64>(0).cast_const();
    // SAFETY: readable.
    if readable::is_readable(at.cast(), 8) { unsafe { at.read_unaligned() } } else { 0 }
}
