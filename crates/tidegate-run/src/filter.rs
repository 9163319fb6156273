//! A filter of system calls that answers syncs, even of programs that no library reaches.
//!
//! Invariants:
//! 1. All calls but syncs go to the kernel; so do all calls of architectures that the filter does
//!    not know. The filter reads only numbers and arguments, and follows no pointer.
//! 2. A sync of a negative descriptor goes to the kernel, which refuses it. A sync with
//!    [`REAL_SYNC`] in the descriptor's upper half goes there too: the preload library marks the
//!    syncs that must be made.
//! 3. The filter cannot be removed: all processes that the program starts inherit it.
//!
//! Map: [`Filter::choose`] (whether there can be one) · [`Filter::before`] (the child installs it
//! before it executes the program) · `program` (the instructions).

#![allow(unsafe_code)] // The edge to the kernel: calls that no safe crate offers.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::thread::CapabilitySet;
use tidegate_interpose::file_systems::REAL_SYNC;

/// Which programs a volatile run covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All programs, if that costs no privileges; else programs that load the library.
    Possible,
    /// All programs, even if the kernel then demands that programs gain no privileges.
    All,
    /// Programs that load the library.
    Library,
}

/// A filter that can be installed.
#[derive(Debug, Clone)]
pub struct Filter {
    instructions: Vec<libc::sock_filter>,
    /// Programs can gain no privileges: the kernel demands it without `CAP_SYS_ADMIN`.
    pub no_new_privileges: bool,
}

impl Filter {
    /// Returns the filter for `scope`, or `None` if only the library answers syncs.
    ///
    /// # Errors
    /// Fails if the kernel has no filters, and `scope` demands one.
    pub fn choose(scope: Scope) -> io::Result<Option<Self>> {
        let capabilities = rustix::thread::capabilities(None);
        let is_privileged =
            capabilities.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        let is_wanted = scope == Scope::All || scope == Scope::Possible && is_privileged;
        if !is_wanted {
            return Ok(None);
        }
        match is_available() {
            Err(_) if scope == Scope::Possible => Ok(None),
            Err(error) => Err(error),
            Ok(()) => Ok(Some(Self { instructions: program(), no_new_privileges: !is_privileged })),
        }
    }

    /// Makes the child of `command` install the filter before it executes the program.
    pub(crate) fn before(self, command: &mut Command) {
        // SAFETY: between `fork` and `exec` the child makes system calls only.
        unsafe { command.pre_exec(move || self.install()) };
    }

    /// Installs the filter for the calling thread. Allocates nothing: a child may call it between
    /// `fork` and `exec`.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    fn install(&self) -> io::Result<()> {
        if self.no_new_privileges {
            rustix::thread::set_no_new_privs(true)?;
        }
        let program = libc::sock_fprog {
            len: self.instructions.len().try_into().map_err(|_| io::ErrorKind::InvalidInput)?,
            filter: self.instructions.as_ptr().cast_mut(),
        };
        // SAFETY: the kernel reads the instructions during the call.
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                &raw const program,
            )
        };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Asks the kernel whether it has filters with the action `SECCOMP_RET_ERRNO`.
fn is_available() -> io::Result<()> {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads the number during the call.
    let outcome = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The numbers of the sync calls on an architecture.
struct Machine {
    /// Its number in the kernel's audit.
    architecture: u32,
    sync: u32,
    msync: u32,
    /// `fsync`, `fdatasync`, `syncfs`, `sync_file_range`: the descriptor comes first.
    by_descriptor: [u32; 4],
}

/// x86-64, where x32 has equal numbers with a bit; i386; aarch64; arm.
const MACHINES: [Machine; 4] = [
    Machine { architecture: 0xc000_003e, sync: 162, msync: 26, by_descriptor: [74, 75, 306, 277] },
    Machine {
        architecture: 0x4000_0003,
        sync: 36,
        msync: 144,
        by_descriptor: [118, 148, 344, 314],
    },
    Machine { architecture: 0xc000_00b7, sync: 81, msync: 227, by_descriptor: [82, 83, 267, 84] },
    Machine {
        architecture: 0x4000_0028,
        sync: 36,
        msync: 144,
        by_descriptor: [118, 148, 373, 341],
    },
];
/// The bit that marks numbers of x32. No other architecture uses it.
const X32_BIT: u32 = 0x4000_0000;
/// Offsets in the data that the kernel passes to a filter.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
/// The lower half of the first argument. All these machines store it first.
const DESCRIPTOR_AT: u32 = 16;
const UPPER_HALF_AT: u32 = DESCRIPTOR_AT + 4;
const MSYNC_FLAGS_AT: u32 = DESCRIPTOR_AT + 16;
/// The sign bit of a descriptor.
const SIGN: u32 = 1 << 31;

/// Where a filter goes on after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Next,
    /// Skips so many instructions.
    Skip(usize),
    /// To the check of the descriptor.
    Descriptor,
    /// To the check of the flags of `msync`.
    Flags,
    Allow,
    Answer,
}

/// An instruction: code, operand, target if its condition holds, target if not.
struct Step(u32, u32, To, To);

fn load(at: u32) -> Step {
    Step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, To::Next, To::Next)
}

fn keep(bits: u32) -> Step {
    Step(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, bits, To::Next, To::Next)
}

fn if_equal(value: u32, then: To, other: To) -> Step {
    Step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, then, other)
}

fn if_any(bits: u32, then: To, other: To) -> Step {
    Step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bits, then, other)
}

fn end(action: u32) -> Step {
    Step(libc::BPF_RET | libc::BPF_K, action, To::Next, To::Next)
}

/// Returns the instructions for calls of one architecture.
fn of_machine(machine: &Machine) -> Vec<Step> {
    let mut calls = vec![
        load(NUMBER_AT),
        keep(!X32_BIT),
        if_equal(machine.sync, To::Answer, To::Next),
        if_equal(machine.msync, To::Flags, To::Next),
    ];
    let numbers = machine.by_descriptor.iter();
    calls.extend(numbers.map(|number| if_equal(*number, To::Descriptor, To::Next)));
    calls.push(end(libc::SECCOMP_RET_ALLOW));
    let is_other = To::Skip(calls.len());
    let mut steps = vec![load(ARCHITECTURE_AT), if_equal(machine.architecture, To::Next, is_other)];
    steps.extend(calls);
    steps
}

/// Returns the instructions that all architectures share, first the one for unknown ones.
fn shared() -> [Step; 10] {
    let (sync, invalidate) = (libc::MS_SYNC.cast_unsigned(), libc::MS_INVALIDATE.cast_unsigned());
    [
        end(libc::SECCOMP_RET_ALLOW),
        load(UPPER_HALF_AT),
        if_equal(REAL_SYNC, To::Allow, To::Next),
        load(DESCRIPTOR_AT),
        if_any(SIGN, To::Allow, To::Answer),
        load(MSYNC_FLAGS_AT),
        keep(!invalidate),
        if_equal(sync, To::Answer, To::Allow),
        end(libc::SECCOMP_RET_ALLOW),
        end(libc::SECCOMP_RET_ERRNO),
    ]
}

/// Returns the filter's instructions.
fn program() -> Vec<libc::sock_filter> {
    let mut steps: Vec<Step> = MACHINES.iter().flat_map(of_machine).collect();
    let shared_at = steps.len();
    steps.extend(shared());
    let encoded = steps.iter().enumerate().map(|(at, Step(code, operand, then, other))| {
        let distance = |to: &To| {
            let in_shared = match to {
                To::Next => return 0,
                To::Skip(count) => return (*count).try_into().unwrap_or(0),
                To::Descriptor => 1,
                To::Flags => 5,
                To::Allow => 8,
                To::Answer => 9,
            };
            (shared_at + in_shared - at - 1).try_into().unwrap_or(0)
        };
        let code = (*code).try_into().unwrap_or(0);
        libc::sock_filter { code, jt: distance(then), jf: distance(other), k: *operand }
    });
    encoded.collect()
}

#[cfg(test)]
mod tests {
    use tidegate::log::recover::syncs_reach_kernel;

    use super::*;

    const ERRNO: u32 = libc::SECCOMP_RET_ERRNO;
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

    /// Runs the filter as the kernel does.
    fn judge(architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = vec![number, architecture, 0, 0];
        let halves = |it: &u64| [it & 0xffff_ffff, it >> 32].map(|it| u32::try_from(it).unwrap());
        data.extend(arguments.iter().flat_map(halves));
        let (mut accumulator, mut at) = (0, 0);
        let instructions = program();
        loop {
            let libc::sock_filter { code, jt, jf, k } = instructions[at];
            let code = u32::from(code);
            at += 1;
            let mut jump = |holds: bool| at += usize::from(if holds { jt } else { jf });
            match code & 0x07 {
                libc::BPF_LD => accumulator = data[usize::try_from(k / 4).unwrap()],
                libc::BPF_ALU => accumulator &= k,
                libc::BPF_JMP if code & 0xf0 == libc::BPF_JEQ => jump(accumulator == k),
                libc::BPF_JMP => jump(accumulator & k != 0),
                _ => return k,
            }
        }
    }

    #[test]
    fn syncs_are_answered_on_each_architecture() {
        for machine in &MACHINES {
            let judge = |number, arguments| judge(machine.architecture, number, arguments);
            for number in machine.by_descriptor {
                assert_eq!(judge(number, [0; 6]), ERRNO);
                assert_eq!(judge(number, [7, 1, 2, 3, 4, 5]), ERRNO);
                assert_eq!(judge(number, [0xffff_ffff, 0, 0, 0, 0, 0]), ALLOW, "negative");
                assert_eq!(judge(number, [u64::MAX, 0, 0, 0, 0, 0]), ALLOW, "negative");
                assert_eq!(judge(number, [u64::from(REAL_SYNC) << 32 | 7, 0, 0, 0, 0, 0]), ALLOW);
                assert_eq!(judge(number, [1 << 32 | 7, 0, 0, 0, 0, 0]), ERRNO);
            }
            assert_eq!(judge(machine.sync, [0; 6]), ERRNO);
            let msync = |flags: i32| {
                judge(machine.msync, [4096, 4096, u64::from(flags.cast_unsigned()), 0, 0, 0])
            };
            assert_eq!(msync(libc::MS_SYNC), ERRNO);
            assert_eq!(msync(libc::MS_SYNC | libc::MS_INVALIDATE), ERRNO);
            assert_eq!(msync(libc::MS_ASYNC), ALLOW);
            assert_eq!(msync(0), ALLOW);
            assert_eq!(msync(libc::MS_SYNC | libc::MS_ASYNC), ALLOW, "the kernel refuses it");
        }
        assert_eq!(judge(MACHINES[0].architecture, X32_BIT + 74, [0; 6]), ERRNO, "x32");
    }

    #[test]
    fn a_process_behind_the_filter_is_told_that_its_syncs_do_not_reach_the_kernel() {
        syncs_reach_kernel().unwrap();
        let filter = Filter::choose(Scope::All).unwrap().unwrap();
        let behind = || {
            // The filter of a thread ends with the thread.
            filter.install().unwrap();
            syncs_reach_kernel()
        };
        let error = std::thread::scope(|scope| scope.spawn(behind).join().unwrap()).unwrap_err();
        assert!(error.to_string().contains("tidegate run --volatile"), "{error}");
    }

    #[test]
    fn all_other_calls_are_allowed() {
        for machine in &MACHINES {
            let Machine { architecture, sync, msync, by_descriptor } = machine;
            let is_sync = |number| number == *sync || by_descriptor.contains(&number);
            for number in (0..1024).filter(|number| !is_sync(*number) && number != msync) {
                assert_eq!(judge(*architecture, number, [1; 6]), ALLOW, "{number}");
            }
        }
        for number in 0..1024 {
            assert_eq!(judge(0xc000_00f3, number, [0; 6]), ALLOW, "an unknown architecture");
        }
    }

    #[test]
    fn the_numbers_are_those_of_this_machine() {
        let machine = &MACHINES[if cfg!(target_arch = "x86_64") { 0 } else { 2 }];
        assert_eq!(i64::from(machine.sync), libc::SYS_sync);
        assert_eq!(i64::from(machine.msync), libc::SYS_msync);
        let calls =
            [libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_syncfs, libc::SYS_sync_file_range];
        assert_eq!(machine.by_descriptor.map(i64::from), calls);
    }
}
