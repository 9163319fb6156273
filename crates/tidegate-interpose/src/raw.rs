//! System calls that no hook sees, and `errno`.
//!
//! Invariant: no function here calls the C library except for the address of `errno`, so that no
//! call returns into a hook.

use std::ffi::{c_char, c_int, c_long, c_uint};
use std::ptr;

/// An error number of the kernel.
pub type Errno = c_int;

/// Makes the system call `number`; a result in `-4095..0` is an error number, negated.
///
/// # Safety
/// As for the call: pointers among the arguments are valid for the kernel's reads and writes.
#[cfg(target_arch = "x86_64")]
#[inline]
pub unsafe fn call(number: c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; the caller guarantees that the arguments are valid.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0], in("rsi") arguments[1], in("rdx") arguments[2],
            in("r10") arguments[3], in("r8") arguments[4], in("r9") arguments[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    result
}

/// Makes the system call `number`; a result in `-4095..0` is an error number, negated.
///
/// # Safety
/// As for the call: pointers among the arguments are valid for the kernel's reads and writes.
#[cfg(target_arch = "aarch64")]
#[inline]
pub unsafe fn call(number: c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; the caller guarantees that the arguments are valid.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") arguments[0] => result,
            in("x1") arguments[1], in("x2") arguments[2], in("x3") arguments[3],
            in("x4") arguments[4], in("x5") arguments[5],
            options(nostack)
        );
    }
    result
}

/// The arguments of a call as machine words; missing ones are 0.
#[macro_export]
macro_rules! words {
    ($($argument:expr),* $(,)?) => {{
        let given = [$($crate::raw::Word::word($argument)),*];
        let mut all = [0_usize; 6];
        all[..given.len()].copy_from_slice(&given);
        all
    }};
}
pub use words;

/// A type that can be an argument of a system call.
pub trait Word {
    /// Returns the argument as the kernel takes it: signed numbers are extended.
    fn word(self) -> usize;
}

macro_rules! word {
    ($($kind:ty),*) => {$(
        impl Word for $kind {
            #[inline]
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, trivial_numeric_casts)]
            fn word(self) -> usize {
                self as usize
            }
        }
    )*};
}
word!(i32, u32, i64, u64, isize, usize);

impl<T> Word for *const T {
    #[inline]
    fn word(self) -> usize {
        self as usize
    }
}

impl<T> Word for *mut T {
    #[inline]
    fn word(self) -> usize {
        self as usize
    }
}

/// The words that a program gave to `syscall`, converted to the types that hooks take.
#[derive(Debug, Clone, Copy)]
pub struct Arguments(pub [usize; 6]);

impl Arguments {
    /// Returns the `int` in word `at`.
    #[inline]
    pub fn int(self, at: usize) -> c_int {
        low_half(self.0[at])
    }

    /// Returns the `unsigned int` in word `at`.
    #[inline]
    pub fn uint(self, at: usize) -> c_uint {
        self.int(at).cast_unsigned()
    }

    /// Returns word `at` as a signed number.
    #[inline]
    pub fn long(self, at: usize) -> i64 {
        self.0[at].cast_signed() as i64
    }

    /// Returns word `at` as a pointer.
    #[inline]
    pub fn pointer<T>(self, at: usize) -> *mut T {
        ptr::with_exposed_provenance_mut(self.0[at])
    }

    /// Returns word `at` as a string.
    #[inline]
    pub fn path(self, at: usize) -> *const c_char {
        self.pointer::<c_char>(at)
    }
}

/// Returns the `int` in a word whose upper half may hold anything.
#[inline]
pub fn low_half(word: usize) -> c_int {
    let [a, b, c, d, ..] = word.to_le_bytes();
    c_int::from_le_bytes([a, b, c, d])
}

/// Returns the kernel's result as a `Result`.
///
/// # Errors
/// Fails with the kernel's error number.
#[inline]
pub fn checked(result: isize) -> Result<usize, Errno> {
    match usize::try_from(result) {
        Ok(value) => Ok(value),
        Err(_) => Err(c_int::try_from(-result).unwrap_or(libc::EIO)),
    }
}

/// Returns a result of the kernel to the program: unchanged, or -1 with `errno` set.
#[inline]
pub fn returned(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        failed(c_int::try_from(-result).unwrap_or(libc::EIO))
    } else {
        result
    }
}

/// Returns a result of the kernel as an `int` to the program: unchanged, or -1 with `errno` set.
#[inline]
pub fn returned_int(result: isize) -> c_int {
    c_int::try_from(returned(result)).unwrap_or(c_int::MAX)
}

/// Sets `errno`, and returns the -1 that reports it as an `int`.
#[cold]
pub fn failed_int(errno: Errno) -> c_int {
    set_errno(errno);
    -1
}

/// Sets `errno`, and returns the -1 that reports it.
#[cold]
pub fn failed(errno: Errno) -> isize {
    set_errno(errno);
    -1
}

/// Returns the calling thread's `errno`.
pub fn errno() -> Errno {
    // SAFETY: takes no arguments, and returns an address of the calling thread.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the address is valid as long as the thread lives.
    unsafe { *place }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: Errno) {
    // SAFETY: takes no arguments, and returns an address of the calling thread.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the address is valid as long as the thread lives.
    unsafe { *place = errno };
}
