//! Write-invalidate: a write goes to the backing, and the cache gives its copies up.

use super::Behaviour;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteInvalidate;

impl Behaviour for WriteInvalidate {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        core.bypass(content, ask)
    }
}
