//! The engine `log` of the registry: a log before a device, or before the files of a program.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use super::check::{Report, check_records};
use super::device::{
    Binding, LogDevice, LogDeviceError, LogDeviceOptions, expect_fit, has_records_of,
};
use super::recover::plan_pool;
use super::{LogError, LogOptions, LogPool, NO_BOOT, RING_BYTES_MIN, Scanner, create};
use crate::log::pool::layout::{CODE, RING_OFFSET};
use crate::log::pool::positions::PositionFault;
use crate::pmem::Region;
use crate::pool::Superblock;
use crate::size::Size;
use crate::tier::{
    Backing, Checked, Description, Engine, EngineError, Line, OnProgress, Opened, Opening, Options,
    Plan, Traits, counted, line,
};

type Result<T> = std::result::Result<T, EngineError>;

const PAGE_BYTES: u64 = 4096;
/// Three pages of superblocks, the log's pages before its ring, and the smallest ring.
const POOL_BYTES_MIN: u64 = 3 * PAGE_BYTES + RING_OFFSET + RING_BYTES_MIN;

/// The engine's name and abilities.
const TRAITS: Traits = Traits {
    code: Some(CODE),
    needs_backing: true,
    keeps_dirty: true,
    keeps_files: true,
    ..Traits::of("log", "before files or a device")
};

/// The registry's entry.
pub struct LogEngine;

impl Engine for LogEngine {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn plan(&self, _options: &Options) -> Result<Box<dyn Plan>> {
        Ok(Box::new(LogPlan))
    }

    /// Returns the device for which the log has records; `None` where it has records of files, or
    /// none.
    fn backing_of(&self, region: &Arc<Region>) -> Result<Option<String>> {
        let pool = LogPool::open(Arc::clone(region)).map_err(EngineError::pool)?;
        let (plan, _) = plan_pool(&pool).map_err(EngineError::pool)?;
        let name = |path| String::from_utf8_lossy(Binding::name_of(path)).into_owned();
        Ok(plan.device().map(name))
    }

    fn describe(&self, region: &Arc<Region>) -> Result<Description> {
        let summary = Summary::of(region).map_err(EngineError::pool)?;
        Ok(Description {
            size_bytes: summary.ring_bytes,
            blocks: None,
            header: json!(summary),
            lines: summary.lines(),
        })
    }

    fn open(&self, opening: Opening) -> Result<Opened> {
        let Opening { region, backing, force, salvage, .. } = opening;
        let Some(backing) = backing else {
            let refusal = "a log pool holds no blocks of its own: name the device behind it by --backing, or use it \
                           for `tidegate run`";
            return Err(EngineError::Refused(refusal.into()));
        };
        if region.read_only() {
            let refusal =
                "a log pool cannot be served --read-only: its backing may lack what the log holds";
            return Err(EngineError::Refused(refusal.into()));
        }
        let device = open_device(region, backing, (force, salvage))?;
        let found = device.recovered();
        let size = Size { bytes: found.bytes };
        let mut recovered =
            format!("{} ({size}) that the backing may lack", counted(found.records, "write"));
        if let Some(first) = found.lost.first() {
            let lost = counted(found.lost.len() as u64, "lost part");
            recovered = format!("{recovered}; {lost} passed over, the first: {first}");
        }
        Ok(Opened { tier: Arc::new(device), recovered })
    }

    /// Verifies each record.
    fn check(&self, region: Region, repair: bool, _progress: OnProgress<'_>) -> Result<Checked> {
        let report = check(&Arc::new(region), repair).map_err(EngineError::pool)?;
        let (faults, lines) = (report.faults, report.lines());
        Ok(Checked { faults, report: json!(report), lines })
    }

    fn next_command(&self, pool: &Path) -> String {
        format!("tidegate run --pool {} -- CMD", pool.display())
    }
}

struct LogPlan;

impl Plan for LogPlan {
    fn smallest_bytes(&self) -> u64 {
        POOL_BYTES_MIN
    }

    fn create(&self, region: &Region) -> Result<()> {
        create(region, &LogOptions::default()).map(drop).map_err(EngineError::pool)
    }
}

fn open_device(
    region: Arc<Region>,
    backing: Backing,
    (force, salvage): (bool, bool),
) -> Result<LogDevice> {
    let pool = LogPool::open(region).map_err(EngineError::pool)?;
    let Backing { device, identity, name, holds, doubt } = backing;
    let binding = Binding::new(identity, &name);
    if let Some(doubt) = doubt.as_deref().filter(|_| !force)
        && has_records_of(&pool, &binding).map_err(|error| refused(error, None))?
    {
        // Records behind the end fit nowhere, with --force too.
        expect_fit(&pool, device.geometry()).map_err(|error| refused(error, None))?;
        return Err(EngineError::Refused(format!(
            "the log holds records for a backing that is in doubt: {doubt}; --force destages them all the same, `tidegate recover --discard` throws them away"
        )));
    }
    // If the log has records for this backing, its client wrote this content on purpose.
    if let Some(found) = holds.filter(|_| !force)
        && !has_records_of(&pool, &binding).map_err(|error| refused(error, None))?
    {
        return Err(EngineError::Refused(format!(
            "the backing {} holds {found}, which the writes to the log would destroy; --force uses it all the same",
            String::from_utf8_lossy(&name)
        )));
    }
    let options = LogDeviceOptions { adopt_foreign: force, salvage, ..LogDeviceOptions::default() };
    LogDevice::open(pool, device, binding, options)
        .map_err(|error| refused(error, doubt.as_deref()))
}

/// Converts `error` for users; `doubt` says why the backing may be another one.
fn refused(error: LogDeviceError, doubt: Option<&str>) -> EngineError {
    let why = doubt.map(|doubt| format!("; {doubt}")).unwrap_or_default();
    match error {
        LogDeviceError::OtherBacking { .. } => EngineError::Refused(format!(
            "{error}{why}; --force destages what the log holds to this one, `tidegate recover --discard` throws it away"
        )),
        error => EngineError::pool(error),
    }
}

/// The header and the records of a log in numbers; the keys are a contract with scripts.
#[derive(Debug, Serialize)]
struct Summary {
    uuid: Uuid,
    /// Bytes of the ring.
    ring_bytes: u64,
    /// Position of the first record that the files may lack.
    tail: u64,
    /// Where the last record ends.
    head: u64,
    records: u64,
    /// Bytes from tail to head.
    live_bytes: u64,
    /// Records whose writer died while it wrote them.
    torn_records: u64,
    /// The last session; `None` if it was closed.
    session: Option<Session>,
}

/// A session that was not closed.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Session {
    /// The boot id of the session.
    Boot(Uuid),
    /// The session has no boot id, like every session of a log before a device.
    NoBoot(&'static str),
}

impl Session {
    fn of(noted: [u8; 16]) -> Self {
        match noted {
            NO_BOOT => Self::NoBoot("no boot"),
            boot => Self::Boot(Uuid::from_bytes(boot)),
        }
    }
}

impl Summary {
    fn of(region: &Arc<Region>) -> std::result::Result<Self, LogError> {
        let pool = LogPool::open(Arc::clone(region))?;
        let (tail, limit, session) = (pool.tail()?, pool.limit()?, pool.session()?);
        let mut scanner = Scanner::new(&pool, tail, limit).reading_once();
        let (mut records, mut head) = (0, tail);
        for header in &mut scanner {
            records += 1;
            head = header.position + header.record_bytes();
        }
        Ok(Self {
            uuid: pool.superblock().uuid,
            ring_bytes: pool.ring_bytes(),
            tail,
            head,
            records,
            live_bytes: head - tail,
            torn_records: scanner.torn(),
            session: session.map(Session::of),
        })
    }

    fn lines(&self) -> Vec<Line> {
        let log = match self.records {
            0 => format!("empty, at position {}", self.tail),
            records => {
                let size = Size { bytes: self.live_bytes };
                format!("{} from {}, {size}", counted(records, "record"), self.tail)
            }
        };
        let session = match &self.session {
            Some(Session::Boot(boot)) => format!("not closed, in boot {boot}"),
            Some(Session::NoBoot(_)) => "not closed".into(),
            None => "closed".into(),
        };
        vec![line("uuid", self.uuid), line("log", log), line("session", session)]
    }
}

/// Returns the advice for damage that is left.
fn advice(is_repaired: bool) -> &'static str {
    if is_repaired {
        "restore a backup, or go on without what is damaged: `tidegate recover --salvage`"
    } else {
        "`tidegate check --repair` restores what the pool itself proves; for the rest restore a \
         backup, or go on without it: `tidegate recover --salvage`"
    }
}

fn check(region: &Arc<Region>, repair: bool) -> std::result::Result<Report, LogError> {
    let found = Superblock::read(region)?;
    let (mut findings, repaired_superblocks) = found.check(region, repair)?;
    let pool = LogPool::open_damaged(Arc::clone(region))?;
    let mut header = pool.header_fault()?;
    let repaired_headers = usize::from(repair && header.is_some());
    if repaired_headers > 0 {
        pool.restore_header()?;
        header = pool.header_fault()?;
    }
    findings.extend(header.map(|fault| fault.to_string()));
    let repaired_positions = if repair { pool.restore_positions()? } else { 0 };
    let faults = pool.position_faults()?;
    let is_lost = faults.iter().any(|fault| matches!(fault, PositionFault::Both { .. }));
    findings.extend(faults.iter().map(ToString::to_string));
    let report = if is_lost {
        Report { faults: findings.len() as u64, findings, ..Report::default() }
    } else {
        let pool = LogPool::open(Arc::clone(region))?;
        let mut report = check_records(&pool, repair)?;
        report.faults += findings.len() as u64;
        findings.append(&mut report.findings);
        Report { findings, ..report }
    };
    let advice = (report.faults > 0).then(|| advice(repair));
    Ok(Report { repaired_superblocks, repaired_headers, repaired_positions, advice, ..report })
}
