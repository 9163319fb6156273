//! What tiers share: the parts that are the same whatever a tier caches and wherever it keeps it.
//!
//! - `ledger`: write-backs that failed, until a flush reports them.

pub(crate) mod ledger;
