//! Measures the costs of this machine.
//!
//! Each figure is the minimum of several short measurements, because other programs on the CPUs
//! only prolong a measurement.

#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times of some nanoseconds, to three digits"
)]

use std::error::Error as Cause;
use std::hint::{black_box, spin_loop};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tidegate::btt::{self, Btt, BttOptions};
use tidegate::device::null::NullDevice;
use tidegate::device::{BlockDevice, DeviceError};
use tidegate::dram::{self, Policy};
use tidegate::pmem::{Domain, MediaModel, Region, RegionOptions, copy_streaming};
use tidegate_bench::block::unnamed_region;
use tidegate_bench::pattern::Pattern;
use tidegate_bench::policy as bench;
use tidegate_bench::workload::{Stop, Workload};

use super::case::{Case, Length};
use super::costs::Costs;
use crate::error::{Error, Result};

const BLOCK_BYTES: u64 = 4096;
/// Size of memory that exceeds all CPU caches.
const LARGE_BYTES: u64 = 64 << 20;
const BATCHES: usize = 40;
const RUNS: u64 = 200;
/// A stride that visits all blocks of the memory.
const STRIDE: u64 = 6151;

/// Measures this machine, and its persistent memory in the directory `pmem`. Without `pmem`, uses
/// the persistent memory of the preset `optane`.
///
/// # Errors
/// The memory for the measurements cannot be allocated.
pub(super) fn measure(pmem: Option<&Path>) -> Result<Costs> {
    measure_all(pmem)
        .map_err(|error| Error::Usage(format!("this machine cannot be measured: {error}")))
}

fn measure_all(pmem: Option<&Path>) -> Result<Costs, Box<dyn Cause>> {
    let base = match pmem {
        Some(_) => Costs { media: "dram".into(), ..Costs::optane() },
        None => Costs::optane(),
    };
    let request_ns = service_ns(&null_device()?, RUNS)?;
    let dram_copy_ns = dram_copy_ns();
    let fence_ns = empty_fence_ns(pmem)?;
    let stream_ns = stream_ns(pmem)? - fence_ns;
    let lock_ns = lock_ns();
    let (wake_ns, wake_latency_ns) = wake_ns();
    let cached_ns = cached_write_ns()?;
    let section_ns = (cached_ns - request_ns - dram_copy_ns) / 2.0 - lock_ns;
    let costs = Costs {
        name: "this machine".into(),
        request_ns: whole(request_ns),
        btt_ns: 0,
        clock_ns: whole(clock_ns()),
        lock_ns: whole(lock_ns),
        handover_ns: whole(handover_ns()),
        section_ns: whole(section_ns),
        wake_ns: whole(wake_ns),
        wake_latency_ns: whole(wake_latency_ns),
        dram_copy_bytes_per_s: rate(dram_copy_ns),
        stream_bytes_per_s: rate(stream_ns),
        // Included in `btt_ns`.
        word_load_ns: 0,
        word_store_ns: 0,
        write_back_ns: 0,
        fence_ns: whole(fence_ns),
        ..base
    };
    Ok(Costs { btt_ns: whole(btt_write_ns(&costs)?), ..costs })
}

fn whole(ns: f64) -> u64 {
    ns.max(0.0).round() as u64
}

/// Returns the bytes per second if a block takes `block_ns`.
fn rate(block_ns: f64) -> u64 {
    (BLOCK_BYTES as f64 * 1e9 / block_ns.max(1.0)).round() as u64
}

/// Returns the nanoseconds of one of `turns` turns, the minimum of several batches.
fn least_ns(turns: u32, mut turn: impl FnMut(u32)) -> f64 {
    let batch = |_| {
        let begun = Instant::now();
        (0..turns).for_each(&mut turn);
        begun.elapsed().as_secs_f64() * 1e9 / f64::from(turns)
    };
    (0..BATCHES).map(batch).fold(f64::INFINITY, f64::min)
}

fn clock_ns() -> f64 {
    least_ns(10_000, |_| {
        black_box(Instant::now());
    })
}

fn lock_ns() -> f64 {
    let mutex = Mutex::new(0_u64);
    least_ns(10_000, |_| {
        if let Ok(mut value) = mutex.lock() {
            *value += 1;
        }
    })
}

fn scattered(turn: u32) -> u64 {
    u64::from(turn) * STRIDE % (LARGE_BYTES / BLOCK_BYTES) * BLOCK_BYTES
}

fn dram_copy_ns() -> f64 {
    let (mut to, from) = (vec![1_u8; LARGE_BYTES as usize], vec![2_u8; BLOCK_BYTES as usize]);
    let mut copies = 0;
    least_ns(1000, |_| {
        copies += 1;
        let at = scattered(copies) as usize;
        copy_streaming(&mut to[at..at + BLOCK_BYTES as usize], &from);
    })
}

/// Returns a region in an unlinked file in `pmem`, or in this process's memory.
fn region(pmem: Option<&Path>, bytes: u64) -> Result<Arc<Region>, Box<dyn Cause>> {
    if let Some(pmem) = pmem {
        let region = unnamed_region(pmem, &MediaModel::dram(), bytes);
        return region.map_err(|error| error.with_causes().into());
    }
    let options = RegionOptions { domain: Some(Domain::Adr), ..RegionOptions::default() };
    Ok(Arc::new(Region::anonymous_with(bytes, &options)?))
}

fn stream_ns(pmem: Option<&Path>) -> Result<f64, Box<dyn Cause>> {
    let (region, block) = (region(pmem, LARGE_BYTES)?, vec![1; BLOCK_BYTES as usize]);
    for at in (0..LARGE_BYTES).step_by(BLOCK_BYTES as usize) {
        region.write(at, &block)?;
    }
    let mut stores = 0;
    Ok(least_ns(1000, |_| {
        stores += 1;
        let stored = region.write_streaming(scattered(stores), &block);
        black_box(stored.and_then(|()| region.fence()).is_ok());
    }))
}

fn empty_fence_ns(pmem: Option<&Path>) -> Result<f64, Box<dyn Cause>> {
    let region = region(pmem, BLOCK_BYTES)?;
    Ok(least_ns(10_000, |_| {
        black_box(region.fence().is_ok());
    }))
}

/// Returns half of the round-trip time of a word between two CPUs.
fn handover_ns() -> f64 {
    const TURNS: u32 = 2000;
    let word = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seen = 0;
            while seen < u32::MAX {
                let now = word.load(Ordering::Acquire);
                if now % 2 == 1 && now < u32::MAX {
                    word.store(now + 1, Ordering::Release);
                }
                seen = now;
                spin_loop();
            }
        });
        let least = least_ns(TURNS, |_| {
            let sent = word.load(Ordering::Relaxed) + 1;
            word.store(sent, Ordering::Release);
            while word.load(Ordering::Acquire) == sent {
                spin_loop();
            }
        });
        word.store(u32::MAX, Ordering::Release);
        least / 2.0
    })
}

/// Returns the time that a waking thread spends, and the time until the woken thread runs. Both are
/// medians: the minimum is that of a thread which was not asleep yet.
fn wake_ns() -> (f64, f64) {
    const WAKES: usize = 200;
    let (sent, wake) = (Mutex::new(None::<Instant>), Condvar::new());
    let latencies = Mutex::new(Vec::new());
    let mut calls = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..WAKES {
                let Ok(mut message) = sent.lock() else { return };
                while message.is_none() {
                    let Ok(next) = wake.wait(message) else { return };
                    message = next;
                }
                let latency = message.take().map(|at| at.elapsed().as_secs_f64() * 1e9);
                if let Ok(mut latencies) = latencies.lock() {
                    latencies.extend(latency);
                }
            }
        });
        for _ in 0..WAKES {
            // Wait until the other thread has taken the last message and sleeps again.
            while sent.lock().is_ok_and(|message| message.is_some()) {
                std::thread::sleep(Duration::from_micros(100));
            }
            std::thread::sleep(Duration::from_millis(1));
            if let Ok(mut message) = sent.lock() {
                *message = Some(Instant::now());
            }
            let begun = Instant::now();
            wake.notify_one();
            calls.push(begun.elapsed().as_secs_f64() * 1e9);
        }
    });
    (median(calls), median(latencies.into_inner().unwrap_or_default()))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn null_device() -> Result<NullDevice, DeviceError> {
    NullDevice::new(BLOCK_BYTES as u32, (1 << 30) / BLOCK_BYTES)
}

/// Returns a workload of writes to random blocks of a device, as in the bench.
pub(super) fn writes(threads: u32, device_bytes: u64, stop: Stop, seed: u64) -> Workload {
    let one = Workload::writes(Pattern::Uniform, BLOCK_BYTES as u32, device_bytes, stop);
    Workload { threads: threads as usize, seed, ..one }
}

/// Requests of a run that is short enough to fit between two interrupts.
const SHORT_RUN: u64 = 500;

/// Returns the nanoseconds of a write, the minimum of `runs` runs.
fn service_ns(device: &dyn BlockDevice, runs: u64) -> Result<f64, DeviceError> {
    let mut least_ns = f64::INFINITY;
    for seed in 0..runs {
        let bytes = device.geometry().size_bytes();
        let outcome = writes(1, bytes, Stop::Requests(SHORT_RUN), seed).run(device)?;
        least_ns = least_ns.min(outcome.elapsed.as_secs_f64() * 1e9 / SHORT_RUN as f64);
    }
    Ok(least_ns)
}

/// Returns the nanoseconds of a write to a free slot, without background work.
fn cached_write_ns() -> Result<f64, DeviceError> {
    const RUNS: u64 = 50;
    // More slots than writes.
    let slots = 2 * RUNS * SHORT_RUN;
    let tier = dram::open(Policy::TransitNoEager, slots * BLOCK_BYTES, Arc::new(null_device()?))?;
    service_ns(&*tier, RUNS)
}

/// Returns the difference between a measured and a modelled write to the block translation table,
/// on one medium: some of its work overlaps with the medium's.
fn btt_write_ns(costs: &Costs) -> Result<f64, DeviceError> {
    let media = MediaModel::optane();
    let options = RegionOptions { media: media.clone(), ..RegionOptions::default() };
    let btt = open_btt(LARGE_BYTES, &options)?;
    let device_bytes = btt.geometry().size_bytes();
    writes(1, device_bytes, Stop::Requests(1), 1).fill(&btt)?;
    let case = Case::new(bench::Policy::Btt, device_bytes);
    let case = Case { warm_up: 100, length: Length::Requests(2000), ..case };
    Ok(service_ns(&btt, RUNS)? - case.run(costs, &media)?.service_ns(1))
}

/// Creates a block translation table of at least `bytes` bytes in this process's memory.
///
/// # Errors
/// The memory cannot be allocated.
pub(super) fn open_btt(bytes: u64, options: &RegionOptions) -> Result<Btt, DeviceError> {
    let options = RegionOptions { domain: Some(Domain::Adr), ..options.clone() };
    let region = Region::anonymous_with(bytes + (20 << 20), &options)?;
    btt::create(&region, &BttOptions::default())?;
    Ok(Btt::open(Arc::new(region))?)
}
