//! Classifies a program's file by its headers: whether the dynamic linker of this libc will load a
//! library into it. [`own_calls`](crate::own_calls) tells from the code whether that library sees
//! the program's system calls.
//!
//! Pure, and without memory from the heap: a caller passes a function that reads the file at an
//! offset. Where in doubt, the answer is a program that cannot be watched, which costs speed only.

use std::ops::Range;

/// The part of a file's beginning that the kernel searches for `#!`.
pub const HEAD_BYTES: usize = 256;

const INTERPRETER_BYTES: usize = 256;
const PROGRAM_HEADER_BYTES: usize = 56;
const SECTION_HEADER_BYTES: usize = 64;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
/// Of a segment's flags: it is code.
const PF_X: u32 = 1;
/// Of a section's flags: it is code.
const SHF_EXECINSTR: u64 = 4;
/// A section without bytes in the file.
const SHT_NOBITS: u32 = 8;
/// More program headers than any linker writes. Further ones are ignored.
const PROGRAM_HEADERS: u16 = 64;
/// Notes and names are read in parts of this size. Only one such part of the notes is searched.
const CHUNK_BYTES: usize = 512;
/// Only so many bytes of the names of sections are searched.
const NAMES_BYTES_MAX: u64 = 64 << 10;
/// The section with the version of Go, in a table of names.
const GO_SECTION: &[u8] = b".go.buildinfo\0";

#[cfg(target_arch = "x86_64")]
pub(crate) const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
pub(crate) const MACHINE: u16 = 183;

/// A file as `execve` would see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Image {
    /// Its dynamic linker is this libc's: it can load the library.
    Dynamic,
    /// It has no dynamic linker: it runs without the library, as may the programs that it starts.
    Static,
    /// A Go program: its system calls bypass the C library, even if it loads one.
    Go,
    /// It uses another libc, whose linker may fail on the library.
    OtherLibc,
    /// It has another class, byte order or architecture.
    OtherMachine,
    /// An executable whose headers lie outside of the file, or are longer than any known ones.
    Malformed,
    /// A script; the range of the interpreter's path in the head.
    Script(Range<usize>),
    /// Neither program nor script, or a script without an interpreter: `execve` refuses it, and
    /// `execvp` gives it to the shell.
    Text,
}

/// Classifies the file that begins with `head`: its first [`HEAD_BYTES`], or a shorter file whole.
/// `read` fills the buffer from an offset of the file and returns how many bytes it got.
pub fn classify(head: &[u8], read: impl FnMut(u64, &mut [u8]) -> usize) -> Image {
    if let Some(line) = head.strip_prefix(b"#!") {
        return interpreter_of_script(line)
            .map_or(Image::Malformed, |at| Image::Script(at.start + 2..at.end + 2));
    }
    if !head.starts_with(b"\x7fELF") {
        return Image::Text;
    }
    Elf { head, read }.classify().unwrap_or(Image::Malformed)
}

/// Finds the interpreter in the line behind `#!`. If the head cuts the line short, the interpreter
/// counts unless the cut may be in its path.
fn interpreter_of_script(line: &[u8]) -> Option<Range<usize>> {
    let end_of_line = line.iter().position(|&byte| byte == b'\n');
    let line = &line[..end_of_line.unwrap_or(line.len())];
    let start = line.iter().position(|byte| !is_blank(*byte))?;
    let blank = line[start..].iter().position(|&byte| is_blank(byte) || byte == 0);
    let end = match (blank, end_of_line) {
        (Some(len), _) => start + len,
        (None, Some(_)) => line.len(),
        (None, None) if line.len() + 2 < HEAD_BYTES => line.len(),
        (None, None) => return None,
    };
    (end > start).then_some(start..end)
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// An executable. Its methods return `None` if it is malformed.
pub(crate) struct Elf<'h, R> {
    pub(crate) head: &'h [u8],
    pub(crate) read: R,
}

impl<R: FnMut(u64, &mut [u8]) -> usize> Elf<'_, R> {
    fn classify(&mut self) -> Option<Image> {
        const ELFCLASS64: u8 = 2;
        const ELFDATA2LSB: u8 = 1;
        let head = self.head;
        let is_64_little = *head.get(4)? == ELFCLASS64 && *head.get(5)? == ELFDATA2LSB;
        if !is_64_little || u16_at(head, 18)? != MACHINE {
            return Some(Image::OtherMachine);
        }
        let mut image = Image::Static;
        for number in self.program_headers()? {
            let header = self.program_header(number)?;
            let (at, len_bytes) = (u64_at(&header, 8)?, u64_at(&header, 32)?);
            match u32_at(&header, 0)? {
                PT_INTERP => image = self.of_linker(at, len_bytes)?,
                PT_NOTE if self.has_go_note(at, len_bytes) => return Some(Image::Go),
                _ => {}
            }
        }
        Some(if self.has_go_section()? { Image::Go } else { image })
    }

    /// Returns the numbers of the program headers.
    pub(crate) fn program_headers(&self) -> Option<Range<u16>> {
        Some(0..u16_at(self.head, 56)?.min(PROGRAM_HEADERS))
    }

    pub(crate) fn program_header(&mut self, number: u16) -> Option<[u8; PROGRAM_HEADER_BYTES]> {
        let (headers_at, header_bytes) = (u64_at(self.head, 32)?, u16_at(self.head, 54)?);
        let mut header = [0; PROGRAM_HEADER_BYTES];
        let at = headers_at.checked_add(u64::from(number) * u64::from(header_bytes))?;
        self.read_whole(at, &mut header)?;
        Some(header)
    }

    /// Returns the range of the file that has code: by its sections, or if none is marked as code,
    /// by the segments, which may have data too. Reads the headers into `memory`.
    pub(crate) fn code(&mut self, memory: &mut [u8]) -> Option<Range<u64>> {
        self.code_of_sections(memory).or_else(|| self.code_of_segments())
    }

    fn code_of_sections(&mut self, memory: &mut [u8]) -> Option<Range<u64>> {
        let head = self.head;
        let header_bytes = usize::from(u16_at(head, 58)?).max(SECTION_HEADER_BYTES);
        let headers = memory.get_mut(..header_bytes * usize::from(u16_at(head, 60)?))?;
        self.read_whole(u64_at(head, 40)?, headers)?;
        let code = headers.chunks_exact(header_bytes).filter_map(|header| {
            let is_code = u64_at(header, 8)? & SHF_EXECINSTR != 0;
            let is_code = is_code && u32_at(header, 4)? != SHT_NOBITS;
            is_code.then_some((u64_at(header, 24)?, u64_at(header, 32)?))
        });
        hull(code)
    }

    fn code_of_segments(&mut self) -> Option<Range<u64>> {
        hull(self.program_headers()?.filter_map(|number| {
            let header = self.program_header(number)?;
            let is_code = u32_at(&header, 0)? == PT_LOAD && u32_at(&header, 4)? & PF_X != 0;
            is_code.then_some((u64_at(&header, 8)?, u64_at(&header, 32)?))
        }))
    }

    fn read_whole(&mut self, at: u64, out: &mut [u8]) -> Option<()> {
        ((self.read)(at, out) == out.len()).then_some(())
    }

    /// Classifies the program by the path of its dynamic linker, which the file has at offset `at`.
    fn of_linker(&mut self, at: u64, len_bytes: u64) -> Option<Image> {
        let mut path = [0; INTERPRETER_BYTES];
        let space = path.get_mut(..usize::try_from(len_bytes).ok()?)?;
        self.read_whole(at, space)?;
        let path = space.strip_suffix(b"\0").filter(|path| !path.is_empty())?;
        Some(if is_our_linker(path) { Image::Dynamic } else { Image::OtherLibc })
    }

    /// Returns whether the file has the note that Go's linker leaves.
    fn has_go_note(&mut self, at: u64, len_bytes: u64) -> bool {
        let mut notes = [0; CHUNK_BYTES];
        let len = usize::try_from(len_bytes).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let read_bytes = (self.read)(at, &mut notes[..len]).min(len);
        let mut rest = &notes[..read_bytes];
        while let (Some(name_bytes), Some(data_bytes)) = (u32_at(rest, 0), u32_at(rest, 4)) {
            if rest.get(12..16) == Some(b"Go\0\0") {
                return true;
            }
            let padded = |bytes: u32| u64::from(bytes).next_multiple_of(4);
            let next = usize::try_from(12 + padded(name_bytes) + padded(data_bytes));
            rest = next.ok().and_then(|next| rest.get(next..)).unwrap_or_default();
        }
        false
    }

    /// Finds the section with the version of Go, for files whose note was stripped.
    fn has_go_section(&mut self) -> Option<bool> {
        let head = self.head;
        let (headers_at, header_bytes) = (u64_at(head, 40)?, u16_at(head, 58)?);
        let (sections, names) = (u16_at(head, 60)?, u16_at(head, 62)?);
        if headers_at == 0 || names >= sections {
            return Some(false);
        }
        let mut header = [0; SECTION_HEADER_BYTES];
        let at = headers_at.checked_add(u64::from(names) * u64::from(header_bytes))?;
        self.read_whole(at, &mut header)?;
        let (at, len_bytes) = (u64_at(&header, 24)?, u64_at(&header, 32)?);
        self.has_name(at..at.checked_add(len_bytes.min(NAMES_BYTES_MAX))?, GO_SECTION)
    }

    /// Searches a table of names for `name`. Chunks overlap, so that no name is missed at a border.
    fn has_name(&mut self, table: Range<u64>, name: &[u8]) -> Option<bool> {
        let mut at = table.start;
        while at < table.end {
            let mut chunk = [0; CHUNK_BYTES];
            let len = usize::try_from(table.end - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            self.read_whole(at, &mut chunk[..len])?;
            if chunk[..len].windows(name.len()).any(|part| part == name) {
                return Some(true);
            }
            let is_last = len < CHUNK_BYTES;
            at += if is_last { len as u64 } else { (CHUNK_BYTES - name.len() + 1) as u64 };
        }
        Some(false)
    }
}

/// Returns the range from the first of these parts, by offset and length, to the last one.
fn hull(parts: impl Iterator<Item = (u64, u64)>) -> Option<Range<u64>> {
    let ranges = parts.map(|(at, len_bytes)| at..at.saturating_add(len_bytes));
    ranges.reduce(|all, part| all.start.min(part.start)..all.end.max(part.end))
}

/// Recognizes glibc's linker, `ld-linux*` on all machines; musl has `ld-musl-*`, Android
/// `linker64`.
fn is_our_linker(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    name.starts_with(b"ld-linux")
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads the number at offset `at`; `None` where `bytes` end before.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads the number at offset `at`; `None` where `bytes` end before.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(file: &[u8]) -> Image {
        classify(&file[..file.len().min(HEAD_BYTES)], |at, out| {
            let from = file.get(usize::try_from(at).unwrap()..).unwrap_or_default();
            let len = from.len().min(out.len());
            out[..len].copy_from_slice(&from[..len]);
            len
        })
    }

    /// Makes an executable with one other program header, and one for `interpreter` if it is given.
    fn elf(machine: u16, interpreter: Option<&[u8]>) -> Vec<u8> {
        let mut file = vec![0; 64 + 2 * PROGRAM_HEADER_BYTES];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[18..20].copy_from_slice(&machine.to_le_bytes());
        file[32..40].copy_from_slice(&64_u64.to_le_bytes());
        file[54..56].copy_from_slice(&56_u16.to_le_bytes());
        file[56..58].copy_from_slice(&2_u16.to_le_bytes());
        file[64..68].copy_from_slice(&6_u32.to_le_bytes());
        if let Some(path) = interpreter {
            let at = 1000_u64;
            file[120..124].copy_from_slice(&PT_INTERP.to_le_bytes());
            file[128..136].copy_from_slice(&at.to_le_bytes());
            file[152..160].copy_from_slice(&(path.len() as u64).to_le_bytes());
            file.resize(1000, 0);
            file.extend_from_slice(path);
        }
        file
    }

    #[test]
    fn executables_are_told_by_their_linker() {
        assert_eq!(judge(&elf(MACHINE, Some(GLIBC))), Image::Dynamic);
        assert_eq!(
            judge(&elf(MACHINE, Some(b"/nix/store/x/lib/ld-linux-aarch64.so.1\0"))),
            Image::Dynamic
        );
        assert_eq!(judge(&elf(MACHINE, Some(b"/lib/ld-musl-x86_64.so.1\0"))), Image::OtherLibc);
        assert_eq!(judge(&elf(MACHINE, None)), Image::Static);
        assert_eq!(judge(&elf(MACHINE + 1, Some(GLIBC))), Image::OtherMachine);
    }

    const GLIBC: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";

    /// Makes an executable with notes in its first segment, and the linker of this libc.
    fn with_notes(names: &[&[u8; 4]]) -> Vec<u8> {
        let mut file = elf(MACHINE, Some(GLIBC));
        let note = |name: &&[u8; 4]| {
            [&[4, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0], &name[..], b"id\0\0"].concat()
        };
        let notes: Vec<u8> = names.iter().flat_map(note).collect();
        file[64..68].copy_from_slice(&PT_NOTE.to_le_bytes());
        let at = file.len() as u64;
        file[72..80].copy_from_slice(&at.to_le_bytes());
        file[96..104].copy_from_slice(&(notes.len() as u64).to_le_bytes());
        file.extend(notes);
        file
    }

    /// Makes an executable with two sections. The second one contains their names.
    fn with_section_names(names: &[u8]) -> Vec<u8> {
        let mut file = elf(MACHINE, Some(GLIBC));
        let sections_at = file.len();
        file[40..48].copy_from_slice(&(sections_at as u64).to_le_bytes());
        file[58..64].copy_from_slice(&[64, 0, 2, 0, 1, 0]);
        file.resize(sections_at + 2 * SECTION_HEADER_BYTES, 0);
        let header = sections_at + SECTION_HEADER_BYTES;
        let names_at = file.len() as u64;
        file[header + 24..header + 32].copy_from_slice(&names_at.to_le_bytes());
        file[header + 32..header + 40].copy_from_slice(&(names.len() as u64).to_le_bytes());
        file.extend_from_slice(names);
        file
    }

    #[test]
    fn a_go_program_is_told_by_its_note_whatever_its_linker_is() {
        assert_eq!(judge(&with_notes(&[b"GNU\0", b"Go\0\0"])), Image::Go);
        assert_eq!(judge(&with_notes(&[b"GNU\0"])), Image::Dynamic);
    }

    #[test]
    fn a_go_program_without_its_note_is_told_by_its_section() {
        for before in [0, 1, 490, 500, 511, 5_000] {
            let names = [&vec![b'x'; before][..], b"\0.go.buildinfo\0.text\0"].concat();
            assert_eq!(judge(&with_section_names(&names)), Image::Go, "{before} bytes before");
        }
        assert_eq!(judge(&with_section_names(b"\0.text\0.go.build\0")), Image::Dynamic);
        let cut = with_section_names(b"\0.text\0");
        assert_eq!(judge(&cut[..cut.len() - 1]), Image::Malformed);
    }

    #[test]
    fn damaged_executables_are_malformed() {
        let whole = elf(MACHINE, Some(GLIBC));
        for len in 4..whole.len() {
            assert_eq!(judge(&whole[..len]), Image::Malformed, "cut at {len}");
        }
        for (at, value) in [(33, 0xff), (39, 0xff), (135, 0xff), (153, 0xff)] {
            let mut damaged = whole.clone();
            damaged[at] = value;
            assert_eq!(judge(&damaged), Image::Malformed, "byte {at}");
        }
        for (at, value) in [(4, 1), (5, 2)] {
            let mut other = whole.clone();
            other[at] = value;
            assert_eq!(judge(&other), Image::OtherMachine, "byte {at}");
        }
    }

    #[test]
    fn this_test_is_dynamic() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(judge(&file), Image::Dynamic);
    }

    #[test]
    fn scripts_name_their_interpreter() {
        let cases: [(&[u8], Option<&[u8]>); 8] = [
            (b"#!/bin/sh\necho", Some(b"/bin/sh")),
            (b"#! \t/usr/bin/env python3\n", Some(b"/usr/bin/env")),
            (b"#!/bin/sh", Some(b"/bin/sh")),
            (b"#!\n/bin/sh", None),
            (b"#!", None),
            (b"#!  \n", None),
            (b"#!/bin/sh\t-e\n", Some(b"/bin/sh")),
            (b"#!/x", Some(b"/x")),
        ];
        for (file, interpreter) in cases {
            match (judge(file), interpreter) {
                (Image::Script(at), Some(path)) => assert_eq!(&file[at], path),
                (image, None) => assert_eq!(image, Image::Malformed),
                (image, Some(_)) => panic!("{image:?} of {file:?}"),
            }
        }
    }

    #[test]
    fn an_interpreter_that_the_head_cuts_is_unknown() {
        let mut long = b"#!/".to_vec();
        long.resize(HEAD_BYTES + 10, b'x');
        long.push(b'\n');
        assert_eq!(judge(&long), Image::Malformed);
    }

    #[test]
    fn the_rest_is_text() {
        assert_eq!(judge(b"echo hello\n"), Image::Text);
        assert_eq!(judge(b""), Image::Text);
    }
}
