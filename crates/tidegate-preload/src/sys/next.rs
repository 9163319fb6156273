//! The functions behind the hooks: the C library's own, even if another library stands between.
//! Such a library gets the hook when it looks up the next function. If the hooks called that
//! library's functions, each would call the other without end.
//!
//! The hooks use these functions only where a bare system call does not suffice: for functions that
//! are no system call, and for calls that are cancellation points. [`resolve`] looks all functions
//! up when the library is loaded, since the look-up may take the dynamic linker's lock.
#![allow(unsafe_code)] // the dynamic linker's answers become functions

use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};

use libc::{
    FILE, gid_t, iovec, mode_t, off_t, pid_t, size_t, ssize_t, timespec, timeval, uid_t, utimbuf,
};

use crate::state::objects::OfLibraries;

/// A function behind a hook.
pub(crate) type Next<F> = tidegate_interpose::Next<F, OfLibraries>;
type Argv = *const *const c_char;
/// The function that a child of `clone` runs.
pub(crate) type Entry = extern "C-unwind" fn(*mut c_void) -> c_int;

tidegate_interpose::functions! {
    OfLibraries;
    dlopen: fn(*const c_char, c_int) -> *mut c_void;
    dlmopen: fn(c_long, *const c_char, c_int) -> *mut c_void;
    dlclose: fn(*mut c_void) -> c_int;
    dlsym: fn(*mut c_void, *const c_char) -> *mut c_void;
    dlvsym: fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    fflush: fn(*mut FILE) -> c_int;
    fileno: fn(*mut FILE) -> c_int;
    __fwriting: fn(*mut FILE) -> c_int;
    dirfd: fn(*mut c_void) -> c_int;
    sendmsg: fn(c_int, *const libc::msghdr, c_int) -> ssize_t;
    sendmmsg: fn(c_int, *mut libc::mmsghdr, c_uint, c_int) -> c_int;
    updwtmp: fn(*const c_char, *const c_void) -> ();
    updwtmpx: fn(*const c_char, *const c_void) -> ();
    pututline: fn(*const c_void) -> *mut c_void;
    pututxline: fn(*const c_void) -> *mut c_void;
    login: fn(*const c_void) -> ();
    logout: fn(*const c_char) -> c_int;
    logwtmp: fn(*const c_char, *const c_char, *const c_char) -> ();
    sethostid: fn(c_long) -> c_int;
    lckpwdf: fn() -> c_int;
    utmpname: fn(*const c_char) -> c_int;
    utmpxname: fn(*const c_char) -> c_int;
    acct: fn(*const c_char) -> c_int;
    login_tty: fn(c_int) -> c_int;
    forkpty: fn(*mut c_int, *mut c_char, *const c_void, *const c_void) -> pid_t;
    setmntent: fn(*const c_char, *const c_char) -> *mut FILE;
    endmntent: fn(*mut FILE) -> c_int;
    wordexp: fn(*const c_char, *mut c_void, c_int) -> c_int;
    setuid: fn(uid_t) -> c_int;
    seteuid: fn(uid_t) -> c_int;
    setreuid: fn(uid_t, uid_t) -> c_int;
    setresuid: fn(uid_t, uid_t, uid_t) -> c_int;
    setfsuid: fn(uid_t) -> c_int;
    setgid: fn(gid_t) -> c_int;
    setegid: fn(gid_t) -> c_int;
    setregid: fn(gid_t, gid_t) -> c_int;
    setresgid: fn(gid_t, gid_t, gid_t) -> c_int;
    setfsgid: fn(gid_t) -> c_int;
    setgroups: fn(size_t, *const gid_t) -> c_int;
    initgroups: fn(*const c_char, gid_t) -> c_int;
    capset: fn(*mut c_void, *const c_void) -> c_int;
    chroot: fn(*const c_char) -> c_int;
    setns: fn(c_int, c_int) -> c_int;
    tmpfile: fn() -> *mut FILE;
    tmpfile64: fn() -> *mut FILE;
    write: fn(c_int, *const c_void, size_t) -> ssize_t;
    pwrite64: fn(c_int, *const c_void, size_t, off_t) -> ssize_t;
    writev: fn(c_int, *const iovec, c_int) -> ssize_t;
    pwritev64: fn(c_int, *const iovec, c_int, off_t) -> ssize_t;
    pwritev64v2: fn(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;
    openat64: fn(c_int, *const c_char, c_int, c_uint) -> c_int;
    creat64: fn(*const c_char, c_uint) -> c_int;
    __open_2: fn(*const c_char, c_int) -> c_int;
    __openat_2: fn(c_int, *const c_char, c_int) -> c_int;
    mkdtemp: fn(*mut c_char) -> *mut c_char;
    mkostemps64: fn(*mut c_char, c_int, c_int) -> c_int;
    close: fn(c_int) -> c_int;
    closefrom: fn(c_int) -> ();
    fsync: fn(c_int) -> c_int;
    fdatasync: fn(c_int) -> c_int;
    syncfs: fn(c_int) -> c_int;
    fcntl64: fn(c_int, c_int, usize) -> c_int;
    lockf: fn(c_int, c_int, off_t) -> c_int;
    lockf64: fn(c_int, c_int, off_t) -> c_int;
    sendfile64: fn(c_int, c_int, *mut off_t, size_t) -> ssize_t;
    copy_file_range: fn(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t;
    splice: fn(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t;
    ioctl: fn(c_int, c_ulong, usize) -> c_int;
    chmod: fn(*const c_char, mode_t) -> c_int;
    lchmod: fn(*const c_char, mode_t) -> c_int;
    fchmod: fn(c_int, mode_t) -> c_int;
    fchmodat: fn(c_int, *const c_char, mode_t, c_int) -> c_int;
    chown: fn(*const c_char, uid_t, gid_t) -> c_int;
    lchown: fn(*const c_char, uid_t, gid_t) -> c_int;
    fchown: fn(c_int, uid_t, gid_t) -> c_int;
    fchownat: fn(c_int, *const c_char, uid_t, gid_t, c_int) -> c_int;
    utime: fn(*const c_char, *const utimbuf) -> c_int;
    utimes: fn(*const c_char, *const timeval) -> c_int;
    lutimes: fn(*const c_char, *const timeval) -> c_int;
    futimes: fn(c_int, *const timeval) -> c_int;
    futimesat: fn(c_int, *const c_char, *const timeval) -> c_int;
    futimens: fn(c_int, *const timespec) -> c_int;
    utimensat: fn(c_int, *const c_char, *const timespec, c_int) -> c_int;
    setxattr: fn(*const c_char, *const c_char, *const c_void, size_t, c_int) -> c_int;
    lsetxattr: fn(*const c_char, *const c_char, *const c_void, size_t, c_int) -> c_int;
    fsetxattr: fn(c_int, *const c_char, *const c_void, size_t, c_int) -> c_int;
    removexattr: fn(*const c_char, *const c_char) -> c_int;
    lremovexattr: fn(*const c_char, *const c_char) -> c_int;
    fremovexattr: fn(c_int, *const c_char) -> c_int;
    posix_fallocate: fn(c_int, off_t, off_t) -> c_int;
    posix_spawn: fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Argv, Argv) -> c_int;
    posix_spawnp: fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Argv, Argv) -> c_int;
    execvpe: fn(*const c_char, Argv, Argv) -> c_int;
    system: fn(*const c_char) -> c_int;
    posix_spawn_file_actions_addopen: fn(*mut c_void, c_int, *const c_char, c_int, mode_t) -> c_int;
    open_by_handle_at: fn(c_int, *mut c_void, c_int) -> c_int;
    backtrace_symbols_fd: fn(*const *mut c_void, c_int, c_int) -> ();
    popen: fn(*const c_char, *const c_char) -> *mut c_void;
    pclose: fn(*mut FILE) -> c_int;
    fopen64: fn(*const c_char, *const c_char) -> *mut FILE;
    freopen64: fn(*const c_char, *const c_char, *mut FILE) -> *mut FILE;
    fdopen: fn(c_int, *const c_char) -> *mut FILE;
    fclose: fn(*mut FILE) -> c_int;
    fcloseall: fn() -> c_int;
    closedir: fn(*mut c_void) -> c_int;
    vdprintf: fn(c_int, *const c_char, *mut c_void) -> c_int;
    __vdprintf_chk: fn(c_int, c_int, *const c_char, *mut c_void) -> c_int;
    dprintf: fn(c_int, *const c_char) -> c_int;
    __dprintf_chk: fn(c_int, c_int, *const c_char) -> c_int;
    sigaction: fn(c_int, *const c_void, *mut c_void) -> c_int;
    signal: fn(c_int, *mut c_void) -> *mut c_void;
    bsd_signal: fn(c_int, *mut c_void) -> *mut c_void;
    ssignal: fn(c_int, *mut c_void) -> *mut c_void;
    sysv_signal: fn(c_int, *mut c_void) -> *mut c_void;
    __sysv_signal: fn(c_int, *mut c_void) -> *mut c_void;
    sigset: fn(c_int, *mut c_void) -> *mut c_void;
    aio_write64: fn(*mut c_void) -> c_int;
    lio_listio64: fn(c_int, *const *mut c_void, c_int, *mut c_void) -> c_int;
    io_setup: fn(c_int, *mut c_void) -> c_int;
    io_queue_init: fn(c_int, *mut c_void) -> c_int;
    io_uring_setup: fn(c_uint, *mut c_void) -> c_int;
    io_uring_queue_init: fn(c_uint, *mut c_void, c_uint) -> c_int;
    io_uring_queue_init_params: fn(c_uint, *mut c_void, *mut c_void) -> c_int;
    io_uring_queue_init_mem: fn(c_uint, *mut c_void, *mut c_void, *mut c_void, size_t) -> c_int;
    daemon: fn(c_int, c_int) -> c_int;
    _Fork: fn() -> pid_t;
    clone: fn(Entry, *mut c_void, c_int, *mut c_void, *mut pid_t, *mut c_void, *mut pid_t) -> c_int;
}
