//! Identifies paths that lead to storage.

/// Prefixes of disks below `/dev`.
const DISKS: [&[u8]; 16] = [
    b"sd", b"hd", b"vd", b"xvd", b"nvme", b"mmcblk", b"loop", b"dm-", b"md", b"mapper/", b"disk/",
    b"block/", b"pmem", b"nbd", b"ublkb", b"ram",
];
const NOT_STORAGE: [&[u8]; 2] = [b"/proc/", b"/sys/"];

/// Returns whether `path` is storage: below `/dev` only disks, and nothing in `/proc` or `/sys`.
pub fn is_storage(path: &[u8]) -> bool {
    if let Some(device) = path.strip_prefix(b"/dev/") {
        // `/dev/random` has the prefix of a RAM disk.
        return DISKS.iter().any(|disk| device.starts_with(disk)) && device != b"random";
    }
    !NOT_STORAGE.iter().any(|folder| path.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_storage_and_terminals_are_not() {
        for path in ["/dev/sda1", "/dev/nvme0n1", "/home/a", "relative", "/dev/ram0"] {
            assert!(is_storage(path.as_bytes()), "{path}");
        }
        for path in ["/dev/null", "/dev/pts/0", "/dev/urandom", "/dev/shm/x", "/proc/1/stat"] {
            assert!(!is_storage(path.as_bytes()), "{path}");
        }
    }
}
