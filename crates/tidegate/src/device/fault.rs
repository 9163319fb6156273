//! A layer that injects failures, by script or by chance, as broken disks and networks would.
//!
//! [`Rule`]s say which requests fail, when and how; for each request the first rule that fires
//! decides. Chance comes from a seed, so that a run of one thread repeats exactly. Every failure
//! keeps invariant 2 of [`device`](super): a block is old or new, never torn.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{
    AsyncRequest, BlockDevice, DeviceError, DeviceErrorKind, Geometry, Op, Operation, Result,
};

/// Which requests fail, when, and how.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Kinds of requests under the rule; all if empty.
    pub ops: Vec<Op>,
    /// Bytes that a request must touch; a flush touches all.
    pub range: Range<u64>,
    /// Which of the matching requests.
    pub when: When,
    /// The effect on them.
    pub effect: Effect,
}

impl Rule {
    /// Makes a rule about requests of the given kinds (all if empty) anywhere on the device.
    pub fn new(ops: &[Op], when: When, effect: Effect) -> Self {
        Self { ops: ops.to_vec(), range: 0..u64::MAX, when, effect }
    }

    fn is_about(&self, op: Op, offset: u64, len: u64) -> bool {
        let touches =
            offset < self.range.end && self.range.start < offset.saturating_add(len.max(1));
        (self.ops.is_empty() || self.ops.contains(&op)) && (op == Op::Flush || touches)
    }
}

/// Which of the requests under a rule fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Each.
    Always,
    /// The n-th, from 1, and no other.
    Nth(u64),
    /// The n-th, from 1, and each after it.
    From(u64),
    /// Each with this chance, in millionths.
    Chance(u32),
}

/// The effect of a rule on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It fails and changes nothing.
    Fail(DeviceErrorKind),
    /// The first blocks are done, then the request fails.
    Short {
        /// Number of blocks that are done; all if the request has fewer.
        blocks: u64,
        /// The error.
        kind: DeviceErrorKind,
    },
    /// It waits for [`Fault::release`], then runs normally.
    Hang,
    /// It fails, and so does every later request: the device is gone.
    Disappear,
}

/// The decision about one request.
enum Fate {
    Runs,
    Fails(DeviceError),
    Hangs,
    IsShort { blocks: u64, error: DeviceError },
}

#[derive(Default)]
struct State {
    /// The rules, each with the number of requests that matched it.
    rules: Vec<(Rule, u64)>,
    random: u64,
    gone: bool,
    injected: u64,
    hung: usize,
    /// Started requests that hang.
    held: Vec<AsyncRequest>,
    releases: u64,
}

/// A layer over a device that injects failures.
pub struct Fault {
    inner: Arc<dyn BlockDevice>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Fault {
    /// Makes a layer without rules; `seed` decides all chances.
    pub fn new(inner: Arc<dyn BlockDevice>, seed: u64) -> Self {
        let state = State { random: seed, ..State::default() };
        Self { inner, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds a rule after the existing ones; it counts requests from now on.
    pub fn add(&self, rule: Rule) {
        self.state.lock().rules.push((rule, 0));
    }

    /// Removes all rules, and ends the disappearance of the device.
    pub fn heal(&self) {
        let mut state = self.state.lock();
        state.rules.clear();
        state.gone = false;
    }

    /// Resumes every request that hangs now.
    pub fn release(&self) {
        let mut state = self.state.lock();
        state.releases += 1;
        let held = std::mem::take(&mut state.held);
        state.hung -= held.len();
        drop(state);
        self.changed.notify_all();
        for request in held {
            request.start_on(&self.inner);
        }
    }

    /// Waits until `count` requests hang.
    pub fn wait_until_hung(&self, count: usize) {
        let mut state = self.state.lock();
        while state.hung < count {
            self.changed.wait(&mut state);
        }
    }

    /// Counts the requests that a rule has hit so far, or that came after the device was gone.
    pub fn injected(&self) -> u64 {
        self.state.lock().injected
    }

    /// Decides about a request.
    fn decide(&self, operation: &Operation<'_>) -> Fate {
        let (op, (offset, len)) = (Op::of(operation), operation.range());
        match self.state.lock().decide(op, offset, len) {
            None => Fate::Runs,
            Some(Effect::Hang) => Fate::Hangs,
            Some(Effect::Fail(kind)) => Fate::Fails(injected(kind, op, offset, len)),
            Some(Effect::Disappear) => Fate::Fails(gone(op, offset, len)),
            Some(Effect::Short { blocks, kind }) => {
                Fate::IsShort { blocks, error: injected(kind, op, offset, len) }
            }
        }
    }

    /// Runs the first blocks of an operation, then fails it with `error`.
    fn run_short(
        &self,
        operation: &mut Operation<'_>,
        blocks: u64,
        error: DeviceError,
    ) -> Result<()> {
        let geometry = self.inner.geometry();
        geometry.check_operation(operation)?;
        let mut first = operation.reborrow();
        shorten(&mut first, blocks.saturating_mul(u64::from(geometry.block_bytes)));
        self.inner.run(&mut first)?;
        Err(error)
    }

    fn hang(&self, request: AsyncRequest) {
        let mut state = self.state.lock();
        state.held.push(request);
        state.hung += 1;
        self.changed.notify_all();
    }

    fn wait_for_release(&self) {
        let mut state = self.state.lock();
        let before = state.releases;
        state.hung += 1;
        self.changed.notify_all();
        while state.releases == before {
            self.changed.wait(&mut state);
        }
        state.hung -= 1;
    }
}

impl State {
    fn decide(&mut self, op: Op, offset: u64, len: u64) -> Option<Effect> {
        let mut effect = self.gone.then_some(Effect::Disappear);
        for (rule, seen) in &mut self.rules {
            if !rule.is_about(op, offset, len) {
                continue;
            }
            *seen += 1;
            let fires = match rule.when {
                When::Always => true,
                When::Nth(nth) => *seen == nth,
                When::From(nth) => *seen >= nth,
                When::Chance(per_million) => {
                    next_random(&mut self.random) % 1_000_000 < u64::from(per_million)
                }
            };
            if fires && effect.is_none() {
                effect = Some(rule.effect);
            }
        }
        self.injected += u64::from(effect.is_some());
        self.gone |= effect == Some(Effect::Disappear);
        effect
    }
}

/// Steps `SplitMix64` (Steele, Lea, Flood 2014): small, seeded, good enough to choose failures.
fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn injected(kind: DeviceErrorKind, op: Op, offset: u64, len: u64) -> DeviceError {
    let op = op.name();
    DeviceError::new(kind, format!("injected fault: {op} of {len} bytes at offset {offset}"))
}

fn gone(op: Op, offset: u64, len: u64) -> DeviceError {
    let (op, why) = (op.name(), "injected fault: the device is gone");
    let context = format!("{why}, {op} of {len} bytes at offset {offset}");
    DeviceError::new(DeviceErrorKind::Io, context)
}

/// Shortens an operation to at most `most` bytes.
fn shorten(operation: &mut Operation<'_>, most: u64) {
    let part = |len: usize| usize::try_from(most).unwrap_or(usize::MAX).min(len);
    match operation {
        Operation::Read { buf, .. } => {
            let len = part(buf.len());
            *buf = &mut std::mem::take(buf)[..len];
        }
        Operation::Write { data, .. } => *data = &data[..part(data.len())],
        Operation::Flush => {}
        Operation::Discard { len, .. }
        | Operation::WriteZeroes { len, .. }
        | Operation::Status { len, .. } => *len = most.min(*len),
    }
}

impl BlockDevice for Fault {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match self.decide(operation) {
            Fate::Runs => self.inner.run(operation),
            Fate::Fails(error) => Err(error),
            Fate::Hangs => {
                self.wait_for_release();
                self.inner.run(operation)
            }
            Fate::IsShort { blocks, error } => self.run_short(operation, blocks, error),
        }
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        match self.decide(&request.operation()) {
            Fate::Runs => request.start_on(&self.inner),
            Fate::Fails(error) => request.complete(Err(error)),
            Fate::Hangs => self.hang(request),
            Fate::IsShort { blocks, error } => {
                super::pool::run(move || {
                    let ended = self.run_short(&mut request.operation(), blocks, error);
                    request.complete(ended);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::memory::MemoryDevice;
    use crate::device::{BlockDeviceExt, Context, IoBuffer, OwnedOperation, WriteFlags};

    const EIO: Effect = Effect::Fail(DeviceErrorKind::Io);

    fn fault(seed: u64) -> Fault {
        Fault::new(Arc::new(MemoryDevice::new(512, 2048).unwrap()), seed)
    }

    fn write(device: &Fault, offset: u64) -> Option<DeviceErrorKind> {
        let result = device.write(offset, &[1; 512], WriteFlags::default());
        result.err().map(|error| error.kind())
    }

    #[test]
    fn without_rules_it_conforms() {
        let device = Arc::new(fault(1));
        let promises = Promises { whole_blocks: true, ..Promises::default() };
        conformance::check(&*device, promises);
        conformance::check_started(&(Arc::clone(&device) as _), promises);
        assert_eq!(device.injected(), 0);
    }

    #[test]
    fn the_nth_write_fails_and_no_other() {
        let device = fault(1);
        device.add(Rule::new(&[Op::Write], When::Nth(3), Effect::Fail(DeviceErrorKind::NoSpace)));
        device.flush().unwrap();
        let kinds: Vec<_> = (0..5).map(|index| write(&device, index * 512)).collect();
        assert_eq!(kinds, [None, None, Some(DeviceErrorKind::NoSpace), None, None]);
        assert_eq!(device.injected(), 1);
    }

    #[test]
    fn a_range_fails_from_its_first_byte_to_its_last() {
        let device = fault(1);
        device.add(Rule { range: 1024..2048, ..Rule::new(&[], When::Always, EIO) });
        let failed: Vec<_> = (0..6).map(|index| write(&device, index * 512).is_some()).collect();
        assert_eq!(failed, [false, false, true, true, false, false]);
    }

    #[test]
    fn chance_is_decided_by_the_seed() {
        let run = |seed| {
            let device = fault(seed);
            device.add(Rule::new(&[Op::Write], When::Chance(300_000), EIO));
            (0..1000).map(|_| write(&device, 0).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
        let hits = run(7).into_iter().filter(|hit| *hit).count();
        assert!((200..400).contains(&hits), "{hits} of 1000 at 30 %");
    }

    #[test]
    fn a_short_write_does_its_first_blocks() {
        let device = fault(1);
        let effect = Effect::Short { blocks: 2, kind: DeviceErrorKind::NoSpace };
        device.add(Rule::new(&[Op::Write], When::Nth(1), effect));
        let error = device.write(512, &[9; 2048], WriteFlags::default()).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::NoSpace);
        let mut now = [1; 2560];
        device.read(0, &mut now).unwrap();
        assert_eq!(
            (&now[..512], &now[512..1536], &now[1536..]),
            (&[0; 512][..], &[9; 1024][..], &[0; 1024][..])
        );
    }

    #[test]
    fn what_disappeared_stays_away_until_healed() {
        let device = fault(1);
        device.add(Rule::new(&[Op::Flush], When::Nth(1), Effect::Disappear));
        assert_eq!(write(&device, 0), None);
        assert_eq!(device.flush().unwrap_err().kind(), DeviceErrorKind::Io);
        assert_eq!(write(&device, 0), Some(DeviceErrorKind::Io));
        assert_eq!(device.status(0, 512, 1).unwrap_err().kind(), DeviceErrorKind::Io);
        device.heal();
        assert_eq!(write(&device, 0), None);
    }

    #[test]
    fn a_hung_write_goes_on_when_released() {
        let device = fault(1);
        device.add(Rule::new(&[Op::Write], When::Nth(1), Effect::Hang));
        std::thread::scope(|scope| {
            let hung = scope.spawn(|| write(&device, 0));
            device.wait_until_hung(1);
            let mut now = [1; 512];
            device.read(0, &mut now).unwrap();
            assert_eq!(now, [0; 512], "a write that hangs has changed something");
            assert_eq!(write(&device, 512), None, "only one request hangs");
            device.release();
            assert_eq!(hung.join().unwrap(), None);
            device.read(0, &mut now).unwrap();
            assert_eq!(now, [1; 512]);
        });
    }

    /// Starts a write of one block at each of `offsets`; the results come in order of completion.
    fn start(device: &Arc<Fault>, offsets: impl Iterator<Item = u64>) -> Receiver<Result<()>> {
        let (told, results) = channel();
        for offset in offsets {
            let (buffer, flags) = (IoBuffer::new(512), WriteFlags::default());
            let write = OwnedOperation::Write { offset, buffer, flags };
            let told = told.clone();
            let completion = move |_, result| told.send(result).unwrap();
            let request = AsyncRequest::new(write, Context::default(), completion);
            Arc::clone(device).start(request);
        }
        results
    }

    #[test]
    fn a_device_that_disappears_completes_all_that_was_started() {
        let device = Arc::new(fault(1));
        device.add(Rule::new(&[Op::Write], When::Nth(10), Effect::Disappear));
        let results = start(&device, (0..300).map(|index| index * 512));
        let failed = results.iter().filter(Result::is_err).count();
        assert_eq!(failed, 291);
    }

    #[test]
    fn requests_that_hang_cost_no_thread_and_end_when_released_or_dropped() {
        let device = Arc::new(fault(1));
        device.add(Rule::new(&[], When::Always, Effect::Hang));
        let results = start(&device, (0..200).map(|index| index * 512));
        device.wait_until_hung(200);
        assert!(results.try_recv().is_err());
        device.release();
        assert_eq!(results.iter().flatten().count(), 200);
        let results = start(&device, (0..200).map(|index| index * 512));
        device.wait_until_hung(200);
        drop(device);
        assert_eq!(results.iter().filter(Result::is_err).count(), 200);
    }

    #[test]
    fn a_short_write_that_was_started_does_its_first_blocks() {
        let device = Arc::new(fault(1));
        let effect = Effect::Short { blocks: 0, kind: DeviceErrorKind::NoSpace };
        device.add(Rule::new(&[Op::Write], When::Nth(1), effect));
        let result = start(&device, [0].into_iter()).recv().unwrap();
        assert_eq!(result.unwrap_err().kind(), DeviceErrorKind::NoSpace);
    }
}
