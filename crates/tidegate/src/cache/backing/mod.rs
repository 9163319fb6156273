//! The backing: the device below the cache, the writes to it that are under way or not flushed, and
//! its failures.

pub(super) mod flushes;
pub(super) mod pace;
pub(super) mod traffic;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::Ask;
use super::counters::{Counter, Counters};
use super::pages::index::Found;
use super::span::{Content, bytes_at, bytes_of, pages_of};
use crate::device::{
    BlockDevice, BlockDeviceExt, DeviceError, Geometry, Request, Result, WriteFlags, ZeroFlags,
};
use crate::sync::{AtomicBool, Ordering};
use crate::tier::ledger::{Failed, Ledger};
use flushes::{Call, Flushes, Last, Moment};
use pace::Pace;
use traffic::Traffic;

/// The device below the cache.
pub(super) struct Backing {
    pub(super) device: Arc<dyn BlockDevice>,
    /// The geometry of the cache: the size of the backing, in blocks of the pool's block size.
    pub(super) geometry: Geometry,
    pub(super) traffic: Traffic,
    pub(super) ledger: Ledger,
    pub(super) flushes: Flushes,
    /// Pages that mode `wt` wrote through, each with a moment before the write. The next flush of
    /// the backing makes them clean, if none has failed since the moment.
    pub(super) written: Mutex<Vec<(Found, Moment)>>,
    /// Dirty pages stay in the pool: flushes end there.
    pub(super) keeps_dirty: AtomicBool,
    pub(super) pace: Pace,
    pub(super) counters: Arc<Counters>,
}

/// The caller that needs a flush of the backing, and how its failure is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// A client's flush, which fails.
    Client,
    /// Other work. If writes around the cache may be lost, the next client's flush fails.
    Other,
}

/// Why work with the backing failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// A flush of the backing failed, which is recorded or reported.
    Flush(DeviceError),
    /// Another request failed, or the pool. No write around the cache is lost by that.
    Work(Failed),
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Work(Failed::Own(error))
    }
}

impl From<Failure> for DeviceError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Flush(error) => error,
            Failure::Work(failed) => failed.into(),
        }
    }
}

impl Backing {
    /// Reads at `offset` from the backing, for `class`; whole pages if its blocks are larger.
    pub(in crate::cache) fn read(&self, offset: u64, buf: &mut [u8], class: u8) -> Result<()> {
        let range = pages_of(offset, buf.len() as u64);
        let read_core = |offset: u64, buf: &mut [u8]| {
            let read = self.device.read(offset, buf);
            self.counters.count_core_read(class, range.end - range.start, &read);
            read
        };
        if self.takes(&bytes_at(offset, buf.len())) {
            return read_core(offset, buf);
        }
        let bytes = bytes_of(&range);
        let mut pages = vec![0; usize::try_from(bytes.end - bytes.start).unwrap_or_default()];
        read_core(bytes.start, &mut pages)?;
        let from = usize::try_from(offset - bytes.start).unwrap_or_default();
        buf.copy_from_slice(&pages[from..from + buf.len()]);
        Ok(())
    }

    /// Returns whether a flush has to go on to the backing, because that has unflushed writes.
    pub(in crate::cache) fn passes_flush_on(&self) -> bool {
        if self.keeps_dirty.load(Ordering::SeqCst) {
            return self.traffic.needs_own_flush();
        }
        self.traffic.needs_flush() || !self.written.lock().is_empty()
    }

    /// Does `work` with the backing outside of a client's flush, and records its failure. If the
    /// pool fails, the next flush fails. If the backing fails, only a flush of the backing that
    /// failed may have lost acknowledged writes, and [`flush`](Self::flush) recorded that.
    pub(in crate::cache) fn apart_from_flushes<T>(
        &self,
        work: impl FnOnce() -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        work().map_err(|failure| match failure {
            Failure::Flush(error) => error,
            Failure::Work(failed) => self.ledger.write_back_failed(failed, false),
        })
    }

    /// Flushes the backing, in the turn `last`, for `caller`. Succeeds only if no flush has failed
    /// since the moment. If the flush fails for [`Caller::Other`] and acknowledged writes around
    /// the cache are unflushed, the client's next flush fails too: a backing may report their loss
    /// only once. All other writes are durable in the pool.
    pub(in crate::cache) fn flush(
        &self,
        last: MutexGuard<'_, Last>,
        asked: (Moment, Call),
        caller: Caller,
    ) -> Result<()> {
        let failed = |error| {
            // The backing may have lost writes whose data was read before. None of that data may be
            // kept, even though a later flush succeeds.
            self.traffic.keep_nothing_read();
            self.counters.add(Counter::CoreWriteErrors, 1);
            match caller {
                Caller::Client => error,
                Caller::Other => {
                    let is_at_risk = self.traffic.needs_flush();
                    self.ledger.write_back_failed(Failed::Below(error), is_at_risk)
                }
            }
        };
        self.flushes.flush(last, asked, || self.device.flush(), failed)
    }

    /// Returns whether `bytes` are whole blocks of the backing.
    pub(super) fn takes(&self, bytes: &Range<u64>) -> bool {
        let block = u64::from(self.device.geometry().block_bytes);
        bytes.start.is_multiple_of(block) && bytes.end.is_multiple_of(block)
    }

    /// Writes to the backing; a flush is needed afterwards unless `ask.fua`.
    pub(in crate::cache) fn write(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        let Ask { fua, keeps_space, fast_only, class, .. } = ask;
        let (Range { start, end }, pages) = (content.bytes.clone(), content.pages());
        let _foreground = self.pace.foreground();
        let written = if let Some(data) = content.data {
            self.device.write(start, data, WriteFlags { fua })
        } else {
            let flags = ZeroFlags { fua, may_unmap: !keeps_space, fast_only };
            self.device.write_zeroes(start, end - start, flags)
        };
        match &written {
            Ok(()) => self.counters.add_of(class, Counter::CoreWrites, pages.end - pages.start),
            Err(_) => self.counters.add(Counter::CoreWriteErrors, 1),
        }
        // Even after a failure: a part may have been written. With FUA the write is flushed, but
        // the fills learn that only from a flush.
        for bucket in Traffic::buckets(pages) {
            self.traffic.bypassed(bucket);
        }
        written
    }

    /// Returns whether a block of the device is whole blocks of the backing.
    pub(super) fn takes_blocks(&self) -> bool {
        self.geometry.block_bytes.is_multiple_of(self.device.geometry().block_bytes)
    }

    /// Submits `requests` to the backing, and counts the failed ones as `errors`. Returns the index
    /// and the error of each failed request.
    pub(in crate::cache) fn submit(
        &self,
        mut requests: Vec<Request<'_>>,
        errors: Counter,
    ) -> Vec<(usize, DeviceError)> {
        self.device.submit(&mut requests);
        let error_of = |(index, request): (usize, &mut Request<'_>)| {
            Some((index, request.take_result()?.err()?))
        };
        let failed: Vec<_> = requests.iter_mut().enumerate().filter_map(error_of).collect();
        self.counters.add(errors, failed.len() as u64);
        failed
    }
}
