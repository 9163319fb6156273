//! The process and thread that hold a slot, by the kernel's numbers.

use std::cell::Cell;

thread_local! {
    /// Cached, since asking the kernel takes longer than an append of a hundred bytes.
    static OWNER: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of the calling thread, with that of its process in the upper half.
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

/// Returns the number of the calling process.
#[inline]
pub fn current_process() -> u32 {
    process_of(owner())
}

/// Forgets the thread's number, for the child after a fork: its thread has another number.
pub fn after_fork() {
    OWNER.set(0);
}

/// Returns the process of an owner.
pub fn process_of(owner: u64) -> u32 {
    u32::try_from(owner >> 32).unwrap_or(0)
}

/// Returns the thread of an owner.
pub fn thread_of(owner: u64) -> u32 {
    u32::try_from(owner & u64::from(u32::MAX)).unwrap_or(0)
}
