//! A layer that writes each request to a file, in the form that trace replay reads.
//!
//! A line is `ts_us,op,offset,len`: microseconds since the layer was made, the operation in one
//! word, and the range in bytes (zeroes for a flush). The requests of a batch share one time, since
//! they were in the device together. If the file cannot be written, no request fails;
//! [`Trace::finish`] reports the error.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tidegate::device::{BlockDevice, Geometry, Op, Operation, Request, Result};

use crate::error::{self, BenchError};

/// A layer over a device that records each request.
pub(crate) struct Trace {
    inner: Arc<dyn BlockDevice>,
    epoch: Instant,
    path: PathBuf,
    /// The file, or the error that ended its writing.
    lines: Mutex<io::Result<BufWriter<File>>>,
}

impl Trace {
    /// Writes the requests of `inner` to a new file at `path`.
    ///
    /// # Errors
    /// Fails as [`BenchError::Os`] if the file cannot be made.
    pub(crate) fn create(inner: Arc<dyn BlockDevice>, path: &Path) -> error::Result<Self> {
        let file = File::create(path).map_err(BenchError::os("create", path))?;
        let mut lines = BufWriter::new(file);
        let begun = writeln!(lines, "ts_us,op,offset,len").map(|()| lines);
        let path = path.to_path_buf();
        Ok(Self { inner, epoch: Instant::now(), path, lines: Mutex::new(begun) })
    }

    /// Ends the file.
    ///
    /// # Errors
    /// Fails as [`BenchError::Os`] if the file does not hold all requests.
    pub(crate) fn finish(self) -> error::Result<()> {
        let lines = self.lines.into_inner().unwrap_or_else(PoisonError::into_inner);
        lines.and_then(|mut lines| lines.flush()).map_err(BenchError::os("write", self.path))
    }

    fn keep(&self, ts_us: u128, operation: &Operation<'_>) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(file) = &mut *lines else { return };
        let (op, (offset, len)) = (Op::of(operation).name(), operation.range());
        if let Err(error) = writeln!(file, "{ts_us},{op},{offset},{len}") {
            *lines = Err(error);
        }
    }
}

impl BlockDevice for Trace {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let ts_us = self.epoch.elapsed().as_micros();
        let result = self.inner.run(operation);
        self.keep(ts_us, operation);
        result
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let ts_us = self.epoch.elapsed().as_micros();
        self.inner.submit(batch);
        for request in batch {
            self.keep(ts_us, request.operation());
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate::device::memory::MemoryDevice;
    use tidegate::device::{BlockDeviceExt, WriteFlags};

    use super::*;

    fn trace(path: &Path) -> Trace {
        Trace::create(Arc::new(MemoryDevice::new(512, 2048).unwrap()), path).unwrap()
    }

    #[test]
    fn requests_reach_the_device_and_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.csv");
        let (device, mut read) = (trace(&path), [0; 512]);
        device.write(512, &[1; 1024], WriteFlags { fua: true }).unwrap();
        device.read(1, &mut read).unwrap_err();
        device.read(1024, &mut read).unwrap();
        device.flush().unwrap();
        device.finish().unwrap();
        assert_eq!(read, [1; 512]);
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "ts_us,op,offset,len");
        let requests: Vec<_> =
            lines[1..].iter().map(|line| line.split_once(',').unwrap().1).collect();
        assert_eq!(requests, ["write,512,1024", "read,1,512", "read,1024,512", "flush,0,0"]);
    }

    #[test]
    fn a_full_disk_fails_the_trace_and_no_request() {
        let device = trace(Path::new("/dev/full"));
        for _ in 0..2000 {
            device.write(0, &[1; 512], WriteFlags::default()).unwrap();
        }
        let error = device.finish().unwrap_err().with_causes();
        assert!(error.contains("/dev/full"), "{error}");
    }
}
