//! Write-invalidate: a write goes to the backing, and the cache gives its copies up.

use std::ops::Range;

use super::Behaviour;
use crate::cache::bypass::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteInvalidate;

impl Behaviour for WriteInvalidate {
    fn write(&self, core: &Core, offset: u64, data: &[u8], ask: Ask<'_>) -> Result<()> {
        core.bypass(&Content::of(offset, data), ask)
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        core.bypass(&Content::zeroes(pages), ask)
    }
}
