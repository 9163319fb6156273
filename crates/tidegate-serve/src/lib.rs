//! Tidegate's protocol servers: each turns a protocol's requests into calls of
//! [`tidegate::device::BlockDevice`], and holds no policy of its own.
//!
//! - [`nbd`]: the Network Block Device protocol over unix and TCP sockets.

pub mod nbd;
