//! `nop`: slots are cleaned when they are evicted or flushed, and never before.

use super::{Cleaning, DirtySlots, Load, NEVER_NS};

/// The policy; it has no settings.
pub struct Nop;

impl Cleaning for Nop {
    fn next(&mut self, _load: &Load, _dirty: &dyn DirtySlots, _out: &mut Vec<u32>) -> u64 {
        NEVER_NS
    }
}
