//! Operations of a shipped engine on its persistent memory and on its backing, observed from
//! outside; and a backing that stores nothing.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use tidegate::device::{BlockDevice, Geometry, Operation, Result};

use super::{BLOCK_BYTES, Context, DEVICE_PAGES};
use crate::scheme::devices::Source;
use crate::scheme::page::PAGE_BYTES;

/// An operation, sent in order. Pages are the backing's. `E` are the operations of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work<E> {
    /// An operation that is specific to the engine.
    Engine(E),
    /// Metadata was stored.
    Metadata {
        bytes: u64,
    },
    Fence,
    /// Data of pages was loaded.
    Loaded,
    BackingRead {
        page: u64,
    },
    BackingWritten {
        page: u64,
    },
    BackingFlushed,
}

/// Reports the operations that all engines share to the devices.
#[derive(Default)]
pub(super) struct Teller {
    /// The page of the backing that was written last: parts of a page are written in sequence.
    written: Option<u64>,
}

impl Teller {
    /// Reports `work` to the devices; returns an operation that is specific to the engine.
    pub(super) fn tell<E>(&mut self, work: Work<E>, context: &mut Context<'_>) -> Option<E> {
        let Context { numbers, devices } = context;
        match work {
            Work::Engine(work) => return Some(work),
            Work::Metadata { bytes } => devices.pmem_metadata(bytes),
            Work::Fence => devices.pmem_fence(),
            Work::Loaded => {}
            Work::BackingRead { page } => devices.ssd_read(numbers.id(page)),
            Work::BackingWritten { page } if self.written == Some(page) => {}
            Work::BackingWritten { page } => {
                self.written = Some(page);
                devices.ssd_write(numbers.id(page), Source::Pmem);
            }
            Work::BackingFlushed => {
                self.written = None;
                devices.ssd_flush();
            }
        }
        None
    }
}

/// A backing with blocks of 512 bytes that stores nothing and reports its requests.
pub(super) struct Backing<E> {
    work: Sender<Work<E>>,
}

impl<E: Send + 'static> Backing<E> {
    /// Returns a backing that reports to `work`.
    pub(super) fn of(work: &Sender<Work<E>>) -> Arc<dyn BlockDevice> {
        Arc::new(Self { work: work.clone() })
    }

    fn send_pages(&self, offset: u64, len: u64, work: impl Fn(u64) -> Work<E>) {
        for page in offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES) {
            // The receiver no longer exists while the engine is dropped.
            let _ = self.work.send(work(page));
        }
    }
}

impl<E: Send + 'static> BlockDevice for Backing<E> {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: BLOCK_BYTES,
            blocks: DEVICE_PAGES * PAGE_BYTES / u64::from(BLOCK_BYTES),
            preferred_bytes: 4096,
            read_only: false,
            atomic_block: false,
            volatile_cache: true,
            fast_zero: true,
            keeps_data: false,
        }
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                buf.fill(0);
                self.send_pages(offset, buf.len() as u64, |page| Work::BackingRead { page });
            }
            Operation::Write { offset, data, .. } => {
                self.send_pages(offset, data.len() as u64, |page| Work::BackingWritten { page });
            }
            Operation::Flush => {
                let _ = self.work.send(Work::BackingFlushed);
            }
            // Zeroes are a command to flash, not pages.
            Operation::Discard { .. } | Operation::WriteZeroes { .. } => {}
            Operation::Status { .. } => operation.report_data(),
        }
        Ok(())
    }
}
