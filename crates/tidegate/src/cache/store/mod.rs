//! The slots of a pool: bytes, headers and lanes.

pub(super) mod header;
pub(super) mod lane;
pub mod layout;
pub(super) mod record;
