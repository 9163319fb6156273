//! Hook: `vfork`.
//!
//! Invariant: while a child of `vfork` runs in this memory, its thread is marked as such, and the
//! table of descriptors, which is the parent's, is left alone. The parent's thread stands still
//! meanwhile, so a mark in thread-local memory is enough.
#![allow(unsafe_code)] // assembly: the function returns twice, on one stack

use std::ffi::c_int;

use crate::state::process;
use crate::sys::raw;

// The child returns to the caller and runs over the stack below. So the return address is kept in a
// register, which child and parent each have.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn vfork() -> c_int {
    std::arch::naked_asm!(
        "sub rsp, 8",
        "call {before}",
        "add rsp, 8",
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
        "bl {after}",
        "ldp x29, x30, [sp], #16",
        "2:",
        "ret",
        before = sym before,
        after = sym after,
    )
}

extern "C" fn before() {
    process::set_vfork_child(true);
}

/// Clears the mark in the parent, when the child has called `exec` or ended, or none was made.
extern "C" fn after(result: isize) -> c_int {
    process::set_vfork_child(false);
    raw::returned_int(result)
}
