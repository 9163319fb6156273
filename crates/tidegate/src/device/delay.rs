//! A layer that makes a device as slow as a disk or a network.
//!
//! Each request takes at least its delay, a fixed part and a part for each byte. The time of the
//! device below counts towards the delay. The requests of a batch wait together, as in a device
//! with a queue, and so do started requests. The waiting thread is parked, as for a disk, but spins
//! for the last 80 µs, because waking up takes longer.

#![expect(
    clippy::disallowed_methods,
    reason = "a delay is made of time: the one thing here that needs a clock"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::timer::{SPIN, Timer};
use super::{AsyncRequest, BlockDevice, Geometry, Operation, Request, Result};

/// Delays of requests, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Delays {
    /// Each read.
    pub read_ns: u64,
    /// Each write, discard and zeroing.
    pub write_ns: u64,
    /// Each flush; added to each forced write.
    pub flush_ns: u64,
    /// Each byte read or written, in picoseconds: 1000 is 1 GB/s.
    pub byte_ps: u64,
}

impl Delays {
    /// Returns delays of `request_ns` nanoseconds for each request, and nothing for its bytes.
    pub const fn of_each(request_ns: u64) -> Self {
        Self { read_ns: request_ns, write_ns: request_ns, flush_ns: request_ns, byte_ps: 0 }
    }

    /// Returns the delay of `operation`.
    pub fn of(&self, operation: &Operation<'_>) -> Duration {
        let forced = |fua: bool| if fua { self.flush_ns } else { 0 };
        let bytes = |len: usize| (len as u64).saturating_mul(self.byte_ps) / 1000;
        Duration::from_nanos(match operation {
            Operation::Read { buf, .. } => self.read_ns.saturating_add(bytes(buf.len())),
            Operation::Write { data, flags, .. } => {
                self.write_ns.saturating_add(bytes(data.len())).saturating_add(forced(flags.fua))
            }
            Operation::Flush => self.flush_ns,
            Operation::Discard { .. } => self.write_ns,
            Operation::Status { .. } => self.read_ns,
            Operation::WriteZeroes { flags, .. } => self.write_ns.saturating_add(forced(flags.fua)),
        })
    }

    /// Returns the delay of a batch: its slowest request, plus the time of all its bytes.
    fn of_batch(&self, batch: &[Request<'_>]) -> Duration {
        let fixed = Self { byte_ps: 0, ..*self };
        let all = |delays: Self| batch.iter().map(move |it| delays.of(it.operation()));
        let slowest = all(fixed).max().unwrap_or_default();
        let bytes = all(Self { byte_ps: self.byte_ps, ..Self::default() });
        bytes.fold(slowest, Duration::saturating_add)
    }
}

/// A slow device over another.
pub struct Delay {
    inner: Arc<dyn BlockDevice>,
    delays: Delays,
    timer: Timer,
}

impl Delay {
    /// Wraps `inner` and makes it as slow as `delays` say.
    pub fn new(inner: Arc<dyn BlockDevice>, delays: Delays) -> Self {
        Self { inner, delays, timer: Timer::default() }
    }
}

/// Waits until `end`; forever if `end` is `None`, a time beyond the clock.
fn wait_until(end: Option<Instant>) {
    loop {
        let now = Instant::now();
        match end.map(|end| end.saturating_duration_since(now)) {
            Some(Duration::ZERO) => return,
            Some(left) if left <= SPIN => std::hint::spin_loop(),
            Some(left) => std::thread::park_timeout(left.saturating_sub(SPIN)),
            None => std::thread::park(),
        }
    }
}

impl BlockDevice for Delay {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let end = Instant::now().checked_add(self.delays.of(operation));
        let result = self.inner.run(operation);
        wait_until(end);
        result
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let end = Instant::now().checked_add(self.delays.of_batch(batch));
        self.inner.submit(batch);
        wait_until(end);
    }

    fn start(self: Arc<Self>, mut request: AsyncRequest) {
        let end = Instant::now().checked_add(self.delays.of(&request.operation()));
        let timer = self.timer.queue();
        let below = request.forward(move |request, result| {
            timer.complete_at(end, request, result);
        });
        below.start_on(&self.inner);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::memory::MemoryDevice;
    use crate::device::{BlockDeviceExt, Context, OwnedOperation, WriteFlags};

    const SSD: Delays =
        Delays { read_ns: 80_000, write_ns: 20_000, flush_ns: 500_000, byte_ps: 2000 };

    fn memory() -> Arc<MemoryDevice> {
        Arc::new(MemoryDevice::new(4096, 2048).unwrap())
    }

    #[test]
    fn it_conforms() {
        let delays = Delays { read_ns: 10, write_ns: 10, flush_ns: 100, byte_ps: 10 };
        let promises = Promises { whole_blocks: true, ..Promises::default() };
        let device: Arc<dyn BlockDevice> = Arc::new(Delay::new(memory(), delays));
        conformance::check(&*device, promises);
        conformance::check_started(&device, promises);
    }

    #[test]
    fn a_request_costs_its_kind_and_its_bytes() {
        let mut buf = [0; 4096];
        let read = Operation::Read { offset: 0, buf: &mut buf };
        assert_eq!(SSD.of(&read), Duration::from_nanos(80_000 + 8_192));
        let data = [0; 8192];
        let write = |fua| Operation::Write { offset: 0, data: &data, flags: WriteFlags { fua } };
        assert_eq!(SSD.of(&write(false)), Duration::from_nanos(20_000 + 16_384));
        assert_eq!(SSD.of(&write(true)), Duration::from_nanos(520_000 + 16_384));
        assert_eq!(SSD.of(&Operation::Flush), Duration::from_micros(500));
    }

    #[test]
    fn a_batch_waits_once_but_moves_every_byte() {
        let data = [0; 4096];
        let write = |offset| Operation::Write { offset, data: &data, flags: WriteFlags::default() };
        let batch: Vec<_> = (0..8).map(|index| Request::new(write(index * 4096))).collect();
        assert_eq!(SSD.of_batch(&batch), Duration::from_nanos(20_000 + 8 * 8_192));
        assert_eq!(SSD.of_batch(&[]), Duration::ZERO);
    }

    #[test]
    fn a_delay_beyond_the_clock_does_not_overflow() {
        let endless = Delays { write_ns: u64::MAX, byte_ps: u64::MAX, ..Delays::default() };
        let write = Operation::Write { offset: 0, data: &[0; 4096], flags: WriteFlags::default() };
        assert_eq!(endless.of(&write), Duration::from_nanos(u64::MAX));
    }

    /// Only the lower bound is promised, so only that is tested: parked, then spinning.
    #[test]
    fn a_request_takes_at_least_its_delay() {
        for flush_ns in [5_000, 2_000_000] {
            let device = Delay::new(memory(), Delays { flush_ns, ..Delays::default() });
            let start = Instant::now();
            device.flush().unwrap();
            assert!(start.elapsed() >= Duration::from_nanos(flush_ns));
        }
    }

    fn flush(tag: usize, ends: &Sender<(usize, ThreadId)>) -> AsyncRequest {
        let ends = ends.clone();
        AsyncRequest::new(OwnedOperation::Flush, Context::default(), move |_, result| {
            result.unwrap();
            ends.send((tag, std::thread::current().id())).unwrap();
        })
    }

    /// 256 requests of half a second each are in flight together, which a thread for each request,
    /// or sixteen threads, could not do. One thread completes all, in their order.
    #[test]
    fn many_requests_wait_together_and_one_thread_completes_them() {
        let delays = Delays { flush_ns: 500_000_000, ..Delays::default() };
        let device = Arc::new(Delay::new(memory(), delays));
        let (ended, ends) = channel();
        (0..256).for_each(|tag| Arc::clone(&device).start(flush(tag, &ended)));
        assert_eq!(device.timer.waiting(), 256);
        let ends: Vec<_> = ends.iter().take(256).collect();
        assert!(ends.iter().map(|(tag, _)| *tag).eq(0..256));
        let threads: HashSet<_> = ends.iter().map(|(_, thread)| *thread).collect();
        assert_eq!(threads.len(), 1);
        assert!(!threads.contains(&std::thread::current().id()));
    }

    #[test]
    fn what_a_dropped_device_holds_completes() {
        let delays = Delays { flush_ns: u64::MAX, ..Delays::default() };
        let device = Arc::new(Delay::new(memory(), delays));
        let (ended, ends) = channel();
        (0..8).for_each(|tag| Arc::clone(&device).start(flush(tag, &ended)));
        assert!(ends.try_recv().is_err());
        drop(device);
        assert_eq!(ends.try_iter().count(), 8);
    }
}
