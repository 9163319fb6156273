//! Decides which writes a flush covers, and when it must fail: pure state.
//!
//! Acknowledged writes that only a flush makes durable are numbered. A flush is *requested* after a
//! certain write. A *loss* may have dropped the writes that are not flushed: a flush that fails, or
//! the end of a connection or of a disk. A loss is *reported* by a flush that fails.
//!
//! Invariants:
//! 1. One flush is in flight at a time; flushes requested meanwhile share the next one.
//! 2. A flush succeeds only if it covers each write acknowledged before its request, except writes
//!    that were flushed before, and writes whose loss was reported by a flush requested after them.
//! 3. A flush requested before another flush's failure was reported fails too, because its caller
//!    may own the lost writes.
//! 4. A write that is under way during a loss belongs to the loss, unless the device sends it again
//!    before it is acknowledged: the number of losses at its begin differs from that at its end.

use std::mem::take;
use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};

/// The state at the request of a flush, or at the begin of a write.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moment {
    /// Number of the last acknowledged write.
    write: u64,
    /// Number of failures reported so far.
    failures: u64,
    /// Number of losses so far.
    losses: u64,
}

#[derive(Default)]
struct Counts {
    writes: AtomicU64,
    failures: AtomicU64,
    losses: AtomicU64,
}

/// Gives the current moment to threads that request flushes, and counts their writes.
#[derive(Clone, Default)]
pub(super) struct Clock(Arc<Counts>);

impl Clock {
    pub(super) fn now(&self) -> Moment {
        let Counts { writes, failures, losses } = &*self.0;
        // The failures first: a failure that is reported between the loads counts as a later one.
        let failures = failures.load(Ordering::Acquire);
        let losses = losses.load(Ordering::SeqCst);
        Moment { write: writes.load(Ordering::SeqCst), failures, losses }
    }

    /// Counts a write, about to be acknowledged, that only a flush makes durable. Returns its
    /// number.
    pub(super) fn wrote(&self) -> u64 {
        self.0.writes.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns whether a loss came after `moment`. The loss counts itself and then looks at the
    /// writes; a write counts itself and then calls this: at least one of the two sees the other.
    pub(super) fn has_lost_since(&self, moment: Moment) -> bool {
        self.0.losses.load(Ordering::SeqCst) != moment.losses
    }
}

/// A requested flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asked {
    job: u64,
    /// The last write acknowledged before; `None` if the flush completes a forced write.
    after: Option<u64>,
}

/// Writes that are, or may be, lost: those after `after`, up to `upto`.
#[derive(Debug, Clone, Copy)]
struct Lost {
    after: u64,
    upto: u64,
}

/// The jobs that a flush has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) done: Vec<u64>,
    /// Jobs that must fail, because writes were lost while the flush ran.
    pub(super) failed: Vec<u64>,
}

/// The state of all flushes; see the module. Flushes are numbered by their jobs.
#[derive(Default)]
pub(super) struct Flushes {
    waiting: Vec<Asked>,
    running: Option<Vec<Asked>>,
    /// When the flush in flight was sent.
    begun: Moment,
    /// All writes up to this one are flushed, or lost.
    accounted: u64,
    /// Losses that no flush has reported yet.
    lost: Option<Lost>,
    clock: Clock,
}

impl Flushes {
    pub(super) fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Counts a write, about to be acknowledged, that only a flush makes durable.
    pub(super) fn wrote(&mut self) {
        self.clock.wrote();
    }

    /// Adds a flush requested at `moment`. Returns false if it must fail at once.
    pub(super) fn ask(&mut self, job: u64, moment: Moment) -> bool {
        let is_later = moment.failures == self.clock.now().failures;
        if is_later {
            self.waiting.push(Asked { job, after: Some(moment.write) });
        }
        is_later
    }

    /// Adds a flush for the forced write `job`, whose data is written, and not lost since.
    pub(super) fn ask_for_write(&mut self, job: u64) {
        self.waiting.push(Asked { job, after: None });
    }

    /// Returns whether the next flush may be sent; it counts as in flight then.
    pub(super) fn begin(&mut self) -> bool {
        if self.running.is_some() || self.waiting.is_empty() {
            return false;
        }
        self.running = Some(take(&mut self.waiting));
        self.begun = self.clock.now();
        true
    }

    /// Ends the flush in flight as successful.
    pub(super) fn succeed(&mut self) -> Ended {
        self.accounted = self.accounted.max(self.begun.write);
        let mut running = self.running.take().unwrap_or_default();
        let has_lost = self.clock.has_lost_since(self.begun);
        let is_doomed = |it: &mut Asked| self.is_doomed(it) || (has_lost && it.after.is_none());
        let mut doomed: Vec<_> = running.extract_if(.., is_doomed).collect();
        // The waiting ones too, which were requested before this failure is reported.
        doomed.append(&mut self.take_doomed());
        Ended { failed: self.tell(doomed), done: jobs(running) }
    }

    /// Handles the loss of the connection. Returns the jobs that [`lose`](Self::lose) returns.
    /// Other flushes are made again, or are [`doomed`](Self::doomed).
    pub(super) fn lose_connection(&mut self) -> Vec<u64> {
        if let Some(running) = self.running.take() {
            self.waiting.splice(0..0, running);
        }
        self.lose()
    }

    /// Handles a loss beside the flush in flight. Returns the waiting forced writes, which must
    /// fail, because only an earlier flush would have covered them.
    pub(super) fn lose(&mut self) -> Vec<u64> {
        self.lose_writes();
        jobs(self.waiting.extract_if(.., |it| it.after.is_none()).collect())
    }

    /// Marks the acknowledged write number `write` as possibly lost, because a loss came while it
    /// was under way.
    pub(super) fn lose_write(&mut self, write: u64) {
        let Lost { after, upto } = self.lost.unwrap_or(Lost { after: write - 1, upto: write });
        self.lost = Some(Lost { after: after.min(write - 1), upto: upto.max(write) });
    }

    /// Marks all acknowledged writes that are not flushed as possibly lost.
    fn lose_writes(&mut self) {
        self.clock.0.losses.fetch_add(1, Ordering::SeqCst);
        let upto = self.clock.now().write;
        if upto > self.accounted {
            let after = self.lost.map_or(self.accounted, |lost| lost.after.min(self.accounted));
            self.lost = Some(Lost { after, upto });
            self.accounted = upto;
        }
    }

    fn is_doomed(&self, asked: &Asked) -> bool {
        asked.after.zip(self.lost).is_some_and(|(write, lost)| write > lost.after)
    }

    /// Takes out the flushes that must fail because writes before them are lost.
    pub(super) fn doomed(&mut self) -> Vec<u64> {
        if self.running.is_some() || self.lost.is_none() {
            return Vec::new();
        }
        let doomed = self.take_doomed();
        self.tell(doomed)
    }

    fn take_doomed(&mut self) -> Vec<Asked> {
        let mut waiting = take(&mut self.waiting);
        let doomed = waiting.extract_if(.., |it| self.is_doomed(it)).collect();
        self.waiting = waiting;
        doomed
    }

    /// Takes out all waiting jobs, which must fail because the device takes no flushes. None are
    /// taken while a flush is in flight.
    pub(super) fn refuse(&mut self) -> Vec<u64> {
        if self.running.is_some() {
            return Vec::new();
        }
        let waiting = take(&mut self.waiting);
        self.tell(waiting)
    }

    /// Fails the flush in flight and all waiting ones. Returns their jobs.
    pub(super) fn fail(&mut self) -> Vec<u64> {
        self.lose_writes();
        let mut failed = self.running.take().unwrap_or_default();
        failed.append(&mut self.waiting);
        self.tell(failed)
    }

    fn tell(&mut self, failed: Vec<Asked>) -> Vec<u64> {
        if !failed.is_empty() {
            self.clock.0.failures.fetch_add(1, Ordering::Release);
        }
        let told = failed.iter().filter_map(|it| it.after).max().unwrap_or(0);
        self.lost = self.lost.filter(|lost| told < lost.upto);
        if let Some(lost) = &mut self.lost {
            lost.after = lost.after.max(told);
        }
        jobs(failed)
    }
}

fn jobs(asked: Vec<Asked>) -> Vec<u64> {
    asked.into_iter().map(|it| it.job).collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn ask(flushes: &mut Flushes, job: u64) {
        let now = flushes.clock().now();
        assert!(flushes.ask(job, now));
    }

    fn done(jobs: &[u64]) -> Ended {
        Ended { done: jobs.to_vec(), failed: Vec::new() }
    }

    #[test]
    fn flushes_that_wait_together_share_one() {
        let mut flushes = Flushes::default();
        ask(&mut flushes, 1);
        assert!(flushes.begin());
        ask(&mut flushes, 2);
        ask(&mut flushes, 3);
        assert!(!flushes.begin(), "one is on its way");
        assert_eq!(flushes.succeed(), done(&[1]));
        assert!(flushes.begin());
        assert_eq!(flushes.succeed(), done(&[2, 3]));
        assert!(!flushes.begin());
    }

    #[test]
    fn a_loss_fails_one_flush_and_those_asked_for_before_it_was_told() {
        let mut flushes = Flushes::default();
        flushes.wrote();
        assert!(flushes.lose_connection().is_empty());
        assert!(flushes.doomed().is_empty(), "no flush is there to be told");
        let early = flushes.clock().now();
        ask(&mut flushes, 1);
        assert_eq!(flushes.doomed(), [1]);
        assert!(!flushes.ask(2, early), "asked for before the failure was told");
        ask(&mut flushes, 3);
        assert!(flushes.doomed().is_empty());
        assert!(flushes.begin());
        assert_eq!(flushes.succeed(), done(&[3]));
    }

    /// A caller does not repeat writes that were acknowledged to others after its flush began.
    #[test]
    fn a_flush_tells_only_of_writes_before_it_was_asked_for() {
        let mut flushes = Flushes::default();
        flushes.wrote();
        ask(&mut flushes, 1);
        flushes.wrote();
        assert!(flushes.lose_connection().is_empty());
        assert_eq!(flushes.doomed(), [1]);
        ask(&mut flushes, 2);
        assert_eq!(flushes.doomed(), [2], "the second write was not told of");
        ask(&mut flushes, 3);
        assert!(flushes.doomed().is_empty());
    }

    #[test]
    fn a_flush_that_runs_while_the_connection_is_lost_fails_where_it_covers_writes() {
        for is_dirty in [false, true] {
            let mut flushes = Flushes::default();
            if is_dirty {
                flushes.wrote();
            }
            ask(&mut flushes, 1);
            assert!(flushes.begin());
            ask(&mut flushes, 2);
            assert!(flushes.lose_connection().is_empty());
            let expected: &[u64] = if is_dirty { &[1, 2] } else { &[] };
            assert_eq!(flushes.doomed(), expected);
            assert_eq!(flushes.begin(), !is_dirty, "made again where nothing is lost");
        }
    }

    #[test]
    fn what_was_flushed_is_not_lost() {
        let mut flushes = Flushes::default();
        flushes.wrote();
        ask(&mut flushes, 1);
        assert!(flushes.begin());
        assert_eq!(flushes.succeed(), done(&[1]));
        assert!(flushes.lose_connection().is_empty());
        ask(&mut flushes, 2);
        assert!(flushes.doomed().is_empty());
    }

    #[test]
    fn a_loss_while_a_flush_runs_fails_those_that_are_asked_for_a_lost_write() {
        let mut flushes = Flushes::default();
        ask(&mut flushes, 1);
        flushes.wrote();
        ask(&mut flushes, 2);
        flushes.ask_for_write(3);
        assert!(flushes.begin());
        flushes.ask_for_write(4);
        ask(&mut flushes, 5);
        assert_eq!(flushes.lose(), [4]);
        assert_eq!(flushes.succeed(), Ended { done: vec![1], failed: vec![2, 3, 5] });
        ask(&mut flushes, 6);
        assert!(flushes.doomed().is_empty(), "flush 2 has told of it");
    }

    #[test]
    fn a_write_that_is_under_way_during_a_loss_is_lost_with_it() {
        let mut flushes = Flushes::default();
        let clock = flushes.clock();
        let begun = clock.now();
        ask(&mut flushes, 1);
        assert!(flushes.begin());
        assert_eq!(flushes.fail(), [1]);
        assert!(clock.has_lost_since(begun));
        let write = clock.wrote();
        flushes.lose_write(write);
        ask(&mut flushes, 2);
        assert_eq!(flushes.doomed(), [2]);
        ask(&mut flushes, 3);
        assert!(flushes.doomed().is_empty());
    }

    /// At a server without FUA, a failed forced write informs its own caller only: the loss of
    /// other clients' writes must still be reported.
    #[test]
    fn a_forced_write_fails_with_its_connection_and_tells_nobody_else() {
        let mut flushes = Flushes::default();
        flushes.wrote();
        flushes.ask_for_write(1);
        assert_eq!(flushes.lose_connection(), [1]);
        flushes.ask_for_write(2);
        assert!(flushes.doomed().is_empty(), "its write was answered on this connection");
        assert!(flushes.begin());
        assert_eq!(flushes.succeed(), done(&[2]));
        ask(&mut flushes, 3);
        assert_eq!(flushes.doomed(), [3]);
        flushes.wrote();
        flushes.ask_for_write(4);
        assert!(flushes.begin());
        assert_eq!(flushes.fail(), [4]);
        ask(&mut flushes, 5);
        assert_eq!(flushes.doomed(), [5]);
    }
}
