//! The content of a region without a pool, guessed from its first bytes: `create` names the content
//! that it would destroy.

use crate::pmem::{PmemError, Region};

/// The kind of content that the first bytes of a region suggest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum Content {
    /// Nothing: the first bytes are zero.
    Zeroes,
    /// A file system, partition table, image or pool of another program; its name in a sentence.
    #[strum(to_string = "{0}")]
    Known(&'static str),
    /// Text.
    Text,
    /// Unrecognized bytes.
    #[strum(to_string = "unknown bytes")]
    Other,
}

impl Content {
    /// Returns whether a signature shows that this is data of another program.
    pub fn is_foreign(self) -> bool {
        matches!(self, Self::Known(_))
    }

    /// Returns whether a file with this content is an image of a disk: a new one, or one with a
    /// partition table, a file system or the like.
    pub fn is_disk_image(self) -> bool {
        let is_disk = |found: &str| {
            SIGNATURES.iter().any(|(_, _, name, kind)| *name == found && *kind == Kind::Disk)
        };
        match self {
            Self::Zeroes => true,
            Self::Known(name) => is_disk(name),
            Self::Text | Self::Other => false,
        }
    }
}

/// The data that a signature begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Data of a disk or partition, as it is on that.
    Disk,
    /// Other data.
    Other,
}

/// Offset, bytes, owner and kind of each signature. Longer ones first: short ones may match by
/// chance.
const SIGNATURES: &[(u64, &[u8], &str, Kind)] = &[
    (0, b"BTT_ARENA_INFO\0\0", "a BTT (version 2.0)", Kind::Other),
    (4096, b"BTT_ARENA_INFO\0\0", "a BTT (version 1.1)", Kind::Other),
    (4096, b"NVDIMM_PFN_INFO\0", "an fsdax namespace's own metadata", Kind::Other),
    (4096, b"NVDIMM_DAX_INFO\0", "a devdax namespace's own metadata", Kind::Other),
    (0, b"PMEMLOG\0", "a libpmemlog pool", Kind::Other),
    (0, b"PMEMOBJ\0", "a libpmemobj pool", Kind::Other),
    (0, b"SQLite format 3\0", "an SQLite database", Kind::Other),
    (0, b"bluestore block device\n", "a Ceph BlueStore device", Kind::Other),
    (0, b"LUKS\xba\xbe", "a LUKS volume", Kind::Disk),
    (0, b"QFI\xfb", "a qcow2 image", Kind::Other),
    (0, b"XFSB", "an XFS file system", Kind::Disk),
    (0, b"\x7fELF", "a program (ELF)", Kind::Other),
    (512, b"EFI PART", "a GPT partition table", Kind::Disk),
    (4096, b"EFI PART", "a GPT partition table", Kind::Disk),
    (512, b"LABELONE", "an LVM physical volume", Kind::Disk),
    (4086, b"SWAPSPACE2", "swap space", Kind::Disk),
    (0x1_0040, b"_BHRfS_M", "a Btrfs file system", Kind::Disk),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system", Kind::Disk),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system", Kind::Disk),
    (510, b"\x55\xaa", "a boot sector or an MBR partition table", Kind::Disk),
];

/// Guesses the content of `region` from its first bytes.
///
/// # Errors
/// [`PmemError`] if they cannot be read.
pub(super) fn look(region: &Region) -> Result<Content, PmemError> {
    for (offset, signature, name, _) in SIGNATURES {
        if region.len_bytes() >= offset + signature.len() as u64 {
            let mut found = [0; 32];
            let found = &mut found[..signature.len()];
            region.read(*offset, found)?;
            if found == *signature {
                return Ok(Content::Known(name));
            }
        }
    }
    let mut start = [0; 4096];
    let len = usize::try_from(region.len_bytes()).unwrap_or(usize::MAX).min(start.len());
    region.read(0, &mut start[..len])?;
    Ok(kind_of(&start[..len]))
}

fn kind_of(start: &[u8]) -> Content {
    let is_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    let written = start.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    match &start[..written] {
        [] => Content::Zeroes,
        bytes if bytes.iter().all(is_text) => Content::Text,
        _ => Content::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offset: u64, bytes: &[u8]) -> Region {
        let region = Region::anonymous(128 << 10).unwrap();
        region.write(offset, bytes).unwrap();
        region
    }

    #[test]
    fn each_signature_is_recognized() {
        for (offset, signature, name, _) in SIGNATURES {
            let found = look(&region(*offset, signature)).unwrap();
            assert_eq!(found, Content::Known(name));
            assert_eq!(found.to_string(), *name);
        }
    }

    #[test]
    fn bytes_without_a_signature_are_classified() {
        assert_eq!(look(&region(0, &[])).unwrap(), Content::Zeroes);
        assert_eq!(look(&region(0, b"To whom it may concern,\n")).unwrap(), Content::Text);
        assert_eq!(look(&region(0, &[0xB7; 700])).unwrap(), Content::Other);
    }

    #[test]
    fn images_of_disks_are_told_from_files() {
        for content in [
            Content::Zeroes,
            Content::Known("a GPT partition table"),
            Content::Known("an ext2, ext3 or ext4 file system"),
        ] {
            assert!(content.is_disk_image(), "{content}");
        }
        for content in [
            Content::Text,
            Content::Other,
            Content::Known("a qcow2 image"),
            Content::Known("an SQLite database"),
        ] {
            assert!(!content.is_disk_image(), "{content}");
        }
    }

    #[test]
    fn a_region_of_one_page_is_looked_at() {
        let region = Region::anonymous(4096).unwrap();
        region.write(1080, b"\x53\xef").unwrap();
        assert!(look(&region).unwrap().is_foreign());
    }
}
