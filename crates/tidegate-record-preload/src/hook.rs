//! How hooks are declared, and the functions that they stand in front of.
//!
//! A module declares its hooks by [`hooks`], which also makes its function `resolve`: it looks all
//! functions up when the library is loaded, since looking up takes the dynamic linker's lock.
#![allow(unsafe_code)] // the dynamic linker's answers become functions

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::session;

/// The next definition of a symbol in the order that the dynamic linker searches; `F` is its type,
/// a function pointer.
pub(crate) struct Next<F> {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    kind: PhantomData<F>,
}

impl<F: Copy> Next<F> {
    /// # Safety
    /// `F` is a function pointer, and the type of what `name` names.
    pub(crate) const unsafe fn new(name: &'static CStr) -> Self {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        Self { name, address: AtomicPtr::new(ptr::null_mut()), kind: PhantomData }
    }

    /// The function; none where no library has it.
    pub(crate) fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            // SAFETY: a terminated name.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.address.store(address, Ordering::Relaxed);
        }
        // SAFETY: not null, so it is the address of a function of this type, as `new` was promised.
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
    }
}

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
            $crate::hook::Next<unsafe extern "C-unwind" fn($($kind),*) -> $result> =
            // SAFETY: the type is that of the C library's manual.
            unsafe {
                $crate::hook::Next::new(
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
