//! Sets `cfg(loom)` for the core's sources.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=loom");
}
