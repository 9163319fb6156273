//! Reads that are started: how many wait for the backing at once, and what they return where the
//! cache changed meanwhile.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use super::*;
use super::{NO_THREAD, binding, memory, open, pool, read, work, write};
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::{DeviceErrorKind, IoBuffer, Op, OwnedOperation};
use crate::stats::{Collector, Metric, Value};
use crate::tier::Tier;

/// A cache before a backing whose reads hang. Page `n` of the backing holds `n`.
fn before_hung() -> (Arc<CacheDevice>, Arc<Fault>) {
    let memory = memory();
    for page in 0..128 {
        let bytes = [u8::try_from(page).unwrap(); PAGE];
        memory.write(page * PAGE_BYTES, &bytes, WriteFlags::default()).unwrap();
    }
    let below = Arc::new(Fault::new(memory, 1));
    let device = Arc::new(open(&pool(256), &below));
    below.add(Rule::new(&[Op::Read], When::Always, Effect::Hang));
    (device, below)
}

/// The bytes of the pages, and the result.
type Answer = (Vec<u8>, Result<()>);

fn start_read(device: &Arc<CacheDevice>, page: u64, pages: usize) -> Receiver<Answer> {
    let (told, ended) = channel();
    let completion = move |operation: OwnedOperation, result| {
        let buffer = operation.into_buffer().unwrap();
        let firsts = buffer.data().chunks(PAGE).map(|page| page[0]).collect();
        told.send((firsts, result)).unwrap();
    };
    let buffer = IoBuffer::new(pages * PAGE);
    let operation = OwnedOperation::Read { offset: page * PAGE_BYTES, buffer };
    Arc::clone(device).start(AsyncRequest::new(operation, Context::default(), completion));
    ended
}

fn release(below: &Fault) {
    below.heal();
    below.release();
}

fn bytes_of(answer: &Receiver<Answer>) -> Vec<u8> {
    let (bytes, result) = answer.recv().unwrap();
    result.unwrap();
    bytes
}

/// More reads than there are threads wait in the backing together, and a request that the cache
/// answers is not behind them.
#[test]
fn reads_that_miss_wait_without_a_thread() {
    let (device, below) = before_hung();
    write(&device, 100, 200);
    let reads: Vec<_> = (0..100).map(|page| start_read(&device, page, 1)).collect();
    below.wait_until_hung(100);
    assert_eq!(bytes_of(&start_read(&device, 100, 1)), [200]);
    assert_eq!(device.core.backing.pace.foreground_requests(), 100);
    release(&below);
    for (page, read) in (0..).zip(&reads) {
        assert_eq!(bytes_of(read), [page]);
    }
    assert_eq!(device.core.backing.pace.foreground_requests(), 0);
    work(&device);
    assert!((0..64).all(|page| device.core.pages.find(page).is_some()), "what was read is kept");
}

/// A page that is written while the backing reads it is the one that was written, and the older
/// bytes are not kept.
#[test]
fn a_read_that_was_started_sees_a_write_that_came_meanwhile() {
    let (device, below) = before_hung();
    let reads = [start_read(&device, 3, 4), start_read(&device, 20, 4)];
    below.wait_until_hung(2);
    write(&device, 5, 250);
    release(&below);
    assert_eq!(bytes_of(&reads[0]), [3, 4, 250, 6]);
    assert_eq!(bytes_of(&reads[1]), [20, 21, 22, 23]);
    work(&device);
    assert_eq!(read(&*device, 5), 250);
}

#[test]
fn a_read_that_was_started_fails_with_the_backing_and_only_once() {
    let (device, below) = before_hung();
    let failing = Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io));
    let read_hung = start_read(&device, 3, 1);
    below.wait_until_hung(1);
    below.heal();
    below.add(failing);
    let (_, result) = start_read(&device, 4, 1).recv().unwrap();
    assert_eq!(result.unwrap_err().kind(), DeviceErrorKind::Io);
    below.heal();
    below.release();
    assert_eq!(bytes_of(&read_hung), [3]);
    assert_eq!(bytes_of(&start_read(&device, 4, 1)), [4]);
    assert_eq!(device.core.backing.pace.foreground_requests(), 0);
}

/// Counters and gauges, but not latencies.
fn figures(device: &CacheDevice) -> Vec<(Metric, Value)> {
    let mut collector = Collector::default();
    device.metrics(&mut collector);
    let readings = collector.finish().into_iter().map(|it| (it.metric, it.value));
    readings.filter(|(_, value)| !matches!(value, Value::Latencies(_))).collect()
}

/// Started or not, a read counts once, and is kept as its mode says.
#[test]
fn started_reads_are_counted_and_kept_as_others_are() {
    for (mode, is_kept) in [(Mode::WriteBack, true), (Mode::WriteOnly, false)] {
        let [others, started] = [false, true].map(|is_started| {
            let (device, below) = before_hung();
            release(&below);
            device.set_mode(mode).unwrap();
            for page in [7, 9, 7] {
                if is_started {
                    bytes_of(&start_read(&device, page, 1));
                } else {
                    read(&*device, page);
                }
                work(&device);
            }
            assert_eq!(device.core.pages.find(7).is_some(), is_kept, "{mode}");
            figures(&device)
        });
        assert_eq!(others, started, "{mode}");
    }
}

/// Parts of pages, and pages of which the cache has some, are read with a thread.
#[test]
fn reads_of_what_is_partly_cached_are_whole() {
    let (device, below) = before_hung();
    release(&below);
    write(&device, 11, 210);
    assert_eq!(bytes_of(&start_read(&device, 10, 3)), [10, 210, 12]);
    let region = pool(64);
    let options = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let groups = CacheDevice::open(region, memory(), binding(), options).unwrap();
    let groups = Arc::new(groups);
    write(&groups, 11, 210);
    assert_eq!(bytes_of(&start_read(&groups, 10, 3)), [0, 210, 0]);
}
