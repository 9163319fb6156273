//! Code that preloaded libraries share.
//!
//! The hooks of a library stand in front of [`Next`] functions. A library looks up all its next
//! functions when it is loaded, since the look-up may take the dynamic linker's lock and allocate.
//! [`symbols`] finds functions in the tables of loaded objects. [`raw`] makes system calls that
//! bypass all hooks, and [`cancel`] keeps their points of cancellation. [`image`] and [`own_calls`]
//! tell which programs such a library can watch, and [`environment`] names the library to them or
//! not; [`library`] reads the dependencies and symbols of a library. [`file_systems`]
//! tells where a sync concerns other machines, and [`entries`] reads lists of open descriptors.
#![allow(unsafe_code)] // the dynamic linker's answers become functions, and system calls

pub mod cancel;
pub mod entries;
pub mod environment;
pub mod file_systems;
pub mod image;
#[cfg(target_arch = "x86_64")]
mod instruction;
pub mod library;
pub mod own_calls;
pub mod raw;
pub mod symbols;

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A way to look up a [`Next`] function.
pub trait Source {
    /// Returns the address of the function of this name; null if there is none.
    fn find(name: &CStr) -> *mut c_void;
}

/// The next definition in the order that the dynamic linker searches.
#[derive(Debug)]
pub struct InOrder;

impl Source for InOrder {
    fn find(name: &CStr) -> *mut c_void {
        // SAFETY: a terminated name.
        unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
    }
}

/// The function that a hook stands in front of; `F` is its type, a function pointer.
#[derive(Debug)]
pub struct Next<F, S = InOrder> {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    kind: PhantomData<(F, fn(S))>,
}

impl<F: Copy, S: Source> Next<F, S> {
    /// Creates the next function `name`, and does not look it up yet.
    ///
    /// # Panics
    /// Panics if `F` does not have the size of a pointer. A constant does not compile then.
    ///
    /// # Safety
    /// `F` is a function pointer of the type of the function `name`.
    pub const unsafe fn new(name: &'static CStr) -> Self {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        Self { name, address: AtomicPtr::new(ptr::null_mut()), kind: PhantomData }
    }

    /// Returns the function if it was looked up, for hooks that may run before the library is
    /// ready.
    #[inline]
    pub fn resolved(&self) -> Option<F> {
        let address = self.address.load(Ordering::Relaxed);
        // SAFETY: not null, so it is the address of the function `name`, which has type `F`.
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
    }

    /// Returns the function, and looks it up first if needed; `None` if no library has it.
    pub fn get(&self) -> Option<F> {
        if self.address.load(Ordering::Relaxed).is_null() {
            self.address.store(S::find(self.name), Ordering::Relaxed);
        }
        self.resolved()
    }
}

/// Declares [`Next`] functions that a [`Source`] finds, and `resolve`, which looks each
/// function up. The types must be the ones in the C library's manual.
#[macro_export]
macro_rules! functions {
    ($source:ty; $($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        $(
            #[allow(non_upper_case_globals, missing_docs)]
            pub(crate) static $name:
                $crate::Next<unsafe extern "C-unwind" fn($($argument),*) -> $result, $source> =
                // SAFETY: the type is that of the C library's manual.
                unsafe {
                    $crate::Next::new(
                        match ::std::ffi::CStr::from_bytes_with_nul(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ) {
                            Ok(name) => name,
                            Err(_) => c"",
                        },
                    )
                };
        )*

        /// Looks up every next function.
        pub(crate) fn resolve() {
            $( $name.get(); )*
        }
    };
}

/// Declares functions that forward to another function of their module. They return an `int` unless
/// the declaration names another type.
#[macro_export]
macro_rules! synonyms {
    (@result) => {
        ::std::ffi::c_int
    };
    (@result $result:ty) => {
        $result
    };
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $same:ident($($given:expr),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $crate::synonyms!(@result $($result)?) {
            // SAFETY: the declaration gives both functions one signature, and so one contract.
            unsafe { $same($($given),*) }
        }
    )*};
}

/// Declares functions with any number of pointer arguments. The arguments in registers are stored
/// right below those on the stack. All then form one array, the second argument of `$listed`.
#[macro_export]
macro_rules! listed {
    ($($name:ident => $listed:ident;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code))]
        pub(crate) unsafe extern "C-unwind" fn $name() {
            ::std::arch::naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {listed}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                listed = sym $listed,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code))]
        pub(crate) unsafe extern "C-unwind" fn $name() {
            ::std::arch::naked_asm!(
                "stp x30, x1, [sp, #-64]!",
                "stp x2, x3, [sp, #16]",
                "stp x4, x5, [sp, #32]",
                "stp x6, x7, [sp, #48]",
                "add x1, sp, #8",
                "bl {listed}",
                "ldr x30, [sp], #64",
                "ret",
                listed = sym $listed,
            )
        }
    )*};
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use super::*;

    type Abs = unsafe extern "C" fn(c_int) -> c_int;

    #[test]
    fn a_function_is_found_once_it_was_looked_up() {
        // SAFETY: the type of the C library's function.
        let next: Next<Abs> = unsafe { Next::new(c"abs") };
        assert!(next.resolved().is_none());
        // SAFETY: any number but the least one.
        assert_eq!(unsafe { next.get().expect("the C library has it")(-3) }, 3);
        assert!(next.resolved().is_some());
    }

    #[test]
    fn what_no_library_has_is_none() {
        // SAFETY: nothing has this name.
        let next: Next<Abs> = unsafe { Next::new(c"tidegate_no_such_function") };
        assert!(next.get().is_none() && next.resolved().is_none());
    }
}
