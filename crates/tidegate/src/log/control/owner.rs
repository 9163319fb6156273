//! Which process and thread hold a slot, by the kernel's numbers.

use std::cell::Cell;

thread_local! {
    /// Asking the kernel takes longer than an append of a hundred bytes.
    static OWNER: Cell<u64> = const { Cell::new(0) };
}

/// The calling thread: its process in the upper half, itself in the lower.
#[inline]
pub(in crate::log) fn owner() -> u64 {
    let owner = OWNER.get();
    if owner == 0 { learn() } else { owner }
}

#[cold]
fn learn() -> u64 {
    let number = |pid: rustix::process::Pid| u64::from(pid.as_raw_nonzero().get().unsigned_abs());
    let owner = number(rustix::process::getpid()) << 32 | number(rustix::thread::gettid());
    OWNER.set(owner);
    owner
}

/// The calling process.
#[inline]
pub fn current_process() -> u32 {
    process_of(owner())
}

/// To be called in the child after a fork: its only thread has another number than the parent's.
pub fn after_fork() {
    OWNER.set(0);
}

/// The process of an owner.
pub fn process_of(owner: u64) -> u32 {
    u32::try_from(owner >> 32).unwrap_or(0)
}

/// The thread of an owner.
pub fn thread_of(owner: u64) -> u32 {
    u32::try_from(owner & u64::from(u32::MAX)).unwrap_or(0)
}
