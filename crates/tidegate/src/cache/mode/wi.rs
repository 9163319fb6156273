//! Write-invalidate: a write goes to the backing, and the cache gives its copies up.

use std::ops::Range;

use super::{Behaviour, pages_in};
use crate::cache::Core;
use crate::cache::bypass::Content;
use crate::device::Result;

pub(super) struct WriteInvalidate;

impl Behaviour for WriteInvalidate {
    fn write(&self, core: &Core, first: u64, data: &[u8], fua: bool) -> Result<()> {
        core.bypass(&pages_in(first, data), Content::Data(data), fua)
    }

    fn zero(&self, core: &Core, pages: &Range<u64>, fua: bool) -> Result<()> {
        core.bypass(pages, Content::Zeroes, fua)
    }
}
