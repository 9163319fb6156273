//! Parses fields of a line: numbers, times, and parts between separators.

use super::bad::{Bad, Result};

/// The maximum offset in a file or device.
const MAX_OFFSET: u64 = i64::MAX.unsigned_abs();
/// The maximum length of a request; Linux allows 2 GiB less a page.
const MAX_REQUEST_BYTES: u64 = 1 << 31;
/// Bytes of a sector, the unit of block traces.
const SECTOR_BYTES: u64 = 512;
/// Any number with this many digits fits in 64 bits.
const DIGITS_THAT_FIT: usize = 19;

/// Parses a decimal number; `what` names it in the error.
pub(super) fn number(text: &[u8], what: &'static str) -> Result<u64> {
    decimal(text).ok_or(Bad::Number(what))
}

fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digit = |byte: u8| u64::from(byte - b'0');
    if text.len() <= DIGITS_THAT_FIT {
        return Some(text.iter().fold(0, |value, byte| value * 10 + digit(*byte)));
    }
    text.iter().try_fold(0_u64, |value, byte| value.checked_mul(10)?.checked_add(digit(*byte)))
}

/// Parses a number that may have a minus sign.
pub(super) fn signed(text: &[u8], what: &'static str) -> Result<i64> {
    let (magnitude, negative) = match text.strip_prefix(b"-") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let value = i64::try_from(number(magnitude, what)?).map_err(|_| Bad::Number(what))?;
    Ok(if negative { -value } else { value })
}

/// Parses the number of a stream: a thread or a process.
pub(super) fn stream(text: &[u8]) -> Result<u32> {
    u32::try_from(number(text, "thread")?).map_err(|_| Bad::Number("thread"))
}

/// Parses seconds with a fraction, and rounds to microseconds.
pub(super) fn seconds_us(text: &[u8]) -> Result<u64> {
    let dot = text.iter().position(|&byte| byte == b'.').unwrap_or(text.len());
    let (whole, fraction) = text.split_at(dot);
    let whole = decimal(whole).and_then(|whole| whole.checked_mul(1_000_000));
    let fraction = match fraction.get(1..) {
        None => Some(0),
        Some(digits) => fraction_us(digits),
    };
    whole.zip(fraction).and_then(|(whole, part)| whole.checked_add(part)).ok_or(Bad::Number("time"))
}

fn fraction_us(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digit = |at: usize| digits.get(at).map_or(0, |byte| u64::from(byte - b'0'));
    let micros = (0..6).fold(0, |value, at| value * 10 + digit(at));
    Some(micros + u64::from(digit(6) >= 5))
}

/// Checks that a range of bytes is possible for a request and a file, and returns it.
pub(super) fn range(offset_bytes: u64, len_bytes: u64) -> Result<(u64, u64)> {
    if len_bytes > MAX_REQUEST_BYTES {
        return Err(Bad::Length);
    }
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= MAX_OFFSET => Ok((offset_bytes, len_bytes)),
        _ => Err(Bad::Range),
    }
}

/// Returns the range in bytes of `count` sectors from `first` on.
pub(super) fn sectors(first: u64, count: u64) -> Result<(u64, u64)> {
    let offset = first.checked_mul(SECTOR_BYTES).ok_or(Bad::Range)?;
    range(offset, count.checked_mul(SECTOR_BYTES).ok_or(Bad::Length)?)
}

/// Checks that a file can have this length, and returns it.
pub(super) fn file_length(len_bytes: u64) -> Result<u64> {
    if len_bytes <= MAX_OFFSET { Ok(len_bytes) } else { Err(Bad::Range) }
}

/// Splits `line` at each `separator`; fails unless there are exactly `N` parts.
pub(super) fn split<const N: usize>(line: &[u8], separator: u8) -> Result<[&[u8]; N]> {
    let mut fields = [&[][..]; N];
    let mut parts = line.split(|&byte| byte == separator);
    for field in &mut fields {
        *field = parts.next().ok_or(Bad::Shape)?;
    }
    if parts.next().is_some() { Err(Bad::Shape) } else { Ok(fields) }
}

/// Splits `line` at the first `separator`.
pub(super) fn cut(line: &[u8], separator: u8) -> Result<(&[u8], &[u8])> {
    let at = memchr::memchr(separator, line).ok_or(Bad::Shape)?;
    Ok((&line[..at], &line[at + 1..]))
}

/// Splits `line` at the last `separator`.
pub(super) fn cut_last(line: &[u8], separator: u8) -> Result<(&[u8], &[u8])> {
    let at = memchr::memrchr(separator, line).ok_or(Bad::Shape)?;
    Ok((&line[..at], &line[at + 1..]))
}

/// Removes a leading and a trailing quote, if any.
pub(super) fn unquoted(text: &[u8]) -> &[u8] {
    let text = text.strip_prefix(b"\"").unwrap_or(text);
    text.strip_suffix(b"\"").unwrap_or(text)
}

/// Returns whether `flags`, joined by `|`, include `flag`.
pub(super) fn has_flag(flags: &[u8], flag: &[u8]) -> bool {
    flags.split(|&byte| byte == b'|').any(|it| it == flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_to_microseconds() {
        assert_eq!(seconds_us(b"653406.907265"), Ok(653_406_907_265));
        assert_eq!(seconds_us(b"653409.11441"), Ok(653_409_114_410));
        assert_eq!(seconds_us(b"1.9999996"), Ok(2_000_000));
        assert_eq!(seconds_us(b"7"), Ok(7_000_000));
        for bad in ["", ".", "1.", ".5", "-1.0", "1.2.3", "1e3", "99999999999999999999"] {
            assert_eq!(seconds_us(bad.as_bytes()), Err(Bad::Number("time")), "{bad}");
        }
    }

    #[test]
    fn numbers_and_ranges_that_overflow_are_bad() {
        assert_eq!(number(b"18446744073709551615", "offset"), Ok(u64::MAX));
        assert_eq!(number(b"18446744073709551616", "offset"), Err(Bad::Number("offset")));
        assert_eq!(range(i64::MAX as u64 - 1, 1), Ok((i64::MAX as u64 - 1, 1)));
        assert_eq!(range(i64::MAX as u64, 1), Err(Bad::Range));
        assert_eq!(range(0, (1 << 31) + 1), Err(Bad::Length));
        assert_eq!(sectors(1 << 60, 8), Err(Bad::Range));
        assert_eq!(sectors(8, 16), Ok((4096, 8192)));
        assert_eq!(signed(b"-1", "result"), Ok(-1));
        assert_eq!(signed(b"--1", "result"), Err(Bad::Number("result")));
    }
}
