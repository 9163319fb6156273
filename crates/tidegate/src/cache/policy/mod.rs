//! Policies of the cache, as pure state machines: no clock, thread or I/O inside.

mod lru;

pub use lru::Lru;

/// In which order slots are evicted. Slots are numbered from 0; the caller holds a lock.
pub trait Replacement: Send {
    /// `slot` holds a page now.
    fn insert(&mut self, slot: u32);

    /// The page in `slot` was read, or written in place of another slot's.
    fn touch(&mut self, slot: u32, write: bool);

    /// `slot` holds no page any more.
    fn remove(&mut self, slot: u32);

    /// Adds up to `n` slots to `out`, the one to be evicted first first. They stay where they are
    /// until [`remove`](Self::remove).
    fn victims(&mut self, n: usize, out: &mut Vec<u32>);
}
