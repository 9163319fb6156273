//! The identity of a file.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use super::facts::NO_FILE_SYSTEM;
use crate::log::identity;
use crate::log::recover::identity_of;

/// Keeps identities without a handle apart from those with one.
const NO_HANDLE: i32 = -1;

/// Returns the identity of the file `file`, which has `metadata`.
pub(super) fn identity_of_file(file: &File, metadata: &Metadata) -> io::Result<u64> {
    identity_of(file).or_else(|_| identity_without_handle(metadata))
}

/// Builds an identity from the inode number and the creation time: for file systems without
/// handles.
fn identity_without_handle(metadata: &Metadata) -> io::Result<u64> {
    let created = metadata.created()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let numbers = [u128::from(metadata.ino()), created.as_nanos()];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Ok(identity(&NO_FILE_SYSTEM, NO_HANDLE, &bytes))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_backing_keeps_its_identity_when_it_is_renamed_and_shares_it_with_none() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, three] = ["one", "two", "three"].map(|name| dir.path().join(name));
        std::fs::write(&one, [0; 4096]).unwrap();
        std::fs::write(&two, [0; 4096]).unwrap();
        let identity = |path| {
            let file = File::open(path).unwrap();
            identity_of_file(&file, &file.metadata().unwrap()).unwrap()
        };
        let first = identity(&one);
        assert_ne!(first, identity(&two));
        std::fs::rename(&one, &three).unwrap();
        assert_eq!(identity(&three), first);
        let metadata = std::fs::metadata(&three).unwrap();
        let weak = identity_without_handle(&metadata).unwrap();
        assert_ne!(weak, identity_without_handle(&std::fs::metadata(&two).unwrap()).unwrap());
    }
}
