//! Write-back: a write is durable in the cache with one fence; the backing gets it later.

use std::ops::Range;

use super::Behaviour;
use crate::cache::{Ask, Core, Mode};
use crate::device::Result;

pub(super) struct WriteBack;

impl Behaviour for WriteBack {
    fn write(&self, core: &Core, offset: u64, data: &[u8], ask: Ask<'_>) -> Result<()> {
        core.write_bytes(offset, data, ask, &mut |_| ())
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        if pages.end - pages.start <= Mode::ZERO_PAGES_MAX {
            core.zero_pages(pages.clone(), ask, &mut |_| ())
        } else {
            core.zero_many(pages, ask)
        }
    }

    fn writes_back(&self) -> bool {
        true
    }
}
