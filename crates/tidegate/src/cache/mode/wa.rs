//! Write-around: a write of which all pages are cached goes through the cache, any other around it.

use std::ops::Range;

use super::Behaviour;
use super::wi::WriteInvalidate;
use super::wt::WriteThrough;
use crate::cache::span::pages_of;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteAround;

fn of(core: &Core, pages: &Range<u64>) -> &'static dyn Behaviour {
    if core.has_all(pages) { &WriteThrough } else { &WriteInvalidate }
}

impl Behaviour for WriteAround {
    fn write(&self, core: &Core, offset: u64, data: &[u8], ask: Ask<'_>) -> Result<()> {
        of(core, &pages_of(offset, data.len() as u64)).write(core, offset, data, ask)
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        of(core, pages).zero(core, pages, ask)
    }
}
