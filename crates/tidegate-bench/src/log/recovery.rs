//! Recovery of a full log, against writing the same bytes in order.

use std::fs::File;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use tidegate::log::recover::{file_system_id, handle_of, identity_of};
use tidegate::log::{AppendError, CoverState, Definition, FileKey, Log};
use tidegate::pmem::{Region, RegionOptions};

use super::append::{new_log, of_log};
use super::bed::{set_mode, write_in_order};
use super::{Bench, Part};
use crate::child::output_of;
use crate::error::{BenchError, Result};
use crate::measure::{Key, Op, Sample};

/// Case of a recovery.
pub(super) const CASE: &str = "run-recovery";
/// Policy of writing in order.
pub(super) const IN_ORDER: &str = "in-order";
/// Policy of `tidegate recover`.
pub(super) const RECOVER: &str = "recover";

/// Size of a write.
const BLOCK: usize = 4096;
const BLOCK_BYTES: u64 = BLOCK as u64;
/// Size of the pool.
const POOL_BYTES: u64 = 1 << 30;
/// Size of a write in order.
const PIECE_BYTES: usize = 1 << 20;
/// The session of a log whose processes are gone; its files may lack logged writes.
const NO_SESSION: [u8; 16] = [0xFF; 16];

/// Fills a log, recovers it, and writes the same number of bytes in order.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let pool_bytes = bench.args.scaled(POOL_BYTES, 1 << 20).next_multiple_of(1 << 20);
    // At least as many blocks as the log holds: each is written once.
    let blocks = (pool_bytes / BLOCK_BYTES).next_power_of_two();
    let file = bench.bed.random_file("recovered", blocks * BLOCK_BYTES)?;
    let other = bench.bed.random_file("in-order", blocks * BLOCK_BYTES)?;
    let pool = bench.bed.pools().join("recovered.pool");
    let mut bytes = 0;
    bench.in_turns(Part::Recovery, &[RECOVER, IN_ORDER], str::to_owned, |bench, policy| {
        let elapsed_s = if policy == RECOVER {
            bytes = fill(&pool, pool_bytes, &file, blocks)?;
            bench.bed.sync_disk()?;
            recover(bench, &pool)?
        } else {
            bench.bed.sync_disk()?;
            write_and_sync(&other, bytes)?
        };
        Ok(Some((Key::new(policy, CASE, Op::Write, bytes), Sample::single(elapsed_s))))
    })
}

/// Makes a pool whose log is full of writes to `path`, in scattered order. Returns the number of
/// bytes written.
fn fill(pool: &Path, pool_bytes: u64, path: &Path, blocks: u64) -> Result<u64> {
    if pool.exists() {
        std::fs::remove_file(pool).map_err(BenchError::os("remove", pool))?;
    }
    // Like the pools of `run`, whose space is allocated in huge pages.
    let create_bytes = Some(pool_bytes);
    let options = RegionOptions { create_bytes, sparse: true, ..RegionOptions::default() };
    let region = Region::open(pool, &options)?;
    region.allocate(0, pool_bytes)?;
    let log = new_log(Arc::new(region))?;
    let file = File::open(path).map_err(BenchError::os("open", path))?;
    let written = append_all(&log, &file, path, blocks)?;
    log.ring().pool().set_session(NO_SESSION)?;
    Ok(written * BLOCK_BYTES)
}

/// Appends until the log is full. Returns the number of writes.
fn append_all(log: &Log, file: &File, path: &Path, blocks: u64) -> Result<u64> {
    let found = file.metadata().map_err(BenchError::os("inspect", path))?;
    let identity = identity_of(file).map_err(BenchError::os("tell the identity of", path))?;
    let (device, inode) = (found.dev(), found.ino());
    let definition = Definition {
        identity,
        file_system: file_system_id(file).unwrap_or_default(),
        handle: handle_of(file).map_err(BenchError::os("tell the handle of", path))?,
        covered: false,
        starts: true,
        size_bytes: 0,
        device,
        inode,
        path: path.as_os_str().as_bytes(),
    };
    let entry = log.entry_for(&FileKey { device, inode, identity }).map_err(of_log)?;
    let guard = log.lock(entry).map_err(of_log)?;
    guard.begin_story(&definition, found.len()).map_err(of_log)?;
    let (unlogged, synced_from, size) = (guard.unlogged(), log.ring().head(), found.len());
    let state = CoverState { unlogged, synced_from, size, is_dense: true };
    guard.cover(&state, &definition).map_err(of_log)?;
    let mut ticket = guard.begin().map_err(of_log)?;
    // Odd, so that the stride shares no factor with a power of two.
    let stride = (blocks / 1000 * 618) | 1;
    let mut data = [0xa5; BLOCK];
    for written in 0..blocks {
        data[..8].copy_from_slice(&written.to_le_bytes());
        let block = written.wrapping_mul(stride) % blocks;
        match ticket.write(block * BLOCK_BYTES, &[IoSlice::new(&data)], false) {
            Ok(_) => {}
            Err(AppendError::Full) => return Ok(written),
            Err(error) => return Err(of_log(error)),
        }
    }
    Ok(blocks)
}

fn recover(bench: &Bench<'_>, pool: &Path) -> Result<f64> {
    // A pool must be accessible to its owner alone.
    set_mode(pool, 0o600)?;
    let mut command = Command::new(&bench.bed.tidegate);
    command.args(["recover", "--replay"]).arg(pool);
    let begun = Instant::now();
    let said = output_of(command)?;
    let elapsed_s = begun.elapsed().as_secs_f64();
    if said.contains("written to 1 files") {
        return Ok(elapsed_s);
    }
    let found = format!("recovered nothing: {}", said.trim());
    Err(BenchError::program("tidegate recover", found))
}

fn write_and_sync(path: &Path, bytes: u64) -> Result<f64> {
    let file = File::options().write(true).open(path).map_err(BenchError::os("open", path))?;
    let begun = Instant::now();
    let written = write_in_order(&file, bytes, PIECE_BYTES).and_then(|()| file.sync_data());
    written.map_err(BenchError::os("write", path))?;
    Ok(begun.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use tidegate::log::LogPool;
    use tidegate::log::recover::plan_pool;

    use super::*;

    #[test]
    fn a_filled_log_is_one_that_recovery_has_work_with() {
        let dir = tempfile::tempdir().unwrap();
        let (pool, path) = (dir.path().join("pool"), dir.path().join("file"));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let bytes = fill(&pool, 1 << 20, &path, 256).unwrap();
        assert!((512 << 10..1 << 20).contains(&bytes), "{bytes}");
        let region = Arc::new(Region::open(&pool, &RegionOptions::default()).unwrap());
        let (plan, unreadable) = plan_pool(&LogPool::open(region).unwrap()).unwrap();
        assert_eq!((plan.data_bytes(), unreadable, plan.files().len()), (bytes, 0, 1));
    }
}
