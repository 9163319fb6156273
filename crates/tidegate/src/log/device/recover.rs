//! Opening: rebuilds the index from the records that a crash left, which stay in the log.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::super::error::LogError;
use super::super::{LogPool, Ring, Scanner};
use super::clean::Scratch;
use super::index::Index;
use super::start::Blocked;
use super::{
    BATCH_BYTES, Binding, CONTROL_BYTES, Core, LogDeviceError, LogDeviceOptions, NO_BOOT,
    VERSIONS_LOG2,
};
use crate::device::{BlockDevice, DeviceError, Geometry};
use crate::log::control::table::{self, FileKey};
use crate::log::pool::losses::{Damage, DeviceLoss};
use crate::log::pool::record::{Definition, Header, RecordKind, record_bytes};
use crate::pmem::SharedMemory;
use crate::stats::Requests;
use crate::sync::{AtomicU64, Ordering};
use crate::tier::background::Waker;
use crate::tier::ledger::Ledger;
use crate::tier::version_locks::VersionLocks;

type Result<T> = std::result::Result<T, LogDeviceError>;

/// The content of a log at its opening.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Records of writes and zeroes that the backing may lack.
    pub records: u64,
    /// Bytes of these records in the log.
    pub bytes: u64,
    /// Unfinished records, which were not acknowledged.
    pub torn: u64,
    /// Acknowledged data that is lost.
    pub lost: Vec<DeviceLoss>,
}

/// The last definition of an id.
#[derive(Debug, Clone)]
struct Defined {
    id: u64,
    identity: u64,
    path: String,
    position: u64,
    end: u64,
}

/// The result of a scan of the records.
struct Found {
    index: Index,
    definition: Option<Defined>,
    recovered: Recovered,
    /// See [`Scanner::doubtful_from`].
    doubtful_from: u64,
}

pub(super) fn open(
    pool: LogPool,
    backing: Arc<dyn BlockDevice>,
    binding: Binding,
    options: LogDeviceOptions,
) -> Result<(Core, Recovered)> {
    let geometry = geometry_over(backing.geometry())?;
    check_size(&pool, &binding, geometry)?;
    let found = find(&pool, &binding, geometry, options)?;
    // The pool may be a sparse file: without this, a store could fail on a full file system.
    pool.region().allocate(pool.region_offset(0), pool.ring_bytes())?;
    pool.set_session(NO_BOOT)?;
    let memory = SharedMemory::anonymous(CONTROL_BYTES)?;
    let ring = Ring::start_with_records(pool, memory, found.doubtful_from)?;
    let Definition { device, inode, identity, .. } = binding.definition();
    let file = table::find_or_add(&ring.control, &FileKey { device, inode, identity })?;
    let ring_bytes = ring.pool().ring_bytes();
    let clean_from_bytes = options.clean_from_bytes.unwrap_or(ring_bytes / 2);
    let batch_bytes = (ring_bytes / 8).min(BATCH_BYTES).min(clean_from_bytes.max(1));
    let core = Core {
        clean_from_bytes: AtomicU64::new(clean_from_bytes),
        requests: Requests::default(),
        batch_bytes: AtomicU64::new(batch_bytes),
        ring,
        file,
        binding,
        backing,
        geometry,
        index: found.index,
        versions: VersionLocks::new(VERSIONS_LOG2),
        ledger: Ledger::new("the log"),
        blocked: Blocked::default(),
        cleaning: Mutex::new(Scratch::default()),
        defined_end: AtomicU64::new(0),
        waker: Arc::new(Waker::new(u32::from(!options.no_thread))),
        is_scheduled: options.is_scheduled,
    };
    adopt(&core, found.definition)?;
    Ok((core, found.recovered))
}

fn geometry_over(backing: Geometry) -> Result<Geometry> {
    if backing.read_only {
        return Err(DeviceError::read_only(0, backing.size_bytes()).into());
    }
    Ok(Geometry { atomic_block: true, volatile_cache: false, ..backing })
}

/// Checks that the space for definitions holds two, and that a record holds a block.
fn check_size(pool: &LogPool, binding: &Binding, geometry: Geometry) -> Result<()> {
    let least = (32 * 2 * binding.record_bytes()).max(4 * u64::from(geometry.block_bytes));
    let found_bytes = pool.ring_bytes();
    if found_bytes < least {
        return Err(LogError::TooSmall { found_bytes, least_bytes: least }.into());
    }
    Ok(())
}

/// Scans the log from tail to limit.
fn find(
    pool: &LogPool,
    binding: &Binding,
    geometry: Geometry,
    options: LogDeviceOptions,
) -> Result<Found> {
    let mut scanner = Scanner::new(pool, pool.tail()?, pool.limit()?);
    let headers: Vec<Header> = scanner.by_ref().collect();
    if scanner.unreadable_bytes() > 0 && !options.salvage {
        return Err(LogDeviceError::Unreadable { bytes: scanner.unreadable_bytes() });
    }
    let lost = losses(&scanner, &headers);
    if !lost.is_empty() && !options.salvage {
        return Err(LogDeviceError::Lost { losses: lost });
    }
    // Losses that are passed over now must not be found again.
    let is_all_told = lost.is_empty() && scanner.losses.finished() > 0;
    let doubtful_from = if is_all_told { scanner.doubtful_from() } else { pool.tail()? };
    // A killed process may not have fenced the last records, which later records call finished.
    pool.persist_records(scanner.losses.finished()..doubtful_from)?;
    let defined = definitions(pool, &headers)?;
    let data = headers.iter().filter(|header| header.kind != RecordKind::Define);
    let adopted = data
        .clone()
        .next()
        .filter(|_| options.adopt_foreign)
        .and_then(|first| defined.get(&first.file));
    let named = defined.values().filter(|it| it.identity == binding.identity);
    let definition = adopted.or(named.max_by_key(|it| it.position)).cloned();
    let own = definition.as_ref().map(|it| it.id);
    let recovered =
        Recovered { torn: scanner.losses.doubtful().count() as u64, lost, ..Recovered::default() };
    let mut found = Found { index: Index::new(), definition, recovered, doubtful_from };
    for header in data {
        if Some(header.file) != own {
            expect_all_fit(&headers, &defined, geometry)?;
            return Err(foreign(&headers, header.file, &defined));
        }
        found.note(header, geometry)?;
    }
    Ok(found)
}

/// Returns the acknowledged data that is lost, with the older records that come back in its stead.
fn losses(scanner: &Scanner<'_>, headers: &[Header]) -> Vec<DeviceLoss> {
    let records = scanner.losses.damaged().map(|header| {
        let damage = Damage::of(header);
        let older = headers.iter().rev().find(|it| damage.comes_after(it));
        DeviceLoss::Record { damage, older: older.map(|it| it.position) }
    });
    let missing = scanner.losses.missing();
    let bytes =
        missing.map(|it| DeviceLoss::Bytes { position: it.start, bytes: it.end - it.start });
    records.chain(bytes).collect()
}

/// Returns whether the log has records to destage to the backing that `binding` identifies.
///
/// # Errors
/// Fails if the log cannot be read.
pub fn has_records_of(pool: &LogPool, binding: &Binding) -> Result<bool> {
    let headers: Vec<Header> = Scanner::new(pool, pool.tail()?, pool.limit()?).collect();
    let defined = definitions(pool, &headers)?;
    let is_of_it = |it: &Defined| it.identity == binding.identity;
    let mut data = headers.iter().filter(|header| header.kind != RecordKind::Define);
    Ok(data.any(|header| defined.get(&header.file).is_some_and(is_of_it)))
}

/// Checks that the log has no record for a device that would lie outside a backing with `geometry`.
///
/// # Errors
/// [`LogDeviceError::Misfit`], or the log cannot be read.
pub fn expect_fit(pool: &LogPool, geometry: Geometry) -> Result<()> {
    let headers: Vec<Header> = Scanner::new(pool, pool.tail()?, pool.limit()?).collect();
    let defined = definitions(pool, &headers)?;
    expect_all_fit(&headers, &defined, geometry)
}

fn expect_all_fit(
    headers: &[Header],
    defined: &HashMap<u64, Defined>,
    geometry: Geometry,
) -> Result<()> {
    let of_device = headers.iter().filter(|header| defined.contains_key(&header.file));
    let mut changes = of_device.filter_map(|header| Some((header.offset, bytes_of(header)?)));
    changes.try_for_each(|(offset, len)| check_fit(offset, len, geometry))
}

/// Returns how many bytes of a device the record `header` changes; `None` if it is none of one.
fn bytes_of(header: &Header) -> Option<u64> {
    match header.kind {
        RecordKind::Write => Some(u64::from(header.payload_bytes)),
        RecordKind::Zero => Some(header.len),
        _ => None,
    }
}

fn check_fit(offset: u64, len: u64, geometry: Geometry) -> Result<()> {
    let (size_bytes, block_bytes) = (geometry.size_bytes(), geometry.block_bytes);
    let misfit = |_| LogDeviceError::Misfit { offset, len, size_bytes, block_bytes };
    geometry.check(offset, len).map_err(misfit)
}

/// Returns the last definition of each id.
fn definitions(pool: &LogPool, headers: &[Header]) -> Result<HashMap<u64, Defined>> {
    let mut defined = HashMap::new();
    for header in headers.iter().filter(|header| header.kind == RecordKind::Define) {
        let mut payload = vec![0; usize::try_from(header.payload_bytes).unwrap_or(0)];
        pool.read_payload(header, 0, &mut payload)?;
        let Some(definition) = Definition::decode(&payload) else { continue };
        let (id, position) = (header.file, header.position);
        let (identity, end) = (definition.identity, position + header.record_bytes());
        let path = String::from_utf8_lossy(definition.path).into_owned();
        defined.insert(id, Defined { id, identity, path, position, end });
    }
    Ok(defined)
}

/// Returns the error for records of another device, or of files.
fn foreign(headers: &[Header], file: u64, defined: &HashMap<u64, Defined>) -> LogDeviceError {
    let is_data = |header: &&Header| header.kind != RecordKind::Define;
    let is_block = |header: &Header| matches!(header.kind, RecordKind::Write | RecordKind::Zero);
    let records = headers.iter().filter(is_data).count() as u64;
    let one_device = headers.iter().filter(is_data).all(|it| it.file == file && is_block(it));
    match defined.get(&file) {
        Some(it) if one_device => {
            let name = Binding::name_of(it.path.as_bytes());
            let path = String::from_utf8_lossy(name).into_owned();
            LogDeviceError::OtherBacking { path, records }
        }
        _ => LogDeviceError::Files { records },
    }
}

impl Found {
    fn note(&mut self, header: &Header, geometry: Geometry) -> Result<()> {
        let block = u64::from(geometry.block_bytes);
        let len = bytes_of(header).ok_or(LogDeviceError::Files { records: 1 })?;
        let offset = header.offset;
        check_fit(offset, len, geometry)?;
        let (first, count) = (offset / block, len / block);
        if header.kind == RecordKind::Write {
            self.index.wrote(first, count, header.position, block);
        } else {
            self.index.zeroed(first..first + count, header.position);
        }
        self.recovered.records += 1;
        self.recovered.bytes += header.record_bytes();
        Ok(())
    }
}

impl Binding {
    /// Returns the size of its definition in the log.
    pub(super) fn record_bytes(&self) -> u64 {
        record_bytes(
            (size_of::<crate::log::pool::layout::DefinitionBytes>() + self.path.len()) as u64,
        )
    }
}

/// Adopts the device's definition, or appends one. A log without space for the next definition is
/// emptied first.
fn adopt(core: &Core, definition: Option<Defined>) -> Result<()> {
    let entry = table::entry(&core.ring.control, core.file.index);
    let mut is_ours = false;
    if let Some(it) = definition {
        entry.id().store(it.id, Ordering::Relaxed);
        entry.defined_at().store(it.position, Ordering::Relaxed);
        core.defined_end.store(it.end, Ordering::Relaxed);
        // The path must match too: `tidegate recover` finds the backing there.
        is_ours = it.identity == core.binding.identity && it.path.as_bytes() == core.binding.path;
    }
    let needed_bytes = 3 * core.binding.record_bytes();
    if core.used_bytes() + needed_bytes > core.ring.pool().ring_bytes() {
        core.empty_at_opening()?;
    }
    let is_there = core.ring.tail() <= entry.defined_at().load(Ordering::Relaxed);
    if is_ours && is_there {
        return Ok(());
    }
    core.define().map_err(LogDeviceError::Define)
}
