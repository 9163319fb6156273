//! Devices that vanish, hang and come back, against a model of blocks: the backing, which may lose
//! what it had not flushed, and the cache's memory.
//!
//! What a block may read as:
//! - After a write that was acknowledged: its content, from the next read on, in every mode. What
//!   may take it back depends on the mode:
//!   - `wb`, `wo`, `wt`: nothing. It is durable in the cache until the backing has flushed it.
//!   - `wi`, `pt`, `wa`: a backing that loses its volatile memory, until a flush of the cache
//!     succeeded. The block is then as at any moment since that flush, and the next flush fails,
//!     unless the process that had acknowledged the write ended before. A write with FUA is as
//!     durable as in `wb`.
//!   - with atomic flush (`wb` and `wo` alone): a crash, until a flush succeeded. The block is then
//!     as that flush left it, and the backing takes nothing back. With a cache of few slots groups
//!     are committed early: the block is as at any moment since the flush.
//! - After a write or zeroes that failed, and after a discard: old or new, block by block and never
//!   torn. The first read decides, and later reads, of the cache or after an open, agree with it.
//! - A read that fails says nothing.
//!
//! While the backing fails, is gone or hangs:
//! - reads of pages that are cached succeed, but in `pt`, which asks the backing;
//! - writes in `wb` and `wo` succeed as long as there are free slots;
//! - the pool opens, and nothing is lost by that;
//! - a flush fails where the backing lost what was acknowledged: the first one after the loss,
//!   whichever request or background work the backing told of it;
//! - in `wb` and `wo` a flush succeeds, once one did and since then no other mode was set: all that
//!   was acknowledged is durable in the pool. Damage of the pool itself is told;
//! - no request that was started waits for longer than the backing.
//!
//! When it is back, with the content that it had or flushed, all is as before: reads succeed,
//! `clean_all` succeeds, and then all acknowledged writes are durable in the backing.
//!
//! While pages of the memory fail, any request may fail, and an open may be refused. When the
//! memory is back with its content, all acknowledged writes are there, and what was read of those
//! that failed stays.

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex as PlainMutex;
use proptest::prelude::*;

use super::*;
use super::{NO_THREAD, PAGES, binding};
use crate::cache::check::check;
use crate::cache::counters::Counter;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::{DeviceError, DeviceErrorKind, IoBuffer, Op, OwnedOperation};
use crate::pmem::RegionOptions;
use crate::tier::Tier;
use crate::tier::clock::now_ns;

/// A request that waits for longer waits for ever.
const TIMEOUT: Duration = Duration::from_secs(20);

fn since(began_ns: u64) -> Duration {
    Duration::from_nanos(now_ns() - began_ns)
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

/// A drive with volatile memory of its own, which can be switched off.
struct Drive {
    geometry: Geometry,
    state: PlainMutex<DriveState>,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct DriveState {
    now: Vec<u8>,
    durable: Vec<u8>,
    unflushed_blocks: BTreeSet<u64>,
    is_off: bool,
    /// Acknowledged bytes were lost, and no flush told of it.
    has_lost: bool,
    /// Flushes are asked for together: all of them tell of a loss.
    is_asked_together: bool,
    /// A flush told of the loss.
    has_told: bool,
}

impl Drive {
    fn new(block_bytes: u32) -> Self {
        let len = to_usize(PAGES * PAGE_BYTES);
        let geometry = Geometry {
            block_bytes,
            blocks: PAGES * PAGE_BYTES / u64::from(block_bytes),
            preferred_bytes: 4096,
            read_only: false,
            atomic_block: true,
            volatile_cache: true,
            fast_zero: true,
            keeps_data: true,
        };
        let state = DriveState {
            now: vec![0; len],
            durable: vec![0; len],
            unflushed_blocks: BTreeSet::new(),
            is_off: false,
            has_lost: false,
            is_asked_together: false,
            has_told: false,
        };
        Self { geometry, state: PlainMutex::new(state) }
    }

    fn set_off(&self, is_off: bool) {
        self.state.lock().is_off = is_off;
    }

    /// Loses what was not flushed. Returns the bytes that changed by that, block by block.
    fn lose(&self) -> Vec<Range<u64>> {
        let block_bytes = u64::from(self.geometry.block_bytes);
        let mut state = self.state.lock();
        let DriveState { now, durable, unflushed_blocks, has_lost, .. } = &mut *state;
        let mut lost = Vec::new();
        for block in std::mem::take(unflushed_blocks) {
            let bytes = block * block_bytes..(block + 1) * block_bytes;
            let at = to_usize(bytes.start)..to_usize(bytes.end);
            if now[at.clone()] != durable[at.clone()] {
                now[at.clone()].copy_from_slice(&durable[at]);
                lost.push(bytes);
            }
        }
        *has_lost |= !lost.is_empty();
        lost
    }

    /// Whether flushes from now on are asked for together.
    fn set_asked_together(&self, is_asked_together: bool) {
        let mut state = self.state.lock();
        let has_told = std::mem::take(&mut state.has_told);
        state.has_lost &= is_asked_together || !has_told;
        state.is_asked_together = is_asked_together;
    }

    fn durable(&self) -> Vec<u8> {
        self.state.lock().durable.clone()
    }

    fn check_on(&self) -> Result<()> {
        let error = || DeviceError::new(DeviceErrorKind::Io, "the drive is off");
        if self.state.lock().is_off { Err(error()) } else { Ok(()) }
    }

    fn change(&self, offset: u64, len: u64, fua: bool, data: Option<&[u8]>) {
        let at = to_usize(offset)..to_usize(offset + len);
        let mut state = self.state.lock();
        match data {
            Some(data) => state.now[at].copy_from_slice(data),
            None => state.now[at].fill(0),
        }
        let block_bytes = u64::from(self.geometry.block_bytes);
        let blocks = offset / block_bytes..(offset + len) / block_bytes;
        state.unflushed_blocks.extend(blocks.clone());
        if fua {
            blocks.for_each(|block| state.make_durable(block, block_bytes));
        }
    }
}

impl DriveState {
    fn make_durable(&mut self, block: u64, block_bytes: u64) {
        let at = to_usize(block * block_bytes)..to_usize((block + 1) * block_bytes);
        self.durable[at.clone()].copy_from_slice(&self.now[at]);
        self.unflushed_blocks.remove(&block);
    }

    /// Fails once after a loss, as an NBD export whose server lost what was not flushed; and where
    /// it was asked for before another flush told of the loss.
    fn flush(&mut self, block_bytes: u64) -> Result<()> {
        if self.has_lost {
            self.has_lost = self.is_asked_together;
            self.has_told = true;
            return Err(DeviceError::new(DeviceErrorKind::Io, "acknowledged writes are lost"));
        }
        let unflushed: Vec<u64> = self.unflushed_blocks.iter().copied().collect();
        for block in unflushed {
            self.make_durable(block, block_bytes);
        }
        Ok(())
    }
}

impl BlockDevice for Drive {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry.check_operation(operation)?;
        self.check_on()?;
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                let at = to_usize(offset)..to_usize(offset) + buf.len();
                buf.copy_from_slice(&self.state.lock().now[at]);
            }
            Operation::Write { offset, data, flags } => {
                self.change(offset, data.len() as u64, flags.fua, Some(data));
            }
            Operation::Flush => return self.state.lock().flush(self.geometry.block_bytes.into()),
            Operation::Discard { offset, len } => self.change(offset, len, false, None),
            Operation::WriteZeroes { offset, len, flags } => {
                self.change(offset, len, flags.fua, None);
            }
            Operation::Status { .. } => operation.report_data(),
        }
        Ok(())
    }

    fn attempt(&self, operation: &mut Operation<'_>, _: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

/// The content of a block that a write gave it; 0: zeroes.
type Tag = u32;

/// Fills `data`, block `block`, with the content that `tag` stands for. Blocks whose tags are odd
/// differ from each other in their first line alone.
fn fill_block(tag: Tag, block: u64, data: &mut [u8]) {
    const LINE: usize = 64;
    let word = (u64::from(tag) << 32 | block).to_le_bytes();
    let rest = if tag.is_multiple_of(2) { word } else { [0x5A; 8] };
    for (line, bytes) in data.chunks_mut(LINE).enumerate() {
        let of_line = if line == 0 { word } else { rest };
        bytes.chunks_mut(8).for_each(|to| to.copy_from_slice(&of_line));
    }
    if tag == 0 {
        data.fill(0);
    }
}

/// The tag of `data`, block `block`. None: it is no content of this block, so it is torn.
fn tag_of(block: u64, data: &[u8]) -> Option<Tag> {
    let word = u64::from_le_bytes(data[..8].try_into().unwrap());
    let tag = Tag::try_from(word >> 32).unwrap();
    let mut expected = vec![0; data.len()];
    fill_block(tag, block, &mut expected);
    (data == expected).then_some(tag)
}

/// What a block may be.
#[derive(Debug, Clone)]
struct Block {
    /// What it may read as.
    may_be: Vec<Tag>,
    /// What a loss may take it back to: what it was since the last flush.
    older: Vec<Tag>,
    /// With atomic flush: what it was at the last flush.
    committed: Vec<Tag>,
    /// An acknowledged write of it is only in the backing, which has not flushed it.
    is_volatile: bool,
    /// What the last acknowledged write left, and what failed ones after it may have left: a
    /// backing that has one of these has not lost the acknowledged one.
    standing: Vec<Tag>,
}

impl Block {
    fn zero() -> Self {
        let (older, is_volatile) = (Vec::new(), false);
        Self { may_be: vec![0], older, committed: vec![0], is_volatile, standing: vec![0] }
    }
}

/// Adds those of `more` to `tags` that are not among them.
fn add_tags(tags: &mut Vec<Tag>, more: &[Tag]) {
    for tag in more {
        if !tags.contains(tag) {
            tags.push(*tag);
        }
    }
}

/// How long an acknowledged write lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lasting {
    /// For good.
    Durable,
    /// Until a loss, before the next flush.
    UntilFlush,
}

/// All blocks of a device, and what its next flush has to say.
struct Model {
    block_bytes: usize,
    blocks: Vec<Block>,
    /// A backing lost acknowledged writes, and no flush told of it.
    must_tell: bool,
    next_tag: Tag,
}

impl Model {
    fn new(block_bytes: u32) -> Self {
        let block_bytes = block_bytes as usize;
        let blocks = vec![Block::zero(); to_usize(PAGES * PAGE_BYTES) / block_bytes];
        Self { block_bytes, blocks, must_tell: false, next_tag: 0 }
    }

    fn range(&self, offset: u64, len: u64) -> Range<usize> {
        to_usize(offset) / self.block_bytes..to_usize(offset + len) / self.block_bytes
    }

    /// A content for `len` bytes at `offset` that no write had before.
    fn new_data(&mut self, offset: u64, len: u64) -> (Tag, Vec<u8>) {
        self.next_tag += 1;
        let mut data = vec![0; to_usize(len)];
        let first = offset / self.block_bytes as u64;
        for (block, bytes) in (first..).zip(data.chunks_mut(self.block_bytes)) {
            fill_block(self.next_tag, block, bytes);
        }
        (self.next_tag, data)
    }

    /// A write of `tag` ended.
    fn wrote(&mut self, offset: u64, len: u64, tag: Tag, is_done: bool, lasting: Lasting) {
        for at in self.range(offset, len) {
            let block = &mut self.blocks[at];
            let old: Vec<Tag> = std::mem::take(&mut block.may_be);
            if lasting == Lasting::UntilFlush {
                add_tags(&mut block.older, &old);
                block.is_volatile |= is_done;
            } else if is_done {
                *block = Block { committed: vec![tag], ..Block::zero() };
            } else {
                add_tags(&mut block.committed, &[tag]);
            }
            block.may_be = if is_done { Vec::new() } else { old };
            add_tags(&mut block.may_be, &[tag]);
            if is_done {
                block.standing.clear();
            }
            add_tags(&mut block.standing, &[tag]);
        }
    }

    /// A discard ended: a block is old or zeroes.
    fn discarded(&mut self, offset: u64, len: u64, lasting: Lasting) {
        self.wrote(offset, len, 0, false, lasting);
    }

    /// A read found `data`: from now on the blocks are that.
    fn read(&mut self, offset: u64, data: &[u8], what: &str) {
        for (at, bytes) in self.range(offset, data.len() as u64).zip(data.chunks(self.block_bytes))
        {
            let tag = tag_of(at as u64, bytes);
            let tag = tag.unwrap_or_else(|| panic!("block {at} is torn: {what}"));
            let block = &mut self.blocks[at];
            assert!(block.may_be.contains(&tag), "block {at} is {tag}, not {block:?}: {what}");
            block.may_be = vec![tag];
        }
    }

    /// A read beside writes found `data`: each block is what it was before them, or is after them.
    fn read_beside(&self, before: &[Block], offset: u64, data: &[u8]) {
        for (at, bytes) in self.range(offset, data.len() as u64).zip(data.chunks(self.block_bytes))
        {
            let tag = tag_of(at as u64, bytes).unwrap_or_else(|| panic!("block {at} is torn"));
            let (before, after) = (&before[at], &self.blocks[at]);
            let is_known = before.may_be.contains(&tag) || after.may_be.contains(&tag);
            assert!(is_known, "block {at} is {tag}, neither {before:?} nor {after:?}");
        }
    }

    /// A flush ended that began after all requests before it.
    fn flushed(&mut self, is_done: bool) {
        assert!(!is_done || !self.must_tell, "a flush hides that acknowledged writes are lost");
        self.must_tell = false;
        for block in &mut self.blocks {
            if is_done {
                block.committed.clone_from(&block.may_be);
                (block.older, block.is_volatile) = (Vec::new(), false);
            } else {
                add_tags(&mut block.committed, &block.may_be);
            }
        }
    }

    /// A flush ended beside writes; the blocks were `before` when it began.
    fn flushed_beside(&mut self, before: &[Block], is_done: bool) {
        assert!(!is_done || !self.must_tell, "a flush hides that acknowledged writes are lost");
        self.must_tell = false;
        for (block, before) in self.blocks.iter_mut().zip(before) {
            add_tags(&mut block.committed, &before.may_be);
            add_tags(&mut block.committed, &block.may_be);
        }
    }

    /// The backing lost `lost`, which it had not flushed, and has `left` now.
    fn lost(&mut self, lost: &[Range<u64>], left: &[u8]) {
        let is_lost = |at: usize| {
            let (block, from) = (&self.blocks[at], at * self.block_bytes);
            let tag = tag_of(at as u64, &left[from..from + self.block_bytes]);
            block.is_volatile && tag.is_none_or(|tag| !block.standing.contains(&tag))
        };
        let mut blocks = lost.iter().flat_map(|it| self.range(it.start, it.end - it.start));
        self.must_tell |= blocks.any(is_lost);
        for block in &mut self.blocks {
            let Block { may_be, older, .. } = block;
            add_tags(may_be, older);
        }
    }

    /// A process ended, and with it the connections of its clients: what they had not flushed is
    /// theirs to write again.
    fn ended(&mut self) {
        self.must_tell = false;
        self.blocks.iter_mut().for_each(|block| block.is_volatile = false);
    }

    /// A process that used atomic flush ended without a flush; it committed `early` groups.
    fn crashed(&mut self, early: u64) {
        for block in &mut self.blocks {
            let Block { may_be, older, committed, .. } = block;
            add_tags(may_be, older);
            if early == 0 {
                may_be.clone_from(committed);
            }
            older.clear();
            committed.clone_from(may_be);
        }
    }
}

/// A request that is started while the backing hangs, in a part of the device of its own unless it
/// is a read.
#[derive(Debug, Clone)]
enum Started {
    Read { first_page: u64, pages: u64 },
    Write { pages: u64, fua: bool },
    Zero { pages: u64 },
    Flush,
}

#[derive(Debug, Clone)]
enum Step {
    Write {
        first: u64,
        count: u64,
        fua: bool,
    },
    Read {
        first: u64,
        count: u64,
    },
    Zero {
        first: u64,
        count: u64,
        fua: bool,
    },
    Discard {
        first: u64,
        count: u64,
    },
    Flush,
    Background,
    Clean,
    SetMode(Mode),
    Set(&'static str, &'static str),
    Reopen,
    /// The backing is gone from the nth request of these kinds on.
    Vanish {
        ops: &'static [Op],
        nth: u64,
    },
    /// Some requests to the backing fail.
    Break,
    /// The backing is back.
    Return {
        loses: bool,
    },
    /// The backing hangs, and then answers, or is gone.
    Hang {
        requests: Vec<Started>,
        vanishes: bool,
        loses: bool,
    },
}

/// Settings that change what is done and when.
const SETTINGS: &[(&str, &str)] = &[
    ("granularity", "page"),
    ("granularity", "record"),
    ("by-content", "on"),
    ("by-content", "off"),
    ("eviction", "lru"),
    ("eviction", "s3fifo"),
    ("cleaning", "acp"),
    ("cleaning", "nop"),
    ("cleaning", "watermark"),
    ("acp.wake-up-ms", "0"),
    ("clean-from-pct", "10"),
];

/// Kinds of requests at which a backing vanishes; none: all.
const VANISH_OPS: &[&[Op]] = &[&[], &[Op::Flush], &[Op::Write], &[Op::Read]];

/// Pages of the device that a request has for itself while the backing hangs.
const OWN_PAGES: u64 = 16;

fn started() -> impl Strategy<Value = Started> {
    prop_oneof![
        3 => (0..PAGES - 8, 1..8_u64)
            .prop_map(|(first_page, pages)| Started::Read { first_page, pages }),
        4 => (1..OWN_PAGES, any::<bool>())
            .prop_map(|(pages, fua)| Started::Write { pages, fua }),
        1 => (1..OWN_PAGES).prop_map(|pages| Started::Zero { pages }),
        1 => Just(Started::Flush),
    ]
}

/// Requests, which every model has; runs of blocks lie within the first `PAGES` blocks or pages.
fn requests() -> impl Strategy<Value = Step> {
    let run = || (0..PAGES).prop_flat_map(|first| (Just(first), 1..=(PAGES - first).min(20)));
    prop_oneof![
        10 => (run(), any::<bool>())
            .prop_map(|((first, count), fua)| Step::Write { first, count, fua }),
        7 => run().prop_map(|(first, count)| Step::Read { first, count }),
        1 => (run(), any::<bool>())
            .prop_map(|((first, count), fua)| Step::Zero { first, count, fua }),
        1 => run().prop_map(|(first, count)| Step::Discard { first, count }),
        2 => Just(Step::Flush),
        4 => Just(Step::Background),
        1 => Just(Step::Clean),
        1 => prop::sample::select(SETTINGS).prop_map(|(key, value)| Step::Set(key, value)),
    ]
}

fn steps(modes: &'static [Mode]) -> impl Strategy<Value = Vec<Step>> {
    let ops = prop::sample::select(VANISH_OPS);
    let step = prop_oneof![
        24 => requests(),
        2 => prop::sample::select(modes).prop_map(Step::SetMode),
        2 => Just(Step::Reopen),
        3 => (ops, 1..4_u64).prop_map(|(ops, nth)| Step::Vanish { ops, nth }),
        1 => Just(Step::Break),
        3 => any::<bool>().prop_map(|loses| Step::Return { loses }),
        1 => (prop::collection::vec(started(), 1..8), any::<bool>(), any::<bool>())
            .prop_map(|(requests, vanishes, loses)| Step::Hang { requests, vanishes, loses }),
    ];
    prop::collection::vec(step, 1..60)
}

/// What a scene is like.
#[derive(Debug, Clone, Copy)]
struct Shape {
    slots: u64,
    line_bytes: u32,
    /// Bytes of a block of the device, and of one of the backing.
    block_bytes: [u32; 2],
    is_atomic: bool,
}

fn shapes(is_atomic: bool) -> impl Strategy<Value = Shape> {
    let slots = prop::sample::select(&[16, 40, 300][..]);
    let lines = prop::sample::select(&[4 << 10, 16 << 10][..]);
    let blocks = prop::sample::select(&[[4096, 4096], [512, 4096], [512, 512]][..]);
    (slots, lines, blocks).prop_map(move |(slots, line_bytes, block_bytes)| Shape {
        slots,
        line_bytes,
        block_bytes,
        is_atomic,
    })
}

impl Shape {
    fn pool_bytes(&self) -> u64 {
        (6 + 4 + self.slots.div_ceil(64) + self.slots) * 4096
    }

    fn create(&self, region: &Region) {
        let [block_bytes, _] = self.block_bytes;
        let line_bytes = self.line_bytes;
        create(region, &CacheOptions { block_bytes, line_bytes, ..Default::default() }).unwrap();
    }

    fn options(&self) -> CacheDeviceOptions {
        CacheDeviceOptions { atomic_flush: self.is_atomic, ..NO_THREAD }
    }

    fn try_open(
        &self,
        region: &Arc<Region>,
        fault: &Arc<Fault>,
    ) -> std::result::Result<Arc<CacheDevice>, CacheError> {
        let fault = Arc::clone(fault) as _;
        CacheDevice::open(Arc::clone(region), fault, binding(), self.options()).map(Arc::new)
    }
}

/// The answer to a request that was started: its position, its buffer and its result.
type Answer = (usize, Option<IoBuffer>, Result<()>);

/// A device with all that a step may change. Steps count its blocks.
struct Scene {
    shape: Shape,
    region: Arc<Region>,
    drive: Arc<Drive>,
    fault: Arc<Fault>,
    device: Arc<CacheDevice>,
    model: Model,
    /// Pages of the memory may have failed.
    has_failed_memory: bool,
    /// Writes may have gone around the cache since the last flush that succeeded.
    may_have_bypassed: bool,
}

impl Scene {
    fn new(shape: Shape, mode: Mode) -> Self {
        let region = Arc::new(Region::anonymous(shape.pool_bytes()).unwrap());
        Self::over(region, shape, mode)
    }

    fn over(region: Arc<Region>, shape: Shape, mode: Mode) -> Self {
        shape.create(&region);
        let [block_bytes, below_bytes] = shape.block_bytes;
        let drive = Arc::new(Drive::new(below_bytes));
        let fault = Arc::new(Fault::new(Arc::clone(&drive) as _, 7));
        let device = shape.try_open(&region, &fault).unwrap();
        device.set_mode(mode).unwrap();
        let model = Model::new(block_bytes);
        let (has_failed_memory, may_have_bypassed) = (false, true);
        Self { shape, region, drive, fault, device, model, has_failed_memory, may_have_bypassed }
    }

    fn bytes(&self, first: u64, count: u64) -> (u64, u64) {
        let block_bytes = self.model.block_bytes as u64;
        (first * block_bytes, count * block_bytes)
    }

    /// How long a write lasts that is acknowledged now.
    fn lasting(&self, fua: bool) -> Lasting {
        let is_cached =
            matches!(self.device.mode(), Mode::WriteBack | Mode::WriteOnly | Mode::WriteThrough);
        let is_durable = fua || (is_cached && !self.shape.is_atomic);
        if is_durable { Lasting::Durable } else { Lasting::UntilFlush }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Write { first, count, fua } => self.write(self.bytes(first, count), fua),
            Step::Read { first, count } => {
                let (offset, len) = self.bytes(first, count);
                let is_hit = self.is_cached(offset, len);
                let is_read = self.read(offset, len, "a read");
                assert!(is_read || !is_hit, "a read of cached pages failed");
            }
            Step::Zero { first, count, fua } => {
                self.may_have_bypassed = true;
                let (offset, len) = self.bytes(first, count);
                let flags = ZeroFlags { fua, ..ZeroFlags::default() };
                let is_done = self.device.write_zeroes(offset, len, flags).is_ok();
                self.model.wrote(offset, len, 0, is_done, self.lasting(fua));
            }
            Step::Discard { first, count } => {
                self.may_have_bypassed = true;
                let (offset, len) = self.bytes(first, count);
                drop(self.device.discard(offset, len));
                self.model.discarded(offset, len, self.lasting(false));
            }
            Step::Flush => {
                self.flush();
            }
            Step::Background => {
                self.device.background().step();
            }
            Step::Clean => {
                self.clean_all();
            }
            Step::SetMode(mode) => drop(self.device.set_mode(mode)),
            Step::Set(key, value) => drop(self.device.set(key, value)),
            Step::Reopen => self.reopen(),
            Step::Vanish { ops, nth } => {
                self.fault.add(Rule::new(ops, When::Nth(nth), Effect::Disappear));
            }
            Step::Break => self.break_some(),
            Step::Return { loses } => self.come_back(loses),
            Step::Hang { ref requests, vanishes, loses } => self.hang(requests, vanishes, loses),
        }
    }

    fn write(&mut self, (offset, len): (u64, u64), fua: bool) {
        self.may_have_bypassed |= !self.device.mode().writes_back();
        let (tag, data) = self.model.new_data(offset, len);
        let has_slots = self.has_slots(offset, len);
        let result = self.device.write(offset, &data, WriteFlags { fua });
        assert!(result.is_ok() || !has_slots, "there are free slots: {result:?}");
        self.model.wrote(offset, len, tag, result.is_ok(), self.lasting(fua));
    }

    fn read(&mut self, offset: u64, len: u64, what: &str) -> bool {
        let mut found = vec![0; to_usize(len)];
        let is_read = self.device.read(offset, &mut found).is_ok();
        if is_read {
            self.model.read(offset, &found, what);
        }
        is_read
    }

    fn flush(&mut self) -> bool {
        let result = self.device.flush();
        let may_fail = self.may_have_bypassed || self.has_failed_memory;
        assert!(result.is_ok() || may_fail, "nothing is at risk: {result:?}");
        self.may_have_bypassed &= result.is_err() || !self.device.mode().writes_back();
        self.model.flushed(result.is_ok());
        result.is_ok()
    }

    /// A read needs the cache alone.
    fn is_cached(&self, offset: u64, len: u64) -> bool {
        let is_whole = |page| {
            let found = self.device.core.pages.find(page);
            found.is_some_and(|found| !found.record || found.base.is_some())
        };
        let is_hit = self.device.mode() != Mode::PassThrough && !self.has_failed_memory;
        is_hit && pages_of(offset, len).all(is_whole)
    }

    /// A write needs the cache alone.
    fn has_slots(&self, offset: u64, len: u64) -> bool {
        let core = &self.device.core;
        let pages = pages_of(offset, len);
        let needs_base = !core.writer.makes_records() && !span::is_whole(&(offset..offset + len));
        let available = u64::from(core.pages.shard(pages.start).allocator.available());
        let is_apart = core.pages.shards.count() == 1 && available >= pages.end - pages.start;
        is_apart && core.router.mode().writes_back() && !needs_base && !self.has_failed_memory
    }

    /// Cleans all. If that succeeds, the backing has all durably, but for what waits for a commit.
    fn clean_all(&mut self) -> bool {
        let is_done = self.device.clean_all().is_ok();
        if is_done && !self.shape.is_atomic {
            self.model.read(0, &self.drive.durable(), "what the backing flushed");
        }
        is_done
    }

    fn early_commits(&self) -> u64 {
        self.device.core.pages.counters.get(Counter::GroupsCommittedEarly)
    }

    fn reopen(&mut self) {
        if self.shape.is_atomic {
            self.model.crashed(self.early_commits());
        }
        self.model.ended();
        self.may_have_bypassed = true;
        self.device = self.shape.try_open(&self.region, &self.fault).expect("the pool opens");
    }

    fn break_some(&self) {
        let short = Effect::Short { blocks: 1, kind: DeviceErrorKind::Io };
        for effect in [Effect::Fail(DeviceErrorKind::Io), short] {
            self.fault.add(Rule::new(&[], When::Chance(150_000), effect));
        }
    }

    fn come_back(&mut self, loses: bool) {
        self.drive.set_off(false);
        if loses {
            let lost = self.drive.lose();
            if self.shape.is_atomic {
                // Nothing goes around the cache.
                assert!(!self.model.must_tell);
            } else {
                self.model.lost(&lost, &self.drive.durable());
            }
        }
        self.fault.heal();
    }

    /// Starts `requests` while the backing hangs, and has all end.
    fn hang(&mut self, requests: &[Started], vanishes: bool, loses: bool) {
        self.may_have_bypassed = true;
        let before = self.model.blocks.clone();
        self.fault.add(Rule::new(&[], When::Always, Effect::Hang));
        self.drive.set_asked_together(true);
        let (told, answers) = channel();
        let tags: Vec<Tag> =
            requests.iter().enumerate().map(|(at, it)| self.start(at, it, &told)).collect();
        self.drive.set_off(vanishes);
        self.fault.heal();
        let mut answers = self.release_all(&answers, requests.len());
        answers.sort_by_key(|(at, ..)| *at);
        self.drive.set_asked_together(false);
        self.conclude(requests, &tags, &answers, &before);
        self.come_back(loses);
    }

    /// Starts a request, and returns the tag of what it writes.
    fn start(&mut self, at: usize, request: &Started, told: &Sender<Answer>) -> Tag {
        let own_offset = at as u64 * OWN_PAGES * PAGE_BYTES;
        let (tag, operation) = match *request {
            Started::Read { first_page, pages } => {
                let buffer = IoBuffer::new(to_usize(pages * PAGE_BYTES));
                (0, OwnedOperation::Read { offset: first_page * PAGE_BYTES, buffer })
            }
            Started::Write { pages, fua } => {
                let (tag, data) = self.model.new_data(own_offset, pages * PAGE_BYTES);
                let mut buffer = IoBuffer::new(data.len());
                buffer.data_mut().copy_from_slice(&data);
                let flags = WriteFlags { fua };
                (tag, OwnedOperation::Write { offset: own_offset, buffer, flags })
            }
            Started::Zero { pages } => {
                let (len, flags) = (pages * PAGE_BYTES, ZeroFlags::default());
                (0, OwnedOperation::WriteZeroes { offset: own_offset, len, flags })
            }
            Started::Flush => (0, OwnedOperation::Flush),
        };
        let told = told.clone();
        let completion = move |operation: OwnedOperation, result| {
            drop(told.send((at, operation.into_buffer(), result)));
        };
        Arc::clone(&self.device).start(AsyncRequest::new(
            operation,
            Context::default(),
            completion,
        ));
        tag
    }

    /// Lets all requests go on, those too that begin to hang only now, until `count` have ended.
    fn release_all(&self, answers: &Receiver<Answer>, count: usize) -> Vec<Answer> {
        let (began_ns, mut ended) = (now_ns(), Vec::new());
        while ended.len() < count {
            self.fault.release();
            match answers.recv_timeout(Duration::from_millis(1)) {
                Ok(answer) => ended.push(answer),
                Err(RecvTimeoutError::Disconnected) => panic!("a request was dropped"),
                Err(RecvTimeoutError::Timeout) => {
                    assert!(since(began_ns) < TIMEOUT, "a started request never ends");
                }
            }
        }
        ended
    }

    fn conclude(&mut self, all: &[Started], tags: &[Tag], answers: &[Answer], before: &[Block]) {
        for (at, _, result) in answers {
            let (offset, is_done) = (*at as u64 * OWN_PAGES * PAGE_BYTES, result.is_ok());
            let (pages, fua) = match all[*at] {
                Started::Write { pages, fua } => (pages, fua),
                Started::Zero { pages } => (pages, false),
                Started::Read { .. } | Started::Flush => continue,
            };
            let (len, lasting) = (pages * PAGE_BYTES, self.lasting(fua));
            self.model.wrote(offset, len, tags[*at], is_done, lasting);
        }
        // Of flushes side by side any may be the one that tells of a loss.
        let tells =
            |(at, _, result): &Answer| matches!(all[*at], Started::Flush) && result.is_err();
        self.model.must_tell &= !answers.iter().any(tells);
        for (at, buffer, result) in answers {
            match (&all[*at], buffer) {
                (Started::Flush, _) => self.model.flushed_beside(before, result.is_ok()),
                (Started::Read { first_page, .. }, Some(buffer)) if result.is_ok() => {
                    self.model.read_beside(before, first_page * PAGE_BYTES, buffer.data());
                }
                _ => {}
            }
        }
    }

    /// All faults are over: all that was acknowledged is there, before and after an open and the
    /// cleaning, and durable in the backing.
    fn finish(mut self) {
        self.come_back(false);
        let len = PAGES * PAGE_BYTES;
        self.read(0, len, "the end of all faults");
        // The first one may tell what the backing lost, the second one what failed before.
        let flushes: Vec<bool> = (0..3).map(|_| self.flush()).collect();
        assert!(flushes[2], "nothing is left to tell");
        assert!(self.read(0, len, "flushes"), "a read failed after the end of all faults");
        self.reopen();
        assert!(self.read(0, len, "an open") && self.clean_all() && self.read(0, len, "cleaning"));
        self.reopen();
        assert!(self.read(0, len, "an open after cleaning"));
        self.model.read(0, &self.drive.durable(), "what the backing has at the end");
        assert_eq!(check(&self.region).unwrap().findings, Vec::<String>::new());
    }
}

fn compare(shape: Shape, mode: Mode, steps: &[Step]) {
    let mut scene = Scene::new(shape, mode);
    for step in steps {
        scene.take(step);
    }
    scene.finish();
}

macro_rules! models {
    ($($name:ident: $mode:expr, $modes:expr, $is_atomic:expr;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(shape in shapes($is_atomic), steps in steps($modes)) {
                    compare(shape, $mode, &steps);
                }
            )*
        }
    };
}

models! {
    wb_outlives_its_backing: Mode::WriteBack, &[Mode::WriteBack], false;
    wt_outlives_its_backing: Mode::WriteThrough, &[Mode::WriteThrough], false;
    wa_outlives_its_backing: Mode::WriteAround, &[Mode::WriteAround], false;
    wi_outlives_its_backing: Mode::WriteInvalidate, &[Mode::WriteInvalidate], false;
    wo_outlives_its_backing: Mode::WriteOnly, &[Mode::WriteOnly], false;
    pt_outlives_its_backing: Mode::PassThrough, &[Mode::PassThrough], false;
    modes_in_turn_outlive_their_backing: Mode::WriteBack, Mode::ALL, false;
    wb_with_atomic_flush_outlives_its_backing: Mode::WriteBack, &[Mode::WriteBack], true;
    wo_with_atomic_flush_outlives_its_backing: Mode::WriteOnly, &[Mode::WriteOnly], true;
}

/// Runs `run` on a thread of its own, and panics by the name `what` where that never ends.
pub(super) fn within<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (told, ended) = channel();
    let thread = std::thread::spawn(move || drop(told.send(run())));
    match ended.recv_timeout(TIMEOUT) {
        Ok(done) => done,
        Err(RecvTimeoutError::Timeout) => panic!("{what} waits for ever"),
        Err(RecvTimeoutError::Disconnected) => {
            resume_unwind(thread.join().expect_err("it ended without an answer"))
        }
    }
}

/// What threads that write and read beside the main one share with it.
#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    /// By thread: the requests that ended, and those that succeeded.
    ended: [AtomicU64; THREADS],
    succeeded: [AtomicU64; THREADS],
}

const THREADS: usize = 3;
/// Pages of a thread: more than a third of the slots.
const THREAD_PAGES: u64 = 32;

impl Shared {
    fn note(&self, thread: usize, is_done: bool) {
        self.ended[thread].fetch_add(1, Ordering::SeqCst);
        self.succeeded[thread].fetch_add(is_done.into(), Ordering::SeqCst);
    }
}

/// The pages of one thread, and what they may be.
struct Pages {
    thread: usize,
    may_be: Vec<Vec<Tag>>,
}

impl Pages {
    fn page(&self, at: u64) -> u64 {
        self.thread as u64 * THREAD_PAGES + at
    }

    fn write(&mut self, device: &CacheDevice, at: u64, tag: Tag) -> bool {
        let (page, mut data) = (self.page(at), [0; PAGE]);
        fill_block(tag, page, &mut data);
        let result =
            device.write(page * PAGE_BYTES, &data, WriteFlags { fua: tag.is_multiple_of(5) });
        let may_be = &mut self.may_be[to_usize(at)];
        if result.is_ok() {
            may_be.clear();
        }
        may_be.push(tag);
        result.is_ok()
    }

    fn read(&mut self, device: &dyn BlockDevice, at: u64) -> bool {
        let (page, mut data) = (self.page(at), [0; PAGE]);
        let is_read = device.read(page * PAGE_BYTES, &mut data).is_ok();
        if is_read {
            self.found(at, &data);
        }
        is_read
    }

    fn found(&mut self, at: u64, data: &[u8]) {
        let page = self.page(at);
        let tag = tag_of(page, data).unwrap_or_else(|| panic!("page {page} is torn"));
        let may_be = &mut self.may_be[to_usize(at)];
        assert!(may_be.contains(&tag), "page {page} is {tag}, not {may_be:?}");
        *may_be = vec![tag];
    }
}

/// Writes, reads and flushes until it is over.
fn run_thread(device: &CacheDevice, shared: &Shared, thread: usize) -> Pages {
    let mut pages = Pages { thread, may_be: vec![vec![0]; to_usize(THREAD_PAGES)] };
    for tag in 1.. {
        let at = u64::from(tag) * 7 % THREAD_PAGES;
        let note = |is_done| shared.note(thread, is_done);
        note(pages.write(device, at, tag));
        note(pages.read(device, u64::from(tag) * 5 % THREAD_PAGES));
        if tag.is_multiple_of(64) {
            note(device.flush().is_ok());
        }
        if shared.is_over.load(Ordering::SeqCst) {
            break;
        }
    }
    pages
}

/// Waits until each of `counts` has grown by `more`, while `meanwhile` is done again and again.
fn await_growth(what: &str, counts: &[AtomicU64; THREADS], more: u64, meanwhile: impl Fn()) {
    let read = || counts.each_ref().map(|count| count.load(Ordering::SeqCst));
    let (from, began_ns) = (read(), now_ns());
    while read().iter().zip(from).any(|(now, from)| *now < from + more) {
        assert!(since(began_ns) < TIMEOUT, "{what}: {from:?}, and now {:?}", read());
        meanwhile();
        std::thread::yield_now();
    }
}

/// Threads go on while their backing hangs, then is gone, then is back.
fn threads_outlive_their_backing(mode: Mode, is_atomic: bool) {
    let shape = Shape { slots: 64, line_bytes: 4096, block_bytes: [4096, 4096], is_atomic };
    let Scene { region, drive, fault, device, .. } = Scene::new(shape, mode);
    drop(device);
    let open = || {
        let options = CacheDeviceOptions { atomic_flush: is_atomic, ..Default::default() };
        let (region, fault) = (Arc::clone(&region), Arc::clone(&fault));
        Arc::new(CacheDevice::open(region, fault, binding(), options).unwrap())
    };
    let (device, shared) = (open(), Arc::new(Shared::default()));
    let (told, ended) = channel();
    for thread in 0..THREADS {
        let (device, shared, told) = (Arc::clone(&device), Arc::clone(&shared), told.clone());
        std::thread::spawn(move || {
            let pages = run_thread(&device, &shared, thread);
            // The pool is opened anew when all have told: by then this device must be gone.
            drop(device);
            told.send(pages)
        });
    }
    drop(told);
    await_growth("requests do not end", &shared.succeeded, 300, || ());
    fault.add(Rule::new(&[], When::Always, Effect::Hang));
    let hanging = Arc::clone(&fault);
    within("the first request that hangs", move || hanging.wait_until_hung(1));
    drive.set_off(true);
    fault.heal();
    let release = || fault.release();
    await_growth("requests wait for a backing that is gone", &shared.ended, 100, release);
    drive.set_off(false);
    await_growth("requests fail after the return", &shared.succeeded, 300, release);
    shared.is_over.store(true, Ordering::SeqCst);
    let next = || ended.recv_timeout(TIMEOUT).expect("a thread ends, without a panic");
    let mut all: Vec<Pages> = (0..THREADS).map(|_| next()).collect();
    let mut read_all = |device: &Arc<CacheDevice>| {
        for pages in &mut all {
            assert!((0..THREAD_PAGES).all(|at| pages.read(&**device, at)));
        }
    };
    read_all(&device);
    drop(within("a flush", move || (device.flush(), device.flush().unwrap())));
    let device = within("an open", {
        let (region, fault) = (Arc::clone(&region), Arc::clone(&fault));
        let options = CacheDeviceOptions { atomic_flush: is_atomic, ..Default::default() };
        move || Arc::new(CacheDevice::open(region, fault, binding(), options).unwrap())
    });
    read_all(&device);
    let closing = Arc::clone(&device);
    within("the shutdown", move || closing.shutdown().unwrap());
    read_all(&device);
    let durable = drive.durable();
    for pages in &mut all {
        for at in 0..THREAD_PAGES {
            let from = to_usize(pages.page(at) * PAGE_BYTES);
            pages.found(at, &durable[from..from + PAGE]);
        }
    }
}

#[test]
fn threads_outlive_a_backing_that_hangs_vanishes_and_returns() {
    for &mode in Mode::ALL {
        println!("{mode}");
        threads_outlive_their_backing(mode, false);
    }
    for mode in [Mode::WriteBack, Mode::WriteOnly] {
        println!("{mode} with atomic flush");
        threads_outlive_their_backing(mode, true);
    }
}

/// A pool in a file, of which pages can fail.
struct Memory {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Memory {
    /// With `bytes`, and open.
    fn of(bytes: &[u8]) -> (Self, Arc<Region>) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("pool");
        std::fs::write(&path, bytes).unwrap();
        let region = Region::open(&path, &RegionOptions::default()).unwrap();
        (Self { path, _dir: dir }, Arc::new(region))
    }

    /// Has the pages at `offsets` fail from now on; all others keep their bytes.
    fn fail(&self, region: &Region, offsets: &[u64]) {
        let bytes = std::fs::read(&self.path).unwrap();
        let file = std::fs::File::options().write(true).open(&self.path).unwrap();
        file.set_len(0).unwrap();
        for offset in offsets {
            region.load_u64(*offset).unwrap_err();
        }
        file.write_all_at(&bytes, 0).unwrap();
    }

    /// The bytes, with those that failed pages had.
    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }
}

/// What happens to the memory.
#[derive(Debug, Clone)]
enum MemoryStep {
    Request(Step),
    /// The page with the data of a slot fails.
    FailData {
        slot: u32,
    },
    /// The page with the header of a slot fails.
    FailHeaders {
        slot: u32,
    },
    /// All of it is gone.
    Vanish,
    /// It is back, and the pool is opened.
    Repair,
}

fn memory_steps() -> impl Strategy<Value = Vec<MemoryStep>> {
    let step = prop_oneof![
        30 => requests().prop_map(MemoryStep::Request),
        3 => prop::sample::select(Mode::ALL)
            .prop_map(|mode| MemoryStep::Request(Step::SetMode(mode))),
        1 => Just(MemoryStep::Request(Step::Set("pt-error-threshold", "2"))),
        1 => Just(MemoryStep::Request(Step::Set("pt-error-threshold", "0"))),
        2 => Just(MemoryStep::Request(Step::Reopen)),
        3 => any::<u32>().prop_map(|slot| MemoryStep::FailData { slot }),
        1 => any::<u32>().prop_map(|slot| MemoryStep::FailHeaders { slot }),
        1 => Just(MemoryStep::Vanish),
        4 => Just(MemoryStep::Repair),
    ];
    prop::collection::vec(step, 1..60)
}

/// A scene over memory that fails.
struct FailingScene {
    scene: Scene,
    memory: Memory,
}

impl FailingScene {
    fn new(shape: Shape, mode: Mode) -> Self {
        let (memory, region) = Memory::of(&vec![0; to_usize(shape.pool_bytes())]);
        Self { scene: Scene::over(region, shape, mode), memory }
    }

    fn take(&mut self, step: &MemoryStep) {
        let places = self.scene.device.core.store.places;
        let slot_of = |slot: u32| slot % places.slots();
        match *step {
            MemoryStep::Request(Step::Reopen) if self.scene.has_failed_memory => self.reopen(),
            MemoryStep::Request(ref request) => self.scene.take(request),
            MemoryStep::FailData { slot } => self.fail(&[places.data(slot_of(slot))]),
            MemoryStep::FailHeaders { slot } => self.fail(&[places.header(slot_of(slot))]),
            MemoryStep::Vanish => {
                let pages = self.scene.region.len_bytes() / PAGE_BYTES;
                self.fail(&(0..pages).map(|page| page * PAGE_BYTES).collect::<Vec<_>>());
            }
            MemoryStep::Repair => self.repair(),
        }
    }

    fn fail(&mut self, offsets: &[u64]) {
        self.scene.has_failed_memory = true;
        self.memory.fail(&self.scene.region, offsets);
    }

    /// Opens the pool while pages of it fail, which may be refused.
    fn reopen(&mut self) {
        let scene = &mut self.scene;
        let early = scene.early_commits();
        match scene.shape.try_open(&scene.region, &scene.fault) {
            Ok(device) => {
                if scene.shape.is_atomic {
                    scene.model.crashed(early);
                }
                scene.device = device;
            }
            Err(_) => self.repair(),
        }
    }

    fn repair(&mut self) {
        let (memory, region) = Memory::of(&self.memory.bytes());
        self.memory = memory;
        self.scene.region = region;
        (self.scene.has_failed_memory, self.scene.may_have_bypassed) = (false, true);
        self.scene.reopen();
    }
}

fn compare_memory(shape: Shape, mode: Mode, steps: &[MemoryStep]) {
    let mut scene = FailingScene::new(shape, mode);
    for step in steps {
        scene.take(step);
    }
    scene.repair();
    scene.scene.finish();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 192,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_was_acknowledged_outlives_the_memory(shape in shapes(false), steps in memory_steps()) {
        within("a request", move || compare_memory(shape, Mode::WriteBack, &steps));
    }

    #[test]
    fn what_was_flushed_at_once_outlives_the_memory(
        shape in shapes(true),
        steps in memory_steps(),
    ) {
        within("a request", move || compare_memory(shape, Mode::WriteBack, &steps));
    }
}

const SMALL: Shape =
    Shape { slots: 64, line_bytes: 4096, block_bytes: [4096, 4096], is_atomic: false };

/// The slot of `page`, by the offset of its header page.
fn header_page_of(device: &CacheDevice, page: u64) -> u64 {
    let slot = device.core.pages.find(page).unwrap().slot;
    device.core.store.places.header(slot) / PAGE_BYTES * PAGE_BYTES
}

/// A scene of which a write of pages 0 and 1 failed in the memory of the second one, in more slots
/// than a write tries. `is_cached`: these pages were cached before.
fn with_failed_write(is_cached: bool) -> FailingScene {
    let mut failing = FailingScene::new(Shape { slots: 300, ..SMALL }, Mode::WriteBack);
    let request = |step| MemoryStep::Request(step);
    if is_cached {
        failing.take(&request(Step::Write { first: 0, count: 2, fua: false }));
        failing.take(&request(Step::Clean));
    }
    // Free slots are taken from the first one on.
    let slot = if is_cached { 3 } else { 1 };
    let places = failing.scene.device.core.store.places;
    failing.fail(&(slot..slot + 200).map(|slot| places.data(slot)).collect::<Vec<_>>());
    failing.take(&request(Step::Write { first: 0, count: 2, fua: false }));
    let scene = &failing.scene;
    assert!(scene.model.blocks[0].may_be.len() == 2, "the write failed");
    failing
}

/// A page of which a write failed is written around the cache: what the failed one left on the
/// memory does not take that back.
#[test]
fn a_write_that_the_memory_refused_does_not_come_back_over_a_later_one() {
    for is_cached in [false, true] {
        within("a write around the cache", move || {
            let mut failing = with_failed_write(is_cached);
            for step in [
                Step::SetMode(Mode::PassThrough),
                Step::Write { first: 0, count: 1, fua: false },
                Step::Flush,
            ] {
                failing.take(&MemoryStep::Request(step));
            }
            assert_eq!(failing.scene.model.blocks[0].may_be.len(), 1, "it is acknowledged");
            failing.repair();
            failing.scene.finish();
        });
    }
}

#[test]
fn a_write_that_the_memory_refused_reads_after_an_open_as_before_it() {
    for is_cached in [false, true] {
        let mut failing = with_failed_write(is_cached);
        let read = MemoryStep::Request(Step::Read { first: 0, count: 1 });
        failing.take(&read);
        assert_eq!(failing.scene.model.blocks[0].may_be.len(), 1, "page 0 is whole");
        failing.repair();
        failing.take(&read);
        failing.scene.finish();
    }
}

/// Pages leave the cache together, and the memory refuses to void an older version of the first
/// one: that of the second one does not come back when its page leaves.
#[test]
fn an_older_version_that_was_not_voided_does_not_come_back() {
    within("a write around the cache", || {
        let mut failing = FailingScene::new(Shape { slots: 300, ..SMALL }, Mode::WriteBack);
        let write = |first, count| MemoryStep::Request(Step::Write { first, count, fua: false });
        // Their headers are not in one page of the memory.
        failing.take(&write(0, 1));
        failing.take(&write(10, 70));
        failing.take(&write(1, 1));
        let device = Arc::clone(&failing.scene.device);
        let [of_first, of_second] = [0, 1].map(|page| header_page_of(&device, page));
        assert_ne!(of_first, of_second);
        failing.take(&write(0, 2));
        failing.take(&MemoryStep::Request(Step::Clean));
        failing.fail(&[of_first]);
        failing.take(&MemoryStep::Request(Step::SetMode(Mode::WriteInvalidate)));
        failing.take(&write(0, 2));
        failing.take(&write(1, 1));
        failing.take(&MemoryStep::Request(Step::Flush));
        failing.repair();
        failing.scene.finish();
    });
}

/// A clean page is the backing's again, a dirty one is an error, and neither holds up what is
/// cleaned beside them.
#[test]
fn pages_whose_memory_failed_hold_up_no_others() {
    let mut failing = FailingScene::new(SMALL, Mode::WriteBack);
    let write = |first| MemoryStep::Request(Step::Write { first, count: 2, fua: false });
    failing.take(&write(0));
    failing.take(&MemoryStep::Request(Step::Clean));
    failing.take(&write(2));
    failing.scene.device.flush().expect("all is durable");
    for page in [0, 2] {
        let slot = failing.scene.device.core.pages.find(page).unwrap().slot;
        failing.take(&MemoryStep::FailData { slot });
    }
    let scene = &mut failing.scene;
    for (page, is_read) in [(0, true), (1, true), (2, false), (3, true)] {
        let (offset, len) = scene.bytes(page, 1);
        assert_eq!(scene.read(offset, len, "a read"), is_read, "{page}");
    }
    let error = scene.device.clean_all().unwrap_err().to_string();
    assert!(error.contains("its memory failed"), "{error}");
    let is_dirty = |page| scene.device.core.pages.find(page).is_some_and(|found| found.dirty);
    assert_eq!([0, 1, 2, 3].map(is_dirty), [false, false, true, false]);
    let told = scene.device.flush().expect_err("what was acknowledged is lost").to_string();
    assert!(told.contains("its memory failed"), "{told}");
    failing.repair();
    failing.scene.finish();
}

/// A slot whose memory failed is not taken again, and no write fails: neither where a page is read
/// that was in the slot, nor where a write meets the failure.
#[test]
fn writes_take_other_slots_where_the_memory_failed() {
    for is_header in [false, true] {
        let mut failing = FailingScene::new(Shape { slots: 300, ..SMALL }, Mode::WriteBack);
        let device = Arc::clone(&failing.scene.device);
        (0..10).for_each(|page| super::write(&device, page, 1));
        device.clean_all().unwrap();
        let places = device.core.store.places;
        let slot = device.core.pages.find(5).unwrap().slot;
        let free = places.header(100) / PAGE_BYTES * PAGE_BYTES;
        failing.fail(&[places.data(slot), if is_header { free } else { places.data(20) }]);
        assert_eq!(super::read(&*device, 5), 1, "from the backing");
        for byte in 2..8 {
            (0..PAGES).for_each(|page| super::write(&device, page, byte));
        }
        (0..PAGES).for_each(|page| assert_eq!(super::read(&*device, page), 7));
        device.flush().unwrap();
        drop(device);
        failing.repair();
        (0..PAGES).for_each(|page| assert_eq!(super::read(&*failing.scene.device, page), 7));
    }
}

/// Where no slot can become free any more, because the memory is gone, requests fail.
#[test]
fn requests_fail_where_the_memory_is_gone() {
    for no_thread in [true, false] {
        within("a write without a slot", move || {
            let FailingScene { scene, memory } = FailingScene::new(SMALL, Mode::WriteBack);
            let Scene { region, fault, device, .. } = scene;
            drop(device);
            let options = CacheDeviceOptions { no_thread, ..Default::default() };
            let device = CacheDevice::open(Arc::clone(&region), fault, binding(), options).unwrap();
            (0..20).for_each(|page| super::write(&device, page, 1));
            device.clean_all().unwrap();
            (20..30).for_each(|page| super::write(&device, page, 1));
            let pages = region.len_bytes() / PAGE_BYTES;
            memory.fail(&region, &(0..pages).map(|it| it * PAGE_BYTES).collect::<Vec<_>>());
            for page in 0..2 * PAGES {
                let offset = page % PAGES * PAGE_BYTES;
                device.write(offset, &[2; PAGE], WriteFlags::default()).unwrap_err();
            }
        });
    }
}

/// A zero request of more pages than the cache takes at once flushes the backing, and so may a
/// client's `clean_all`: what that tells of a loss is told to the next flush too.
#[test]
fn a_loss_that_no_flush_was_told_of_is_told_to_the_next_one() {
    for mode in [Mode::WriteBack, Mode::WriteThrough] {
        for by_zeroes in [false, true] {
            let pages = 1000;
            let memory = Arc::new(crate::device::memory::MemoryDevice::new(4096, pages).unwrap());
            let fault = Arc::new(Fault::new(memory, 1));
            let binding = Binding { pages, ..binding() };
            let pool = super::pool(64);
            let device =
                CacheDevice::open(pool, Arc::clone(&fault) as _, binding, NO_THREAD).unwrap();
            device.set_mode(Mode::WriteInvalidate).unwrap();
            super::write(&device, 1, 1);
            device.set_mode(mode).unwrap();
            fault.add(Rule::new(&[Op::Flush], When::Nth(1), Effect::Fail(DeviceErrorKind::Io)));
            let flags = ZeroFlags::default();
            let told = if by_zeroes {
                device.write_zeroes(2 * PAGE_BYTES, 900 * PAGE_BYTES, flags)
            } else {
                device.clean_all()
            };
            told.unwrap_err();
            let error = device.flush().unwrap_err().to_string();
            assert!(error.contains("injected fault: flush"), "{mode}: {error}");
            device.flush().unwrap();
        }
    }
}

/// A page is read, the backing loses it and tells a flush of that, and the next flush succeeds:
/// what was read is not kept then.
#[test]
fn what_was_read_before_a_loss_is_not_kept_after_it() {
    let mut scene = Scene::new(SMALL, Mode::WriteInvalidate);
    for step in [
        Step::Write { first: 3, count: 1, fua: false },
        Step::Read { first: 3, count: 1 },
        Step::Return { loses: true },
        Step::Flush,
        Step::Flush,
    ] {
        scene.take(&step);
    }
    assert!(scene.device.core.background.fills.are_waiting());
    super::work(&scene.device);
    assert_eq!(scene.device.core.pages.find(3), None);
    scene.finish();
}

/// While the backing hangs, writes into free slots and reads of cached pages end.
#[test]
fn cached_requests_end_while_the_backing_hangs() {
    for mode in [Mode::WriteBack, Mode::WriteOnly] {
        within("a request that the cache serves", move || {
            let scene = Scene::new(SMALL, mode);
            scene.fault.add(Rule::new(&[], When::Always, Effect::Hang));
            (0..60).for_each(|page| super::write(&scene.device, page, 1));
            (0..60).for_each(|page| assert_eq!(super::read(&*scene.device, page), 1));
        });
    }
}
