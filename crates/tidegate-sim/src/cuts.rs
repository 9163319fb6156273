//! The states that a crash may leave of a device with atomic flush: all blocks as they were at one
//! moment of a flush, and FUA writes besides.
//!
//! That moment is not known from outside. It lies in a flush, and not before the beginning of any
//! flush that returned. A *cut* takes a prefix of each thread's writes: if a write is in the cut,
//! so is every write that had returned before it began. The last write of a prefix may be there in
//! part: a device takes the blocks of one write as they come.

use std::collections::BTreeSet;

use crate::history::{Call, History, Op};
use crate::model::{Effect, Interval, MAX_THREADS, Stamp, World, outcomes};

/// A flush that a crash may have committed.
#[derive(Clone, Copy)]
struct Window {
    /// Writes that returned before this position are in the cut.
    from: usize,
    /// Writes that begin after this position are not.
    to: usize,
}

/// A prefix of one thread's writes: the first `whole` ones, and with `and_part` a part of the next.
#[derive(Clone, Copy, Default)]
struct Prefix {
    whole: usize,
    and_part: bool,
}

/// Per thread, the writes that a crash undoes unless a flush covers them.
type Writes<'a> = [Vec<&'a Call>; MAX_THREADS];

impl History {
    /// Returns the values that blocks, `initial` at first, may hold after a crash at `position`.
    pub fn worlds(&self, initial: &[Stamp], position: usize) -> Vec<World> {
        if self.atomic_flush {
            return worlds(self, initial, position);
        }
        let block = |(lba, stamp): (u64, &Stamp)| self.after_crash(lba, *stamp, position);
        vec![(0..).zip(initial).map(block).collect()]
    }
}

/// Returns the worlds after a crash at `position`, each once.
fn worlds(history: &History, initial: &[Stamp], position: usize) -> Vec<World> {
    let begun: Vec<&Call> = history.calls.iter().filter(|call| call.begin < position).collect();
    let of_thread = |thread| {
        let of_group = |call: &&&Call| call.thread == thread && is_of_group(call.op);
        begun.iter().filter(of_group).copied().collect()
    };
    let writes: Writes<'_> = std::array::from_fn(of_thread);
    let mut worlds = BTreeSet::new();
    for window in windows(&begun, history.fua_commits, position) {
        each_cut(&writes, window, &mut |cut| {
            let block = |(lba, stamp): (u64, &Stamp)| {
                outcomes(*stamp, &intervals(&begun, &writes, cut, lba, window, position))
            };
            worlds.insert((0..).zip(initial).map(block).collect());
        });
    }
    worlds.into_iter().collect()
}

fn is_of_group(op: Op) -> bool {
    !op.durable_by_itself() && !matches!(op, Op::Read { .. } | Op::Flush)
}

fn windows(begun: &[&Call], fua_commits: bool, position: usize) -> Vec<Window> {
    let is_flush = |call: &&&Call| call.op == Op::Flush;
    let commits = |call: &&&Call| is_flush(call) || fua_commits && call.op.durable_by_itself();
    let flushes = || begun.iter().filter(commits);
    let returned = begun.iter().filter(is_flush);
    let returned = returned.filter(|flush| flush.acknowledged && flush.end < position);
    let Some(last) = returned.map(|flush| flush.begin).max() else {
        // A crash may leave no write at all.
        let of = |flush: &&Call| Window { from: flush.begin, to: flush.end.min(position) };
        return flushes().map(of).chain([Window { from: 0, to: 0 }]).collect();
    };
    let of = |flush: &&Call| Window { from: flush.begin.max(last), to: flush.end.min(position) };
    flushes().map(of).filter(|window| window.from <= window.to).collect()
}

/// Calls `see` with each cut of `window`.
fn each_cut(writes: &Writes<'_>, window: Window, see: &mut dyn FnMut(&[Prefix; MAX_THREADS])) {
    let mut cut = [Prefix::default(); MAX_THREADS];
    extend(writes, window, 0, &mut cut, see);
}

fn extend(
    writes: &Writes<'_>,
    window: Window,
    thread: usize,
    cut: &mut [Prefix; MAX_THREADS],
    see: &mut dyn FnMut(&[Prefix; MAX_THREADS]),
) {
    let Some(own) = writes.get(thread) else {
        if is_closed(writes, cut) {
            see(cut);
        }
        return;
    };
    let least = own.iter().filter(|call| call.end < window.from).count();
    let most = own.iter().filter(|call| call.begin < window.to).count();
    for whole in least..=most.max(least) {
        for and_part in [false, true] {
            if !and_part || whole < most {
                cut[thread] = Prefix { whole, and_part };
                extend(writes, window, thread + 1, cut, see);
            }
        }
    }
}

/// Returns whether every write that had returned before the last write in the cut began is in the
/// cut as a whole.
fn is_closed(writes: &Writes<'_>, cut: &[Prefix; MAX_THREADS]) -> bool {
    let all = || writes.iter().zip(cut);
    let inside = all().flat_map(|(own, it)| &own[..it.whole + usize::from(it.and_part)]);
    let outside = all().flat_map(|(own, it)| &own[it.whole..]);
    let last_begun = inside.map(|call| call.begin).max().unwrap_or(0);
    outside.map(|call| call.end).min().is_none_or(|end| end >= last_begun)
}

/// Returns the operations on block `lba`: writes of the cut, FUA writes, and reads before the cut.
fn intervals(
    begun: &[&Call],
    writes: &Writes<'_>,
    cut: &[Prefix; MAX_THREADS],
    lba: u64,
    window: Window,
    position: usize,
) -> Vec<Interval> {
    let place = |call: &Call| {
        let own = &writes[call.thread];
        own.iter().position(|it| it.begin == call.begin).unwrap_or(usize::MAX)
    };
    let required = |call: &Call| {
        let Prefix { whole, and_part } = cut[call.thread];
        match call.op {
            Op::Read { .. } => (call.end < window.from).then_some(true),
            op if op.durable_by_itself() => Some(call.acknowledged && call.end < position),
            _ if place(call) < whole => Some(true),
            _ => (and_part && place(call) == whole).then_some(false),
        }
    };
    let interval = |call: &&Call| {
        let end = (call.end < position).then_some(call.end);
        let effect: Effect = call.op.effect_on(lba, call.read.filter(|_| end.is_some()))?;
        let required = required(call)?;
        Some(Interval { thread: call.thread, begin: call.begin, end, effect, required })
    };
    begun.iter().filter_map(interval).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(thread: usize, op: Op, begin: usize, end: usize) -> Call {
        Call { thread, op, begin, end, acknowledged: end != usize::MAX, read: None }
    }

    fn write(thread: usize, lba: u64, stamp: Stamp, begin: usize, end: usize) -> Call {
        call(thread, Op::Write { lba, blocks: 1, stamp, fua: false }, begin, end)
    }

    fn after(calls: &[Call], position: usize) -> Vec<World> {
        let history = History { calls: calls.to_vec(), atomic_flush: true, ..History::default() };
        worlds(&history, &[1, 1], position)
    }

    fn world(stamps: [Stamp; 2]) -> World {
        stamps.map(|stamp| [stamp].into()).into()
    }

    #[test]
    fn a_crash_leaves_the_last_flush_or_the_one_under_way_as_a_whole() {
        let calls = [
            write(0, 0, 5, 0, 1),
            write(0, 1, 6, 2, 3),
            call(0, Op::Flush, 4, 7),
            write(0, 0, 8, 8, 9),
        ];
        assert_eq!(after(&calls, 4), [world([1, 1])]);
        assert_eq!(after(&calls, 6), [world([1, 1]), world([5, 6])]);
        assert_eq!(after(&calls, 10), [world([5, 6])]);
    }

    #[test]
    fn a_fua_write_is_there_whatever_the_flush_left() {
        let fua = call(0, Op::Write { lba: 1, blocks: 1, stamp: 6, fua: true }, 2, 3);
        let calls = [write(0, 0, 5, 0, 1), fua, call(0, Op::Flush, 4, 7)];
        assert_eq!(after(&calls, 4), [world([1, 6])]);
        assert_eq!(after(&calls, 9), [world([5, 6])]);
    }

    #[test]
    fn writes_beside_a_flush_are_in_it_in_their_order() {
        let calls = [call(1, Op::Flush, 0, 9), write(0, 0, 5, 1, 2), write(0, 1, 6, 3, 4)];
        let found = after(&calls, 10);
        let holds = |stamps: [Stamp; 2]| {
            found.iter().any(|it| it[0].contains(&stamps[0]) && it[1].contains(&stamps[1]))
        };
        assert!(holds([1, 1]) && holds([5, 1]) && holds([5, 6]) && !holds([1, 6]), "{found:?}");
    }
}
