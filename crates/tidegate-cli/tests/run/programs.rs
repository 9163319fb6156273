//! The programs of the tests themselves: C sources, compiled when first used, and Python scripts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::support::once::once_per_run;
use crate::support::{succeed, tool};

/// Directory of the sources.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/programs").join(name)
}

/// The C program `name`, from the directory or the file of that name; compiled once in a test run,
/// by whichever test comes first, while the others wait.
pub(crate) fn compiled(name: &str, flags: &[&str]) -> PathBuf {
    static PROGRAMS: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let key = format!("{name}{}", flags.concat());
    // A compiler that failed is asked again by the next test, which then fails for the same reason.
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    programs.entry(key.clone()).or_insert_with(|| compile(name, flags, &key)).clone()
}

fn compile(name: &str, flags: &[&str], key: &str) -> PathBuf {
    let binary = Path::new(env!("CARGO_TARGET_TMPDIR")).join(key);
    once_per_run(key, || {
        // A test of another run may execute the old one at this moment.
        let made = binary.with_extension(std::process::id().to_string());
        let mut cc = tool("cc", "gcc");
        cc.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&made);
        succeed(cc.args(sources(name)).args(flags));
        std::fs::rename(made, &binary).expect("it was made");
    });
    binary
}

fn sources(name: &str) -> Vec<PathBuf> {
    let dir = source(name);
    if !dir.is_dir() {
        return vec![source(&format!("{name}.c"))];
    }
    let entries = std::fs::read_dir(dir).expect("it is a directory");
    let paths = entries.map(|entry| entry.expect("it can be read").path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "c")).collect()
}

/// Debian's Python, not one of the user's environments: its `sqlite3` is the system's library.
pub(crate) fn python() -> Command {
    let mut python = Command::new("/usr/bin/python3");
    python.arg("-B");
    python
}
