//! Write-only: writes as write-back; what a read finds in the backing alone is not kept.

use std::ops::Range;

use super::Behaviour;
use super::wb::WriteBack;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteOnly;

impl Behaviour for WriteOnly {
    fn write(&self, core: &Core, offset: u64, data: &[u8], ask: Ask<'_>) -> Result<()> {
        WriteBack.write(core, offset, data, ask)
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        WriteBack.zero(core, pages, ask)
    }

    fn keeps_misses(&self) -> bool {
        false
    }

    fn writes_back(&self) -> bool {
        true
    }
}
