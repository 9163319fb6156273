//! Pass-through: writes and reads go to the backing; dirty pages of an earlier mode before them.

use super::Behaviour;
use super::wi::WriteInvalidate;
use crate::cache::counters::Counter;
use crate::cache::span::{Content, pages_of};
use crate::cache::{Ask, Core, Origin};
use crate::device::Result;

pub(super) struct PassThrough;

impl Behaviour for PassThrough {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        WriteInvalidate.write(core, content, ask)
    }

    fn read(&self, core: &Core, offset: u64, buf: &mut [u8], from: Origin) -> Result<()> {
        if core.pages.groups.is_some() {
            // Pages that wait for a commit are not in the backing.
            return core.read_bytes(offset, buf, false, from);
        }
        core.background.cleaners.clean_pages(&pages_of(offset, buf.len() as u64))?;
        let _foreground = core.backing.pace.foreground();
        core.backing.read(offset, buf, from.class)?;
        core.pages.counters.add_of(from.class, Counter::PassThroughReads, 1);
        Ok(())
    }

    fn reads_hits(&self) -> bool {
        false
    }
}
