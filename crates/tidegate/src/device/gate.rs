//! A layer that can hold changes back while the device below is copied, and lets reads pass.
//!
//! Invariants:
//! 1. While a [`Held`] lives, no change is at the device below: not one that was begun before, nor
//!    one that came since.
//! 2. A change that came meanwhile runs when the last [`Held`] is gone; none is lost or refused.
//! 3. Changes that nobody holds back share no cache line, but for that of a flag that is read.
//!
//! A change enters by adding itself to its shard and then looking at the flag; a holder sets the
//! flag and then waits for every shard to be empty. Of the two, at least one sees the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;
use parking_lot::{Condvar, Mutex};

use super::{AsyncRequest, Attempt, BlockDevice, Context, Op, Operation, Request, Result};

const SHARDS: usize = 16;

/// A device whose changes can be held back.
pub struct Gate {
    inner: Arc<dyn BlockDevice>,
    is_closed: AtomicBool,
    /// Changes that are at the device below.
    changes: [CachePadded<AtomicUsize>; SHARDS],
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    holders: usize,
    started: Vec<AsyncRequest>,
}

/// Holds changes back until it is dropped.
pub struct Held(Arc<Gate>);

impl Gate {
    /// An open gate before `inner`.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Self {
        let changes = std::array::from_fn(|_| CachePadded::new(AtomicUsize::new(0)));
        let (waiting, changed) = (Mutex::default(), Condvar::new());
        Self { inner, is_closed: AtomicBool::new(false), changes, waiting, changed }
    }

    /// The device below: what is asked of it passes the gate by.
    pub fn below(&self) -> &Arc<dyn BlockDevice> {
        &self.inner
    }

    /// Holds changes back from now on, and waits until those that were begun have ended.
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> Held {
        let mut waiting = self.waiting.lock();
        waiting.holders += 1;
        self.is_closed.store(true, Ordering::SeqCst);
        while self.changes.iter().any(|shard| shard.load(Ordering::SeqCst) > 0) {
            self.changed.wait(&mut waiting);
        }
        drop(waiting);
        Held(Arc::clone(self))
    }

    /// Begins a change; false if it must wait.
    fn enter(&self, shard: usize) -> bool {
        self.changes[shard].fetch_add(1, Ordering::SeqCst);
        if !self.is_closed.load(Ordering::SeqCst) {
            return true;
        }
        self.leave(shard);
        false
    }

    /// A change has ended.
    fn leave(&self, shard: usize) {
        self.changes[shard].fetch_sub(1, Ordering::SeqCst);
        if self.is_closed.load(Ordering::SeqCst) {
            // A holder that saw the change waits by now, or has not yet looked.
            drop(self.waiting.lock());
            self.changed.notify_all();
        }
    }

    /// Runs `change` as soon as none is held back.
    fn change<R>(&self, shard: usize, change: impl FnOnce() -> R) -> R {
        while !self.enter(shard) {
            let mut waiting = self.waiting.lock();
            while waiting.holders > 0 {
                self.changed.wait(&mut waiting);
            }
        }
        let _leaves = Leaves(self, shard);
        change()
    }

    fn run(&self, mut operation: Operation<'_>) -> Result<()> {
        if !is_change(Op::of(&operation)) {
            return operation.run_on(&*self.inner);
        }
        self.change(0, || operation.run_on(&*self.inner))
    }

    /// Starts a change that has entered.
    fn start_entered(self: &Arc<Self>, request: AsyncRequest, shard: usize) {
        let gate = Arc::clone(self);
        let below = request.forward(move |request, result| {
            gate.leave(shard);
            request.complete(result);
        });
        Arc::clone(&self.inner).start(below);
    }
}

/// Ends a change, also where it panics.
struct Leaves<'a>(&'a Gate, usize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
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
        gate.is_closed.store(false, Ordering::SeqCst);
        let started = std::mem::take(&mut waiting.started);
        drop(waiting);
        gate.changed.notify_all();
        for request in started {
            Arc::clone(gate).start(request);
        }
    }
}

fn is_change(op: Op) -> bool {
    match op {
        Op::Read | Op::Status => false,
        Op::Write | Op::Flush | Op::Discard | Op::WriteZeroes => true,
    }
}

fn shard_of(context: Context) -> usize {
    context.queue as usize % SHARDS
}

impl BlockDevice for Gate {
    operations_through_run!(over inner);

    fn submit(&self, batch: &mut [Request<'_>]) {
        if batch.iter().any(|request| is_change(Op::of(request.operation()))) {
            self.change(0, || self.inner.submit(batch));
        } else {
            self.inner.submit(batch);
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        if !is_change(Op::of(operation)) {
            return self.inner.attempt(operation, context);
        }
        let shard = shard_of(context);
        if !self.enter(shard) {
            return Attempt::WouldBlock;
        }
        let _leaves = Leaves(self, shard);
        self.inner.attempt(operation, context)
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        if !is_change(Op::of(&request.operation())) {
            return Arc::clone(&self.inner).start(request);
        }
        let shard = shard_of(request.context());
        loop {
            if self.enter(shard) {
                return self.start_entered(request, shard);
            }
            let mut waiting = self.waiting.lock();
            if waiting.holders > 0 {
                return waiting.started.push(request);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::memory::MemoryDevice;
    use crate::device::{IoBuffer, OwnedOperation, WriteFlags};

    const PLAIN: WriteFlags = WriteFlags { fua: false };

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
        let held = gate.hold();
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
            let second = gate.hold();
            drop(held);
            assert!(ends.recv_timeout(Duration::from_millis(50)).is_err(), "a change passed");
            drop(second);
            assert!(ends.recv().unwrap() && ends.recv().unwrap());
        });
        assert_eq!(block(&gate), 2);
    }

    /// Whenever changes are held back, pairs of blocks that are written one after the other are
    /// found as one thread at most can have left them, and do not change.
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
                let held = gate.hold();
                let first = all();
                std::thread::yield_now();
                assert_eq!(first, all());
                drop(held);
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
