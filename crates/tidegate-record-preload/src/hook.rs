//! How hooks are declared, and the functions that they stand in front of.
//!
//! A module declares its hooks by [`hooks`], which also makes its function `resolve`: it looks all
//! functions up when the library is loaded, since looking up takes the dynamic linker's lock.
#![allow(unsafe_code)] // the hooks are C functions, and call others

use std::ffi::c_int;
use std::ptr;

use crate::session;

/// What a function returns where it fails.
pub(crate) trait Failure {
    /// That value.
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

/// The result of a function that no library has.
#[cold]
pub(crate) fn missing<R: Failure>() -> R {
    session::set_errno(libc::ENOSYS);
    R::FAILED
}

/// Declares hooks: names of functions with one signature, and what is done in their place. `call`
/// makes the call itself, once.
macro_rules! hooks {
    ($([$($name:ident)+] $arguments:tt -> $result:ty => |$call:ident| $body:expr;)*) => {
        /// The functions behind the hooks.
        #[allow(non_upper_case_globals)]
        mod real {
            #[allow(unused_imports)]
            use super::*;
            $($($crate::hook::real! { $name $arguments $result })+)*

            /// Looks all of them up.
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
            // SAFETY: the type is that of the C library's manual.
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
                // SAFETY: the same function with the program's own arguments; one that is not
                // given is not looked at.
                Some(next) => unsafe { next($($argument),*) },
                None => $crate::hook::missing(),
            };
            $body
        }
    };
}
pub(crate) use hook;
