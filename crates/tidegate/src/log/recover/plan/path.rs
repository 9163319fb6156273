//! Paths as the plan compares them: two spellings of one path must be one path.

use crate::log::checked_path;

/// What the names of recovery's own files begin with.
pub(in crate::log::recover) const TEMP_PREFIX: &str = ".tidegate-recover-";

/// The path without empty and `.` components; none, where no file can be meant by it, or `..` makes it unclear which.
pub(super) fn clean(path: &[u8]) -> Option<Box<[u8]>> {
    let path = checked_path(path)?;
    let mut clean = Vec::with_capacity(path.len());
    let mut last: &[u8] = b"";
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return None,
            name => {
                clean.push(b'/');
                clean.extend_from_slice(name);
                last = name;
            }
        }
    }
    let is_file = !last.is_empty() && !last.starts_with(TEMP_PREFIX.as_bytes());
    is_file.then(|| clean.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_a_path_are_one() {
        for path in [&b"/a/b"[..], b"//a/b", b"/a/./b", b"/a//b/", b"/./a/b/."] {
            assert_eq!(clean(path).as_deref(), Some(&b"/a/b"[..]));
        }
    }

    #[test]
    fn what_names_no_file_is_no_path() {
        let bad = [
            &b""[..],
            b"/",
            b"//.",
            b"a",
            b"./a",
            b"/a/../b",
            b"/a\0",
            b"/..",
            b"/d/.tidegate-recover-x-1",
        ];
        for path in bad {
            assert_eq!(clean(path), None, "{}", String::from_utf8_lossy(path));
        }
    }
}
