//! Write-around: a write of which all pages are cached goes through the cache, any other around it.

use super::Behaviour;
use super::wi::WriteInvalidate;
use super::wt::WriteThrough;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteAround;

impl Behaviour for WriteAround {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        if core.pages.has_all(&content.pages()) {
            return WriteThrough.write(core, content, ask);
        }
        WriteInvalidate.write(core, content, ask)
    }
}
