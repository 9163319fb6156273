//! Distinguishes x86-64 instructions that order or share memory from all others.

/// An instruction, by its cost for other processors and for the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Reads, writes or computes.
    Plain,
    /// Reads and writes memory as one operation.
    Locked,
    /// Orders loads or stores.
    Fence,
    /// Writes a cache line back.
    WriteBack,
}

const LOCK: u8 = 0xf0;

/// Returns the kind of the instruction that begins with `bytes`.
pub(super) fn kind(bytes: &[u8]) -> Kind {
    let is_prefix = |&byte: &u8| {
        matches!(byte, 0x66 | 0xf2 | 0xf3 | LOCK | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65)
    };
    let prefixes = bytes.iter().take_while(|byte| is_prefix(byte)).count();
    let (prefixes, rest) = bytes.split_at(prefixes);
    if prefixes.contains(&LOCK) {
        return Kind::Locked;
    }
    let rest = if rest.first().is_some_and(|byte| byte & 0xf0 == 0x40) { &rest[1..] } else { rest };
    match rest {
        // `xchg` with memory needs no prefix.
        [0x86 | 0x87, operands, ..] if operands >> 6 != 3 => Kind::Locked,
        [0x0f, 0xae, 0xe8 | 0xf0 | 0xf8, ..] => Kind::Fence,
        // `clflush`, `clflushopt`; `clwb` has a prefix.
        [0x0f, 0xae, operands, ..] if operands >> 6 != 3 && operands >> 3 & 7 == 7 => {
            Kind::WriteBack
        }
        [0x0f, 0xae, operands, ..]
            if operands >> 6 != 3 && operands >> 3 & 7 == 6 && prefixes.contains(&0x66) =>
        {
            Kind::WriteBack
        }
        _ => Kind::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_told_apart() {
        let cases: [(&[u8], Kind); 13] = [
            (&[0x48, 0x89, 0xd8], Kind::Plain),
            (&[0xf0, 0x48, 0x0f, 0xc1, 0x07], Kind::Locked),
            (&[0xf0, 0x0f, 0xb1, 0x0f], Kind::Locked),
            (&[0x48, 0x87, 0x07], Kind::Locked),
            (&[0x86, 0x07], Kind::Locked),
            (&[0x48, 0x87, 0xc3], Kind::Plain),
            (&[0x0f, 0xae, 0xf8], Kind::Fence),
            (&[0x0f, 0xae, 0xf0], Kind::Fence),
            (&[0x0f, 0xae, 0x3f], Kind::WriteBack),
            (&[0x66, 0x0f, 0xae, 0x3f], Kind::WriteBack),
            (&[0x66, 0x0f, 0xae, 0x37], Kind::WriteBack),
            (&[0x0f, 0xae, 0x37], Kind::Plain),
            (&[], Kind::Plain),
        ];
        for (bytes, expected) in cases {
            assert_eq!(kind(bytes), expected, "{bytes:x?}");
        }
    }
}
