//! Sets how the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Calls of functions that the library itself defines stay in the library: a program may define
    // a function of that name, which calls the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // The constructor runs before other libraries can run theirs, which may change files.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
}
