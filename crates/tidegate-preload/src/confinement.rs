//! Tests that, once another thread has given the log up and installed a filter of system calls, a
//! hook makes only the program's own system calls.
//!
//! The other thread can do so at a *seam*, where it waits for no
//! [`Holder`](crate::state::process::Holder): before a hook begins, after the hook has seen that
//! there is a log, and whenever a holder has gone. The test tries each seam of each operation. The
//! filter kills the process for any other system call.
#![allow(unsafe_code)] // the hooks, and a system call that no crate has

use std::cell::Cell;
use std::ffi::{CString, c_int, c_long};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::sync::mpsc::channel;
use std::thread;

use tidegate::log::cover::Cause;

use crate::hooks::{attributes, close, names, open, rights, size, sync, write};
use crate::state::{descriptors, process, record_locks};
use crate::sys::{next, raw};
use crate::testing::World;

thread_local! {
    /// Seams that the thread still passes before it is confined; `None`: it is not confined.
    static SEAMS: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Counts a seam. At the last one, gives the log up and installs the filter.
fn seam() {
    match SEAMS.get() {
        Some(0) => {
            SEAMS.set(None);
            process::pretend_given_up(true);
            install_filter();
        }
        seams => SEAMS.set(seams.map(|seams| seams - 1)),
    }
}

/// System calls that any thread needs, and those that the operations below make for the program.
const ALLOWED: [c_long; 29] = [
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_futex,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_ftruncate,
    libc::SYS_truncate,
    libc::SYS_fallocate,
    libc::SYS_openat,
    libc::SYS_close,
    raw::by_architecture!(libc::SYS_dup2, libc::SYS_dup3),
    raw::by_architecture!(libc::SYS_rename, libc::SYS_renameat),
    raw::by_architecture!(libc::SYS_link, libc::SYS_linkat),
    raw::by_architecture!(libc::SYS_unlink, libc::SYS_unlinkat),
    libc::SYS_fchmod,
    libc::SYS_fchown,
    libc::SYS_fcntl,
];

/// Installs the filter for the calling thread alone. It cannot be removed.
fn install_filter() {
    let instruction = |code: u32, if_not: u8, k: u32| {
        let code = u16::try_from(code).unwrap();
        libc::sock_filter { code, jt: 0, jf: if_not, k }
    };
    let load = |at| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, at);
    let answer = |answer| instruction(libc::BPF_RET | libc::BPF_K, 0, answer);
    let jump = |how, if_not, k| instruction(libc::BPF_JMP | how | libc::BPF_K, if_not, k);
    // Allows real changes of the signal mask. The library probes memory by calls with an invalid
    // `how`: the filter kills for these.
    let masks = u32::try_from(libc::SYS_rt_sigprocmask).unwrap();
    let mut filter = vec![
        load(0),
        jump(libc::BPF_JEQ, 4, masks),
        load(16),
        jump(libc::BPF_JGT, 1, 2),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    filter.push(load(0));
    for number in ALLOWED {
        let number = u32::try_from(number).unwrap();
        filter.push(jump(libc::BPF_JEQ, 1, number));
        filter.push(answer(libc::SECCOMP_RET_ALLOW));
    }
    filter.push(answer(libc::SECCOMP_RET_KILL_PROCESS));
    let len = u16::try_from(filter.len()).unwrap();
    let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
    let arguments = raw::words![libc::PR_SET_NO_NEW_PRIVS, 1_usize];
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { raw::call(libc::SYS_prctl, arguments) }, 0);
    let arguments = raw::words![libc::SECCOMP_SET_MODE_FILTER, 0_usize, &raw const program];
    // SAFETY: the filter lives until the call returns.
    assert_eq!(unsafe { raw::call(libc::SYS_seccomp, arguments) }, 0);
}

/// Arguments of an operation: a descriptor, and the paths of its file, of no file, and of another.
struct Given {
    fd: c_int,
    path: CString,
    free: CString,
    other: CString,
}

/// A call as programs make it. Returns whether it succeeds.
type Operation = (&'static str, fn(&Given) -> bool);

macro_rules! operations {
    ($($name:literal: |$given:pat_param| $call:expr;)*) => {
        [$(($name, |$given| {
            // SAFETY: the test's own descriptors and terminated paths.
            let result = unsafe { $call };
            result >= 0
        })),*]
    };
}

const OPERATIONS: [Operation; 20] = operations! {
    "write": |given| write::write(given.fd, b"some".as_ptr().cast(), 4);
    "pwrite": |given| write::pwrite64(given.fd, b"some".as_ptr().cast(), 4, 9000);
    "fsync": |given| sync::fsync(given.fd);
    "fdatasync": |given| sync::fdatasync(given.fd);
    "syncfs": |given| sync::syncfs(given.fd);
    "lockf": |given| record_locks::lockf(given.fd, libc::F_TEST, 0);
    "ftruncate": |given| size::ftruncate(given.fd, 2);
    "truncate": |given| size::truncate(given.path.as_ptr(), 2);
    "fallocate": |given| size::fallocate(given.fd, 0, 0, 9000);
    "open": |given| open::open(given.path.as_ptr(), libc::O_RDWR, 0);
    "open and empty": |given| open::open(given.path.as_ptr(), libc::O_RDWR | libc::O_TRUNC, 0);
    "open and make": |given| open::open(given.free.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o600);
    "close": |given| close::close(given.fd);
    "dup2": |given| close::dup2(given.fd, given.fd + 900);
    "set flags": |given| close::fcntl64(given.fd, libc::F_SETFL, libc::O_APPEND.unsigned_abs() as usize);
    "rename": |given| names::rename(given.path.as_ptr(), given.other.as_ptr());
    "link": |given| names::link(given.path.as_ptr(), given.free.as_ptr());
    "unlink": |given| names::unlink(given.path.as_ptr());
    "fchmod": |given| attributes::fchmod(given.fd, 0o600);
    "fchown": |given| attributes::fchown(given.fd, u32::MAX, u32::MAX);
};

/// How the log knows the file before the operation.
#[derive(Debug, Clone, Copy)]
enum State {
    Unknown,
    Plain,
    Covered,
    /// This process has created the file.
    New,
}

fn file_in(world: &World, name: &str, state: State) -> File {
    if matches!(state, State::New) {
        return File::create_new(world.path(name)).unwrap();
    }
    let file = world.file(name);
    match state {
        State::Covered => descriptors::set(file.as_raw_fd(), world.covered(&file, 0).known),
        State::Plain => world.keep(&world.open(&file, 0)),
        State::Unknown | State::New => {
            descriptors::clear(file.as_raw_fd());
        }
    }
    file
}

/// Runs the operation and gives the log up at a seam. Returns whether it has that many seams.
fn run_confined(world: &World, (name, run): Operation, state: State, seams: u32) -> bool {
    // If the filter kills the process, this is the last line of output.
    println!("{name} of a file that is {state:?}, after {seams} seams");
    let name = format!("{name}-{state:?}-{seams}");
    let [free, other] = ["free", "other"].map(|suffix| format!("{name}-{suffix}"));
    let file = file_in(world, &name, state);
    world.file(&other);
    let path = |name: &str| CString::new(world.path(name).into_os_string().into_vec()).unwrap();
    let (fd, path, free, other) = (file.as_raw_fd(), path(&name), path(&free), path(&other));
    let given = Given { fd, path, free, other };
    let confined = || {
        SEAMS.set(Some(seams));
        process::RELEASED.set(seam);
        if seams == 0 {
            seam();
        }
        let has_succeeded = run(&given);
        (has_succeeded, raw::errno(), SEAMS.take().is_none())
    };
    let (has_succeeded, errno, was_confined) =
        thread::scope(|scope| scope.spawn(confined).join().unwrap());
    process::pretend_given_up(false);
    assert!(has_succeeded, "error {errno}");
    std::mem::forget(file);
    was_confined
}

#[test]
fn no_system_call_but_the_program_s_is_made_after_the_log_was_given_up() {
    next::resolve();
    descriptors::make().unwrap();
    let world = World::of_process();
    let mut confined = 0;
    for operation in OPERATIONS {
        for state in [State::Unknown, State::Plain, State::Covered, State::New] {
            let seams = (0..100).find(|seams| !run_confined(&world, operation, state, *seams));
            confined += seams.unwrap();
        }
    }
    println!("{confined} operations were confined");
    assert!(confined > 200, "{confined}");
}

/// Returns whether the thread waits or has ended.
fn is_at_rest(thread: rustix::thread::Pid) -> bool {
    let stat = format!("/proc/self/task/{thread}/stat");
    std::fs::read_to_string(stat).map_or(true, |stat| stat.contains(") S "))
}

#[test]
fn a_thread_waits_for_the_one_that_gives_the_log_up() {
    let _world = World::of_process();
    let (begun, has_begun) = channel();
    let (go_on, may_go_on) = channel();
    let (number, has_number) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            process::give_up(Cause::Rights, || {
                begun.send(()).unwrap();
                may_go_on.recv().unwrap();
            });
        });
        has_begun.recv().unwrap();
        let second = scope.spawn(move || {
            number.send(rustix::thread::gettid()).unwrap();
            rights::give_up();
            assert!(process::log().is_none() && process::has_given_up());
        });
        let number = has_number.recv().unwrap();
        while !is_at_rest(number) {
            thread::yield_now();
        }
        let waits = !second.is_finished() && process::log().is_some();
        go_on.send(()).unwrap();
        assert!(waits);
    });
}
