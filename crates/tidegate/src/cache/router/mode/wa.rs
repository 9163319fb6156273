//! Write-around: a write goes through the cache if all its pages are cached, else around it.

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
