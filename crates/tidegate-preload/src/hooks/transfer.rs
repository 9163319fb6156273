//! Hooks: calls that have the kernel copy into a file, or give the kernel a file to write to later.
//!
//! Invariants:
//! 1. The file is out of the log before the kernel begins, and until it is done.
//! 2. A file that becomes the storage of a device or of another file system stays out: the kernel
//!    writes to it until the device or file system is detached, which may be after the process has
//!    ended.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_ulong};
use std::ptr;

use libc::{off_t, size_t, ssize_t};
use tidegate_interpose::cancel;

use super::mount;
use crate::covered::{Open, every_write, metadata};
use crate::state::files::Seen;
use crate::sys::raw::words;
use crate::sys::readable::is_readable;
use crate::sys::{next, raw};

/// Runs a call of the C library that may change the file of `fd`. If the file can be covered, runs
/// the bare system call instead, as a change that no hook sees. No thread is cancelled during a
/// bare system call.
fn into(fd: c_int, library: impl FnOnce() -> isize, kernel: impl FnOnce() -> isize) -> isize {
    match Open::writable(fd) {
        Some(open) => {
            cancel::point();
            raw::returned(open.unseen_write(kernel))
        }
        None => every_write::returned(fd, library()),
    }
}

/// Runs a change to the files of all these descriptors, which no hook sees. Ignores descriptors of
/// files that cannot be covered.
fn unseen_of(fds: &mut impl Iterator<Item = c_int>, change: &dyn Fn() -> isize) -> isize {
    match fds.find_map(Open::of) {
        Some(open) => open.unseen(|| unseen_of(fds, change)),
        None => change(),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    let Some(sendfile64) = next::sendfile64.get() else { return raw::failed(libc::ENOSYS) };
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let library = || unsafe { sendfile64(to, from, offset, len) };
    // SAFETY: the caller's arguments go to the kernel as they are.
    into(to, library, || unsafe { raw::call(libc::SYS_sendfile, words![to, from, offset, len]) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn copy_file_range(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let Some(call) = next::copy_file_range.get() else { return raw::failed(libc::ENOSYS) };
    let arguments = words![from, from_offset, to, to_offset, len, flags];
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let library = || unsafe { call(from, from_offset, to, to_offset, len, flags) };
    // SAFETY: the caller's arguments go to the kernel as they are.
    let kernel = || unsafe { raw::call(libc::SYS_copy_file_range, arguments) };
    // The source file leaves the log, too: it may share blocks from now on.
    into(to, library, || unseen_of(&mut [from].into_iter(), &kernel))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let Some(splice) = next::splice.get() else { return raw::failed(libc::ENOSYS) };
    let arguments = words![from, from_offset, to, to_offset, len, flags];
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let library = || unsafe { splice(from, from_offset, to, to_offset, len, flags) };
    // SAFETY: the caller's arguments go to the kernel as they are.
    into(to, library, || unsafe { raw::call(libc::SYS_splice, arguments) })
}

/// Types of requests that file systems answer.
const OF_FILE_SYSTEMS: [c_ulong; 4] = [0x66, 0x58, 0x76, 0x94];
/// The bits of a request that are its type and number, without direction and size of the argument.
const NAME: c_ulong = 0xffff;
const FICLONE: c_ulong = 0x9409;
const FICLONERANGE: c_ulong = 0x940d;
const FIDEDUPERANGE: c_ulong = 0x9436;
const EXT4_IOC_MOVE_EXT: c_ulong = 0x660f;
const XFS_IOC_SWAPEXT: c_ulong = 0x586d;
const XFS_IOC_EXCHANGE_RANGE: c_ulong = 0x5881;
const FIFREEZE: c_ulong = 0x5877;
const FITHAW: c_ulong = 0x5878;

/// Requests of these types that change nothing, as whole numbers: a request of another direction
/// may have an equal type and number. All others, known or not, may change the bytes, the space or
/// the attributes of the file of the descriptor.
const HARMLESS: [c_ulong; 16] = [
    0x8008_6601, // FS_IOC_GETFLAGS
    0x8008_6603, // EXT4_IOC_GETVERSION
    0xc020_660b, // FS_IOC_FIEMAP
    0x0000_6612, // EXT4_IOC_PRECACHE_EXTENTS
    0x400c_6615, // FS_IOC_GET_ENCRYPTION_POLICY
    0xc009_6616, // FS_IOC_GET_ENCRYPTION_POLICY_EX
    0xc004_6686, // FS_IOC_MEASURE_VERITY
    0xc028_6687, // FS_IOC_READ_VERITY_METADATA
    0x8008_662c, // EXT4_IOC_GETFSUUID
    0x8008_7601, // FS_IOC_GETVERSION
    0x801c_581f, // FS_IOC_FSGETXATTR
    0x800c_581e, // XFS_IOC_DIOINFO
    0xc020_5826, // XFS_IOC_GETBMAP
    0x8070_587c, // XFS_IOC_FSGEOMETRY_V4
    0x8100_587e, // XFS_IOC_FSGEOMETRY
    0x8100_9431, // FS_IOC_GETFSLABEL
];
/// The bits of a request that the kernel looks at.
const WHOLE: c_ulong = 0xffff_ffff;

fn may_change(request: c_ulong) -> bool {
    OF_FILE_SYSTEMS.contains(&(request >> 8 & 0xff)) && !HARMLESS.contains(&(request & WHOLE))
}

/// Returns the number at this byte of the argument of a request, or `None` if it cannot be read.
fn number_at<T: Copy>(argument: usize, byte: usize) -> Option<T> {
    let at = ptr::with_exposed_provenance::<T>(argument.wrapping_add(byte));
    // SAFETY: `is_readable` has checked the bytes; `T` is a number, and any bits are valid.
    is_readable(at.cast(), size_of::<T>()).then(|| unsafe { at.read_unaligned() })
}

/// Returns the other descriptors of a request that moves or shares blocks between files.
fn others_of(request: c_ulong, argument: usize) -> impl Iterator<Item = c_int> {
    const FIRST_BYTE: usize = 24;
    const EACH_BYTES: usize = 32;
    let is_deduplication = request & NAME == FIDEDUPERANGE;
    let one = match request & NAME {
        // The argument is the descriptor.
        FICLONE => c_int::try_from(argument).ok(),
        FICLONERANGE | XFS_IOC_SWAPEXT => {
            number_at::<i64>(argument, if request & NAME == FICLONERANGE { 0 } else { 16 })
                .and_then(|fd| c_int::try_from(fd).ok())
        }
        EXT4_IOC_MOVE_EXT => number_at(argument, size_of::<u32>()),
        XFS_IOC_EXCHANGE_RANGE => number_at(argument, 0),
        _ => None,
    };
    let listed = is_deduplication.then(|| number_at::<u16>(argument, 16)).flatten().unwrap_or(0);
    let listed = (0..usize::from(listed))
        .map_while(move |number| number_at::<i64>(argument, FIRST_BYTE + number * EACH_BYTES));
    one.into_iter().chain(listed.filter_map(|fd| c_int::try_from(fd).ok()))
}

/// Returns the descriptor of a file that a request gives to the kernel, which then writes to it for
/// a device or another file system.
fn given_by(request: c_ulong, argument: usize) -> Option<c_int> {
    const LOOP_SET_FD: c_ulong = 0x4c00;
    const LOOP_CHANGE_FD: c_ulong = 0x4c06;
    const LOOP_CONFIGURE: c_ulong = 0x4c0a;
    const SET_BITMAP_FILE: c_ulong = 0x092b;
    const FUSE_DEV_IOC_BACKING_OPEN: c_ulong = 0xe501;
    match request & NAME {
        // The argument is the descriptor.
        LOOP_SET_FD | LOOP_CHANGE_FD | SET_BITMAP_FILE => c_int::try_from(argument).ok(),
        LOOP_CONFIGURE | FUSE_DEV_IOC_BACKING_OPEN => number_at(argument, 0),
        _ => None,
    }
}

/// Returns whether `fd` is a file or directory. Requests to devices may have the same types.
fn is_in_file_system(fd: c_int) -> bool {
    Seen::of(fd).is_ok_and(|seen| seen.is_file() || seen.is_directory())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ioctl(
    fd: c_int,
    request: c_ulong,
    argument: usize,
) -> c_int {
    let Some(ioctl) = next::ioctl.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the C library's function, which ignores an argument that is not given.
    let call = || unsafe { ioctl(fd, request, argument) };
    if let Some(given) = given_by(request, argument).and_then(Open::writable) {
        given.mark();
        return call();
    }
    match request & NAME {
        FIFREEZE => return mount::freezing(call),
        FITHAW => return mount::thawing(call),
        _ if !may_change(request) => return call(),
        _ => {}
    }
    let call = || raw::by_kernel(call() as isize);
    let change = || unseen_of(&mut others_of(request, argument), &call);
    let result = match Open::of(fd) {
        Some(open) => open.unseen(change),
        None if is_in_file_system(fd) => metadata::counted(change),
        None => change(),
    };
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

tidegate_interpose::synonyms! {
    sendfile(to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t = sendfile64(to, from, offset, len);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::state::descriptors;
    use crate::testing::World;

    fn others<T>(request: c_ulong, argument: &T) -> Vec<c_int> {
        others_of(request, ptr::from_ref(argument).expose_provenance()).collect()
    }

    #[test]
    fn the_other_files_of_a_request_are_found() {
        assert_eq!(others_of(0x4004_9409, 8).collect::<Vec<_>>(), [8], "a clone of all of one");
        assert_eq!(others(0x4020_940d, &[8_i64, 0, 0, 0]), [8], "of a range");
        assert_eq!(others(0xc028_660f, &[0_u32, 8, 0, 0, 0, 0, 0, 0, 0, 0]), [8]);
        assert_eq!(others(0xc0c0_586d, &[0_i64, 7, 8, 0]), [8]);
        assert_eq!(others(0x4028_5881, &[8_i32, 0, 0, 0]), [8]);
        let mut listed = [0_i64; 3 + 2 * 4];
        (listed[2], listed[3], listed[7]) = (2, 8, 9);
        assert_eq!(others(0xc018_9436, &listed), [8, 9]);
        assert_eq!(others_of(0xc018_9436, 8).count(), 0, "memory that cannot be read");
    }

    #[test]
    fn a_file_that_a_device_is_given_is_found() {
        assert_eq!([0x4c00, 0x4c06, 0x4004_092b].map(|request| given_by(request, 8)), [Some(8); 3]);
        let configuration = [8_u32; 76];
        let given = |request| given_by(request, configuration.as_ptr().expose_provenance());
        assert_eq!([given(0x4c0a), given(0x4010_e501)], [Some(8); 2]);
        assert_eq!(given_by(0x4c0a, 8), None, "memory that cannot be read");
        assert_eq!(given_by(0x4c01, 8), None, "LOOP_CLR_FD");
    }

    #[test]
    fn a_file_that_a_device_is_given_does_not_come_back() {
        let world = World::of_process();
        let file = world.file("image");
        let open = world.covered(&file, 0);
        descriptors::set(open.fd, open.known);
        let null = std::fs::File::open("/dev/null").unwrap();
        let fd = usize::try_from(open.fd).unwrap();
        // SAFETY: a request that `/dev/null` refuses.
        assert_eq!(unsafe { ioctl(null.as_raw_fd(), 0x4c00, fd) }, -1);
        assert!(!world.is_covered(&open));
        assert!(open.lock(open.entry().unwrap()).unwrap().pins() > 0);
    }

    #[test]
    fn a_request_that_is_not_known_may_change_the_file() {
        // Equal to a harmless request but for the direction, or for the number.
        for request in [0x4008_662c, 0x4008_6610, 0x4008_7601] {
            assert!(may_change(request), "{request:#x}");
        }
        for request in [0x4008_6602, 0x401c_5820, 0x4004_9409, 0x4080_6685, 0x4030_6639, 0x66fe] {
            assert!(may_change(request), "{request:#x}");
        }
        let of_others = [libc::TCGETS, libc::FIONREAD, 0x1277];
        let extended = 0xffff_ffff_8008_6601;
        let harmless = [0x8008_6601, extended, 0xc020_660b, 0x6612, 0x8008_662c, 0x801c_581f];
        for request in harmless.into_iter().chain(of_others) {
            assert!(!may_change(request), "{request:#x}");
        }
    }

    #[test]
    fn both_files_of_a_call_that_shares_blocks_are_left_until_it_is_done() {
        let world = World::of_process();
        let files = ["one", "two"].map(|name| world.file(name));
        let opens = files.each_ref().map(|file| world.covered(file, 0));
        for open in &opens {
            descriptors::set(open.fd, open.known);
        }
        let are_left = || {
            let is_pinned = |open: &Open| open.lock(open.entry().unwrap()).unwrap().pins() > 0;
            isize::from(opens.iter().all(|open| !world.is_covered(open) && is_pinned(open)))
        };
        assert_eq!(are_left(), 0);
        assert_eq!(unseen_of(&mut opens.iter().map(|open| open.fd), &are_left), 1);
        assert_eq!(are_left(), 0, "they may come back");
    }
}
