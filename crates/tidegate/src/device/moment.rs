//! The content of a device at one instant, which is copied while changes go on.
//!
//! The device consists of units. A copying thread claims units, reads them, and reports them as
//! saved; a change of a unit waits until the unit is saved.
//!
//! Invariants:
//! 1. A unit is claimed once, and saved once its old content is in memory or in the copy.
//! 2. Units that a change waits for are claimed before all others.
//! 3. After `Moment::end` nothing waits, and no unit is claimed any more.
//! 4. No thread holds the lock across I/O. So the thread that supervises the copy can always see
//!    how long changes wait ([`Moment::longest_wait`]), and end the copy.

#![expect(clippy::disallowed_methods, reason = "a wait that is too long is seen by the real clock")]

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::AsyncRequest;

/// Bytes of a unit.
pub const UNIT_BYTES: u64 = 64 << 10;

/// The content of a device at one instant.
pub struct Moment {
    size_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    claimed: Units,
    saved: Units,
    /// No unit before this one is unclaimed.
    next: u64,
    /// Units that changes wait for, oldest first; some may be claimed.
    wanted: VecDeque<Range<u64>>,
    waiting: Vec<Waiting>,
    is_ended: bool,
}

/// A change that waits.
struct Waiting {
    units: Range<u64>,
    since: Instant,
    /// `None` if a thread waits.
    request: Option<AsyncRequest>,
}

/// A set of units, one bit each.
struct Units(Vec<u64>);

impl Units {
    fn has(&self, unit: u64) -> bool {
        self.0[word_of(unit)] & 1 << (unit % 64) != 0
    }

    fn add(&mut self, units: Range<u64>) {
        units.for_each(|unit| self.0[word_of(unit)] |= 1 << (unit % 64));
    }

    fn has_all(&self, mut units: Range<u64>) -> bool {
        units.all(|unit| self.has(unit))
    }
}

fn word_of(unit: u64) -> usize {
    usize::try_from(unit / 64).unwrap_or(usize::MAX)
}

/// Which units a thread claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Units that changes wait for; the thread waits if there are none.
    Wanted,
    /// Any units, those that changes wait for first.
    Any,
}

impl Moment {
    /// Makes a moment of a device of `size_bytes` bytes, with no unit saved.
    pub fn new(size_bytes: u64) -> Self {
        let words = usize::try_from(size_bytes.div_ceil(UNIT_BYTES * 64)).unwrap_or(usize::MAX);
        let state = State {
            claimed: Units(vec![0; words]),
            saved: Units(vec![0; words]),
            next: 0,
            wanted: VecDeque::new(),
            waiting: Vec::new(),
            is_ended: false,
        };
        Self { size_bytes, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Claims at most `most_bytes` bytes. Returns `None` if all are claimed or the copy has ended.
    pub fn claim(&self, which: Claim, most_bytes: u64) -> Option<Range<u64>> {
        let (units, most) =
            (self.size_bytes.div_ceil(UNIT_BYTES), (most_bytes / UNIT_BYTES).max(1));
        let mut state = self.state.lock();
        loop {
            state.pass_claimed(units);
            if state.is_ended || state.next == units {
                return None;
            }
            let first = match (state.next_wanted(), which) {
                (Some(first), _) => first,
                (None, Claim::Any) => state.next,
                (None, Claim::Wanted) => {
                    self.changed.wait(&mut state);
                    continue;
                }
            };
            let last = (first + most).min(units);
            let end = (first..last).find(|unit| state.claimed.has(*unit)).unwrap_or(last);
            state.claimed.add(first..end);
            return Some(first * UNIT_BYTES..(end * UNIT_BYTES).min(self.size_bytes));
        }
    }

    /// Marks a claimed range as saved. Returns the changes that need not wait any more.
    #[must_use]
    pub(super) fn saved(&self, range: &Range<u64>) -> Vec<AsyncRequest> {
        let mut state = self.state.lock();
        state.saved.add(self.units_of(range));
        let State { saved, waiting, .. } = &mut *state;
        let is_over = |it: &mut Waiting| it.request.is_some() && saved.has_all(it.units.clone());
        let over: Vec<_> = waiting.extract_if(.., is_over).collect();
        self.changed.notify_all();
        over.into_iter().filter_map(|it| it.request).collect()
    }

    /// Ends the copy, complete or not. Returns the changes that waited.
    #[must_use]
    pub(super) fn end(&self) -> Vec<AsyncRequest> {
        let mut state = self.state.lock();
        state.is_ended = true;
        let over: Vec<_> = state.waiting.extract_if(.., |it| it.request.is_some()).collect();
        self.changed.notify_all();
        over.into_iter().filter_map(|it| it.request).collect()
    }

    /// Returns whether all units are saved.
    pub fn is_whole(&self) -> bool {
        self.state.lock().saved.has_all(0..self.size_bytes.div_ceil(UNIT_BYTES))
    }

    /// Returns how long the oldest waiting change has waited.
    pub fn longest_wait(&self) -> Option<Duration> {
        self.state.lock().waiting.iter().map(|it| it.since.elapsed()).max()
    }

    /// Returns whether a change of `range` has to wait.
    pub(super) fn holds_back(&self, range: &Range<u64>) -> bool {
        self.state.lock().holds_back(&self.units_of(range))
    }

    /// Waits until a change of `range` may run.
    pub(super) fn wait_for(&self, range: &Range<u64>) {
        let units = self.units_of(range);
        let mut state = self.state.lock();
        if !state.holds_back(&units) {
            return;
        }
        let since = Instant::now();
        self.want(&mut state, units.clone(), since, None);
        while state.holds_back(&units) {
            self.changed.wait(&mut state);
        }
        let is_own =
            |it: &Waiting| it.request.is_none() && (&it.units, it.since) == (&units, since);
        if let Some(own) = state.waiting.iter().position(is_own) {
            state.waiting.swap_remove(own);
        }
    }

    /// Keeps `request`, a change of `range`, until it may run. Returns it if it may run at once.
    pub(super) fn park(&self, range: &Range<u64>, request: AsyncRequest) -> Option<AsyncRequest> {
        let units = self.units_of(range);
        let mut state = self.state.lock();
        if !state.holds_back(&units) {
            return Some(request);
        }
        self.want(&mut state, units, Instant::now(), Some(request));
        None
    }

    fn want(
        &self,
        state: &mut State,
        units: Range<u64>,
        since: Instant,
        request: Option<AsyncRequest>,
    ) {
        state.wanted.push_back(units.clone());
        state.waiting.push(Waiting { units, since, request });
        self.changed.notify_all();
    }

    /// Returns the units that `range` touches, up to the end of the device.
    fn units_of(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.size_bytes);
        if range.start >= end {
            return 0..0;
        }
        range.start / UNIT_BYTES..end.div_ceil(UNIT_BYTES)
    }
}

impl State {
    fn holds_back(&self, units: &Range<u64>) -> bool {
        !self.is_ended && !self.saved.has_all(units.clone())
    }

    /// Moves `next` to the first unit that is not claimed.
    fn pass_claimed(&mut self, units: u64) {
        let unclaimed = (self.next..units).find(|unit| !self.claimed.has(*unit));
        self.next = unclaimed.unwrap_or(units);
    }

    /// Returns the first unclaimed unit that a change waits for.
    fn next_wanted(&mut self) -> Option<u64> {
        while let Some(units) = self.wanted.front().cloned() {
            if let Some(unit) = units.clone().find(|unit| !self.claimed.has(*unit)) {
                self.wanted[0].start = unit;
                return Some(unit);
            }
            self.wanted.pop_front();
        }
        None
    }
}
