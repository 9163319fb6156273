//! Hook: `vfork`.
//!
//! Invariant: while a child of `vfork` runs in this memory, its thread is marked as such, and the
//! table of descriptors, which is the parent's, is left alone. The parent's thread stands still
//! meanwhile, so a mark in thread-local memory is enough.
#![allow(unsafe_code)] // assembly: the function returns twice, on one stack

use std::ffi::c_int;

use crate::state::process::{self, BeforeVfork};
use crate::sys::raw;

// The child returns to the caller and runs over the stack below. So the return address and what
// `before` has returned are kept in registers, which child and parent each have.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn vfork() -> c_int {
    std::arch::naked_asm!(
        "sub rsp, 8",
        "call {before}",
        "add rsp, 8",
        "mov rsi, rax",
        "pop rdi",
        "mov eax, 58",
        "syscall",
        "push rdi",
        "test rax, rax",
        "je 2f",
        "mov rdi, rax",
        "sub rsp, 8",
        "call {after}",
        "add rsp, 8",
        "2:",
        "ret",
        before = sym before,
        after = sym after,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn vfork() -> c_int {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {before}",
        "ldp x29, x30, [sp], #16",
        "mov x9, x30",
        "mov x10, x0",
        "mov x0, #0x4111", // CLONE_VM | CLONE_VFORK | SIGCHLD
        "mov x1, #0",
        "mov x2, #0",
        "mov x3, #0",
        "mov x4, #0",
        "mov x8, #220",
        "svc 0",
        "mov x30, x9",
        "cbz x0, 2f",
        "stp x29, x30, [sp, #-16]!",
        "mov x1, x10",
        "bl {after}",
        "ldp x29, x30, [sp], #16",
        "2:",
        "ret",
        before = sym before,
        after = sym after,
    )
}

/// Marks the thread. The result goes through the assembly in a register.
extern "C" fn before() -> BeforeVfork {
    process::become_vfork_child()
}

/// Clears the mark in the parent, when the child has called `exec` or ended, or none was made.
extern "C" fn after(result: isize, before: BeforeVfork) -> c_int {
    process::end_vfork_child(before);
    raw::returned_int(result)
}
