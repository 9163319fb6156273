//! Installed binaries: stripped, with their debug information beside them (scripts/split-debug).

use std::path::Path;

use crate::support::{succeed, tool};

#[test]
fn a_stripped_binary_is_small_and_finds_its_lines_beside_it() {
    let built = Path::new(env!("CARGO_BIN_EXE_tidegate"));
    let dir = tempfile::tempdir().unwrap();
    let (installed, debug) = (dir.path().join("tidegate"), dir.path().join(".debug"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/split-debug");
    succeed(std::process::Command::new(script).arg(built).arg(&installed));

    let version = succeed(std::process::Command::new(&installed).arg("--version"));
    assert!(version.starts_with("tidegate "), "{version}");
    let sections = succeed(tool("readelf", "binutils").arg("-SW").arg(&installed));
    assert!(!sections.contains(".debug_line") && sections.contains(".gnu_debuglink"), "{sections}");
    let bytes = |path: &Path| std::fs::metadata(path).unwrap().len();
    // Builds for tests have the lines of this crate alone.
    assert!(bytes(&installed) * 3 < bytes(built) * 2, "{} bytes", bytes(&installed));

    let symbols = succeed(tool("nm", "binutils").arg(debug.join("tidegate.debug")));
    let main = symbols.lines().find(|line| line.contains("8tidegate") && line.contains("4main"));
    let address = main.expect("the program has a function main").split(' ').next().unwrap();
    let line = succeed(tool("addr2line", "binutils").arg("-e").arg(&installed).arg(address));
    assert!(line.contains("crates/tidegate-cli/src/main.rs:"), "{line}");
}
