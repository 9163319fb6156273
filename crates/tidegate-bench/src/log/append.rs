//! The log alone, in this process: appends beside the bare loop of header, checksum, streaming copy
//! and one fence.

use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::device::{self, BlockDevice, DeviceError, DeviceErrorKind, Geometry, Operation};
use tidegate::log::{
    AppendError, CONTROL_BYTES, Definition, FileHandle, FileKey, FileRef, Log, LogError,
    LogOptions, LogPool, Ring,
};
use tidegate::pmem::{Region, SharedMemory};

use super::io::ThreadNumbers;
use super::{Bench, LogArgs, Part};
use crate::block::unnamed_region;
use crate::error::{BenchError, Result};
use crate::floor::geometry;
use crate::measure::{Key, Op, Sample, Traffic};
use crate::pattern::Pattern;
use crate::workload::{Outcome, Stop, Workload};

/// Size of a record's header.
const HEADER: usize = 64;
pub(super) const HEADER_BYTES: u64 = HEADER as u64;
/// Files that threads append to, one for each thread.
const FILES: u64 = 2;

/// Case of appends.
pub(crate) const CASE: &str = "log-append";
/// Sizes of appends.
pub(super) const SIZES_BYTES: [u32; 2] = [128, 4096];
/// Size of the log, larger than any cache of a CPU.
const REGION_BYTES: u64 = 512 << 20;
/// The logged writes are at offsets below this.
const FILE_BYTES: u64 = 1 << 30;

/// Measures the floor and the log.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let region = || unnamed_region(&bench.args.dir, &bench.args.media, REGION_BYTES);
    let (bare, log) = (region()?, region()?);
    let floor = AppendOnly(BareAppend::new(Arc::clone(&bare)));
    let appends = AppendOnly(LogAppend::new(Arc::clone(&log))?);
    let subjects: [Subject<'_>; 2] = [("copy", &floor, &bare), ("log", &appends, &log)];
    for (_, device, _) in subjects {
        let touch_all = Stop::Requests(REGION_BYTES / 4096);
        run(bench.args, device, 4096, 1, touch_all)?;
    }
    for block_bytes in SIZES_BYTES {
        for threads in bench.args.threads.clone() {
            let name = |(policy, ..): Subject<'_>| {
                format!("{policy} append of {block_bytes} bytes, {threads} threads")
            };
            bench.in_turns(Part::Append, &subjects, name, |bench, (policy, device, region)| {
                let stop = Stop::After(Duration::from_secs_f64(bench.args.seconds));
                let before = Traffic::of(region);
                let outcome = run(bench.args, device, block_bytes, threads, stop)?;
                let traffic = Traffic::of(region).since(before);
                let elapsed_s = outcome.elapsed.as_secs_f64();
                let sample = Sample::new(&outcome.write, elapsed_s, Some(traffic));
                let case = format!("{CASE}-{block_bytes}");
                let key = Key::new(policy, case, Op::Write, block_bytes.into());
                Ok(Some((Key { threads, iodepth: bench.args.iodepth, ..key }, sample)))
            })?;
        }
    }
    Ok(())
}

/// Policy, device and the memory under it.
type Subject<'a> = (&'static str, &'a dyn BlockDevice, &'a Region);

fn run(
    args: &LogArgs,
    device: &dyn BlockDevice,
    block_bytes: u32,
    threads: usize,
    stop: Stop,
) -> Result<Outcome> {
    let writes = Workload::writes(Pattern::Uniform, block_bytes, FILE_BYTES, stop);
    let workload = Workload { threads, iodepth: args.iodepth, ..writes };
    workload.run(device).map_err(BenchError::device("log"))
}

/// Takes appends, which are durable when they return.
trait Append: Send + Sync {
    /// Appends a record of a write of `data` at `offset` of a file.
    fn append(&self, offset: u64, data: &[u8]) -> device::Result<()>;
}

/// An [`Append`] as the device that a workload drives.
struct AppendOnly<A>(A);

impl<A: Append> BlockDevice for AppendOnly<A> {
    fn geometry(&self) -> Geometry {
        Geometry { preferred_bytes: 4096, atomic_block: true, ..geometry(1, u64::MAX) }
    }

    fn run(&self, operation: &mut Operation<'_>) -> device::Result<()> {
        match *operation {
            Operation::Write { offset, data, .. } => self.0.append(offset, data),
            Operation::Flush | Operation::Discard { .. } => Ok(()),
            _ => {
                let (offset, len) = operation.range();
                Err(DeviceError::out_of_range(offset, len, 0))
            }
        }
    }
}

/// The floor: the least work of a record, at the next position of the region. Only that position is
/// shared.
struct BareAppend {
    region: Arc<Region>,
    next: AtomicU64,
}

impl BareAppend {
    fn new(region: Arc<Region>) -> Self {
        Self { region, next: AtomicU64::new(0) }
    }
}

impl Append for BareAppend {
    fn append(&self, offset: u64, data: &[u8]) -> device::Result<()> {
        let len = data.len() as u64;
        // A multiple of 64, like the region's size.
        let bytes = HEADER_BYTES + len.next_multiple_of(64);
        let at = self.next.fetch_add(bytes, Ordering::Relaxed) % (self.region.len_bytes() - bytes);
        let checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, data);
        let mut header = [0; HEADER];
        for (field, number) in header.chunks_exact_mut(8).zip([at, offset, len, checksum]) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &header[..56]);
        header[56..].copy_from_slice(&sum.to_le_bytes());
        self.region.write_streaming(at + HEADER_BYTES, data)?;
        self.region.write_streaming(at, &header)?;
        Ok(self.region.fence()?)
    }
}

/// The log as programs use it, without the work of the kernel: lock, slot, record.
struct LogAppend {
    log: Log,
    files: Vec<FileRef>,
    threads: ThreadNumbers,
    /// Held by the thread that retires the log.
    retiring: Mutex<()>,
}

impl LogAppend {
    /// Makes an empty log in all of `region`.
    fn new(region: Arc<Region>) -> Result<Self> {
        let log = new_log(region)?;
        let files = (0..FILES).map(|file| log.entry_for(&key(file)));
        let files = files.collect::<std::result::Result<_, _>>().map_err(of_log)?;
        Ok(Self { log, files, threads: ThreadNumbers::new(), retiring: Mutex::new(()) })
    }

    fn log(&self, offset: u64, data: &[u8]) -> std::result::Result<(), AppendError> {
        let number = self.threads.of_thread() % self.files.len();
        let guard = self.log.lock(self.files[number]).map_err(|_| AppendError::NoSlot)?;
        let mut ticket = guard.begin()?;
        if ticket.needs_define() {
            ticket.define(&definition(number as u64))?;
        }
        ticket.write(offset, &[IoSlice::new(data)], false).map(drop)
    }

    /// Retires all finished records, as the supervisor does once the files have them.
    fn reclaim(&self) -> std::result::Result<(), LogError> {
        let _alone = self.retiring.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.log.ring().retire_to(self.log.ring().safe_position())
    }
}

/// Makes a log in all of `region`.
pub(super) fn new_log(region: Arc<Region>) -> Result<Log> {
    tidegate::log::create(&region, &LogOptions::default()).map_err(of_log)?;
    let pool = LogPool::open(region).map_err(of_log)?;
    let ring_bytes = pool.ring_bytes();
    Ring::start(pool, SharedMemory::anonymous(CONTROL_BYTES)?, ring_bytes)
        .map(Log::over)
        .map_err(of_log)
}

/// Makes the error of a log that failed while it was measured.
pub(super) fn of_log(error: impl std::fmt::Display) -> BenchError {
    BenchError::program("log", format!("failed while it was measured: {error}"))
}

fn key(file: u64) -> FileKey {
    FileKey { device: 1, inode: 1 + file, identity: 1 + file }
}

fn definition(file: u64) -> Definition<'static> {
    let FileKey { device, inode, identity } = key(file);
    let path = &b"/directory/file"[..];
    Definition {
        identity,
        file_system: [1; 16],
        handle: FileHandle::NONE,
        starts: false,
        covered: true,
        size_bytes: 0,
        device,
        inode,
        path,
    }
}

impl Append for LogAppend {
    fn append(&self, offset: u64, data: &[u8]) -> device::Result<()> {
        let failed = |error: &dyn std::error::Error| {
            DeviceError::new(DeviceErrorKind::Io, format!("the append failed: {error}"))
        };
        loop {
            match self.log(offset, data) {
                Err(AppendError::Full) => self.reclaim().map_err(|error| failed(&error))?,
                other => return other.map_err(|error| failed(&error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region() -> Arc<Region> {
        Arc::new(Region::anonymous(1 << 20).unwrap())
    }

    #[test]
    fn the_floor_stores_what_a_record_does() {
        let (bare, log) = (region(), region());
        let (floor, appends) =
            (BareAppend::new(Arc::clone(&bare)), LogAppend::new(Arc::clone(&log)));
        let appends = appends.unwrap();
        appends.append(0, &[1; 128]).unwrap();
        let stored = |region: &Region, device: &dyn Append| {
            let before = region.counters();
            device.append(0, &[1; 4096]).unwrap();
            device.append(4096, &[1; 128]).unwrap();
            let spent = region.counters() - before;
            (spent.bytes_streamed, spent.fences)
        };
        assert_eq!(stored(&bare, &floor), (4096 + 128 + 2 * HEADER_BYTES, 2));
        assert_eq!(stored(&log, &appends), stored(&bare, &floor));
    }

    #[test]
    fn a_full_log_is_retired_and_goes_on() {
        let device = LogAppend::new(region()).unwrap();
        for _ in 0..1000 {
            device.append(0, &[7; 4096]).unwrap();
        }
        assert!(device.log.ring().head() > 3 << 20, "several laps");
    }
}
