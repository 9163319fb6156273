//! Preload libraries: finds them, and makes the environment that loads them into a program.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::paths::{PoolPaths, fits_preload};

const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// A library that is preloaded into programs.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    file: &'static str,
    /// The crate of the library.
    package: &'static str,
    /// The variable that overrides the library's path.
    variable: &'static str,
}

impl Library {
    /// The library of `tidegate run`.
    pub const RUN: Self = Self {
        file: "libtidegate_preload.so",
        package: "tidegate-preload",
        variable: "TIDEGATE_PRELOAD",
    };
    /// The library of `tidegate run --volatile`.
    pub const VOLATILE: Self = Self {
        file: "libtidegate_volatile.so",
        package: "tidegate-volatile",
        variable: "TIDEGATE_VOLATILE_PRELOAD",
    };
    /// The library of `tidegate record`.
    pub const RECORD: Self = Self {
        file: "libtidegate_record_preload.so",
        package: "tidegate-record-preload",
        variable: "TIDEGATE_RECORD_PRELOAD",
    };

    /// Returns the library's path: the value of its variable, else the library beside this program,
    /// as installed or as built.
    ///
    /// # Errors
    /// Fails if there is no library, or the loader could not read its path.
    pub fn find(&self) -> Result<PathBuf> {
        let variable = self.variable;
        let named = std::env::var_os(variable).filter(|path| !path.is_empty());
        let library = match named {
            Some(path) => {
                let path = std::path::absolute(path)?;
                if !path.is_file() {
                    bail!("{variable} is {}: there is no such file", path.display());
                }
                path
            }
            None => {
                self.beside(&std::env::current_exe().context("cannot tell where this program is")?)?
            }
        };
        if !fits_preload(&library) {
            bail!(
                "{} has a blank or a colon in its path, which {PRELOAD_VARIABLE} cannot hold; move it, or name a copy by {variable}",
                library.display()
            );
        }
        Ok(library)
    }

    /// Finds the library of the program at `executable`.
    fn beside(&self, executable: &Path) -> Result<PathBuf> {
        let Self { file, package, variable } = self;
        let directory = executable.parent().unwrap_or(Path::new("/"));
        let installed = directory.parent().unwrap_or(directory).join("lib/tidegate");
        let candidates = [installed.join(file), directory.join(file)];
        let found = candidates.iter().find(|path| path.is_file()).cloned();
        found.with_context(|| {
            format!(
                "there is no {file} in {} or {}; build it with `cargo build -p {package}`, install it there, or name it by \
                 {variable}",
                installed.display(),
                directory.display()
            )
        })
    }
}

/// Returns the variable that makes the loader preload `library`, beside those preloaded already.
#[must_use]
pub fn preloaded(library: &Path) -> (&'static str, Option<OsString>) {
    let present = std::env::var_os(PRELOAD_VARIABLE);
    (PRELOAD_VARIABLE, Some(preloads(library, present.as_deref())))
}

/// The files and programs to log, by the options of the command line.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'a> {
    /// Patterns of paths to log; empty for all paths.
    pub include: &'a [OsString],
    /// Patterns of paths not to log.
    pub exclude: &'a [OsString],
    /// Patterns of programs that may run unwatched while files are logged.
    pub trust: &'a [OsString],
    /// Whether each write of a file is synced when it returns.
    pub every_write: bool,
}

/// Returns the variables to set, or to remove if they have no value.
pub fn environment(
    library: &Path,
    pool: &Path,
    paths: &PoolPaths,
    choice: Choice<'_>,
) -> Vec<(&'static str, Option<OsString>)> {
    let mut variables = vec![
        preloaded(library),
        ("TIDEGATE_POOL", Some(pool.into())),
        ("TIDEGATE_CONTROL", Some(paths.control().into())),
        ("TIDEGATE_SOCKET", Some(paths.socket().into())),
        ("TIDEGATE_INCLUDE", patterns(choice.include)),
        ("TIDEGATE_EXCLUDE", patterns(choice.exclude)),
        ("TIDEGATE_TRUST", patterns(choice.trust)),
    ];
    if choice.every_write {
        variables.push(("TIDEGATE_EVERY_WRITE", Some("1".into())));
    }
    variables
}

/// Puts `library` once before the libraries that are preloaded already.
fn preloads(library: &Path, present: Option<&OsStr>) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut value = library.as_os_str().as_bytes().to_vec();
    let present = present.map(OsStr::as_bytes).unwrap_or_default();
    let entries = present.split(|byte| b": ".contains(byte));
    for entry in
        entries.filter(|entry| !entry.is_empty() && *entry != library.as_os_str().as_bytes())
    {
        value.push(b':');
        value.extend_from_slice(entry);
    }
    OsString::from_vec(value)
}

/// Joins patterns, one a line; `None` if there are none.
fn patterns(patterns: &[OsString]) -> Option<OsString> {
    (!patterns.is_empty()).then(|| patterns.join(OsStr::new("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_preloaded_stays_and_nothing_is_loaded_twice() {
        let with = |present: &str| preloads(Path::new("/l.so"), Some(OsStr::new(present)));
        assert_eq!(preloads(Path::new("/l.so"), None), "/l.so");
        assert_eq!(with(""), "/l.so");
        assert_eq!(with("/a.so b.so"), "/l.so:/a.so:b.so");
        assert_eq!(with("/a.so:/l.so"), "/l.so:/a.so");
    }

    #[test]
    fn the_library_is_found_as_installed_and_as_built() {
        let root = tempfile::tempdir().unwrap();
        let (bin, lib) = (root.path().join("bin"), root.path().join("lib/tidegate"));
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(&lib).unwrap();
        let program = bin.join("tidegate");
        let Library { file, .. } = Library::RUN;
        let error = Library::RUN.beside(&program).unwrap_err().to_string();
        assert!(error.contains("cargo build -p tidegate-preload"), "{error}");
        std::fs::write(bin.join(file), "").unwrap();
        assert_eq!(Library::RUN.beside(&program).unwrap(), bin.join(file));
        std::fs::write(lib.join(file), "").unwrap();
        assert_eq!(Library::RUN.beside(&program).unwrap(), lib.join(file));
    }
}
