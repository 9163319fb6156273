//! Hooks: `dprintf`, which takes any number of arguments.
//!
//! Invariant: the C library's function gets the arguments as they came. The hook keeps the
//! registers that may hold some, does not touch the stack, and jumps to the function. So it gets no
//! control back after the call, and the file stays out of the log for as long as the process lives.
#![allow(unsafe_code)] // assembly: Rust has no functions with variable arguments

use std::ffi::{c_char, c_int, c_void};

use crate::covered::{Open, unseen};
use crate::sys::next;

/// Declares a hook that calls `$before` with its first argument, and jumps to the returned address.
macro_rules! variadic {
    ($name:ident, $before:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name(fd: c_int, format: *const c_char) -> c_int {
            std::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "push rax", // how many vector registers are used
                "sub rsp, 128",
                "movaps [rsp], xmm0",
                "movaps [rsp + 16], xmm1",
                "movaps [rsp + 32], xmm2",
                "movaps [rsp + 48], xmm3",
                "movaps [rsp + 64], xmm4",
                "movaps [rsp + 80], xmm5",
                "movaps [rsp + 96], xmm6",
                "movaps [rsp + 112], xmm7",
                "call {before}",
                "mov r11, rax",
                "movaps xmm0, [rsp]",
                "movaps xmm1, [rsp + 16]",
                "movaps xmm2, [rsp + 32]",
                "movaps xmm3, [rsp + 48]",
                "movaps xmm4, [rsp + 64]",
                "movaps xmm5, [rsp + 80]",
                "movaps xmm6, [rsp + 96]",
                "movaps xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp r11",
                before = sym $before,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name(fd: c_int, format: *const c_char) -> c_int {
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-208]!",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "stp q0, q1, [sp, #80]",
                "stp q2, q3, [sp, #112]",
                "stp q4, q5, [sp, #144]",
                "stp q6, q7, [sp, #176]",
                "bl {before}",
                "mov x16, x0",
                "ldp q6, q7, [sp, #176]",
                "ldp q4, q5, [sp, #144]",
                "ldp q2, q3, [sp, #112]",
                "ldp q0, q1, [sp, #80]",
                "ldp x6, x7, [sp, #64]",
                "ldp x4, x5, [sp, #48]",
                "ldp x2, x3, [sp, #32]",
                "ldp x0, x1, [sp, #16]",
                "ldp x29, x30, [sp], #208",
                "br x16",
                before = sym $before,
            )
        }
    };
}

variadic!(dprintf, before_dprintf);
variadic!(__dprintf_chk, before_checked);

extern "C" fn before_dprintf(fd: c_int) -> *const c_void {
    hide(fd);
    next::dprintf.get().map_or(no_function as *const c_void, |function| function as *const c_void)
}

extern "C" fn before_checked(fd: c_int) -> *const c_void {
    hide(fd);
    next::__dprintf_chk
        .get()
        .map_or(no_function as *const c_void, |function| function as *const c_void)
}

fn hide(fd: c_int) {
    if let Some(open) = Open::writable(fd) {
        unseen::pin(&open);
    }
}

/// Fails, in place of a function that the C library does not have.
extern "C" fn no_function() -> c_int {
    crate::sys::raw::failed_int(libc::ENOSYS)
}
