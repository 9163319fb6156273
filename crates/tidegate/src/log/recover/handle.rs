//! Facts from the kernel about an open file: its identity, file system, mount and extents.
#![allow(
    unsafe_code,
    reason = "no safe crate has handles of files and the control calls of file systems"
)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};

use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::ioctl::{Opcode, Updater, ioctl};

use super::mapped::{MappedExtent, MappedExtents};
use super::ranges::Ranges;
use crate::log::layout::HANDLE_BYTES_MAX;
use crate::log::{FileHandle, FileSystemId, identity};

/// `struct file_handle` with space for any handle.
#[repr(C)]
struct Handle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    content: [u8; HANDLE_BYTES_MAX],
}

/// Returns the handle of an open file. It is unique in its file system, also among removed files.
///
/// # Errors
/// For example, the file system has no handles.
pub fn handle_of(file: impl AsFd) -> io::Result<FileHandle> {
    let bytes = u32::try_from(HANDLE_BYTES_MAX).unwrap_or(0);
    let mut handle = Handle { bytes, kind: 0, content: [0; HANDLE_BYTES_MAX] };
    let mut mount = 0;
    // SAFETY: the path is a C string. `handle` begins like `file_handle`, and has space behind it
    // for as many bytes as its first field says. Both pointers refer to live variables.
    let result = unsafe {
        libc::name_to_handle_at(
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let len = usize::try_from(handle.bytes).unwrap_or(usize::MAX);
    let told = handle.content.get(..len).and_then(|bytes| FileHandle::new(handle.kind, bytes));
    told.ok_or_else(|| io::Error::other("the kernel told of a handle that is too long"))
}

/// Attempts of an open that fails temporarily.
const TRIES: u32 = 1000;

/// Opens the file with this `handle` on the file system of `mount`. Requires the right to read and
/// search everything (`CAP_DAC_READ_SEARCH`).
///
/// # Errors
/// `ESTALE`: the file was removed. `EPERM`: the right is missing. Otherwise the error of `open`.
pub fn open_by_handle(mount: impl AsFd, handle: &FileHandle, flags: OFlags) -> io::Result<File> {
    let bytes = u32::try_from(handle.bytes().len()).unwrap_or(0);
    let mut raw = Handle { bytes, kind: handle.kind(), content: [0; HANDLE_BYTES_MAX] };
    raw.content[..handle.bytes().len()].copy_from_slice(handle.bytes());
    let flags = (flags | OFlags::CLOEXEC).bits().cast_signed();
    let mount = mount.as_fd().as_raw_fd();
    let mut opened = || {
        // SAFETY: `raw` begins like `file_handle`, holds as many bytes behind it as its first field
        // says, and lives until the call returns.
        match unsafe { libc::open_by_handle_at(mount, (&raw mut raw).cast(), flags) } {
            ..0 => Err(io::Error::last_os_error()),
            // SAFETY: the kernel has just opened this descriptor here, and nothing else owns it.
            file => Ok(unsafe { File::from_raw_fd(file) }),
        }
    };
    // The kernel also returns `ENOMEM` while another process creates a file with this inode number.
    for _ in 0..TRIES {
        match opened() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => std::thread::yield_now(),
            result => return result,
        }
    }
    opened()
}

/// Returns the identity of an open file: [`identity`] of its file system and its handle there. For
/// a file system without a UUID the kernel's number counts instead, which may change at a reboot.
///
/// # Errors
/// For example, the file system has no handles.
pub fn identity_of(file: impl AsFd) -> io::Result<u64> {
    let file = file.as_fd();
    let file_system = file_system_id(file).or_else(|_| number_of_file_system(file))?;
    let handle = handle_of(file)?;
    Ok(identity(&file_system, handle.kind(), handle.bytes()))
}

fn number_of_file_system(file: BorrowedFd<'_>) -> io::Result<FileSystemId> {
    let mut id = FileSystemId::default();
    id[..8].copy_from_slice(&rustix::fs::fstatvfs(file)?.f_fsid.to_le_bytes());
    Ok(id)
}

/// `struct fsuuid2`, the result of `FS_IOC_GETFSUUID`.
#[repr(C)]
#[derive(Default)]
struct GenericUuid {
    bytes: u8,
    uuid: FileSystemId,
}

/// `struct fsuuid` with space for 16 bytes, the result of `EXT4_IOC_GETFSUUID`.
#[repr(C)]
struct Ext4Uuid {
    bytes: u32,
    flags: u32,
    uuid: FileSystemId,
}

/// `struct xfs_fsop_geom_v1`, the result of `XFS_IOC_FSGEOMETRY_V1`.
#[repr(C)]
#[derive(Default)]
struct XfsGeometry {
    before: [u64; 8],
    uuid: FileSystemId,
    behind: [u64; 4],
}

const FS_IOC_GETFSUUID: Opcode = 0x8011_1500;
const EXT4_IOC_GETFSUUID: Opcode = 0x8008_662C;
const XFS_IOC_FSGEOMETRY_V1: Opcode = 0x8070_5864;

const _: () = {
    assert!(size_of::<GenericUuid>() == 17);
    assert!(size_of::<XfsGeometry>() == 112);
};

/// Magic number of ext2, ext3 and ext4 (`f_type` of statfs(2)).
pub const EXT_MAGIC: i64 = 0xef53;
/// Magic number of XFS.
pub const XFS_MAGIC: i64 = 0x5846_5342;

/// Returns whether file systems with this magic number keep their UUID and the handles of their
/// files over a reboot. Files on other file systems are never covered.
pub fn keeps_identities(magic: i64) -> bool {
    matches!(magic, EXT_MAGIC | XFS_MAGIC)
}

/// Returns the UUID of an open file's file system. It outlives reboots and new device numbers.
///
/// # Errors
/// The file system reports no UUID: ext4 and XFS do, and others since Linux 6.9.
pub fn file_system_id(file: impl AsFd) -> io::Result<FileSystemId> {
    first_known(file.as_fd(), &[generic_uuid, ext4_uuid, xfs_uuid])
}

/// Returns the first UUID from `sources`. Some kernels answer the generic request for an ext4 with
/// zeros instead of its UUID, and know the UUID all the same.
fn first_known(
    file: BorrowedFd<'_>,
    sources: &[fn(BorrowedFd<'_>) -> io::Result<FileSystemId>],
) -> io::Result<FileSystemId> {
    let mut told = Err(io::ErrorKind::Unsupported.into());
    for source in sources {
        told = source(file);
        match &told {
            Ok(id) if *id != FileSystemId::default() => return told,
            Ok(_) => told = Err(io::ErrorKind::Unsupported.into()),
            Err(_) => {}
        }
    }
    told
}

fn generic_uuid(file: BorrowedFd<'_>) -> io::Result<FileSystemId> {
    let mut told = GenericUuid::default();
    // SAFETY: `FS_IOC_GETFSUUID` writes a `struct fsuuid2`, which `GenericUuid` mirrors.
    let request = unsafe { Updater::<FS_IOC_GETFSUUID, _>::new(&mut told) };
    // SAFETY: `request` has the opcode and the structure of `FS_IOC_GETFSUUID`.
    unsafe { ioctl(file, request) }?;
    let is_long = usize::from(told.bytes) == told.uuid.len();
    if is_long { Ok(told.uuid) } else { Err(io::ErrorKind::Unsupported.into()) }
}

fn ext4_uuid(file: BorrowedFd<'_>) -> io::Result<FileSystemId> {
    let mut told = Ext4Uuid { bytes: 16, flags: 0, uuid: FileSystemId::default() };
    // SAFETY: `EXT4_IOC_GETFSUUID` writes at most `bytes` bytes of the UUID, which has 16.
    let request = unsafe { Updater::<EXT4_IOC_GETFSUUID, _>::new(&mut told) };
    // SAFETY: `request` has the opcode and the structure of `EXT4_IOC_GETFSUUID`.
    unsafe { ioctl(file, request) }?;
    Ok(told.uuid)
}

fn xfs_uuid(file: BorrowedFd<'_>) -> io::Result<FileSystemId> {
    let mut told = XfsGeometry::default();
    // SAFETY: `XFS_IOC_FSGEOMETRY_V1` writes `struct xfs_fsop_geom_v1`, which `XfsGeometry`
    // mirrors.
    let request = unsafe { Updater::<XFS_IOC_FSGEOMETRY_V1, _>::new(&mut told) };
    // SAFETY: `request` has the opcode and the structure of `XFS_IOC_FSGEOMETRY_V1`.
    unsafe { ioctl(file, request) }?;
    Ok(told.uuid)
}

/// Extents per request.
const EXTENTS_AT_ONCE: usize = 64;
/// Set in [`MappedExtent::flags`] of extents whose bytes are not on the disk: `UNKNOWN`,
/// `DELALLOC`, `UNWRITTEN`.
const NOT_WRITTEN: u32 = 0x0002 | 0x0004 | 0x0800;

/// Returns the bytes of an open file in allocated and written extents, also behind its size.
///
/// # Errors
/// The file system cannot list extents.
pub fn written_ranges(file: impl AsFd) -> io::Result<Ranges> {
    let mut written = Ranges::default();
    let mut start = 0;
    loop {
        let mapped = MappedExtents::<EXTENTS_AT_ONCE>::of(file.as_fd(), start, u64::MAX - start)?;
        for extent in mapped.as_slice() {
            if extent.flags & NOT_WRITTEN == 0 {
                written.insert(extent.start..extent.end());
            }
            start = start.max(extent.end());
        }
        if mapped.as_slice().last().is_none_or(MappedExtent::is_last) {
            return Ok(written);
        }
    }
}

/// Returns the bytes of an open file that are no hole, for file systems without [`written_ranges`].
///
/// # Errors
/// The file system cannot seek to data and holes.
pub(super) fn data_ranges(file: impl AsFd, size_bytes: u64) -> io::Result<Ranges> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let file = file.as_fd();
    let (mut ranges, mut at) = (Ranges::default(), 0);
    while at < size_bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            found => found?,
        };
        let end = seek(file, SeekFrom::Hole(start))?;
        ranges.insert(Range { start, end });
        at = end.max(at + 1);
    }
    Ok(ranges)
}

/// Returns the unique id of the mount that a file was opened in. While the kernel runs it never
/// reuses such an id, and each is higher than all before. Returns 0 before Linux 6.8, which has no
/// such ids.
pub fn mount_of(file: impl AsFd) -> u64 {
    /// `STATX_MNT_ID_UNIQUE`.
    const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, UNIQUE);
    let told = found.ok().filter(|found| found.stx_mask & UNIQUE.bits() != 0);
    told.map_or(0, |found| found.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_keeps_its_identity_and_shares_it_with_none() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        let first = std::fs::File::create(&one).expect("a file can be made");
        let other = std::fs::File::create(folder.path().join("other")).expect("a file can be made");
        let identity = identity_of(&first).expect("the file system has handles");
        assert_ne!(identity, identity_of(&other).expect("the file system has handles"));
        std::fs::rename(&one, &two).expect("a file can be renamed");
        let again = std::fs::File::open(&two).expect("a file can be opened");
        assert_eq!(identity, identity_of(&again).expect("the file system has handles"));
    }

    /// Checks that the next source is asked after one that answers with zeros.
    #[test]
    fn a_uuid_of_zeros_is_none() {
        type Source = fn(BorrowedFd<'_>) -> io::Result<FileSystemId>;
        let (zeros, refused): (Source, Source) =
            (|_| Ok([0; 16]), |_| Err(io::Error::from_raw_os_error(libc::ENOTTY)));
        let known: Source = |_| Ok([7; 16]);
        let file = tempfile::tempfile().expect("a temporary file can be made");
        let asked = |sources: &[Source]| first_known(file.as_fd(), sources);
        for sources in [[known, zeros, refused], [zeros, known, refused], [refused, zeros, known]] {
            assert_eq!(asked(&sources).expect("one knows it"), [7; 16]);
        }
        for sources in [[zeros, zeros, zeros], [refused, refused, zeros]] {
            assert_eq!(asked(&sources).unwrap_err().kind(), io::ErrorKind::Unsupported);
        }
        let error = asked(&[zeros, refused]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }

    #[test]
    fn a_new_file_of_the_same_number_is_another() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = folder.path().join("file");
        let mut identities = Vec::new();
        for _ in 0..20 {
            let file = std::fs::File::create_new(&path).expect("a file can be made");
            identities.push(identity_of(&file).expect("the file system has handles"));
            std::fs::remove_file(&path).expect("a file can be removed");
        }
        identities.sort_unstable();
        identities.dedup();
        assert_eq!(identities.len(), 20);
    }
}
