//! The engine `cache` as the registry sees it.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::check::{check, repair_changed, summary};
use super::choices::Choices;
use super::pages::cluster::Cluster;
use super::store::header::POOL_BYTES_MIN;
use super::store::layout::PAGE_BYTES;
use super::{
    Binding, CacheDevice, CacheDeviceOptions, CacheError, CacheHeader, CacheOptions, create,
};
use crate::pmem::Region;
use crate::size::Size;
use crate::tier::engine::{BLOCK_SIZE, block_bytes_of, one_of};
use crate::tier::{
    Backing, Checked, Description, Engine, EngineCode, EngineError, Line, OnProgress, Opened,
    Opening, OptionSpec, Options, Plan, Traits, counted, line,
};

type Result<T> = std::result::Result<T, EngineError>;

/// The number of this engine in superblocks.
pub const CODE: EngineCode = EngineCode(3);

/// Neighbouring bytes of the backing that are filled and cleaned together.
const LINE_SIZE: OptionSpec = OptionSpec {
    name: "line-size",
    value_name: "BYTES",
    help: "Neighbouring bytes that a cache fills and cleans together: 4K, 8K, 16K, 32K or 64K",
};

/// The engine's name, and the abilities of its pools.
const TRAITS: Traits = Traits {
    options: &[BLOCK_SIZE, LINE_SIZE],
    code: Some(CODE),
    needs_backing: true,
    has_atomic_flush: true,
    keeps_dirty: true,
    has_modes: true,
    has_clean_pages: true,
    remembers_backing: true,
    ..Traits::of("cache", "pages before a device")
};

/// The engine's entry in the registry.
pub struct CacheEngine;

impl Engine for CacheEngine {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn plan(&self, options: &Options) -> Result<Box<dyn Plan>> {
        let block_bytes = block_bytes_of(options, &[512, 4096])?.unwrap_or(4096);
        let line = options.get(LINE_SIZE.name);
        let line = line.map(|text| one_of(LINE_SIZE.name, text, &Cluster::SIZES_BYTES));
        let defaults = CacheOptions::default();
        let line_bytes = line.transpose()?.unwrap_or(defaults.line_bytes);
        Ok(Box::new(CachePlan(CacheOptions { block_bytes, line_bytes, ..defaults })))
    }

    fn backing_of(&self, region: &Arc<Region>) -> Result<Option<String>> {
        let header = CacheHeader::read(region).map_err(EngineError::pool)?;
        Ok(header.binding.map(|binding| binding.name))
    }

    fn describe(&self, region: &Arc<Region>) -> Result<Description> {
        let header = CacheHeader::read(region).map_err(EngineError::pool)?;
        let found = summary(region, &header).map_err(EngineError::pool)?;
        let size = |slots: u64| Size { bytes: slots * PAGE_BYTES };
        let size_bytes = u64::from(header.places.slots()) * PAGE_BYTES;
        let uuid = header.superblock.uuid;
        let used = format!(
            "{} of {} in use, {} dirty",
            size(found.used_slots),
            Size { bytes: size_bytes },
            size(found.dirty_slots)
        );
        Ok(Description {
            size_bytes,
            blocks: None,
            header: json!({
                "uuid": uuid,
                "block_bytes": header.superblock.block_bytes,
                "mode": header.mode.name(),
                "slots": header.places.slots(),
                "line_bytes": header.line_bytes(),
                "granularity": granularity_of(&header),
                "settings": header.settings_by_key(),
                "backing": header.binding,
                "used_slots": found.used_slots,
                "dirty_slots": found.dirty_slots,
                "record_slots": found.record_slots,
                "free_slots": found.free_slots,
                "unfinished_slots": found.unfinished_slots,
                "uncommitted_slots": found.uncommitted_slots,
                "groups_committed": found.committed_group,
            }),
            lines: lines_of(&header, used),
        })
    }

    fn open(&self, opening: Opening) -> Result<Opened> {
        let Opening { region, backing, force, atomic_flush, .. } = opening;
        let Some(backing) = backing else {
            let refusal = "a cache pool holds pages of another device: name it by --backing";
            return Err(EngineError::Refused(refusal.into()));
        };
        if region.read_only() {
            let refusal =
                "a cache pool cannot be served --read-only: its backing may lack what it holds";
            return Err(EngineError::Refused(refusal.into()));
        }
        let device = open_device(region, backing, force, atomic_flush)?;
        let found = device.recovered();
        let mut recovered = format!(
            "{}, {} of them dirty; {} unfinished, {} not flushed",
            counted(found.pages, "page"),
            found.dirty_pages,
            found.unfinished,
            found.uncommitted
        );
        if found.forgotten > 0 {
            let pages = counted(found.forgotten, "clean page");
            recovered += &["; gave up ", &pages, ", the backing was changed since"].concat();
        }
        recovered += &doubt(found.doubtful_lanes);
        if let Some(offset) = found.first_changed_offset {
            let pages = counted(found.changed, "page");
            let offset = offset.to_string();
            let is_wrong = [" of those one bit is wrong, the first at offset ", &offset].concat();
            recovered += &["; in ", &pages, &is_wrong, ": an older version counts"].concat();
        }
        Ok(Opened { tier: Arc::new(device), recovered })
    }

    /// Compares all data with its checksums.
    fn check(&self, region: Region, repair: bool, _progress: OnProgress<'_>) -> Result<Checked> {
        let mut report = check(&region).map_err(EngineError::pool)?;
        let mut repaired = if repair { repair_headers(&region)? } else { Vec::new() };
        if repair && !report.changed_slots.is_empty() {
            let slots = repair_changed(&region, &report.changed_slots);
            repaired.push(format!("restored slot headers: {}", slots.map_err(EngineError::pool)?));
        }
        if !repaired.is_empty() {
            report = check(&region).map_err(EngineError::pool)?;
        }
        report.advise(repair);
        let mut lines = report.findings.clone();
        lines.extend(repaired);
        lines.push(format!(
            "{}, {} of them dirty; {} unfinished and {} not flushed, which recovery frees{}",
            counted(report.used_slots, "used slot"),
            report.dirty_slots,
            report.unfinished_slots,
            report.uncommitted_slots,
            doubt(report.doubtful_lanes)
        ));
        Ok(Checked { faults: report.faults, report: json!(report), lines })
    }

    fn next_command(&self, pool: &Path) -> String {
        format!("tidegate serve {} --backing FILE --nbd unix:/tmp/tidegate.sock", pool.display())
    }
}

struct CachePlan(CacheOptions);

impl Plan for CachePlan {
    fn smallest_bytes(&self) -> u64 {
        POOL_BYTES_MIN
    }

    fn create(&self, region: &Region) -> Result<()> {
        create(region, &self.0).map(drop).map_err(EngineError::pool)
    }
}

/// Returns the name of the granularity.
fn granularity_of(header: &CacheHeader) -> &'static str {
    Choices::parse(&header.settings).0.granularity()
}

fn lines_of(header: &CacheHeader, used: String) -> Vec<Line> {
    let mut lines = vec![
        line("uuid", header.superblock.uuid),
        line("cache", used),
        line("mode", header.mode),
        line("granularity", granularity_of(header)),
        line("line size", Size { bytes: header.line_bytes() }),
    ];
    if !header.settings.is_empty() {
        lines.push(line("settings", header.settings.trim_end().replace('\n', ", ")));
    }
    lines
}

/// Restores damaged copies of headers, and drops unknown settings. Returns a line for each repair.
pub(super) fn repair_headers(region: &Region) -> Result<Vec<String>> {
    let mut header = CacheHeader::read(region).map_err(EngineError::pool)?;
    let mut done = Vec::new();
    if !(header.is_whole && header.superblock_is_whole) {
        header.restore(region).map_err(EngineError::pool)?;
        done.push("restored the headers from their other copies".into());
    }
    let (choices, unknown) = Choices::parse(&header.settings);
    if !unknown.is_empty() {
        header.settings = choices.text();
        header.write(region).map_err(EngineError::pool)?;
        done.push(format!("dropped the settings {}", unknown.join(", ")));
    }
    Ok(done)
}

fn open_device(
    region: Arc<Region>,
    backing: Backing,
    force: bool,
    atomic_flush: bool,
) -> Result<CacheDevice> {
    let Backing { device, identity, name, holds, doubt } = backing;
    let name = String::from_utf8_lossy(&name).into_owned();
    let header = CacheHeader::read(&region).map_err(EngineError::pool)?;
    let is_known = header.binding.is_some_and(|binding| binding.identity == identity);
    // On a backing of this pool, a client may have written data that looks like a pool.
    if let Some(found) = holds.filter(|_| !force && !is_known) {
        return Err(EngineError::Refused(format!(
            "the backing {name} holds {found}, which writes to the cache would destroy; --force \
             uses it all the same"
        )));
    }
    let pages = device.geometry().size_bytes() / PAGE_BYTES;
    let binding = Binding { identity, name, pages };
    let options = CacheDeviceOptions {
        adopt_foreign: force,
        backing_changed: doubt.is_some(),
        atomic_flush,
        ..CacheDeviceOptions::default()
    };
    CacheDevice::open(region, device, binding, options).map_err(|error| refused(error, doubt))
}

/// Returns a remark about lanes whose last batch has data that does not match its checksum.
fn doubt(lanes: u64) -> String {
    if lanes == 0 {
        return String::new();
    }
    let lanes = counted(lanes, "lane");
    format!("; of the last writes of {lanes} nothing tells whether they were acknowledged")
}

/// Advice that gives up the dirty pages.
const GIVE_UP: &str = "`tidegate create --force` makes the pool anew without them";

/// Returns the error for users. `doubt` says how the backing changed since the pool left it.
fn refused(error: CacheError, doubt: Option<String>) -> EngineError {
    match error {
        CacheError::OtherBacking { .. } => {
            let why = doubt.map(|doubt| format!("; {doubt}")).unwrap_or_default();
            EngineError::Refused(format!(
                "{error}{why}; --force writes the dirty pages to this one, {GIVE_UP}"
            ))
        }
        CacheError::ChangedBacking { dirty } => {
            let why = doubt.unwrap_or_else(|| error.to_string());
            EngineError::Refused(format!(
                "the cache holds {dirty} dirty pages, and {why}; --force writes them over it, \
                 {GIVE_UP}"
            ))
        }
        CacheError::NotAtomic { mode } => EngineError::Refused(format!(
            "--atomic-flush needs the mode wb or wo, and the pool has {mode}: serve it without \
             --atomic-flush and with --mode wb once"
        )),
        error => EngineError::pool(error),
    }
}
