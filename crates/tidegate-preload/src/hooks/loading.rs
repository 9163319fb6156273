//! Hooks: libraries that are loaded while the program runs, and functions that are looked up by
//! name.
//!
//! Invariants:
//! 1. All files leave the log, for as long as this process lives, before a library runs code whose
//!    system calls the hooks do not see. Such a library has system call instructions of its own,
//!    binds to the C library around the hooks, or comes with another copy of the C library.
//! 2. A caller that looks up a function with a hook in front gets the hook.
//! 3. The dynamic linker looks at the address of its caller. So it is called in place of the hook,
//!    or with a path that makes the address irrelevant.
//!
//! The dynamic linker allocates, and so may these hooks.
#![allow(unsafe_code)] // C's calling convention, and assembly

mod search;

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use tidegate::log::cover::Cause;

use crate::hooks::exec;
use crate::hooks::rights;
use crate::state::objects;
use crate::state::process::{self, Attached};
use crate::state::suspended::Suspended;
use crate::sys::next;
use crate::sys::readable::text;

pub(crate) use search::remember;

type Handle = *mut c_void;

/// How a hook goes on.
#[repr(C)]
struct Way {
    is_answered: usize,
    answer: *mut c_void,
}

impl Way {
    /// Jumps to the C library's function, which takes the place of the hook.
    const ON: Self = Self { is_answered: 0, answer: ptr::null_mut() };

    /// Returns this to the caller of the hook.
    const fn back(answer: *mut c_void) -> Self {
        Self { is_answered: 1, answer }
    }
}

/// Declares hooks of up to three arguments. `$before` is called with the arguments and the caller's
/// address. It sets `$next` and returns how the hook goes on.
macro_rules! in_place {
    ($($name:ident: $before:ident, $next:ident;)*) => {$(
        static $next: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name() {
            naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "mov rcx, [rsp + 24]",
                "call {before}",
                "test rax, rax",
                "jnz 2f",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp qword ptr [rip + {next}]",
                "2:",
                "mov rax, rdx",
                "add rsp, 24",
                "ret",
                before = sym $before,
                next = sym $next,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name() {
            naked_asm!(
                "stp x29, x30, [sp, #-48]!",
                "stp x0, x1, [sp, #16]",
                "str x2, [sp, #32]",
                "mov x3, x30",
                "bl {before}",
                "cbnz x0, 2f",
                "ldp x0, x1, [sp, #16]",
                "ldr x2, [sp, #32]",
                "ldp x29, x30, [sp], #48",
                "adrp x16, {next}",
                "ldr x16, [x16, :lo12:{next}]",
                "br x16",
                "2:",
                "mov x0, x1",
                "ldp x29, x30, [sp], #48",
                "ret",
                before = sym $before,
                next = sym $next,
            )
        }
    )*};
}

in_place! {
    dlopen: before_dlopen, DLOPEN;
    dlmopen: before_dlmopen, DLMOPEN;
    dlsym: before_dlsym, DLSYM;
    dlvsym: before_dlvsym, DLVSYM;
}

/// Returns null, in place of a function that the C library does not have.
extern "C" fn missing() -> *mut c_void {
    ptr::null_mut()
}

/// Sets the function that the hook goes on with.
fn set<F>(next: &AtomicPtr<c_void>, function: Option<F>, address: impl Fn(F) -> *mut c_void) {
    next.store(function.map_or(missing as *mut c_void, address), Ordering::Relaxed);
}

extern "C" fn before_dlopen(path: *const c_char, flags: c_int, _: usize, caller: usize) -> Way {
    set(&DLOPEN, next::dlopen.get(), |function| function as *mut c_void);
    open(path, flags, caller)
}

extern "C" fn before_dlmopen(
    namespace: c_long,
    path: *const c_char,
    flags: c_int,
    caller: usize,
) -> Way {
    set(&DLMOPEN, next::dlmopen.get(), |function| function as *mut c_void);
    if namespace == libc::LM_ID_BASE {
        return open(path, flags, caller);
    }
    // The new namespace has a C library of its own.
    rights::give_up_for(Cause::OwnCalls);
    Way::ON
}

extern "C" fn before_dlsym(handle: Handle, name: *const c_char, _: usize, caller: usize) -> Way {
    set(&DLSYM, next::dlsym.get(), |function| function as *mut c_void);
    ask(handle, name, caller, || {
        let dlsym = next::dlsym.get()?;
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(unsafe { dlsym(handle, name) })
    })
}

extern "C" fn before_dlvsym(
    handle: Handle,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Way {
    set(&DLVSYM, next::dlvsym.get(), |function| function as *mut c_void);
    ask(handle, name, caller, || {
        let dlvsym = next::dlvsym.get()?;
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(unsafe { dlvsym(handle, name, version) })
    })
}

/// Answers a look-up by name. `found` asks the dynamic linker with the handle of a library.
fn ask(
    handle: Handle,
    name: *const c_char,
    caller: usize,
    found: impl FnOnce() -> Option<*mut c_void>,
) -> Way {
    if process::log().is_none() {
        return Way::ON;
    }
    let Some(hook) = text(name).and_then(objects::hook) else { return Way::ON };
    if handle == libc::RTLD_DEFAULT {
        // The dynamic linker finds the hook, or a function of the program in front of the hook.
        return Way::ON;
    }
    if handle == libc::RTLD_NEXT {
        return if objects::is_behind(caller) { Way::back(hook) } else { Way::ON };
    }
    match found() {
        Some(found) if objects::is_of_hooked(found.addr()) => Way::back(hook),
        // When asked once more, the dynamic linker returns the error.
        _ => Way::ON,
    }
}

/// Loads a library. Gives the log up if the library's system calls will not be seen.
fn open(path: *const c_char, flags: c_int, caller: usize) -> Way {
    let (Some(attached), Some(dlopen)) = (process::attached(), next::dlopen.get()) else {
        return Way::ON;
    };
    let Some(name) = text(path).filter(|name| !name.is_empty()) else { return Way::ON };
    // SAFETY: a terminated name.
    let load = |name: &CStr, flags| unsafe { dlopen(name.as_ptr(), flags) };
    if process::in_vfork_child() || is_loaded(name, load) {
        return Way::ON;
    }
    let found = search::find(name, caller);
    let (name, objects) = (found.path.as_deref().unwrap_or(name), found.objects.as_deref());
    if flags & libc::RTLD_DEEPBIND == 0 {
        return Way::back(judged(attached, name, objects, || load(name, flags)));
    }
    if objects.is_none_or(search::may_bind_otherwise) {
        rights::give_up_for(Cause::OwnCalls);
        return Way::back(load(name, flags));
    }
    Way::back(judged(attached, name, objects, || load(name, flags & !libc::RTLD_DEEPBIND)))
}

/// Returns whether the library is loaded already, so that its code is not new.
fn is_loaded(name: &CStr, load: impl FnOnce(&CStr, c_int) -> Handle) -> bool {
    let handle = load(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
    if !handle.is_null()
        && let Some(dlclose) = next::dlclose.get()
    {
        // SAFETY: a handle that `load` has just returned, closed once.
        unsafe { dlclose(handle) };
    }
    !handle.is_null()
}

/// Loads a library by `load`, which also runs its constructors. `expected` are the files that come
/// with the library. If they are not known, or one makes system calls of its own, logging is
/// suspended meanwhile. If a new file makes such calls, the log is given up.
fn judged(
    attached: &Attached,
    name: &CStr,
    expected: Option<&[std::ffi::CString]>,
    load: impl FnOnce() -> Handle,
) -> Handle {
    let makes_own_calls = |path: &std::ffi::CString| exec::library_makes_own_calls(attached, path);
    let is_watched = expected.is_some_and(|paths| !paths.iter().any(makes_own_calls));
    let suspended = (!is_watched).then(|| Suspended::new(None, name));
    let before = objects::all();
    let handle = load();
    let after = objects::all();
    let mut new = after.iter().filter(|object| !before.contains(object));
    if new.any(|object| makes_own_calls(&object.path)) {
        rights::give_up_for(Cause::OwnCalls);
    }
    drop(suspended);
    handle
}
