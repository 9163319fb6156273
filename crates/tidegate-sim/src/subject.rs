//! The engines that the simulator tests, and the other implementations that judge their images.

use std::sync::Arc;

use tidegate::btt::check::check;
use tidegate::btt::{Btt, BttOptions, FlogSlots, Version, create};
use tidegate::device::BlockDevice;
use tidegate::dram::driven::Driven;
use tidegate::pmem::Region;
use tidegate::tier::background::{Step, Work};

use crate::kernel::{Dialect, add_flags_to_flog, recover_and_read};

/// An engine under test.
pub trait Subject: Sync {
    /// Formats `region`.
    ///
    /// # Errors
    /// Describes the failure.
    fn create(&self, region: &Region) -> Result<(), String>;

    /// Opens `region` as after a crash: with the engine's real recovery.
    ///
    /// # Errors
    /// Describes the failure.
    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String>;

    /// Opens `region` as [`open`](Self::open) does, with work in the background.
    ///
    /// # Errors
    /// Describes the failure.
    fn open_alive(&self, region: &Arc<Region>) -> Result<Alive, String> {
        Ok(Alive { device: self.open(region)?, background: Vec::new() })
    }

    /// Returns the number of background threads of [`open_alive`](Self::open_alive).
    fn background_threads(&self) -> usize {
        0
    }

    /// Returns whether a crash undoes all writes that no flush covered, except FUA writes.
    fn atomic_flush(&self) -> bool {
        false
    }

    /// Returns whether a FUA write may cover the writes before it as a flush does.
    fn fua_commits(&self) -> bool {
        false
    }

    /// Returns whether a crash may tear blocks that no flush covered.
    fn tears(&self) -> bool {
        false
    }

    /// Looks for faults of structure in a region that was recovered.
    ///
    /// # Errors
    /// The faults, in words.
    fn check(&self, region: &Region) -> Result<(), String>;

    /// Looks for faults of structure in a region as a crash left it.
    ///
    /// # Errors
    /// The faults, in words.
    fn check_as_crashed(&self, region: &Region) -> Result<(), String> {
        self.check(region)
    }

    /// Returns other implementations that can read the same image.
    fn peers(&self) -> &[Peer] {
        &[]
    }

    /// Returns the size of the region in bytes, a multiple of 4096.
    fn region_bytes(&self) -> u64;

    /// Returns how often each block has to be written after a recovery to use every lane.
    fn rounds_after_recovery(&self) -> u32;
}

/// An engine with its background work, which the scheduler runs.
pub struct Alive {
    /// The engine.
    pub device: Arc<dyn BlockDevice>,
    /// Background work, one for each thread.
    pub background: Vec<Box<dyn Work>>,
}

/// Another implementation of the format.
pub struct Peer {
    /// The name of the implementation, for reports.
    pub name: &'static str,
    /// Recovers and reads.
    pub read: PeerRead,
}

/// Recovers an image in place and returns the content of the device.
pub type PeerRead = fn(&mut [u8]) -> Result<Vec<u8>, String>;

/// The block translation table, judged also by the kernel's recovery.
pub struct BttSubject {
    options: BttOptions,
    region_bytes: u64,
    peers: &'static [Peer],
}

impl BttSubject {
    /// Makes a BTT of `blocks` blocks of 512 bytes and `lanes` lanes, in the least region that
    /// fits.
    pub fn new(blocks: u32, lanes: u32, version: Version, flog_slots: FlogSlots) -> Self {
        Self::with_lba_bytes(512, blocks, lanes, version, flog_slots)
    }

    /// Makes a BTT with lbas of `lba_bytes`, 512 or 4096, in the smallest region that holds it.
    /// Only lbas of 4096 bytes are zeroed by the map.
    pub fn with_lba_bytes(
        lba_bytes: u32,
        blocks: u32,
        lanes: u32,
        version: Version,
        flog_slots: FlogSlots,
    ) -> Self {
        let (uuid, parent_uuid) = ([7; 16], [0; 16]);
        let options = BttOptions { lba_bytes, version, uuid, parent_uuid, lanes, flog_slots };
        // Two info blocks, a page each of flog and map, and the pages before the arena.
        let fixed_bytes = match version {
            Version::V2_0 => 4 * 4096,
            Version::V1_1 => 5 * 4096,
            Version::Libpmemblk => 6 * 4096,
        };
        let data_bytes =
            (u64::from(blocks + lanes) * u64::from(lba_bytes + 4)).next_multiple_of(4096);
        let peers = if version == Version::Libpmemblk { LIBPMEMBLK_PEERS } else { PEERS };
        Self { options, region_bytes: fixed_bytes + data_bytes, peers }
    }
}

/// The kernel, on our flog and on one with libpmemblk's flags; libpmemblk, which needs its flags to
/// complete a write.
const PEERS: &[Peer] = &[
    Peer { name: "the kernel", read: |image| recover_and_read(image, Dialect::Linux) },
    Peer {
        name: "the kernel with flags in the flog",
        read: |image| {
            add_flags_to_flog(image)?;
            recover_and_read(image, Dialect::Linux)
        },
    },
    Peer {
        name: "libpmemblk with flags in the flog",
        read: |image| {
            add_flags_to_flog(image)?;
            recover_and_read(image, Dialect::Libpmemblk)
        },
    },
];

/// The readers of a pool of libpmemblk: that library, which must complete all writes of our flog as
/// it is, and the kernel after a conversion.
const LIBPMEMBLK_PEERS: &[Peer] = &[
    Peer { name: "libpmemblk", read: |image| recover_and_read(image, Dialect::Libpmemblk) },
    Peer { name: "the kernel", read: |image| recover_and_read(image, Dialect::Linux) },
];

/// The DRAM tier `transit` over a BTT. A crash loses the tier's content.
///
/// Its evictors are threads of the scheduler, so that they are interleaved with requests and
/// repeat. Without any, a flush, a FUA write or a full cache makes the tier write blocks back.
pub struct TransitSubject {
    btt: BttSubject,
    slots: u32,
    evictors: usize,
}

/// Background steps after which an evictor toggles the write mode.
const STEPS_OF_A_MODE: u32 = 3;

impl TransitSubject {
    /// Makes a cache of `slots` slots and `evictors` evictors over `btt`.
    pub fn new(btt: BttSubject, slots: u32, evictors: usize) -> Self {
        Self { btt, slots, evictors }
    }

    fn open_driven(&self, region: &Arc<Region>) -> Result<Driven, String> {
        let btt = self.btt.open(region)?;
        let bytes = u64::from(self.slots) * u64::from(btt.geometry().block_bytes);
        let region = Arc::clone(region);
        Driven::open(bytes, btt, Arc::new(move || region.relax())).map_err(|e| e.to_string())
    }
}

/// An evictor that also toggles the write mode, to bypassing the cache and back.
struct Evictor<W> {
    tier: Driven,
    work: W,
    steps: u32,
}

impl<W: Work> Work for Evictor<W> {
    fn step(&mut self) -> Step {
        self.steps += 1;
        self.tier.step_write_mode(self.steps / STEPS_OF_A_MODE % 2 == 1);
        self.work.step()
    }

    fn has_work(&self) -> bool {
        self.work.has_work()
    }
}

impl Subject for TransitSubject {
    fn create(&self, region: &Region) -> Result<(), String> {
        self.btt.create(region)
    }

    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
        Ok(self.open_driven(region)?.tier())
    }

    fn open_alive(&self, region: &Arc<Region>) -> Result<Alive, String> {
        let tier = self.open_driven(region)?;
        let evictor = |_| -> Box<dyn Work> {
            Box::new(Evictor { tier: tier.clone(), work: tier.evictor(), steps: 0 })
        };
        Ok(Alive { device: tier.tier(), background: (0..self.evictors).map(evictor).collect() })
    }

    fn background_threads(&self) -> usize {
        self.evictors
    }

    fn check(&self, region: &Region) -> Result<(), String> {
        self.btt.check(region)
    }

    fn peers(&self) -> &[Peer] {
        self.btt.peers()
    }

    fn region_bytes(&self) -> u64 {
        self.btt.region_bytes()
    }

    fn rounds_after_recovery(&self) -> u32 {
        self.btt.rounds_after_recovery()
    }
}

impl Subject for BttSubject {
    fn create(&self, region: &Region) -> Result<(), String> {
        create(region, &self.options).map(drop).map_err(|error| error.to_string())
    }

    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
        let btt = Btt::open(Arc::clone(region)).map_err(|error| error.to_string())?;
        Ok(Arc::new(btt))
    }

    fn check(&self, region: &Region) -> Result<(), String> {
        let report = check(region, &mut |_| ()).map_err(|error| error.to_string())?;
        let findings: Vec<_> = report.findings.iter().map(ToString::to_string).collect();
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    }

    fn peers(&self) -> &[Peer] {
        self.peers
    }

    fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    fn rounds_after_recovery(&self) -> u32 {
        2
    }
}
