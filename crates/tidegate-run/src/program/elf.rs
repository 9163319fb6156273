//! How an ELF program is linked, from its headers alone.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub(super) const MAGIC: &[u8] = b"\x7fELF";

const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const SECTION_HEADER_BYTES: usize = 64;
const CLASS_64: u8 = 2;
/// Byte order as `EI_DATA` has it.
const LITTLE_ENDIAN: u8 = 1;
const INTERPRETER: u32 = 3;
const NOTE: u32 = 4;
/// Notes and names beyond this many bytes are not looked at.
const MOST_BYTES: u64 = 64 << 10;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// How a program reaches its C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Linking {
    /// Through glibc's loader, which loads the preload library too.
    Dynamic,
    /// Not at all: there is no loader.
    Static,
    /// It is a Go program: system calls go around the C library even where there is one.
    Go,
    /// Through the loader of musl or another library.
    OtherLibc,
    /// It is of another class, byte order or architecture.
    OtherMachine,
}

/// How the program in `file` is linked.
///
/// # Errors
/// It cannot be read, or its headers lie outside of it.
pub(super) fn linking(file: &File) -> io::Result<Linking> {
    let header = bytes_at(file, 0, HEADER_BYTES as u64)?;
    if header[4] != CLASS_64 || header[5] != LITTLE_ENDIAN || u16_at(&header, 18) != MACHINE {
        return Ok(Linking::OtherMachine);
    }
    let segments = table(file, &header, (32, 54, 56), PROGRAM_HEADER_BYTES)?;
    let mut loader = None;
    for segment in segments.chunks_exact(PROGRAM_HEADER_BYTES) {
        let place = (u64_at(segment, 8), u64_at(segment, 32));
        match u32_at(segment, 0) {
            NOTE if has_go_note(&bytes_at(file, place.0, place.1)?) => return Ok(Linking::Go),
            INTERPRETER => loader = Some(bytes_at(file, place.0, place.1)?),
            _ => {}
        }
    }
    if has_go_section(file, &header)? {
        return Ok(Linking::Go);
    }
    Ok(match loader {
        None => Linking::Static,
        Some(path) if is_glibc(&path) => Linking::Dynamic,
        Some(_) => Linking::OtherLibc,
    })
}

/// The loader's name is glibc's: `ld-linux-x86-64.so.2`, `ld-linux-aarch64.so.1`, or a symbolic
/// name like `ld.so`.
fn is_glibc(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    name.starts_with(b"ld-linux") || name.starts_with(b"ld.so") || name.starts_with(b"ld-2.")
}

/// A table of headers: its offset, the size of an entry and their number are at `fields` of the
/// file's header.
fn table(
    file: &File,
    header: &[u8],
    fields: (usize, usize, usize),
    entry_bytes: usize,
) -> io::Result<Vec<u8>> {
    let (offset, size) = (u64_at(header, fields.0), u16_at(header, fields.1));
    let count = u16_at(header, fields.2);
    if count == 0 {
        return Ok(Vec::new());
    }
    if usize::from(size) != entry_bytes {
        return Err(malformed());
    }
    bytes_at(file, offset, u64::from(count) * entry_bytes as u64)
}

/// The linker of Go leaves a note with its build's name.
fn has_go_note(notes: &[u8]) -> bool {
    let mut rest = notes;
    while let Some(header) = rest.get(..12) {
        let name_bytes = u64::from(u32_at(header, 0)).next_multiple_of(4);
        let data_bytes = u64::from(u32_at(header, 4)).next_multiple_of(4);
        if rest.get(12..16) == Some(b"Go\0\0") {
            return true;
        }
        let next = usize::try_from(12 + name_bytes + data_bytes).unwrap_or(usize::MAX);
        rest = rest.get(next..).unwrap_or_default();
    }
    false
}

/// Where the note was stripped: the section with the version of Go.
fn has_go_section(file: &File, header: &[u8]) -> io::Result<bool> {
    let sections = table(file, header, (40, 58, 60), SECTION_HEADER_BYTES)?;
    let names = usize::from(u16_at(header, 62));
    let Some(names) = sections.chunks_exact(SECTION_HEADER_BYTES).nth(names) else {
        return Ok(false);
    };
    let names = bytes_at(file, u64_at(names, 24), u64_at(names, 32))?;
    Ok(names.split(|byte| *byte == 0).any(|name| name == b".go.buildinfo"))
}

fn bytes_at(file: &File, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len.min(MOST_BYTES)).map_err(|_| malformed())?];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its ELF headers are malformed")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// `N` bytes at `at`, zeroes behind the end.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with one segment of `kind` that holds `content`.
    fn program(machine: u16, kind: u32, content: &[u8]) -> File {
        let mut bytes = vec![0; HEADER_BYTES + PROGRAM_HEADER_BYTES];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&1_u16.to_le_bytes());
        let segment = &mut bytes[HEADER_BYTES..];
        segment[..4].copy_from_slice(&kind.to_le_bytes());
        segment[8..16].copy_from_slice(&120_u64.to_le_bytes());
        segment[32..40].copy_from_slice(&(content.len() as u64).to_le_bytes());
        bytes.extend_from_slice(content);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    #[test]
    fn the_loader_tells_the_library() {
        let with = |loader: &[u8]| linking(&program(MACHINE, INTERPRETER, loader)).unwrap();
        assert_eq!(with(b"/lib64/ld-linux-x86-64.so.2\0"), Linking::Dynamic);
        assert_eq!(with(b"/lib/ld-musl-x86_64.so.1\0"), Linking::OtherLibc);
        assert_eq!(linking(&program(MACHINE, 1, b"")).unwrap(), Linking::Static);
        assert_eq!(linking(&program(3, INTERPRETER, b"x")).unwrap(), Linking::OtherMachine);
    }

    #[test]
    fn go_is_told_by_its_note() {
        let note =
            |name: &[u8; 4]| [&[4, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0], &name[..], b"id\0\0"].concat();
        let both = [note(b"GNU\0"), note(b"Go\0\0")].concat();
        assert_eq!(linking(&program(MACHINE, NOTE, &both)).unwrap(), Linking::Go);
        assert_eq!(linking(&program(MACHINE, NOTE, &note(b"GNU\0"))).unwrap(), Linking::Static);
    }

    #[test]
    fn headers_that_lie_outside_are_an_error() {
        let file = program(MACHINE, INTERPRETER, b"x");
        file.write_all_at(&u64::MAX.to_le_bytes(), 32).unwrap();
        assert!(linking(&file).is_err());
        file.set_len(10).unwrap();
        assert!(linking(&file).is_err());
    }
}
