//! Write-only: writes as write-back; reads that miss are not cached.

use super::Behaviour;
use super::wb::WriteBack;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteOnly;

impl Behaviour for WriteOnly {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        WriteBack.write(core, content, ask)
    }

    fn keeps_misses(&self) -> bool {
        false
    }

    fn writes_back(&self) -> bool {
        true
    }
}
