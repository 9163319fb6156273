//! Errors of write-backs that ran when nobody waited for them, kept until a flush or FUA reports them (P5).
//!
//! The ledger only remembers that there is something to say. What keeps the data safe is that the policy
//! leaves the block dirty and tries again at every flush.

use parking_lot::Mutex;

use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::sync::{AtomicU32, Ordering};

/// Failed write-backs not yet reported.
#[derive(Default)]
pub(super) struct Faults {
    /// Failures since the last report, so that a path without failures takes no lock.
    unreported: AtomicU32,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// The first failure since the last report.
    first: Option<Fault>,
    /// The last failure of all.
    last: Option<Fault>,
}

#[derive(Clone)]
struct Fault {
    lba: u64,
    kind: DeviceErrorKind,
    message: String,
}

impl Faults {
    /// The write-back of `lba` failed with `error`; the block stays dirty.
    pub(super) fn record(&self, lba: u64, error: &DeviceError) {
        let fault = Fault { lba, kind: error.kind(), message: error.with_causes() };
        let mut log = self.log.lock();
        log.first.get_or_insert_with(|| fault.clone());
        log.last = Some(fault);
        self.unreported.fetch_add(1, Ordering::Relaxed);
    }

    /// Reports the failures since the last report, once.
    ///
    /// # Errors
    /// The first of them, with its kind.
    pub(super) fn report(&self) -> Result<()> {
        if self.unreported.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let mut log = self.log.lock();
        let failures = self.unreported.swap(0, Ordering::Relaxed);
        let Some(Fault { lba, kind, message }) = log.first.take() else { return Ok(()) };
        Err(DeviceError::new(
            kind,
            format!(
                "{failures} write-back(s) from the DRAM tier failed, first that of block {lba}: {message}; \
                 the data is kept and every flush tries again"
            ),
        ))
    }

    /// The error of a flush that found `lba` still dirty, though what failed may already be reported.
    pub(super) fn stuck(&self, lba: u64) -> DeviceError {
        let last = self.log.lock().last.clone();
        let (kind, last) = last.map_or((DeviceErrorKind::Io, String::new()), |fault| {
            (fault.kind, format!(" (last failure, of block {}: {})", fault.lba, fault.message))
        });
        DeviceError::new(
            kind,
            format!(
                "block {lba} still cannot be written back from the DRAM tier{last}; \
                 the data is kept and every flush tries again"
            ),
        )
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn failures_are_reported_once_with_the_first_one_named() {
        let faults = Faults::default();
        assert!(faults.report().is_ok());
        faults.record(7, &DeviceError::new(DeviceErrorKind::NoSpace, "full"));
        faults.record(8, &DeviceError::new(DeviceErrorKind::Io, "broken"));
        let error = faults.report().unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::NoSpace);
        assert!(error.to_string().starts_with("2 write-back(s)"), "{error}");
        assert!(error.to_string().contains("block 7: full"), "{error}");
        assert!(faults.report().is_ok());
    }
}
