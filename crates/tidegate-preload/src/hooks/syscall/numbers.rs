//! The numbers of system calls that change no file.
//!
//! A call is in one of three classes: a hook makes it (`syscall`), it is harmless, or it is unseen.
//! A number in no list is unseen. A test compares the lists with the kernel's own header.

use std::ffi::c_long;

/// Numbers that the crate `libc` may not have. They are equal on all machines.
pub(super) const FCHMODAT2: c_long = 452;
pub(super) const SETXATTRAT: c_long = 463;
pub(super) const REMOVEXATTRAT: c_long = 466;
pub(super) const FILE_SETATTR: c_long = 469;

const IO_PGETEVENTS: c_long = if cfg!(target_arch = "x86_64") { 333 } else { 292 };

/// Defines [`HARMLESS`] from names of all machines, names of x86-64 only, and bare numbers.
macro_rules! harmless {
    ($($name:ident)* ; $($of_x86:ident)* ; $($number:literal)*) => {
        /// The harmless calls, a bit for each number.
        static HARMLESS: [u64; 8] = {
            let mut bits = [0; 8];
            $( bits = with(bits, libc::$name); )*
            #[cfg(target_arch = "x86_64")]
            {
                $( bits = with(bits, libc::$of_x86); )*
            }
            $( bits = with(bits, $number); )*
            bits = with(bits, IO_PGETEVENTS);
            bits
        };
    };
}

#[allow(clippy::cast_sign_loss, clippy::cast_possible_truncation)] // numbers of a table
const fn with(mut bits: [u64; 8], number: c_long) -> [u64; 8] {
    bits[number as usize / 64] |= 1 << (number as usize % 64);
    bits
}

// These calls change no file, no name and no descriptor that hooks know; they start no program and
// take no rights. `io_submit` and `io_uring_enter` need an earlier `io_setup` or `io_uring_setup`,
// which hooks see. `clone` and `clone3` only make threads here: hooks make all other uses. The bare
// numbers are cachestat, map_shadow_stack, futex_wake, futex_wait, futex_requeue, statmount,
// listmount, lsm_get_self_attr, lsm_list_modules, mseal, getxattrat, listxattrat and file_getattr.
harmless! {
    SYS_accept SYS_accept4 SYS_add_key SYS_adjtimex SYS_bpf SYS_brk SYS_capget SYS_chdir
    SYS_clock_adjtime SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_clock_settime
    SYS_clone SYS_clone3 SYS_connect SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
    SYS_epoll_pwait2 SYS_eventfd2 SYS_exit SYS_exit_group SYS_faccessat SYS_faccessat2
    SYS_fadvise64 SYS_fanotify_init SYS_fanotify_mark SYS_fchdir SYS_fgetxattr SYS_flistxattr
    SYS_flock SYS_fstat SYS_fstatfs SYS_futex SYS_futex_waitv SYS_get_mempolicy
    SYS_get_robust_list SYS_getcpu SYS_getcwd SYS_getdents64 SYS_getegid SYS_geteuid SYS_getgid
    SYS_getgroups SYS_getitimer SYS_getpeername SYS_getpgid SYS_getpid SYS_getppid SYS_getpriority
    SYS_getrandom SYS_getresgid SYS_getresuid SYS_getrlimit SYS_getrusage SYS_getsid
    SYS_getsockname SYS_getsockopt SYS_gettid SYS_gettimeofday SYS_getuid SYS_getxattr
    SYS_inotify_add_watch SYS_inotify_init1 SYS_inotify_rm_watch SYS_io_cancel SYS_io_destroy
    SYS_io_getevents  SYS_io_setup SYS_io_submit SYS_io_uring_enter
    SYS_io_uring_register SYS_ioprio_get SYS_ioprio_set SYS_kcmp SYS_keyctl SYS_kill
    SYS_landlock_add_rule SYS_landlock_create_ruleset SYS_lgetxattr SYS_listen SYS_listxattr
    SYS_llistxattr SYS_lookup_dcookie SYS_lseek SYS_lstat SYS_mbind SYS_membarrier
    SYS_memfd_create SYS_memfd_secret SYS_migrate_pages SYS_mincore SYS_mlock SYS_mlock2
    SYS_mlockall SYS_move_pages SYS_mq_getsetattr SYS_mq_notify SYS_mq_open SYS_mq_timedreceive
    SYS_mq_timedsend SYS_mq_unlink SYS_msgctl SYS_msgget SYS_msgrcv SYS_msgsnd SYS_msync
    SYS_munlock SYS_munlockall SYS_name_to_handle_at SYS_nanosleep SYS_newfstatat
    SYS_perf_event_open SYS_personality SYS_pidfd_getfd SYS_pidfd_open SYS_pidfd_send_signal
    SYS_pipe2 SYS_pkey_alloc SYS_pkey_free SYS_ppoll SYS_pread64 SYS_preadv SYS_preadv2
    SYS_process_mrelease SYS_process_vm_readv SYS_process_vm_writev
    SYS_pselect6 SYS_read SYS_readahead SYS_readlinkat SYS_readv SYS_recvfrom SYS_recvmmsg
    SYS_recvmsg SYS_remap_file_pages SYS_request_key SYS_restart_syscall SYS_rseq SYS_rt_sigaction
    SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigqueueinfo SYS_rt_sigreturn SYS_rt_sigsuspend
    SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo SYS_sched_get_priority_max
    SYS_sched_get_priority_min SYS_sched_getaffinity SYS_sched_getattr SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_rr_get_interval SYS_sched_setaffinity SYS_sched_setattr
    SYS_sched_setparam SYS_sched_setscheduler SYS_sched_yield SYS_semctl SYS_semget SYS_semop
    SYS_semtimedop SYS_sendto SYS_set_mempolicy SYS_set_mempolicy_home_node SYS_set_robust_list
    SYS_set_tid_address SYS_setdomainname SYS_sethostname SYS_setitimer SYS_setpgid
    SYS_setpriority SYS_setsid SYS_setsockopt SYS_settimeofday SYS_shmat SYS_shmctl SYS_shmget
    SYS_shutdown SYS_sigaltstack SYS_signalfd4 SYS_socket SYS_socketpair SYS_stat SYS_statfs
    SYS_statx SYS_sync_file_range SYS_sysinfo SYS_syslog SYS_tee SYS_tgkill SYS_timer_create
    SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime SYS_timerfd_create
    SYS_timerfd_gettime SYS_timerfd_settime SYS_times SYS_tkill SYS_umask SYS_uname
    SYS_userfaultfd SYS_vhangup SYS_vmsplice SYS_wait4 SYS_waitid
    ;
    SYS_access SYS_alarm SYS_arch_prctl SYS_epoll_create SYS_epoll_ctl_old SYS_epoll_wait
    SYS_epoll_wait_old SYS_eventfd  SYS_get_thread_area SYS_getdents
    SYS_getpgrp SYS_inotify_init SYS_ioperm SYS_iopl SYS_modify_ldt SYS_pause SYS_pipe SYS_poll
    SYS_readlink SYS_select SYS_set_thread_area SYS_signalfd SYS_sysfs SYS_time
    SYS_ustat
    ;
    451 453 454 455 456 457 458 459 461 462 464 465 468
}

/// Returns whether a call of this number changes nothing that hooks have to know.
pub(super) fn is_harmless(number: c_long) -> bool {
    let number = usize::try_from(number).unwrap_or(usize::MAX);
    HARMLESS.get(number / 64).is_some_and(|bits| bits >> (number % 64) & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls that may change files unseen by the hooks.
    const UNSEEN: &str = "
    uselib swapon swapoff reboot quotactl quotactl_fd nfsservctl afs_syscall
    tuxcall security vserver putpmsg getpmsg create_module kexec_load kexec_file_load ptrace
    move_mount fsconfig mount_setattr open_tree fsmount fspick _sysctl init_module
    finit_module delete_module
        get_kernel_syms query_module lsm_set_self_attr open_tree_attr";
    /// Names in the header that are no calls.
    const NONE: [&str; 2] = ["arch_specific_syscall", "syscalls"];
    #[cfg(target_arch = "x86_64")]
    const HEADER: &str = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";
    #[cfg(target_arch = "aarch64")]
    const HEADER: &str = "/usr/include/asm-generic/unistd.h";

    /// Returns the calls in the header of this machine, each with its number.
    fn calls() -> Vec<(String, c_long)> {
        let header = std::fs::read_to_string(HEADER).expect("linux-libc-dev is installed");
        let lines = header.lines().filter_map(|line| line.strip_prefix("#define __NR_"));
        let call = |line: &str| {
            let (name, number) = line.split_once([' ', '\t'])?;
            Some((name.to_owned(), number.trim().parse().ok()?))
        };
        // Those are for machines of 32 bits.
        lines.filter_map(call).filter(|(_, number)| !(403..424).contains(number)).collect()
    }

    /// Returns whether a hook makes this call, as the names in the source tell.
    fn has_hook(name: &str) -> bool {
        let new = [("fchmodat2", FCHMODAT2), ("setxattrat", SETXATTRAT)];
        let newer = [("removexattrat", REMOVEXATTRAT), ("file_setattr", FILE_SETATTR)];
        let has_word = |source: &str, word: &str| {
            let is_of_name = |character: char| character.is_alphanumeric() || character == '_';
            source.split(|character| !is_of_name(character)).any(|found| found == word)
        };
        has_word(include_str!("../syscall.rs"), &format!("SYS_{name}"))
            || new.iter().chain(&newer).any(|(known, _)| *known == name)
    }

    #[test]
    fn each_call_of_the_kernel_is_in_a_list() {
        let calls = calls();
        assert!(calls.len() > 200, "{} in {HEADER}", calls.len());
        let is_listed = |name: &str, number| {
            let is_unseen = UNSEEN.split_whitespace().any(|unseen| unseen == name);
            assert!(!(is_unseen && is_harmless(number)), "{name} is in two lists");
            is_harmless(number) || has_hook(name) || is_unseen
        };
        let new: Vec<_> = calls
            .iter()
            .filter(|(name, number)| !NONE.contains(&&**name) && !is_listed(name, *number))
            .collect();
        assert!(new.is_empty(), "put each in a list of numbers.rs: {new:?}");
    }

    #[test]
    fn numbers_that_no_kernel_has_are_unseen() {
        for number in [-1, 500, 511, 512, 100_000, c_long::MAX, c_long::MIN] {
            assert!(!is_harmless(number), "{number}");
        }
        assert!(is_harmless(libc::SYS_getpid) && !is_harmless(libc::SYS_rename));
    }
}
