//! Flushes of the backing, which take turns.
//!
//! A backing reports a loss once: after a flush that failed, the next one succeeds, though writes
//! before the failed one are lost. So a thread that waits for its writes to be durable has to learn
//! of each failed flush, also of another thread's.
//!
//! Invariants:
//! 1. A flush that fails is counted, and what it implies is done, before the next one begins.
//! 2. A flush *since* a moment succeeds only if no flush has failed since that moment. Writes that
//!    began after the moment, and ended before the call, are durable then.
//! 3. Callers that wait share a flush that began after all of their calls.

use parking_lot::{Mutex, MutexGuard};

use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::sync::{AtomicU64, Ordering};

/// A moment between failures: the number of flushes that had failed by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) struct Moment(u64);

/// A call for a flush: the number of flushes that had begun before it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct Call(u64);

/// The flushes of the backing.
#[derive(Default)]
pub(in crate::cache) struct Flushes {
    begun: AtomicU64,
    failed: AtomicU64,
    /// Held while a flush is at the backing, until its failure is counted.
    pub(in crate::cache) last: Mutex<Last>,
}

/// The results of the last flushes.
#[derive(Default)]
pub(in crate::cache) struct Last {
    /// The number of the last flush that succeeded.
    succeeded: u64,
    /// The last failure.
    failure: Option<(DeviceErrorKind, String)>,
}

impl Flushes {
    /// Returns the present moment.
    pub(in crate::cache) fn moment(&self) -> Moment {
        Moment(self.failed.load(Ordering::SeqCst))
    }

    /// Calls for a flush of the writes that have ended by now.
    pub(in crate::cache) fn call(&self) -> Call {
        Call(self.begun.load(Ordering::SeqCst))
    }

    /// Runs `flush` for `call`, unless a flush that began after the call has succeeded already. If
    /// it fails, passes the error through `failed` before the turn `last` ends.
    ///
    /// # Errors
    /// This flush failed, or another one has failed since the moment `since`.
    pub(in crate::cache) fn flush(
        &self,
        mut last: MutexGuard<'_, Last>,
        (since, call): (Moment, Call),
        flush: impl FnOnce() -> Result<()>,
        failed: impl FnOnce(DeviceError) -> DeviceError,
    ) -> Result<()> {
        if self.moment() != since {
            return Err(last.failure());
        }
        if last.succeeded > call.0 {
            return Ok(());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        if let Err(error) = flush() {
            let error = failed(error);
            last.failure = Some((error.kind(), error.with_causes()));
            // After `failed`: a thread that sees the new moment finds all of that done.
            self.failed.fetch_add(1, Ordering::SeqCst);
            return Err(error);
        }
        last.succeeded = number;
        Ok(())
    }
}

impl Last {
    /// Returns the error of a caller whose writes another flush may have lost.
    fn failure(&self) -> DeviceError {
        let (kind, message) = self.failure.clone().unwrap_or((DeviceErrorKind::Io, String::new()));
        DeviceError::new(kind, format!("another flush of the backing failed meanwhile: {message}"))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn flush(flushes: &Flushes, since: Moment, call: Call, result: Result<()>) -> (bool, bool) {
        let mut has_run = false;
        let run = || {
            has_run = true;
            result
        };
        let done = flushes.flush(flushes.last.lock(), (since, call), run, |error| error);
        (has_run, done.is_ok())
    }

    fn broken() -> Result<()> {
        Err(DeviceError::new(DeviceErrorKind::Io, "broken"))
    }

    #[test]
    fn callers_share_a_flush_that_began_after_their_calls() {
        let flushes = Flushes::default();
        let (since, [one, other]) = (flushes.moment(), [flushes.call(), flushes.call()]);
        assert_eq!(flush(&flushes, since, one, Ok(())), (true, true));
        assert_eq!(flush(&flushes, since, other, Ok(())), (false, true));
        assert_eq!(flush(&flushes, since, flushes.call(), Ok(())), (true, true));
    }

    #[test]
    fn a_failure_fails_the_flushes_since_an_earlier_moment() {
        let flushes = Flushes::default();
        let (early, call) = (flushes.moment(), flushes.call());
        assert_eq!(flush(&flushes, early, call, broken()), (true, false));
        assert_eq!(flush(&flushes, early, call, Ok(())), (false, false), "it waited meanwhile");
        assert_eq!(flush(&flushes, early, flushes.call(), Ok(())), (false, false));
        assert_eq!(flush(&flushes, flushes.moment(), flushes.call(), Ok(())), (true, true));
        assert_eq!(
            flush(&flushes, early, call, Ok(())),
            (false, false),
            "though another succeeded"
        );
    }
}
