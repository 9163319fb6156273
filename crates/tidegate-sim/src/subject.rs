//! What the simulator puts to the test, and who else may judge its images.

use std::sync::Arc;

use tidegate::device::BlockDevice;
use tidegate::pmem::Region;

/// An engine under test.
pub trait Subject: Sync {
    /// Formats `region`.
    ///
    /// # Errors
    /// What went wrong, in words.
    fn create(&self, region: &Region) -> Result<(), String>;

    /// Opens `region` as after a crash: with the engine's real recovery.
    ///
    /// # Errors
    /// What went wrong, in words.
    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String>;

    /// Looks for faults of structure in a region that was recovered.
    ///
    /// # Errors
    /// The faults, in words.
    fn check(&self, region: &Region) -> Result<(), String>;

    /// Other implementations that can read the same image.
    fn peers(&self) -> &[Peer] {
        &[]
    }

    /// Size of the region in bytes, a multiple of 4096.
    fn region_bytes(&self) -> u64;

    /// How often each block is to be written after a recovery so that every lane was used.
    fn rounds_after_recovery(&self) -> u32;
}

/// Another implementation of the format: recovers the image in place and returns the content of each block.
pub struct Peer {
    /// Whose, for reports.
    pub name: &'static str,
    /// Recovers and reads.
    pub read: fn(&mut [u8]) -> Result<Vec<Vec<u8>>, String>,
}
