//! The NBD server against clients: our own that speak every word and break every rule, and those
//! that of other projects. A tool that is missing fails its test.

#![expect(clippy::big_endian_bytes, reason = "NBD numbers are big-endian on the wire")]

mod backing;
mod client;
mod devices;
mod harness;
mod hostile;
mod later;
mod options;
mod requests;
mod stopping;
mod tls;
mod tools;
