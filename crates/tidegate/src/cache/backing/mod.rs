//! The backing: the device below the cache, the writes to it that are under way or not flushed, and
//! its failures.

pub(super) mod pace;
pub(super) mod traffic;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Ask;
use super::counters::{Counter, Counters};
use super::pages::index::Found;
use super::span::{Content, bytes_at, bytes_of, pages_of};
use crate::device::{
    BlockDevice, BlockDeviceExt, Geometry, Request, Result, WriteFlags, ZeroFlags,
};
use crate::sync::{AtomicBool, Ordering};
use crate::tier::ledger::{Failed, Ledger};
use pace::Pace;
use traffic::Traffic;

/// The device below the cache.
pub(super) struct Backing {
    pub(super) device: Arc<dyn BlockDevice>,
    /// The geometry of the cache: the size of the backing, in blocks of the pool's block size.
    pub(super) geometry: Geometry,
    pub(super) traffic: Traffic,
    pub(super) ledger: Ledger,
    /// Pages that mode `wt` wrote through. The next flush of the backing makes them clean.
    pub(super) written: Mutex<Vec<Found>>,
    /// Dirty pages stay in the pool: flushes end there.
    pub(super) keeps_dirty: AtomicBool,
    pub(super) pace: Pace,
    pub(super) counters: Arc<Counters>,
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

    /// Does `work` with the backing outside of a client's flush. If the backing fails, and
    /// acknowledged writes around the cache were unflushed when the work began, the client's next
    /// flush fails too: a backing may report their loss only once. All other writes are durable in
    /// the pool. If the pool fails, the next flush fails in any case.
    pub(in crate::cache) fn apart_from_flushes<T>(
        &self,
        work: impl FnOnce() -> std::result::Result<T, Failed>,
    ) -> Result<T> {
        let flushed = self.traffic.flushed();
        work().map_err(|failed| {
            self.ledger.write_back_failed(failed, self.traffic.has_bypassed_since(flushed))
        })
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

    /// Submits `requests` to the backing, and counts the failed ones as `errors`.
    pub(in crate::cache) fn submit(
        &self,
        mut requests: Vec<Request<'_>>,
        errors: Counter,
    ) -> Result<()> {
        self.device.submit(&mut requests);
        let mut done = Ok(());
        for request in &mut requests {
            let result = request.take_result().unwrap_or(Ok(()));
            done = done.and(result.inspect_err(|_| self.counters.add(errors, 1)));
        }
        done
    }
}
