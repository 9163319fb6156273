//! Sizes as people write them: `4096`, `64K`, `1.5G`; K, M, G and T are powers of 1024.

use std::fmt;
use std::str::FromStr;

/// Units by their letter, largest first.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// A number of bytes, parsed from and shown as `SIZE` of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size {
    /// The number of bytes.
    pub bytes: u64,
}

/// Why a text is not a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// Not a number with at most one unit letter.
    #[error(
        "expected a number of bytes, or a number and K, M, G or T (powers of 1024), as in 512M"
    )]
    Malformed,
    /// A fraction that gives no whole number of bytes.
    #[error("this is not a whole number of bytes; write it in a smaller unit")]
    Fraction,
    /// More bytes than 64 bits hold.
    #[error("more than 16777215T cannot be addressed; use a smaller size")]
    TooLarge,
    /// Zero bytes.
    #[error("a size must be more than 0 bytes")]
    Zero,
}

/// Parses a `SIZE` and returns its bytes, for callers that need no [`Size`].
///
/// # Errors
/// `text` is no size.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    text.parse::<Size>().map(|size| size.bytes)
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let (number, shift) = split_unit(text.trim());
        let bytes = match number.split_once('.') {
            None => scale(parse_digits(number)?, shift)?,
            Some((whole, fraction)) if shift > 0 => {
                let whole = scale(parse_digits(whole)?, shift)?;
                whole.checked_add(scale_fraction(fraction, shift)?).ok_or(SizeError::TooLarge)?
            }
            Some((whole, fraction)) => {
                parse_digits(whole).and(parse_digits(fraction))?;
                return Err(SizeError::Fraction);
            }
        };
        if bytes == 0 { Err(SizeError::Zero) } else { Ok(Self { bytes }) }
    }
}

/// Splits a trailing unit off. Returns the number and the power of two that multiplies it. `K`,
/// `k`, `KB` and `KiB` are equal; there are no powers of 1000.
fn split_unit(text: &str) -> (&str, u32) {
    let body = text.strip_suffix(['B', 'b']).unwrap_or(text);
    let body = body.strip_suffix(['i', 'I']).unwrap_or(body);
    let unit = |letter: char| UNITS.iter().find(|(unit, _)| unit.eq_ignore_ascii_case(&letter));
    match body.chars().last().and_then(unit) {
        Some((_, shift)) => (&body[..body.len() - 1], *shift),
        None if text.ends_with(['B', 'b']) && body.len() + 1 == text.len() => (body, 0),
        None => (text, 0),
    }
}

fn parse_digits(text: &str) -> Result<u64, SizeError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(SizeError::Malformed);
    }
    text.parse().map_err(|_| SizeError::TooLarge)
}

fn scale(number: u64, shift: u32) -> Result<u64, SizeError> {
    number.checked_mul(1 << shift).ok_or(SizeError::TooLarge)
}

/// Returns `0.fraction` times two to the power of `shift`, if that is a whole number.
fn scale_fraction(fraction: &str, shift: u32) -> Result<u64, SizeError> {
    let digits = parse_digits(fraction)?;
    let places = u32::try_from(fraction.len()).map_err(|_| SizeError::Fraction)?;
    let divisor = 10u128.checked_pow(places).ok_or(SizeError::Fraction)?;
    let scaled = u128::from(digits) << shift;
    if !scaled.is_multiple_of(divisor) {
        return Err(SizeError::Fraction);
    }
    u64::try_from(scaled / divisor).map_err(|_| SizeError::TooLarge)
}

/// Exact where the size is a whole number of a unit (`64K`), otherwise two decimals and the bytes
/// (`3.96G (4254076928 bytes)`), so that the text always contains a size that can be typed.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((unit, shift)) = self.exact_unit() {
            return write!(f, "{}{unit}", self.bytes >> shift);
        }
        let Some((unit, shift)) = UNITS.iter().find(|(_, shift)| self.bytes >> shift > 0) else {
            return write!(f, "{} bytes", self.bytes);
        };
        let hundredths = (u128::from(self.bytes) * 100) >> shift;
        write!(f, "{}.{:02}{unit} ({} bytes)", hundredths / 100, hundredths % 100, self.bytes)
    }
}

impl Size {
    /// Returns the size as a text that can be parsed again: in a unit, or else in bytes.
    #[must_use]
    pub fn exact(self) -> String {
        match self.exact_unit() {
            Some(_) => self.to_string(),
            None => self.bytes.to_string(),
        }
    }

    /// Returns the largest unit that divides this size, unless the number then has more than five
    /// digits.
    fn exact_unit(self) -> Option<(char, u32)> {
        let whole = |shift: u32| self.bytes.is_multiple_of(1 << shift) && self.bytes >> shift > 0;
        let (unit, shift) = *UNITS.iter().find(|(_, shift)| whole(*shift))?;
        (self.bytes >> shift < 100_000).then_some((unit, shift))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    use parse_bytes as bytes;

    #[test]
    fn units_are_powers_of_1024() {
        assert_eq!(bytes("1"), Ok(1));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("4096B"), Ok(4096));
        assert_eq!(bytes("4K"), Ok(4096));
        assert_eq!(bytes("4k"), Ok(4096));
        assert_eq!(bytes("4KiB"), Ok(4096));
        assert_eq!(bytes("64M"), Ok(64 << 20));
        assert_eq!(bytes("1.5G"), Ok(3 << 29));
        assert_eq!(bytes("2T"), Ok(2 << 40));
        assert_eq!(bytes("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn nonsense_is_told_apart() {
        for text in [
            "", " ", "K", "G4", "4X", "-1", "+1", "0x10", "4 K", "1e9", "4KK", "4i", "é", "1.G",
            "1.3Q", ".5G",
        ] {
            assert_eq!(bytes(text), Err(SizeError::Malformed), "{text:?}");
        }
        assert_eq!(bytes("1.5"), Err(SizeError::Fraction));
        assert_eq!(bytes("1.0001K"), Err(SizeError::Fraction));
        assert_eq!(bytes("0"), Err(SizeError::Zero));
        assert_eq!(bytes("0G"), Err(SizeError::Zero));
        assert_eq!(bytes("18446744073709551616"), Err(SizeError::TooLarge));
        assert_eq!(bytes("16777216T"), Err(SizeError::TooLarge));
    }

    #[test]
    fn what_is_shown_can_be_typed_back() {
        let exact = |bytes| Size { bytes }.exact();
        assert_eq!((exact(80 << 10), exact(4160)), ("80K".to_owned(), "4160".to_owned()));
        let show = |bytes| Size { bytes }.to_string();
        assert_eq!(show(512), "512 bytes");
        assert_eq!(show(4096), "4K");
        assert_eq!(show(64 << 20), "64M");
        assert_eq!(show(3 << 29), "1536M");
        assert_eq!(show(4_254_076_927), "3.96G (4254076927 bytes)");
        assert_eq!(show(u64::MAX), "16777215.99T (18446744073709551615 bytes)");
    }
}
