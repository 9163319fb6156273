//! How a request is served.

pub(super) mod admission;
pub(super) mod by_cost;
pub(super) mod classes;
pub(super) mod fallback;
pub mod mode;
