//! The libraries of this build, and their symbols.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::built::build_tidegate;
use crate::once::once_per_run;

/// The folder of this crate.
pub(crate) fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A directory on tmpfs, which stands for persistent memory.
pub(crate) fn scratch() -> TempDir {
    let shm = Path::new("/dev/shm");
    let parent = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
    tempfile::tempdir_in(parent).expect("a directory for the test")
}

/// Returns the standard output of `command`, which must succeed.
#[track_caller]
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    stdout
}

/// The directory of `libtidegate.so`, and of `pmemblk/libpmemblk.so.1`.
pub(crate) fn libraries() -> &'static Path {
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    LINKED.get_or_init(|| {
        let linked = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi");
        once_per_run("capi", || link(&linked));
        linked
    })
}

/// Tidegate's libpmemblk.
pub(crate) fn our_libpmemblk() -> String {
    libraries().join("pmemblk/libpmemblk.so.1").to_str().expect("a path in UTF-8").to_owned()
}

fn link(linked: &Path) {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    build_tidegate();
    let script = folder().join("../../scripts/link-capi");
    succeed(Command::new(script).arg(built.join(profile)).arg(linked));
}

/// The names and versions of the functions that a library has.
fn symbols(library: &str) -> Vec<String> {
    let listed = succeed(Command::new("nm").args(["-D", "--defined-only", library]));
    let functions = listed.lines().filter_map(|line| line.split_once(" T "));
    functions.map(|(_, name)| name.to_owned()).collect()
}

#[test]
fn our_libpmemblk_has_the_functions_and_versions_of_the_original() {
    let loaded = succeed(Command::new("/sbin/ldconfig").arg("-p"));
    let original = loaded.lines().find_map(|line| {
        line.trim().starts_with("libpmemblk.so.1 ").then(|| line.split(" => ").nth(1))?
    });
    let original = original.expect("the Debian package libpmemblk1");
    let names = symbols(&our_libpmemblk());
    assert_eq!(names, symbols(original));
    assert!(names.len() == 16 && names[0] == "pmemblk_bsize@@LIBPMEMBLK_1.0", "{names:?}");
}

#[test]
fn libtidegate_has_the_functions_of_its_header_with_versions() {
    let header = std::fs::read_to_string(folder().join("include/tidegate.h")).unwrap();
    let names = symbols(libraries().join("libtidegate.so.0").to_str().unwrap());
    assert!(names.len() == 13, "{names:?}");
    for name in names {
        let function = name.strip_suffix("@@TIDEGATE_0.1").expect(&name);
        assert!(header.contains(&format!("{function}(")), "{function}");
    }
}

#[test]
fn the_manual_page_is_well_formed_and_names_each_function() {
    let page = folder().join("man/tidegate.3");
    let mut groff = Command::new("groff");
    let shown = succeed(groff.args(["-man", "-ww", "-Tascii", "-P-cbou"]).arg(&page));
    let output = groff.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    for name in symbols(libraries().join("libtidegate.so.0").to_str().unwrap()) {
        let function = name.strip_suffix("@@TIDEGATE_0.1").expect(&name);
        assert!(shown.contains(&format!("{function}(")), "{function}");
    }
}
