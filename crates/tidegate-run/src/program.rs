//! Judges a program before it runs: whether the preload library can reach its system calls.
//!
//! Invariant: a program whose system calls the library cannot reach is never taken for one that it
//! can watch. Only the first bytes, headers and attributes of files are read, and any bytes have an
//! answer.
//!
//! Map: [`Program::find`] (search and judge) · [`tidegate_interpose::image`] (judge headers).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags};
use rustix::io::Errno;
use tidegate::glob::matches_any;
use tidegate::log::cover::Cause;
use tidegate::opening::{self, Expected};
use tidegate_interpose::image::{self, HEAD_BYTES, Image};

/// The most interpreters of interpreters that the kernel follows.
const MOST_INTERPRETERS: usize = 4;
const SETUID: u32 = 0o4000;
/// The set-group-ID bit has an effect on execution only where the group may execute.
const SETGID: u32 = 0o2010;
/// The C library's search path if the environment has none.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// The reason why a program is not started.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The search path has no such file.
    #[error("there is no program {}: it is not in PATH", name.display())]
    NotFound {
        /// The name as it was given.
        name: PathBuf,
    },
    /// The file is there and cannot be read or run.
    #[error("cannot run {}", path.display())]
    Os {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
}

type Result<T> = std::result::Result<T, ProgramError>;

/// A program to run.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// The file to execute.
    pub file: PathBuf,
    /// Arguments before the program's own: the script, if the file is its shell.
    pub before: Vec<OsString>,
    /// Why the program is not watched, if so: nothing is logged while it runs, unless it is
    /// trusted.
    pub unwatched: Option<Cause>,
}

impl Program {
    /// Finds the program that `name` means in `search_path`, as `execvp` does, and judges it. It is
    /// trusted if its path, or that of its interpreter, matches one of the globs `trust`.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn find(name: &OsStr, search_path: Option<&OsStr>, trust: &[OsString]) -> Result<Self> {
        let path = look_up(name, search_path)?;
        let mut judged = path.clone();
        let mut is_trusted = false;
        for _ in 0..MOST_INTERPRETERS {
            is_trusted = is_trusted || trusts(trust, &judged);
            match judge(&judged)? {
                Verdict::Runs(unwatched) => {
                    let unwatched =
                        unwatched.map(|it| if is_trusted { Cause::Trusted } else { it });
                    return Ok(Self { file: path, before: Vec::new(), unwatched });
                }
                Verdict::Interpreted(interpreter) => judged = interpreter,
                // Text without an interpreter is run by the shell, unless it is an interpreter
                // itself.
                Verdict::Text if judged == path => {
                    let (file, before) = ("/bin/sh".into(), vec![path.into()]);
                    return Ok(Self { file, before, unwatched: None });
                }
                Verdict::Text => break,
            }
        }
        Err(os(&path)(Errno::NOEXEC.into()))
    }
}

/// Returns whether one of the globs matches the canonical form of `path`.
fn trusts(globs: &[OsString], path: &Path) -> bool {
    path.canonicalize().is_ok_and(|path| {
        globs.iter().any(|glob| matches_any(glob.as_bytes(), path.as_os_str().as_bytes()))
    })
}

fn os(path: &Path) -> impl FnOnce(std::io::Error) -> ProgramError {
    let path = path.to_path_buf();
    move |source| ProgramError::Os { path, source }
}

/// Finds the file that `execvp` would take: the first executable one. Fails with the first
/// forbidden one if there is no other.
fn look_up(name: &OsStr, search_path: Option<&OsStr>) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        executable(Path::new(name)).map_err(os(Path::new(name)))?;
        return Ok(PathBuf::from(name));
    }
    let mut forbidden = None;
    for directory in std::env::split_paths(search_path.unwrap_or(OsStr::new(DEFAULT_PATH))) {
        // An empty entry means the current directory.
        let path = Path::new(".").join(directory).join(name);
        match executable(&path) {
            Ok(()) if !name.is_empty() => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                forbidden.get_or_insert((path, error));
            }
            _ => {}
        }
    }
    match forbidden {
        Some((path, error)) => Err(os(&path)(error)),
        None => Err(ProgramError::NotFound { name: name.into() }),
    }
}

fn executable(path: &Path) -> std::io::Result<()> {
    if !path.metadata()?.is_file() {
        return Err(Errno::ACCESS.into());
    }
    Ok(rustix::fs::access(path, Access::EXEC_OK)?)
}

/// How the kernel would execute one file.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// A program, with the reason if it cannot be watched.
    Runs(Option<Cause>),
    Interpreted(PathBuf),
    Text,
}

fn judge(path: &Path) -> Result<Verdict> {
    let mut file = match opening::open(path, Expected::File, File::options().read(true)) {
        // The file may be executed but not read: the kernel then ignores the preload library.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Ok(Verdict::Runs(Some(Cause::PrivilegedProgram)));
        }
        opened => opened.map_err(os(path))?,
    };
    let mut head = Vec::new();
    file.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head).map_err(os(path))?;
    let image = image::classify(&head, |at, out| read_at(&file, at, out));
    let cause = match image {
        Image::Script(at) => {
            let interpreter = head.get(at).unwrap_or_default();
            return Ok(Verdict::Interpreted(Path::new(OsStr::from_bytes(interpreter)).into()));
        }
        Image::Text => return Ok(Verdict::Text),
        Image::Dynamic => None,
        // Whether the file can be executed is for the kernel to say: it does not read all headers.
        Image::Malformed => Some(Cause::OwnCalls),
        Image::Static => Some(Cause::StaticProgram),
        Image::Go => Some(Cause::GoProgram),
        Image::OtherLibc => Some(Cause::OtherLibc),
        Image::OtherMachine => Some(Cause::OtherMachine),
    };
    let is_privileged = gains_privilege(&file).map_err(os(path))?;
    Ok(Verdict::Runs(if is_privileged { Some(Cause::PrivilegedProgram) } else { cause }))
}

/// Fills `out` from an offset, and returns how many bytes it read.
fn read_at(file: &File, at: u64, out: &mut [u8]) -> usize {
    let mut len = 0;
    while let Ok(read_bytes @ 1..) = file.read_at(&mut out[len..], at.saturating_add(len as u64)) {
        len += read_bytes;
    }
    len
}

/// Returns whether executing `file` gives it rights that this process does not have: the loader
/// then ignores `LD_PRELOAD`.
fn gains_privilege(file: &File) -> std::io::Result<bool> {
    let metadata = file.metadata()?;
    if rustix::fs::fstatvfs(file)?.f_flag.contains(StatVfsMountFlags::NOSUID) {
        return Ok(false);
    }
    let user = rustix::process::geteuid().as_raw();
    let group = rustix::process::getegid().as_raw();
    let mode = metadata.mode();
    let other_user = mode & SETUID != 0 && metadata.uid() != user;
    let other_group = mode & SETGID == SETGID && metadata.gid() != group;
    let capabilities =
        user != 0 && rustix::fs::fgetxattr(file, "security.capability", &mut [0_u8; 64]).is_ok();
    Ok(other_user || other_group || capabilities)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    fn script(directory: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = directory.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_dynamic_program_is_found_in_the_search_path() {
        let found =
            Program::find(OsStr::new("sh"), Some(OsStr::new("/nowhere:/bin")), &[]).unwrap();
        assert_eq!(found, Program { file: "/bin/sh".into(), before: Vec::new(), unwatched: None });
    }

    #[test]
    fn what_is_not_there_is_told_apart_from_what_may_not_run() {
        let directory = tempfile::tempdir().unwrap();
        script(directory.path(), "data", "#!/bin/sh\n", 0o644);
        let search = Some(directory.path().as_os_str());
        let missing = Program::find(OsStr::new("no-such"), search, &[]);
        assert!(matches!(missing, Err(ProgramError::NotFound { .. })), "{missing:?}");
        let forbidden = Program::find(OsStr::new("data"), search, &[]);
        assert!(matches!(forbidden, Err(ProgramError::Os { .. })), "{forbidden:?}");
        let absent = Program::find(OsStr::new("/no/such"), search, &[]);
        assert!(matches!(absent, Err(ProgramError::Os { .. })), "{absent:?}");
    }

    #[test]
    fn the_interpreter_of_a_script_is_judged() {
        let directory = tempfile::tempdir().unwrap();
        let good = script(directory.path(), "good", "#! /bin/sh -e\n", 0o755);
        assert_eq!(Program::find(good.as_os_str(), None, &[]).unwrap().file, good);
        let plain = script(directory.path(), "plain", "echo hello\n", 0o755);
        let program = Program::find(plain.as_os_str(), None, &[]).unwrap();
        assert_eq!(
            program,
            Program { file: "/bin/sh".into(), before: vec![plain.into()], unwatched: None }
        );
        let fifo = directory.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, 0o700.into(), 0).unwrap();
        let text = format!("#!{}\n", fifo.display());
        let by_fifo = script(directory.path(), "by-fifo", &text, 0o755);
        let refused = Program::find(by_fifo.as_os_str(), None, &[]);
        assert!(matches!(refused, Err(ProgramError::Os { .. })), "nothing waits for its other end");
        let itself = script(directory.path(), "itself", "", 0o755);
        std::fs::write(&itself, format!("#!{}\n", itself.display())).unwrap();
        assert!(matches!(
            Program::find(itself.as_os_str(), None, &[]),
            Err(ProgramError::Os { .. })
        ));
    }

    #[test]
    fn a_trusted_program_is_told_by_its_path_or_its_interpreter_s() {
        let directory = tempfile::tempdir().unwrap();
        // Headers without a loader: static.
        let tool = script(directory.path(), "tool", "\x7fELF", 0o755);
        let mut bytes = std::fs::read("/proc/self/exe").unwrap();
        bytes.truncate(64);
        bytes[56..64].fill(0);
        std::fs::write(&tool, bytes).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&tool, &link).unwrap();
        let text = format!("#!{}\n", link.display());
        let by_tool = script(directory.path(), "by-tool", &text, 0o755);
        let unwatched = |file: &Path, glob: &str| {
            Program::find(file.as_os_str(), None, &["/x".into(), glob.into()]).unwrap().unwatched
        };
        for (file, glob, cause) in [
            (&tool, "*/tool", Cause::Trusted),
            (&link, "*/tool", Cause::Trusted),
            (&by_tool, "*/tool", Cause::Trusted),
            (&by_tool, "*/by-tool", Cause::Trusted),
            (&tool, "*/by-tool", Cause::StaticProgram),
            (&link, "*/link", Cause::StaticProgram),
        ] {
            assert_eq!(unwatched(file, glob), Some(cause), "{} {glob}", file.display());
        }
        assert_eq!(unwatched(Path::new("/bin/sh"), "*"), None, "it is watched all the same");
    }
}
