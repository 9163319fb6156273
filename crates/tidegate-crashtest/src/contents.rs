//! The bytes that operations write: offset and number of the operation determine each.
//!
//! Bytes of two operations differ at every offset, none is zero, so a byte at a known offset tells
//! which operation wrote it. `programs/interpreter.c` has the same function.

/// Number of values a written byte can have.
const VALUES: u64 = 251;
/// Number that stands for the initial bytes of `d0/A`.
pub const INITIAL_A: u64 = 200;
/// Number that stands for the initial bytes of `d1/B`.
pub const INITIAL_B: u64 = 201;

fn place(offset: u64) -> u64 {
    offset * 11 + (offset >> 8) * 29
}

/// The byte that operation `number` writes at `offset`.
pub fn byte(number: u64, offset: u64) -> u8 {
    let value = 1 + (number * 41 + place(offset)) % VALUES;
    value.to_le_bytes()[0]
}

/// The bytes that operation `number` writes at `offset`.
pub fn bytes(number: u64, offset: u64, length: u64) -> Vec<u8> {
    (offset..offset + length).map(|at| byte(number, at)).collect()
}

/// Names the writer of a byte at an offset.
pub fn writer(value: u8, offset: u64) -> String {
    let number = (0..VALUES).find(|number| byte(*number, offset) == value);
    match number {
        _ if value == 0 => "zeroes".into(),
        Some(INITIAL_A) => "initial bytes of d0/A".into(),
        Some(INITIAL_B) => "initial bytes of d1/B".into(),
        Some(number) if number < 32 => format!("bytes of step {number}"),
        _ => "bytes of no step at this offset".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_tells_its_writer() {
        for offset in [0, 1, 255, 256, 4095, 10_000] {
            assert_eq!(writer(byte(3, offset), offset), "bytes of step 3");
            assert_eq!(writer(byte(INITIAL_A, offset), offset), "initial bytes of d0/A");
        }
        assert_eq!(writer(0, 17), "zeroes");
    }
}
