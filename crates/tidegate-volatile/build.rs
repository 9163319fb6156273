//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Calls of the library's own functions stay in the library: a program may have a function of
    // the same name, which calls the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // The constructor runs before the constructors of other libraries, which may change files.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
}
