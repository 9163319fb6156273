//! What the kernel tells of an open file: its identity, its file system, its mount, its extents.
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

/// `struct file_handle` with free space for any handle.
#[repr(C)]
struct Handle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    content: [u8; HANDLE_BYTES_MAX],
}

/// The handle of an open file: what tells it from all others of its file system, of all times.
///
/// # Errors
/// The file system has no handles, for one.
pub fn handle_of(file: impl AsFd) -> io::Result<FileHandle> {
    let bytes = u32::try_from(HANDLE_BYTES_MAX).unwrap_or(0);
    let mut handle = Handle { bytes, kind: 0, content: [0; HANDLE_BYTES_MAX] };
    let mut mount = 0;
    // SAFETY: the path is a C string, `handle` begins as `file_handle` does and has as many bytes
    // behind it as its first field says, and both pointers are to live variables.
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

/// How often an open is tried that fails for a moment.
const TRIES: u32 = 1000;

/// Opens the file that has `handle` on the file system that `mount` is on. Needs the right to read
/// and search everything (`CAP_DAC_READ_SEARCH`).
///
/// # Errors
/// `ESTALE`: the file was removed. `EPERM`: the right is missing. Others as for `open`.
pub fn open_by_handle(mount: impl AsFd, handle: &FileHandle, flags: OFlags) -> io::Result<File> {
    let bytes = u32::try_from(handle.bytes().len()).unwrap_or(0);
    let mut raw = Handle { bytes, kind: handle.kind(), content: [0; HANDLE_BYTES_MAX] };
    raw.content[..handle.bytes().len()].copy_from_slice(handle.bytes());
    let flags = (flags | OFlags::CLOEXEC).bits().cast_signed();
    let mount = mount.as_fd().as_raw_fd();
    let mut opened = || {
        // SAFETY: `raw` begins as `file_handle` does and has as many bytes behind it as its first
        // field says, and it lives until the call returns.
        match unsafe { libc::open_by_handle_at(mount, (&raw mut raw).cast(), flags) } {
            ..0 => Err(io::Error::last_os_error()),
            // SAFETY: the kernel has just opened this descriptor for us, and nothing else owns it.
            file => Ok(unsafe { File::from_raw_fd(file) }),
        }
    };
    // The kernel says `ENOMEM`, too, while another process makes a file of the same inode number.
    for _ in 0..TRIES {
        match opened() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => std::thread::yield_now(),
            result => return result,
        }
    }
    opened()
}

/// The identity of an open file: [`identity`] of its file system and its handle there. Of a file
/// system without a UUID, the kernel's number of it stands for that, which may be another one after
/// a reboot.
///
/// # Errors
/// The file system has no handles, for one.
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

/// `struct fsuuid2`, what `FS_IOC_GETFSUUID` fills.
#[repr(C)]
#[derive(Default)]
struct GenericUuid {
    bytes: u8,
    uuid: FileSystemId,
}

/// `struct fsuuid` with free space for 16 bytes, what `EXT4_IOC_GETFSUUID` fills.
#[repr(C)]
struct Ext4Uuid {
    bytes: u32,
    flags: u32,
    uuid: FileSystemId,
}

/// `struct xfs_fsop_geom_v1`, what `XFS_IOC_FSGEOMETRY_V1` fills.
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

/// Whether file systems with this magic number keep their UUID and the handles of their files over
/// a reboot. Files of others are never covered.
pub fn keeps_identities(magic: i64) -> bool {
    matches!(magic, EXT_MAGIC | XFS_MAGIC)
}

/// The UUID of the file system of an open file: it outlives a reboot, and a device under another
/// number.
///
/// # Errors
/// The file system does not tell one: ext4 and XFS do, and others since Linux 6.9.
pub fn file_system_id(file: impl AsFd) -> io::Result<FileSystemId> {
    first_known(file.as_fd(), &[generic_uuid, ext4_uuid, xfs_uuid])
}

/// The first UUID that one of `sources` tells. Some kernels answer the generic question for an ext4
/// with zeros, which stand for none, and know its UUID all the same.
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
    // SAFETY: the kernel fills a structure of this size.
    let request = unsafe { Updater::<FS_IOC_GETFSUUID, _>::new(&mut told) };
    // SAFETY: the request is that of this structure.
    unsafe { ioctl(file, request) }?;
    let is_long = usize::from(told.bytes) == told.uuid.len();
    if is_long { Ok(told.uuid) } else { Err(io::ErrorKind::Unsupported.into()) }
}

fn ext4_uuid(file: BorrowedFd<'_>) -> io::Result<FileSystemId> {
    let mut told = Ext4Uuid { bytes: 16, flags: 0, uuid: FileSystemId::default() };
    // SAFETY: the kernel reads how many bytes there are for the UUID, and fills them at most.
    let request = unsafe { Updater::<EXT4_IOC_GETFSUUID, _>::new(&mut told) };
    // SAFETY: the request is that of this structure.
    unsafe { ioctl(file, request) }?;
    Ok(told.uuid)
}

fn xfs_uuid(file: BorrowedFd<'_>) -> io::Result<FileSystemId> {
    let mut told = XfsGeometry::default();
    // SAFETY: the kernel fills a structure of this size.
    let request = unsafe { Updater::<XFS_IOC_FSGEOMETRY_V1, _>::new(&mut told) };
    // SAFETY: the request is that of this structure.
    unsafe { ioctl(file, request) }?;
    Ok(told.uuid)
}

/// Extents that are asked for in one call.
const EXTENTS_AT_ONCE: usize = 64;
/// Set in [`MappedExtent::flags`] of extents whose bytes the disk does not
/// have: `UNKNOWN`, `DELALLOC`, `UNWRITTEN`.
const NOT_WRITTEN: u32 = 0x0002 | 0x0004 | 0x0800;

/// The bytes of an open file that lie in extents which are allocated and written, in or behind its
/// size.
///
/// # Errors
/// The file system cannot tell.
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

/// The bytes of an open file that its file system does not take for a hole: for file systems that
/// have no [`written_ranges`].
///
/// # Errors
/// The file system cannot tell.
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

/// The mount through which a file was opened: a number that the kernel gives once while it runs,
/// higher than all before. 0 where it has no such numbers, before Linux 6.8.
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

    /// A source that answers with zeros has said nothing, and the next one is asked.
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
