//! What kind of program a file is: whether the dynamic linker of this libc will load the library
//! into it.
//!
//! Pure: a file is something that reads at an offset. Where in doubt the answer is
//! [`Image::Foreign`], which costs speed only.

use std::ops::Range;

/// How much of a file's beginning the kernel looks at for `#!`.
pub(crate) const HEAD_BYTES: usize = 256;

const INTERPRETER_BYTES: usize = 256;
const PROGRAM_HEADER_BYTES: usize = 56;
const PT_INTERP: u32 = 3;
/// More program headers than any linker writes: the rest is not looked at.
const PROGRAM_HEADERS: u16 = 64;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// A file as `execve` would see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Image {
    /// Its dynamic linker is this libc's: it will have the library.
    Preloadable,
    /// Static: it runs without, and so may what it starts run with it.
    Unlinked,
    /// Of another libc or another machine, or unknown: its linker may stumble over the library.
    Foreign,
    /// A script; the interpreter's path is at this place of the head.
    Script(Range<usize>),
    /// Neither program nor script: `execve` refuses it, `execvp` gives it to the shell.
    Text,
}

/// `read` fills the buffer from an offset of the file and returns how many bytes it got.
pub(crate) fn classify(head: &[u8], mut read: impl FnMut(u64, &mut [u8]) -> usize) -> Image {
    if let Some(line) = head.strip_prefix(b"#!") {
        return interpreter_of_script(line)
            .map_or(Image::Foreign, |at| Image::Script(at.start + 2..at.end + 2));
    }
    if !head.starts_with(b"\x7fELF") {
        return Image::Text;
    }
    let mut interpreter = [0; INTERPRETER_BYTES];
    match interpreter_of_elf(head, &mut read, &mut interpreter) {
        Some(b"") => Image::Unlinked,
        Some(path) if is_our_linker(path) => Image::Preloadable,
        Some(_) | None => Image::Foreign,
    }
}

/// The interpreter in what follows `#!`. A line that the head cuts short still has one, unless the
/// cut may be in it.
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

/// The path in `PT_INTERP` of an executable for this machine, empty if it has none; `None` where
/// the file is damaged or for another machine.
fn interpreter_of_elf<'a>(
    head: &[u8],
    read: &mut impl FnMut(u64, &mut [u8]) -> usize,
    path: &'a mut [u8; INTERPRETER_BYTES],
) -> Option<&'a [u8]> {
    const ELFCLASS64: u8 = 2;
    const ELFDATA2LSB: u8 = 1;
    if *head.get(4)? != ELFCLASS64 || *head.get(5)? != ELFDATA2LSB || u16_at(head, 18)? != MACHINE {
        return None;
    }
    let headers_at = u64_at(head, 32)?;
    let header_bytes = u16_at(head, 54)?;
    let headers = u16_at(head, 56)?.min(PROGRAM_HEADERS);
    for number in 0..headers {
        let mut header = [0; PROGRAM_HEADER_BYTES];
        let at = headers_at.checked_add(u64::from(number) * u64::from(header_bytes))?;
        if read(at, &mut header) < PROGRAM_HEADER_BYTES {
            return None;
        }
        if u32_at(&header, 0)? == PT_INTERP {
            let len_bytes = usize::try_from(u64_at(&header, 32)?).ok()?;
            let space = path.get_mut(..len_bytes)?;
            if read(u64_at(&header, 8)?, space) < len_bytes {
                return None;
            }
            return space.strip_suffix(b"\0").filter(|path| !path.is_empty());
        }
    }
    Some(b"")
}

/// glibc calls its linker so on every machine; musl's is `ld-musl-*`, Android's `linker64`.
fn is_our_linker(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    name.starts_with(b"ld-linux")
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
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

    /// An executable with one other program header, and one that names `interpreter` where there is
    /// one.
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
        assert_eq!(
            judge(&elf(MACHINE, Some(b"/lib64/ld-linux-x86-64.so.2\0"))),
            Image::Preloadable
        );
        assert_eq!(
            judge(&elf(MACHINE, Some(b"/nix/store/x/lib/ld-linux-aarch64.so.1\0"))),
            Image::Preloadable
        );
        assert_eq!(judge(&elf(MACHINE, Some(b"/lib/ld-musl-x86_64.so.1\0"))), Image::Foreign);
        assert_eq!(judge(&elf(MACHINE, None)), Image::Unlinked);
        assert_eq!(
            judge(&elf(MACHINE + 1, Some(b"/lib64/ld-linux-x86-64.so.2\0"))),
            Image::Foreign
        );
    }

    #[test]
    fn damaged_executables_are_foreign() {
        let whole = elf(MACHINE, Some(b"/lib64/ld-linux-x86-64.so.2\0"));
        for len in 4..whole.len() {
            assert_eq!(judge(&whole[..len]), Image::Foreign, "cut at {len}");
        }
        for (at, value) in [(4, 1), (5, 2), (33, 0xff), (39, 0xff), (135, 0xff), (153, 0xff)] {
            let mut damaged = whole.clone();
            damaged[at] = value;
            assert_eq!(judge(&damaged), Image::Foreign, "byte {at}");
        }
    }

    #[test]
    fn this_test_is_preloadable() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(judge(&file), Image::Preloadable);
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
                (image, None) => assert_eq!(image, Image::Foreign),
                (image, Some(_)) => panic!("{image:?} of {file:?}"),
            }
        }
    }

    #[test]
    fn an_interpreter_that_the_head_cuts_is_unknown() {
        let mut long = b"#!/".to_vec();
        long.resize(HEAD_BYTES + 10, b'x');
        long.push(b'\n');
        assert_eq!(judge(&long), Image::Foreign);
    }

    #[test]
    fn the_rest_is_text() {
        assert_eq!(judge(b"echo hello\n"), Image::Text);
        assert_eq!(judge(b""), Image::Text);
    }
}
