//! An open pool with the tiers before it and the backing behind it.
//!
//! Invariants:
//! 1. Tiers are drained from the top: each tier still takes the write-backs of the tier above it.
//! 2. The lock on the backing is held until the last tier is dropped, or, if dirty pages are kept,
//!    until the process ends.
//! 3. Counters grow in the tiers. Only [`Stack::since_reset`] subtracts the counts of a reset.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::claim::{Claim, Since};
use super::judge::{Judgement, judge};
use super::witness::{Witness, Witnessed};
use super::{PoolDescription, Registry, Result, StackError, name};
use crate::backing::{self, BackingUrl, Observer, OpenBacking, by_name};
use crate::device::delay::{Delay, Delays};
use crate::device::watch::{Notices, Watch};
use crate::device::{BlockDevice, DeviceError, DeviceErrorKind, is_block_bytes};
use crate::dram::{self, Policy, TierSpec};
use crate::pmem::Region;
use crate::pool::{BackingIdentity, BackingState, Superblock};
use crate::size::Size;
use crate::stats::{Baseline, Collector, Metric, Reading, Unit};
use crate::tier::background::Workers;
use crate::tier::{
    Backing, Engine, EngineError, Line, Opening, Setting, SettingError, State, Tier, line,
};

/// How to open a stack.
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
pub struct StackOptions {
    /// The memory of the pool.
    pub region: Arc<Region>,
    /// The pool's file or device, which must not be its own backing.
    pub path: PathBuf,
    /// The device behind the pool.
    pub backing: Option<BackingUrl>,
    /// Use the backing also where that may be a mistake.
    pub force: bool,
    /// Open the pool without its lost data.
    pub salvage: bool,
    /// Make each flush atomic: after a crash all writes that it covers are there, or none.
    pub atomic_flush: bool,
    /// Keep the dirty data in the pool when the stack is [closed](Stack::close).
    pub keep_dirty: bool,
    /// The mode of a cache will be set: engines without modes are refused.
    pub needs_modes: bool,
    /// The DRAM tier before the pool.
    pub dram: TierSpec,
    /// Delays of each request to the pool: for tests and demonstrations.
    pub delays: Option<Delays>,
    /// Receives a notice when the backing begins to fail, and when it works again.
    pub notices: Option<Notices>,
}

impl StackOptions {
    /// Opens only the pool in `region`, which is mapped from `path`: without a backing and a DRAM
    /// tier.
    pub fn alone(region: Arc<Region>, path: PathBuf) -> Self {
        Self {
            region,
            path,
            backing: None,
            force: false,
            salvage: false,
            atomic_flush: false,
            keep_dirty: false,
            needs_modes: false,
            dram: TierSpec { policy: Policy::None, bytes: 0 },
            delays: None,
            notices: None,
        }
    }
}

const PENDING_BYTES: Metric = Metric::gauge(
    "pending_bytes",
    Unit::Bytes,
    "Bytes that only this tier holds and has still to write below",
);

/// An open pool, ready to be served.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::device::{BlockDeviceExt, WriteFlags};
/// use tidegate::pmem::Region;
/// use tidegate::stack::{REGISTRY, StackOptions};
/// use tidegate::tier::Options;
///
/// let region = Arc::new(Region::anonymous(64 << 20)?);
/// REGISTRY.plan(REGISTRY.engine("btt")?, &Options::new())?.create(&region)?;
/// let dram = "transit:8M".parse()?;
/// let stack =
///     REGISTRY.open(StackOptions { dram, ..StackOptions::alone(region, "memory".into()) })?;
/// let device = stack.top();
/// device.write(0, &[7; 4096], WriteFlags::default())?; // Answered from DRAM.
/// device.flush()?; // Durable in the pool.
/// stack.drain()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Stack {
    /// From the top tier, which clients reach.
    pub(super) tiers: Vec<Arc<dyn Tier>>,
    /// The device behind the lowest tier.
    pub(super) backing: Option<Arc<dyn BlockDevice>>,
    pub(super) description: PoolDescription,
    pub(super) region: Arc<Region>,
    /// The settings that cannot change while the stack is open.
    fixed: Vec<Setting>,
    /// The claim and the witness of the backing; dropped after the tiers.
    pub(super) behind: Option<Behind>,
    /// The dirty data stays in the pool when the stack is closed.
    pub(super) keep_dirty: bool,
    /// The counts at the last reset.
    baseline: Mutex<Baseline>,
    /// Held while settings change, so that requests do not mix their settings.
    setting: Mutex<()>,
}

/// The description and the counts of a stack; the keys are a contract with scripts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stat {
    /// A server has the pool open.
    pub live: bool,
    /// The pool's description.
    #[serde(flatten)]
    pub description: Map<String, Value>,
    /// The states of the tiers, from the top.
    #[serde(default)]
    pub tiers: Vec<State>,
    /// All settings, fixed ones too.
    #[serde(default)]
    pub settings: Vec<Setting>,
    /// Counts and measurements.
    #[serde(default)]
    pub metrics: Vec<Reading>,
    /// The lines for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<Line>,
}

impl Registry {
    /// Opens the pool that `options` name, with the tiers before it. Recovers the pool.
    ///
    /// # Errors
    /// The region holds no pool, or a damaged one; the backing is missing or unusable; or the DRAM
    /// tier cannot be made.
    pub fn open(&self, options: StackOptions) -> Result<Stack> {
        let StackOptions { dram, force, atomic_flush, keep_dirty, .. } = options;
        let (region, url) = (Arc::clone(&options.region), options.backing.clone());
        let engine = self.identify_to_open(&region)?;
        if atomic_flush {
            expect_atomic_flush(engine, dram, &region)?;
        }
        if keep_dirty && !engine.traits().keeps_dirty {
            return Err(StackError::KeepsNothing { pool: name(&region), engine: engine.name() });
        }
        if options.needs_modes && !engine.traits().has_modes {
            return Err(StackError::NoModes { pool: name(&region), engine: engine.name() });
        }
        if url.is_some() && !engine.traits().needs_backing {
            return Err(StackError::NoBackingNeeded { pool: name(&region), engine: engine.name() });
        }
        let failed = |source| StackError::Engine { pool: name(&region), source };
        let header = engine.describe(&region).map_err(failed)?;
        let behind = url.as_ref().map(|url| self.open_behind(url, &options, &region));
        let behind = behind.transpose()?;
        // After the backing: if that cannot be used, the pool's file stays as it is.
        expect_space(&region).map_err(failed)?;
        let (backing, behind) =
            behind.map_or((None, None), |(it, behind)| (Some(it), Some(behind)));
        let device = backing.as_ref().map(|backing| Arc::clone(&backing.device));
        let (region_too, salvage) = (Arc::clone(&region), options.salvage);
        let opening = Opening { region: region_too, backing, force, salvage, atomic_flush };
        let opened = engine.open(opening).map_err(failed)?;
        let pmem = opened.tier;
        let top = dram::open(dram.policy, dram.bytes, delayed(&pmem, options.delays));
        let top = top.map_err(|source| StackError::Dram { spec: dram, source })?;
        // Last, so that a stack that cannot be opened leaves no mark.
        if let Some(behind) = &behind {
            behind.remember(&region)?;
        }
        let geometry = top.geometry();
        if let (Some(behind), Some(notices)) = (&behind, options.notices) {
            behind.tell_of_table(geometry.block_bytes, &notices);
        }
        let description = PoolDescription {
            size_bytes: geometry.size_bytes(),
            block_bytes: Some(geometry.block_bytes),
            blocks: Some(geometry.blocks),
            backing: url.as_ref().map(ToString::to_string),
            recovered: Some(opened.recovered),
            read_only: geometry.read_only,
            dram: (dram.policy != Policy::None).then(|| top.summary()),
            ..PoolDescription::new(engine, &region, header)
        };
        let fixed = fixed_settings(engine, dram, url.as_ref());
        let (tiers, backing, baseline) = (vec![top, pmem], device, Mutex::default());
        let setting = Mutex::default();
        Ok(Stack {
            tiers,
            backing,
            description,
            region,
            fixed,
            behind,
            keep_dirty,
            baseline,
            setting,
        })
    }

    /// Opens the backing `url` of the pool in `region`. Returns the backing for the engine, and the
    /// stack's own part.
    fn open_behind(
        &self,
        url: &BackingUrl,
        options: &StackOptions,
        region: &Arc<Region>,
    ) -> Result<(Backing, Behind)> {
        let pool_failed = |source| StackError::Pool { pool: name(region), source };
        let superblock = Superblock::read(region).map_err(pool_failed)?.superblock;
        let block_bytes = superblock.state.map(|state| state.block_bytes);
        let block_bytes = block_bytes.filter(|it| is_block_bytes(*it));
        let open = url.open(&backing::Opening { pool: &options.path, block_bytes })?;
        let OpenBacking { device, observer, name: path, holds, guard, .. } = open;
        let claim = guard.map(|lock| Arc::new(Claim::new(lock)));
        let seen = BackingState { block_bytes: device.geometry().block_bytes, ..open.seen };
        let called = called(&path, &observer);
        let since = claim.as_deref().map(|claim| changed_since(claim, url, &superblock, options));
        let since = since.transpose()?.flatten();
        let judged = judge_translated(&superblock, &seen, &called, &observer);
        let Judgement { identity, doubt } = judged;
        let bound = BackingIdentity { identity, ..called };
        let witness = Witness::new(Arc::clone(region), observer, &bound, seen);
        let watched: Arc<dyn BlockDevice> = match &options.notices {
            Some(notices) => Arc::new(Watch::new(device, "backing", Arc::clone(notices))),
            None => device,
        };
        let device: Arc<dyn BlockDevice> =
            Arc::new(Witnessed { inner: watched, witness: Arc::clone(&witness) });
        let holds = holds.map(|found| self.words(found));
        let backing = Backing { device, identity, name: path, holds, doubt: since.or(doubt) };
        let thread = witness.start().map_err(StackError::Thread)?;
        let table_sector_bytes = open.table_sector_bytes;
        Ok((backing, Behind { claim, witness, table_sector_bytes, thread }))
    }
}

/// The stack's part of a backing, beside the device.
pub(super) struct Behind {
    /// Keeps other programs away from the backing, where that is possible.
    pub(super) claim: Option<Arc<Claim>>,
    pub(super) witness: Arc<Witness>,
    table_sector_bytes: Option<u32>,
    /// The thread that looks at the backing when it is at rest.
    pub(super) thread: Workers,
}

impl Behind {
    /// Notes the backing in the pool's superblock, and the pool in the mark of the backing.
    fn remember(&self, region: &Region) -> Result<()> {
        let failed = |source| StackError::Pool { pool: name(region), source };
        let pool = Superblock::read(region).map_err(failed)?.superblock.uuid;
        let mark_before = self.claim.as_ref().map_or(0, |claim| claim.number(pool));
        // The superblock first: the number of a mark is never ahead of its pool's.
        let superblock = self.witness.bind(mark_before).map_err(failed)?;
        if !self.claim.as_ref().is_some_and(|claim| claim.take(&superblock)) {
            self.witness.has_no_mark();
        }
        self.witness.note_rest();
        Ok(())
    }

    /// Sends a notice if clients of a device with blocks of `block_bytes` bytes cannot find the
    /// partition table on the backing.
    fn tell_of_table(&self, block_bytes: u32, notices: &Notices) {
        let Some(sector) = self.table_sector_bytes.filter(|it| *it != block_bytes) else { return };
        notices(&format!(
            "the partition table of the backing counts in sectors of {sector} bytes, and the pool \
             serves blocks of {block_bytes}: clients may not find its partitions; a pool that is \
             created with --block-size {sector} serves them"
        ));
    }
}

/// Allocates the space of a sparse pool. Without it, stores fail later, when the file system is
/// full.
fn expect_space(region: &Region) -> std::result::Result<(), EngineError> {
    region.fill_holes().map_err(|error| {
        EngineError::Refused(format!(
            "the pool's file is sparse, and has no space for all of its {}, so that writes would \
             fail: {}; free space on its file system, or serve the pool --read-only",
            Size { bytes: region.len_bytes() },
            DeviceError::from(error).with_causes()
        ))
    })
}

/// Judges the backing that `observer` looks at for the pool with `superblock`, which an earlier
/// release may have written with another identity of the same backing.
fn judge_translated(
    superblock: &Superblock,
    seen: &BackingState,
    called: &BackingIdentity,
    observer: &Observer,
) -> Judgement {
    let bound = superblock.backing.as_ref();
    let kept = superblock.state.map(|kept| observer.translate(kept));
    let is_former = |it: &BackingIdentity| observer.is_former(it.identity, seen.size_bytes);
    // An older release stored no state, and its identity of the backing alone.
    let said = bound.filter(|it| kept.is_none() && is_former(it)).map(|it| it.identity);
    let seen = BackingState { said: said.unwrap_or(seen.said), ..*seen };
    judge(bound, kept.as_ref(), &seen, called)
}

fn expect_atomic_flush(engine: &dyn Engine, dram: TierSpec, region: &Region) -> Result<()> {
    if !engine.traits().has_atomic_flush {
        return Err(StackError::NoAtomicFlush { pool: name(region), engine: engine.name() });
    }
    match dram.policy {
        Policy::None => Ok(()),
        _ => Err(StackError::NotBelowDram),
    }
}

/// Returns the backing at `path`, which `observer` looks at, in the form of a superblock. A backing
/// without an identity gets one from its name, which decides nothing.
fn called(path: &[u8], observer: &Observer) -> BackingIdentity {
    let identity = observer.identity().unwrap_or_else(|| by_name(path));
    BackingIdentity::new(identity, &String::from_utf8_lossy(path))
}

/// Returns why the mark of the backing `url` shows another state than the pool with `superblock`
/// left.
///
/// # Errors
/// Writes that matter may be lost, and `options` do not force the use of the backing.
fn changed_since(
    claim: &Claim,
    url: &BackingUrl,
    superblock: &Superblock,
    options: &StackOptions,
) -> Result<Option<String>> {
    let other = || Some(format!("another pool was before the backing {url} since"));
    let refusal = match claim.since(superblock) {
        Since::Unchanged => return Ok(None),
        Since::Changed => return Ok(other()),
        Since::Restored => {
            return Ok(Some(format!(
                "the backing {url} has not the mark that the pool left: it is another file, or an \
                 older state of it was restored"
            )));
        }
        Since::Pending(_) | Since::Later { .. } if options.force => return Ok(other()),
        Since::Pending(other) => format!(
            "the backing {url} was behind the pool {other} last, which may hold writes that the \
             backing lacks: flush that pool, or --force goes on without them"
        ),
        Since::Later { sequence } => format!(
            "the backing {url} was behind this pool in a later state, number {sequence}, and this \
             one has number {}: use the pool itself instead of its copy, or --force goes on with \
             this one",
            superblock.sequence
        ),
    };
    let pool = name(&options.region);
    Err(StackError::Engine { pool, source: EngineError::Refused(refusal) })
}

fn delayed(pmem: &Arc<dyn Tier>, delays: Option<Delays>) -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = Arc::<dyn Tier>::clone(pmem);
    match delays {
        Some(delays) => Arc::new(Delay::new(device, delays)),
        None => device,
    }
}

fn fixed_settings(
    engine: &dyn Engine,
    dram: TierSpec,
    backing: Option<&BackingUrl>,
) -> Vec<Setting> {
    let fixed = |key: &str, value: String, help: &str, reason: &str| Setting {
        key: key.into(),
        value,
        help: help.into(),
        fixed: Some(reason.into()),
    };
    let at_start =
        "it is chosen when the pool is served; stop the server and start it with another";
    let at_creation =
        "it is chosen when the pool is created; create another pool and copy the data";
    let mut settings = vec![
        fixed("engine", engine.name().into(), "the engine of the pool", at_creation),
        fixed("dram", dram.to_string(), "the DRAM tier", at_start),
    ];
    settings.extend(backing.map(|it| fixed("backing", it.to_string(), "the backing", at_start)));
    settings
}

impl Stack {
    /// Returns the device for clients.
    pub fn top(&self) -> Arc<dyn BlockDevice> {
        Arc::<dyn Tier>::clone(&self.tiers[0])
    }

    /// Lets reads of the block at `offset` fail until it is written; durable on return.
    ///
    /// # Errors
    /// Fails as [`Tier::set_error`] does, and with a DRAM tier, which may hold a newer write.
    pub fn set_error(&self, offset: u64) -> crate::device::Result<()> {
        if self.description.dram.is_some() {
            let message = "a block below a DRAM tier cannot be marked: open the pool without one";
            return Err(DeviceError::new(DeviceErrorKind::Unsupported, message));
        }
        self.lowest_and_upper().0.set_error(offset)
    }

    /// Returns the file of the backing, if it is a file or a disk.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn backing_file(&self) -> std::io::Result<Option<std::fs::File>> {
        let claim = self.behind.as_ref().and_then(|behind| behind.claim.as_ref());
        claim.map(|claim| claim.file().try_clone()).transpose()
    }

    /// Returns the description of the stack.
    pub fn description(&self) -> &PoolDescription {
        &self.description
    }

    /// Returns the description of the stack with the present states of its tiers, for people.
    pub fn lines(&self) -> Vec<Line> {
        let states: Vec<State> = self.tiers.iter().map(|tier| tier.state()).collect();
        up_to_date(self.description.lines(), &states)
    }

    /// Returns the tiers' own lines for people, without the lines of the description.
    pub fn tier_lines(&self) -> Vec<Line> {
        let described = self.description.lines();
        let lines = self.tiers.iter().flat_map(|tier| tier.state().lines);
        lines.filter(|line| !described.contains(line)).collect()
    }

    /// Adds the metrics of all tiers since the opening of the stack to `collector`, labelled with
    /// level and name.
    pub fn metrics(&self, collector: &mut Collector) {
        for tier in &self.tiers {
            let state = tier.state();
            collector.labelled("level", state.level.name(), |collector| {
                collector.labelled("tier", state.name, |collector| {
                    collector.add(&PENDING_BYTES, state.pending_bytes);
                    tier.metrics(collector);
                });
            });
        }
    }

    /// Returns all settings, fixed ones too.
    pub fn settings(&self) -> Vec<Setting> {
        let of_tiers = self.tiers.iter().flat_map(|tier| tier.settings());
        of_tiers.chain(self.fixed.iter().cloned()).collect()
    }

    /// Changes `settings`, keys with values, in this order: all or none. No other request changes
    /// settings meanwhile.
    ///
    /// # Errors
    /// [`SettingError`]: nothing has changed, except the settings that [`SettingError::Kept`]
    /// names.
    pub fn set(&self, settings: &[(&str, &str)]) -> std::result::Result<(), SettingError> {
        let _others_wait = self.setting.lock();
        let before = self.settings();
        let owners = settings.iter().map(|(key, _)| self.owner_of(key));
        let owners = owners.collect::<std::result::Result<Vec<_>, _>>()?;
        for tier in &self.tiers {
            let own = settings.iter().zip(&owners).filter(|(_, owner)| Arc::ptr_eq(owner, tier));
            let own: Vec<_> = own.map(|(setting, _)| *setting).collect();
            if !own.is_empty() {
                tier.check(&own)?;
            }
        }
        for (done, ((key, value), tier)) in settings.iter().zip(&owners).enumerate() {
            if let Err(error) = tier.set(key, value) {
                return Err(self.take_back(&settings[..done], &before, error));
            }
        }
        Ok(())
    }

    /// Returns the tier with the setting `key`.
    fn owner_of(&self, key: &str) -> std::result::Result<&Arc<dyn Tier>, SettingError> {
        let has_it = |tier: &&Arc<dyn Tier>| tier.settings().iter().any(|it| it.key == key);
        let owner = self.tiers.iter().find(has_it);
        owner.ok_or_else(|| SettingError::of(key, &self.settings()))
    }

    /// Restores the values that `changed` had `before`. Returns the error for the failure `error`
    /// of a later setting.
    fn take_back(
        &self,
        changed: &[(&str, &str)],
        before: &[Setting],
        error: SettingError,
    ) -> SettingError {
        let restore = |key: &str| {
            let value = &before.iter().find(|it| it.key == key)?.value;
            self.owner_of(key).ok()?.set(key, value).ok()
        };
        let kept = changed.iter().rev().filter(|(key, _)| restore(key).is_none());
        let kept: Vec<_> = kept.map(|(key, _)| (*key).to_owned()).collect();
        if kept.is_empty() { error } else { SettingError::Kept { source: Box::new(error), kept } }
    }

    /// Subtracts the counts at the last [reset](Self::reset) from `readings` of this stack or of
    /// its front end.
    pub fn since_reset(&self, readings: Vec<Reading>) -> Vec<Reading> {
        self.baseline.lock().since(readings)
    }

    /// Returns the description and the counts since the last reset, with the metrics that
    /// `front_end` adds.
    pub fn stat(&self, front_end: impl FnOnce(&mut Collector)) -> Stat {
        self.stat_with(self.since_reset(self.all_readings(front_end)))
    }

    /// Returns the same as [`stat`](Self::stat), and lets all counters and histograms, the front
    /// end's too, begin with 0 again. Gauges stay.
    pub fn reset(&self, front_end: impl FnOnce(&mut Collector)) -> Stat {
        let mut baseline = self.baseline.lock();
        let readings = self.all_readings(front_end);
        let since = baseline.since(readings.clone());
        *baseline = Baseline::of(readings);
        drop(baseline);
        self.stat_with(since)
    }

    fn all_readings(&self, front_end: impl FnOnce(&mut Collector)) -> Vec<Reading> {
        let mut collector = Collector::default();
        front_end(&mut collector);
        self.metrics(&mut collector);
        collector.finish()
    }

    fn stat_with(&self, metrics: Vec<Reading>) -> Stat {
        let states: Vec<State> = self.tiers.iter().map(|tier| tier.state()).collect();
        let settings = self.settings();
        let changeable = settings.iter().filter(|it| it.fixed.is_none());
        let changeable = changeable.map(|Setting { key, value, help, .. }| {
            line("setting", format_args!("{key}={value}: {help}"))
        });
        let pool_bytes = self.region.len_bytes();
        let description = PoolDescription { pool_bytes, ..self.description.clone() };
        let mut stat = Stat::of(&description, true);
        stat.bring_up_to_date(&states);
        stat.lines.extend(changeable);
        Stat {
            tiers: states.into_iter().map(|it| State { lines: Vec::new(), ..it }).collect(),
            settings,
            metrics,
            ..stat
        }
    }
}

impl Stat {
    /// Returns a `Stat` with the description alone.
    pub fn of(description: &PoolDescription, live: bool) -> Self {
        let object = match serde_json::to_value(description) {
            Ok(Value::Object(object)) => object,
            // All keys are texts and no value can fail, so that nothing is lost here.
            _ => Map::new(),
        };
        let lines = description.lines();
        let (tiers, settings, metrics) = Default::default();
        Self { live, description: object, tiers, settings, metrics, lines }
    }

    /// Replaces the pool's facts at the opening by the present facts of the tiers: the lines with
    /// equal labels, and the values under equal keys.
    fn bring_up_to_date(&mut self, states: &[State]) {
        self.lines = up_to_date(std::mem::take(&mut self.lines), states);
        for state in states {
            let described = self.description.get_mut(&*state.name).and_then(Value::as_object_mut);
            for (key, at_opening) in described.into_iter().flatten() {
                if let Some(now) = state.details.get(key) {
                    at_opening.clone_from(now);
                }
            }
        }
    }
}

/// Replaces in `lines` of a description each line whose label a tier has too by the tier's lines.
fn up_to_date(mut lines: Vec<Line>, states: &[State]) -> Vec<Line> {
    let said: Vec<&Line> = states.iter().flat_map(|state| &state.lines).collect();
    lines.retain(|(label, _)| said.iter().all(|(of_tier, _)| of_tier != label));
    lines.extend(said.into_iter().cloned());
    lines
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use uuid::Uuid;

    use super::*;
    use crate::device::memory::MemoryDevice;
    use crate::pmem::RegionOptions;
    use crate::tier::{EngineCode, Options};

    /// A copy of a pool may have holes. Stores there would fail when the file system is full.
    #[test]
    fn a_sparse_pool_has_all_its_space_once_it_is_open() {
        const POOL_BYTES: u64 = 32 << 20;
        let registry = &super::super::REGISTRY;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let create_bytes = Some(POOL_BYTES);
        let sparse = RegionOptions { sparse: true, create_bytes, ..RegionOptions::default() };
        let region = Arc::new(Region::open(&path, &sparse).unwrap());
        let engine = registry.engine("btt").unwrap();
        registry.plan(engine, &Options::new()).unwrap().create(&region).unwrap();
        let allocated = || path.metadata().unwrap().blocks() * 512;
        assert!(allocated() < POOL_BYTES, "the pool is sparse");
        drop(registry.open(StackOptions::alone(region, path.clone())).unwrap());
        assert!(allocated() >= POOL_BYTES);
    }

    /// Release 0.1 had the size of an export in its identity.
    #[test]
    fn a_pool_of_an_earlier_release_knows_its_export() {
        let device = Arc::new(MemoryDevice::new(4096, 256).unwrap());
        let observer =
            Observer::of_device(7, device).formerly(Box::new(|size_bytes| size_bytes + 5));
        let seen = observer.observe_device().unwrap();
        let called = BackingIdentity::new(7, "nbd://host/x");
        let region = Region::anonymous(1 << 20).unwrap();
        let plain = Superblock::plan(&region, EngineCode(9), Uuid::nil(), 4096).unwrap();
        let bound = BackingIdentity::new((1 << 20) + 5, "nbd://host/x");
        let state = |said| Some(BackingState { said, ..seen });
        for (state, is_known) in
            [(state((1 << 20) + 5), true), (state(7), true), (None, true), (state(8), false)]
        {
            let superblock = Superblock { backing: Some(bound), state, ..plain };
            let judged = judge_translated(&superblock, &seen, &called, &observer);
            let is_same = judged == Judgement { identity: bound.identity, doubt: None };
            assert_eq!(is_same, is_known, "{state:?}");
        }
        let smaller = BackingState { said: (1 << 19) + 5, size_bytes: 1 << 19, ..seen };
        let superblock = Superblock { backing: Some(bound), state: Some(smaller), ..plain };
        let judged = judge_translated(&superblock, &seen, &called, &observer);
        assert_eq!(judged.identity, bound.identity, "it has grown");
        assert!(judged.doubt.is_some_and(|doubt| doubt.contains("size")));
    }
}
