//! Files under `tidegate run --absorb`, as a device: its blocks are those of a few files, on a file system that a crash tears too.
//!
//! Each write is led by its ordinal (`Way`): through the log and the kernel, as the file is, absorbed, after the file was settled, or
//! by a new file that is renamed over the old one. Log, overlay, the choice of what is brought, recovery: the real ones. What
//! decides when a file is absorbed (leases, descriptors, signals) is not here, nor are processes: the calls of the preload library and
//! of the cleaner are made in their order, by the writers' own threads.
//!
//! Invariants:
//! 1. Whoever locks a file, the names or the cleaner waits for its turn at a mutex of this module first, by way of the scheduler: the
//!    locks of the log, which block, are always free. Order: cleaner, names, files.
//! 2. A supervisor that dies takes what it knew with it; the next one starts as that of `run` does.

use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use tidegate::device::{
    BlockDevice, DeviceError, DeviceErrorKind, Geometry, Result as DeviceResult, WriteFlags,
    ZeroFlags,
};
use tidegate::log::recover::{FileSystem, recover_pool};
use tidegate::log::{
    Base, CONTROL_BYTES, Definition, FileGuard, FileKey, FileRef, Log, LogPool, Overlay,
    RecordKind, Ticket, Unbrought, create, current_process,
};
use tidegate::pmem::{Region, SharedMemory};

use crate::context;
use crate::files::{FILE_BYTES, ModelFile, ModelFiles};
use crate::log::{BLOCK_BYTES, CLEAN_FROM_BYTES, POOL_BYTES, check_pool, copy, log_options, text};
use crate::subject::Subject;

const BLOCK: u64 = BLOCK_BYTES as u64;
const BLOCKS_A_FILE: u64 = FILE_BYTES / BLOCK;
const MODE: u32 = 0o100_644;
/// A supervisor dies in one in so many of its cleanings and settlings.
const DIES_ONE_IN: u64 = 5;

/// What is wrong with how absorbed files are cleaned or settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbsorbFault {
    /// Nothing.
    None,
    /// The tail moves before the absorbed bytes are brought.
    TailFirst,
    /// What was brought is not synced.
    BroughtNotSynced,
    /// The Settle record comes before the bytes.
    SettleFirst,
    /// Records of settled files are brought again.
    SettledAgain,
    /// A renamed file replaces one that was not settled.
    ReplacedUnsettled,
    /// The tail moves to the middle of what was scanned, and all that was scanned is taken for brought.
    PartForgetsAll,
    /// The tail moves to the middle where files have lost their definitions by that.
    PartUndefined,
}

/// Files, some of them absorbed, beside a log.
pub struct AbsorbSubject {
    files: u64,
    fault: AbsorbFault,
}

impl AbsorbSubject {
    /// `files` files of two blocks of 512 bytes, with `fault`.
    pub const fn new(files: u64, fault: AbsorbFault) -> Self {
        Self { files, fault }
    }

    fn open_files(&self, region: &Arc<Region>) -> Result<Device, String> {
        let pool = LogPool::open(Arc::clone(region)).map_err(text)?;
        let files = ModelFiles::mount(region, POOL_BYTES).map_err(text)?;
        recover(&pool, &files)?;
        let control = SharedMemory::anonymous(CONTROL_BYTES).map_err(text)?;
        let ring_bytes = pool.ring_bytes();
        let log = Log::start(pool, control, ring_bytes).map_err(text)?;
        let named = (0..self.files).map(|name| Named::open(&log, &files, name).map(Mutex::new));
        let named = named.collect::<io::Result<Vec<_>>>().map_err(text)?;
        let cleaner = Mutex::new(Cleaner::at(log.tail()));
        let region = Arc::clone(region);
        Ok(Device { region, log, files, named, names: Mutex::new(()), cleaner, fault: self.fault })
    }
}

/// As the supervisor recovers a pool.
fn recover(pool: &LogPool, files: &ModelFiles) -> Result<(), String> {
    match recover_pool(pool, files, 1, &|_| ()).map_err(text)? {
        Some(recovered) if !recovered.outcome.is_complete() || recovered.unreadable_bytes > 0 => {
            Err(format!("recovery is not complete: {:?}", recovered.outcome.failures))
        }
        _ => Ok(()),
    }
}

impl Subject for AbsorbSubject {
    fn create(&self, region: &Region) -> Result<(), String> {
        let scratch = Arc::new(Region::anonymous(self.region_bytes()).map_err(text)?);
        let pool = Region::anonymous(POOL_BYTES).map_err(text)?;
        create(&pool, &log_options(2)).map_err(text)?;
        copy(&pool, &scratch)?;
        let files = ModelFiles::mount(&scratch, POOL_BYTES).map_err(text)?;
        for name in 0..self.files {
            let file = files.create(&path_of(name)).map_err(text)?;
            files.set_size(&file, FILE_BYTES).map_err(text)?;
            files.sync(&file).map_err(text)?;
        }
        copy(&scratch, region)
    }

    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
        Ok(Arc::new(self.open_files(region)?))
    }

    fn check(&self, region: &Region) -> Result<(), String> {
        check_pool(region)
    }

    fn region_bytes(&self) -> u64 {
        (POOL_BYTES + ModelFiles::BYTES).next_multiple_of(4096)
    }

    fn rounds_after_recovery(&self) -> u32 {
        8
    }
}

fn path_of(name: u64) -> PathBuf {
    format!("/f{name}").into()
}

/// How a write is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As the file is: absorbed or not.
    Plain,
    /// The file is absorbed from now on.
    Absorbed,
    /// The file is settled first, as before a call that no hook can do with an absorbed file.
    Settled,
    /// A new file with the bytes of the old one is renamed over that.
    Replaced,
}

impl Way {
    fn of_caller() -> Self {
        match context::ordinal() % 4 {
            0 => Self::Plain,
            1 => Self::Absorbed,
            2 => Self::Settled,
            _ => Self::Replaced,
        }
    }
}

/// The file that has a name.
struct Named {
    name: u64,
    file: ModelFile,
    entry: FileRef,
    /// What the absorber knows, while there is one.
    overlay: Option<Overlay>,
}

impl Named {
    fn open(log: &Log, files: &ModelFiles, name: u64) -> io::Result<Self> {
        Self::of(log, files.open(&path_of(name))?, name)
    }

    fn of(log: &Log, file: ModelFile, name: u64) -> io::Result<Self> {
        let entry = log.entry_for(&key_of(file)).map_err(io::Error::other)?;
        Ok(Self { name, file, entry, overlay: None })
    }
}

fn key_of(file: ModelFile) -> FileKey {
    FileKey { device: 1, inode: file.inode, identity: file.identity }
}

/// What the supervisor knows.
struct Cleaner {
    unbrought: Unbrought,
    scanned: u64,
    /// Ids of the files that the records since the tail are about.
    due: BTreeSet<u64>,
    /// Where these records start.
    starts: Vec<u64>,
    actions: u64,
}

impl Cleaner {
    fn at(tail: u64) -> Self {
        let (unbrought, due, starts) = (Unbrought::default(), BTreeSet::new(), Vec::new());
        Self { unbrought, scanned: tail, due, starts, actions: 0 }
    }

    /// Counts an action; whether the supervisor dies in it.
    fn dies(&mut self) -> bool {
        self.actions += 1;
        self.actions.is_multiple_of(DIES_ONE_IN)
    }
}

/// The device.
struct Device {
    region: Arc<Region>,
    log: Log,
    files: ModelFiles,
    named: Vec<Mutex<Named>>,
    names: Mutex<()>,
    cleaner: Mutex<Cleaner>,
    fault: AbsorbFault,
}

/// The kernel's bytes of a file.
struct Kernel<'a>(&'a ModelFiles, ModelFile);

impl Base for Kernel<'_> {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), i32> {
        let inside = FILE_BYTES.saturating_sub(offset).min(buf.len() as u64);
        let (bytes, behind) = buf.split_at_mut(usize::try_from(inside).unwrap_or(0));
        behind.fill(0);
        if bytes.is_empty() { Ok(()) } else { self.0.read(self.1, offset, bytes).map_err(|_| 5) }
    }
}

impl Device {
    fn turn<'a, T>(&self, mutex: &'a Mutex<T>) -> MutexGuard<'a, T> {
        loop {
            match mutex.try_lock() {
                Ok(guard) => return guard,
                // Of a process that was killed, which nobody goes on with.
                Err(TryLockError::Poisoned(poisoned)) => return PoisonError::into_inner(poisoned),
                Err(TryLockError::WouldBlock) => self.region.relax(),
            }
        }
    }

    fn named(&self, name: u64) -> MutexGuard<'_, Named> {
        self.turn(&self.named[usize::try_from(name).unwrap_or(usize::MAX)])
    }

    fn lock(&self, entry: FileRef) -> io::Result<FileGuard<'_>> {
        self.log.lock(entry).map_err(io::Error::other)
    }

    /// A slot for an operation on the file, which is at `path`, and its definition where it needs one.
    fn begin<'a>(guard: &'a FileGuard<'_>, file: ModelFile, path: &Path) -> io::Result<Ticket<'a>> {
        let mut ticket = guard.begin().map_err(io::Error::other)?;
        if ticket.needs_define() {
            let FileKey { device, inode, identity } = key_of(file);
            let (mode, uid, gid, born) = (MODE, 0, 0, guard.is_born());
            let path = path.as_os_str().as_encoded_bytes();
            let definition = Definition { identity, device, inode, mode, uid, gid, born, path };
            ticket.define(&definition).map_err(io::Error::other)?;
        }
        Ok(ticket)
    }

    fn write_to(&self, name: u64, offset: u64, data: &[u8], way: Way) -> io::Result<()> {
        if self.log.head() - self.log.tail() >= CLEAN_FROM_BYTES {
            self.clean()?;
        }
        match way {
            Way::Settled => self.settle(name)?,
            Way::Replaced => return self.replace(name, offset, data),
            Way::Plain | Way::Absorbed => {}
        }
        let mut named = self.named(name);
        let guard = self.lock(named.entry)?;
        if way == Way::Absorbed && guard.absorber() == 0 {
            named.overlay = Some(Overlay::new().map_err(io::Error::other)?);
            guard.start_absorbing(current_process(), self.files.size(named.file)?, 0);
        }
        if guard.absorber() != 0 {
            return self.absorb(&named, &guard, offset, data);
        }
        let mut ticket = Self::begin(&guard, named.file, &path_of(name))?;
        ticket.write(offset, &[IoSlice::new(data)]).map_err(io::Error::other)?;
        self.files.write(&named.file, offset, data)
    }

    fn absorb(
        &self,
        named: &Named,
        guard: &FileGuard<'_>,
        offset: u64,
        data: &[u8],
    ) -> io::Result<()> {
        let overlay = named.overlay.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let (len, mut kernel) = (data.len() as u64, Kernel(&self.files, named.file));
        let prepared = overlay.prepare(&self.log, offset, len, guard.size(), &mut kernel);
        prepared.map_err(io::Error::other)?;
        let mut ticket = Self::begin(guard, named.file, &path_of(named.name))?;
        let parts = [IoSlice::new(data)];
        let position = ticket.absorb(offset, &parts).map_err(io::Error::other)?;
        drop(ticket);
        overlay.wrote(&self.log, offset, &parts, position).map_err(io::Error::other)?;
        guard.grow(offset + len, 0);
        Ok(())
    }

    fn read_from(&self, name: u64, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let named = self.named(name);
        let guard = self.lock(named.entry)?;
        self.read_named(&named, &guard, offset, buf)
    }

    fn read_named(
        &self,
        named: &Named,
        guard: &FileGuard<'_>,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<()> {
        let mut kernel = Kernel(&self.files, named.file);
        match named.overlay.as_ref().filter(|_| guard.absorber() != 0) {
            Some(overlay) => {
                overlay.read(&self.log, offset, buf, &mut kernel).map_err(io::Error::other)
            }
            None => self.files.read(named.file, offset, buf),
        }
    }

    fn zero(&self, name: u64, offset: u64, len: u64) -> io::Result<()> {
        loop {
            self.settle(name)?;
            let named = self.named(name);
            let guard = self.lock(named.entry)?;
            if guard.absorber() == 0 {
                let mut ticket = Self::begin(&guard, named.file, &path_of(name))?;
                ticket.zero(offset, len).map_err(io::Error::other)?;
                return self.files.zero(&named.file, offset, len);
            }
        }
    }

    /// Has a new file take the name: with the bytes of the old one, but for `data` at `offset`.
    fn replace(&self, name: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        loop {
            if self.fault != AbsorbFault::ReplacedUnsettled {
                self.settle(name)?;
            }
            let _names = self.turn(&self.names);
            let mut named = self.named(name);
            let old = named.entry;
            let guard = self.lock(old)?;
            if guard.absorber() != 0 && self.fault != AbsorbFault::ReplacedUnsettled {
                continue;
            }
            let mut bytes = vec![0; usize::try_from(FILE_BYTES).unwrap_or(0)];
            self.files.read(named.file, 0, &mut bytes)?;
            let at = usize::try_from(offset).unwrap_or(usize::MAX);
            bytes[at..at + data.len()].copy_from_slice(data);
            let new = self.save(name, &bytes, named.file.identity)?;
            guard.mark_nameless();
            guard.stop_absorbing();
            drop(guard);
            *named = new;
            return Ok(());
        }
    }

    fn save(&self, name: u64, bytes: &[u8], replaced: u64) -> io::Result<Named> {
        let (path, temp) = (path_of(name), PathBuf::from(format!("/f{name}~")));
        self.remove(&temp)?;
        let new = Named::of(&self.log, self.files.create(&temp)?, name)?;
        let guard = self.lock(new.entry)?;
        guard.mark_born();
        let mut ticket = Self::begin(&guard, new.file, &temp)?;
        ticket.write(0, &[IoSlice::new(bytes)]).map_err(io::Error::other)?;
        self.files.write(&new.file, 0, bytes)?;
        drop(ticket);
        let mut ticket = Self::begin(&guard, new.file, &temp)?;
        let [from, to] = [&temp, &path].map(|path| path.as_os_str().as_encoded_bytes());
        ticket.rename(from, to, replaced).map_err(io::Error::other)?;
        self.files.rename(&temp, &path)?;
        drop(ticket);
        drop(guard);
        Ok(new)
    }

    /// Removes what a killed process has left at `path`, of which the log has nothing any more.
    fn remove(&self, path: &Path) -> io::Result<()> {
        let Some(found) = self.files.look(path)? else { return Ok(()) };
        let mut ticket = self.log.begin_on_names().map_err(io::Error::other)?;
        let removed = ticket.unlink(path.as_os_str().as_encoded_bytes(), found.identity);
        removed.map_err(io::Error::other)?;
        self.files.unlink(path)
    }

    /// The file is absorbed no more, and the kernel has all of it.
    fn settle(&self, name: u64) -> io::Result<()> {
        let mut cleaner = self.turn(&self.cleaner);
        if cleaner.dies() {
            self.settle_by(&mut cleaner, name, true)?;
            self.succeed(&mut cleaner)?;
        }
        self.settle_by(&mut cleaner, name, false)
    }

    /// A supervisor has died; the next one notes what was settled, and settles all files.
    fn succeed(&self, cleaner: &mut Cleaner) -> io::Result<()> {
        *cleaner = Cleaner { actions: cleaner.actions, ..Cleaner::at(self.log.tail()) };
        cleaner.unbrought.note_settled(&self.log);
        (0..self.named.len() as u64).try_for_each(|name| self.settle_by(cleaner, name, false))
    }

    /// Settles a file; with `dies`, the supervisor is killed after the first bytes.
    fn settle_by(&self, cleaner: &mut Cleaner, name: u64, dies: bool) -> io::Result<()> {
        let mut named = self.named(name);
        let guard = self.lock(named.entry)?;
        if guard.absorber() == 0 {
            return Ok(());
        }
        let (id, file, mut bytes) = (guard.id(), named.file, Vec::new());
        let bring = |offset: u64, data: &[u8]| {
            let written = if dies { &data[..data.len() / 2] } else { data };
            self.files.write(&file, offset, written)?;
            if dies { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        };
        let late = self.fault == AbsorbFault::SettleFirst;
        let settled = cleaner.unbrought.settle(&guard, cleaner.scanned, |all| {
            let note = |offset: u64, data: &[u8]| {
                bytes.push((offset, data.to_vec()));
                if late { Ok(()) } else { bring(offset, data) }
            };
            all.bring(id, u64::MAX, self.log.pool(), note).map(drop)
        });
        let mut owed = bytes.iter().filter(|_| late && settled.is_ok());
        let done = owed.try_for_each(|(offset, data)| bring(*offset, data));
        match settled.and(done) {
            Err(error) if dies && error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            outcome => outcome?,
        }
        guard.stop_absorbing();
        drop(guard);
        named.overlay = None;
        Ok(())
    }

    /// What the cleaner does: scan, bring, sync, retire.
    fn clean(&self) -> io::Result<()> {
        let mut cleaner = self.turn(&self.cleaner);
        let (tail, safe) = (self.log.tail(), self.log.safe_position());
        if safe < cleaner.scanned {
            return Err(io::Error::other("what was scanned may not be retired any more"));
        }
        self.scan(&mut cleaner, safe);
        let goal = self.goal(&cleaner, tail, safe);
        if self.fault == AbsorbFault::TailFirst {
            self.log.retire_to(goal).map_err(io::Error::other)?;
        }
        self.bring(&cleaner, goal)?;
        if cleaner.dies() {
            return self.succeed(&mut cleaner);
        }
        self.sync(&cleaner)?;
        if goal > tail {
            self.log.retire_to(goal).map_err(io::Error::other)?;
            let forgets_all = self.fault == AbsorbFault::PartForgetsAll;
            cleaner.unbrought.retired(if forgets_all { safe } else { goal });
            cleaner.starts.retain(|start| *start >= goal);
            if goal == safe {
                cleaner.due.clear();
            }
        }
        Ok(())
    }

    /// How far the log is retired: every second time by a part of what could be.
    fn goal(&self, cleaner: &Cleaner, tail: u64, safe: u64) -> u64 {
        let is_blind = self.fault == AbsorbFault::PartUndefined;
        let may_be = |goal: &u64| {
            (tail + 1..safe).contains(goal) && (is_blind || self.log.may_retire_to(*goal))
        };
        let goals: Vec<_> = cleaner.starts.iter().copied().filter(may_be).collect();
        let middle = goals.get(goals.len() / 2).copied();
        middle.filter(|_| cleaner.actions.is_multiple_of(2)).unwrap_or(safe)
    }

    fn scan(&self, cleaner: &mut Cleaner, until: u64) {
        let again = self.fault == AbsorbFault::SettledAgain;
        let from = if again { self.log.tail() } else { cleaner.scanned };
        if again {
            cleaner.unbrought = Unbrought::default();
        }
        for header in self.log.records(from, until) {
            cleaner.due.insert(header.file);
            cleaner.starts.push(header.position);
            if !(again && header.kind == RecordKind::Settle) {
                cleaner.unbrought.add(&header);
            }
        }
        cleaner.scanned = cleaner.scanned.max(until);
    }

    fn bring(&self, cleaner: &Cleaner, goal: u64) -> io::Result<()> {
        for id in cleaner.unbrought.scanned().files() {
            let Some(entry) = self.log.file_with_id(id) else { continue };
            // Without an absorber there is no lease.
            if self.log.absorber_of(entry) != 0 || self.fault == AbsorbFault::SettledAgain {
                let file = self.file_of(entry);
                let write = |offset: u64, data: &[u8]| self.files.write(&file, offset, data);
                cleaner.unbrought.scanned().bring(id, goal, self.log.pool(), write)?;
            }
        }
        Ok(())
    }

    fn sync(&self, cleaner: &Cleaner) -> io::Result<()> {
        let brought: BTreeSet<_> = cleaner.unbrought.scanned().files().collect();
        for id in &cleaner.due {
            let entry = self.log.file_with_id(*id).filter(|entry| !self.log.is_nameless(*entry));
            let synced = self.fault != AbsorbFault::BroughtNotSynced || !brought.contains(id);
            if let Some(entry) = entry.filter(|_| synced) {
                self.files.sync(&self.file_of(entry))?;
            }
        }
        self.files.sync_directory(Path::new("/"))
    }

    fn file_of(&self, entry: FileRef) -> ModelFile {
        let FileKey { inode, identity, .. } = self.log.key_of(entry);
        ModelFile { inode, identity }
    }
}

/// The parts of a range of the device: file, offset in it, length.
fn parts(offset: u64, len: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let (mut at, end) = (offset, offset + len);
    std::iter::from_fn(move || {
        let step = (FILE_BYTES - at % FILE_BYTES).min(end - at);
        let part = (at / FILE_BYTES, at % FILE_BYTES, step);
        at += step;
        (step > 0).then_some(part)
    })
}

fn refused(error: &io::Error) -> DeviceError {
    DeviceError::new(DeviceErrorKind::Io, error.to_string())
}

impl BlockDevice for Device {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: BLOCK_BYTES,
            blocks: self.named.len() as u64 * BLOCKS_A_FILE,
            preferred_bytes: BLOCK_BYTES,
            read_only: false,
            atomic_block: true,
            volatile_cache: false,
            fast_zero: false,
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> DeviceResult<()> {
        let mut rest = buf;
        for (name, at, len) in parts(offset, rest.len() as u64) {
            let (part, behind) = rest.split_at_mut(usize::try_from(len).unwrap_or(0));
            self.read_from(name, at, part).map_err(|error| refused(&error))?;
            rest = behind;
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], _flags: WriteFlags) -> DeviceResult<()> {
        let mut rest = data;
        for (name, at, len) in parts(offset, data.len() as u64) {
            let (part, behind) = rest.split_at(usize::try_from(len).unwrap_or(0));
            self.write_to(name, at, part, Way::of_caller()).map_err(|error| refused(&error))?;
            rest = behind;
        }
        Ok(())
    }

    /// Everything acknowledged is durable: this cleans.
    fn flush(&self) -> DeviceResult<()> {
        self.clean().map_err(|error| refused(&error))
    }

    /// Settles.
    fn discard(&self, offset: u64, len: u64) -> DeviceResult<()> {
        parts(offset, len)
            .try_for_each(|(name, ..)| self.settle(name))
            .map_err(|error| refused(&error))
    }

    fn write_zeroes(&self, offset: u64, len: u64, _flags: ZeroFlags) -> DeviceResult<()> {
        let zeroed = parts(offset, len).try_for_each(|(name, at, len)| self.zero(name, at, len));
        zeroed.map_err(|error| refused(&error))
    }
}
