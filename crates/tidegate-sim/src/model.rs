//! The values that a block may hold.
//!
//! A block is a register. Its history is a set of operations, each with the positions of its begin
//! and, if it ended, of its end. A read at the end may return the value of any *linearization*: an
//! order of the operations that puts an operation before all that began after its end, and lets
//! each read return the value written last. Operations that need not have happened may be left out.
//!
//! With a crash at the end this is durable linearizability: operations acknowledged as durable
//! happened, operations in flight may have happened. An empty answer means that no order explains
//! the reads of the history.

use std::collections::{BTreeSet, HashSet};

/// The content of a block: 0 for zeroes, otherwise the stamp of a write.
pub type Stamp = u32;

/// Stands for the stamp of a block that was not written as a whole.
pub const TORN: Stamp = Stamp::MAX;

/// The values that each block may hold, independently of the other blocks.
pub type World = Vec<BTreeSet<Stamp>>;

/// The effect of an operation on its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The block holds this stamp afterwards.
    Write(Stamp),
    /// The block holds zeroes afterwards, or keeps its value.
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
    /// The effect.
    pub effect: Effect,
    /// The operation happened for sure, and a crash does not undo it.
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

/// Returns the stamps that a read after all of `intervals` may return, if the block held `initial`
/// before them.
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

    /// Returns whether no pending operation ended before `this` began.
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
