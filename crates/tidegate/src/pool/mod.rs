//! Pools: the content of a region, and the superblock of every engine but the BTT.
//!
//! [`identify`] tells a BTT, a Tidegate pool and other content apart, and changes nothing.
//! [`glance()`] does so for a file that is not mapped. [`Superblock`] reads and writes superblocks,
//! which docs/formats.md describes. `layout` has their format, `content` knows other programs'
//! signatures.
//!
//! The kinds exclude each other: a BTT has its signature at 0 or at 4096. A Tidegate pool has its
//! superblock at 0 and zeroes at 4096, regardless of users' data.

mod content;
mod error;
mod glance;
mod layout;
mod state;
mod superblock;

pub use content::Content;
pub use error::PoolError;
pub use glance::{Glance, glance, glance_device};
pub use state::BackingState;
pub use superblock::{BackingIdentity, CLUSTERS, CopyFault, Found, NEIGHBOURS, Superblock, erase};
pub(crate) use superblock::{Difference, compare_copies};

use crate::btt::{self, Version};
use crate::pmem::Region;

/// The content of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one value, for the moment of opening a pool")]
pub enum PoolKind {
    /// A block translation table.
    Btt(Version),
    /// A pool with a Tidegate superblock.
    Tidegate(Found),
    /// No pool, but other content.
    Unknown(Content),
}

/// Identifies the content of `region`.
///
/// # Errors
/// [`PoolError`] if `region` holds a Tidegate pool that cannot be used, or the memory fails.
/// Callers must then assume that `region` holds data.
pub fn identify(region: &Region) -> Result<PoolKind, PoolError> {
    if let Some(version) = btt::probe(region)? {
        return Ok(PoolKind::Btt(version));
    }
    match Superblock::read(region) {
        Ok(found) => Ok(PoolKind::Tidegate(found)),
        Err(PoolError::NotAPool { found }) => Ok(PoolKind::Unknown(found)),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::btt::BttOptions;

    fn region() -> Region {
        Region::anonymous(20 << 20).unwrap()
    }

    fn make_pool(region: &Region) -> Superblock {
        erase(region).unwrap();
        let mut superblock =
            Superblock::plan(region, crate::tier::EngineCode(1), Uuid::nil(), 512).unwrap();
        superblock.write(region).unwrap();
        superblock
    }

    #[test]
    fn each_kind_is_identified_and_the_last_one_created_wins() {
        let region = region();
        assert_eq!(identify(&region).unwrap(), PoolKind::Unknown(Content::Zeroes));
        for version in [Version::V1_1, Version::V2_0, Version::V1_1] {
            let superblock = make_pool(&region);
            let found = Found { superblock, first: None, second: None };
            assert_eq!(identify(&region).unwrap(), PoolKind::Tidegate(found));
            btt::create(&region, &BttOptions { version, ..BttOptions::default() }).unwrap();
            assert_eq!(identify(&region).unwrap(), PoolKind::Btt(version));
        }
    }

    #[test]
    fn a_damaged_pool_is_something_and_not_nothing() {
        let region = region();
        make_pool(&region);
        region.write(500, &[1]).unwrap();
        region.write(region.len_bytes() - 500, &[1]).unwrap();
        assert!(matches!(identify(&region), Err(PoolError::Damaged { .. })));
    }
}
