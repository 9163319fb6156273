//! Pass-through: writes and reads go to the backing; dirty pages of an earlier mode before them.

use std::ops::Range;

use super::wi::WriteInvalidate;
use super::{Behaviour, pages_in};
use crate::cache::Core;
use crate::cache::layout::PAGE_BYTES;
use crate::cache::tier::Counter;
use crate::device::Result;

pub(super) struct PassThrough;

impl Behaviour for PassThrough {
    fn write(&self, core: &Core, first: u64, data: &[u8], fua: bool) -> Result<()> {
        WriteInvalidate.write(core, first, data, fua)
    }

    fn read(&self, core: &Core, first: u64, buf: &mut [u8]) -> Result<()> {
        if core.groups.is_some() {
            // Pages that wait for a commit are not in the backing.
            return core.read_pages(first, buf, false);
        }
        core.clean_pages(&pages_in(first, buf))?;
        core.counters.add(Counter::PassThroughReads, 1);
        let _foreground = core.pace.foreground();
        core.backing.read(first * PAGE_BYTES, buf)
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, fua: bool) -> Result<()> {
        WriteInvalidate.zero(core, pages, fua)
    }

    fn reads_hits(&self) -> bool {
        false
    }
}
