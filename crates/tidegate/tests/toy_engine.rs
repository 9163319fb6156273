//! An engine made outside the core, as docs/engines.md describes it: nothing but its own file
//! and the list of the registry knows it, and every command would find it.
//!
//! The toy keeps blocks in place, like `raw`, and takes one option of its own and one setting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use tidegate::btt::BttEngine;
use tidegate::device::{
    BlockDevice, BlockDeviceExt, DeviceError, DeviceErrorKind, Geometry, Operation, Result,
    WriteFlags,
};
use tidegate::dram::{Policy, TierSpec};
use tidegate::pmem::Region;
use tidegate::pool::{self, Superblock};
use tidegate::raw::RawEngine;
use tidegate::stack::{REGISTRY, Registry, Stack, StackError, StackOptions, Stat};
use tidegate::stats::{Collector, Metric, Unit, Value};
use tidegate::tier::{
    Checked, Description, Engine, EngineCode, EngineError, Level, OnProgress, Opened, Opening,
    OptionSpec, Options, Plan, Progress, Setting, SettingError, State, Tier, Traits, line,
};
use uuid::Uuid;

static WITH_TOY: Registry = Registry::new(&[&BttEngine, &RawEngine, &ToyEngine]);

const CODE: EngineCode = EngineCode(0x7079);
const BLOCK_BYTES: u32 = 4096;
const COLOUR: OptionSpec =
    OptionSpec { name: "colour", value_name: "NAME", help: "Colour of the toy: red or blue" };
const FAILING: Metric = Metric::gauge("toy_failing", Unit::Count, "1 where the toy fails writes");

const TRAITS: Traits =
    Traits { options: &[COLOUR], code: Some(CODE), ..Traits::of("toy", "a toy") };

struct ToyEngine;

impl Engine for ToyEngine {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn plan(&self, options: &Options) -> std::result::Result<Box<dyn Plan>, EngineError> {
        match options.get(COLOUR.name).map_or("red", String::as_str) {
            colour @ ("red" | "blue") => Ok(Box::new(ToyPlan { is_blue: colour == "blue" })),
            other => Err(EngineError::Usage(format!("--colour is {other}; expected red or blue"))),
        }
    }

    fn describe(&self, region: &Arc<Region>) -> std::result::Result<Description, EngineError> {
        let superblock = Superblock::read(region).map_err(EngineError::pool)?.superblock;
        let colour = if superblock.compatible == 1 { "blue" } else { "red" };
        Ok(Description {
            size_bytes: superblock.data_bytes,
            blocks: Some((BLOCK_BYTES, superblock.data_bytes / u64::from(BLOCK_BYTES))),
            header: json!({ "colour": colour }),
            lines: vec![line("colour", colour)],
        })
    }

    fn open(&self, opening: Opening) -> std::result::Result<Opened, EngineError> {
        let superblock = Superblock::read(&opening.region).map_err(EngineError::pool)?.superblock;
        let toy = Toy {
            region: opening.region,
            superblock,
            fails: AtomicU64::new(0),
            unreported: AtomicU64::new(0),
        };
        Ok(Opened { tier: Arc::new(toy), recovered: "nothing to recover".into() })
    }

    fn check(
        &self,
        region: Region,
        _repair: bool,
        progress: OnProgress<'_>,
    ) -> std::result::Result<Checked, EngineError> {
        let lines = Superblock::read(&region).map_err(EngineError::pool)?.findings();
        progress(Progress { done: 1, total: 1 });
        Ok(Checked { faults: lines.len() as u64, report: json!({ "findings": lines }), lines })
    }
}

struct ToyPlan {
    is_blue: bool,
}

impl Plan for ToyPlan {
    fn smallest_bytes(&self) -> u64 {
        16 << 10
    }

    fn largest_fit_bytes(&self, bytes: u64) -> u64 {
        bytes - bytes % 4096
    }

    fn create(&self, region: &Region) -> std::result::Result<(), EngineError> {
        let superblock = Superblock::plan(region, CODE, Uuid::nil(), BLOCK_BYTES);
        let mut superblock = superblock.map_err(EngineError::pool)?;
        superblock.compatible = self.is_blue.into();
        pool::erase(region).map_err(EngineError::pool)?;
        superblock.write(region).map_err(EngineError::pool)
    }
}

struct Toy {
    region: Arc<Region>,
    superblock: Superblock,
    /// Not 0: writes fail.
    fails: AtomicU64,
    /// Failed writes that no flush has reported.
    unreported: AtomicU64,
}

impl Toy {
    fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        if self.fails.load(Ordering::Relaxed) != 0 {
            self.unreported.fetch_add(1, Ordering::Relaxed);
            return Err(DeviceError::new(DeviceErrorKind::Io, "the toy is broken"));
        }
        self.region.write_streaming(offset, data)?;
        Ok(self.region.fence()?)
    }
}

impl BlockDevice for Toy {
    fn geometry(&self) -> Geometry {
        let blocks = self.superblock.data_bytes / u64::from(BLOCK_BYTES);
        tidegate::device::null::NullDevice::new(BLOCK_BYTES, blocks).unwrap().geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry().check_operation(operation)?;
        let base = self.superblock.data_offset;
        match *operation {
            Operation::Read { offset, ref mut buf } => Ok(self.region.read(base + offset, buf)?),
            Operation::Write { offset, data, .. } => self.write(base + offset, data),
            Operation::Flush => match self.unreported.swap(0, Ordering::Relaxed) {
                0 => Ok(()),
                _ => Err(DeviceError::new(DeviceErrorKind::Io, "the toy was broken")),
            },
            Operation::Discard { .. } => Ok(()),
            Operation::WriteZeroes { offset, len, .. } => {
                self.write(base + offset, &vec![0; usize::try_from(len).unwrap()])
            }
            Operation::Status { .. } => {
                operation.report_data();
                Ok(())
            }
        }
    }
}

impl Tier for Toy {
    fn state(&self) -> State {
        State {
            level: Level::Pmem,
            name: "toy".into(),
            pending_bytes: 0,
            lines: vec![line("toy", "at your service")],
            details: json!({}),
        }
    }

    fn drain(&self) -> Result<()> {
        Ok(())
    }

    fn settings(&self) -> Vec<Setting> {
        let value = self.fails.load(Ordering::Relaxed).to_string();
        let help = "whether writes fail: 0 or 1".into();
        vec![Setting { key: "fails".into(), value, help, fixed: None }]
    }

    fn set(&self, key: &str, value: &str) -> std::result::Result<(), SettingError> {
        if key != "fails" {
            return Err(SettingError::of(key, &self.settings()));
        }
        let Some(fails) = value.parse().ok().filter(|fails| *fails <= 1) else {
            let (key, value) = (key.into(), value.into());
            return Err(SettingError::Value { key, value, expected: "0 or 1".into() });
        };
        self.fails.store(fails, Ordering::Relaxed);
        Ok(())
    }

    fn metrics(&self, collector: &mut Collector) {
        collector.add(&FAILING, self.fails.load(Ordering::Relaxed));
    }
}

const NO_DRAM: TierSpec = TierSpec { policy: Policy::None, bytes: 0 };

fn created(options: &[(&'static str, &str)]) -> Region {
    let region = Region::anonymous(1 << 20).unwrap();
    let options: Options = options.iter().map(|(name, text)| (*name, (*text).into())).collect();
    let plan = WITH_TOY.plan(WITH_TOY.engine("toy").unwrap(), &options).unwrap();
    assert!(plan.smallest_bytes() <= region.len_bytes());
    plan.create(&region).unwrap();
    region
}

fn opened(dram: TierSpec) -> Stack {
    WITH_TOY.open(alone(&Arc::new(created(&[])), dram)).unwrap()
}

/// The pool in `region` before the device `backing`.
fn behind(region: &Arc<Region>, backing: &str) -> StackOptions {
    StackOptions { backing: Some(backing.parse().unwrap()), ..alone(region, NO_DRAM) }
}

/// The pool in `region` without a backing.
fn alone(region: &Arc<Region>, dram: TierSpec) -> StackOptions {
    StackOptions { dram, ..StackOptions::alone(Arc::clone(region), region.name().to_owned()) }
}

#[test]
fn a_toy_pool_is_created_identified_described_and_checked() {
    let region = created(&[("colour", "blue")]);
    assert_eq!(WITH_TOY.identify(&region).unwrap().name(), "toy");
    let region = Arc::new(region);
    let description = WITH_TOY.describe(&region, NO_DRAM).unwrap();
    let json = serde_json::to_value(&description).unwrap();
    assert_eq!((&json["engine"], &json["toy"]["colour"]), (&"toy".into(), &"blue".into()));
    assert_eq!((&json["blocks"], &json["size_bytes"]), (&253.into(), &(253 * 4096).into()));
    assert!(description.lines().contains(&line("colour", "blue")));
    region.write(500, &[1]).unwrap();
    let region = Arc::into_inner(region).unwrap();
    let (engine, checked) = WITH_TOY.check(region, false, &mut |_| ()).unwrap();
    assert_eq!((engine.name(), checked.faults), ("toy", 1));
}

#[test]
fn an_engine_that_the_registry_does_not_have_is_no_other_engine() {
    let region = created(&[]);
    for error in [
        REGISTRY.identify(&region).unwrap_err(),
        REGISTRY.check(created(&[]), true, &mut |_| ()).unwrap_err(),
    ] {
        assert!(matches!(error, StackError::UnknownCode { code: CODE, .. }), "{error}");
        assert!(error.to_string().contains("28793"), "{error}");
    }
    assert!(matches!(REGISTRY.engine("toy"), Err(StackError::UnknownEngine { .. })));
}

#[test]
fn options_of_one_engine_are_no_options_of_another() {
    let options = |name: &'static str, text: &str| Options::from([(name, text.to_owned())]);
    let plan = |engine, options| {
        let plan = WITH_TOY.plan(WITH_TOY.engine(engine).unwrap(), &options);
        plan.err().map(|error| (error.is_usage(), error.to_string()))
    };
    assert_eq!(plan("toy", options("colour", "red")), None);
    let (is_usage, error) = plan("toy", options("colour", "green")).unwrap();
    assert!(is_usage && error.contains("red or blue"), "{error}");
    let (is_usage, error) = plan("raw", options("colour", "red")).unwrap();
    assert!(is_usage && error.contains("an option of toy"), "{error}");
    let (is_usage, error) = plan("toy", options("block-size", "512")).unwrap();
    assert!(is_usage && error.contains("btt, raw"), "{error}");
}

#[test]
fn a_stack_over_the_toy_is_served_measured_and_set() {
    let stack = opened("transit:64K".parse().unwrap());
    stack.top().write(4096, &[7; 4096], WriteFlags { fua: true }).unwrap();
    let mut block = [0; 4096];
    stack.top().read(4096, &mut block).unwrap();
    assert_eq!(block, [7; 4096]);
    let stat = stack.stat(|collector| collector.add(&FAILING, 5));
    let levels: Vec<_> = stat.tiers.iter().map(|it| (it.level, it.name.as_str())).collect();
    assert_eq!(levels, [(Level::Dram, "transit"), (Level::Pmem, "toy")]);
    let toy = stat.metrics.iter().filter(|it| it.metric.name == "toy_failing");
    let read: Vec<_> = toy.map(|it| (it.value.clone(), it.labels.len())).collect();
    assert_eq!(read, [(Value::Whole(5), 0), (Value::Whole(0), 2)]);
    let json = serde_json::to_string(&stat).unwrap();
    assert_eq!(serde_json::from_str::<Stat>(&json).unwrap(), stat);

    stack.set(&[("fails", "1")]).unwrap();
    let value = |key: &str| stack.settings().into_iter().find(|it| it.key == key).unwrap().value;
    assert_eq!((value("fails"), value("engine")), ("1".into(), "toy".into()));
    assert!(matches!(stack.set(&[("fails", "2")]), Err(SettingError::Value { .. })));
    assert!(matches!(stack.set(&[("dram", "none")]), Err(SettingError::Fixed { .. })));
    assert!(matches!(stack.set(&[("volume", "11")]), Err(SettingError::Unknown { .. })));
    assert_eq!(value("fails"), "1");
    stack.drain().unwrap();
}

#[test]
fn data_that_cannot_be_written_back_at_the_end_is_an_error() {
    let stack = opened("transit-no-eager:1M".parse().unwrap());
    stack.set(&[("fails", "1")]).unwrap();
    stack.top().write(0, &[7; 4096], WriteFlags::default()).unwrap();
    let error = stack.drain().unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("4096 bytes in the transit-no-eager tier of"), "{text}");
    assert!(text.ends_with("cannot be written back: lost"), "{text}");
    stack.set(&[("fails", "0")]).unwrap();
    stack.drain().unwrap();
}

/// A flush below reports what failed once; nothing is left that could be lost.
#[test]
fn a_failure_that_is_over_is_no_loss_at_the_end() {
    for dram in ["none", "transit:64K"] {
        let stack = opened(dram.parse().unwrap());
        stack.set(&[("fails", "1")]).unwrap();
        let result = stack.top().write(0, &[7; 4096], WriteFlags { fua: true });
        assert!(result.is_err(), "{dram}");
        stack.set(&[("fails", "0")]).unwrap();
        stack.drain().unwrap();
    }
}

#[test]
fn a_backing_is_refused_where_none_is_needed() {
    let region = Arc::new(created(&[]));
    let error = WITH_TOY.open(behind(&region, "null:1M")).err().unwrap();
    assert!(matches!(error, StackError::NoBackingNeeded { engine: "toy", .. }), "{error}");
}

#[test]
fn the_backing_of_a_log_is_kept_in_the_header_of_its_pool() {
    let region = Region::anonymous(4 << 20).unwrap();
    let engine = REGISTRY.engine("log").unwrap();
    REGISTRY.plan(engine, &Options::new()).unwrap().create(&region).unwrap();
    let region = Arc::new(region);
    let open = |backing: &str| REGISTRY.open(behind(&region, backing));
    let kept = || Superblock::read(&region).unwrap().superblock.backing;
    assert_eq!(kept(), None);
    let stack = open("null:16M").unwrap();
    assert_eq!(stack.description().size_bytes, 16 << 20);
    let first = kept().unwrap();
    assert_eq!(first.name.as_str(), "null:16M");
    assert_eq!(REGISTRY.describe(&region, NO_DRAM).unwrap().backing.as_deref(), Some("null:16M"));

    stack.set(&[("clean-from-pct", "25")]).unwrap();
    let setting = stack.settings().into_iter().find(|it| it.key == "clean-from-pct").unwrap();
    assert_eq!(setting.value, "25");
    assert!(matches!(stack.set(&[("clean-from-pct", "0")]), Err(SettingError::Value { .. })));
    stack.drain().unwrap();
    drop(stack);

    drop(open("null:8M").unwrap());
    let second = kept().unwrap();
    assert!(second.identity != first.identity && second.name.as_str() == "null:8M");
    assert!(Superblock::read(&region).unwrap().is_whole());
}
