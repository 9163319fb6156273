//! Which values a block may hold.
//!
//! A block is a register. Its history is a set of operations, each with the positions at which it
//! began and, if it did, ended. The values that a read at the end may return are those of all
//! *linearizations*: orders of the operations in which one that ended before another began comes
//! first, in which each read returns the value written last, and in which operations that need not
//! have happened may be left out.
//!
//! With a crash at the end this is durable linearizability: what was acknowledged as durable
//! happened, what was in flight may have. An empty answer means that the reads of the history
//! cannot be explained at all.

use std::collections::{BTreeSet, HashSet};

/// What a block holds: 0 is zeroes, other numbers the stamps of writes.
pub type Stamp = u32;

/// In place of a stamp: the block was not written as a whole.
pub const TORN: Stamp = Stamp::MAX;

/// What each block may hold, whatever the others hold.
pub type World = Vec<BTreeSet<Stamp>>;

/// What an operation does to its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The block holds this stamp afterwards.
    Write(Stamp),
    /// The block holds zeroes afterwards, or what it held before.
    Discard,
    /// The block held this stamp.
    Read(Stamp),
}

/// One operation on one block.
#[derive(Debug, Clone, Copy)]
pub struct Interval {
    /// The thread; its intervals come in program order.
    pub thread: usize,
    /// Position of the call.
    pub begin: usize,
    /// Position of the return.
    pub end: Option<usize>,
    /// What it does.
    pub effect: Effect,
    /// It happened for sure, and a crash does not undo it.
    pub required: bool,
}

type Progress = [u16; MAX_THREADS];
/// Most threads that a history may have.
pub const MAX_THREADS: usize = 4;

struct Search<'a> {
    threads: [Vec<&'a Interval>; MAX_THREADS],
    seen: HashSet<(Progress, Stamp)>,
    outcomes: BTreeSet<Stamp>,
}

/// The stamps that a read after all of `intervals` may return where the block held `initial` before
/// them.
pub fn outcomes(initial: Stamp, intervals: &[Interval]) -> BTreeSet<Stamp> {
    let of = |thread| intervals.iter().filter(|i| i.thread == thread).collect();
    let mut search = Search {
        threads: std::array::from_fn(of),
        seen: HashSet::new(),
        outcomes: BTreeSet::new(),
    };
    search.visit([0; MAX_THREADS], initial);
    search.outcomes
}

impl Search<'_> {
    fn visit(&mut self, progress: Progress, value: Stamp) {
        if !self.seen.insert((progress, value)) {
            return;
        }
        let mut finished = true;
        for thread in 0..MAX_THREADS {
            let Some(next) = self.next(progress, thread) else { continue };
            finished = false;
            if self.may_come_first(progress, next) {
                let mut after = progress;
                after[thread] += 1;
                for value in values_after(value, next) {
                    self.visit(after, value);
                }
            }
        }
        if finished {
            self.outcomes.insert(value);
        }
    }

    fn next(&self, progress: Progress, thread: usize) -> Option<Interval> {
        self.threads[thread].get(usize::from(progress[thread])).map(|interval| **interval)
    }

    /// No operation that is still to come ended before `this` began.
    fn may_come_first(&self, progress: Progress, this: Interval) -> bool {
        let mut others = (0..MAX_THREADS).filter_map(|thread| self.next(progress, thread));
        others.all(|other| other.end.is_none_or(|end| end >= this.begin))
    }
}

fn values_after(value: Stamp, interval: Interval) -> Vec<Stamp> {
    let mut values = match interval.effect {
        Effect::Write(stamp) => vec![stamp],
        Effect::Discard => vec![0, value],
        Effect::Read(stamp) if stamp == value => vec![value],
        Effect::Read(_) => Vec::new(),
    };
    if !interval.required {
        values.push(value);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(thread: usize, begin: usize, end: Option<usize>, effect: Effect) -> Interval {
        Interval { thread, begin, end, effect, required: end.is_some() }
    }

    #[test]
    fn an_acknowledged_write_replaces_what_was_there() {
        let history = [op(0, 0, Some(1), Effect::Write(5)), op(0, 2, Some(3), Effect::Write(6))];
        assert_eq!(outcomes(1, &history), [6].into());
    }

    #[test]
    fn a_write_in_flight_may_or_may_not_have_happened() {
        let history = [op(0, 0, Some(1), Effect::Write(5)), op(0, 2, None, Effect::Write(6))];
        assert_eq!(outcomes(1, &history), [5, 6].into());
    }

    #[test]
    fn concurrent_writes_may_come_in_any_order() {
        let history = [op(0, 0, Some(5), Effect::Write(5)), op(1, 1, Some(4), Effect::Write(6))];
        assert_eq!(outcomes(1, &history), [5, 6].into());
    }

    #[test]
    fn a_read_decides_what_happened() {
        let history = [
            op(0, 0, None, Effect::Write(5)),
            op(1, 1, Some(2), Effect::Read(5)),
            op(1, 3, Some(4), Effect::Read(5)),
        ];
        assert_eq!(outcomes(1, &history), [5].into());
    }

    #[test]
    fn stale_and_vanishing_reads_have_no_explanation() {
        let stale = [op(0, 0, Some(1), Effect::Write(5)), op(1, 2, Some(3), Effect::Read(1))];
        assert!(outcomes(1, &stale).is_empty());
        let vanishing = [
            op(0, 0, Some(9), Effect::Write(5)),
            op(1, 1, Some(2), Effect::Read(5)),
            op(1, 3, Some(4), Effect::Read(1)),
        ];
        assert!(outcomes(1, &vanishing).is_empty());
    }

    #[test]
    fn a_discarded_block_reads_as_zeroes_or_as_before() {
        assert_eq!(outcomes(1, &[op(0, 0, Some(1), Effect::Discard)]), [0, 1].into());
    }

    #[test]
    fn unflushed_writes_may_be_lost_but_not_reordered() {
        let mut history =
            [op(0, 0, Some(1), Effect::Write(5)), op(0, 2, Some(3), Effect::Write(6))];
        history[1].required = false;
        assert_eq!(outcomes(1, &history), [5, 6].into());
    }
}
