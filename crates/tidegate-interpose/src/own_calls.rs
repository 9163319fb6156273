//! Finds programs and libraries that make system calls by instructions of their own. A library that
//! stands in front of the C library's functions does not see such calls.
//!
//! Programs of Rust make them by the crate `rustix`, and so may hand-written code. Only
//! instructions of the file itself count; each library is examined by itself. A call does not count
//! if its number is loaded before it, and such a library need not know of that call's effects. A
//! call of unknown number counts.
//!
//! The bytes of a system call instruction of x86-64 also occur inside of other instructions, some
//! times in ten megabytes. So the code before them is decoded, from several starting points: a
//! decoder that begins in the middle of an instruction soon gets in step with the others.
//!
//! Pure, and without memory from the heap, as [`image`](crate::image).

use std::ffi::c_long;
use std::ops::Range;

use crate::image::Elf;

/// System calls that change no file, no name, no descriptor, no program and no rights. Allocators
/// map memory by their own `mmap`. `io_uring_enter` needs a ring, and the system call that makes a
/// ring is not in this list.
const HARMLESS: [c_long; 58] = [
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_brk,
    libc::SYS_mbind,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_getcpu,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_io_uring_enter,
];

/// The code before a call that is decoded.
const BEFORE_BYTES: usize = 64;
/// The shortest buffer for [`makes_own_calls`].
pub const MEMORY_BYTES_MIN: usize = 4 * BEFORE_BYTES;

/// Returns whether the program makes system calls of its own that count. The program is
/// [`Dynamic`](crate::image::Image::Dynamic) and begins with `head`; `read` is as for
/// [`classify`](crate::image::classify). The code is read into `memory`, of at least
/// [`MEMORY_BYTES_MIN`]; 256 KiB are fast. With less memory the answer is `true`.
pub fn makes_own_calls(
    head: &[u8],
    read: impl FnMut(u64, &mut [u8]) -> usize,
    memory: &mut [u8],
) -> bool {
    if memory.len() < MEMORY_BYTES_MIN {
        return true;
    }
    let mut elf = Elf { head, read };
    elf.code(memory).is_some_and(|code| has_calls(code, elf.read, memory))
}

/// Returns whether this part of the file has such calls. Behind the file's end there is no code.
fn has_calls(
    code: Range<u64>,
    mut read: impl FnMut(u64, &mut [u8]) -> usize,
    memory: &mut [u8],
) -> bool {
    let mut at = code.start;
    // The code before the first new instruction is read again, but its calls were judged before.
    let mut seen_bytes = 0;
    while at < code.end {
        let len = usize::try_from(code.end - at).unwrap_or(usize::MAX).min(memory.len());
        let read_bytes = read(at, &mut memory[..len]).min(len);
        if machine::calls(&memory[..read_bytes], seen_bytes).any(|is_harmless| !is_harmless) {
            return true;
        }
        if read_bytes < memory.len() {
            break;
        }
        seen_bytes = BEFORE_BYTES;
        at += (read_bytes - BEFORE_BYTES - machine::CALL_BYTES_MORE) as u64;
    }
    false
}

fn is_harmless(number: u32) -> bool {
    HARMLESS.contains(&c_long::from(number))
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use memchr::memmem;

    use super::{BEFORE_BYTES, is_harmless};
    use crate::instruction::{Effect, instruction};

    /// `syscall`.
    const CALL: [u8; 2] = [0x0f, 0x05];
    /// The bytes that the end of a part may cut off of a call.
    pub(super) const CALL_BYTES_MORE: usize = CALL.len() - 1;

    /// Returns for each call of this code, from `seen_bytes` on, whether it is harmless.
    pub(super) fn calls(code: &[u8], seen_bytes: usize) -> impl Iterator<Item = bool> {
        let places = memmem::find_iter(code, &CALL).filter(move |&at| at >= seen_bytes);
        places.filter_map(|at| judge(&code[at.saturating_sub(BEFORE_BYTES)..at + CALL.len()]))
    }

    /// Where the instructions from some byte on lead.
    enum Way {
        /// To the call, with its number if it is known.
        Call(Option<u32>),
        /// Over the call: its bytes belong to another instruction.
        Other,
        /// To bytes that are no instruction.
        Lost,
    }

    /// Returns whether the call at this code's end is harmless; `None` if it is no instruction.
    fn judge(code: &[u8]) -> Option<bool> {
        let (mut calls, mut others, mut harmless) = (0, 0, 0);
        for start in 0..=(code.len() - CALL.len()) / 2 {
            match follow(&code[start..]) {
                Way::Call(number) => {
                    calls += 1;
                    harmless += usize::from(number.is_some_and(is_harmless));
                }
                Way::Other => others += 1,
                Way::Lost => {}
            }
        }
        // Near the beginning of the code there are too few bytes before the call for a vote.
        let is_short = code.len() < BEFORE_BYTES + CALL.len();
        (calls > 0 && (is_short || calls >= others)).then_some(harmless == calls)
    }

    fn follow(code: &[u8]) -> Way {
        let call_at = code.len() - CALL.len();
        let (mut at, mut number, mut pushed) = (0, None, None);
        while at < call_at {
            let Some(next) = instruction(&code[at..]) else { return Way::Lost };
            at += next.len_bytes;
            let top = pushed.take();
            match next.effect {
                Effect::Sets(value) => number = Some(value),
                Effect::Pushes(value) => pushed = Some(value),
                Effect::Pops => number = top,
                Effect::Keeps => {}
                Effect::Unknown => number = None,
            }
        }
        if at == call_at { Way::Call(number) } else { Way::Other }
    }
}

#[cfg(target_arch = "aarch64")]
mod machine {
    use super::{BEFORE_BYTES, is_harmless};
    use memchr::memmem;

    /// `svc #0`.
    const CALL: [u8; 4] = 0xd400_0001_u32.to_le_bytes();
    /// The bytes that the end of a part may cut off of a call: none, as all are aligned.
    pub(super) const CALL_BYTES_MORE: usize = 0;

    /// Returns for each call of this code, from `seen_bytes` on, whether it is harmless. The last
    /// `mov` to `x8` gives its number.
    pub(super) fn calls(code: &[u8], seen_bytes: usize) -> impl Iterator<Item = bool> {
        let places = memmem::find_iter(code, &CALL);
        places.filter(move |&at| at >= seen_bytes && at % CALL.len() == 0).map(|at| {
            let before = code[at.saturating_sub(BEFORE_BYTES)..at].as_chunks().0;
            let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
            before.iter().rev().find_map(|bytes| number_of(word(bytes))).is_some_and(is_harmless)
        })
    }

    /// Returns the number that a `movz w8` or `movz x8` loads.
    fn number_of(word: u32) -> Option<u32> {
        (word & 0x7fe0_001f == 0x5280_0008).then_some(word >> 5 & 0xffff)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    const CALL: [u8; 2] = [0x0f, 0x05];
    const RETURN: u8 = 0xc3;
    const CODE_AT: usize = 4096;
    /// Typical code: `push rbp; mov rbp, rsp; sub rsp, 16; mov [rbp-8], rdi; leave; ret`.
    const OTHER: [u8; 14] =
        [0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x10, 0x48, 0x89, 0x7d, 0xf8, 0xc9, 0xc3];

    fn number(call: c_long) -> [u8; 4] {
        u32::try_from(call).unwrap().to_le_bytes()
    }

    /// `mov eax, number`.
    fn load(call: c_long) -> Vec<u8> {
        [&[0xb8][..], &number(call)].concat()
    }

    /// A program header of a segment with these flags.
    fn segment(flags: u32, at: usize, len_bytes: usize) -> Vec<u8> {
        let mut header = vec![0; 56];
        header[..4].copy_from_slice(&1_u32.to_le_bytes());
        header[4..8].copy_from_slice(&flags.to_le_bytes());
        header[8..16].copy_from_slice(&(at as u64).to_le_bytes());
        header[32..40].copy_from_slice(&(len_bytes as u64).to_le_bytes());
        header
    }

    /// Makes a program with this code in a segment with these flags, behind a segment of data.
    fn with_flags(flags: u32, code: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[32..40].copy_from_slice(&64_u64.to_le_bytes());
        file[54..58].copy_from_slice(&[56, 0, 2, 0]);
        file.extend(segment(4, 0, CODE_AT));
        file.extend(segment(flags, CODE_AT, code.len()));
        file.resize(CODE_AT, 0x90);
        file.extend(code);
        file
    }

    fn program(code: &[u8]) -> Vec<u8> {
        with_flags(5, code)
    }

    fn judge_by(file: &[u8], memory_bytes: usize) -> bool {
        let head = &file[..file.len().min(crate::image::HEAD_BYTES)];
        let read = |at, out: &mut [u8]| {
            let from = usize::try_from(at).ok().and_then(|at| file.get(at..)).unwrap_or_default();
            let len = from.len().min(out.len());
            out[..len].copy_from_slice(&from[..len]);
            len
        };
        makes_own_calls(head, read, &mut vec![0; memory_bytes])
    }

    fn judge(code: &[u8]) -> bool {
        judge_by(&program(&[&OTHER.repeat(9)[..], code, &[RETURN]].concat()), 64 << 10)
    }

    #[test]
    fn a_call_that_changes_files_is_found_however_its_number_is_loaded() {
        let rename = number(libc::SYS_renameat2);
        let arguments = [0x4c, 0x89, 0xe6, 0x31, 0xd2, 0x6a, 4, 0x41, 0x5a];
        for load in [
            load(libc::SYS_renameat2),
            load(libc::SYS_execve),
            // `mov rax, number`
            [&[0x48, 0xc7, 0xc0][..], &rename].concat(),
            // `push number; pop rax`
            vec![0x6a, u8::try_from(libc::SYS_fsync).unwrap(), 0x58],
            // From a register that holds an earlier number; from the stack; from a call's result.
            vec![0x48, 0x89, 0xe8],
            vec![0x48, 0x8b, 0x44, 0x24, 0x10],
            [&load(libc::SYS_gettid)[..], &[0xe8, 0, 0, 0, 0]].concat(),
            // The last one counts.
            [load(libc::SYS_gettid), load(libc::SYS_fsync)].concat(),
            vec![],
        ] {
            assert!(judge(&[&load[..], &CALL].concat()), "{load:02x?}");
            assert!(judge(&[&load[..], &arguments, &CALL].concat()), "{load:02x?}, arguments");
        }
    }

    #[test]
    fn a_call_that_changes_nothing_does_not_count() {
        let between = [0x4c, 0x89, 0xe7, 0x31, 0xf6, 0x48, 0x8d, 0x54, 0x24, 8];
        for load in [
            load(libc::SYS_gettid),
            load(libc::SYS_io_uring_enter),
            [&[0x48, 0xc7, 0xc0][..], &number(libc::SYS_rt_sigprocmask)].concat(),
            vec![0x6a, u8::try_from(libc::SYS_getpid).unwrap(), 0x58],
            // `xor eax, eax`: `read`.
            vec![0x31, 0xc0],
            [load(libc::SYS_fsync), load(libc::SYS_gettid)].concat(),
        ] {
            assert!(!judge(&[&load[..], &CALL].concat()), "{load:02x?}");
            assert!(!judge(&[&load[..], &between, &CALL].concat()), "{load:02x?}, others between");
        }
    }

    /// Compilers load 1, the number of `write`, everywhere.
    #[test]
    fn the_bytes_of_a_call_inside_of_another_instruction_are_none() {
        for other in [
            // `mov rax, [rip+0x50f]`, `je +0x50f`, `mov ecx, 0x50f0000`, `movups xmm0, [rip+0x50f]`
            &[0x48, 0x8b, 0x05, 0x0f, 0x05, 0, 0][..],
            &[0x0f, 0x84, 0x0f, 0x05, 0, 0],
            &[0xb9, 0, 0, 0x0f, 0x05],
            &[0x0f, 0x10, 0x05, 0x0f, 0x05, 0, 0],
        ] {
            assert!(!judge(other), "{other:02x?}");
            let behind = [&load(libc::SYS_write)[..], other, &OTHER].concat();
            assert!(!judge(&behind), "{behind:02x?}");
        }
    }

    #[test]
    fn only_code_is_looked_at() {
        let code = [load(libc::SYS_rename), CALL.to_vec()].concat();
        assert!(judge_by(&with_flags(5, &code), 4096));
        assert!(!judge_by(&with_flags(4, &code), 4096));
    }

    /// Segments may have data behind their code, so sections count if there are any.
    #[test]
    fn sections_tell_what_is_code() {
        let call = [load(libc::SYS_rename), CALL.to_vec()].concat();
        for (code, is_found) in [(0..call.len(), true), (call.len()..64, false)] {
            let mut file = program(&[&call[..], &OTHER.repeat(9)].concat());
            let sections_at = file.len();
            file[40..48].copy_from_slice(&(sections_at as u64).to_le_bytes());
            file[58..62].copy_from_slice(&[64, 0, 2, 0]);
            file.resize(sections_at + 128, 0);
            let section = &mut file[sections_at + 64..];
            section[8..16].copy_from_slice(&6_u64.to_le_bytes());
            section[24..32].copy_from_slice(&((CODE_AT + code.start) as u64).to_le_bytes());
            section[32..40].copy_from_slice(&(code.len() as u64).to_le_bytes());
            assert_eq!(judge_by(&file, 4096), is_found);
        }
    }

    #[test]
    fn calls_at_the_borders_of_what_is_read_at_a_time_are_found() {
        let (found, harmless) = (load(libc::SYS_rename), load(libc::SYS_gettid));
        for (load, is_found) in [(found, true), (harmless, false)] {
            for before in 0..MEMORY_BYTES_MIN * 3 {
                let mut code = vec![0x90; before];
                code.extend(&load);
                code.extend(CALL);
                // At the end, too.
                assert_eq!(judge_by(&program(&code), MEMORY_BYTES_MIN), is_found, "{before}");
                code.resize(code.len() + MEMORY_BYTES_MIN, 0x90);
                assert_eq!(judge_by(&program(&code), MEMORY_BYTES_MIN), is_found, "{before}");
            }
        }
    }

    #[test]
    fn any_headers_and_any_code_have_an_answer() {
        let code: Vec<u8> =
            (0..20_000_u32).map(|it| (it.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let calls: Vec<u8> = code.chunks(5).flat_map(|part| [part, &CALL].concat()).collect();
        judge_by(&program(&calls), MEMORY_BYTES_MIN);
        let whole = program(&[load(libc::SYS_rename), CALL.to_vec()].concat());
        for len in 0..200 {
            judge_by(&whole[..len], MEMORY_BYTES_MIN);
        }
        for at in 0..176 {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                judge_by(&damaged, MEMORY_BYTES_MIN);
            }
        }
        // Code behind the end of the file, and far behind.
        assert!(!judge_by(&whole[..CODE_AT], MEMORY_BYTES_MIN));
        let mut far = whole.clone();
        far[128..136].fill(0xff);
        assert!(!judge_by(&far, MEMORY_BYTES_MIN));
        assert!(judge_by(&whole, MEMORY_BYTES_MIN - 1), "nothing to read it into");
    }

    #[test]
    fn this_test_makes_none() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!judge_by(&file, 64 << 10));
    }
}
