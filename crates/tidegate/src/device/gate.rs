//! A layer that can hold changes back for an instant. The content of that instant can be copied
//! while changes go on: a change waits until the old content of its range is saved.
//!
//! Invariants:
//! 1. While a [`Held`] lives, no change is at the device below, whether it began before or after.
//! 2. While a [`Moment`] is kept, no change of a unit that it has not saved is at the device below.
//! 3. A change held back runs when the last [`Held`] is dropped and its units are saved or their
//!    moments have ended. No change is lost or refused.
//! 4. Changes on different shards write no common cache line unless changes are held back.
//!
//! A change enters by adding itself to its shard and then reading the word; a holder sets the word
//! and then waits for every shard to be empty. At least one of the two sees the other. A moment is
//! kept while changes are held back, so a change that enters later sees it.

#![expect(clippy::disallowed_methods, reason = "a wait that is too long is seen by the real clock")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use parking_lot::{Condvar, Mutex, RwLock};

use super::moment::Moment;
use super::waits;
use super::{
    AsyncRequest, Attempt, BlockDevice, Context, Geometry, Op, Operation, Request, Result,
};

const SHARDS: usize = 16;
/// Bits of the word that changes read: changes are held back, and a moment is kept.
const CLOSED: u32 = 1;
const KEPT: u32 = 2;

/// A device whose changes can be held back.
pub struct Gate {
    inner: Arc<dyn BlockDevice>,
    word: AtomicU32,
    /// Number of changes at the device below, by shard.
    changes: [CachePadded<AtomicUsize>; SHARDS],
    waiting: Mutex<Waiting>,
    changed: Condvar,
    moments: RwLock<Vec<Arc<Moment>>>,
}

#[derive(Default)]
struct Waiting {
    holders: usize,
    started: Vec<AsyncRequest>,
}

/// Holds changes back until it is dropped.
pub struct Held(Arc<Gate>);

/// Why a change cannot begin.
enum Obstacle {
    /// Changes are held back.
    Closed,
    /// A unit of the range is not saved.
    Unsaved(Arc<Moment>, Range<u64>),
}

impl Gate {
    /// Makes an open gate before `inner`.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Self {
        let changes = std::array::from_fn(|_| CachePadded::new(AtomicUsize::new(0)));
        let (waiting, changed) = (Mutex::default(), Condvar::new());
        let moments = RwLock::default();
        Self { inner, word: AtomicU32::new(0), changes, waiting, changed, moments }
    }

    /// Returns the device below. Requests to it bypass the gate.
    pub fn below(&self) -> &Arc<dyn BlockDevice> {
        &self.inner
    }

    /// Holds changes back from now on, and waits at most `timeout` for the running ones to end.
    /// Returns `None` if some have not ended; changes go on then.
    #[must_use]
    pub fn hold(self: &Arc<Self>, timeout: Duration) -> Option<Held> {
        let until = Instant::now() + timeout;
        let mut waiting = self.waiting.lock();
        waiting.holders += 1;
        self.word.fetch_or(CLOSED, Ordering::SeqCst);
        let mut is_late = false;
        while !is_late && self.changes.iter().any(|shard| shard.load(Ordering::SeqCst) > 0) {
            is_late = self.changed.wait_until(&mut waiting, until).timed_out();
        }
        drop(waiting);
        let held = Held(Arc::clone(self));
        (!is_late).then_some(held)
    }

    /// Reports a claimed range of `moment` as saved, and starts the changes that may run now.
    pub fn saved(self: &Arc<Self>, moment: &Moment, range: &Range<u64>) {
        self.start_all(moment.saved(range));
    }

    /// Ends the copy of `moment`, complete or not, and starts the changes that it held back.
    pub fn end(self: &Arc<Self>, moment: &Arc<Moment>) {
        let mut moments = self.moments.write();
        moments.retain(|it| !Arc::ptr_eq(it, moment));
        if moments.is_empty() {
            self.word.fetch_and(!KEPT, Ordering::SeqCst);
        }
        drop(moments);
        self.start_all(moment.end());
    }

    fn start_all(self: &Arc<Self>, requests: Vec<AsyncRequest>) {
        for request in requests {
            Arc::clone(self).start(request);
        }
    }

    /// Begins a change of `ranges`, unless it has to wait.
    fn enter(&self, shard: usize, ranges: &[Range<u64>]) -> std::result::Result<(), Obstacle> {
        self.changes[shard].fetch_add(1, Ordering::SeqCst);
        let word = self.word.load(Ordering::SeqCst);
        if word == 0 {
            return Ok(());
        }
        let obstacle =
            if word & CLOSED != 0 { Some(Obstacle::Closed) } else { self.unsaved(ranges) };
        obstacle.map_or(Ok(()), |obstacle| {
            self.leave(shard);
            Err(obstacle)
        })
    }

    fn unsaved(&self, ranges: &[Range<u64>]) -> Option<Obstacle> {
        self.moments.read().iter().find_map(|moment| {
            let range = ranges.iter().find(|range| moment.holds_back(range))?;
            Some(Obstacle::Unsaved(Arc::clone(moment), range.clone()))
        })
    }

    /// Ends a change, and wakes waiting holders.
    fn leave(&self, shard: usize) {
        self.changes[shard].fetch_sub(1, Ordering::SeqCst);
        if self.word.load(Ordering::SeqCst) & CLOSED != 0 {
            // Once the lock was free, a holder waits already or has not yet looked at the shards.
            drop(self.waiting.lock());
            self.changed.notify_all();
        }
    }

    /// Runs `change` of `ranges` as soon as nothing holds it back.
    fn change<R>(&self, shard: usize, ranges: &[Range<u64>], change: impl FnOnce() -> R) -> R {
        loop {
            match self.enter(shard, ranges) {
                Ok(()) => break,
                Err(Obstacle::Unsaved(moment, range)) => moment.wait_for(&range),
                Err(Obstacle::Closed) => {
                    let _waiting = waits::begin("a change", "the instant of a copy");
                    let mut waiting = self.waiting.lock();
                    while waiting.holders > 0 {
                        self.changed.wait(&mut waiting);
                    }
                }
            }
        }
        let _leaves = Leaves(self, shard);
        change()
    }

    /// Starts a change that has entered; its end leaves the gate.
    fn start_entered(self: &Arc<Self>, request: AsyncRequest, shard: usize) {
        let gate = Arc::clone(self);
        let below = request.forward(move |request, result| {
            gate.leave(shard);
            request.complete(result);
        });
        Arc::clone(&self.inner).start(below);
    }
}

/// Ends a change when dropped, even by a panic.
struct Leaves<'a>(&'a Gate, usize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

impl Held {
    /// Keeps the present content as `moment`: from now on a change waits until the old content of
    /// its range is saved.
    pub fn keep(&self, moment: Arc<Moment>) {
        let mut moments = self.0.moments.write();
        moments.push(moment);
        self.0.word.fetch_or(KEPT, Ordering::SeqCst);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let gate = &self.0;
        let mut waiting = gate.waiting.lock();
        waiting.holders -= 1;
        if waiting.holders > 0 {
            return;
        }
        gate.word.fetch_and(!CLOSED, Ordering::SeqCst);
        let started = std::mem::take(&mut waiting.started);
        drop(waiting);
        gate.changed.notify_all();
        gate.start_all(started);
    }
}

/// Returns the bytes that `operation` changes, none for a flush; `None` if it changes nothing.
fn change_of(operation: &Operation<'_>) -> Option<Range<u64>> {
    match Op::of(operation) {
        Op::Read | Op::Status => None,
        Op::Flush => Some(0..0),
        Op::Write | Op::Discard | Op::WriteZeroes => {
            let (offset, len) = operation.range();
            Some(offset..offset.saturating_add(len))
        }
    }
}

fn shard_of(context: Context) -> usize {
    context.queue as usize % SHARDS
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match change_of(operation) {
            None => self.inner.run(operation),
            Some(range) => self.change(0, &[range], || self.inner.run(operation)),
        }
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let ranges: Vec<_> =
            batch.iter().filter_map(|request| change_of(request.operation())).collect();
        if ranges.is_empty() {
            self.inner.submit(batch);
        } else {
            self.change(0, &ranges, || self.inner.submit(batch));
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let Some(range) = change_of(operation) else {
            return self.inner.attempt(operation, context);
        };
        let shard = shard_of(context);
        if self.enter(shard, &[range]).is_err() {
            return Attempt::WouldBlock;
        }
        let _leaves = Leaves(self, shard);
        self.inner.attempt(operation, context)
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        let Some(range) = change_of(&request.operation()) else {
            return Arc::clone(&self.inner).start(request);
        };
        let shard = shard_of(request.context());
        let ranges = [range];
        loop {
            match self.enter(shard, &ranges) {
                Ok(()) => return self.start_entered(request, shard),
                Err(Obstacle::Closed) => {
                    let mut waiting = self.waiting.lock();
                    if waiting.holders > 0 {
                        return waiting.started.push(request);
                    }
                }
                Err(Obstacle::Unsaved(moment, range)) => {
                    let Some(ready) = moment.park(&range, request) else { return };
                    request = ready;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::memory::MemoryDevice;
    use crate::device::{BlockDeviceExt, IoBuffer, OwnedOperation, WriteFlags};

    const PLAIN: WriteFlags = WriteFlags { fua: false };
    const LONG: Duration = Duration::from_secs(60);

    fn gate() -> Arc<Gate> {
        Arc::new(Gate::new(Arc::new(MemoryDevice::new(4096, 2048).unwrap())))
    }

    fn block(gate: &Gate) -> u8 {
        let mut block = [0; 4096];
        gate.read(0, &mut block).unwrap();
        block[0]
    }

    #[test]
    fn an_open_gate_conforms() {
        let device: Arc<dyn BlockDevice> = gate();
        let promises = Promises { whole_blocks: true, ..Promises::default() };
        conformance::check(&*device, promises);
        conformance::check_started(&device, promises);
        conformance::check_work_is_elsewhere(&device);
    }

    #[test]
    fn changes_wait_on_every_path_and_reads_pass() {
        let gate = gate();
        let held = gate.hold(LONG).unwrap();
        let mut write = Operation::Write { offset: 0, data: &[1; 4096], flags: PLAIN };
        assert!(gate.attempt(&mut write, Context::default()).done().is_none());
        let (ended, ends) = channel();
        let mut buffer = IoBuffer::new(4096);
        buffer.data_mut().fill(2);
        let operation = OwnedOperation::Write { offset: 0, buffer, flags: PLAIN };
        let tell = ended.clone();
        let tell = move |_, result: Result<()>| tell.send(result.is_ok()).unwrap();
        Arc::clone(&gate).start(AsyncRequest::new(operation, Context::default(), tell));
        std::thread::scope(|scope| {
            let writes = || {
                gate.write(4096, &[3; 4096], PLAIN).unwrap();
                ended.send(true).unwrap();
            };
            scope.spawn(writes);
            assert!(ends.recv_timeout(Duration::from_millis(50)).is_err(), "a change passed");
            assert_eq!(block(&gate), 0);
            let second = gate.hold(LONG).unwrap();
            drop(held);
            assert!(ends.recv_timeout(Duration::from_millis(50)).is_err(), "a change passed");
            drop(second);
            assert!(ends.recv().unwrap() && ends.recv().unwrap());
        });
        assert_eq!(block(&gate), 2);
    }

    /// While changes are held back, the content does not change, though four threads write.
    #[test]
    fn what_is_held_stands_still() {
        let gate = gate();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (gate, done) = (&gate, &done);
                scope.spawn(move || {
                    let context = Context { queue: u32::try_from(thread).unwrap(), class: 0 };
                    let mut number = 0_u8;
                    while !done.load(Ordering::Relaxed) {
                        number = number.wrapping_add(1);
                        let data = [number; 4096];
                        let mut write =
                            Operation::Write { offset: thread * 4096, data: &data, flags: PLAIN };
                        if gate.attempt(&mut write, context).done().is_none() {
                            gate.write(thread * 4096, &data, PLAIN).unwrap();
                        }
                    }
                });
            }
            let all = || {
                let mut blocks = vec![0; 4 * 4096];
                gate.read(0, &mut blocks).unwrap();
                blocks
            };
            for _ in 0..200 {
                let held = gate.hold(LONG).unwrap();
                let first = all();
                std::thread::yield_now();
                assert_eq!(first, all());
                drop(held);
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    const BLOCK: u64 = 4096;
    /// 32 units.
    const BLOCKS: u64 = 512;

    fn content(gate: &Gate) -> Vec<u8> {
        let mut all = vec![0; usize::try_from(BLOCKS * BLOCK).unwrap()];
        gate.below().read(0, &mut all).unwrap();
        all
    }

    /// Returns a number below `limit`, the next one of `seed`.
    fn random(seed: &mut u64, limit: u64) -> u64 {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % limit
    }

    /// Changes random ranges by every path, until `done`.
    fn change_at_random(gate: &Arc<Gate>, mut seed: u64, done: &AtomicBool) {
        let context = Context { queue: u32::try_from(seed).unwrap(), class: 0 };
        let (tell, ends) = channel();
        while !done.load(Ordering::Relaxed) {
            let first = random(&mut seed, BLOCKS);
            let (blocks, byte) = (1 + random(&mut seed, 50), random(&mut seed, 256));
            let (offset, len) = (first * BLOCK, blocks.min(BLOCKS - first) * BLOCK);
            let mut buffer = IoBuffer::new(usize::try_from(len).unwrap());
            buffer.data_mut().fill(u8::try_from(byte).unwrap());
            match random(&mut seed, 4) {
                0 => gate.discard(offset, len).unwrap(),
                1 => gate.write(offset, buffer.data(), PLAIN).unwrap(),
                2 => {
                    let data = buffer.data();
                    let mut write = Operation::Write { offset, data, flags: PLAIN };
                    drop(gate.attempt(&mut write, context).done());
                }
                _ => {
                    let tell = tell.clone();
                    let tell = move |_, result: Result<()>| tell.send(result).unwrap();
                    let operation = OwnedOperation::Write { offset, buffer, flags: PLAIN };
                    Arc::clone(gate).start(AsyncRequest::new(operation, context, tell));
                    ends.recv().unwrap().unwrap();
                }
            }
        }
    }

    /// Saves ranges of `moment` to `copy`, at most `most` of them.
    fn save(
        gate: &Arc<Gate>,
        moment: &Moment,
        which: super::super::moment::Claim,
        most: u64,
        copy: &Mutex<Vec<u8>>,
    ) {
        for _ in 0..most {
            let Some(range) = moment.claim(which, 128 << 10) else { return };
            let mut part = vec![0; usize::try_from(range.end - range.start).unwrap()];
            gate.below().read(range.start, &mut part).unwrap();
            gate.saved(moment, &range);
            let at = usize::try_from(range.start).unwrap();
            copy.lock()[at..at + part.len()].copy_from_slice(&part);
        }
    }

    /// Copies have the content at the time when changes were held back, though changes of all kinds
    /// go on and several moments are kept at once. A copy that ends early stops no change.
    #[test]
    fn a_moment_is_copied_as_it_was_while_changes_go_on() {
        use super::super::moment::Claim;
        let memory = MemoryDevice::new(4096, BLOCKS).unwrap();
        let gate = Arc::new(Gate::new(Arc::new(memory)));
        let done = AtomicBool::new(false);
        let copy = |mut seed: u64| {
            for _ in 0..20 {
                let moment = Arc::new(Moment::new(BLOCKS * BLOCK));
                let held = gate.hold(LONG).unwrap();
                let expected = content(&gate);
                held.keep(Arc::clone(&moment));
                drop(held);
                let found = Mutex::new(vec![0; expected.len()]);
                let most = if random(&mut seed, 3) == 0 { random(&mut seed, 20) } else { u64::MAX };
                std::thread::scope(|scope| {
                    scope.spawn(|| save(&gate, &moment, Claim::Wanted, u64::MAX, &found));
                    save(&gate, &moment, Claim::Any, most, &found);
                    if most < u64::MAX {
                        gate.end(&moment);
                    }
                });
                gate.end(&moment);
                assert!(!moment.is_whole() || *found.lock() == expected);
                assert!(moment.is_whole() || most < u64::MAX);
                // A thread that waited is listed until it runs again.
                while moment.longest_wait().is_some() {
                    std::thread::yield_now();
                }
            }
        };
        std::thread::scope(|scope| {
            let changers: Vec<_> = (1..4_u64)
                .map(|seed| {
                    let (gate, done) = (&gate, &done);
                    scope.spawn(move || change_at_random(gate, seed, done))
                })
                .collect();
            let other = scope.spawn(|| copy(2));
            copy(1);
            other.join().unwrap();
            done.store(true, Ordering::Relaxed);
            for changer in changers {
                changer.join().unwrap();
            }
        });
        assert_eq!(gate.word.load(Ordering::SeqCst), 0);
    }

    /// Without a copying thread, the wait is seen, and ends with the moment.
    #[test]
    fn a_change_that_waits_for_a_copy_is_seen_and_released() {
        let gate = gate();
        let moment = Arc::new(Moment::new(2048 * BLOCK));
        let held = gate.hold(LONG).unwrap();
        held.keep(Arc::clone(&moment));
        drop(held);
        gate.flush().unwrap();
        std::thread::scope(|scope| {
            let write = scope.spawn(|| gate.write(0, &[1; 4096], PLAIN));
            while moment.longest_wait().is_none() {
                std::thread::yield_now();
            }
            assert_eq!(block(&gate), 0);
            gate.end(&moment);
            write.join().unwrap().unwrap();
        });
        assert_eq!((block(&gate), moment.is_whole()), (1, false));
    }

    /// A change that does not end blocks other changes no longer than the holder's timeout.
    #[test]
    fn changes_go_on_where_one_of_them_does_not_end() {
        use crate::device::fault::{Effect, Fault, Rule, When};
        let fault = Arc::new(Fault::new(Arc::new(MemoryDevice::new(4096, 8).unwrap()), 1));
        fault.add(Rule::new(&[Op::Write], When::Nth(1), Effect::Hang));
        let gate = Arc::new(Gate::new(Arc::clone(&fault) as Arc<dyn BlockDevice>));
        std::thread::scope(|scope| {
            let hangs = scope.spawn(|| gate.write(0, &[1; 4096], PLAIN));
            fault.wait_until_hung(1);
            assert!(gate.hold(Duration::from_millis(1)).is_none());
            gate.write(4096, &[2; 4096], PLAIN).unwrap();
            fault.release();
            hangs.join().unwrap().unwrap();
        });
        assert!(gate.hold(LONG).is_some());
    }
}
