//! The course: through the cache, or straight to the device below where caching gains nothing.
//!
//! Two loads are only slowed down by a cache, be it by the look-up alone: a device that takes a block about as fast
//! as the cache does, and writers that keep all CPUs and a full cache busy, so that nothing can be written back in
//! the background. Then the tier steps aside: nothing is admitted to the cache any more, and a write of blocks
//! that are not cached goes straight below. Invariants:
//!
//! 1. Blocks are admitted on [`Course::Cached`] alone, which is looked up under the lock of the set.
//! 2. [`Course::Straight`] begins after each set was locked once on a course that admits nothing. So the index does
//!    not grow on it and is looked up without a lock: what is found may have left, what is not found is not there.
//! 3. While a request is on its straight way, nothing is admitted: the course turns to [`Course::Cached`] only
//!    where none is counted, after new ones could see that they may not set out.
//! 4. The course changes only under `steering`, by a writer that has just measured (`costs`).
//!
//! So a straight write needs not close its blocks (see `closing`): nothing could overtake it through the cache.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;

use super::costs::Worth;
use super::in_flight::{Entered, InFlight};
use super::{Core, Policy};

/// Slots that are free once the cache is worth it again, as a share of all: 1 in so many.
const ROOM_SHARE: u32 = 8;

/// Where a write goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Course {
    /// Into the cache, where a slot is free.
    Cached,
    /// Past the cache, but for hits: on the way from one of the others to the other.
    Turning,
    /// Straight to the device below, but for hits.
    Straight,
}

/// The present course.
pub(super) struct Helm {
    course: AtomicU8,
    /// Requests that set out on the straight course.
    straight: InFlight,
    steering: Mutex<()>,
}

impl Helm {
    /// On [`Course::Cached`].
    pub(super) fn new() -> Self {
        Self {
            course: AtomicU8::new(Course::Cached as u8),
            straight: InFlight::new(),
            steering: Mutex::new(()),
        }
    }

    pub(super) fn course(&self) -> Course {
        match self.course.load(Ordering::SeqCst) {
            0 => Course::Cached,
            1 => Course::Turning,
            _ => Course::Straight,
        }
    }

    /// Sets out on the straight course, where that is the present one.
    pub(super) fn go_straight(&self) -> Option<Entered<'_>> {
        if self.course() != Course::Straight {
            return None;
        }
        let entered = self.straight.enter();
        // Again, since whoever turns looks at the count after the turn.
        (self.course() == Course::Straight).then_some(entered)
    }

    /// Requests that are on their straight way.
    pub(super) fn count(&self) -> u32 {
        self.straight.count()
    }

    fn turn_to(&self, course: Course) {
        self.course.store(course as u8, Ordering::SeqCst);
    }
}

impl Core {
    /// Sets out on the straight course, where that is the present one and none of the lbas is cached.
    pub(super) fn go_straight(&self, first: u64, blocks: usize) -> Option<Entered<'_>> {
        let entered = self.helm.go_straight()?;
        let absent =
            |lba| !self.sets.occupied.get(self.table.set_of(lba)) || self.table.find(lba).is_none();
        (first..).take(blocks).all(absent).then_some(entered)
    }

    /// Changes the course by one step where the load calls for it. The caller has no request on its straight way.
    pub(super) fn steer(&self) {
        if self.policy == Policy::Transit && !self.is_driven {
            self.turn(|course| self.is_in_the_way(course));
        }
    }

    /// The same where it is `in_the_way` that decides.
    pub(super) fn turn(&self, in_the_way: impl FnOnce(Course) -> bool) {
        let helm = &self.helm;
        let Some(_steering) = helm.steering.try_lock() else { return };
        let course = helm.course();
        match (course, in_the_way(course)) {
            (Course::Cached, true) | (Course::Straight, false) => helm.turn_to(Course::Turning),
            (Course::Turning, true) => {
                (0..self.sets.count()).for_each(|number| drop(self.sets.lock(number)));
                helm.turn_to(Course::Straight);
            }
            (Course::Turning, false) if helm.count() == 0 => helm.turn_to(Course::Cached),
            _ => {}
        }
    }

    /// The cache only slows writes down.
    fn is_in_the_way(&self, course: Course) -> bool {
        let free = self.free.count();
        let overrun = match course {
            Course::Cached => {
                free == 0 && self.is_below_memory && !self.bell.has_room(self.writers())
            }
            Course::Turning | Course::Straight => free < self.slots.count() / ROOM_SHARE,
        };
        overrun || self.costs.worth() == Worth::Bypass
    }

    /// Writes and flushes under way.
    pub(super) fn writers(&self) -> u32 {
        self.busy.count() + self.helm.count()
    }
}
