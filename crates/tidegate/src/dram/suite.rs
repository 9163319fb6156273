//! Tests that every policy must pass, over a device that fails, stalls and forgets on command.
//!
//! A policy joins by a line in `tiers!` at the end.

#![expect(clippy::cast_possible_truncation, reason = "lbas and blocks of tests are few")]

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};

use parking_lot::{Condvar, Mutex};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::phases::Phase;
use super::{DramTier, Policy};
use crate::device::conformance::{self, Promises};
use crate::device::delay::{Delay, Delays};
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, BlockDeviceExt, Context, DeviceError, DeviceErrorKind,
    Geometry, IoBuffer, Operation, OwnedOperation, Result, WriteFlags, ZeroFlags,
};

pub(super) const BLOCK_BYTES: usize = 512;
const BLOCKS: u64 = 64;
/// Slots of a tier under test: fewer than blocks, so that it overruns.
pub(super) const SLOTS: u64 = 24;

/// Makes a tier of [`SLOTS`] slots over a device.
pub(super) type Factory = dyn Fn(Arc<dyn BlockDevice>) -> Arc<dyn DramTier>;

/// A device in memory. A block holds one number, its stamp, repeated; 0 at first.
pub(super) struct TestDevice {
    state: Mutex<State>,
    changed: Condvar,
    preferred_bytes: u32,
}

#[derive(Default)]
struct State {
    visible: HashMap<u64, u64>,
    durable: HashMap<u64, u64>,
    failing: HashSet<u64>,
    held: HashSet<u64>,
    /// Lbas whose writes wait because they are held.
    at_gate: HashSet<u64>,
    writes: u64,
}

impl TestDevice {
    pub(super) fn new(preferred_blocks: usize) -> Arc<Self> {
        let preferred_bytes = u32::try_from(preferred_blocks * BLOCK_BYTES).unwrap();
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), preferred_bytes })
    }

    /// Makes writes of `lbas` fail from now on, and all others succeed.
    pub(super) fn fail(&self, lbas: impl IntoIterator<Item = u64>) {
        self.state.lock().failing = lbas.into_iter().collect();
    }

    /// Makes writes of `lbas` wait from now on, and all others pass.
    pub(super) fn hold(&self, lbas: impl IntoIterator<Item = u64>) {
        self.state.lock().held = lbas.into_iter().collect();
        self.changed.notify_all();
    }

    /// Waits until a write of `lba` has arrived and is held.
    pub(super) fn await_held(&self, lba: u64) {
        let mut state = self.state.lock();
        while !state.at_gate.contains(&lba) {
            self.changed.wait(&mut state);
        }
    }

    /// Returns the content of `lba` after a power cut.
    pub(super) fn durable(&self, lba: u64) -> u64 {
        self.state.lock().durable.get(&lba).copied().unwrap_or(0)
    }

    /// Returns the number of write requests that reached the device.
    pub(super) fn writes(&self) -> u64 {
        self.state.lock().writes
    }

    fn pass_gate(&self, lbas: &[u64]) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.writes += 1;
        while lbas.iter().any(|lba| state.held.contains(lba)) {
            state.at_gate.extend(lbas);
            self.changed.notify_all();
            self.changed.wait(&mut state);
        }
        state.at_gate.retain(|lba| !lbas.contains(lba));
        state
    }

    fn store(&self, offset: u64, stamps: &[u64], fua: bool) -> Result<()> {
        let first = offset / BLOCK_BYTES as u64;
        let lbas: Vec<u64> = (first..).take(stamps.len()).collect();
        let mut state = self.pass_gate(&lbas);
        for (&lba, &stamp) in lbas.iter().zip(stamps) {
            if state.failing.contains(&lba) {
                let context = format!("block {lba} fails on command");
                return Err(DeviceError::new(DeviceErrorKind::NoSpace, context));
            }
            state.visible.insert(lba, stamp);
            if fua {
                state.durable.insert(lba, stamp);
            }
        }
        Ok(())
    }
}

impl TestDevice {
    fn zero(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.store(offset, &vec![0; usize::try_from(len).unwrap() / BLOCK_BYTES], fua)
    }
}

impl BlockDevice for TestDevice {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: BLOCK_BYTES as u32,
            blocks: BLOCKS,
            preferred_bytes: self.preferred_bytes,
            read_only: false,
            atomic_block: true,
            volatile_cache: true,
            fast_zero: true,
            keeps_data: true,
        }
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry().check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                let first = offset / BLOCK_BYTES as u64;
                let state = self.state.lock();
                for (lba, block) in (first..).zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
                    block.copy_from_slice(&block_of(state.visible.get(&lba).copied().unwrap_or(0)));
                }
                Ok(())
            }
            Operation::Write { offset, data, flags } => {
                let stamps: Vec<u64> = data.chunks_exact(BLOCK_BYTES).map(stamp_of).collect();
                self.store(offset, &stamps, flags.fua)
            }
            Operation::Flush => {
                let mut state = self.state.lock();
                let State { visible, durable, .. } = &mut *state;
                durable.clone_from(visible);
                Ok(())
            }
            Operation::Discard { offset, len } => self.zero(offset, len, false),
            Operation::WriteZeroes { offset, len, flags } => self.zero(offset, len, flags.fua),
            Operation::Status { .. } => {
                operation.report_data();
                Ok(())
            }
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

fn block_of(stamp: u64) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&stamp.to_le_bytes()));
    block
}

/// Returns the stamp of a block, which must not be torn.
fn stamp_of(block: &[u8]) -> u64 {
    let stamp = u64::from_le_bytes(block[..8].try_into().unwrap());
    assert_eq!(block, block_of(stamp), "torn block");
    stamp
}

pub(super) fn write(tier: &dyn DramTier, lba: u64, stamp: u64, fua: bool) -> Result<()> {
    tier.write(lba * BLOCK_BYTES as u64, &block_of(stamp), WriteFlags { fua })
}

pub(super) fn read(tier: &dyn DramTier, lba: u64) -> u64 {
    let mut block = [0; BLOCK_BYTES];
    tier.read(lba * BLOCK_BYTES as u64, &mut block).unwrap();
    stamp_of(&block)
}

/// One step of [`agrees_with_a_model`].
#[derive(Debug, Clone)]
enum Step {
    Write { lba: u64, blocks: u64, fua: bool },
    Zero { lba: u64, blocks: u64, discard: bool },
    Read { lba: u64 },
    Flush,
    Fail { lbas: Vec<u64> },
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BLOCKS).prop_flat_map(|lba| (Just(lba), 1..=(BLOCKS - lba).min(9)));
    prop_oneof![
        8 => (range(), proptest::bool::weighted(0.1))
            .prop_map(|((lba, blocks), fua)| Step::Write { lba, blocks, fua }),
        8 => (0..12_u64).prop_map(|lba| Step::Write { lba, blocks: 1, fua: false }),
        1 => (range(), any::<bool>())
            .prop_map(|((lba, blocks), discard)| Step::Zero { lba, blocks, discard }),
        4 => (0..BLOCKS).prop_map(|lba| Step::Read { lba }),
        2 => Just(Step::Flush),
        1 => proptest::collection::vec(0..BLOCKS, 0..6).prop_map(|lbas| Step::Fail { lbas }),
        1 => Just(Step::Fail { lbas: vec![] }),
    ]
}

/// The possible stamps of a block: one, or several after a failed write.
type Model = HashMap<u64, Vec<u64>>;

/// Checks P3, P4 and P5 for one thread beside background work: reads return the last acknowledged
/// write, and after a successful flush every block is durable.
pub(super) fn agrees_with_a_model(factory: &Factory, preferred_blocks: usize) {
    let mut runner = TestRunner::new(Config { cases: 60, ..Config::default() });
    let steps = proptest::collection::vec(step(), 1..120);
    runner
        .run(&steps, |steps| {
            let device = TestDevice::new(preferred_blocks);
            let tier = factory(device.clone());
            let mut model = Model::new();
            for (number, step) in steps.iter().enumerate() {
                take(step, number as u64 + 1, &*tier, &device, &mut model);
            }
            device.fail([]);
            // The first drain may still report earlier failures.
            let _ = tier.drain();
            tier.drain().unwrap();
            check_durable(&device, &model);
            Ok(())
        })
        .unwrap();
}

fn take(step: &Step, stamp: u64, tier: &dyn DramTier, device: &TestDevice, model: &mut Model) {
    let bytes = BLOCK_BYTES as u64;
    match step {
        &Step::Write { lba, blocks, fua } => {
            let data: Vec<u8> = (0..blocks).flat_map(|_| block_of(stamp)).collect();
            let result = tier.write(lba * bytes, &data, WriteFlags { fua });
            if fua && result.is_ok() {
                (lba..lba + blocks).for_each(|lba| assert_eq!(device.durable(lba), stamp));
            }
            note(model, lba..lba + blocks, stamp, result.is_ok());
        }
        &Step::Zero { lba, blocks, discard } => {
            let result = if discard {
                tier.discard(lba * bytes, blocks * bytes)
            } else {
                tier.write_zeroes(lba * bytes, blocks * bytes, ZeroFlags::default())
            };
            note(model, lba..lba + blocks, 0, result.is_ok());
        }
        &Step::Read { lba } => {
            let (found, may_be) = (read(tier, lba), model.get(&lba));
            assert!(may_be.map_or(found == 0, |may_be| may_be.contains(&found)), "block {lba}");
        }
        Step::Flush => {
            if tier.flush().is_ok() {
                check_durable(device, model);
            }
        }
        Step::Fail { lbas } => device.fail(lbas.iter().copied()),
    }
}

fn note(model: &mut Model, lbas: std::ops::Range<u64>, stamp: u64, ok: bool) {
    for lba in lbas {
        let may_be = model.entry(lba).or_insert_with(|| vec![0]);
        if ok {
            may_be.clear();
        }
        may_be.push(stamp);
    }
}

fn check_durable(device: &TestDevice, model: &Model) {
    for (&lba, may_be) in model {
        let found = device.durable(lba);
        assert!(may_be.contains(&found), "block {lba}: {found} is durable, expected {may_be:?}");
    }
}

/// Checks P5: each flush reports a failed write-back until it succeeds, and its data stays
/// readable.
pub(super) fn reports_failed_write_backs(factory: &Factory) {
    let device = TestDevice::new(1);
    let tier = factory(device.clone());
    device.fail([3]);
    write(&*tier, 3, 7, false).unwrap();
    write(&*tier, 4, 8, false).unwrap();
    for _ in 0..2 {
        assert_eq!(tier.flush().unwrap_err().kind(), DeviceErrorKind::NoSpace);
        assert_eq!((read(&*tier, 3), device.durable(3)), (7, 0));
        assert_eq!(device.durable(4), 8);
        assert_eq!(tier.summary().failed_slots, 1);
    }
    device.fail([]);
    tier.flush().unwrap();
    assert_eq!(device.durable(3), 7);
    assert_eq!((tier.summary().failed_slots, tier.summary().dirty_slots), (0, 0));
    tier.flush().unwrap();
}

/// Checks P4: a flush returns although writes, even of the blocks that it covers, never stop.
pub(super) fn flush_ends_under_load(factory: &Factory) {
    // Minutes of writing: no flush takes that long unless it waits for the last one.
    const MOST_WRITES: u64 = 100_000_000;
    let device = TestDevice::new(1);
    let tier = factory(device.clone());
    let (written, flushed) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for stamp in 1..=MOST_WRITES {
                // One block is hot, the others change.
                let lba = if stamp % 2 == 0 { 0 } else { stamp / 2 % 16 };
                write(&*tier, lba, stamp, false).unwrap();
                written.store(stamp, Ordering::Release);
                if flushed.load(Ordering::Acquire) {
                    return;
                }
            }
        });
        for _ in 0..20 {
            let before = written.load(Ordering::Acquire) & !1;
            tier.flush().unwrap();
            assert!(device.durable(0) >= before, "{} < {before}", device.durable(0));
        }
        assert!(written.load(Ordering::Acquire) < MOST_WRITES, "the flush waited for later writes");
        flushed.store(true, Ordering::Release);
    });
}

/// Checks P3 and P4 with three writers, a reader and a flusher: no acknowledged stamp is lost, torn
/// or out of order.
pub(super) fn keeps_order_between_threads(factory: &Factory) {
    const STAMPS: u64 = 4000;
    let device = TestDevice::new(2);
    let tier = factory(device.clone());
    let acknowledged: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for writer in 0..3_u64 {
            let (tier, acknowledged, done) = (&tier, &acknowledged, &done);
            scope.spawn(move || {
                for stamp in 1..=STAMPS {
                    let lba = (stamp * stamp % 11 * 3 + writer) % 63 / 3 * 3 + writer;
                    write(&**tier, lba, stamp, stamp % 97 == 0).unwrap();
                    acknowledged[lba as usize].store(stamp, Ordering::Release);
                }
                done.fetch_add(1, Ordering::Release);
            });
        }
        scope.spawn(|| {
            let mut seen = vec![0; BLOCKS as usize];
            while done.load(Ordering::Acquire) < 3 {
                for lba in 0..BLOCKS {
                    let least = acknowledged[lba as usize].load(Ordering::Acquire);
                    let found = read(&*tier, lba);
                    assert!(found >= least.max(seen[lba as usize]), "block {lba}: {found} is old");
                    seen[lba as usize] = found;
                }
            }
        });
        while done.load(Ordering::Acquire) < 3 {
            let before: Vec<u64> =
                acknowledged.iter().map(|stamp| stamp.load(Ordering::Acquire)).collect();
            tier.flush().unwrap();
            for (lba, &before) in (0..).zip(&before) {
                assert!(device.durable(lba) >= before, "block {lba} is not durable");
            }
        }
    });
    tier.drain().unwrap();
    for (lba, stamp) in (0..).zip(&acknowledged) {
        assert_eq!(device.durable(lba), stamp.load(Ordering::Acquire));
    }
}

/// Checks that the tier keeps its promises after `drain`, and that dropping it writes back too.
pub(super) fn shuts_down_clean(factory: &Factory) {
    let device = TestDevice::new(1);
    let tier = factory(device.clone());
    write(&*tier, 1, 1, false).unwrap();
    tier.drain().unwrap();
    assert_eq!(device.durable(1), 1);
    write(&*tier, 2, 2, false).unwrap();
    assert_eq!(read(&*tier, 2), 2);
    tier.flush().unwrap();
    assert_eq!(device.durable(2), 2);
    (0..BLOCKS).for_each(|lba| write(&*tier, lba, 3, false).unwrap());
    drop(tier);
    (0..BLOCKS).for_each(|lba| assert_eq!(device.durable(lba), 3));
}

/// Checks the promises of every block device.
pub(super) fn conforms(factory: &Factory) {
    let below = MemoryDevice::new(BLOCK_BYTES as u32, BLOCKS * 4).unwrap();
    let tier = factory(Arc::new(below));
    conformance::check(&*tier, Promises::default());
    conformance::check_started(&(tier as _), Promises::default());
    // Over a device that waits, so that `attempt` hands requests back.
    let below = Arc::new(MemoryDevice::new(BLOCK_BYTES as u32, BLOCKS * 4).unwrap());
    let slow = Delay::new(below, Delays { read_ns: 1000, ..Delays::default() });
    conformance::check_started(&(factory(Arc::new(slow)) as _), Promises::default());
}

/// Starts a read of `blocks` from `lba` on. The receiver gets the bytes.
pub(super) fn start_read<D: BlockDevice + ?Sized + 'static>(
    tier: &Arc<D>,
    lba: u64,
    blocks: usize,
) -> Receiver<Result<Vec<u8>>> {
    let (told, ended) = channel();
    let (offset, buffer) = (lba * BLOCK_BYTES as u64, IoBuffer::new(blocks * BLOCK_BYTES));
    let read = OwnedOperation::Read { offset, buffer };
    let completion = move |operation: OwnedOperation, result: Result<()>| {
        let bytes = operation.into_buffer().unwrap().data().to_vec();
        told.send(result.map(|()| bytes)).unwrap();
    };
    Arc::clone(tier).start(AsyncRequest::new(read, Context::default(), completion));
    ended
}

/// Checks that more missing reads than threads wait in the device below together. A read of partly
/// cached blocks needs a thread, and sees the cached data.
pub(super) fn misses_wait_without_a_thread(factory: &Factory) {
    let memory = MemoryDevice::new(BLOCK_BYTES as u32, 128).unwrap();
    let below = Arc::new(Fault::new(Arc::new(memory), 1));
    let tier = factory(below.clone());
    below.add(Rule::new(&[], When::Always, Effect::Hang));
    let reads: Vec<_> = (0..100).map(|lba| start_read(&tier, lba, 1)).collect();
    below.wait_until_hung(100);
    assert!(reads.iter().all(|read| read.try_recv().is_err()));
    below.heal();
    below.release();
    for read in reads {
        assert_eq!(read.recv().unwrap().unwrap(), [0; BLOCK_BYTES]);
    }
    let phases = tier.phases();
    let misses = phases.get(Phase::ReadMiss).unwrap();
    assert_eq!(misses.count, 100);
    let sampled: u64 = misses.histogram.iter().map(|bucket| bucket.samples).sum();
    assert!(sampled > 0, "they are sampled as others are");
    write(&*tier, 101, 7, false).unwrap();
    let both = start_read(&tier, 100, 2).recv().unwrap().unwrap();
    let expected = [[0; BLOCK_BYTES], block_of(7)].concat();
    assert_eq!(both, expected);
}

/// Checks that invalid requests are refused before anything changes.
pub(super) fn refuses_bad_requests(factory: &Factory) {
    let tier = factory(TestDevice::new(1));
    let end = BLOCKS * BLOCK_BYTES as u64;
    let kind = |result: Result<()>| result.unwrap_err().kind();
    let flags = WriteFlags::default();
    assert_eq!(kind(tier.write(1, &[0; BLOCK_BYTES], flags)), DeviceErrorKind::Misaligned);
    assert_eq!(kind(tier.write(end, &[0; BLOCK_BYTES], flags)), DeviceErrorKind::OutOfRange);
    assert_eq!(kind(tier.read(0, &mut [0; 100])), DeviceErrorKind::Misaligned);
    assert_eq!(kind(tier.discard(u64::MAX - 511, 512)), DeviceErrorKind::OutOfRange);
    assert_eq!(kind(tier.write_zeroes(512, 7, ZeroFlags::default())), DeviceErrorKind::Misaligned);
    assert_eq!(tier.status(end, 512, 1).unwrap_err().kind(), DeviceErrorKind::OutOfRange);
    assert_eq!(tier.summary().dirty_slots, 0);
    tier.write(0, &[], flags).unwrap();
    assert!(tier.geometry().volatile_cache);
}

/// Returns a maker of tiers of [`SLOTS`] slots by `policy`.
pub(super) fn tier_of(policy: Policy) -> impl Fn(Arc<dyn BlockDevice>) -> Arc<dyn DramTier> {
    move |below| super::open(policy, SLOTS * BLOCK_BYTES as u64, below).unwrap()
}

/// Makes one module of tests for each policy.
macro_rules! tiers {
    ($($name:ident: $policy:expr;)*) => { $(
        mod $name {
            use super::*;

            #[test]
            fn agrees_with_a_model() {
                super::agrees_with_a_model(&tier_of($policy), 1);
            }

            #[test]
            fn agrees_with_a_model_over_a_device_that_likes_runs() {
                super::agrees_with_a_model(&tier_of($policy), 4);
            }

            #[test]
            fn conforms() {
                super::conforms(&tier_of($policy));
            }

            #[test]
            fn reports_failed_write_backs() {
                super::reports_failed_write_backs(&tier_of($policy));
            }

            #[test]
            fn flush_ends_under_load() {
                super::flush_ends_under_load(&tier_of($policy));
            }

            #[test]
            fn keeps_order_between_threads() {
                super::keeps_order_between_threads(&tier_of($policy));
            }

            #[test]
            fn shuts_down_clean() {
                super::shuts_down_clean(&tier_of($policy));
            }

            #[test]
            fn misses_wait_without_a_thread() {
                super::misses_wait_without_a_thread(&tier_of($policy));
            }

            #[test]
            fn refuses_bad_requests() {
                super::refuses_bad_requests(&tier_of($policy));
            }
        }
    )* };
}

tiers! {
    transit: Policy::Transit;
    transit_no_eager: Policy::TransitNoEager;
    transit_no_bypass: Policy::TransitNoBypass;
    pmbd: Policy::Pmbd;
    pmbd70: Policy::Pmbd70;
    lru: Policy::Lru;
    coactive: Policy::Coactive;
}
