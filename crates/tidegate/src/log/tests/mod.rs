//! Tests of the log as a whole.

#[cfg(not(loom))]
mod append;
#[cfg(not(loom))]
mod flips;
#[cfg(loom)]
mod loom_appends;
#[cfg(not(loom))]
mod models;

#[cfg(not(loom))]
pub(super) use append::{definition, key, log};
