//! A full log before a file, by the batch of its cleaner: figure 6 of the `NVCache` paper.
//!
//! The device is in this process. The cleaner writes a batch to the page cache, merged there, and
//! then flushes the file, as the paper's does.

use std::sync::Arc;
use std::time::Duration;

use tidegate::device::BlockDevice;
use tidegate::device::file::{FileDevice, FileOptions};
use tidegate::log::device::LogDevice;
use tidegate::tier::Tier;

use super::append::{HEADER_BYTES, of_log};
use super::{Bench, LogArgs, Part, Plan};
use crate::block::{new_log_device, unnamed_region};
use crate::error::{BenchError, Result};
use crate::measure::{Key, Op, Sample};
use crate::pattern::Pattern;
use crate::workload::{Outcome, Stop, Workload};

/// The case of random writes.
pub(crate) const CASE: &str = "log-batch";
/// The policy that the others are compared with.
pub(crate) const ONE: &str = "batch-1";
/// Writes between two flushes of the file, as in the paper's figure, and the policies of their
/// rows.
const BATCHES: [(&str, u64); 5] =
    [(ONE, 1), ("batch-10", 10), ("batch-100", 100), ("batch-1000", 1000), ("batch-5000", 5000)];
const BLOCK_BYTES: u32 = 4096;
/// A block and the header of its record.
const RECORD_BYTES: u64 = BLOCK_BYTES as u64 + HEADER_BYTES;
/// Several of the largest batches.
const POOL_BYTES: u64 = 64 << 20;
/// Size of the written file; the paper's log of 8 GiB took 20 GiB.
const FILE_BYTES: u64 = 1 << 30;
/// Flushes of a large batch take a tenth of a second: these runs are longer by this factor.
const LONGER: f64 = 5.0;

/// Returns the planned time.
pub(super) fn plan(args: &LogArgs) -> Plan {
    let cost = Duration::from_secs_f64(args.seconds * LONGER + 0.8 + args.scale);
    Plan { steps: u32::try_from(BATCHES.len()).unwrap_or(u32::MAX), cost }
}

/// Measures each batch.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let file_bytes = bench.args.scaled(FILE_BYTES, POOL_BYTES);
    let path = bench.bed.random_file("batch", file_bytes)?;
    let name = |(_, batch)| format!("{batch} writes between two flushes of the file");
    bench.in_turns(Part::Batch, &BATCHES, name, |bench, (policy, batch)| {
        bench.bed.sync_disk()?;
        let file = FileDevice::open(&path, &FileOptions::default()).map_err(of_log)?;
        let device = full_log(bench.args, Arc::new(file), batch)?;
        let after = Duration::from_secs_f64(bench.args.seconds * LONGER);
        let outcome = write(&device, file_bytes, Stop::After(after))?;
        let sample = Sample::new(&outcome.write, outcome.elapsed.as_secs_f64(), None);
        Ok(Some((Key::new(policy, CASE, Op::Write, BLOCK_BYTES.into()), sample)))
    })?;
    std::fs::remove_file(&path).map_err(BenchError::os("remove", path))
}

/// Makes a log before `backing`, and fills it.
fn full_log(args: &LogArgs, backing: Arc<dyn BlockDevice>, batch: u64) -> Result<LogDevice> {
    let region = unnamed_region(&args.dir, &args.media, POOL_BYTES)?;
    let bytes = backing.geometry().size_bytes();
    let device = new_log_device(&region, backing)?;
    device.set("batch", &(batch * RECORD_BYTES).to_string()).map_err(of_log)?;
    let (_, ring_bytes) = device.fill_bytes();
    write(&device, bytes, Stop::Requests(ring_bytes / RECORD_BYTES))?;
    Ok(device)
}

fn write(device: &LogDevice, bytes: u64, stop: Stop) -> Result<Outcome> {
    let writes = Workload::writes(Pattern::Uniform, BLOCK_BYTES, bytes, stop);
    writes.run(device).map_err(BenchError::device("log"))
}

#[cfg(test)]
mod tests {
    use tidegate::device::memory::MemoryDevice;

    use super::super::tests::args;
    use super::*;

    #[test]
    fn what_is_measured_is_a_log_without_free_space_and_its_batch() {
        let backing = Arc::new(MemoryDevice::new(4096, 16384).unwrap());
        let device = full_log(&args("--quick"), backing, 10).unwrap();
        let batch = device.settings().into_iter().find(|setting| setting.key == "batch").unwrap();
        assert_eq!(batch.value, "41600");
        let outcome = write(&device, 64 << 20, Stop::Requests(1000)).unwrap();
        assert_eq!(outcome.write.len(), 1000);
    }
}
