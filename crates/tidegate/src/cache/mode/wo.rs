//! Write-only: writes as write-back; what a read finds in the backing alone is not kept.

use std::ops::Range;

use super::Behaviour;
use super::wb::WriteBack;
use crate::cache::Core;
use crate::device::Result;

pub(super) struct WriteOnly;

impl Behaviour for WriteOnly {
    fn write(&self, core: &Core, offset: u64, data: &[u8], fua: bool) -> Result<()> {
        WriteBack.write(core, offset, data, fua)
    }

    fn read(&self, core: &Core, offset: u64, buf: &mut [u8]) -> Result<()> {
        core.read_bytes(offset, buf, false)
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, fua: bool) -> Result<()> {
        WriteBack.zero(core, pages, fua)
    }

    fn writes_back(&self) -> bool {
        true
    }
}
