//! The media models take the modeled times.
//!
//! Time is simulated: it passes in delays only, so that the machine's load changes nothing. Another
//! test, with a bound that a busy machine cannot break, shows that delays are really spent.

use std::time::Instant;

use crate::pmem::delay::simulated;
use crate::pmem::{Domain, MediaModel, Region, RegionOptions};

const TOLERANCE: f64 = 0.01;
const CALLS: u32 = 1000;
const BLOCK: usize = 4096;
const REGION_BYTES: u64 = 1 << 20;

const MODELS: [&str; 4] = [
    "optane",
    "cxl",
    "optane,read_latency_ns=2000,write_latency_ns=1500,thread_write_bytes_per_s=500000000",
    "custom,read_latency_ns=700,write_latency_ns=900,thread_read_bytes_per_s=1000000000,write_bytes_per_s=1500000000",
];

fn region(media: MediaModel) -> Region {
    let options = RegionOptions { media, domain: Some(Domain::Adr), ..RegionOptions::default() };
    Region::anonymous_with(REGION_BYTES, &options).unwrap()
}

/// Returns the mean simulated ns of [`CALLS`] calls of `op`, which gets the number of its call.
fn mean_ns(op: impl Fn(u64)) -> f64 {
    let start = simulated::now_ns();
    (0..u64::from(CALLS)).for_each(op);
    (simulated::now_ns() - start) as f64 / f64::from(CALLS)
}

fn expect_near(what: &str, measured: f64, promised: f64) {
    let error = (measured / promised - 1.0).abs();
    assert!(error <= TOLERANCE, "{what}: {measured:.1}, promised {promised:.1}");
}

/// Expects that `op` on a region with the model takes `modeled_ns(model)`.
fn expect_time(what: &str, modeled_ns: impl Fn(&MediaModel) -> f64, op: impl Fn(&Region, u64)) {
    for name in MODELS {
        let model: MediaModel = name.parse().unwrap();
        let slow = region(model.clone()).in_simulated_time();
        let measured = mean_ns(|call| op(&slow, call));
        expect_near(&format!("{what}, {name}"), measured, modeled_ns(&model));
    }
}

fn transfer_ns(bytes: usize, limits: [Option<u64>; 2]) -> f64 {
    let slowest = limits.into_iter().flatten().min();
    slowest.map_or(0.0, |bytes_per_s| bytes as f64 * 1e9 / bytes_per_s as f64)
}

fn read_ns(model: &MediaModel, bytes: usize) -> f64 {
    let on_medium = bytes.next_multiple_of(model.granularity_bytes as usize);
    let thread = transfer_ns(bytes, [model.thread_read_bytes_per_s, None]);
    let all = transfer_ns(on_medium, [model.read_bytes_per_s, None]);
    f64::from(model.read_latency_ns) + thread.max(all)
}

fn write_ns(model: &MediaModel, bytes: usize) -> f64 {
    let on_medium = bytes.next_multiple_of(model.granularity_bytes as usize);
    let thread = transfer_ns(bytes, [model.thread_write_bytes_per_s, None]);
    thread.max(transfer_ns(on_medium, [model.write_bytes_per_s, None]))
}

fn block_at(call: u64) -> u64 {
    call * BLOCK as u64 % REGION_BYTES
}

#[test]
fn read_latency() {
    expect_time(
        "read of a line",
        |model| read_ns(model, 64),
        |region, call| {
            region.read(call * 64 % REGION_BYTES, &mut [0; 64]).unwrap();
        },
    );
}

fn fenced_line_ns(model: &MediaModel) -> f64 {
    write_ns(model, 64) + f64::from(model.write_latency_ns)
}

fn stream_line(region: &Region, call: u64) {
    region.write_streaming(call * 64 % REGION_BYTES, &[1; 64]).unwrap();
    region.fence().unwrap();
}

#[test]
fn write_latency() {
    expect_time("streamed line and fence", fenced_line_ns, stream_line);
}

#[test]
fn a_write_back_costs_what_a_streamed_line_costs() {
    expect_time("written back line and fence", fenced_line_ns, |region, call| {
        let offset = call * 64 % REGION_BYTES;
        region.store_u64(offset, call).unwrap();
        region.persist(offset, 8).unwrap();
    });
}

#[test]
fn a_fence_without_stores_is_free() {
    let slow = region("custom,write_latency_ns=100000".parse().unwrap()).in_simulated_time();
    let start = simulated::now_ns();
    slow.fence().unwrap();
    assert_eq!(simulated::now_ns(), start);
}

#[test]
fn write_bandwidth_of_a_thread() {
    let data = [1; BLOCK];
    expect_time(
        "streamed block",
        |model| write_ns(model, BLOCK),
        |region, call| {
            region.write_streaming(block_at(call), &data).unwrap();
        },
    );
}

#[test]
fn read_bandwidth_of_a_thread() {
    expect_time(
        "read block",
        |model| read_ns(model, BLOCK),
        |region, call| {
            region.read(block_at(call), &mut [0; BLOCK]).unwrap();
        },
    );
}

/// Returns the bytes per second that two threads move together; each moves [`CALLS`] blocks.
fn two_threads_bytes_per_s(op: &(impl Fn(u64) + Sync)) -> f64 {
    let thread = || {
        (0..u64::from(CALLS)).for_each(op);
        simulated::now_ns()
    };
    let last_ns = std::thread::scope(|scope| {
        let threads = [scope.spawn(thread), scope.spawn(thread)];
        threads.into_iter().map(|thread| thread.join().unwrap()).max()
    });
    (2 * CALLS as usize * BLOCK) as f64 * 1e9 / last_ns.unwrap() as f64
}

#[test]
fn two_threads_share_the_write_bandwidth() {
    let data = [1; BLOCK];
    let slow = region("optane,write_bytes_per_s=1000000000".parse().unwrap()).in_simulated_time();
    let stream = |call| slow.write_streaming(block_at(call), &data).unwrap();
    expect_near("two writers", two_threads_bytes_per_s(&stream), 1e9);
}

#[test]
fn two_threads_share_the_read_bandwidth() {
    let model = "optane,read_latency_ns=0,read_bytes_per_s=1000000000".parse().unwrap();
    let slow = region(model).in_simulated_time();
    let read = |call| slow.read(block_at(call), &mut [0; BLOCK]).unwrap();
    expect_near("two readers", two_threads_bytes_per_s(&read), 1e9);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "that time really passes is what is tested")]
fn delays_are_really_spent() {
    for name in MODELS {
        let model: MediaModel = name.parse().unwrap();
        let slow = region(model.clone());
        let start = Instant::now();
        (0..u64::from(CALLS)).for_each(|call| stream_line(&slow, call));
        let passed_ns = start.elapsed().as_secs_f64() * 1e9;
        // A little less, since the counter behind the delays was calibrated against a clock.
        let promised_ns = 0.9 * fenced_line_ns(&model) * f64::from(CALLS);
        assert!(passed_ns >= promised_ns, "{name}: {passed_ns} of {promised_ns} ns");
    }
}
