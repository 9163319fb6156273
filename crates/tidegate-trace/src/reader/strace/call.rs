//! A call: its name, arguments and result.

use crate::bad::{Bad, Result};

/// More arguments than any call on files has.
const MOST_ARGUMENTS: usize = 8;

/// A call that succeeded or failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Call<'a> {
    pub(super) name: &'a [u8],
    arguments: [&'a [u8]; MOST_ARGUMENTS],
    /// The text behind the equals sign.
    result: &'a [u8],
}

impl<'a> Call<'a> {
    /// Parses a call: `name(argument, ...) = result`.
    pub(super) fn parse(text: &'a [u8]) -> Result<Self> {
        let open = memchr::memchr(b'(', text).ok_or(Bad::Shape)?;
        let (name, rest) = (&text[..open], &text[open + 1..]);
        let is_name =
            |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'_';
        if name.is_empty() || !name.iter().all(is_name) {
            return Err(Bad::Shape);
        }
        let mut arguments = [&[][..]; MOST_ARGUMENTS];
        let rest = split(rest, &mut arguments)?.trim_ascii_start();
        let result = rest.strip_prefix(b"=").ok_or(Bad::Shape)?.trim_ascii();
        if result.is_empty() { Err(Bad::Shape) } else { Ok(Self { name, arguments, result }) }
    }

    /// Returns an argument, counted from 0; empty if there is none.
    pub(super) fn argument(&self, at: usize) -> &'a [u8] {
        self.arguments.get(at).copied().unwrap_or_default()
    }

    /// Returns the result, or `None` if the call failed or did not return.
    pub(super) fn result(&self) -> Option<i64> {
        let (value, _) = integer(self.result)?;
        (value >= 0).then_some(value)
    }

    /// Returns the result as a number of bytes or an offset.
    pub(super) fn count(&self) -> Option<u64> {
        self.result().and_then(|result| u64::try_from(result).ok())
    }

    /// Returns the path that `-y` shows behind the returned descriptor.
    pub(super) fn returned_path(&self) -> Option<&'a [u8]> {
        Descriptor::parse(self.result).ok()?.shown
    }

    /// Returns whether an argument contains `word`.
    pub(super) fn mentions(&self, word: &[u8]) -> bool {
        self.arguments.iter().any(|it| memchr::memmem::find(it, word).is_some())
    }
}

/// A descriptor in an argument or a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor<'a> {
    /// Its number; `None` for `AT_FDCWD`.
    pub(super) number: Option<i64>,
    /// The path or name that `-y` shows behind the number, without the details of `-yy`.
    pub(super) shown: Option<&'a [u8]>,
}

impl<'a> Descriptor<'a> {
    pub(super) fn parse(text: &'a [u8]) -> Result<Self> {
        let (number, rest) = match text.strip_prefix(b"AT_FDCWD") {
            Some(rest) => (None, rest),
            None => {
                integer(text).map(|(n, rest)| (Some(n), rest)).ok_or(Bad::Number("descriptor"))?
            }
        };
        let shown = rest.strip_prefix(b"<").map(|shown| {
            let end = shown.iter().position(|byte| b"<>".contains(byte)).unwrap_or(shown.len());
            &shown[..end]
        });
        Ok(Self { number, shown })
    }
}

/// Parses the number at the start of `text`; returns it and the rest.
pub(super) fn integer(text: &[u8]) -> Option<(i64, &[u8])> {
    let sign = usize::from(text.first() == Some(&b'-'));
    let digits = text[sign..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (number, rest) = text.split_at(sign + digits);
    Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
}

/// Parses a pair of numbers, such as `[3, 4]`.
pub(super) fn pair(text: &[u8]) -> Option<(i64, i64)> {
    let inner = text.strip_prefix(b"[")?.strip_suffix(b"]")?;
    let (first, _) = integer(inner)?;
    let second = &inner[memchr::memmem::rfind(inner, b", ")? + 2..];
    Some((first, integer(second)?.0))
}

/// Returns the text behind `name=` in a structure, up to the next comma or brace.
pub(super) fn member<'a>(structure: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let start = memchr::memmem::find(structure, name)? + name.len();
    let rest = structure[start..].strip_prefix(b"=")?;
    let end = rest.iter().position(|byte| b",}".contains(byte)).unwrap_or(rest.len());
    Some(&rest[..end])
}

/// Splits the arguments at the start of `text`; returns the text after their closing parenthesis.
/// Skips arguments that do not fit in `into`.
fn split<'a>(text: &'a [u8], into: &mut [&'a [u8]]) -> Result<&'a [u8]> {
    let (mut at, mut start, mut count, mut depth) = (0, 0, 0, 0u32);
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => at = skip_string(text, at),
            b'<' if follows_descriptor(text, at) => at = skip_shown(text, at),
            b'(' | b'[' | b'{' => depth += 1,
            b',' | b')' if depth == 0 => {
                if let Some(argument) = into.get_mut(count) {
                    *argument = text[start..at].trim_ascii();
                }
                (count, start) = (count + 1, at + 1);
                if byte == b')' {
                    return Ok(&text[start..]);
                }
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    Err(Bad::Shape)
}

/// Returns the index of the last byte of the string that begins at `at`.
fn skip_string(text: &[u8], mut at: usize) -> usize {
    loop {
        at += 1;
        match text.get(at) {
            Some(b'\\') => at += 1,
            None | Some(b'"') => return at,
            Some(_) => {}
        }
    }
}

/// Returns whether `at` follows a descriptor: a bracket there begins the annotation of `-y`.
fn follows_descriptor(text: &[u8], at: usize) -> bool {
    let before = &text[..at];
    before.last().is_some_and(u8::is_ascii_digit) || before.ends_with(b"AT_FDCWD")
}

/// Returns the index of the last byte of the annotation of `-y` that begins at `at`. strace escapes
/// both brackets in paths; an arrow separates the ends of a connection.
fn skip_shown(text: &[u8], mut at: usize) -> usize {
    let mut depth = 1;
    while depth > 0 {
        at += 1;
        match text.get(at) {
            None => return at,
            Some(b'\\') => at += 1,
            Some(b'<') => depth += 1,
            Some(b'>') if text[at - 1] != b'-' => depth -= 1,
            Some(_) => {}
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::has_flag;

    #[test]
    fn strings_and_what_y_shows_may_hold_all_that_parts_arguments() {
        let text = br#"openat(AT_FDCWD</a),b>, "x\"),(\\", O_RDWR|O_CREAT, 0644) = 3</a),b/x>"#;
        let call = Call::parse(text).unwrap();
        assert_eq!(call.name, b"openat");
        assert_eq!(call.argument(0), b"AT_FDCWD</a),b>");
        assert_eq!(call.argument(1), br#""x\"),(\\""#);
        assert!(has_flag(call.argument(2), b"O_CREAT") && !has_flag(call.argument(2), b"O_RD"));
        assert_eq!((call.result(), call.returned_path()), (Some(3), Some(&b"/a),b/x"[..])));
        let tcp = b"read(5<TCP:[1.2.3.4:5->6.7.8.9:1]>, \"\", 9) = 0 <0.000010>";
        let call = Call::parse(tcp).unwrap();
        assert_eq!((call.argument(2), call.result()), (&b"9"[..], Some(0)));
    }

    #[test]
    fn results_that_failed_or_never_came_are_none() {
        for text in ["open(\"a\", 0) = -1 ENOENT (No such file)", "read(3, \"\", 1) = ?"] {
            assert_eq!(Call::parse(text.as_bytes()).unwrap().result(), None, "{text}");
        }
        assert_eq!(Call::parse(b"fsync(3) = 0").unwrap().result(), Some(0));
        for text in ["fsync(3)", "fsync(3) =", "fsync(3", "fsync", "(3) = 0", "F(3) = 0"] {
            assert_eq!(Call::parse(text.as_bytes()), Err(Bad::Shape), "{text}");
        }
    }

    #[test]
    fn parts_of_arguments() {
        assert_eq!(pair(b"[3<pipe:[7]>, 4<pipe:[7]>]"), Some((3, 4)));
        assert_eq!(pair(b"[3]"), None);
        assert_eq!(
            member(b"{st_mode=S_IFREG|0644, st_size=12, ...}", b"st_size"),
            Some(&b"12"[..])
        );
        let shown = Descriptor::parse(b"1</dev/pts/0<char 136:0>>").unwrap();
        assert_eq!((shown.number, shown.shown), (Some(1), Some(&b"/dev/pts/0"[..])));
    }
}
