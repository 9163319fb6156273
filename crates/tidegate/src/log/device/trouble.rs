//! Failures of bringing records home, kept until a flush reports them.

use parking_lot::Mutex;

use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::sync::{AtomicU64, Ordering};

/// Failures since the device was opened.
pub(super) struct Trouble {
    failures: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    unreported: u64,
    last: Option<(DeviceErrorKind, String)>,
}

impl Trouble {
    pub(super) fn new() -> Self {
        Self { failures: AtomicU64::new(0), state: Mutex::default() }
    }

    /// Bringing records home failed.
    pub(super) fn record(&self, error: &DeviceError) {
        let mut state = self.state.lock();
        state.unreported += 1;
        state.last = Some((error.kind(), error.with_causes()));
        self.failures.fetch_add(1, Ordering::Release);
    }

    /// How often that was so far.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Reports the failures since the last report, once.
    ///
    /// # Errors
    /// The last of them, with its kind.
    pub(super) fn report(&self) -> Result<()> {
        if self.failures() == 0 {
            return Ok(());
        }
        let mut state = self.state.lock();
        let failures = std::mem::take(&mut state.unreported);
        match &state.last {
            Some((kind, last)) if failures > 0 => Err(DeviceError::new(
                *kind,
                format!(
                    "{failures} attempt(s) to write back from the log failed, the last one: {last}; \
                     the data is safe in the log, and it is tried again"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The error of a write for which a failure left no room.
    pub(super) fn stuck(&self) -> DeviceError {
        let last = self.state.lock().last.clone();
        let (kind, last) = last.unwrap_or((DeviceErrorKind::Io, String::new()));
        DeviceError::new(kind, format!("the log is full and cannot be written back: {last}"))
    }
}
