//! The device below the cache, and the writes to it.

pub(super) mod traffic;
