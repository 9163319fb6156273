//! Judges crash images by the engine's real recovery, other implementations, and later writes.
//!
//! For each image: recovery accepts it, every block is whole and holds a value that the history
//! allows, the structure is sound, and the other implementations agree about both. Some images are
//! judged deeply: opening again changes nothing, a crash at any moment of the recovery is recovered
//! from, and every lane can be written to afterwards.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::device::{BlockDevice, BlockDeviceExt, WriteFlags};
use tidegate::pmem::{Observer, Region};

use crate::context;
use crate::history::{payload, stamp_of};
use crate::medium::{Choice, Granule, Medium, MediumModel, StoreOrder};
use crate::model::{Stamp, TORN, World};
use crate::subject::Subject;
use crate::trace::{Action, Recorder, Trace};

/// Images of one moment of a recovery that are tried. Recoveries store little, so that this limit
/// is rarely reached.
const RECOVERY_IMAGES: usize = 64;
/// Stamps of writes after a recovery count from here on.
const LATER_STAMPS: Stamp = 0x4000_0000;

/// The promises of the design that the simulator judges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// P1: writes acknowledged as durable survive.
    P1Durable,
    /// P2: each block is all old or all new.
    P2Atomic,
    /// P3: a read returns the last acknowledged write.
    P3Latest,
    /// P4: writes that a flush covers are durable when the flush returns.
    P4Flush,
    /// P6: recovery works, also after a crash during recovery, and leaves a sound structure.
    P6Recovery,
    /// The operations finish without error.
    Progress,
}

/// A promise broken.
#[derive(Debug, Clone)]
pub struct Verdict {
    /// The broken promise.
    pub promise: Promise,
    /// How it was broken.
    pub what: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} broken: {}", self.promise, self.what)
    }
}

impl Verdict {
    /// Makes the verdict that the simulator's own environment failed.
    pub(crate) fn outside(error: impl fmt::Display) -> Self {
        Self { promise: Promise::Progress, what: error.to_string() }
    }

    fn recovery(what: String) -> Self {
        Self { promise: Promise::P6Recovery, what }
    }

    fn during(self, when: &str) -> Self {
        Self { what: format!("{when}: {}", self.what), ..self }
    }
}

/// The worlds that the blocks may be in.
type Allowed<'a> = &'a [World];

/// Records nothing; gives engines the thread number that makes them choose each lane in turn.
#[derive(Default)]
pub(crate) struct Ordinals {
    waits: AtomicU64,
}

/// Number of waits after which a thread that runs alone is taken to wait for itself.
const WAITS_LIMIT: u64 = 1_000_000;

impl Observer for Ordinals {
    fn store(&self, _offset: u64, _data: &[u8], _non_temporal: bool) {}
    fn write_back(&self, _offset: u64, _len: u64) {}
    fn fence(&self) {}
    fn load(&self, _offset: u64, _len: u64) {}

    /// Counts a wait.
    ///
    /// # Panics
    /// If the only thread waits for another: it would never end.
    fn relax(&self) {
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        assert!(waits < WAITS_LIMIT, "the only thread waits for a lock that nobody holds");
    }

    fn thread_ordinal(&self) -> usize {
        context::ordinal()
    }
}

/// A judge with a region of its own to open images in.
pub(crate) struct Judge<'a> {
    subject: &'a dyn Subject,
    scratch: Arc<Region>,
    buffer: Vec<u8>,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(subject: &'a dyn Subject) -> Result<Self, String> {
        let scratch = Region::anonymous(subject.region_bytes()).map_err(|e| e.to_string())?;
        let scratch = scratch.observed(Arc::new(Ordinals::default()));
        Ok(Self { subject, scratch: Arc::new(scratch), buffer: Vec::new() })
    }

    /// Takes the buffer to build an image in, so that images cost no allocation.
    pub(crate) fn take_buffer(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    pub(crate) fn give_back(&mut self, buffer: Vec<u8>) {
        self.buffer = buffer;
    }

    /// Judges `image`, whose blocks must match one of the worlds `allowed`.
    pub(crate) fn judge(
        &self,
        image: &[u8],
        allowed: Allowed<'_>,
        volatile_cache: bool,
        deep: bool,
    ) -> Result<(), Verdict> {
        let lost = if volatile_cache { Promise::P4Flush } else { Promise::P1Durable };
        let stamps = self.recover(image, allowed, lost)?;
        self.ask_peers(image, allowed, lost)?;
        if deep {
            self.open_again(&stamps)?;
            self.crash_recovery(image, allowed, lost)?;
            self.write_afterwards(image)?;
        }
        self.check_as_crashed(image)
    }

    /// Recovers `image`; returns the region's bytes afterwards and the stamps of its blocks.
    pub(crate) fn recovered(&self, image: &[u8]) -> Result<(Vec<u8>, Vec<Stamp>), Verdict> {
        self.load(image)?;
        let device = self.open()?;
        let stamps = read_all(device.as_ref())?;
        drop(device);
        if let Some(lba) = stamps.iter().position(|stamp| *stamp == TORN) {
            return Err(torn(lba));
        }
        let mut image = vec![0; image.len()];
        self.scratch.read(0, &mut image).map_err(Verdict::outside)?;
        Ok((image, stamps))
    }

    fn load(&self, image: &[u8]) -> Result<(), Verdict> {
        self.scratch.write(0, image).map_err(Verdict::outside)
    }

    fn open(&self) -> Result<Arc<dyn BlockDevice>, Verdict> {
        let refused = |what| Verdict::recovery(format!("recovery refused the image: {what}"));
        self.subject.open(&self.scratch).map_err(refused)
    }

    /// Opens `image` in the scratch region, which then holds the recovered bytes.
    fn recover(
        &self,
        image: &[u8],
        allowed: Allowed<'_>,
        lost: Promise,
    ) -> Result<Vec<Stamp>, Verdict> {
        self.load(image)?;
        let device = self.open()?;
        let stamps = read_all(device.as_ref())?;
        drop(device);
        compare(&stamps, allowed, lost)?;
        self.check_structure()?;
        Ok(stamps)
    }

    fn check_structure(&self) -> Result<(), Verdict> {
        let unsound = |what| Verdict::recovery(format!("the structure is unsound: {what}"));
        self.subject.check(&self.scratch).map_err(unsound)
    }

    /// Fails if a check finds damage before recovery: a crash must not look like damage.
    fn check_as_crashed(&self, image: &[u8]) -> Result<(), Verdict> {
        self.load(image)?;
        let faulty = |what| Verdict::recovery(format!("before recovery, a check finds: {what}"));
        self.subject.check_as_crashed(&self.scratch).map_err(faulty)
    }

    fn ask_peers(&self, image: &[u8], allowed: Allowed<'_>, lost: Promise) -> Result<(), Verdict> {
        for peer in self.subject.peers() {
            let mut copy = image.to_vec();
            let refused = |what| Verdict::recovery(format!("{} says: {what}", peer.name));
            let content = (peer.read)(&mut copy).map_err(refused)?;
            let stamps = stamps_of(&content, content.len() / allowed[0].len());
            compare(&stamps, allowed, lost).map_err(|verdict| verdict.during(peer.name))?;
        }
        Ok(())
    }

    /// Fails if a second recovery changes the blocks.
    fn open_again(&self, before: &[Stamp]) -> Result<(), Verdict> {
        let stamps = read_all(self.open()?.as_ref())?;
        if stamps == before {
            return Ok(());
        }
        Err(Verdict::recovery(format!(
            "a second recovery changed the blocks from {before:?} to {stamps:?}"
        )))
    }

    /// Crashes the recovery of `image` before each of its fences and at its end.
    fn crash_recovery(
        &self,
        image: &[u8],
        allowed: Allowed<'_>,
        lost: Promise,
    ) -> Result<(), Verdict> {
        let trace = self.trace_recovery(image)?;
        let model = MediumModel { granule: Granule::Word, order: StoreOrder::Word };
        let mut medium = Medium::new(image, model);
        let crash = |medium: &Medium, position: usize| {
            self.crash_once(medium, allowed, lost)
                .map_err(|v| v.during(&format!("after a crash of the recovery at {position}")))
        };
        for (position, event) in trace.events().iter().enumerate() {
            if event.action == Action::Fence {
                crash(&medium, position)?;
            }
            medium.apply(&trace, event);
        }
        crash(&medium, trace.events().len())
    }

    fn crash_once(
        &self,
        medium: &Medium,
        allowed: Allowed<'_>,
        lost: Promise,
    ) -> Result<(), Verdict> {
        let set = medium.crash();
        let mut image = Vec::new();
        let mut try_one = |choice: &Choice| {
            set.build(choice, &mut image);
            self.recover(&image, allowed, lost).map(drop)
        };
        try_one(&set.all())?;
        set.exhaustive_up_to(RECOVERY_IMAGES, try_one)
    }

    fn trace_recovery(&self, image: &[u8]) -> Result<Trace, Verdict> {
        let recorder = Arc::new(Recorder::new(None));
        let region = Region::anonymous(image.len() as u64).map_err(Verdict::outside)?;
        region.write(0, image).map_err(Verdict::outside)?;
        let region = Arc::new(region.observed(recorder.clone()));
        drop(self.subject.open(&region).map_err(Verdict::recovery)?);
        Ok(recorder.take())
    }

    /// Recovers `image`, and writes every block often enough to use every lane.
    fn write_afterwards(&self, image: &[u8]) -> Result<(), Verdict> {
        self.load(image)?;
        let device = self.open()?;
        let blocks = device.geometry().blocks;
        for round in 1..=self.subject.rounds_after_recovery() {
            for lba in 0..blocks {
                context::next_operation(context::ordinal() + 1, None);
                write_stamp(device.as_ref(), lba, LATER_STAMPS + round)?;
            }
        }
        let expected = LATER_STAMPS + self.subject.rounds_after_recovery();
        let same = |stamps: Vec<Stamp>| stamps.iter().all(|&stamp| stamp == expected);
        let written = same(read_all(device.as_ref())?);
        drop(device);
        self.check_structure().map_err(|v| v.during("after writing to the recovered pool"))?;
        if written && same(read_all(self.open()?.as_ref())?) {
            return Ok(());
        }
        Err(Verdict::recovery("what was written after the recovery is not there".to_owned()))
    }
}

fn write_stamp(device: &dyn BlockDevice, lba: u64, stamp: Stamp) -> Result<(), Verdict> {
    let block_bytes = device.geometry().block_bytes;
    let data = payload(lba, stamp, block_bytes as usize);
    let written = device.write(lba * u64::from(block_bytes), &data, WriteFlags { fua: true });
    written.map_err(|e| Verdict::recovery(format!("a write after recovery failed: {e}")))
}

fn read_all(device: &dyn BlockDevice) -> Result<Vec<Stamp>, Verdict> {
    let geometry = device.geometry();
    let mut data = vec![0; usize::try_from(geometry.size_bytes()).unwrap_or(0)];
    device
        .read(0, &mut data)
        .map_err(|e| Verdict::recovery(format!("a read after recovery failed: {e}")))?;
    Ok(stamps_of(&data, geometry.block_bytes as usize))
}

/// Returns the stamps of blocks; [`TORN`] for a block that is torn, or another block's.
fn stamps_of(content: &[u8], block_bytes: usize) -> Vec<Stamp> {
    let blocks = (0..).zip(content.chunks_exact(block_bytes));
    blocks.map(|(lba, block)| stamp_of(lba, block).unwrap_or(TORN)).collect()
}

fn torn(lba: usize) -> Verdict {
    let what = format!("block {lba} is torn, or another block's");
    Verdict { promise: Promise::P2Atomic, what }
}

fn compare(stamps: &[Stamp], allowed: Allowed<'_>, lost: Promise) -> Result<(), Verdict> {
    let fits = |world: &World| stamps.iter().zip(world).all(|(stamp, set)| set.contains(stamp));
    if allowed.iter().any(fits) {
        return Ok(());
    }
    for (lba, stamp) in stamps.iter().enumerate() {
        let of_block: BTreeSet<Stamp> =
            allowed.iter().flat_map(|world| world[lba].iter().copied()).collect();
        if of_block.contains(stamp) {
            continue;
        }
        if *stamp == TORN {
            return Err(torn(lba));
        }
        let what = format!("block {lba} holds stamp {stamp}, the history allows {of_block:?}");
        return Err(Verdict { promise: lost, what });
    }
    let what = format!("the blocks hold {stamps:?}, which no flush left");
    Err(Verdict { promise: Promise::P2Atomic, what })
}
