//! A layer that remembers each request: what, where, how long, how it ended.
//!
//! Records go to a bounded ring in memory, which forgets the oldest and counts what it forgot, or
//! to a sink such as [`csv`]. The requests of a batch share one start and one duration: they were
//! in the device together.

#![expect(
    clippy::disallowed_methods,
    reason = "a trace tells when: the one thing here that needs a clock"
)]

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{
    AsyncRequest, Attempt, BlockDevice, Context, DeviceErrorKind, Extent, Geometry, Op, Operation,
    Request, Result,
};

/// One finished request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// When it started, since the layer was made.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// What it was.
    pub op: Op,
    /// First byte; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// It was to be durable when acknowledged.
    pub fua: bool,
    /// The kind of its error.
    pub error: Option<DeviceErrorKind>,
}

/// The last records, oldest first.
#[derive(Debug, Default)]
pub struct Recent {
    /// The records.
    pub records: VecDeque<Record>,
    /// Records that the bound pushed out.
    pub forgotten: u64,
}

type Sink = Box<dyn Fn(&Record) + Send + Sync>;

enum Output {
    Ring { recent: Mutex<Recent>, most: usize },
    Sink(Sink),
}

/// A device that remembers what was asked of it, over another.
pub struct Trace {
    inner: Arc<dyn BlockDevice>,
    epoch: Instant,
    output: Output,
}

impl Trace {
    /// Keeps the last `most` records in memory.
    pub fn ring(inner: Arc<dyn BlockDevice>, most: usize) -> Self {
        Self::with(inner, Output::Ring { recent: Mutex::default(), most })
    }

    /// Gives each record to `sink`, on the thread of the request.
    pub fn to(inner: Arc<dyn BlockDevice>, sink: impl Fn(&Record) + Send + Sync + 'static) -> Self {
        Self::with(inner, Output::Sink(Box::new(sink)))
    }

    /// Takes the records of the ring out; none where records go to a sink.
    pub fn take(&self) -> Recent {
        match &self.output {
            Output::Ring { recent, .. } => std::mem::take(&mut recent.lock()),
            Output::Sink(_) => Recent::default(),
        }
    }

    fn with(inner: Arc<dyn BlockDevice>, output: Output) -> Self {
        Self { inner, epoch: Instant::now(), output }
    }

    fn run(&self, operation: Operation<'_>) -> Result<()> {
        let mut request = [Request::new(operation)];
        self.submit(&mut request);
        request[0].take_result().expect("a submitted request has a result")
    }

    fn keep(&self, record: Record) {
        match &self.output {
            Output::Sink(sink) => sink(&record),
            Output::Ring { recent, most } => {
                let mut recent = recent.lock();
                recent.records.push_back(record);
                if recent.records.len() > *most {
                    recent.records.pop_front();
                    recent.forgotten += 1;
                }
            }
        }
    }
}

fn record_of(
    operation: &Operation<'_>,
    result: Option<&Result<()>>,
    start: Duration,
    duration: Duration,
) -> Record {
    let (offset, len) = operation.range();
    let fua = match operation {
        Operation::Write { flags, .. } => flags.fua,
        Operation::WriteZeroes { flags, .. } => flags.fua,
        _ => false,
    };
    let error = result.and_then(|it| it.as_ref().err()).map(super::DeviceError::kind);
    Record { start, duration, op: Op::of(operation), offset, len, fua, error }
}

/// A sink that writes `ts_us,op,offset,len` to `writer`, a header first: the form that trace replay
/// reads. What is left of a failed write is lost: a trace never fails the device it watches.
pub fn csv(mut writer: impl Write + Send + 'static) -> impl Fn(&Record) + Send + Sync + 'static {
    let _ = writeln!(writer, "ts_us,op,offset,len");
    let writer = Mutex::new(writer);
    move |record| {
        let Record { start, op, offset, len, .. } = record;
        let _ = writeln!(writer.lock(), "{},{},{offset},{len}", start.as_micros(), op.name());
    }
}

impl BlockDevice for Trace {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    operations_through_run!();

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.inner.status(offset, len, most)
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let start = self.epoch.elapsed();
        self.inner.submit(batch);
        let duration = self.epoch.elapsed().saturating_sub(start);
        for request in &*batch {
            self.keep(record_of(request.operation(), request.result(), start, duration));
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let start = self.epoch.elapsed();
        let attempt = self.inner.attempt(operation, context);
        if let Attempt::Done(result) = &attempt {
            let duration = self.epoch.elapsed().saturating_sub(start);
            self.keep(record_of(operation, Some(result), start, duration));
        }
        attempt
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        let (inner, start) = (Arc::clone(&self.inner), self.epoch.elapsed());
        inner.start(request.forward(move |mut request, result| {
            let duration = self.epoch.elapsed().saturating_sub(start);
            self.keep(record_of(&request.operation(), Some(&result), start, duration));
            request.complete(result);
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::WriteFlags;
    use crate::device::conformance::{self, Promises};
    use crate::device::memory::MemoryDevice;

    fn memory() -> Arc<MemoryDevice> {
        Arc::new(MemoryDevice::new(512, 2048).unwrap())
    }

    #[test]
    fn it_conforms() {
        let device = Trace::ring(memory(), 100);
        conformance::check(&device, Promises { whole_blocks: true, ..Promises::default() });
        let recent = device.take();
        assert_eq!(recent.records.len(), 100);
        assert!(recent.forgotten > 1000);
        assert_eq!(device.take().records.len(), 0);
    }

    #[test]
    fn a_record_tells_what_happened() {
        let device = Trace::ring(memory(), 100);
        device.write(512, &[1; 1024], WriteFlags { fua: true }).unwrap();
        device.read(1, &mut [0; 512]).unwrap_err();
        device.flush().unwrap();
        let told: Vec<_> = device
            .take()
            .records
            .into_iter()
            .map(|it| (it.op, it.offset, it.len, it.fua, it.error))
            .collect();
        assert_eq!(
            told,
            [
                (Op::Write, 512, 1024, true, None),
                (Op::Read, 1, 512, false, Some(DeviceErrorKind::Misaligned)),
                (Op::Flush, 0, 0, false, None),
            ]
        );
    }

    #[test]
    fn csv_is_what_replay_reads() {
        #[derive(Clone, Default)]
        struct Shared(Arc<Mutex<Vec<u8>>>);
        impl Write for Shared {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let text = Shared::default();
        let sink = csv(text.clone());
        sink(&Record {
            start: Duration::from_micros(1234),
            duration: Duration::ZERO,
            op: Op::Write,
            offset: 4096,
            len: 512,
            fua: false,
            error: None,
        });
        let text = String::from_utf8(text.0.lock().clone()).unwrap();
        assert_eq!(text, "ts_us,op,offset,len\n1234,write,4096,512\n");
    }
}
