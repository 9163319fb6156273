//! Hook: `syscall`.
//!
//! Invariant: a system call that changes files or descriptors goes to the hook of its name, so that
//! it does not matter how the program makes the call. A call without a hook is made as it is if
//! [`numbers::HARMLESS`] has it. While any other call is made, no file is logged: the call may be
//! newer than this library and change any file.
#![allow(unsafe_code)] // C's calling convention
#![allow(clippy::cast_possible_wrap, clippy::cast_lossless, trivial_numeric_casts)] // results of all types become a word

mod numbers;

use std::ffi::{c_int, c_long, c_ulong, c_void};

use tidegate::log::cover::Cause;
use tidegate_interpose::raw::Arguments;

use crate::covered::metadata::{Named, Sets};
use crate::covered::{metadata, unseen};
use crate::hooks::{
    attributes, close, exec, fork, limits, mapping, memory_limits, message, mount, names, open,
    rights, size, sync, transfer, write,
};
use crate::state::process;
use crate::state::suspended::Suspended;
use crate::sys::{handlers, raw, readable};

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
        // SAFETY: the caller's arguments for this call.
        if let Some(result) = unsafe { by_hook(number, given) } {
            return result;
        }
        if !numbers::is_harmless(number) && process::log().is_some() {
            return unseen(number, given);
        }
    }
    // SAFETY: the caller's arguments for this call.
    raw::returned(unsafe { raw::call(number, given.0) }) as c_long
}

/// Makes a call by a hook.
macro_rules! hook {
    ($call:expr) => {{
        // SAFETY: the caller's arguments for this call, as the hook's function takes them.
        let result = unsafe { $call };
        result as c_long
    }};
}

/// Makes an unknown call, while logging is suspended.
fn unseen(number: c_long, given: Arguments) -> c_long {
    let _suspended = Suspended::new(None, c"");
    // SAFETY: the caller's arguments for this call.
    let call = || raw::returned(unsafe { raw::call(number, given.0) });
    metadata::counted(call) as c_long
}

/// Makes a call by its hook. Returns `None` if the call is still to be made.
///
/// # Safety
/// As for the call.
unsafe fn by_hook(number: c_long, given: Arguments) -> Option<c_long> {
    // SAFETY: the caller's arguments for this call.
    unsafe { of_data(number, given) }
        // SAFETY: the caller's arguments for this call.
        .or_else(|| unsafe { of_descriptors(number, given) })
        // SAFETY: the caller's arguments for this call.
        .or_else(|| unsafe { of_names(number, given) })
        // SAFETY: the caller's arguments for this call.
        .or_else(|| unsafe { of_attributes(number, given) })
        .or_else(|| of_rights(number, given))
        // SAFETY: the caller's arguments for this call.
        .or_else(|| unsafe { of_memory(number, given) })
}

/// Makes a call that writes or syncs. Returns `None` for any other call.
///
/// # Safety
/// As for the call.
unsafe fn of_data(number: c_long, given: Arguments) -> Option<c_long> {
    let (fd, at, len) = (given.int(0), given.pointer::<c_void>(1), given.0[2]);
    let (vector, count) = (given.pointer::<libc::iovec>(1).cast_const(), given.int(2));
    let (second, third, fourth) = (given.pointer(1), given.pointer(2), given.pointer(3));
    let offset = given.long(3);
    Some(match number {
        libc::SYS_write => hook!(write::write(fd, at, len)),
        libc::SYS_pwrite64 => hook!(write::pwrite64(fd, at, len, offset)),
        libc::SYS_writev => hook!(write::writev(fd, vector, count)),
        libc::SYS_pwritev => hook!(write::pwritev64(fd, vector, count, offset)),
        libc::SYS_pwritev2 => hook!(write::pwritev64v2(fd, vector, count, offset, given.int(5))),
        libc::SYS_fsync => hook!(sync::fsync(fd)),
        libc::SYS_fdatasync => hook!(sync::fdatasync(fd)),
        libc::SYS_sync => {
            sync::sync();
            0
        }
        libc::SYS_syncfs => hook!(sync::syncfs(fd)),
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

/// Makes a call that gives descriptors out or takes them back. Returns `None` if it was not made.
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
        libc::SYS_bind => hook!(names::bind_by_kernel(first, given.pointer(1), given.uint(2))),
        libc::SYS_sendmsg => hook!(message::sendmsg(first, given.pointer(1), given.int(2))),
        libc::SYS_sendmmsg => {
            hook!(message::sendmmsg(first, given.pointer(1), given.uint(2), given.int(3)))
        }
        libc::SYS_ioctl => hook!(transfer::ioctl(first, given.0[1] as _, given.0[2])),
        libc::SYS_io_setup => {
            unseen::all(Some(Cause::Libaio));
            return None;
        }
        libc::SYS_io_uring_setup => {
            rights::give_up_for(Cause::IoUring);
            return None;
        }
        libc::SYS_mount => {
            let (kind, data) = (given.path(2), given.pointer::<c_void>(4).cast_const());
            hook!(mount::mount(given.path(0), given.path(1), kind, given.0[3] as c_ulong, data))
        }
        libc::SYS_fsopen => hook!(mount::fsopen(given.path(0), given.uint(1))),
        libc::SYS_umount2 => hook!(mount::umount2(given.path(0), second)),
        libc::SYS_acct => hook!(libc::acct(given.path(0))),
        _ => return None,
    })
}

/// Opens a file as `openat2`, which has no function in the C library.
///
/// # Safety
/// As for the call.
unsafe fn open_2(given: Arguments) -> c_int {
    /// Bytes of the kernel's structure: flags, mode, how paths are resolved.
    const HOW_BYTES: usize = 24;
    let (how, len) = (given.pointer::<[u64; 3]>(2).cast_const(), given.0[3]);
    // SAFETY: the caller's arguments, or with a copy of its structure.
    let call = |arguments| raw::returned_int(unsafe { raw::call(libc::SYS_openat2, arguments) });
    if len != HOW_BYTES || !readable::is_readable(how.cast(), HOW_BYTES) {
        // Nothing is known about a later structure, or one that cannot be read.
        unseen::all(None);
        return metadata::counted(|| call(given.0));
    }
    // SAFETY: `is_readable` has checked the structure.
    let how = unsafe { how.read_unaligned() };
    let flags = raw::low_half(usize::try_from(how[0]).unwrap_or(0));
    open::open_emptying(flags, |flags| {
        let mut how = how;
        how[0] = how[0] & !u64::from(u32::MAX) | u64::from(flags.cast_unsigned());
        let mut arguments = given.0;
        arguments[2] = how.as_ptr().expose_provenance();
        call(arguments)
    })
}

/// Makes a call that changes names, sizes or limits, by the hook of the C library's function.
/// Returns `None` for any other call.
///
/// # Safety
/// As for the call.
unsafe fn of_names(number: c_long, given: Arguments) -> Option<c_long> {
    let (first, second, fourth) = (given.path(0), given.path(1), given.path(3));
    let (from, to) = (given.int(0), given.int(2));
    Some(match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rename => hook!(names::rename(first, second)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_unlink => hook!(names::unlink(first)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_link => hook!(names::link(first, second)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_symlink => hook!(names::symlink(first, second)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_mkdir => hook!(names::mkdir(first, given.uint(1))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rmdir => hook!(names::rmdir(first)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_renameat => hook!(names::renameat(from, second, to, fourth)),
        libc::SYS_renameat2 => hook!(names::renameat2(from, second, to, fourth, given.uint(4))),
        libc::SYS_unlinkat => hook!(names::unlinkat(from, second, to)),
        libc::SYS_linkat => hook!(names::linkat(from, second, to, fourth, given.int(4))),
        libc::SYS_symlinkat => hook!(names::symlinkat(first, given.int(1), given.path(2))),
        libc::SYS_mkdirat => hook!(names::mkdirat(from, second, given.uint(2))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_mknod => hook!(names::mknod(first, given.uint(1), given.0[2] as u64)),
        libc::SYS_mknodat => {
            hook!(names::mknodat(from, second, given.uint(2), given.0[3] as u64))
        }
        libc::SYS_truncate => hook!(size::truncate64(first, given.long(1))),
        libc::SYS_ftruncate => hook!(size::ftruncate64(from, given.long(1))),
        libc::SYS_setrlimit => hook!(limits::setrlimit(given.uint(0), given.pointer(1))),
        libc::SYS_prlimit64 => {
            hook!(limits::prlimit64(from, given.uint(1), given.pointer(2), given.pointer(3)))
        }
        libc::SYS_fallocate => {
            hook!(size::fallocate64(from, given.int(1), given.long(2), given.long(3)))
        }
        _ => return None,
    })
}

/// Makes a call that changes attributes of files. Returns `None` for any other call.
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
        // The C library has another function for a descriptor without a path.
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
        numbers::FCHMODAT2 => of_named(number, given, given.int(3)),
        numbers::SETXATTRAT | numbers::REMOVEXATTRAT | numbers::FILE_SETATTR => {
            let at_flags = if number == numbers::FILE_SETATTR { flags } else { given.int(2) };
            of_named(number, given, at_flags)
        }
        _ => return None,
    })
}

/// Changes attributes of a named file, by a call that the C library may not have.
fn of_named(number: c_long, given: Arguments, flags: c_int) -> c_long {
    let named = Named::at(given.int(0), given.path(1), flags);
    // SAFETY: the caller's arguments for this call.
    let call = || raw::returned(unsafe { raw::call(number, given.0) });
    metadata::counted_attributes(named, Sets::Others, call) as c_long
}

/// Gives the log up before a call that gives rights up, and notes that a handler of signals may be
/// installed. Returns `None` if the call was not made.
fn of_rights(number: c_long, given: Arguments) -> Option<c_long> {
    match number {
        libc::SYS_rt_sigaction if given.0[1] != 0 => {
            handlers::note_by_kernel(given.int(0));
            None
        }
        libc::SYS_setuid
        | libc::SYS_setreuid
        | libc::SYS_setresuid
        | libc::SYS_setfsuid
        | libc::SYS_setgid
        | libc::SYS_setregid
        | libc::SYS_setresgid
        | libc::SYS_setfsgid
        | libc::SYS_setgroups
        | libc::SYS_capset
        | libc::SYS_chroot
        | libc::SYS_pivot_root
        | libc::SYS_setns
        | libc::SYS_landlock_restrict_self => {
            rights::give_up();
            None
        }
        libc::SYS_seccomp => {
            rights::give_up_for_filter();
            None
        }
        libc::SYS_prctl => {
            let [_, second, third, fourth, fifth, _] = given.0.map(|word| word as _);
            Some(hook!(rights::prctl(given.int(0), second, third, fourth, fifth)))
        }
        libc::SYS_unshare => Some(hook!(fork::unshare(given.int(0)))),
        _ => None,
    }
}

/// Makes a call that maps memory, forks, or starts a program. Returns `None` for any other call.
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
        libc::SYS_madvise => hook!(mapping::madvise(at, len, given.int(2))),
        libc::SYS_process_madvise => {
            let parts = given.pointer::<libc::iovec>(1).cast_const();
            let (advice, flags) = (given.int(3), given.uint(4));
            hook!(mapping::process_madvise(given.int(0), parts, given.0[2], advice, flags))
        }
        libc::SYS_shmdt => hook!(mapping::shmdt(at)),
        libc::SYS_mlockall => memory_limits::mlockall(given.int(0)) as c_long,
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
        libc::SYS_fork => forking(number, 0, given),
        // A forked child does not return over the frames of its caller, as one of `vfork` would.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => forking(libc::SYS_fork, 0, given),
        libc::SYS_clone if given.int(0) & libc::CLONE_VM == 0 => {
            forking(number, u64::from(given.uint(0)), given)
        }
        libc::SYS_clone3 if clone_flags(given) & libc::CLONE_VM as u64 == 0 => {
            forking(number, clone_flags(given), given)
        }
        _ => return None,
    })
}

/// Forks by a call that the C library does not see.
fn forking(number: c_long, flags: u64, given: Arguments) -> c_long {
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned(fork::forking(flags, || unsafe { raw::call(number, given.0) })) as c_long
}

/// Returns the flags of a `clone3`, or 0 if they cannot be read.
fn clone_flags(given: Arguments) -> u64 {
    let at = given.pointer::<u64>(0).cast_const();
    // SAFETY: `is_readable` has checked these 8 bytes.
    if readable::is_readable(at.cast(), 8) { unsafe { at.read_unaligned() } } else { 0 }
}
