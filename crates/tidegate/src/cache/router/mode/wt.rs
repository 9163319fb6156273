//! Write-through: a write is durable in the cache, and in the backing after the next flush.
//!
//! The cache has it first: a crash in between leaves the page dirty there, so it is written to the
//! backing again, whole.

use super::Behaviour;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteThrough;

impl Behaviour for WriteThrough {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        if !content.is_many_zeroes() {
            return core.write_through(content, ask);
        }
        core.bypass(content, ask)?;
        // Durable before it is acknowledged, like all writes of this mode.
        core.pages.flush_backing_recorded()
    }

    fn caches_writes(&self) -> bool {
        true
    }
}
