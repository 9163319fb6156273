//! What this process inherited and the start of a Rust program changes before `main`: SIGPIPE is
//! ignored from then on, and closed standard descriptors lead to `/dev/null`. A program that is
//! launched gets both as they were.

#![allow(unsafe_code)] // The edge to the C runtime.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static IGNORES_SIGPIPE: AtomicBool = AtomicBool::new(false);
static IS_CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Runs before the runtime of Rust starts.
#[used]
// SAFETY: the section holds functions that the C runtime calls before `main`; `note` needs no
// runtime of Rust.
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = note;

extern "C" fn note() {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the kernel stores one `sigaction` in `action`.
    let outcome = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: all bit patterns are a `sigaction`, and it was zeroed.
    let action = unsafe { action.assume_init() };
    IGNORES_SIGPIPE.store(outcome == 0 && action.sa_sigaction == libc::SIG_IGN, Relaxed);
    for (fd, is_closed) in (0..).zip(&IS_CLOSED) {
        // SAFETY: the call has no effect on memory.
        is_closed.store(unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1, Relaxed);
    }
}

/// Makes the child of `command` start with what this process inherited.
pub(crate) fn hand_on(command: &mut Command) {
    // Without this, a linker may leave the function out.
    std::hint::black_box(&AT_START);
    let has_closed = IS_CLOSED.iter().any(|is_closed| is_closed.load(Relaxed));
    if has_closed || IGNORES_SIGPIPE.load(Relaxed) {
        let restore = || {
            restore();
            Ok(())
        };
        // SAFETY: between `fork` and `exec` the child makes system calls only.
        unsafe { command.pre_exec(restore) };
    }
}

fn restore() {
    if IGNORES_SIGPIPE.load(Relaxed) {
        // SAFETY: an ignored signal has no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
    for (fd, _) in (0..).zip(&IS_CLOSED).filter(|(_, is_closed)| is_closed.load(Relaxed)) {
        // SAFETY: the descriptor is this child's, which uses it no more.
        unsafe { libc::close(fd) };
    }
}
