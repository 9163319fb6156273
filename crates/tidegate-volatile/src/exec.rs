//! Hooks that start programs. A program that cannot load this library is started without its name
//! in `LD_PRELOAD`: another C library would not start the program, and a dynamic linker that finds
//! no library to load says so. So is one that a dynamic linker is only to list the libraries of.
//! All other environments stay as they are.
#![allow(unsafe_code)] // C's calling convention, system calls and strings
#![allow(clippy::missing_safety_doc)] // the manual page of each function says it

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libc::{AT_FDCWD, pid_t};
use tidegate_interpose::entries::numbers;
use tidegate_interpose::environment::{self, Additions, Strings, strings};
use tidegate_interpose::image::{self, HEAD_BYTES, Image};
use tidegate_interpose::raw::{self, words};

use crate::confined::is_confined;
use crate::next::{self, Argv};

/// The path of this library, as `LD_PRELOAD` names it.
static LIBRARY: OnceLock<&CStr> = OnceLock::new();
/// The path of the compiler's library, which this one needs.
static RUNTIME: OnceLock<&CStr> = OnceLock::new();

/// Finds [`LIBRARY`] and [`RUNTIME`]. To be called when the library is loaded.
pub(crate) fn remember() {
    unsafe extern "C" {
        fn _Unwind_Backtrace();
    }
    let parts =
        [(&LIBRARY, (&raw const LIBRARY).cast()), (&RUNTIME, _Unwind_Backtrace as *const _)];
    for (path, address) in parts {
        if let Some(found) = library_of(address) {
            path.get_or_init(|| found);
        }
    }
}

/// Returns the path of the library with this address.
fn library_of(address: *const c_void) -> Option<&'static CStr> {
    // SAFETY: the structure has only pointers, and null is valid.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: memory for the answer.
    let is_found = unsafe { libc::dladdr(address, &raw mut found) } != 0;
    let is_found = is_found && !found.dli_fname.is_null();
    // SAFETY: a terminated string, which stays as long as the library.
    is_found.then(|| unsafe { CStr::from_ptr(found.dli_fname) })
}

/// Words of memory for an environment. A larger one stays as it is.
const WORDS: usize = 2048;
/// The longest chain of interpreters that the kernel follows.
const SCRIPTS_MOST: usize = 5;
/// The longest path of the kernel, its NUL included.
const PATH_BYTES: usize = 4096;

type At<'a> = (c_int, &'a CStr);

/// Calls `start` with the environment that the program is to have. `program` returns the program's
/// path and is asked only if the environment names the library.
fn starting<'p>(
    program: impl FnOnce() -> Option<At<'p>>,
    envp: Argv,
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let Some(library) = LIBRARY.get().filter(|_| !is_confined()) else { return start(envp) };
    let without = Additions { library: library.to_bytes(), preload: false, variables: &[] };
    // SAFETY: the caller's environment.
    let theirs = unsafe { strings(envp) };
    let Some(needed_bytes) = without.needed_bytes(theirs) else { return start(envp) };
    let is_listed = environment::only_lists(theirs);
    if !is_listed && program().is_none_or(|program| loads(library, program)) {
        return start(envp);
    }
    start_without(&without, theirs, needed_bytes, start)
}

#[inline(never)]
fn start_without(
    without: &Additions<'_>,
    theirs: Strings<'_>,
    needed_bytes: usize,
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let mut memory = [0; WORDS];
    let memory = memory.get_mut(..needed_bytes.div_ceil(size_of::<usize>()));
    let built = memory.and_then(|memory| without.build(theirs, memory));
    start(built.map_or(theirs.as_ptr(), <[_]>::as_ptr))
}

/// Returns whether the program can load the library, as far as its file tells. That of a file that
/// may not be opened here counts as one that cannot.
fn loads(library: &CStr, program: At<'_>) -> bool {
    let is_there = |path: &CStr| {
        // SAFETY: a terminated path.
        unsafe { raw::call(libc::SYS_faccessat, words![AT_FDCWD, path.as_ptr(), libc::R_OK]) == 0 }
    };
    if !is_there(library) || !RUNTIME.get().is_none_or(|path| is_there(path)) {
        // The root directory is another one.
        return false;
    }
    let mut opened = Opened::new(program);
    for _ in 0..SCRIPTS_MOST {
        let file = match &opened {
            Ok(file) => file,
            Err(Unopened::MayBeLocked) => return false,
            Err(Unopened::Refused) => break,
        };
        let mut head = [0; HEAD_BYTES + 1];
        let len = file.read(0, &mut head[..HEAD_BYTES]).min(HEAD_BYTES);
        match image::classify(&head[..len], |at, out| file.read(at, out)) {
            Image::Script(at) => {
                head[at.end] = 0;
                let interpreter = CStr::from_bytes_until_nul(&head[at.start..]);
                opened = Opened::new((AT_FDCWD, interpreter.unwrap_or_default()));
            }
            image => return !matches!(image, Image::OtherLibc | Image::OtherMachine),
        }
    }
    true
}

/// A descriptor of this library for the length of a call.
struct Opened(c_int);

/// Why a file is not opened.
enum Unopened {
    /// The process has the file open, and may hold a record lock on it: closing any descriptor of
    /// the file would release that lock.
    MayBeLocked,
    /// The kernel does not open it.
    Refused,
}

impl Opened {
    fn new((directory, path): At<'_>) -> Result<Self, Unopened> {
        let found = stat((directory, path)).ok_or(Unopened::Refused)?;
        if is_open(&found) {
            return Err(Unopened::MayBeLocked);
        }
        Self::at((directory, path), 0).ok_or(Unopened::Refused)
    }

    /// Opens what is at a path, of any kind.
    fn at((directory, path): At<'_>, more: c_int) -> Option<Self> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY | more;
        let arguments = words![directory, path.as_ptr(), flags, 0];
        // SAFETY: a terminated path.
        let opened = raw::checked(unsafe { raw::call(libc::SYS_openat, arguments) });
        opened.ok().and_then(|fd| c_int::try_from(fd).ok()).map(Self)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> usize {
        let arguments = words![self.0, out.as_mut_ptr(), out.len(), at];
        // SAFETY: `out` has space for `out.len()` bytes.
        raw::checked(unsafe { raw::call(libc::SYS_pread64, arguments) }).unwrap_or(0)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: no pointers; the descriptor is this value's.
        unsafe { raw::call(libc::SYS_close, words![self.0]) };
    }
}

fn stat((directory, path): At<'_>) -> Option<libc::stat> {
    let flags = if path.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: the structure has only numbers.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    let arguments = words![directory, path.as_ptr(), &raw mut found, flags];
    // SAFETY: a terminated path, and memory for the answer.
    (unsafe { raw::call(libc::SYS_newfstatat, arguments) } == 0).then_some(found)
}

/// Bytes of memory for a part of the list of descriptors.
const LIST_BYTES: usize = 512;
/// The descriptors that a program is likely to have.
const DESCRIPTORS_LIKELY: c_int = 1024;

/// Returns whether the process has the file with these numbers open, or may have.
fn is_open(file: &libc::stat) -> bool {
    let is_of =
        |fd| stat((fd, c"")).is_some_and(|of| (of.st_dev, of.st_ino) == (file.st_dev, file.st_ino));
    let Some(list) = Opened::at((AT_FDCWD, c"/proc/self/fd"), libc::O_DIRECTORY) else {
        return (0..DESCRIPTORS_LIKELY).any(is_of);
    };
    let (mut entries, mut is_open) = ([0; LIST_BYTES], false);
    while !is_open {
        let arguments = words![list.0, entries.as_mut_ptr(), LIST_BYTES];
        // SAFETY: memory of this length.
        match raw::checked(unsafe { raw::call(libc::SYS_getdents64, arguments) }) {
            Ok(0) => return false,
            Ok(len) => numbers(entries.get(..len).unwrap_or_default(), |fd| is_open |= is_of(fd)),
            Err(_) => return true,
        }
    }
    true
}

/// Returns a path of the program.
fn given<'p>(path: *const c_char) -> Option<&'p CStr> {
    // SAFETY: the caller's path, or null.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}

fn program_environment() -> Argv {
    unsafe extern "C" {
        static environ: Argv;
    }
    // SAFETY: the C library defines it. A program changes it only while no other thread reads it.
    unsafe { environ }
}

/// Executes a program as `execveat` does. Returns only if that fails.
fn execute(directory: c_int, path: *const c_char, argv: Argv, envp: Argv, flags: c_int) -> c_int {
    // A descriptor without a path is left alone: it may be open for its execution only.
    let program = || Some((directory, given(path).filter(|path| !path.is_empty())?));
    starting(program, envp, |envp| {
        let (number, arguments) = if directory == AT_FDCWD && flags == 0 {
            (libc::SYS_execve, words![path, argv, envp])
        } else {
            (libc::SYS_execveat, words![directory, path, argv, envp, flags])
        };
        // SAFETY: the caller's arguments; `starting` may have built the environment.
        raw::returned_int(unsafe { raw::call(number, arguments) })
    })
}

/// Starts the program that the C library finds for a name.
fn start_found(name: *const c_char, envp: Argv, start: impl FnOnce(Argv) -> c_int) -> c_int {
    let mut buffer = [0; PATH_BYTES];
    starting(|| Some((AT_FDCWD, found(given(name)?, &mut buffer)?)), envp, start)
}

/// Finds the file that a name stands for, by the C library's search.
fn found<'b>(name: &'b CStr, buffer: &'b mut [u8; PATH_BYTES]) -> Option<&'b CStr> {
    if name.to_bytes().contains(&b'/') {
        return Some(name);
    }
    // SAFETY: the program's environment.
    let environment = unsafe { strings(program_environment()) };
    let len = environment::search(environment, |directory| {
        let len = joined(directory, name.to_bytes(), buffer)?;
        let arguments = words![AT_FDCWD, buffer.as_ptr(), libc::X_OK];
        // SAFETY: a terminated path.
        (unsafe { raw::call(libc::SYS_faccessat, arguments) } == 0).then_some(len)
    })?;
    CStr::from_bytes_until_nul(&buffer[..=len]).ok()
}

/// Joins a directory and a name, with a NUL behind. Returns the length, or `None` without space.
fn joined(directory: &[u8], name: &[u8], buffer: &mut [u8; PATH_BYTES]) -> Option<usize> {
    let len = directory.len() + 1 + name.len();
    let space = buffer.get_mut(..=len)?;
    space[..directory.len()].copy_from_slice(directory);
    space[directory.len()] = b'/';
    space[directory.len() + 1..len].copy_from_slice(name);
    space[len] = 0;
    Some(len)
}

fn execute_found(name: *const c_char, argv: Argv, envp: Argv) -> c_int {
    start_found(name, envp, |envp| {
        // SAFETY: the caller's arguments; `starting` may have built the environment.
        next::call(&next::execvpe, |execvpe| unsafe { execvpe(name, argv, envp) })
    })
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> c_int $body
    )*};
}

hooks! {
    execve(path: *const c_char, argv: Argv, envp: Argv) {
        execute(AT_FDCWD, path, argv, envp, 0)
    }
    execv(path: *const c_char, argv: Argv) {
        execute(AT_FDCWD, path, argv, program_environment(), 0)
    }
    execvp(name: *const c_char, argv: Argv) {
        execute_found(name, argv, program_environment())
    }
    execvpe(name: *const c_char, argv: Argv, envp: Argv) {
        execute_found(name, argv, envp)
    }
    execveat(directory: c_int, path: *const c_char, argv: Argv, envp: Argv, flags: c_int) {
        execute(directory, path, argv, envp, flags)
    }
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, argv: Argv, envp: Argv) {
        starting(|| Some((AT_FDCWD, given(path)?)), envp, |envp| {
            // SAFETY: the caller's arguments; `starting` may have built the environment.
            next::call(&next::posix_spawn, |spawn| unsafe { spawn(pid, path, actions, attributes, argv, envp) })
        })
    }
    posix_spawnp(pid: *mut pid_t, name: *const c_char, actions: *const c_void, attributes: *const c_void, argv: Argv, envp: Argv) {
        start_found(name, envp, |envp| {
            // SAFETY: the caller's arguments; `starting` may have built the environment.
            next::call(&next::posix_spawnp, |spawn| unsafe { spawn(pid, name, actions, attributes, argv, envp) })
        })
    }
}

/// Runs `execl`: `argv` holds the arguments after the path, NULL included.
unsafe extern "C-unwind" fn execl_listed(path: *const c_char, argv: Argv) -> c_int {
    execute(AT_FDCWD, path, argv, program_environment(), 0)
}

/// Runs `execlp`: `argv` holds the arguments after the name, NULL included.
unsafe extern "C-unwind" fn execlp_listed(name: *const c_char, argv: Argv) -> c_int {
    execute_found(name, argv, program_environment())
}

/// Runs `execle`: the environment follows the NULL of `argv`.
unsafe extern "C-unwind" fn execle_listed(path: *const c_char, argv: Argv) -> c_int {
    // SAFETY: the caller's arguments.
    let arguments = unsafe { strings(argv) };
    // SAFETY: a caller of `execle` passes one more argument after the NULL.
    let behind = unsafe { argv.add(arguments.len() + 1) };
    // SAFETY: `behind` points to that argument.
    execute(AT_FDCWD, path, argv, unsafe { *behind }.cast(), 0)
}

tidegate_interpose::listed! {
    execl => execl_listed;
    execlp => execlp_listed;
    execle => execle_listed;
}
