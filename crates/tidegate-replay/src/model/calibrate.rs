//! What things cost on this machine, measured.
//!
//! Each figure is the smallest of several short measurements: what other programs take from the
//! CPUs makes a measurement longer, never shorter.

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
/// Memory that no cache of a CPU holds.
const LARGE_BYTES: u64 = 64 << 20;
const BATCHES: usize = 40;
const RUNS: u64 = 200;
/// A step through the blocks of that memory that visits all of them.
const STRIDE: u64 = 6151;

/// Measures this machine, its persistent memory in the directory `pmem`. Without one that is
/// modelled: it is that of the preset `optane`.
///
/// # Errors
/// The memory for it cannot be had.
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
        // In `btt_ns`.
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

/// Bytes a second, where a block takes so long.
fn rate(block_ns: f64) -> u64 {
    (BLOCK_BYTES as f64 * 1e9 / block_ns.max(1.0)).round() as u64
}

/// Nanoseconds of one of `turns` turns, the least of some batches.
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

/// Memory in a file of `pmem` that goes with it, or of this process.
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

/// Half of the time in which a word travels from one CPU to another and back.
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

/// What waking a sleeping thread takes the one that wakes it, and how long until the woken one
/// runs: medians, since the least is that of a thread which had not slept yet.
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
            // Until the one before was taken and the other thread sleeps again.
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

/// Writes of one thread to random blocks of a device, as the bench makes them.
pub(super) fn writes(threads: u32, device_bytes: u64, stop: Stop, seed: u64) -> Workload {
    let one = Workload::writes(Pattern::Uniform, BLOCK_BYTES as u32, device_bytes, stop);
    Workload { threads: threads as usize, seed, ..one }
}

/// Requests of a run short enough to pass between two interruptions.
const SHORT_RUN: u64 = 500;

/// What a write takes, the least of `runs` runs.
fn service_ns(device: &dyn BlockDevice, runs: u64) -> Result<f64, DeviceError> {
    let mut least_ns = f64::INFINITY;
    for seed in 0..runs {
        let bytes = device.geometry().size_bytes();
        let outcome = writes(1, bytes, Stop::Requests(SHORT_RUN), seed).run(device)?;
        least_ns = least_ns.min(outcome.elapsed.as_secs_f64() * 1e9 / SHORT_RUN as f64);
    }
    Ok(least_ns)
}

/// A write into a free slot, with nothing in the background.
fn cached_write_ns() -> Result<f64, DeviceError> {
    const RUNS: u64 = 50;
    // More than are written.
    let slots = 2 * RUNS * SHORT_RUN;
    let tier = dram::open(Policy::TransitNoEager, slots * BLOCK_BYTES, Arc::new(null_device()?))?;
    service_ns(&*tier, RUNS)
}

/// What a write to the block translation table takes here and not in the model, on the same medium:
/// part of its work is done while the medium is at work.
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

/// A block translation table of at least `bytes` bytes on memory of this process.
///
/// # Errors
/// The memory cannot be had.
pub(super) fn open_btt(bytes: u64, options: &RegionOptions) -> Result<Btt, DeviceError> {
    let options = RegionOptions { domain: Some(Domain::Adr), ..options.clone() };
    let region = Region::anonymous_with(bytes + (20 << 20), &options)?;
    btt::create(&region, &BttOptions::default())?;
    Ok(Btt::open(Arc::new(region))?)
}
