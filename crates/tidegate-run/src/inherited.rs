//! What this process inherited and changes at its start. The start of a Rust program ignores
//! SIGPIPE, and opens `/dev/null` for closed standard descriptors. SIGCHLD is no longer ignored:
//! the kernel would not tell how children end. A program that is launched gets all as they were.

#![allow(unsafe_code)] // The edge to the C runtime.

use std::ffi::{OsString, c_int};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The signals that are changed at the start.
const CHANGED: [c_int; 2] = [libc::SIGPIPE, libc::SIGCHLD];

/// Whether each of the signals was ignored.
static IGNORES: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
static IS_CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Runs before the runtime of Rust starts.
#[used]
// SAFETY: the section holds functions that the C runtime calls before `main`; `note` needs no
// runtime of Rust.
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = note;

extern "C" fn note() {
    for (signal, ignores) in CHANGED.into_iter().zip(&IGNORES) {
        ignores.store(is_ignored(signal), Relaxed);
    }
    if is_ignored(libc::SIGCHLD) {
        // SAFETY: the default action has no handler.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    }
    for (fd, is_closed) in (0..).zip(&IS_CLOSED) {
        // SAFETY: the call has no effect on memory.
        is_closed.store(unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1, Relaxed);
    }
}

fn is_ignored(signal: c_int) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the kernel stores one `sigaction` in `action`.
    let outcome = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: all bit patterns are a `sigaction`, and it was zeroed.
    let action = unsafe { action.assume_init() };
    outcome == 0 && action.sa_sigaction == libc::SIG_IGN
}

/// Makes the child of `command` start with what this process inherited.
pub(crate) fn hand_on(command: &mut Command) {
    // Without this, a linker may leave the function out.
    std::hint::black_box(&AT_START);
    if IS_CLOSED.iter().chain(&IGNORES).any(|differs| differs.load(Relaxed)) {
        let restore = || {
            restore();
            Ok(())
        };
        // SAFETY: between `fork` and `exec` the child makes system calls only.
        unsafe { command.pre_exec(restore) };
    }
}

/// Variables that hold the number of the process that they are meant for: `sd_listen_fds(3)` and
/// `sd_watchdog_enabled(3)` take nothing that is meant for another one.
const NUMBERED: [&str; 2] = ["LISTEN_PID", "WATCHDOG_PID"];
/// More bytes than a number of a process has digits.
const NUMBER_BYTES: usize = 24;

/// Gives the child of `command` this process's environment with `changes`. Variables that name this
/// process name the child.
pub(crate) fn give_environment(
    command: &mut Command,
    changes: Vec<(&'static str, Option<OsString>)>,
) {
    let own = std::process::id().to_string();
    let is_own = |name: &str| std::env::var_os(name).is_some_and(|value| value == *own);
    let numbered: Vec<&str> = NUMBERED.into_iter().filter(|name| is_own(name)).collect();
    if numbered.is_empty() {
        for (name, value) in changes {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        return;
    }
    let mut environment = Environment::of(changes, &numbered);
    let use_it = move || {
        environment.use_in_child();
        Ok(())
    };
    // SAFETY: between `fork` and `exec` the child only stores to memory that is there already.
    unsafe { command.pre_exec(use_it) };
}

/// The environment of a child, whose number is not known yet.
struct Environment {
    /// `NAME=value` with a NUL each. The numbered ones have space for a number, and are the last.
    strings: Vec<Vec<u8>>,
    /// The addresses of the strings, and a null.
    addresses: Vec<usize>,
    numbered: usize,
}

impl Environment {
    fn of(changes: Vec<(&'static str, Option<OsString>)>, numbered: &[&str]) -> Self {
        let stays = |name: &OsString| {
            let is_changed = changes.iter().any(|(changed, _)| *name == **changed);
            !is_changed && !numbered.iter().any(|numbered| *name == **numbered)
        };
        let kept: Vec<_> = std::env::vars_os().filter(|(name, _)| stays(name)).collect();
        let added = changes.into_iter().filter_map(|(name, value)| Some((name.into(), value?)));
        let entry = |(name, value): (OsString, OsString)| {
            [name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat()
        };
        let mut strings: Vec<Vec<u8>> = kept.into_iter().chain(added).map(entry).collect();
        let spacious = |name: &&str| [name.as_bytes(), b"=", &[0; NUMBER_BYTES]].concat();
        strings.extend(numbered.iter().map(spacious));
        let mut addresses: Vec<usize> =
            strings.iter_mut().map(|string| string.as_mut_ptr().expose_provenance()).collect();
        addresses.push(0);
        Self { strings, addresses, numbered: numbered.len() }
    }

    /// Completes the environment and makes it the process's, for the `exec` that follows.
    fn use_in_child(&mut self) {
        unsafe extern "C" {
            static mut environ: *const usize;
        }
        let number = std::process::id();
        let first = self.strings.len() - self.numbered;
        for string in &mut self.strings[first..] {
            let space = string.len() - NUMBER_BYTES;
            // The digits fit.
            let _ = write!(&mut string[space..], "{number}");
        }
        // SAFETY: the C library defines it, a pointer to an array of pointers. No other thread runs
        // in the child.
        unsafe { environ = self.addresses.as_ptr() };
    }
}

fn restore() {
    for (signal, _) in CHANGED.iter().zip(&IGNORES).filter(|(_, ignores)| ignores.load(Relaxed)) {
        // SAFETY: an ignored signal has no handler.
        unsafe { libc::signal(*signal, libc::SIG_IGN) };
    }
    for (fd, _) in (0..).zip(&IS_CLOSED).filter(|(_, is_closed)| is_closed.load(Relaxed)) {
        // SAFETY: the descriptor is this child's, which uses it no more.
        unsafe { libc::close(fd) };
    }
}
