//! Write-back: a write is durable in the cache with one fence; the backing gets it later.

use super::Behaviour;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

pub(super) struct WriteBack;

impl Behaviour for WriteBack {
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        if content.is_many_zeroes() {
            return core.zero_many(&content.pages(), ask);
        }
        core.write_content(content, ask)
    }

    fn writes_back(&self) -> bool {
        true
    }
}
