//! What cargo builds for no test: the binary of another package, libraries to preload, and the
//! library that `scripts/link-capi` links.

use std::process::Command;

/// Builds `tidegate`, the libraries that it preloads and the library for C, with the profile of
/// this test.
///
/// Does nothing where `TIDEGATE_IS_BUILT` is set: `scripts/test` builds all targets at once, so
/// that no crate is built twice, with the features of two selections of packages.
pub(crate) fn build_tidegate() {
    if std::env::var_os("TIDEGATE_IS_BUILT").is_some() {
        return;
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "-p", "tidegate-cli"]);
    cargo.args(["-p", "tidegate-preload", "-p", "tidegate-volatile", "-p", "tidegate-capi"]);
    cargo.args((!cfg!(debug_assertions)).then_some("--release"));
    // What cargo tells this test of its package would make build scripts run again.
    let told = std::env::vars().map(|(name, _)| name);
    let own = ["CARGO_PKG", "CARGO_MANIFEST"];
    for name in told.filter(|name| own.iter().any(|own| name.starts_with(own))) {
        cargo.env_remove(name);
    }
    let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo starts");
    assert!(status.success(), "tidegate is not built");
}
