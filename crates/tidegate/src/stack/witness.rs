//! A layer over the backing that keeps the backing's state in the pool. When the pool is served
//! again, the state is compared, to notice writes of other programs in between.
//!
//! Invariants:
//! 1. No write reaches the backing before the pool has noted, durably, that it writes to the
//!    backing. Until it notes so, the state in the pool is exactly that of the backing.
//! 2. While requests write, the pool notes the time at least every [`LATE_NS`], before a later
//!    write. So another program has changed a file whose time is long after the last note.
//! 3. A backing without writes is looked at once, and not again.
//! 4. While requests write, the pool notes a new identity of the disk at the next tick. It keeps
//!    the identity before until the new one is durable, because a power failure may bring it back.
//! 5. While a write to the backing takes longer than [`LONG_NS`], the pool notes
//!    [`LATE_WRITES`] as the time: on a disk that hangs, the kernel may end the write long after
//!    the death of this process, with a later time.
//! 6. While requests write, the pool notes no time of a loop device's file: the kernel writes the
//!    device's page cache to that file up to half a minute later.
//! 7. While tiers write, no flush of a device comes from here: one that fails may report a loss of
//!    writes, once, and only the tiers have the data.
//!
//! Invariant 1 holds while requests come at any time: a writer counts itself in `in_flight` and
//! then looks at `is_writing`; the thread that notes the state clears `is_writing` and then looks
//! at `in_flight`. At least one of the two sees the other, and a writer that finds `is_writing`
//! cleared waits until the state is noted.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::backing::{Observer, system_now_ns};
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, Context, DeviceError, DeviceErrorKind, Geometry, Op,
    Operation, Request, Result,
};
use crate::pmem::Region;
use crate::pool::{BackingIdentity, BackingState, PoolError, Superblock};
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::tier::background::{Step, Waker, Work, Workers};
use crate::tier::clock::now_ns;

/// How often the thread checks whether the backing is at rest.
const TICK_NS: u64 = 200_000_000;
/// A writer notes the time by itself when the last note is older than this.
const LATE_NS: u64 = 500_000_000;

/// A write that takes longer may outlast this process.
const LONG_NS: u64 = 500_000_000;
/// The noted time while a write may come at any later time: no time is later.
const LATE_WRITES: u64 = u64::MAX;

/// Keeps the state of a backing in the pool.
pub(super) struct Witness {
    region: Arc<Region>,
    observer: Observer,
    /// The pool's backing, in the form of the superblock.
    backing: BackingIdentity,
    /// The state in the pool.
    kept: Mutex<BackingState>,
    /// The pool notes that it writes to the backing.
    is_writing: AtomicBool,
    /// When the time was last noted, on the clock of tiers.
    noted_at_ns: AtomicU64,
    /// Number of writes that were begun.
    begun: AtomicU64,
    /// Number of writes that have not ended.
    in_flight: AtomicU64,
    /// The writes that have not ended, in two groups by their age: the thread lets new writes join
    /// the empty group, and so learns how long the others take.
    groups: [AtomicU64; 2],
    /// New writes join the second group.
    joins_second: AtomicBool,
    /// A write takes longer than [`LONG_NS`].
    has_long: AtomicBool,
    /// Number of writes that a flush has made durable.
    flushed: AtomicU64,
    waker: Arc<Waker>,
}

impl Witness {
    /// Makes the witness of the `backing` of the pool in `region`, which has the state `seen`.
    pub(super) fn new(
        region: Arc<Region>,
        observer: Observer,
        backing: &BackingIdentity,
        seen: BackingState,
    ) -> Arc<Self> {
        Arc::new(Self {
            region,
            observer,
            backing: *backing,
            kept: Mutex::new(seen),
            is_writing: AtomicBool::new(false),
            noted_at_ns: AtomicU64::new(0),
            begun: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            groups: [AtomicU64::new(0), AtomicU64::new(0)],
            joins_second: AtomicBool::new(false),
            has_long: AtomicBool::new(false),
            flushed: AtomicU64::new(0),
            waker: Arc::new(Waker::new(1)),
        })
    }

    /// Starts the thread that notes the state when the backing is at rest.
    ///
    /// # Errors
    /// Fails if the system refuses another thread.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<Workers> {
        let thread = Keeper::new(Arc::clone(self));
        Workers::start("backing-state", Arc::clone(&self.waker), [thread])
    }

    /// Notes the backing in the superblock, with two marks: the number `mark_before` that the
    /// backing's mark has, and the number that it is to get. Returns the superblock.
    pub(super) fn bind(&self, mark_before: u64) -> std::result::Result<Superblock, PoolError> {
        let mut kept = self.kept.lock();
        // Writes of a server that was killed may still be on their way.
        *kept = BackingState { mark_before, ..self.without_late_time(*kept) };
        Superblock::update(&self.region, |superblock| {
            kept.mark = superblock.sequence + 1;
            (superblock.backing, superblock.state) = (Some(self.backing), Some(*kept));
            Ok(())
        })
    }

    /// Notes that the backing keeps no mark.
    pub(super) fn has_no_mark(&self) {
        let mut kept = self.kept.lock();
        (kept.mark, kept.mark_before) = (0, 0);
    }

    /// Notes the present state of the backing, unless requests write to it. If the backing cannot
    /// be looked at, the pool goes on to note that it writes, which tells less later.
    pub(super) fn note_rest(&self) {
        self.note_rest_after(self.begun.load(Ordering::SeqCst));
    }

    /// Notes the present state of the backing, unless requests write to it or wrote to it after
    /// write number `begun`.
    fn note_rest_after(&self, begun: u64) {
        let is_flushed = begun > 0 && self.flushed.load(Ordering::SeqCst) >= begun;
        // A power failure must not undo the state that is noted.
        let synced = if is_flushed { self.observer.sync_flushed() } else { self.observer.sync() };
        if synced.is_err() {
            return;
        }
        let mut kept = self.kept.lock();
        self.is_writing.store(false, Ordering::SeqCst);
        let is_at_rest = self.in_flight.load(Ordering::SeqCst) == 0
            && self.begun.load(Ordering::SeqCst) == begun;
        let seen = if is_at_rest { self.observer.observe().ok() } else { None };
        let noted = seen.is_some_and(|seen| {
            let BackingState { block_bytes, mark, .. } = *kept;
            self.store(&mut kept, BackingState { block_bytes, mark, ..seen }).is_ok()
        });
        if !noted {
            self.is_writing.store(true, Ordering::SeqCst);
        }
    }

    /// Notes the time, and that the pool writes to the backing. With `goes_on`, notes only if the
    /// pool still notes that it writes, that is, the state at rest was not noted meanwhile.
    fn note_writing(&self, goes_on: bool) -> std::result::Result<(), PoolError> {
        let mut kept = self.kept.lock();
        if goes_on && !self.is_writing.load(Ordering::SeqCst) {
            return Ok(());
        }
        let has_long = self.has_long.load(Ordering::SeqCst);
        let noted_ns = if has_long { LATE_WRITES } else { system_now_ns() };
        let state = BackingState { is_writing: true, noted_ns, ..self.without_late_time(*kept) };
        self.store(&mut kept, state)?;
        self.noted_at_ns.store(now_ns(), Ordering::Relaxed);
        self.is_writing.store(true, Ordering::SeqCst);
        drop(kept);
        self.waker.wake();
        Ok(())
    }

    /// Notes whether writes are under way, which may come after the end of this process. The
    /// witness's thread notes nothing any more.
    pub(super) fn note_late_writes(&self) {
        self.has_long.store(self.in_flight.load(Ordering::SeqCst) > 0, Ordering::SeqCst);
        // If this fails, the time in the pool is that of the last note.
        let _ = self.note_writing(true);
    }

    /// Returns `state` without the time of the backing if writes may change that late.
    fn without_late_time(&self, state: BackingState) -> BackingState {
        let is_late = self.observer.is_timed_late();
        BackingState { modified_ns: if is_late { 0 } else { state.modified_ns }, ..state }
    }

    /// Notes the identity of a disk to which clients may have given another one.
    fn note_identity(&self) -> std::result::Result<(), PoolError> {
        let Some(said) = self.observer.identity_by_content() else { return Ok(()) };
        let left = *self.kept.lock();
        let said_before = match (said == left.said, left.said_before) {
            (true, 0) => return Ok(()),
            // The disk had this identity before the sync, which has made it durable.
            (true, _) if self.observer.sync().is_ok() => 0,
            (true, _) => return Ok(()),
            (false, 0) => left.said,
            (false, durable) => durable,
        };
        let mut kept = self.kept.lock();
        let is_as_left = (kept.said, kept.said_before) == (left.said, left.said_before);
        if !is_as_left || !self.is_writing.load(Ordering::SeqCst) {
            // The state at rest was noted meanwhile.
            return Ok(());
        }
        let state = BackingState { said, said_before, ..*kept };
        self.store(&mut kept, state)
    }

    fn store(
        &self,
        kept: &mut BackingState,
        state: BackingState,
    ) -> std::result::Result<(), PoolError> {
        Superblock::update(&self.region, |superblock| {
            (superblock.backing, superblock.state) = (Some(self.backing), Some(state));
            Ok(())
        })?;
        *kept = state;
        Ok(())
    }

    fn begin_write(self: &Arc<Self>) -> Result<Writing> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        // A group that is chosen anew meanwhile makes this write look older than it is.
        let group = usize::from(self.joins_second.load(Ordering::SeqCst));
        self.groups[group].fetch_add(1, Ordering::SeqCst);
        let writing = Writing { witness: Arc::clone(self), group };
        let is_noted = self.is_writing.load(Ordering::SeqCst)
            && now_ns().saturating_sub(self.noted_at_ns.load(Ordering::Relaxed)) < LATE_NS;
        if is_noted {
            return Ok(writing);
        }
        self.note_writing(false).map(|()| writing).map_err(|error| {
            let context = "the pool cannot note that it writes to its backing";
            DeviceError::with_source(DeviceErrorKind::Io, context, error)
        })
    }

    /// Returns the number of writes that have ended, for [`has_flushed`](Self::has_flushed).
    fn ended(&self) -> u64 {
        // In this order: a write that begins between the two loads is not counted.
        let begun = self.begun.load(Ordering::SeqCst);
        begun.saturating_sub(self.in_flight.load(Ordering::SeqCst))
    }

    /// Notes that a flush has made all writes durable that had [ended](Self::ended) before it.
    fn has_flushed(&self, ended: u64) {
        self.flushed.fetch_max(ended, Ordering::SeqCst);
    }
}

/// A write under way; its drop ends it.
struct Writing {
    witness: Arc<Witness>,
    group: usize,
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.witness.groups[self.group].fetch_sub(1, Ordering::SeqCst);
        self.witness.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The work of the witness's thread.
struct Keeper {
    witness: Arc<Witness>,
    /// Writes that were begun before the last step.
    begun_before: u64,
    /// When the present group of new writes was chosen, on the clock of tiers.
    group_since_ns: u64,
}

impl Keeper {
    fn new(witness: Arc<Witness>) -> Self {
        Self { witness, begun_before: 0, group_since_ns: 0 }
    }

    /// Returns whether a write has been under way for longer than [`LONG_NS`] at `now_ns`. Lets new
    /// writes join the other group if its writes have ended.
    fn has_long_write(&mut self, now_ns: u64) -> bool {
        let witness = &*self.witness;
        let joins_second = witness.joins_second.load(Ordering::SeqCst);
        if witness.groups[usize::from(!joins_second)].load(Ordering::SeqCst) > 0 {
            return now_ns.saturating_sub(self.group_since_ns) > LONG_NS;
        }
        witness.joins_second.store(!joins_second, Ordering::SeqCst);
        self.group_since_ns = now_ns;
        false
    }

    /// Does the work of a step at `now_ns`.
    fn step_at(&mut self, now_ns: u64) -> Step {
        let has_long = self.has_long_write(now_ns);
        let witness = &*self.witness;
        let had_long = witness.has_long.swap(has_long, Ordering::SeqCst);
        if !witness.is_writing.load(Ordering::SeqCst) {
            return Step::IDLE;
        }
        let begun = witness.begun.load(Ordering::SeqCst);
        let has_rested =
            begun == self.begun_before && witness.in_flight.load(Ordering::SeqCst) == 0;
        self.begun_before = begun;
        if has_rested && witness.flushed.load(Ordering::SeqCst) >= begun {
            witness.note_rest_after(begun);
            return Step::rest(TICK_NS);
        }
        if !has_rested || had_long != has_long {
            // If this fails, the next write returns the error.
            let _ = witness.note_writing(true);
        }
        // If this fails, the next step tries again.
        let _ = witness.note_identity();
        Step::rest(TICK_NS)
    }
}

impl Work for Keeper {
    fn step(&mut self) -> Step {
        self.step_at(now_ns())
    }

    fn has_work(&self) -> bool {
        self.witness.is_writing.load(Ordering::SeqCst)
    }
}

/// The backing of a pool, whose state the witness keeps.
pub(super) struct Witnessed {
    pub(super) inner: Arc<dyn BlockDevice>,
    pub(super) witness: Arc<Witness>,
}

impl BlockDevice for Witnessed {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match Op::of(operation) {
            Op::Read | Op::Status => self.inner.run(operation),
            Op::Flush => {
                let ended = self.witness.ended();
                self.inner.run(operation).inspect(|()| self.witness.has_flushed(ended))
            }
            Op::Write | Op::Discard | Op::WriteZeroes => {
                let _writing = self.witness.begin_write()?;
                self.inner.run(operation)
            }
        }
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let writes = batch.iter().any(|request| Op::of(request.operation()).changes());
        if !writes {
            return self.inner.submit(batch);
        }
        match self.witness.begin_write() {
            Ok(_writing) => self.inner.submit(batch),
            // Each request runs into the failure by itself, and gets it as its result.
            Err(_) => batch.iter_mut().for_each(|request| request.run_on(self)),
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        // An attempt at a flush may run before its writes are counted as ended.
        match Op::of(operation) {
            Op::Read | Op::Status => self.inner.attempt(operation, context),
            _ => Attempt::WouldBlock,
        }
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        let op = Op::of(&request.operation());
        let inner = Arc::clone(&self.inner);
        if matches!(op, Op::Read | Op::Status) {
            return inner.start(request);
        }
        let (ended, witness) = (self.witness.ended(), Arc::clone(&self.witness));
        let writing = match op.changes().then(|| self.witness.begin_write()).transpose() {
            Ok(writing) => writing,
            Err(error) => return request.complete(Err(error)),
        };
        inner.start(request.forward(move |request, result| {
            if op == Op::Flush && result.is_ok() {
                witness.has_flushed(ended);
            }
            drop(writing);
            request.complete(result);
        }));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use proptest::prelude::*;
    use tempfile::NamedTempFile;
    use uuid::Uuid;

    use super::*;
    use crate::backing::{BackingUrl, OpenBacking, Opening};
    use crate::device::fault::{Effect, Fault, Rule, When};
    use crate::device::memory::MemoryDevice;
    use crate::device::{BlockDeviceExt, WriteFlags};
    use crate::stack::judge::judge;
    use crate::tier::EngineCode;

    /// A pool before a file, without the witness's thread.
    struct Bed {
        file: NamedTempFile,
        region: Arc<Region>,
        device: Arc<Witnessed>,
        keeper: Keeper,
    }

    fn open(file: &NamedTempFile) -> OpenBacking {
        let url: BackingUrl = file.path().to_str().unwrap().parse().unwrap();
        url.open(&Opening { pool: "/proc/self".as_ref(), block_bytes: None }).unwrap()
    }

    /// Returns the first page of a file system with `uuid`.
    fn file_system(uuid: u8) -> [u8; 4096] {
        let mut page = [0; 4096];
        page[..4].copy_from_slice(b"XFSB");
        page[32..48].fill(uuid);
        page
    }

    impl Bed {
        fn new() -> Self {
            Self::over(|_, observer| observer)
        }

        /// Makes a pool before a disk without numbers of its own, which has a file system.
        fn of_disk() -> Self {
            Self::over(|file, _| {
                file.write_all_at(&file_system(1), 0).unwrap();
                Observer::of_disk(file).unwrap()
            })
        }

        /// Makes a pool before a new file. The pool looks at the file by the observer that `look`
        /// returns.
        fn over(look: impl FnOnce(&File, Observer) -> Observer) -> Self {
            let file = NamedTempFile::new().unwrap();
            file.as_file().set_len(1 << 20).unwrap();
            let OpenBacking { device, observer, .. } = open(&file);
            let observer = look(file.as_file(), observer);
            let seen = observer.observe().unwrap();
            Self::before(file, device, observer, seen)
        }

        fn before(
            file: NamedTempFile,
            device: Arc<dyn BlockDevice>,
            observer: Observer,
            seen: BackingState,
        ) -> Self {
            let region = Arc::new(Region::anonymous(1 << 20).unwrap());
            let mut superblock =
                Superblock::plan(&region, EngineCode(9), Uuid::nil(), 4096).unwrap();
            superblock.write(&region).unwrap();
            let backing = BackingIdentity::new(seen.said, "file");
            let witness = Witness::new(Arc::clone(&region), observer, &backing, seen);
            witness.bind(0).unwrap();
            witness.has_no_mark();
            witness.note_rest();
            let keeper = Keeper::new(Arc::clone(&witness));
            let device = Arc::new(Witnessed { inner: device, witness });
            Self { file, region, device, keeper }
        }

        fn state(&self) -> BackingState {
            Superblock::read(&self.region).unwrap().superblock.state.unwrap()
        }

        /// Returns the doubt of a server that opens the pool as it is now.
        fn doubt(&self) -> Option<String> {
            let seen = self.device.witness.observer.observe().unwrap();
            let bound = self.device.witness.backing;
            judge(Some(&bound), Some(&self.state()), &seen, &bound).doubt
        }

        /// Makes a file system with `uuid`, as a client does.
        fn format(&self, uuid: u8) {
            self.device.write(0, &file_system(uuid), WriteFlags::default()).unwrap();
        }

        /// Returns whether the pool takes the disk with the file system `uuid`, without a doubt.
        fn accepts(&self, uuid: u8) -> bool {
            let now = self.file.as_file();
            let mut page = [0; 4096];
            now.read_exact_at(&mut page, 0).unwrap();
            now.write_all_at(&file_system(uuid), 0).unwrap();
            let seen = self.device.witness.observer.observe().unwrap();
            now.write_all_at(&page, 0).unwrap();
            let bound = self.device.witness.backing;
            let found = judge(Some(&bound), Some(&self.state()), &seen, &bound);
            found.doubt.is_none() && found.identity == bound.identity
        }

        fn write(&self, page: u64, byte: u8) {
            self.device.write(page * 4096, &[byte; 4096], WriteFlags::default()).unwrap();
        }
    }

    #[derive(Debug, Clone)]
    enum Action {
        Write(u64, u8),
        Submit(u64, u8),
        Zero(u64),
        Flush,
        Tick,
        Settle,
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            (0..256_u64, any::<u8>()).prop_map(|(page, byte)| Action::Write(page, byte)),
            (0..256_u64, any::<u8>()).prop_map(|(page, byte)| Action::Submit(page, byte)),
            (0..256_u64).prop_map(Action::Zero),
            Just(Action::Flush),
            Just(Action::Tick),
            Just(Action::Settle),
        ]
    }

    fn run(bed: &mut Bed, action: &Action) {
        match *action {
            Action::Write(page, byte) => bed.write(page, byte),
            Action::Submit(page, byte) => {
                let (data, flags) = ([byte; 4096], WriteFlags::default());
                let write = Operation::Write { offset: page * 4096, data: &data, flags };
                bed.device.submit(&mut [Request::new(write)]);
            }
            Action::Zero(page) => {
                bed.device
                    .write_zeroes(page * 4096, 4096, crate::device::ZeroFlags::default())
                    .unwrap();
            }
            Action::Flush => bed.device.flush().unwrap(),
            Action::Tick => {
                bed.keeper.step();
            }
            Action::Settle => bed.device.witness.note_rest(),
        }
    }

    proptest! {
        /// A pool that is killed at any moment recognizes its own writes. Later writes of another
        /// program are noticed, except for a moment after a write of the pool.
        #[test]
        fn own_writes_are_no_doubt_and_those_of_others_are(
            actions in proptest::collection::vec(action(), 0..30),
            page in 0..256_u64,
        ) {
            let mut bed = Bed::new();
            for action in &actions {
                run(&mut bed, action);
                prop_assert_eq!(bed.doubt(), None, "after {:?}", action);
            }
            let was_writing = bed.state().is_writing;
            let modified = bed.file.as_file().metadata().unwrap().modified().unwrap();
            bed.file.as_file().write_all_at(&[0xEE; 4096], page * 4096).unwrap();
            let later = Duration::from_secs(if was_writing { 60 } else { 1 });
            bed.file.as_file().set_modified(modified + later).unwrap();
            prop_assert!(bed.doubt().is_some(), "another program wrote");
        }
    }

    #[test]
    fn the_pool_says_that_it_writes_before_it_does_and_notes_when_it_has_flushed() {
        let mut bed = Bed::new();
        assert!(!bed.state().is_writing);
        bed.write(3, 7);
        assert!(bed.state().is_writing);
        bed.keeper.step();
        bed.keeper.step();
        assert!(bed.state().is_writing, "what was not flushed may be written later");
        bed.device.flush().unwrap();
        bed.keeper.step();
        assert!(!bed.state().is_writing);
        assert_eq!(bed.keeper.step(), Step::IDLE);
    }

    /// A device tells of lost writes once. Its first flush is that of the opening.
    #[test]
    fn a_loss_is_reported_to_the_tier_and_not_to_the_witness() {
        let memory: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(4096, 256).unwrap());
        let fails = Effect::Fail(DeviceErrorKind::Io);
        let fault = Fault::new(memory, 0);
        fault.add(Rule::new(&[Op::Flush], When::Nth(3), fails));
        let device: Arc<dyn BlockDevice> = Arc::new(fault);
        let observer = Observer::of_device(7, Arc::clone(&device));
        let seen = observer.observe_device().unwrap();
        let mut bed = Bed::before(NamedTempFile::new().unwrap(), device, observer, seen);
        bed.write(3, 7);
        bed.device.flush().unwrap();
        let begun = bed.keeper.witness.begun.load(Ordering::SeqCst);
        bed.keeper.step();
        bed.write(4, 7);
        // The step of a thread that looked before that write.
        bed.keeper.witness.note_rest_after(begun);
        assert!(bed.state().is_writing);
        bed.device.flush().expect_err("the loss is not reported before");
        bed.device.flush().unwrap();
        bed.keeper.step();
        bed.keeper.step();
        assert!(!bed.state().is_writing);
    }

    #[test]
    fn a_state_is_not_noted_while_a_write_is_under_way() {
        let bed = Bed::new();
        let writing = bed.device.witness.begin_write().unwrap();
        bed.device.witness.note_rest();
        assert!(bed.state().is_writing);
        drop(writing);
        bed.device.witness.note_rest();
        assert!(!bed.state().is_writing);
    }

    /// The kernel ends a write to a disk that hangs long after the server was killed.
    #[test]
    fn a_write_that_takes_long_may_come_at_any_time_after_a_kill() {
        let mut bed = Bed::new();
        bed.write(3, 7);
        let long = bed.device.witness.begin_write().unwrap();
        let tick = |bed: &mut Bed, number: u64| {
            assert_ne!(bed.keeper.step_at(number * TICK_NS), Step::IDLE);
        };
        let comes_late = |bed: &Bed| {
            let file = bed.file.as_file();
            let modified = file.metadata().unwrap().modified().unwrap();
            file.set_modified(modified + Duration::from_secs(60)).unwrap();
            let is_taken = bed.doubt().is_none();
            file.set_modified(modified).unwrap();
            is_taken
        };
        (1..3).for_each(|number| tick(&mut bed, number));
        assert!(!comes_late(&bed), "it does not take long yet");
        (3..10).for_each(|number| {
            bed.write(number, 7);
            tick(&mut bed, number);
        });
        assert!(comes_late(&bed));
        let modified = bed.file.as_file().metadata().unwrap().modified().unwrap();
        bed.file.as_file().set_modified(modified - Duration::from_secs(60)).unwrap();
        assert!(bed.doubt().is_some(), "an older state was restored");
        bed.file.as_file().set_modified(modified).unwrap();
        drop(long);
        (10..13).for_each(|number| tick(&mut bed, number));
        assert!(!comes_late(&bed), "it has ended");
        // A server that ends while a write is under way.
        let last = bed.device.witness.begin_write().unwrap();
        bed.device.witness.note_late_writes();
        assert!(comes_late(&bed));
        drop(last);
        bed.device.witness.note_late_writes();
        assert!(!comes_late(&bed));
    }

    /// Clients go on writing after they have made another file system: the backing never rests.
    #[test]
    fn a_killed_pool_knows_the_file_system_that_its_clients_have_made() {
        let mut bed = Bed::of_disk();
        bed.write(9, 1);
        bed.keeper.step();
        assert_eq!([1, 2, 3].map(|uuid| bed.accepts(uuid)), [true, false, false]);
        bed.format(2);
        bed.keeper.step();
        // A power failure may bring the former file system back.
        assert_eq!([1, 2, 3].map(|uuid| bed.accepts(uuid)), [true, true, false]);
        bed.write(9, 2);
        bed.keeper.step();
        assert_eq!([1, 2, 3].map(|uuid| bed.accepts(uuid)), [false, true, false]);
        assert!(bed.state().is_writing);
        bed.device.flush().unwrap();
        bed.keeper.step();
        assert!(!bed.state().is_writing);
        assert_eq!(bed.doubt(), None);
    }

    #[test]
    fn a_file_system_is_noted_if_no_write_and_no_flush_follows_too() {
        let mut bed = Bed::of_disk();
        bed.write(9, 1);
        bed.keeper.step();
        let writing = bed.device.witness.begin_write().unwrap();
        bed.keeper.step();
        bed.file.as_file().write_all_at(&file_system(2), 0).unwrap();
        drop(writing);
        bed.keeper.step();
        assert!(bed.accepts(2));
        bed.keeper.step();
        assert!(bed.state().is_writing && !bed.accepts(1));
    }

    /// The identity before is the last durable one, however often clients change it.
    #[test]
    fn a_disk_that_says_nothing_for_a_moment_may_have_its_identity_back() {
        let mut bed = Bed::of_disk();
        bed.write(0, 0);
        bed.keeper.step();
        assert_eq!(bed.state().said, 0);
        bed.format(2);
        bed.keeper.step();
        assert_eq!([1, 2].map(|uuid| bed.accepts(uuid)), [true, true]);
        bed.write(9, 1);
        bed.keeper.step();
        assert_eq!([1, 2].map(|uuid| bed.accepts(uuid)), [false, true]);
    }

    #[test]
    fn reads_and_flushes_leave_the_state_alone() {
        let bed = Bed::new();
        let before = bed.state();
        bed.device.read(0, &mut [0; 4096]).unwrap();
        bed.device.flush().unwrap();
        assert_eq!(bed.state(), before);
    }
}
