//! The header and the descriptor of a pool of libpmemblk (PMDK 1.x), before its BTT.

use std::mem::{offset_of, size_of};

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::BttError;
use super::layout::{Info, PAGE_BYTES, Version, fletcher64};
use crate::pmem::{PmemError, Region};

/// First bytes of a pool's header.
pub(super) const POOL_SIGNATURE: [u8; 8] = *b"PMEMBLK\0";
/// The format's major version.
const MAJOR: u32 = 1;
/// Incompatible feature: only the first 2 KiB of the header count for its checksum.
const FEATURE_CHECKSUM_2K: u32 = 2;
/// The incompatible features that change nothing here: that one, and the shutdown state.
const KNOWN_FEATURES: u32 = FEATURE_CHECKSUM_2K | 4;
/// Alignments of C's basic types, 4 bits each, as they are on x86-64 and aarch64.
const ALIGNMENTS: u64 = 0x07f7_3777_7310;
/// Pointers of 64 bits.
const CLASS_64: u8 = 2;
/// Little-endian numbers.
const LITTLE_ENDIAN: u8 = 1;
/// ELF's number of this machine.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// The header of a pool, in its first 4 KiB.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
struct PoolHeader {
    signature: [u8; 8],
    major: U32,
    compatible: U32,
    incompatible: U32,
    read_only_compatible: U32,
    /// The pool's UUID, which is the parent UUID of its BTT.
    poolset_uuid: [u8; 16],
    uuid: [u8; 16],
    /// The parts and replicas before and behind this one; a pool in one file names itself.
    neighbours: [[u8; 16]; 4],
    created: U64,
    alignments: U64,
    machine_class: u8,
    data: u8,
    reserved: [u8; 4],
    machine: U16,
    unused: [u8; 1904],
    unused_too: [u8; 1976],
    shutdown_state: [u8; 64],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<PoolHeader>() == 4096);
    assert!(offset_of!(PoolHeader, poolset_uuid) == 24);
    assert!(offset_of!(PoolHeader, created) == 120);
    assert!(offset_of!(PoolHeader, unused_too) == 2048);
    assert!(offset_of!(PoolHeader, checksum) == 4088);
};

/// The descriptor behind the header. libpmemblk keeps its state of the moment behind these fields.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
struct Descriptor {
    block_bytes: U32,
    /// Not 0: the file was all zeroes when the pool was created.
    is_zeroed: U32,
}

impl PoolHeader {
    fn new(poolset_uuid: [u8; 16]) -> Self {
        let uuid = *Uuid::new_v4().as_bytes();
        let since_1970 = std::time::SystemTime::UNIX_EPOCH.elapsed();
        let mut header = Self {
            signature: POOL_SIGNATURE,
            major: MAJOR.into(),
            incompatible: FEATURE_CHECKSUM_2K.into(),
            poolset_uuid,
            uuid,
            neighbours: [uuid; 4],
            created: since_1970.map_or(0, |since| since.as_secs()).into(),
            alignments: ALIGNMENTS.into(),
            machine_class: CLASS_64,
            data: LITTLE_ENDIAN,
            machine: MACHINE.into(),
            ..Self::new_zeroed()
        };
        header.checksum = header.fletcher64().into();
        header
    }

    fn fletcher64(&self) -> u64 {
        let mut zeroed = Self { checksum: U64::ZERO, ..*self };
        if self.incompatible.get() & FEATURE_CHECKSUM_2K != 0 {
            (zeroed.unused_too, zeroed.shutdown_state) = FromZeros::new_zeroed();
        }
        fletcher64(zeroed.as_bytes())
    }

    fn read(region: &Region) -> Result<Self, PmemError> {
        let mut header = Self::new_zeroed();
        region.read(0, header.as_mut_bytes())?;
        Ok(header)
    }

    /// Checks the header. The error names the first contradiction.
    fn validate(&self) -> Result<(), BttError> {
        let unsupported = |reason| Err(BttError::PoolUnsupported { reason });
        if self.major.get() != MAJOR {
            let major = self.major.get();
            return unsupported(format!("its major version is {major}, expected {MAJOR}"));
        }
        let unknown = self.incompatible.get() & !KNOWN_FEATURES;
        if unknown != 0 || self.read_only_compatible.get() != 0 {
            return unsupported(format!("it uses the features {unknown:#x}, which are not known"));
        }
        if self.checksum.get() != self.fletcher64() {
            let (found, expected) = (self.checksum.get(), self.fletcher64());
            let reason = format!("its checksum is {found:#018x}, expected {expected:#018x}");
            return Err(BttError::PoolDamaged { reason });
        }
        if (self.machine_class, self.data) != (CLASS_64, LITTLE_ENDIAN) {
            return unsupported("it was made on a machine with another byte order".into());
        }
        if self.neighbours.iter().any(|neighbour| *neighbour != self.uuid) {
            return unsupported("it is one of several files of a pool set".into());
        }
        Ok(())
    }
}

/// The facts of a pool's header and descriptor that its BTT depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pool {
    /// The parent UUID of the pool's BTT.
    pub(super) poolset_uuid: [u8; 16],
    pub(super) block_bytes: u32,
    /// The file was all zeroes when the pool was created.
    pub(super) is_zeroed: bool,
}

impl Pool {
    /// Reads the header and the descriptor.
    ///
    /// # Errors
    /// [`BttError::PoolDamaged`], [`BttError::PoolUnsupported`], [`BttError::Truncated`].
    pub(super) fn read(region: &Region) -> Result<Self, BttError> {
        let (found_bytes, needed_bytes) = (region.len_bytes(), Version::Libpmemblk.base());
        if found_bytes < needed_bytes {
            return Err(BttError::Truncated { arena: 0, needed_bytes, found_bytes });
        }
        let header = PoolHeader::read(region)?;
        header.validate()?;
        let mut descriptor = Descriptor::new_zeroed();
        region.read(PAGE_BYTES, descriptor.as_mut_bytes())?;
        let block_bytes = descriptor.block_bytes.get();
        if Version::Libpmemblk.stored_bytes(block_bytes).is_none() {
            let reason = format!("its blocks have {block_bytes} bytes");
            return Err(BttError::PoolDamaged { reason });
        }
        let PoolHeader { poolset_uuid, .. } = header;
        let is_zeroed = descriptor.is_zeroed.get() != 0;
        Ok(Self { poolset_uuid, block_bytes, is_zeroed })
    }
}

/// Checks that the BTT whose first info block is `info` belongs to the pool in `region`.
///
/// # Errors
/// Fails if the pool's header is damaged or unsupported, or contradicts the BTT.
pub(super) fn expect_own(region: &Region, info: &Info) -> Result<(), BttError> {
    let pool = Pool::read(region)?;
    let (found, expected) = (info.external_lbasize.get(), pool.block_bytes);
    if found != expected {
        let reason = format!("its blocks have {expected} bytes, but those of its BTT {found}");
        return Err(BttError::PoolDamaged { reason });
    }
    if info.parent_uuid != pool.poolset_uuid {
        let reason = "its BTT has the UUID of another pool".into();
        return Err(BttError::PoolDamaged { reason });
    }
    Ok(())
}

/// Gives the header in `region` the checksum of its present content.
#[cfg(all(test, not(loom)))]
pub(super) fn reseal(region: &Region) {
    let mut header = PoolHeader::read(region).expect("the header is there");
    header.checksum = header.fletcher64().into();
    region.write(0, header.as_bytes()).expect("the header is there");
}

/// Writes the header and the descriptor of a new pool with blocks of `block_bytes`, whose BTT with
/// the parent UUID `poolset_uuid` is there. The signature comes last and makes the pool.
pub(super) fn write_header(
    region: &Region,
    poolset_uuid: [u8; 16],
    block_bytes: u32,
) -> Result<(), PmemError> {
    let header = PoolHeader::new(poolset_uuid);
    let descriptor = Descriptor { block_bytes: block_bytes.into(), is_zeroed: U32::new(1) };
    let (signature, rest) = header.as_bytes().split_at(POOL_SIGNATURE.len());
    region.write_streaming(PAGE_BYTES, descriptor.as_bytes())?;
    region.write_streaming(POOL_SIGNATURE.len() as u64, rest)?;
    region.fence()?;
    region.write_streaming(0, signature)?;
    region.fence()
}
