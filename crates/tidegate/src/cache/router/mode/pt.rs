//! Pass-through: writes and reads go to the backing, after dirty pages of an earlier mode.

use super::Behaviour;
use super::wi::WriteInvalidate;
use crate::cache::counters::Counter;
use crate::cache::router::Route;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct PassThrough;

impl Behaviour for PassThrough {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        WriteInvalidate.write(core, content, ask)
    }

    fn read(&self, core: &Core, route: &Route, buf: &mut [u8]) -> Result<()> {
        if core.pages.groups.is_some() {
            // Pages that wait for a commit are not in the backing.
            return core.read_bytes(route, buf);
        }
        core.background.cleaners.clean_pages(&route.pages())?;
        let _foreground = core.backing.pace.foreground();
        core.backing.read(route.request.offset_bytes, buf, route.class)?;
        core.pages.counters.add_of(route.class, Counter::PassThroughReads, 1);
        Ok(())
    }

    fn reads_hits(&self) -> bool {
        false
    }

    fn keeps_misses(&self) -> bool {
        false
    }
}
