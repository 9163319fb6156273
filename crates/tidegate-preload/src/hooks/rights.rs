//! Hooks: calls that give up rights of the process.
//!
//! Invariant: before the rights are gone, all files have left the log, and pool and control memory
//! are no longer mapped. From then on every hook acts as the C library's function. No process with
//! fewer rights than the pool's owner has the log mapped. If the call fails, the process stays
//! without the log, which is right too.
//!
//! A child of `vfork` borrows the memory of its parent, which keeps the log. So logging is only
//! suspended, for as long as the child lives.
#![allow(unsafe_code)] // C's calling convention
#![allow(clippy::missing_safety_doc)] // the manual page of each function says it

use std::ffi::{c_char, c_int, c_long, c_ulong, c_void};

use libc::{gid_t, size_t, uid_t};
use tidegate::log::cover::Cause;

use crate::state::{process, supervisor};
use crate::sys::next;
use crate::sys::raw::{self, words};

/// Gives the log up. To be called before the process gives up rights.
pub(crate) fn give_up() {
    give_up_for(Cause::Rights);
}

/// Gives the log up before the program has its system calls filtered. A filter in a child of
/// `vfork` does not apply to its parent, whose memory this is.
pub(crate) fn give_up_for_filter() {
    if !process::in_vfork_child() {
        process::set_filtered();
    }
    give_up();
}

/// Gives the log up, for a cause that the supervisor is told. If another thread is doing so,
/// returns after the last system call that this takes: a filter may kill for one.
pub(crate) fn give_up_for(cause: Cause) {
    if process::in_vfork_child() {
        if process::log().is_some() {
            suspend(cause);
        }
        return;
    }
    process::give_up(cause, || suspend(cause));
}

fn suspend(cause: Cause) {
    supervisor::suspend(process::number(), Some(cause), c"");
}

/// Stands for no user or group: the process keeps the one that it has.
const SAME: u32 = u32::MAX;

/// Gives the log up unless each id in `wanted` is the real, effective and saved id already.
fn become_other(call: c_long, wanted: &[u32]) {
    if process::log().is_none() {
        return give_up();
    }
    let mut now = [SAME; 3];
    let [real, effective, saved] = &mut now;
    let arguments = words![&raw mut *real, &raw mut *effective, &raw mut *saved];
    // SAFETY: the kernel writes three ids, and there is memory for three.
    let known = unsafe { raw::call(call, arguments) } == 0;
    let stays = |id: &u32| *id == SAME || now == [*id; 3];
    if !known || !wanted.iter().all(stays) {
        give_up();
    }
}

fn of_user(wanted: &[uid_t]) {
    become_other(libc::SYS_getresuid, wanted);
}

fn of_group(wanted: &[gid_t]) {
    become_other(libc::SYS_getresgid, wanted);
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) $before:expr;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> c_int {
            $before;
            match next::$name.get() {
                // SAFETY: the C library's function of this type, with the caller's arguments.
                Some(function) => unsafe { function($($argument),*) },
                None => raw::failed_int(libc::ENOSYS),
            }
        }
    )*};
}

hooks! {
    setuid(user: uid_t) of_user(&[user]);
    seteuid(user: uid_t) of_user(&[user]);
    setreuid(real: uid_t, effective: uid_t) of_user(&[real, effective]);
    setresuid(real: uid_t, effective: uid_t, saved: uid_t) of_user(&[real, effective, saved]);
    setfsuid(user: uid_t) of_user(&[user]);
    setgid(group: gid_t) of_group(&[group]);
    setegid(group: gid_t) of_group(&[group]);
    setregid(real: gid_t, effective: gid_t) of_group(&[real, effective]);
    setresgid(real: gid_t, effective: gid_t, saved: gid_t) of_group(&[real, effective, saved]);
    setfsgid(group: gid_t) of_group(&[group]);
    setgroups(count: size_t, groups: *const gid_t) give_up();
    initgroups(user: *const c_char, group: gid_t) give_up();
    capset(header: *mut c_void, data: *const c_void) give_up();
    chroot(path: *const c_char) give_up();
    setns(fd: c_int, kind: c_int) give_up();
}

/// Returns the function to call before a request of `prctl` that takes rights away.
fn before_request(option: c_int) -> Option<fn()> {
    match option {
        libc::PR_SET_SECCOMP => Some(give_up_for_filter),
        libc::PR_CAPBSET_DROP | libc::PR_SET_SECUREBITS => Some(give_up),
        _ => None,
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C-unwind" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    if let Some(give_up) = before_request(option) {
        give_up();
    }
    let arguments = words![option, second, third, fourth, fifth];
    // SAFETY: the caller's arguments; the kernel ignores those that the option does not take.
    raw::returned_int(unsafe { raw::call(libc::SYS_prctl, arguments) })
}

/// Returns whether flags of `unshare` or `clone` lead to other namespaces.
pub(crate) fn leads_to_namespaces(flags: u64) -> bool {
    const NEW_TIME: c_int = 0x80;
    let all = libc::CLONE_NEWNS
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWCGROUP
        | NEW_TIME;
    flags & u64::from(all.cast_unsigned()) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_told_from_threads() {
        let flags = |flags: c_int| leads_to_namespaces(u64::from(flags.cast_unsigned()));
        assert!(flags(libc::CLONE_NEWUSER | libc::CLONE_FILES) && flags(libc::CLONE_NEWPID));
        assert!(!flags(libc::CLONE_FILES | libc::CLONE_VM | libc::SIGCHLD));
    }

    #[test]
    fn a_filter_of_a_child_of_vfork_is_none_of_its_parent() {
        let before = process::become_vfork_child();
        give_up_for_filter();
        process::end_vfork_child(before);
        assert!(!process::is_filtered());
        give_up_for_filter();
        assert!(process::is_filtered());
    }

    #[test]
    fn only_requests_that_take_rights_count() {
        let takes_rights = |option| before_request(option).is_some();
        assert!(takes_rights(libc::PR_SET_SECCOMP) && takes_rights(libc::PR_CAPBSET_DROP));
        assert!(!takes_rights(libc::PR_SET_NAME) && !takes_rights(libc::PR_SET_NO_NEW_PRIVS));
    }
}
