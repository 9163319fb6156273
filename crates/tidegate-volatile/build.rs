//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Calls of what the library itself defines stay in it: a program may have a function of that
    // name, which calls the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Its constructor runs before those of other libraries, which may change files.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
}
