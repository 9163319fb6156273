//! A small engine with planted faults, which tests the simulator itself.
//!
//! Each block has two slots and a selector word that names the current one. A write streams the
//! other slot, fences, then turns the selector and persists it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tidegate::device::{BlockDevice, Geometry, Operation, Result};
use tidegate::pmem::Region;

use crate::subject::Subject;

const BLOCKS: u64 = 4;
const BLOCK: usize = 512;
const BLOCK_BYTES: u64 = BLOCK as u64;
const DATA_OFFSET: u64 = 4096;

/// A planted fault of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The data is not fenced before the selector turns.
    NoDataFence,
    /// A write returns before its selector is durable.
    NoSelectorFence,
    /// Data is written over the current slot.
    InPlace,
    /// Reads do not lock their block.
    UnlockedRead,
    /// The lock is taken by a load and a store with a yield point between.
    RacyLock,
    /// The lock of block 3 is never given back.
    LostUnlock,
    /// A flush forgets the last block.
    ForgetfulFlush,
    /// Recovery clears the selector before it rewrites it.
    CarelessRecovery,
}

/// The toy engine as a [`Subject`].
#[derive(Debug, Clone, Copy)]
pub struct Toy {
    /// The planted fault.
    pub fault: Fault,
    /// Writes wait in volatile memory for the next flush.
    pub volatile_cache: bool,
}

struct Device {
    region: Arc<Region>,
    toy: Toy,
    locks: Vec<AtomicBool>,
    cached: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl Subject for Toy {
    fn create(&self, _region: &Region) -> std::result::Result<(), String> {
        Ok(())
    }

    fn open(&self, region: &Arc<Region>) -> std::result::Result<Arc<dyn BlockDevice>, String> {
        let (region, toy) = (Arc::clone(region), *self);
        let locks = (0..BLOCKS).map(|_| AtomicBool::new(false)).collect();
        let device = Device { region, toy, locks, cached: Mutex::default() };
        device.recover().map_err(|error| error.to_string())?;
        Ok(Arc::new(device))
    }

    fn check(&self, region: &Region) -> std::result::Result<(), String> {
        for lba in 0..BLOCKS {
            let selector = region.load_u64(lba * 64).map_err(|error| error.to_string())?;
            if selector > 1 {
                return Err(format!("selector {lba} is {selector}, expected 0 or 1"));
            }
        }
        Ok(())
    }

    fn region_bytes(&self) -> u64 {
        DATA_OFFSET + BLOCKS * 2 * BLOCK_BYTES
    }

    fn rounds_after_recovery(&self) -> u32 {
        2
    }
}

impl Device {
    /// Rewrites every selector, so that there is a recovery to crash in.
    fn recover(&self) -> Result<()> {
        for lba in 0..BLOCKS {
            let selector = self.region.load_u64(lba * 64)?;
            if self.toy.fault == Fault::CarelessRecovery {
                self.region.store_u64(lba * 64, 0)?;
            }
            self.region.store_u64(lba * 64, selector)?;
            self.region.persist(lba * 64, 8)?;
        }
        Ok(())
    }

    fn lock(&self, lba: u64) -> Result<()> {
        let lock = self.lock_of(lba);
        if self.toy.fault == Fault::RacyLock {
            while lock.load(Ordering::Acquire) {
                self.region.relax();
            }
            self.region.load_u64(lba * 64)?;
            lock.store(true, Ordering::Release);
            return Ok(());
        }
        while lock.swap(true, Ordering::Acquire) {
            self.region.relax();
        }
        Ok(())
    }

    fn lock_of(&self, lba: u64) -> &AtomicBool {
        &self.locks[usize::try_from(lba).expect("few blocks")]
    }

    fn unlock(&self, lba: u64) {
        let lost = self.toy.fault == Fault::LostUnlock && lba == 3;
        self.lock_of(lba).store(lost, Ordering::Release);
    }

    fn slot(lba: u64, slot: u64) -> u64 {
        DATA_OFFSET + (lba * 2 + slot) * BLOCK_BYTES
    }

    fn write_block(&self, lba: u64, data: &[u8]) -> Result<()> {
        self.lock(lba)?;
        let fault = self.toy.fault;
        let current = self.region.load_u64(lba * 64)?;
        let next = if fault == Fault::InPlace { current } else { 1 - current };
        self.region.write_streaming(Self::slot(lba, next), data)?;
        if fault != Fault::NoDataFence {
            self.region.fence()?;
        }
        self.region.store_u64(lba * 64, next)?;
        self.region.write_back(lba * 64, 8)?;
        if fault != Fault::NoSelectorFence {
            self.region.fence()?;
        }
        self.unlock(lba);
        Ok(())
    }

    fn read_block(&self, lba: u64, buf: &mut [u8]) -> Result<()> {
        let locked = self.toy.fault != Fault::UnlockedRead;
        if locked {
            self.lock(lba)?;
        }
        let current = self.region.load_u64(lba * 64)?;
        self.region.read(Self::slot(lba, current), buf)?;
        if locked {
            self.unlock(lba);
        }
        Ok(())
    }

    fn read_blocks(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        for (lba, block) in (offset / BLOCK_BYTES..).zip(buf.chunks_mut(BLOCK)) {
            let cached = self.cached().get(&lba).cloned();
            match cached {
                Some(data) => block.copy_from_slice(&data),
                None => self.read_block(lba, block)?,
            }
        }
        Ok(())
    }

    fn write_blocks(&self, offset: u64, data: &[u8], fua: bool) -> Result<()> {
        for (lba, block) in (offset / BLOCK_BYTES..).zip(data.chunks(BLOCK)) {
            if self.toy.volatile_cache && !fua {
                self.cached().insert(lba, block.to_vec());
            } else {
                self.write_block(lba, block)?;
                self.cached().remove(&lba);
            }
        }
        Ok(())
    }

    fn write_cached(&self) -> Result<()> {
        let dirty = self.cached().clone();
        let forgotten = usize::from(self.toy.fault == Fault::ForgetfulFlush);
        for (&lba, data) in dirty.iter().take(dirty.len().saturating_sub(forgotten)) {
            self.write_block(lba, data)?;
        }
        Ok(())
    }

    fn cached(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for Device {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: 512,
            blocks: BLOCKS,
            preferred_bytes: 512,
            read_only: false,
            atomic_block: true,
            volatile_cache: self.toy.volatile_cache,
            fast_zero: false,
            keeps_data: true,
        }
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry().check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => self.read_blocks(offset, buf),
            Operation::Write { offset, data, flags } => self.write_blocks(offset, data, flags.fua),
            Operation::Flush => self.write_cached(),
            Operation::Discard { .. } => Ok(()),
            Operation::WriteZeroes { offset, len, flags } => {
                let zeroes = vec![0; usize::try_from(len).expect("inside a small device")];
                self.write_blocks(offset, &zeroes, flags.fua)
            }
            Operation::Status { .. } => {
                operation.report_data();
                Ok(())
            }
        }
    }
}
