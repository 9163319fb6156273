//! Write-back: a write is durable in the cache with one fence; the backing gets it later.

use std::ops::Range;

use super::Behaviour;
use crate::cache::{Core, Mode};
use crate::device::Result;

pub(super) struct WriteBack;

impl Behaviour for WriteBack {
    fn write(&self, core: &Core, offset: u64, data: &[u8], fua: bool) -> Result<()> {
        core.write_bytes(offset, data, fua, &mut |_| ())
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, fua: bool) -> Result<()> {
        if pages.end - pages.start <= Mode::ZERO_PAGES_MAX {
            core.zero_pages(pages.clone(), fua, &mut |_| ())
        } else {
            core.zero_many(pages, fua)
        }
    }

    fn writes_back(&self) -> bool {
        true
    }
}
