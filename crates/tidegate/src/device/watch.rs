//! A layer that reports when requests to the device below begin to fail, still fail, and work
//! again: one line each time, not one for each request.

#![expect(
    clippy::disallowed_methods,
    reason = "how long failures last decides what is said, no more"
)]

use std::sync::Arc;
use std::time::Instant;

use super::spell::{Said, Spell};
use super::waits;
use super::{
    AsyncRequest, Attempt, BlockDevice, Context, DeviceError, DeviceErrorKind, Geometry, Op,
    Operation, Request, Result,
};

/// Receives a line for the operator, without a line end. A request may wait for the call, so it
/// must not block.
pub type Notices = Arc<dyn Fn(&str) + Send + Sync>;

/// A layer over a device that reports failures.
pub struct Watch {
    inner: Arc<dyn BlockDevice>,
    name: &'static str,
    notices: Notices,
    reads: Spell,
    writes: Spell,
    flushes: Spell,
}

impl Watch {
    /// Wraps `inner` and reports its failures to `notices`, under the name `name`.
    pub fn new(inner: Arc<dyn BlockDevice>, name: &'static str, notices: Notices) -> Self {
        let [reads, writes, flushes] = Default::default();
        Self { inner, name, notices, reads, writes, flushes }
    }

    /// Reports the end of a request if a report is due.
    fn note(&self, op: Op, result: &Result<()>) {
        let (spell, requests) = match op {
            Op::Read | Op::Status => (&self.reads, "reads"),
            Op::Write | Op::Discard | Op::WriteZeroes => (&self.writes, "writes"),
            Op::Flush => (&self.flushes, "flushes"),
        };
        let name = self.name;
        match result {
            Ok(()) if !spell.is_on() => {}
            Ok(()) => {
                if let Some(ended) = spell.succeeded(Instant::now()) {
                    (self.notices)(&format!("{name}: {requests} work again, after {ended}"));
                }
            }
            Err(error) if is_of_the_device(error) => match spell.failed(Instant::now()) {
                Some(Said::Begins) => {
                    (self.notices)(&format!("{name}: {requests} fail: {}", error.with_causes()));
                }
                Some(Said::GoesOn(so_far)) => {
                    let last = error.with_causes();
                    (self.notices)(&format!("{name}: {requests} still fail, {so_far}: {last}"));
                }
                None => {}
            },
            Err(_) => {}
        }
    }
}

/// Returns the name of the request in the list of waits.
fn client_of(op: Op) -> &'static str {
    match op {
        Op::Read => "a read of a client",
        Op::Write => "a write of a client",
        Op::Flush => "a flush of a client",
        Op::Discard | Op::WriteZeroes | Op::Status => "a request of a client",
    }
}

/// Returns whether `error` is a failure of the device, not of an invalid request.
fn is_of_the_device(error: &DeviceError) -> bool {
    use DeviceErrorKind::{Corrupt, Io, NoSpace};
    matches!(error.kind(), Io | NoSpace | Corrupt)
}

impl BlockDevice for Watch {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let result = self.inner.run(operation);
        self.note(Op::of(operation), &result);
        result
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        self.inner.submit(batch);
        for request in batch {
            if let Some(result) = request.result() {
                self.note(Op::of(request.operation()), result);
            }
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let attempt = self.inner.attempt(operation, context);
        if let Attempt::Done(result) = &attempt {
            self.note(Op::of(operation), result);
        }
        attempt
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        let op = Op::of(&request.operation());
        let watch = Arc::clone(&self);
        let waiting = waits::begin(client_of(op), "its answer");
        let below = request.forward(move |request, result| {
            drop(waiting);
            watch.note(op, &result);
            request.complete(result);
        });
        Arc::clone(&self.inner).start(below);
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::fault::{Effect, Fault, Rule, When};
    use crate::device::memory::MemoryDevice;
    use crate::device::{BlockDeviceExt, WriteFlags};

    fn memory() -> Arc<MemoryDevice> {
        Arc::new(MemoryDevice::new(4096, 2048).unwrap())
    }

    fn said() -> (Notices, Arc<Mutex<Vec<String>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        (Arc::new(move |line: &str| sink.lock().push(line.to_owned())), lines)
    }

    #[test]
    fn it_conforms_and_says_nothing_of_requests_that_are_wrong() {
        let (notices, lines) = said();
        let device: Arc<dyn BlockDevice> = Arc::new(Watch::new(memory(), "disk", notices));
        let promises = Promises { whole_blocks: true, ..Promises::default() };
        conformance::check(&*device, promises);
        conformance::check_started(&device, promises);
        conformance::check_work_is_elsewhere(&device);
        assert!(lines.lock().is_empty(), "{:?}", lines.lock());
    }

    #[test]
    fn failures_are_told_when_they_begin_on_every_path() {
        let (notices, lines) = said();
        let fault = Arc::new(Fault::new(memory(), 1));
        fault.add(Rule::new(&[], When::Always, Effect::Fail(DeviceErrorKind::NoSpace)));
        let device: Arc<dyn BlockDevice> = Arc::new(Watch::new(fault, "backing", notices));
        for _ in 0..3 {
            device.write(0, &[1; 4096], WriteFlags::default()).unwrap_err();
        }
        device.flush().unwrap_err();
        let mut block = [0; 4096];
        let mut batch = [Request::new(Operation::Read { offset: 0, buf: &mut block })];
        device.submit(&mut batch);
        let lines = lines.lock();
        let begins: Vec<_> = lines.iter().map(|line| line.split(": injected").next()).collect();
        assert_eq!(
            begins,
            [
                Some("backing: writes fail"),
                Some("backing: flushes fail"),
                Some("backing: reads fail")
            ]
        );
    }
}
