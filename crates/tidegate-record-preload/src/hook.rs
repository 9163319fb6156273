//! Declaration of hooks, and the functions that they interpose on.
//!
//! A module declares its hooks by [`hooks`], which also generates the module's function `resolve`.
//! It looks up all functions when the library is loaded, because a lookup takes the dynamic
//! linker's lock.
#![allow(unsafe_code)] // the hooks are C functions, and call others

use std::ffi::c_int;
use std::ptr;

use crate::session;

/// A result type of a hooked function.
pub(crate) trait Failure {
    /// The value that a function returns on failure.
    const FAILED: Self;
}

impl Failure for c_int {
    const FAILED: Self = -1;
}

impl Failure for isize {
    const FAILED: Self = -1;
}

impl Failure for std::ffi::c_long {
    const FAILED: Self = -1;
}

impl Failure for () {
    const FAILED: Self = ();
}

impl<T> Failure for *mut T {
    const FAILED: Self = ptr::null_mut();
}

/// Returns the failure of a function that no library provides, with `errno` `ENOSYS`.
#[cold]
pub(crate) fn missing<R: Failure>() -> R {
    session::set_errno(libc::ENOSYS);
    R::FAILED
}

/// Declares hooks: function names with one signature, and the body that replaces the functions. The
/// body calls `call` once to make the original call.
macro_rules! hooks {
    ($([$($name:ident)+] $arguments:tt -> $result:ty => |$call:ident| $body:expr;)*) => {
        /// The functions that the hooks interpose on.
        #[allow(non_upper_case_globals)]
        mod real {
            #[allow(unused_imports)]
            use super::*;
            $($($crate::hook::real! { $name $arguments $result })+)*

            /// Looks up all functions of this module.
            pub(crate) fn resolve() {
                $($( $name.get(); )+)*
            }
        }
        pub(crate) use real::resolve;

        $($($crate::hook::hook! { $name $arguments $result, $call, $body })+)*
    };
}
pub(crate) use hooks;

macro_rules! real {
    ($name:ident ($($argument:ident: $kind:ty),*) $result:ty) => {
        pub(crate) static $name:
            tidegate_interpose::Next<unsafe extern "C-unwind" fn($($kind),*) -> $result> =
            // SAFETY: the type matches the signature in the C library's manual.
            unsafe {
                tidegate_interpose::Next::new(
                    match std::ffi::CStr::from_bytes_with_nul(
                        concat!(stringify!($name), "\0").as_bytes(),
                    ) {
                        Ok(name) => name,
                        Err(_) => c"",
                    },
                )
            };
    };
}
pub(crate) use real;

macro_rules! hook {
    ($name:ident ($($argument:ident: $kind:ty),*) $result:ty, $call:ident, $body:expr) => {
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $result {
            let $call = || match real::$name.get() {
                // SAFETY: the same signature, with the program's arguments. The C function does not
                // read an argument that the program did not pass.
                Some(next) => unsafe { next($($argument),*) },
                None => $crate::hook::missing(),
            };
            $body
        }
    };
}
pub(crate) use hook;
