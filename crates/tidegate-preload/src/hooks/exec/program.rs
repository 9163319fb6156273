//! Judges the program that a name stands for: whether it will have the library, and why not.
#![allow(unsafe_code)] // system calls

use std::ffi::{CStr, c_int, c_long};
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate::log::ProgramVersion;
use tidegate::log::cover::Cause;
use tidegate_interpose::image::{self, HEAD_BYTES, Image};
use tidegate_interpose::own_calls;

use crate::state::extended::CAPABILITY;
use crate::state::process::{self, Attached};
use crate::state::record_locks::{self, Unlocked};
use crate::state::{objects, supervisor};
use crate::sys::page::Mapped;
use crate::sys::path::{LINK_BYTES, Opened, PathBuffer, of_descriptor, proc_link};
use crate::sys::query;
use crate::sys::raw::{self, words};

/// How a program will run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// With the library.
    Preloaded,
    /// Without it: only the kernel sees the program's calls.
    Alone,
    /// Without it. Naming the library in the environment would keep the program from starting, or
    /// make it complain.
    AloneUnnamed,
    /// Not at all: there is no such program.
    Missing,
}

/// A program, judged.
pub(super) struct Judged {
    pub(super) verdict: Verdict,
    /// Why the program runs without the library, as far as that is known.
    pub(super) cause: Option<Cause>,
    /// The user trusts the program or its interpreter to change no file that is synced.
    pub(super) is_trusted: bool,
}

/// The longest chain of interpreters that the kernel follows.
const SCRIPTS_MOST: usize = 5;

/// Judges the program that `execveat` would start with these arguments.
pub(super) fn judge(directory: c_int, path: &CStr, flags: c_int) -> Judged {
    let mut link = [0; LINK_BYTES];
    let (directory, path) = if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        (libc::AT_FDCWD, proc_link(directory, &mut link))
    } else {
        (directory, path)
    };
    let mut is_trusted = is_trusted(directory, path);
    let mut opened = open(directory, path);
    let mut interpreter = PathBuffer::new();
    for _ in 0..SCRIPTS_MOST {
        let judged = match &opened {
            Ok(opened) => judge_opened(opened, &mut interpreter),
            Err(why) => Ok(*why),
        };
        if let Ok((verdict, cause)) = judged {
            return Judged { verdict, cause, is_trusted };
        }
        is_trusted |= self::is_trusted(libc::AT_FDCWD, interpreter.as_c_str());
        opened = open(libc::AT_FDCWD, interpreter.as_c_str());
    }
    Judged { verdict: Verdict::Alone, cause: None, is_trusted }
}

/// A verdict, and why a program runs without the library.
type Why = (Verdict, Option<Cause>);

const MISSING: Why = (Verdict::Missing, None);
const PRIVILEGED: Why = (Verdict::Alone, Some(Cause::PrivilegedProgram));
/// This process may hold a record lock on the program's file, so that it must not be opened here.
const LOCKED: Why = (Verdict::Alone, None);

/// Opens a program to judge it.
fn open(directory: c_int, path: &CStr) -> Result<Unlocked, Why> {
    const READ: c_int = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    let stat = query::fstatat(directory, path, 0).map_err(unopened)?;
    let mut error = None;
    let open = || Opened::open(directory, path, READ).inspect_err(|errno| error = Some(*errno));
    let opened = record_locks::open(stat.st_dev, stat.st_ino, open);
    opened.ok_or_else(|| error.map_or(LOCKED, unopened))
}

fn unopened(error: raw::Errno) -> Why {
    // A program may be executable and not readable.
    if error == libc::EACCES { PRIVILEGED } else { MISSING }
}

/// Returns whether the user trusts the program at this path, which need not be readable.
fn is_trusted(directory: c_int, path: &CStr) -> bool {
    if !process::trusts_any() {
        return false;
    }
    let mut resolved = PathBuffer::new();
    Opened::path(directory, path, 0)
        .and_then(|opened| of_descriptor(opened.number(), &mut resolved))
        .is_ok_and(|()| process::trusts(resolved.as_bytes()))
}

/// The file is a script.
struct Interpreted;

fn judge_opened(opened: &Opened, interpreter: &mut PathBuffer) -> Result<Why, Interpreted> {
    let Ok(stat) = query::fstat(opened.number()) else { return Ok(MISSING) };
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(MISSING);
    }
    let mut head = [0; HEAD_BYTES];
    let head = read_head(opened, &mut head);
    match image::classify(head, |at, out| read_at(opened, at, out)) {
        // The kernel takes the rights from the interpreter and ignores the rights of a script.
        Image::Script(at) => {
            interpreter.clear();
            let path = head.get(at).unwrap_or_default();
            interpreter.push(path).map_or(Ok(MISSING), |()| Err(Interpreted))
        }
        Image::Dynamic if gains_rights(opened, &stat) => Ok(PRIVILEGED),
        Image::Dynamic => Ok((Verdict::Preloaded, None)),
        image @ (Image::Static | Image::Text) => Ok((Verdict::Alone, cause_of(&image))),
        image => Ok((Verdict::AloneUnnamed, cause_of(&image))),
    }
}

fn cause_of(image: &Image) -> Option<Cause> {
    match image {
        Image::Static => Some(Cause::StaticProgram),
        Image::Go => Some(Cause::GoProgram),
        Image::OtherLibc => Some(Cause::OtherLibc),
        Image::OtherMachine => Some(Cause::OtherMachine),
        Image::Dynamic | Image::Malformed | Image::Script(_) | Image::Text => None,
    }
}

/// Returns why the hooks do not see all system calls of this process, although it has the library;
/// `None` if they do. A program that runs without the library may have started this one, whose
/// image is then judged only here. System calls of its own are looked for only here, too. To be
/// called before any code of the program runs.
pub(crate) fn own_cause(attached: Option<&Attached>) -> Option<Cause> {
    let Ok(opened) = Opened::open(libc::AT_FDCWD, c"/proc/self/exe", libc::O_RDONLY) else {
        return PRIVILEGED.1;
    };
    let mut head = [0; HEAD_BYTES];
    let head = read_head(&opened, &mut head);
    let cause = cause_of(&image::classify(head, |at, out| read_at(&opened, at, out)));
    let has_own_calls = |attached| {
        makes_own_calls(attached, &opened, head)
            || objects::all().iter().any(|object| library_makes_own_calls(attached, &object.path))
    };
    cause.or_else(|| attached.is_some_and(has_own_calls).then_some(Cause::OwnCalls))
}

/// Returns whether the library at this path makes system calls of its own and the user does not
/// trust it. Returns true if the file cannot be opened any more.
pub(crate) fn library_makes_own_calls(attached: &Attached, path: &CStr) -> bool {
    if objects::is_hooked(path) {
        return false;
    }
    let version = query::fstatat(libc::AT_FDCWD, path, 0).map(|stat| version_of(&stat));
    if version
        .is_ok_and(|version| attached.log().processes().makes_own_calls(&version) == Some(false))
    {
        return false;
    }
    let Ok(opened) = Opened::open(libc::AT_FDCWD, path, libc::O_RDONLY) else { return true };
    let mut head = [0; HEAD_BYTES];
    makes_own_calls(attached, &opened, read_head(&opened, &mut head))
}

/// Returns whether an image makes system calls of its own and the user does not trust it.
fn makes_own_calls(attached: &Attached, opened: &Opened, head: &[u8]) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let version = query::fstat(opened.number()).ok().map(|stat| version_of(&stat));
    let known = version.and_then(|version| attached.log().processes().makes_own_calls(&version));
    let makes = known.unwrap_or_else(|| {
        let makes = has_own_calls(opened, head);
        if let Some(version) = version {
            attached.log().processes().note_program(&version, makes, now);
        }
        makes
    });
    makes && !is_trusted_by(attached, opened)
}

fn version_of(stat: &libc::stat) -> ProgramVersion {
    ProgramVersion {
        device: stat.st_dev,
        inode: stat.st_ino,
        len_bytes: stat.st_size.cast_unsigned(),
        changed: (stat.st_mtime, stat.st_mtime_nsec),
        attributes_changed: (stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// Returns whether the program's code makes system calls, or cannot be read for lack of memory.
fn has_own_calls(opened: &Opened, head: &[u8]) -> bool {
    const MEMORY_BYTES: usize = 128 << 10;
    let read = |at, out: &mut [u8]| read_at(opened, at, out);
    Mapped::new(MEMORY_BYTES)
        .is_none_or(|mut memory| own_calls::makes_own_calls(head, read, memory.bytes_mut()))
}

/// Returns whether the user trusts the program, and tells the supervisor if so.
fn is_trusted_by(attached: &Attached, opened: &Opened) -> bool {
    let mut path = PathBuffer::new();
    let is_trusted =
        of_descriptor(opened.number(), &mut path).is_ok_and(|()| attached.trusts(path.as_bytes()));
    if is_trusted {
        supervisor::tell_trusted(path.as_c_str());
    }
    is_trusted
}

fn read_head<'h>(opened: &Opened, head: &'h mut [u8; HEAD_BYTES]) -> &'h [u8] {
    let head_bytes = read_at(opened, 0, head);
    &head[..head_bytes.min(HEAD_BYTES)]
}

fn read_at(opened: &Opened, at: u64, out: &mut [u8]) -> usize {
    let arguments = words![opened.number(), out.as_mut_ptr(), out.len(), at];
    // SAFETY: `out` has space for `out.len()` bytes.
    unsafe { query::call(libc::SYS_pread64, arguments) }.unwrap_or(0)
}

/// Returns whether the program gains rights by its start: the linker then ignores `LD_PRELOAD`.
fn gains_rights(opened: &Opened, stat: &libc::stat) -> bool {
    let (uid, gid) = (number(libc::SYS_getuid), number(libc::SYS_getgid));
    let set_uid = stat.st_mode & libc::S_ISUID != 0 && u64::from(stat.st_uid) != uid;
    let set_gid = stat.st_mode & libc::S_ISGID != 0 && u64::from(stat.st_gid) != gid;
    let differs = uid != number(libc::SYS_geteuid) || gid != number(libc::SYS_getegid);
    set_uid || set_gid || differs || (uid != 0 && has_capabilities(opened))
}

fn number(call: c_long) -> u64 {
    // SAFETY: these calls take no arguments.
    unsafe { query::call(call, words![]) }.map_or(u64::MAX, |number| number as u64)
}

fn has_capabilities(opened: &Opened) -> bool {
    query::fgetxattr(opened.number(), CAPABILITY, &mut []).is_ok()
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use super::*;

    fn judge_path(path: &Path) -> Verdict {
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        judge(libc::AT_FDCWD, &path, 0).verdict
    }

    #[test]
    fn programs_of_this_machine_are_preloaded() {
        assert_eq!(judge_path(&std::env::current_exe().unwrap()), Verdict::Preloaded);
        assert_eq!(judge_path(Path::new("/bin/sh")), Verdict::Preloaded);
    }

    #[test]
    fn scripts_run_as_their_interpreter_does() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let inner = write("inner", "#!/bin/sh\n");
        let outer = write("outer", &format!("#!{} x\n", inner.display()));
        assert_eq!(judge_path(&outer), Verdict::Preloaded);
        let endless = directory.path().join("endless");
        fs::write(&endless, format!("#!{}\n", endless.display())).unwrap();
        assert_eq!(judge_path(&endless), Verdict::Alone);
        assert_eq!(judge_path(&write("lost", "#!/no/such/program\n")), Verdict::Missing);
        assert_eq!(judge_path(&write("plain", "echo\n")), Verdict::Alone);
    }

    /// The close would release the lock.
    #[test]
    fn a_program_under_a_record_lock_is_not_opened() {
        let program = tempfile::NamedTempFile::new().unwrap();
        fs::copy("/bin/sh", program.path()).unwrap();
        assert_eq!(judge_path(program.path()), Verdict::Preloaded);
        record_locks::note(std::os::fd::AsRawFd::as_raw_fd(program.as_file()));
        assert_eq!(judge_path(program.path()), Verdict::Alone);
    }

    #[test]
    fn what_cannot_be_started_is_missing() {
        assert_eq!(judge_path(Path::new("/no/such/program")), Verdict::Missing);
        assert_eq!(judge_path(Path::new("/tmp")), Verdict::Missing);
        assert_eq!(judge_path(Path::new("/dev/null")), Verdict::Missing);
    }

    #[test]
    fn open_programs_are_judged_too() {
        let file = fs::File::open("/bin/sh").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let judged = judge(fd, c"", libc::AT_EMPTY_PATH);
        assert!(judged.verdict == Verdict::Preloaded && !judged.is_trusted);
    }
}
