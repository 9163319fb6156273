//! File systems whose syncs concern more than the disk of this machine.
//!
//! On them a sync also makes data visible to other machines, or reports an error (no space left)
//! that no earlier call has reported. A sync that a library only answers would hide both.

/// The upper half of the descriptor in a sync that must reach the kernel. A filter that answers
/// syncs lets such a call pass.
pub const REAL_SYNC: u32 = 0x5469_6465;

/// A kind of file system: its name in `mountinfo`, and its number in `statfs`.
struct Kind {
    name: &'static str,
    magic: u32,
}

/// FUSE also stands for virtiofs, whose number is equal.
const REMOTE: [Kind; 18] = [
    Kind { name: "nfs", magic: 0x6969 },
    Kind { name: "cifs", magic: 0xff53_4d42 },
    Kind { name: "smb3", magic: 0xfe53_4d42 },
    Kind { name: "smbfs", magic: 0x517b },
    Kind { name: "fuse", magic: 0x6573_5546 },
    Kind { name: "virtiofs", magic: 0x6573_5546 },
    Kind { name: "9p", magic: 0x0102_1997 },
    Kind { name: "ceph", magic: 0x00c3_6400 },
    Kind { name: "afs", magic: 0x5346_414f },
    Kind { name: "afs", magic: 0x6b41_4653 },
    Kind { name: "coda", magic: 0x7375_7245 },
    Kind { name: "ocfs2", magic: 0x7461_636f },
    Kind { name: "gfs2", magic: 0x0116_1970 },
    Kind { name: "lustre", magic: 0x0bd0_0bd0 },
    Kind { name: "gpfs", magic: 0x4750_4653 },
    Kind { name: "beegfs", magic: 0x1983_0326 },
    Kind { name: "pvfs2", magic: 0x2003_0528 },
    Kind { name: "vboxsf", magic: 0x786f_4256 },
];

/// Returns whether the file system of this `statfs` number is a remote one. The kernel keeps the
/// number in the low 32 bits.
#[must_use]
pub fn is_remote_magic(magic: u64) -> bool {
    REMOTE.iter().any(|kind| u64::from(kind.magic) == magic & u64::from(u32::MAX))
}

/// Returns whether the file system of this `mountinfo` name is remote, as `nfs4` and `fuse.sshfs`.
#[must_use]
pub fn is_remote_name(name: &str) -> bool {
    let base = name.split('.').next().unwrap_or(name);
    REMOTE.iter().any(|kind| kind.name == base) || base == "nfs4" || base.starts_with("fuse")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_file_systems_are_told_by_name_and_number() {
        for name in ["nfs", "nfs4", "fuse.sshfs", "fuseblk", "9p", "virtiofs"] {
            assert!(is_remote_name(name), "{name}");
        }
        for name in ["ext4", "xfs", "btrfs", "overlay", "tmpfs", ""] {
            assert!(!is_remote_name(name), "{name}");
        }
        assert!(is_remote_magic(0xff53_4d42) && is_remote_magic(0xffff_ffff_ff53_4d42));
        assert!(!is_remote_magic(0xef53) && !is_remote_magic(0x0102_1994));
    }
}
