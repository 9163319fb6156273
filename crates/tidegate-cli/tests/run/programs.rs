//! The programs that the tests bring along: C sources, compiled when first used, and Python scripts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::{succeed, tool};

/// Directory of the sources.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/programs").join(name)
}

/// The C program `name`, from the directory or the file of that name; compiled once in a test run.
pub(crate) fn compiled(once: &'static OnceLock<PathBuf>, name: &str, flags: &[&str]) -> PathBuf {
    once.get_or_init(|| {
        let binary =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}{}", flags.concat()));
        let made = binary.with_extension(std::process::id().to_string());
        let mut cc = tool("cc", "gcc");
        cc.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&made);
        succeed(cc.args(sources(name)).args(flags));
        // Another run of the tests may be about it too.
        std::fs::rename(made, &binary).expect("it was made");
        binary
    })
    .clone()
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
