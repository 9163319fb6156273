//! What tells an open file from all others of all times.
#![allow(
    unsafe_code,
    reason = "the C library has the only wrapper of name_to_handle_at, with a structure of open length"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, StatxFlags};

use crate::log::identity;

/// The longest handle of any file system: `MAX_HANDLE_SZ`.
const HANDLE_BYTES_MAX: usize = 128;

/// `struct file_handle` with room for any handle.
#[repr(C)]
struct Handle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    content: [u8; HANDLE_BYTES_MAX],
}

/// The UUID of the file system of an open file (placeholder until the new recovery is merged).
///
/// # Errors
/// The kernel's.
pub fn file_system_id(file: impl AsFd) -> io::Result<crate::log::FileSystemId> {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&rustix::fs::fstatvfs(file)?.f_fsid.to_le_bytes());
    Ok(id)
}

/// The identity of an open file: [`identity`] of its file system and its handle there.
///
/// # Errors
/// The file system has no handles, for one.
pub fn identity_of(file: impl AsFd) -> io::Result<u64> {
    let file = file.as_fd();
    let file_system = file_system_id(file)?;
    let bytes = u32::try_from(HANDLE_BYTES_MAX).unwrap_or(0);
    let mut handle = Handle { bytes, kind: 0, content: [0; HANDLE_BYTES_MAX] };
    let mut mount = 0;
    // SAFETY: the path is a C string, `handle` begins as `file_handle` does and has as many bytes behind it as its first
    // field says, and both pointers are to live variables.
    let result = unsafe {
        libc::name_to_handle_at(
            file.as_raw_fd(),
            c"".as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let len = usize::try_from(handle.bytes).unwrap_or(HANDLE_BYTES_MAX).min(HANDLE_BYTES_MAX);
    Ok(identity(&file_system, handle.kind, &handle.content[..len]))
}

/// The mount through which a file was opened: a number that the kernel gives once while it runs, higher than all before. 0 where
/// it has no such numbers, before Linux 6.8.
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
