//! Paths: strings of strace as bytes, joined to a directory.

use crate::bad::{Bad, Result};

/// The maximum length of a path in the kernel.
const MAX_PATH_BYTES: usize = 4096;

/// Decodes a quoted string of strace.
pub(super) fn unquoted(text: &[u8]) -> Result<Vec<u8>> {
    let inner = text.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\""));
    unescaped(inner.ok_or(Bad::Shape)?)
}

/// Decodes strace's escapes: C, octal and hexadecimal escapes.
pub(super) fn unescaped(text: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let byte = if byte == b'\\' { escape(&mut rest).ok_or(Bad::Shape)? } else { byte };
        bytes.push(byte);
    }
    if bytes.len() > MAX_PATH_BYTES { Err(Bad::Shape) } else { Ok(bytes) }
}

/// Decodes the escape at the start of `rest`, and advances `rest` behind it.
fn escape(rest: &mut &[u8]) -> Option<u8> {
    let (&first, after) = rest.split_first()?;
    let (digits, radix) = match first {
        b'x' => (after.iter().take(2).take_while(|it| it.is_ascii_hexdigit()).count(), 16),
        b'0'..=b'7' => (rest.iter().take(3).take_while(|it| (b'0'..=b'7').contains(it)).count(), 8),
        _ => (0, 0),
    };
    if digits > 0 {
        let start = usize::from(radix == 16);
        let (number, after) = rest[start..].split_at(digits);
        *rest = after;
        return u8::from_str_radix(std::str::from_utf8(number).ok()?, radix).ok();
    }
    *rest = after;
    Some(match first {
        b'n' => b'\n',
        b't' => b'\t',
        b'r' => b'\r',
        b'v' => 0x0b,
        b'f' => 0x0c,
        b'"' | b'\\' | b'\'' | b'<' | b'>' => first,
        _ => return None,
    })
}

/// Joins `path` to `folder`, without empty parts, `.` and `..`. Symbolic links are unknown: `..`
/// removes the part in front.
pub(super) fn joined(folder: &[u8], path: &[u8]) -> Vec<u8> {
    let whole = if path.starts_with(b"/") { path.to_vec() } else { [folder, b"/", path].concat() };
    let is_absolute = path.starts_with(b"/") || folder.starts_with(b"/");
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in whole.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." if parts.last().is_some_and(|last| last != b"..") => drop(parts.pop()),
            b".." if is_absolute => {}
            part => parts.push(part),
        }
    }
    let mut joined = if is_absolute { b"/".to_vec() } else { Vec::new() };
    joined.extend(parts.join(&b'/'));
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_strace() {
        assert_eq!(unquoted(br#""a\"b\\\n\303\244\x41\0z""#), Ok(b"a\"b\\\n\xc3\xa4A\0z".to_vec()));
        for bad in [r#""a"..."#, "a", r#""\q""#, r#""\""#, r#""\777""#, "\"", ""] {
            assert_eq!(unquoted(bad.as_bytes()), Err(Bad::Shape), "{bad}");
        }
    }

    #[test]
    fn paths_are_joined_by_their_parts() {
        for (folder, path, expected) in [
            ("", "a", "a"),
            ("", "./a//b/", "a/b"),
            ("", "../a", "../a"),
            ("/x", "a", "/x/a"),
            ("/x", "/a", "/a"),
            ("/x/y", "../../../a", "/a"),
            ("sub", "a", "sub/a"),
        ] {
            assert_eq!(joined(folder.as_bytes(), path.as_bytes()), expected.as_bytes());
        }
    }
}
