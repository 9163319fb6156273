//! Stands in front of the program's signal handlers: the kernel has [`enter`] as the handler of
//! each signal that the program handles, and the program sees its own.
//!
//! A handler that the kernel resets when it runs (`SA_RESETHAND`), and one that the program
//! installs in another way, stays as it is: `signals` then blocks.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::signals::{FAULTS, HANDLES_SIGNALS, HAS_BARE_HANDLERS, begin_handler, end_handler};
use crate::sys::next;
use crate::sys::raw::{self, words};

const SIGNALS: usize = 64;
/// What `sigset` takes to block a signal.
const SIG_HOLD: usize = 2;

/// The kernel tells about the signal in `siginfo_t`.
const IS_TOLD: usize = 1;
/// The program has asked for `siginfo_t`.
const IS_ASKED: usize = 2;

/// The program's handler of a signal: the last one that it installed.
struct Handler {
    address: AtomicUsize,
    /// [`IS_TOLD`] and [`IS_ASKED`].
    info: AtomicUsize,
}

static HANDLERS: [Handler; SIGNALS] =
    [const { Handler { address: AtomicUsize::new(libc::SIG_DFL), info: AtomicUsize::new(0) } };
        SIGNALS];

impl Handler {
    fn of(signal: c_int) -> Option<&'static Self> {
        HANDLERS.get(usize::try_from(signal).ok()?.checked_sub(1)?)
    }

    /// Returns the address and the bits of `info`.
    fn get(&self) -> (usize, usize) {
        (self.address.load(Ordering::SeqCst), self.info.load(Ordering::SeqCst))
    }

    fn set(&self, (address, info): (usize, usize)) {
        self.info.store(info, Ordering::SeqCst);
        self.address.store(address, Ordering::SeqCst);
    }
}

type Function = unsafe extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Handles a signal for the program: runs its handler now, or after the interrupted operation.
unsafe extern "C-unwind" fn enter(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some((address, bits)) = Handler::of(signal).map(Handler::get) else { return };
    let told = if bits & IS_TOLD == 0 { ptr::null() } else { info.cast_const() };
    // SAFETY: the kernel gave both to this handler, and has filled `info` if it tells.
    let begun = unsafe { begin_handler(signal, told, context.cast()) };
    let Some(interrupted) = begun else { return };
    // SAFETY: the program installed this function; it may ignore arguments behind the first.
    let function = unsafe { std::mem::transmute::<usize, Function>(address) };
    // SAFETY: the arguments are the kernel's.
    unsafe { function(signal, info, context) };
    end_handler(interrupted);
}

fn entry() -> usize {
    enter as unsafe extern "C-unwind" fn(_, _, _) as usize
}

/// Looks for handlers that were installed before the library was loaded.
pub(crate) fn find_handlers() {
    for signal in 1..=i32::try_from(SIGNALS).unwrap_or(0) {
        // The kernel's structure: handler, flags, restorer, mask.
        let mut action = [0_u64; 4];
        let arguments = words![signal, 0_usize, action.as_mut_ptr(), size_of::<u64>()];
        // SAFETY: null for the new action, and memory for the old one.
        if unsafe { raw::call(libc::SYS_rt_sigaction, arguments) } == 0 {
            note_bare(signal, usize::try_from(action[0]).unwrap_or(0));
        }
    }
}

/// Notes a handler before which [`enter`] does not stand.
fn note_bare(signal: c_int, address: usize) {
    if is_function(address) && address != entry() {
        note_by_kernel(signal);
    }
}

/// Notes that the program may install a handler for `signal` by a system call: before that one
/// [`enter`] does not stand.
pub(crate) fn note_by_kernel(signal: c_int) {
    HAS_BARE_HANDLERS.store(true, Ordering::SeqCst);
    note(signal);
}

/// Notes that the program handles `signal`.
fn note(signal: c_int) {
    if !FAULTS.contains(&signal) {
        HANDLES_SIGNALS.store(true, Ordering::SeqCst);
    }
}

fn is_function(address: usize) -> bool {
    ![libc::SIG_DFL, libc::SIG_IGN, SIG_HOLD, libc::SIG_ERR].contains(&address)
}

/// Puts [`enter`] in the place of the program's handler at `address`, which the kernel is about to
/// get. Returns the address for the kernel.
fn stand_before(signal: c_int, address: usize, info: usize) -> usize {
    match Handler::of(signal) {
        Some(handler) if is_function(address) && address != entry() => {
            handler.set((address, info));
            note(signal);
            entry()
        }
        _ => address,
    }
}

/// Installs `action` by the C library's `sigaction`.
///
/// # Safety
/// Both are null or point to what the C library's function takes.
unsafe fn install(
    signal: c_int,
    action: *const libc::sigaction,
    before: *mut libc::sigaction,
) -> c_int {
    let Some(sigaction) = next::sigaction.get() else { return raw::failed_int(libc::ENOSYS) };
    let former = Handler::of(signal).map(Handler::get);
    // SAFETY: null or the caller's action.
    let mut own = unsafe { action.as_ref() }.copied();
    if let Some(own) = &mut own {
        if own.sa_flags & libc::SA_RESETHAND != 0 {
            note_bare(signal, own.sa_sigaction);
        } else {
            let asked = if own.sa_flags & libc::SA_SIGINFO == 0 { 0 } else { IS_ASKED };
            own.sa_sigaction = stand_before(signal, own.sa_sigaction, IS_TOLD | asked);
            if own.sa_sigaction == entry() {
                own.sa_flags |= libc::SA_SIGINFO;
            }
        }
    }
    let own = own.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: null or an action, and null or the caller's memory for one.
    let result = unsafe { sigaction(signal, own.cast(), before.cast()) };
    let (Some(handler), Some(former)) = (Handler::of(signal), former) else { return result };
    if result != 0 {
        handler.set(former);
    // SAFETY: null or the caller's memory, which the C library has filled.
    } else if let Some(before) = unsafe { before.as_mut() }
        && before.sa_sigaction == entry()
    {
        before.sa_sigaction = former.0;
        if former.1 & IS_ASKED == 0 {
            before.sa_flags &= !libc::SA_SIGINFO;
        }
    }
    result
}

/// Declares hooks of `sigaction`.
macro_rules! actions {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            signal: c_int,
            action: *const libc::sigaction,
            before: *mut libc::sigaction,
        ) -> c_int {
            // SAFETY: the caller's pointers are those of `sigaction`.
            unsafe { install(signal, action, before) }
        }
    )*};
}
actions!(sigaction __sigaction);

/// Declares hooks of `signal` and its kin; `$stands` says whether [`enter`] stands before handlers
/// that they install: not before those that the kernel resets, and not before what `sigset` holds.
/// Handlers that `signal` installs get no context on other architectures than x86-64.
macro_rules! handlers {
    ($stands:literal: $($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(signal: c_int, handler: *mut c_void) -> *mut c_void {
            let Some(function) = next::$name.get() else {
                raw::set_errno(libc::ENOSYS);
                return ptr::without_provenance_mut(libc::SIG_ERR);
            };
            let former = Handler::of(signal).map(Handler::get);
            let own = if $stands { stand_before(signal, handler.addr(), 0) } else { handler.addr() };
            note_bare(signal, own);
            // SAFETY: the C library's function of this type, with the program's handler or the one
            // before it.
            let result = unsafe { function(signal, handler.with_addr(own)) };
            let (Some(handler), Some(former)) = (Handler::of(signal), former) else { return result };
            if result.addr() == libc::SIG_ERR {
                handler.set(former);
            }
            if result.addr() == entry() { result.with_addr(former.0) } else { result }
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
handlers!(true: signal bsd_signal ssignal);
#[cfg(not(target_arch = "x86_64"))]
handlers!(false: signal bsd_signal ssignal);
handlers!(false: sysv_signal __sysv_signal sigset);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_functions_are_handlers() {
        assert!(is_function(4096));
        assert!([libc::SIG_DFL, libc::SIG_IGN, libc::SIG_ERR].iter().all(|it| !is_function(*it)));
    }

    /// Returns the action that the kernel has, or that the program sees.
    fn action_of(signal: c_int, is_seen: bool) -> libc::sigaction {
        // SAFETY: all zeroes are an action.
        let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
        let result = if is_seen {
            // SAFETY: memory for an action.
            unsafe { install(signal, ptr::null(), &raw mut found) }
        } else {
            // SAFETY: memory for an action.
            unsafe { libc::sigaction(signal, ptr::null(), &raw mut found) }
        };
        assert_eq!(result, 0);
        found
    }

    extern "C" fn nothing(_: c_int) {}

    #[test]
    fn the_program_sees_its_own_handler() {
        let address = nothing as extern "C" fn(_) as usize;
        let mut action = action_of(libc::SIGUSR2, false);
        (action.sa_sigaction, action.sa_flags) = (address, libc::SA_RESTART);
        // SAFETY: an action with a function.
        assert_eq!(unsafe { install(libc::SIGUSR2, &raw const action, ptr::null_mut()) }, 0);
        assert_eq!(action_of(libc::SIGUSR2, false).sa_sigaction, entry());
        let seen = action_of(libc::SIGUSR2, true);
        assert_eq!((seen.sa_sigaction, seen.sa_flags & libc::SA_SIGINFO), (address, 0));
        // SAFETY: the kernel refuses a handler of this signal.
        assert_eq!(unsafe { install(libc::SIGKILL, &raw const action, ptr::null_mut()) }, -1);
        assert_eq!(Handler::of(libc::SIGKILL).map(Handler::get), Some((libc::SIG_DFL, 0)));
    }
}
