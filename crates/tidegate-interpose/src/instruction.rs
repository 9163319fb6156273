//! Decodes instructions of x86-64: their length, and their effect on `eax`.
//!
//! Pure: any bytes have an answer. An unknown instruction is `None`.

/// How an instruction changes `eax`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// `eax` holds this number from now on.
    Sets(u32),
    /// Pushes this number on the stack, and keeps `eax`.
    Pushes(u32),
    /// Pops the top of the stack into `eax`.
    Pops,
    Keeps,
    /// `eax` may hold anything, or the next instruction is reached from elsewhere.
    Unknown,
}

/// An instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) len_bytes: usize,
    pub(crate) effect: Effect,
}

/// Tables of opcodes, by the bytes that lead to them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Map {
    OneByte,
    /// Behind `0f`.
    TwoBytes,
    /// Behind `0f 38`.
    Three38,
    /// Behind `0f 3a`.
    Three3A,
}

const REX_W: u8 = 8;
const REX_R: u8 = 4;
const REX_B: u8 = 1;

/// The parts of an instruction before its `ModRM` byte.
struct Opcode {
    map: Map,
    byte: u8,
    rex: u8,
    /// Immediates that would have four bytes have two.
    is_short: bool,
    len_bytes: usize,
    /// It has a VEX or EVEX prefix, and works on vectors.
    is_vector: bool,
}

/// Decodes the instruction at the beginning of `code`.
pub(crate) fn instruction(code: &[u8]) -> Option<Instruction> {
    let opcode = Opcode::of(code)?;
    let operands = code.get(opcode.len_bytes..)?;
    let (has_modrm, immediate_bytes) = opcode.shape(operands.first().copied())?;
    let operand_bytes = if has_modrm { modrm_bytes(operands)? } else { 0 };
    let effect = opcode.effect(operands, operand_bytes);
    Some(Instruction { len_bytes: opcode.len_bytes + operand_bytes + immediate_bytes, effect })
}

impl Opcode {
    fn of(code: &[u8]) -> Option<Self> {
        let is_prefix = |byte: &u8| {
            matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
        };
        let prefixes = code.iter().position(|byte| !is_prefix(byte))?;
        let is_short = code[..prefixes].contains(&0x66);
        let rest = &code[prefixes..];
        match *rest.first()? {
            0xc5 => Self::vector(Map::TwoBytes, rest, prefixes + 2),
            0xc4 => Self::vector(vector_map(rest.get(1)? & 31)?, rest, prefixes + 3),
            0x62 => Self::vector(vector_map(rest.get(1)? & 7)?, rest, prefixes + 4),
            rex @ 0x40..=0x4f => Self::plain(code, prefixes + 1, rex, is_short && rex & REX_W == 0),
            _ => Self::plain(code, prefixes, 0, is_short),
        }
    }

    /// Decodes an opcode without a vector's prefix. `at` is its offset, behind all other prefixes.
    fn plain(code: &[u8], at: usize, rex: u8, is_short: bool) -> Option<Self> {
        let byte_at = |ahead: usize| code.get(at + ahead).copied();
        let (map, len_bytes) = match (byte_at(0)?, byte_at(1)) {
            (0x0f, Some(0x38)) => (Map::Three38, 3),
            (0x0f, Some(0x3a)) => (Map::Three3A, 3),
            (0x0f, _) => (Map::TwoBytes, 2),
            _ => (Map::OneByte, 1),
        };
        let byte = byte_at(len_bytes - 1)?;
        Some(Self { map, byte, rex, is_short, len_bytes: at + len_bytes, is_vector: false })
    }

    fn vector(map: Map, rest: &[u8], opcode_at: usize) -> Option<Self> {
        let prefix_bytes = match rest.first()? {
            0xc5 => 2,
            0xc4 => 3,
            _ => 4,
        };
        let byte = *rest.get(prefix_bytes)?;
        let len_bytes = opcode_at + 1;
        Some(Self { map, byte, rex: 0, is_short: false, len_bytes, is_vector: true })
    }

    /// Returns whether a `ModRM` byte follows, and the length of the immediate. `modrm` is the byte
    /// that follows the opcode.
    fn shape(&self, modrm: Option<u8>) -> Option<(bool, usize)> {
        match self.map {
            Map::OneByte => self.shape_one_byte(modrm),
            Map::TwoBytes => shape_two_bytes(self.byte),
            Map::Three38 => Some((true, 0)),
            Map::Three3A => Some((true, 1)),
        }
    }

    fn shape_one_byte(&self, modrm: Option<u8>) -> Option<(bool, usize)> {
        let word_bytes = if self.is_short { 2 } else { 4 };
        let tests = || modrm.is_some_and(|modrm| modrm >> 3 & 7 < 2);
        Some(match self.byte {
            0x00..=0x3f => match self.byte & 7 {
                0..=3 => (true, 0),
                4 => (false, 1),
                5 => (false, word_bytes),
                _ => return None,
            },
            0x63 | 0x84..=0x8f | 0xd0..=0xd3 | 0xd8..=0xdf | 0xfe | 0xff => (true, 0),
            0x50..=0x5f
            | 0x90..=0x99
            | 0x9b..=0x9f
            | 0xa4..=0xa7
            | 0xaa..=0xaf
            | 0xc3
            | 0xc9
            | 0xcc
            | 0xf4
            | 0xf5
            | 0xf8..=0xfd => (false, 0),
            0x6a | 0x70..=0x7f | 0xa8 | 0xb0..=0xb7 | 0xcd | 0xe0..=0xe3 | 0xeb => (false, 1),
            0xc2 => (false, 2),
            0xe8 | 0xe9 => (false, 4),
            0xb8..=0xbf if self.rex & REX_W != 0 => (false, 8),
            0xa0..=0xa3 => (false, 8),
            0x68 | 0xa9 | 0xb8..=0xbf => (false, word_bytes),
            0x6b | 0x80 | 0x83 | 0xc0 | 0xc1 | 0xc6 => (true, 1),
            0x69 | 0x81 | 0xc7 => (true, word_bytes),
            0xf6 => (true, usize::from(tests())),
            0xf7 => (true, if tests() { word_bytes } else { 0 }),
            _ => return None,
        })
    }

    /// Returns the effect on `eax`. `operands` begins behind the opcode; its first `operand_bytes`
    /// are the `ModRM` byte with its SIB byte and displacement.
    fn effect(&self, operands: &[u8], operand_bytes: usize) -> Effect {
        if self.is_vector {
            return Effect::Unknown;
        }
        let modrm = operands.first().copied().unwrap_or(0xff);
        match self.map {
            Map::OneByte => self.effect_one_byte(modrm, operands.get(operand_bytes..)),
            Map::TwoBytes if matches!(self.byte, 0x1f | 0x80..=0x8f) => Effect::Keeps,
            _ => self.effect_of_operands(modrm),
        }
    }

    /// Returns the effect of an opcode of one byte. `immediate` follows the operands, if it was
    /// read.
    fn effect_one_byte(&self, modrm: u8, immediate: Option<&[u8]>) -> Effect {
        let number = immediate.and_then(|bytes| bytes.first_chunk());
        let number = number.map_or(Effect::Unknown, |it| Effect::Sets(u32::from_le_bytes(*it)));
        let (is_first, is_word) = (self.rex & REX_B == 0, !self.is_short);
        match self.byte {
            0xb8 if is_first && is_word && self.rex & REX_W == 0 => number,
            0xc7 if is_first && is_word && modrm == 0xc0 => number,
            0x31 | 0x33 if modrm == 0xc0 && self.rex & (REX_R | REX_B) == 0 => Effect::Sets(0),
            0x6a => Effect::Pushes(i32::from(modrm.cast_signed()).cast_unsigned()),
            0x58 if is_first => Effect::Pops,
            0x50..=0x57 | 0x59..=0x5f | 0x70..=0x7f | 0xb9..=0xbf => Effect::Keeps,
            0x90 if is_first => Effect::Keeps,
            0x58 | 0xb8 if !is_first => Effect::Keeps,
            _ => self.effect_of_operands(modrm),
        }
    }

    fn effect_of_operands(&self, modrm: u8) -> Effect {
        let keeps = self.has_operands() && !self.may_write_eax(modrm);
        if keeps { Effect::Keeps } else { Effect::Unknown }
    }

    /// Returns whether at most one register changes, an operand that the `ModRM` byte names.
    fn has_operands(&self) -> bool {
        match self.map {
            Map::OneByte => {
                matches!(self.byte, 0x00..=0x3f if self.byte & 7 < 4)
                    || matches!(self.byte, 0x63 | 0x69 | 0x6b | 0x80..=0x85 | 0x88..=0x8b | 0x8d)
                    || matches!(self.byte, 0xc0 | 0xc1 | 0xc6 | 0xc7)
            }
            Map::TwoBytes => matches!(self.byte, 0x40..=0x4f | 0xaf | 0xb6 | 0xb7 | 0xbe | 0xbf),
            Map::Three38 | Map::Three3A => false,
        }
    }

    /// Returns whether a part of `eax` may be the destination. `eax` has the number 0, `ah` 4.
    fn may_write_eax(&self, modrm: u8) -> bool {
        let is_eax = |number: u8| matches!(number & 7, 0 | 4);
        let is_first = modrm >> 6 == 3 && is_eax(modrm) && self.rex & REX_B == 0;
        let is_second = is_eax(modrm >> 3) && self.rex & REX_R == 0;
        is_first || (is_second && self.register_is_written())
    }

    /// Returns whether the register of the `ModRM` byte's two operands may be the destination.
    fn register_is_written(&self) -> bool {
        match self.map {
            Map::OneByte => {
                matches!(self.byte, 0x00..=0x3f if self.byte & 2 != 0)
                    || matches!(self.byte, 0x63 | 0x69 | 0x6b | 0x8a | 0x8b | 0x8d)
            }
            _ => true,
        }
    }
}

fn vector_map(number: u8) -> Option<Map> {
    match number {
        1 => Some(Map::TwoBytes),
        2 | 5 | 6 => Some(Map::Three38),
        3 => Some(Map::Three3A),
        _ => None,
    }
}

fn shape_two_bytes(byte: u8) -> Option<(bool, usize)> {
    Some(match byte {
        0x05 | 0x0b | 0x31 | 0x77 | 0xa0..=0xa2 | 0xa8 | 0xa9 | 0xc8..=0xcf => (false, 0),
        0x80..=0x8f => (false, 4),
        0x70..=0x73 | 0xa4 | 0xac | 0xba | 0xc2 | 0xc4..=0xc6 => (true, 1),
        0x00..=0x03
        | 0x0d
        | 0x10..=0x1f
        | 0x28..=0x2f
        | 0x40..=0x6f
        | 0x74..=0x7f
        | 0x90..=0x9f
        | 0xa3..=0xc7
        | 0xd0..=0xff => (true, 0),
        _ => return None,
    })
}

/// Returns the length of a `ModRM` byte with its SIB byte and displacement.
fn modrm_bytes(operands: &[u8]) -> Option<usize> {
    let modrm = *operands.first()?;
    let (mode, register) = (modrm >> 6, modrm & 7);
    let has_sib = mode != 3 && register == 4;
    let is_based = !has_sib || operands.get(1)? & 7 != 5;
    let displacement_bytes = match mode {
        0 if register == 5 || !is_based => 4,
        1 => 1,
        2 => 4,
        _ => 0,
    };
    Some(1 + usize::from(has_sib) + displacement_bytes)
}
