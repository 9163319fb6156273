//! The write mode: cached, or bypassing if caching gains nothing.
//!
//! A cache only slows down two loads, if only by its look-ups: a device that takes a block about as
//! fast as the cache does, and writers that keep all CPUs and a full cache busy, so that nothing
//! can be written back in the background. Under such a load the tier admits no block to the cache
//! any more, and a write of uncached blocks goes to the device below. Invariants:
//!
//! 1. Blocks are admitted only in [`WriteMode::Cached`], which is checked under the lock of the
//!    set.
//! 2. [`WriteMode::Bypassing`] begins after each set was locked once in a mode that admits nothing.
//!    So the index does not grow in this mode, and requests search it without a lock: a block that
//!    is found may have left, but a block that is not found is not cached.
//! 3. While a request bypasses the cache, nothing is admitted. The mode changes to
//!    [`WriteMode::Cached`] only if no such request is counted, after a store of the mode from
//!    which new requests see that they may not begin.
//! 4. The mode changes only under `switching`, by a writer that has just measured (`costs`).
//!
//! So a bypassing write need not close its blocks (see `closing`): no write could overtake it
//! through the cache.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use strum::FromRepr;

use super::costs::Worth;
use super::in_flight::{Entered, InFlight};
use super::{Core, Policy};

/// Share of free slots that ends the bypassing of an overrun cache: 1 in this many.
const FREE_SHARE: u32 = 8;

/// The destination of a write of an uncached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRepr)]
#[repr(u8)]
pub(super) enum WriteMode {
    /// Into the cache, if a slot is free.
    Cached,
    /// To the device below, closed; between the other two modes.
    Switching,
    /// To the device below, without a lock.
    Bypassing,
}

/// The current write mode.
pub(super) struct ModeSwitch {
    mode: AtomicU8,
    /// Requests that bypass the cache without a lock.
    bypassing: InFlight,
    switching: Mutex<()>,
}

impl ModeSwitch {
    /// Makes the switch in [`WriteMode::Cached`].
    pub(super) fn new() -> Self {
        Self {
            mode: AtomicU8::new(WriteMode::Cached as u8),
            bypassing: InFlight::default(),
            switching: Mutex::new(()),
        }
    }

    pub(super) fn mode(&self) -> WriteMode {
        WriteMode::from_repr(self.mode.load(Ordering::SeqCst)).expect("a mode that was stored")
    }

    /// Begins a bypass without a lock, if the mode allows it.
    fn enter(&self) -> Option<Entered<'_>> {
        if self.mode() != WriteMode::Bypassing {
            return None;
        }
        let entered = self.bypassing.enter();
        // Checked again, because the thread that switches reads the count after it stores the mode.
        (self.mode() == WriteMode::Bypassing).then_some(entered)
    }

    fn set(&self, mode: WriteMode) {
        self.mode.store(mode as u8, Ordering::SeqCst);
    }
}

impl Core {
    /// Begins a bypass without a lock, if the mode allows it and none of the lbas is cached.
    pub(super) fn enter_bypass(&self, first: u64, blocks: usize) -> Option<Entered<'_>> {
        let entered = self.mode_switch.enter()?;
        let absent =
            |lba| !self.sets.occupied.get(self.table.set_of(lba)) || self.table.find(lba).is_none();
        (first..).take(blocks).all(absent).then_some(entered)
    }

    /// Changes the mode by one step if the load requires a change. The caller must have no bypass
    /// in flight.
    pub(super) fn adapt_mode(&self) {
        if self.policy == Policy::Transit && !self.is_driven {
            self.switch_mode(|mode| self.only_slows_down(mode));
        }
    }

    /// Changes the mode by one step: towards bypassing if `bypass` is true, else towards cached.
    pub(super) fn switch_mode(&self, bypass: impl FnOnce(WriteMode) -> bool) {
        let switch = &self.mode_switch;
        let Some(_switching) = switch.switching.try_lock() else { return };
        let mode = switch.mode();
        match (mode, bypass(mode)) {
            (WriteMode::Cached, true) | (WriteMode::Bypassing, false) => {
                switch.set(WriteMode::Switching);
            }
            (WriteMode::Switching, true) => {
                (0..self.sets.count()).for_each(|number| drop(self.sets.lock(number)));
                switch.set(WriteMode::Bypassing);
            }
            (WriteMode::Switching, false) if switch.bypassing.count() == 0 => {
                switch.set(WriteMode::Cached);
            }
            _ => {}
        }
    }

    /// Returns whether the cache only slows writes down.
    fn only_slows_down(&self, mode: WriteMode) -> bool {
        let free = self.free.count();
        let overrun = match mode {
            WriteMode::Cached => free == 0 && self.is_below_memory && self.writers() >= self.cpus,
            WriteMode::Switching | WriteMode::Bypassing => free < self.slots.count() / FREE_SHARE,
        };
        overrun || self.costs.worth() == Worth::Bypass
    }

    /// Returns the number of writes and flushes in flight.
    pub(super) fn writers(&self) -> u32 {
        self.busy.count() + self.mode_switch.bypassing.count()
    }
}
