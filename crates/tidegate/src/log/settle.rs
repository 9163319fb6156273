//! Bringing absorbed writes into their files.
//!
//! Invariants:
//! 1. Of each byte only the newest is written: what a program wrote again later never reaches the disk at its old place.
//! 2. What is brought while the file is still absorbed may be older than what its absorber has written since; that lies over
//!    it in the absorber's [`Overlay`](super::Overlay) and is brought later, for it is later in the log.
//! 3. Records before a file's last [`RecordKind::Settle`] are not brought: the kernel has them, and may have newer bytes.
//!    [`Unbrought`] knows which those are, and sees to it that the record comes after the bytes.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::{Errno, ReadWriteFlags};

use super::append::FileGuard;
use super::pool::LogPool;
use super::record::{Header, RecordKind};
use super::recover::{Content, Extent, ExtentMap, gather};
use super::{Log, Scanner};
use crate::log::layout::RECORD_ALIGN_BYTES;

/// The newest bytes of absorbed writes, by file.
#[derive(Debug, Default)]
pub struct Absorbed {
    files: BTreeMap<u64, ExtentMap>,
}

impl Absorbed {
    /// Takes a record; later ones lie over earlier ones.
    pub fn add(&mut self, header: &Header) {
        match header.kind {
            RecordKind::Settle => drop(self.files.remove(&header.file)),
            RecordKind::Write if header.absorbed => {
                let end = header.offset.saturating_add(u64::from(header.payload_bytes));
                let content = Content::Log(header.position + RECORD_ALIGN_BYTES);
                let extent = Extent { start: header.offset, end, content };
                self.files.entry(header.file).or_default().insert(extent);
            }
            _ => {}
        }
    }

    /// No file has absorbed writes.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Forgets what was taken of a file: the kernel has it.
    pub fn forget(&mut self, id: u64) {
        self.files.remove(&id);
    }

    /// Ids of the files that have some.
    pub fn files(&self) -> impl Iterator<Item = u64> {
        self.files.keys().copied()
    }

    /// The bytes of file `id` whose newest version is in a record before `goal`, in order.
    fn extents(&self, id: u64, goal: u64) -> impl Iterator<Item = Extent> {
        let extents = self.files.get(&id).into_iter().flat_map(ExtentMap::iter);
        extents.filter(move |extent| is_before(extent.content, goal))
    }

    /// How many bytes [`bring`](Self::bring) writes.
    pub fn bytes(&self, id: u64, goal: u64) -> u64 {
        self.extents(id, goal).map(|extent| extent.bytes()).sum()
    }

    /// Forgets what is in records before `position`.
    fn forget_before(&mut self, position: u64) {
        self.files.retain(|_, extents| {
            extents.retain(|content| !is_before(content, position));
            !extents.is_empty()
        });
    }

    /// Writes the bytes of file `id` to `file`: how many. They stay here, so that a failure can be tried again.
    ///
    /// # Errors
    /// What the kernel says; part of the bytes may have been written then. Failed memory of the log is `EIO`.
    pub fn write(&self, id: u64, pool: &LogPool, file: BorrowedFd<'_>) -> io::Result<u64> {
        self.bring(id, u64::MAX, pool, |offset, bytes| write_in_place(file, offset, bytes))
    }

    /// The same by way of `write`, which takes bytes and their offset in the file, for what the log has in records before `goal`:
    /// bytes that a later record has too are left to that one, which stays in the log.
    ///
    /// # Errors
    /// What `write` says. Failed memory of the log is `EIO`.
    pub fn bring(
        &self,
        id: u64,
        goal: u64,
        pool: &LogPool,
        mut write: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut written_bytes = 0;
        gather(
            self.extents(id, goal),
            |position, buf| read(pool, position, buf),
            |batch| {
                batch.runs().try_for_each(|(offset, bytes)| write(offset, bytes))?;
                written_bytes += batch.used() as u64;
                Ok(())
            },
        )?;
        Ok(written_bytes)
    }
}

/// What a record before `position` has: payloads lie within their records.
fn is_before(content: Content, position: u64) -> bool {
    matches!(content, Content::Log(at) if at < position)
}

/// What whoever cleans the log still has to bring.
#[derive(Debug, Default)]
pub struct Unbrought {
    /// Of the records that were scanned and are not retired.
    scanned: Absorbed,
    /// By file id, the position behind the records that were brought when the file was settled.
    settled: BTreeMap<u64, u64>,
}

impl Unbrought {
    /// Notes what was settled before its owner had the right to clean.
    pub fn note_settled(&mut self, log: &Log) {
        for header in Scanner::new(log.pool(), log.tail(), log.head()) {
            if header.kind == RecordKind::Settle {
                self.settled.insert(header.file, header.position);
            }
        }
    }

    /// Takes a record that was scanned.
    pub fn add(&mut self, header: &Header) {
        if header.position >= self.settled_end(header.file) {
            self.scanned.add(header);
        }
    }

    /// What was scanned and not retired since.
    pub fn scanned(&self) -> &Absorbed {
        &self.scanned
    }

    /// The records before `tail` were brought and retired. Those that were scanned behind it are still to be brought.
    pub fn retired(&mut self, tail: u64) {
        self.scanned.forget_before(tail);
        self.settled.retain(|_, end| *end > tail);
    }

    /// Settles the file that `guard` has locked: `bring` gives the kernel all that it does not have of it, then the log says so.
    /// `scanned` is how far the log was scanned. How many bytes of the log could not be read.
    ///
    /// # Errors
    /// What `bring` says, or the log; the file is not settled then.
    pub fn settle(
        &mut self,
        guard: &FileGuard<'_>,
        scanned: u64,
        bring: impl FnOnce(&Absorbed) -> io::Result<()>,
    ) -> io::Result<u64> {
        let (log, id) = (guard.log(), guard.id());
        let mut all = Absorbed::default();
        let head = log.head();
        // Those that were scanned are finished; those behind it are, if they are this file's, for its lock is held.
        let mut behind = Scanner::new(log.pool(), scanned, head);
        let mut before = log.records(log.tail(), scanned);
        let since = self.settled_end(id);
        let of_file = |header: &Header| header.file == id && header.position >= since;
        before.by_ref().chain(behind.by_ref()).filter(of_file).for_each(|it| all.add(&it));
        let unreadable_bytes = before.unreadable_bytes() + behind.unreadable_bytes();
        bring(&all)?;
        guard.begin().and_then(|mut ticket| ticket.settle()).map_err(io::Error::other)?;
        self.scanned.forget(id);
        self.settled.insert(id, head);
        Ok(unreadable_bytes)
    }

    fn settled_end(&self, id: u64) -> u64 {
        self.settled.get(&id).copied().unwrap_or(0)
    }
}

/// Copies `len` bytes at `position` of the log to byte `offset` of `file`, by way of `buf`. Writes there also through a descriptor
/// that appends: the same bytes may be brought again. Allocates nothing.
///
/// # Errors
/// What the kernel says; part of the bytes may have been written then. Failed memory of the log is `EIO`.
pub fn copy_to_file(
    pool: &LogPool,
    position: u64,
    len: u64,
    file: BorrowedFd<'_>,
    offset: u64,
    buf: &mut [u8],
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let step = (len - done).min(buf.len() as u64);
        let part = &mut buf[..usize::try_from(step).unwrap_or(0)];
        if part.is_empty() {
            return Err(Errno::INVAL.into());
        }
        read(pool, position + done, part)?;
        write_in_place(file, offset + done, part)?;
        done += step;
    }
    Ok(())
}

fn read(pool: &LogPool, position: u64, buf: &mut [u8]) -> io::Result<()> {
    let read = pool.region().read(pool.region_offset(position), buf);
    read.map_err(|_| Errno::IO.into())
}

/// Writes all of `bytes` at byte `offset` of `file`, also through a descriptor that appends.
///
/// # Errors
/// What the kernel says; part of the bytes may have been written then.
pub fn write_in_place(file: BorrowedFd<'_>, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match pwrite_in_place(file, bytes, offset) {
            Ok(0) => return Err(Errno::IO.into()),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// `RWF_NOAPPEND`, since Linux 6.9.
const NO_APPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);

fn pwrite_in_place(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> rustix::io::Result<usize> {
    if rustix::fs::fcntl_getfl(file)?.contains(OFlags::APPEND) {
        rustix::io::pwritev2(file, &[IoSlice::new(bytes)], offset, NO_APPEND)
    } else {
        rustix::io::pwrite(file, bytes, offset)
    }
}

/// Says when the file was written last, after what was absorbed of it was written to it; `modified_ns` since 1970, 0: not known.
/// Where that is refused, it is now.
pub fn set_modified(file: BorrowedFd<'_>, modified_ns: u64) {
    if modified_ns == 0 {
        return;
    }
    let (seconds, rest) = (modified_ns / 1_000_000_000, modified_ns % 1_000_000_000);
    let (Ok(tv_sec), Ok(tv_nsec)) = (seconds.try_into(), rest.try_into()) else { return };
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let last_modification = Timespec { tv_sec, tv_nsec };
    let _ = rustix::fs::futimens(file, &Timestamps { last_access, last_modification });
}

/// Whether [`Absorbed::write`] can write through this descriptor: not where it appends and the kernel is too old to be told
/// otherwise.
pub fn can_write_in_place(file: BorrowedFd<'_>) -> bool {
    pwrite_in_place(file, &[], 0).is_ok()
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use super::super::{CONTROL_BYTES, Definition, FileKey, Log, LogOptions, create};
    use super::*;
    use crate::pmem::{Region, SharedMemory};

    const FILE: Definition<'_> = Definition {
        identity: 1,
        device: 1,
        inode: 1,
        mode: 0,
        uid: 0,
        gid: 0,
        born: false,
        path: b"/f",
    };

    fn log() -> Log {
        let region = Arc::new(Region::anonymous(2 << 20).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        let pool = LogPool::open(region).unwrap();
        let all = pool.ring_bytes();
        Log::start(pool, SharedMemory::anonymous(CONTROL_BYTES).unwrap(), all).unwrap()
    }

    fn brought(log: &Log) -> (Absorbed, u64) {
        let mut absorbed = Absorbed::default();
        log.records(log.tail(), log.safe_position()).for_each(|record| absorbed.add(&record));
        let id = absorbed.files().next().unwrap_or(0);
        (absorbed, id)
    }

    #[test]
    fn only_the_newest_absorbed_bytes_are_brought() {
        let log = log();
        let file = log.entry_for(&FileKey { device: 1, inode: 1, identity: 1 }).unwrap();
        let guard = log.lock(file).unwrap();
        let mut ticket = guard.begin().unwrap();
        ticket.define(&FILE).unwrap();
        ticket.absorb(0, &[IoSlice::new(&[1; 6000])]).unwrap();
        ticket.absorb(1000, &[IoSlice::new(&[2; 10])]).unwrap();
        // One that the kernel has.
        ticket.write(2000, &[IoSlice::new(&[3; 10])]).unwrap();
        drop(ticket);
        let target = tempfile::tempfile().unwrap();
        let (absorbed, id) = brought(&log);
        assert_eq!(absorbed.write(id, log.pool(), target.as_fd()).unwrap(), 6000);
        let mut bytes = vec![0; 6001];
        assert_eq!(target.read_at(&mut bytes, 0).unwrap(), 6000);
        assert_eq!((bytes[999], bytes[1000], bytes[1009], bytes[1010]), (1, 2, 2, 1));
        assert_eq!(bytes[2005], 1, "the kernel's own write is the kernel's business");
        guard.begin().unwrap().settle().unwrap();
        assert!(brought(&log).0.is_empty());
    }

    #[test]
    fn what_lies_behind_a_goal_is_brought_later_and_what_lies_over_it_instead() {
        let log = log();
        let file = log.entry_for(&FileKey { device: 1, inode: 1, identity: 1 }).unwrap();
        let guard = log.lock(file).unwrap();
        let absorb = |offset, bytes: &[u8]| {
            let mut ticket = guard.begin().unwrap();
            if ticket.needs_define() {
                ticket.define(&FILE).unwrap();
            }
            ticket.absorb(offset, &[IoSlice::new(bytes)]).unwrap()
        };
        absorb(0, &[1; 10]);
        let goal = absorb(5, &[2; 10]);
        let mut unbrought = Unbrought::default();
        log.records(log.tail(), log.safe_position()).for_each(|record| unbrought.add(&record));
        let id = guard.id();
        let bring = |unbrought: &Unbrought, goal| {
            let mut brought = Vec::new();
            let note = |offset, bytes: &[u8]| {
                brought.push((offset, bytes.to_vec()));
                Ok(())
            };
            let bytes = unbrought.scanned().bring(id, goal, log.pool(), note).unwrap();
            assert_eq!(bytes, unbrought.scanned().bytes(id, goal));
            brought
        };
        assert_eq!(bring(&unbrought, goal), [(0, vec![1; 5])]);
        unbrought.retired(goal);
        assert_eq!(bring(&unbrought, u64::MAX), [(5, vec![2; 10])], "still to be brought");
        unbrought.retired(log.head());
        assert!(unbrought.scanned().is_empty());
    }

    #[test]
    fn the_same_bytes_can_be_brought_again_through_a_descriptor_that_appends() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = std::fs::File::options();
        let file = options.append(true).create(true).open(dir.path().join("file")).unwrap();
        assert!(can_write_in_place(file.as_fd()));
        for _ in 0..2 {
            write_in_place(file.as_fd(), 0, b"once").unwrap();
            write_in_place(file.as_fd(), 4, b"more").unwrap();
        }
        assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"oncemore");
    }

    #[test]
    fn a_failure_can_be_tried_again() {
        let log = log();
        let file = log.entry_for(&FileKey { device: 1, inode: 1, identity: 1 }).unwrap();
        let guard = log.lock(file).unwrap();
        let mut ticket = guard.begin().unwrap();
        ticket.define(&FILE).unwrap();
        ticket.absorb(0, &[IoSlice::new(b"kept")]).unwrap();
        drop(ticket);
        let (absorbed, id) = brought(&log);
        let read_only = std::fs::File::open("/dev/null").unwrap();
        assert!(absorbed.write(id, log.pool(), read_only.as_fd()).is_err());
        let target = tempfile::tempfile().unwrap();
        assert_eq!(absorbed.write(id, log.pool(), target.as_fd()).unwrap(), 4);
    }
}
