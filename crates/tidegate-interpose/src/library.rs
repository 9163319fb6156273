//! Reads a library's file: the libraries that it needs, their search paths, and the symbols that
//! the library defines and refers to.
//!
//! Pure: a caller passes a function that reads the file at an offset. Any bytes have an answer:
//! `None` for a file that is no library of this machine, or that no known linker wrote.

use crate::image::{Elf, HEAD_BYTES, MACHINE, u32_at, u64_at};

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NEEDED: u64 = 1;
const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_STRSZ: u64 = 10;
const DT_RPATH: u64 = 15;
const DT_JMPREL: u64 = 23;
const DT_RUNPATH: u64 = 29;
const SYMBOL_BYTES: usize = 24;
const RELOCATION_BYTES: usize = 24;
/// More than any table of a library has.
const TABLE_BYTES_MAX: u64 = 64 << 20;

/// The entries of a library's dynamic section.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Library {
    /// The names of the libraries that it needs.
    pub needed: Vec<Vec<u8>>,
    /// Directories to search for the needed libraries and their needs. A `runpath` overrides them.
    pub rpath: Vec<u8>,
    /// Directories to search for the needed libraries, behind the environment's directories.
    pub runpath: Vec<u8>,
}

/// The names of symbols.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Symbols {
    /// The symbols that the library defines.
    pub defined: Vec<Vec<u8>>,
    /// The symbols that the dynamic linker looks up for the library.
    pub referred: Vec<Vec<u8>>,
}

/// The dynamic section of a file.
struct Section<R> {
    entries: Vec<(u64, u64)>,
    /// Address, offset and length of each loaded segment.
    segments: Vec<(u64, u64, u64)>,
    names: Vec<u8>,
    read: R,
}

impl Library {
    /// Reads the library in a file; `read` is as for [`classify`](crate::image::classify).
    pub fn of(read: impl FnMut(u64, &mut [u8]) -> usize) -> Option<Self> {
        let section = Section::of(read)?;
        let text = |wanted| section.texts(wanted).next().unwrap_or_default();
        Some(Self {
            needed: section.texts(DT_NEEDED).collect(),
            rpath: text(DT_RPATH),
            runpath: text(DT_RUNPATH),
        })
    }
}

impl Symbols {
    /// Reads the symbols of the library in a file; `read` is as for
    /// [`classify`](crate::image::classify).
    pub fn of(read: impl FnMut(u64, &mut [u8]) -> usize) -> Option<Self> {
        let mut section = Section::of(read)?;
        let (table_at, names_at) = (section.value(DT_SYMTAB)?, section.value(DT_STRTAB)?);
        // The linker puts the names right behind the symbols.
        let table = section.bytes(table_at, names_at.checked_sub(table_at)?)?;
        let symbols: Vec<_> = table.as_chunks::<SYMBOL_BYTES>().0.iter().collect();
        let mut found = Self::default();
        for symbol in &symbols {
            if symbol[6..8] != [0, 0] && symbol[4] >> 4 != 0 {
                found.defined.push(section.text_at(u64::from(u32_at(&symbol[..], 0)?)));
            }
        }
        for (at, len) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let (Some(at), Some(len)) = (section.value(at), section.value(len)) else { continue };
            for relocation in section.bytes(at, len)?.as_chunks::<RELOCATION_BYTES>().0 {
                let number = usize::try_from(u32_at(relocation, 12)?).ok()?;
                if number != 0 {
                    let name = u64::from(u32_at(&symbols.get(number)?[..], 0)?);
                    found.referred.push(section.text_at(name));
                }
            }
        }
        Some(found)
    }
}

impl<R: FnMut(u64, &mut [u8]) -> usize> Section<R> {
    fn of(mut read: R) -> Option<Self> {
        const ELF64_LITTLE: &[u8] = b"\x7fELF\x02\x01";
        let mut head = [0; HEAD_BYTES];
        let len = read(0, &mut head).min(HEAD_BYTES);
        let head = &head[..len];
        if !head.starts_with(ELF64_LITTLE) || head.get(18..20)? != MACHINE.to_le_bytes() {
            return None;
        }
        let mut elf = Elf { head, read };
        let (mut segments, mut dynamic) = (Vec::new(), None);
        for number in elf.program_headers()? {
            let header = elf.program_header(number)?;
            let part = (u64_at(&header, 16)?, u64_at(&header, 8)?, u64_at(&header, 32)?);
            match u32_at(&header, 0)? {
                PT_LOAD => segments.push(part),
                PT_DYNAMIC => dynamic = Some(part),
                _ => {}
            }
        }
        let (address, _, len) = dynamic?;
        let mut this = Self { entries: Vec::new(), segments, names: Vec::new(), read: elf.read };
        let entry = |entry: &[u8; 16]| Some((u64_at(entry, 0)?, u64_at(entry, 8)?));
        let bytes = this.bytes(address, len)?;
        this.entries = bytes.as_chunks().0.iter().filter_map(entry).collect();
        this.names = this.bytes(this.value(DT_STRTAB)?, this.value(DT_STRSZ)?)?;
        Some(this)
    }

    /// Reads `len` bytes at an address of the library.
    fn bytes(&mut self, address: u64, len: u64) -> Option<Vec<u8>> {
        let is_in = |(start, _, bytes): &&(u64, u64, u64)| {
            address.checked_sub(*start).is_some_and(|offset| offset < *bytes)
        };
        let (start, offset, _) = *self.segments.iter().find(is_in)?;
        let len = usize::try_from(len).ok().filter(|_| len <= TABLE_BYTES_MAX)?;
        let mut bytes = vec![0; len];
        let at = offset.checked_add(address - start)?;
        ((self.read)(at, &mut bytes) == len).then_some(bytes)
    }

    fn value(&self, wanted: u64) -> Option<u64> {
        self.entries.iter().find(|(tag, _)| *tag == wanted).map(|(_, value)| *value)
    }

    fn texts(&self, wanted: u64) -> impl Iterator<Item = Vec<u8>> {
        let entries = self.entries.iter().filter(move |(tag, _)| *tag == wanted);
        entries.map(|(_, at)| self.text_at(*at))
    }

    fn text_at(&self, at: u64) -> Vec<u8> {
        let rest = usize::try_from(at).ok().and_then(|at| self.names.get(at..)).unwrap_or_default();
        rest.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(file: &[u8]) -> impl FnMut(u64, &mut [u8]) -> usize {
        |at, out| {
            let from = usize::try_from(at).ok().and_then(|at| file.get(at..)).unwrap_or_default();
            let len = from.len().min(out.len());
            out[..len].copy_from_slice(&from[..len]);
            len
        }
    }

    fn this_test() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn what_a_program_needs_is_found() {
        let file = this_test();
        let library = Library::of(reader(&file)).unwrap();
        assert!(library.needed.iter().any(|name| name == b"libc.so.6"), "{library:?}");
        let symbols = Symbols::of(reader(&file)).unwrap();
        let has = |names: &[Vec<u8>], name: &[u8]| names.iter().any(|found| found == name);
        assert!(has(&symbols.referred, b"dlsym") && !has(&symbols.defined, b"dlsym"));
    }

    #[test]
    fn any_bytes_have_an_answer() {
        let whole = this_test();
        for at in 0..2048 {
            let mut damaged = whole[..(256 << 10).min(whole.len())].to_vec();
            damaged[at] ^= 0xff;
            Library::of(reader(&damaged));
            Symbols::of(reader(&damaged));
        }
        for len in [0, 6, 63, 64, 300, 4096] {
            assert_eq!(Library::of(reader(&whole[..len])), None);
        }
    }
}
