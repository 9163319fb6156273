//! Failed write-backs that no request waited for, kept until a flush or FUA reports them (P5).
//!
//! The ledger only remembers failures to report. The data is safe because the tier keeps it, dirty,
//! and repeats the write-back. If the tier also keeps it durably, and only the device below failed,
//! no flush has to fail ([`write_back_failed`](Ledger::write_back_failed)).

use parking_lot::Mutex;

use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::sync::{AtomicU64, Ordering};

/// Why a write-back failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The device below failed. The tier still has all its data.
    Below(DeviceError),
    /// The tier's own memory failed, or its data is damaged. Acknowledged data may be lost.
    Own(DeviceError),
}

impl From<DeviceError> for Failed {
    fn from(error: DeviceError) -> Self {
        Self::Own(error)
    }
}

impl From<Failed> for DeviceError {
    fn from(failed: Failed) -> Self {
        let (Failed::Below(error) | Failed::Own(error)) = failed;
        error
    }
}

/// The failed write-backs of one tier.
pub(crate) struct Ledger {
    /// Name of the tier, for messages.
    tier: &'static str,
    /// Number of all failures so far, so that a path without failures takes no lock.
    failures: AtomicU64,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    unreported: u64,
    /// The first failure since the last report.
    first: Option<Failure>,
    /// The last failure of all.
    last: Option<Failure>,
}

#[derive(Clone)]
struct Failure {
    /// The block that was written, if known.
    lba: Option<u64>,
    kind: DeviceErrorKind,
    message: String,
}

impl Failure {
    fn of_block(&self) -> String {
        self.lba.map_or(String::new(), |lba| format!(" that of block {lba}"))
    }
}

impl Ledger {
    /// Returns an empty ledger of a tier that messages call `tier`, such as "the log".
    pub(crate) fn new(tier: &'static str) -> Self {
        Self { tier, failures: AtomicU64::new(0), entries: Mutex::default() }
    }

    /// Notes that the write-back of block `lba`, or of several blocks, failed with `error`. The
    /// data stays dirty, and the next flush reports the failure.
    pub(crate) fn record(&self, lba: Option<u64>, error: &DeviceError) {
        self.count(lba, error, true);
    }

    /// Notes a failed write-back of a tier that keeps acknowledged data durably, and returns its
    /// error. The next flush reports the failure, unless only the device below failed and the data
    /// that it may have lost was not acknowledged, which makes `is_at_risk` false.
    pub(crate) fn write_back_failed(&self, failed: Failed, is_at_risk: bool) -> DeviceError {
        let is_to_report = is_at_risk || matches!(failed, Failed::Own(_));
        let error = DeviceError::from(failed);
        self.count(None, &error, is_to_report);
        error
    }

    /// Counts a write-back that failed with `error`, and keeps it for requests that it blocks. The
    /// next flush reports it if it `is_to_report`.
    fn count(&self, lba: Option<u64>, error: &DeviceError, is_to_report: bool) {
        let failure = Failure { lba, kind: error.kind(), message: error.with_causes() };
        let mut entries = self.entries.lock();
        if is_to_report {
            entries.unreported += 1;
            entries.first.get_or_insert_with(|| failure.clone());
        }
        entries.last = Some(failure);
        self.failures.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of failures so far, reported or not.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Reports the failures since the last report, each once.
    ///
    /// # Errors
    /// Returns the first failure since the last report, with its kind.
    pub(crate) fn report(&self) -> Result<()> {
        if self.failures() == 0 {
            return Ok(());
        }
        let mut entries = self.entries.lock();
        let failures = std::mem::take(&mut entries.unreported);
        let Some(first) = entries.first.take() else { return Ok(()) };
        let Self { tier, .. } = self;
        Err(DeviceError::new(
            first.kind,
            format!(
                "{failures} write-back(s) from {tier} failed, first{}: {}; \
                 the data is kept and written back again",
                first.of_block(),
                first.message
            ),
        ))
    }

    /// Returns the error for a request that a failed write-back blocks, even if the failure was
    /// reported already. `found` is the state that the request met, for the message.
    pub(crate) fn blocked(&self, found: &str) -> DeviceError {
        let last = self.entries.lock().last.clone();
        let (kind, last) = last.map_or((DeviceErrorKind::Io, String::new()), |last| {
            (last.kind, format!(" (last failure{}: {})", last.of_block(), last.message))
        });
        let context = format!("{found}{last}; the data is kept and written back again");
        DeviceError::new(kind, context)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn failures_are_reported_once_with_the_first_one_named() {
        let ledger = Ledger::new("the DRAM tier");
        assert!(ledger.report().is_ok());
        ledger.record(Some(7), &DeviceError::new(DeviceErrorKind::NoSpace, "full"));
        ledger.record(Some(8), &DeviceError::new(DeviceErrorKind::Io, "broken"));
        let error = ledger.report().unwrap_err();
        assert_eq!((error.kind(), ledger.failures()), (DeviceErrorKind::NoSpace, 2));
        assert_eq!(
            error.to_string(),
            "2 write-back(s) from the DRAM tier failed, first that of block 7: full; \
             the data is kept and written back again"
        );
        assert!(ledger.report().is_ok());
    }

    #[test]
    fn what_leaves_nothing_at_risk_is_counted_and_not_reported() {
        let ledger = Ledger::new("the cache");
        let gone = || DeviceError::new(DeviceErrorKind::Io, "gone");
        ledger.write_back_failed(Failed::Below(gone()), false);
        assert!(ledger.report().is_ok());
        assert_eq!(ledger.failures(), 1);
        assert!(ledger.blocked("the cache is full").to_string().contains("(last failure: gone)"));
        for (failed, is_at_risk) in [(Failed::Below(gone()), true), (Failed::Own(gone()), false)] {
            ledger.write_back_failed(failed, is_at_risk);
            ledger.report().unwrap_err();
        }
    }

    #[test]
    fn a_blocked_request_names_the_last_failure_though_it_was_reported() {
        let ledger = Ledger::new("the log");
        ledger.record(None, &DeviceError::new(DeviceErrorKind::NoSpace, "full"));
        ledger.report().unwrap_err();
        let error = ledger.blocked("the log is full and cannot be written back");
        assert_eq!(error.kind(), DeviceErrorKind::NoSpace);
        assert!(error.to_string().contains("written back (last failure: full);"), "{error}");
    }
}
