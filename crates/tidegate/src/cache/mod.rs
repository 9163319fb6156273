//! A cache on persistent memory in front of slow storage.
//!
//! - [`policy`]: what is cached, what is evicted, what is cleaned and when.

pub mod policy;
