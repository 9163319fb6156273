//! Write-through: a write is durable in the cache, and in the backing when that is flushed.
//!
//! The cache has it first: a crash in between leaves the page dirty there, so it is written to the
//! backing again, whole.

use std::ops::Range;

use super::Behaviour;
use super::wi::WriteInvalidate;
use crate::cache::bypass::Content;
use crate::cache::{Ask, Core, Mode};
use crate::device::Result;

pub(super) struct WriteThrough;

impl Behaviour for WriteThrough {
    fn write(&self, core: &Core, offset: u64, data: &[u8], ask: Ask<'_>) -> Result<()> {
        core.write_through(&Content::of(offset, data), ask)
    }

    fn caches_writes(&self) -> bool {
        true
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        if pages.end - pages.start <= Mode::ZERO_PAGES_MAX {
            return core.write_through(&Content::zeroes(pages), ask);
        }
        WriteInvalidate.zero(core, pages, ask)?;
        // Durable before it is acknowledged, as all writes of this mode.
        core.flush_backing_recorded()
    }
}
