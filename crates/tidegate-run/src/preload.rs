//! The preload library: where it is, and the environment that makes a program load it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::paths::{PoolPaths, fits_preload};

const LIBRARY: &str = "libtidegate_preload.so";
/// The variable that says where the library is, if it is elsewhere.
const LIBRARY_VARIABLE: &str = "TIDEGATE_PRELOAD";
const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// The preload library: where `TIDEGATE_PRELOAD` says, else beside this program as installed or as
/// built.
///
/// # Errors
/// There is none, or the loader could not be told its path.
pub fn find() -> Result<PathBuf> {
    let named = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty());
    let library = match named {
        Some(path) => {
            let path = std::path::absolute(path)?;
            if !path.is_file() {
                bail!("{LIBRARY_VARIABLE} is {}: there is no such file", path.display());
            }
            path
        }
        None => beside(&std::env::current_exe().context("cannot tell where this program is")?)?,
    };
    if !fits_preload(&library) {
        bail!(
            "{} has a blank or a colon in its path, which {PRELOAD_VARIABLE} cannot hold; move it, or name a copy by {LIBRARY_VARIABLE}",
            library.display()
        );
    }
    Ok(library)
}

/// The library of the program at `executable`.
fn beside(executable: &Path) -> Result<PathBuf> {
    let directory = executable.parent().unwrap_or(Path::new("/"));
    let installed = directory.parent().unwrap_or(directory).join("lib/tidegate");
    let candidates = [installed.join(LIBRARY), directory.join(LIBRARY)];
    let found = candidates.iter().find(|path| path.is_file()).cloned();
    found.with_context(|| {
        format!(
            "there is no {LIBRARY} in {} or {}; build it with `cargo build -p tidegate-preload`, install it there, or name it by \
             {LIBRARY_VARIABLE}",
            installed.display(),
            directory.display()
        )
    })
}

/// What is logged, as the command line says it.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'a> {
    /// Patterns of paths to log; all where there are none.
    pub include: &'a [OsString],
    /// Patterns of paths not to log.
    pub exclude: &'a [OsString],
    /// Patterns of programs that may run unwatched while files are logged.
    pub trust: &'a [OsString],
    /// Each write of a file is synced when it returns.
    pub every_write: bool,
}

/// Variables to set, or to remove where there is no value.
pub fn environment(
    library: &Path,
    pool: &Path,
    paths: &PoolPaths,
    choice: Choice<'_>,
) -> Vec<(&'static str, Option<OsString>)> {
    let present = std::env::var_os(PRELOAD_VARIABLE);
    let mut variables = vec![
        (PRELOAD_VARIABLE, Some(preloads(library, present.as_deref()))),
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

/// `library` before what is preloaded already, once.
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

/// Patterns a line each; nothing where there are none.
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
        let error = beside(&program).unwrap_err().to_string();
        assert!(error.contains("cargo build -p tidegate-preload"), "{error}");
        std::fs::write(bin.join(LIBRARY), "").unwrap();
        assert_eq!(beside(&program).unwrap(), bin.join(LIBRARY));
        std::fs::write(lib.join(LIBRARY), "").unwrap();
        assert_eq!(beside(&program).unwrap(), lib.join(LIBRARY));
    }
}
