//! The bytes that operations write. Offset and number of the operation determine each byte.
//!
//! Bytes of two operations differ at every offset and none is zero, so a byte at a known offset
//! tells which operation wrote it. `programs/interpreter.c` has the same function.

/// Number of values a written byte can have.
const VALUES: u64 = 251;
/// Number that stands for the initial bytes of `d0/A`.
pub const INITIAL_A: u64 = 200;
/// Number that stands for the initial bytes of `d1/B`.
pub const INITIAL_B: u64 = 201;

/// Offsets in one block of this size have values that ascend by [`STEP`].
const BLOCK_BYTES: u64 = 256;
const STEP: u64 = 11;
/// The inverse of [`STEP`] modulo [`VALUES`].
const STEP_INVERSE: u64 = 137;
/// Bytes of ascending values, which contain a block for each first value.
const ASCENDING: [u8; 507] = ascending();
const _: () = assert!(ASCENDING.len() as u64 == VALUES + BLOCK_BYTES);

const fn ascending() -> [u8; 507] {
    let mut bytes = [1; 507];
    let mut at = 1;
    while at < bytes.len() {
        let before = bytes[at - 1] as u64 - 1;
        bytes[at] = (1 + (before + STEP) % VALUES).to_le_bytes()[0];
        at += 1;
    }
    bytes
}

fn place(offset: u64) -> u64 {
    offset * STEP + offset / BLOCK_BYTES * 29
}

/// Returns the byte that operation `number` writes at `offset`.
pub fn byte(number: u64, offset: u64) -> u8 {
    let value = 1 + (number * 41 + place(offset)) % VALUES;
    value.to_le_bytes()[0]
}

/// Returns the `length` bytes that operation `number` writes at `offset`.
pub fn bytes(number: u64, offset: u64, length: u64) -> Vec<u8> {
    let (mut bytes, mut at, end) = (Vec::new(), offset, offset + length);
    while at < end {
        let count = (BLOCK_BYTES - at % BLOCK_BYTES).min(end - at);
        let first = (number * 41 + place(at)) * STEP_INVERSE % VALUES;
        bytes.extend_from_slice(&ASCENDING[index(first)..index(first + count)]);
        at += count;
    }
    bytes
}

fn index(at: u64) -> usize {
    usize::try_from(at).expect("a block is small")
}

/// Returns the name of the writer of a byte at an offset.
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

    #[test]
    fn bytes_are_the_byte_of_each_offset() {
        for (number, offset, length) in [(0, 0, 1), (7, 250, 20), (INITIAL_A, 255, 70_000)] {
            let each = (offset..offset + length).map(|at| byte(number, at));
            assert_eq!(bytes(number, offset, length), each.collect::<Vec<u8>>());
        }
    }
}
