//! The log on its medium: header, tail, limit, session, and the offset of each position.
//!
//! Invariants:
//! 1. `tail <= every live record < limit`, and `limit <= tail + ring + one step`.
//! 2. The limit is durable before a record that ends below it is acknowledged. The tail moves only
//!    when the files have everything before it durably.
//! 3. Positions never repeat: an opener that starts a new log starts it at the limit, beyond every
//!    position that was ever reserved.

pub(super) mod heartbeat;
pub mod layout;
pub(super) mod losses;
pub(super) mod names;
pub(super) mod positions;
pub(super) mod record;
pub(super) mod scan;

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use uuid::Uuid;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::log::error::LogError;
use crate::log::pool::layout::{
    CODE, COPY_DISTANCE, FORMER_MAGIC, LIMIT_OFFSET, LIMIT_STEP_BYTES, LogHeaderBytes, MAGIC,
    RECORD_ALIGN_BYTES, RING_OFFSET, RecordHeaderBytes, SECOND_HEADER_OFFSET, SESSION_OFFSET,
    SessionBytes, TAIL_OFFSET, position_of, position_word,
};
use crate::log::pool::record::{Header, PayloadDigest, RecordKind, payload_checksum, record_bytes};
use crate::pmem::{PmemError, Region, is_of_one_bit};
use crate::pool::{self, Superblock};

type Result<T> = std::result::Result<T, LogError>;

/// A session of no boot: the files of this log may lack records of the log in any boot.
pub const NO_BOOT: [u8; 16] = [0xFF; 16];
/// A session that was closed: the files have all records of the log.
pub const CLOSED: [u8; 16] = [0; 16];
/// The smallest ring, in bytes.
pub const RING_BYTES_MIN: u64 = 64 << 10;

/// How to make a log pool.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// The pool's uuid; the salt of its checksums comes from random bits of another one.
    pub uuid: Uuid,
    /// The start of each checksum.
    pub salt: u64,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { uuid: Uuid::new_v4(), salt: Uuid::new_v4().as_u64_pair().0 }
    }
}

/// Formats all of `region` as a log pool. The former content is lost.
///
/// # Errors
/// [`LogError::TooSmall`] before anything changes; [`LogError::Pool`], [`LogError::Pmem`].
pub fn create(region: &Region, options: &LogOptions) -> Result<Superblock> {
    let mut superblock = Superblock::plan(region, CODE, options.uuid, 4096)?;
    let ring_bytes = ring_bytes(&superblock);
    if ring_bytes < RING_BYTES_MIN {
        return Err(LogError::TooSmall { found_bytes: ring_bytes, least_bytes: RING_BYTES_MIN });
    }
    pool::erase(region)?;
    let mut header = LogHeaderBytes {
        magic: MAGIC,
        salt: U64::new(options.salt),
        ring_bytes: U64::new(ring_bytes),
        ..LogHeaderBytes::new_zeroed()
    };
    header.checksum = U64::new(header_checksum(&header));
    let base = superblock.data_offset;
    region.zero_streaming(base, RING_OFFSET)?;
    region.write(base, header.as_bytes())?;
    region.write(base + SECOND_HEADER_OFFSET, header.as_bytes())?;
    // The first lap starts at `ring_bytes`: no position is 0, and the first lap cannot meet a
    // position of an older log in these bytes.
    for offset in [TAIL_OFFSET, LIMIT_OFFSET] {
        region.store_u64(base + offset, position_word(ring_bytes))?;
        region.store_u64(base + offset + COPY_DISTANCE, position_word(ring_bytes))?;
    }
    region.write_back(base, RING_OFFSET)?;
    region.fence()?;
    // The superblock comes last: a crash before it leaves no pool, instead of a pool without a log.
    superblock.write(region)?;
    Ok(superblock)
}

fn ring_bytes(superblock: &Superblock) -> u64 {
    superblock.data_bytes.saturating_sub(RING_OFFSET)
}

fn header_checksum(header: &LogHeaderBytes) -> u64 {
    let zeroed = LogHeaderBytes { checksum: U64::ZERO, ..*header };
    checksum(CrcAlgorithm::Crc64Nvme, zeroed.as_bytes())
}

/// A fault of a copy of a log's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// Its checksum is wrong, or it has another format.
    #[error("the log's header at offset {offset} is damaged; the other copy is whole")]
    Damaged {
        /// Its offset in the pool.
        offset: u64,
    },
    /// It is whole, but differs from the first copy.
    #[error("the log's header at offset {offset} differs from the first copy")]
    Different {
        /// Its offset in the pool.
        offset: u64,
    },
}

/// An open log pool.
#[derive(Debug)]
pub struct LogPool {
    region: Arc<Region>,
    superblock: Superblock,
    ring_bytes: u64,
    salt: u64,
}

impl LogPool {
    /// Opens the log pool in `region`; changes nothing.
    ///
    /// # Errors
    /// [`LogError`]: `region` has no log pool, or a damaged one.
    pub fn open(region: Arc<Region>) -> Result<Self> {
        let pool = Self::open_damaged(region)?;
        pool.check()?;
        Ok(pool)
    }

    /// Opens a pool whose tail and limit may be invalid.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub(in crate::log) fn open_damaged(region: Arc<Region>) -> Result<Self> {
        let superblock = Superblock::read(&region)?.superblock;
        superblock.expect_engine(CODE)?;
        let base = superblock.data_offset;
        if ring_bytes(&superblock) < RING_BYTES_MIN {
            let found_bytes = ring_bytes(&superblock);
            return Err(LogError::TooSmall { found_bytes, least_bytes: RING_BYTES_MIN });
        }
        // `header_fault` tells a caller which of the copies is damaged.
        let header = match read_header(&region, base)? {
            Ok(header) => header,
            Err(error) => read_header(&region, base + SECOND_HEADER_OFFSET)?.map_err(|_| error)?,
        };
        let (ring_bytes, salt) = (header.ring_bytes.get(), header.salt.get());
        let pool = Self { region, superblock, ring_bytes, salt };
        let fits = ring_bytes == self::ring_bytes(&superblock);
        require(fits, "ring size", ring_bytes, "all of the pool behind the log's header")?;
        Ok(pool)
    }

    /// Checks that tail and limit fit each other, which no checksum covers.
    fn check(&self) -> Result<()> {
        let ring = self.ring_bytes;
        let (tail, limit) = (self.tail()?, self.limit()?);
        for (field, position) in [("tail", tail), ("limit", limit)] {
            if position == 0 {
                return Err(LogError::Position { field });
            }
        }
        require(tail >= ring, "tail", tail, "a multiple of 64, from one lap on")?;
        let is_near = limit >= tail && limit - tail <= ring + self.limit_step_bytes();
        require(is_near, "limit", limit, "a multiple of 64 between the tail and one lap beyond it")
    }

    /// Returns the fault of one copy of the header. The pool was opened by the other copy.
    ///
    /// # Errors
    /// [`LogError::Pmem`].
    pub fn header_fault(&self) -> Result<Option<HeaderFault>> {
        let [first, second] = self.header_offsets();
        let copies = (read_header(&self.region, first)?, read_header(&self.region, second)?);
        Ok(match copies {
            (Err(_), _) => Some(HeaderFault::Damaged { offset: first }),
            (_, Err(_)) => Some(HeaderFault::Damaged { offset: second }),
            (Ok(one), Ok(other)) if one.as_bytes() != other.as_bytes() => {
                Some(HeaderFault::Different { offset: second })
            }
            _ => None,
        })
    }

    /// Overwrites the copy that [`header_fault`](Self::header_fault) names with the other copy.
    ///
    /// # Errors
    /// [`LogError::Pmem`].
    pub fn restore_header(&self) -> Result<()> {
        let [first, second] = self.header_offsets();
        let (from, to) = match self.header_fault()? {
            None => return Ok(()),
            Some(HeaderFault::Damaged { offset }) if offset == first => (second, first),
            Some(_) => (first, second),
        };
        let header = read_header(&self.region, from)??;
        self.region.write(to, header.as_bytes())?;
        Ok(self.region.persist(to, size_of::<LogHeaderBytes>() as u64)?)
    }

    /// Raises the header to the format with records of names and second copies of positions.
    /// Releases that know only the former format then refuse the log.
    ///
    /// # Errors
    /// [`LogError::Pmem`].
    pub(in crate::log) fn raise_format(&self) -> Result<()> {
        let [first, second] = self.header_offsets();
        // The second copy comes first: a reader uses it only if the first one is damaged. A crash
        // between the two leaves a whole header of either format.
        for at in [second, first] {
            let Ok(mut header) = read_header(&self.region, at)? else { continue };
            if header.magic == FORMER_MAGIC {
                header.magic = MAGIC;
                header.checksum = U64::new(header_checksum(&header));
                self.region.write(at, header.as_bytes())?;
                self.region.persist(at, size_of::<LogHeaderBytes>() as u64)?;
            }
        }
        Ok(())
    }

    fn header_offsets(&self) -> [u64; 2] {
        [0, SECOND_HEADER_OFFSET].map(|offset| self.superblock.data_offset + offset)
    }

    /// Returns the memory of the pool.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the pool's superblock.
    pub fn superblock(&self) -> Superblock {
        self.superblock
    }

    /// Returns the size of the ring in bytes.
    pub fn ring_bytes(&self) -> u64 {
        self.ring_bytes
    }

    /// Returns the step of the limit in bytes. It never exceeds the part of the ring that users'
    /// data leaves free, so that a log that starts at the limit finds free space.
    pub(in crate::log) fn limit_step_bytes(&self) -> u64 {
        let share = self.ring_bytes / 32;
        LIMIT_STEP_BYTES.min(share - share % RECORD_ALIGN_BYTES)
    }

    /// Returns the largest payload of a record in bytes: a quarter of the ring, so that a full log
    /// soon has free space for one.
    pub fn payload_bytes_max(&self) -> u64 {
        (self.ring_bytes / 4).min(1 << 30)
    }

    /// Returns the persistent tail. Of two whole copies the lower one counts, since a crash may
    /// have come between them. Returns 0 if neither copy is whole; [`open`](Self::open) refuses
    /// such a pool.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn tail(&self) -> std::result::Result<u64, PmemError> {
        Ok(self.position_copies(TAIL_OFFSET)?.into_iter().flatten().min().unwrap_or(0))
    }

    /// Returns the position that no record passes. Of two whole copies the higher one counts.
    /// Returns 0 if neither copy is whole; [`open`](Self::open) refuses such a pool.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn limit(&self) -> std::result::Result<u64, PmemError> {
        Ok(self.position_copies(LIMIT_OFFSET)?.into_iter().flatten().max().unwrap_or(0))
    }

    /// Returns the whole copies of tail or limit. A copy in memory that failed is `None`.
    pub(in crate::log) fn position_copies(
        &self,
        offset: u64,
    ) -> std::result::Result<[Option<u64>; 2], PmemError> {
        let read = |offset| match self.region.load_u64(self.superblock.data_offset + offset) {
            Ok(word) => Ok(position_of(word)),
            Err(PmemError::Poisoned { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        Ok([read(offset)?, read(offset + COPY_DISTANCE)?])
    }

    /// Moves the persistent tail. The files must have everything before `position` durably.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn set_tail(&self, position: u64) -> std::result::Result<(), PmemError> {
        self.set_position(TAIL_OFFSET, position)
    }

    /// Moves the limit.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn set_limit(&self, position: u64) -> std::result::Result<(), PmemError> {
        self.set_position(LIMIT_OFFSET, position)
    }

    /// Stores both copies of a position with one fence. A word of eight bytes is stored whole or
    /// not at all: after a crash each copy is the old one or the new one, and either is correct.
    fn set_position(&self, offset: u64, position: u64) -> std::result::Result<(), PmemError> {
        debug_assert!(position.is_multiple_of(RECORD_ALIGN_BYTES), "no record is at {position}");
        let at = self.superblock.data_offset + offset;
        for at in [at, at + COPY_DISTANCE] {
            self.region.store_u64(at, position_word(position))?;
            self.region.write_back(at, 8)?;
        }
        self.region.fence()
    }

    /// Returns the boot that wrote the log last. Returns `None` if the log was closed, or if no
    /// copy of the session is whole.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn session(&self) -> std::result::Result<Option<[u8; 16]>, PmemError> {
        Ok(self.whole_session()?.filter(|boot_id| *boot_id != CLOSED))
    }

    /// Returns whether the log was closed: the files have all records, so a loss changes nothing.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn is_closed(&self) -> std::result::Result<bool, PmemError> {
        Ok(self.whole_session()? == Some(CLOSED))
    }

    /// Returns the boot id of the first whole copy of the session.
    fn whole_session(&self) -> std::result::Result<Option<[u8; 16]>, PmemError> {
        let whole = self.session_copies()?.into_iter().find(is_whole_session);
        Ok(whole.map(|bytes| bytes.boot_id))
    }

    /// Stores the boot that writes the log, [`NO_BOOT`] or [`CLOSED`]. Durable on return.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn set_session(&self, boot_id: [u8; 16]) -> std::result::Result<(), PmemError> {
        let checksum = U64::new(checksum(CrcAlgorithm::Crc64Nvme, &boot_id));
        let bytes = SessionBytes { boot_id, checksum };
        let at = self.superblock.data_offset + SESSION_OFFSET;
        // Each copy is persisted before the next is stored: a crash tears at most one.
        for at in [at, at + COPY_DISTANCE] {
            self.region.write(at, bytes.as_bytes())?;
            self.region.persist(at, size_of::<SessionBytes>() as u64)?;
        }
        Ok(())
    }

    /// Reports whether tail or limit has the former format, which has no second copy.
    pub(in crate::log) fn is_former(&self, offset: u64) -> std::result::Result<bool, PmemError> {
        let at = self.superblock.data_offset + offset;
        let (word, copy) = (self.region.load_u64(at)?, self.region.load_u64(at + COPY_DISTANCE)?);
        Ok(copy == 0 && position_of(word) == Some(word))
    }

    /// Reads both copies of the session, whole or not.
    pub(in crate::log) fn session_copies(
        &self,
    ) -> std::result::Result<[SessionBytes; 2], PmemError> {
        let read = |offset| {
            let mut bytes = SessionBytes::default();
            self.region.read(self.superblock.data_offset + offset, bytes.as_mut_bytes())?;
            Ok(bytes)
        };
        Ok([read(SESSION_OFFSET)?, read(SESSION_OFFSET + COPY_DISTANCE)?])
    }

    /// Returns the region's offset of the byte at `position`.
    pub(in crate::log) fn region_offset(&self, position: u64) -> u64 {
        self.superblock.data_offset + RING_OFFSET + position % self.ring_bytes
    }

    pub(in crate::log) fn salt(&self) -> u64 {
        self.salt
    }

    /// Reads the header of the record at `position`. Returns `None` if there is no record. The
    /// payload may be torn. If one bit of the header has changed on the medium, the header is
    /// returned with that bit repaired.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn read_header(&self, position: u64) -> std::result::Result<Option<Header>, PmemError> {
        let at = self.region_offset(position);
        // Most offsets that a scan reads hold no record: one word tells.
        if (self.region.load_u64(at + 8)? ^ position).count_ones() > 1 {
            return Ok(None);
        }
        let mut bytes = RecordHeaderBytes::new_zeroed();
        self.region.read(at, bytes.as_mut_bytes())?;
        let header = Header::decode_repairing(&bytes, self.salt, position);
        Ok(header.filter(|header| self.fits(header)))
    }

    /// Reports whether the header on the medium differs from `header` in any bit.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn is_changed(
        &self,
        header: &Header,
    ) -> std::result::Result<bool, PmemError> {
        let mut bytes = RecordHeaderBytes::new_zeroed();
        self.region.read(self.region_offset(header.position), bytes.as_mut_bytes())?;
        Ok(bytes != header.encode(self.salt))
    }

    /// Writes `header` to the medium again, durably.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn restore_record(
        &self,
        header: &Header,
    ) -> std::result::Result<(), PmemError> {
        let at = self.region_offset(header.position);
        self.region.write(at, header.encode(self.salt).as_bytes())?;
        self.region.persist(at, RECORD_ALIGN_BYTES)
    }

    /// Returns whether the record ends within its lap, as all records do, and its length is valid.
    fn fits(&self, header: &Header) -> bool {
        header.position % self.ring_bytes + header.record_bytes() <= self.ring_bytes
            && u64::from(header.payload_bytes) <= self.payload_bytes_max()
    }

    /// Copies `buf.len()` bytes of a record's payload, from the payload's byte `at` on.
    ///
    /// # Errors
    /// [`PmemError`]; [`PmemError::OutOfRange`] if the payload is too short.
    pub fn read_payload(
        &self,
        header: &Header,
        at: u64,
        buf: &mut [u8],
    ) -> std::result::Result<(), PmemError> {
        let (len, region_bytes) = (buf.len() as u64, u64::from(header.payload_bytes));
        if at > region_bytes || len > region_bytes - at {
            return Err(PmemError::OutOfRange { offset: at, len, region_bytes });
        }
        self.region.read(self.region_offset(header.position) + RECORD_ALIGN_BYTES + at, buf)
    }

    /// Appends a record behind the limit of a log that no process uses. Durable on return. The part
    /// of the ring that writers leave free is for such notes.
    ///
    /// # Errors
    /// [`LogError::NoteSpace`]: no space is left; [`LogError::Pmem`].
    pub(in crate::log) fn append_note(
        &self,
        kind: RecordKind,
        offset: u64,
        payload: &[u8],
    ) -> Result<()> {
        self.append_behind_limit(Header { offset, ..Header::of(kind) }, payload)
    }

    /// Appends a gap behind the limit: no record that is missing from `from` on was acknowledged.
    /// Durable on return.
    ///
    /// # Errors
    /// See [`append_note`](Self::append_note).
    pub(in crate::log) fn append_gap(&self, from: u64) -> Result<()> {
        self.append_behind_limit(Header { aux: from, ..Header::of(RecordKind::Gap) }, &[])
    }

    fn append_behind_limit(&self, draft: Header, payload: &[u8]) -> Result<()> {
        let (tail, limit) = (self.tail()?, self.limit()?);
        let payload_bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let bytes = record_bytes(payload_bytes.into());
        let at = limit % self.ring_bytes;
        let fits = at + bytes <= self.ring_bytes;
        let position = if fits { limit } else { limit + self.ring_bytes - at };
        if position + bytes - tail > self.ring_bytes {
            return Err(LogError::NoteSpace);
        }
        let payload_checksum = payload_checksum(&[IoSlice::new(payload)]);
        let header = Header { position, payload_bytes, payload_checksum, ..draft };
        let to = self.region_offset(position);
        self.region.allocate(to, bytes)?;
        self.set_limit(position + bytes)?;
        self.region.write(to + RECORD_ALIGN_BYTES, payload)?;
        self.region.write(to, header.encode(self.salt).as_bytes())?;
        Ok(self.persist_record(&header)?)
    }

    /// Makes the stored bytes of the records at `positions`, at most a lap, durable.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn persist_records(
        &self,
        positions: Range<u64>,
    ) -> std::result::Result<(), PmemError> {
        let mut position = positions.start;
        while position < positions.end {
            let lap_end = position - position % self.ring_bytes + self.ring_bytes;
            let end = lap_end.min(positions.end);
            self.region.write_back(self.region_offset(position), end - position)?;
            position = end;
        }
        self.region.fence()
    }

    /// Makes the stored bytes of the record durable.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn persist_record(
        &self,
        header: &Header,
    ) -> std::result::Result<(), PmemError> {
        self.region.persist(self.region_offset(header.position), header.record_bytes())
    }

    /// Returns whether the payload matches its checksum.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn is_whole(&self, header: &Header) -> std::result::Result<bool, PmemError> {
        Ok(self.payload_checksum_of(header)? == header.payload_checksum)
    }

    /// Returns whether the payload differs from its checksum by one changed bit.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn is_one_bit_off(
        &self,
        header: &Header,
    ) -> std::result::Result<bool, PmemError> {
        let difference = self.payload_checksum_of(header)? ^ header.payload_checksum;
        Ok(is_of_one_bit(difference, u64::from(header.payload_bytes)))
    }

    fn payload_checksum_of(&self, header: &Header) -> std::result::Result<u32, PmemError> {
        let mut digest = PayloadDigest::default();
        let mut buf = [0; 4096];
        let mut at = 0;
        while at < u64::from(header.payload_bytes) {
            let step = (u64::from(header.payload_bytes) - at).min(buf.len() as u64);
            let part = &mut buf[..usize::try_from(step).unwrap_or(0)];
            self.read_payload(header, at, part)?;
            digest.add(part);
            at += step;
        }
        Ok(digest.finish())
    }
}

/// Returns whether the session's checksum is correct.
pub(in crate::log) fn is_whole_session(bytes: &SessionBytes) -> bool {
    checksum(CrcAlgorithm::Crc64Nvme, &bytes.boot_id) == bytes.checksum.get()
}

/// Refuses an invalid number on the medium.
fn require(holds: bool, field: &'static str, found: u64, expected: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(LogError::Inconsistent { field, found, expected }) }
}

type Copy = std::result::Result<LogHeaderBytes, LogError>;

fn read_header(region: &Region, at: u64) -> Result<Copy> {
    let mut bytes = [0; size_of::<LogHeaderBytes>()];
    region.read(at, &mut bytes)?;
    let header =
        LogHeaderBytes::read_from_bytes(&bytes).unwrap_or_else(|_| LogHeaderBytes::new_zeroed());
    let (found, expected) = (header.checksum.get(), header_checksum(&header));
    Ok(match header.magic {
        _ if found != expected => Err(LogError::Header { found, expected }),
        MAGIC | FORMER_MAGIC => Ok(header),
        _ => Err(LogError::Format { found: header.magic.escape_ascii().to_string() }),
    })
}
