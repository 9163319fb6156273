//! Entries of directories, as the kernel lists them.

use std::ffi::c_int;

/// Calls `visit` for each directory entry whose name is a number, in a result of `getdents64`. An
/// entry has 8 bytes of inode, 8 of offset, 2 of the entry's length, 1 of type, and the name.
pub fn numbers(mut entries: &[u8], mut visit: impl FnMut(c_int)) {
    while let Some(&[low, high]) = entries.get(16..18) {
        let len_bytes = usize::from(u16::from_le_bytes([low, high]));
        let Some((entry, rest)) = entries.split_at_checked(len_bytes) else { return };
        let name = entry.get(19..).unwrap_or_default();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        if let Some(number) = number(name) {
            visit(number);
        }
        if len_bytes == 0 {
            return;
        }
        entries = rest;
    }
}

fn number(name: &[u8]) -> Option<c_int> {
    std::str::from_utf8(name).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_entries_end_the_list() {
        let mut entries = vec![0; 24];
        entries[16] = 24;
        entries[19] = b'7';
        let seen = |entries: &[u8]| {
            let mut seen = Vec::new();
            numbers(entries, |fd| seen.push(fd));
            seen
        };
        assert_eq!(seen(&entries), [7]);
        assert_eq!(seen(&entries[..20]), Vec::<c_int>::new());
        entries[16] = 0;
        assert_eq!(seen(&entries), Vec::<c_int>::new());
        entries[16] = 3;
        assert!(seen(&entries).len() <= 1);
    }
}
