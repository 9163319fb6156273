//! Absorbed files, on the cleaner's side: the kernel is told what was kept from it.
//!
//! Invariants:
//! 1. The tail does not pass an absorbed record before the kernel has its bytes, and the sync that follows covers them.
//! 2. A record that was brought when its file was settled is not brought again: the kernel may have newer bytes.
//! 3. All of it happens in the cleaner's thread, and nobody else settles while that has the right to clean: of two records of a
//!    file the later one is brought later, or alone.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use tidegate::log::{
    Absorbed, FileGuard, FileRef, Header, LockError, Log, RecordKind, Scanner, set_modified,
};

use super::leases::Leases;
use super::redo;
use super::writeback::{Failure, Writeback};

/// What the cleaner knows of absorbed files.
pub(crate) struct AbsorbedFiles {
    log: Arc<Log>,
    leases: Leases,
    /// Of the records that were scanned and are not retired.
    scanned: Absorbed,
    /// By file id, the position behind the records that were brought when the file was settled.
    settled: HashMap<u64, u64>,
}

impl AbsorbedFiles {
    /// None yet.
    pub(crate) fn new(log: &Arc<Log>, leases: Leases) -> Self {
        let (scanned, settled) = (Absorbed::default(), HashMap::new());
        Self { log: Arc::clone(log), leases, scanned, settled }
    }

    /// Notes what was settled before this cleaner had the right to.
    pub(crate) fn note_settled(&mut self) {
        let (tail, head) = (self.log.tail(), self.log.head());
        for header in Scanner::new(self.log.pool(), tail, head) {
            if header.kind == RecordKind::Settle {
                self.settled.insert(header.file, header.position);
            }
        }
    }

    /// Takes a record that the cleaner has scanned.
    pub(crate) fn add(&mut self, header: &Header) {
        let settled = self.settled.get(&header.file).is_some_and(|end| header.position < *end);
        if !settled {
            self.scanned.add(header);
        }
    }

    /// All scanned records were retired.
    pub(crate) fn retired(&mut self) {
        self.scanned = Absorbed::default();
        let tail = self.log.tail();
        self.settled.retain(|_, end| *end > tail);
    }

    /// Lends `writeback` the descriptors of all files whose leases are held: to open such a file would break its lease.
    pub(crate) fn lend(&self, writeback: &mut Writeback) {
        for (entry, file) in self.leases.all() {
            writeback.adopt(self.log.id_of(entry), &file);
        }
    }

    /// Gives the kernel the bytes of all absorbed records that were scanned. What failed. `scanned` is how far the cleaner
    /// has scanned.
    pub(crate) fn bring(&mut self, scanned: u64) -> Vec<Failure> {
        let mut failures = Vec::new();
        let ids: Vec<_> = self.scanned.files().collect();
        for id in ids {
            let entry = self.log.file_with_id(id);
            let brought = match entry.and_then(|entry| self.leases.file(entry)) {
                Some(file) => self.bring_one(id, entry, &file),
                // Of a supervisor that died.
                None => entry.map_or(Ok(()), |entry| self.settle(entry, scanned)),
            };
            if let Err(error) = brought {
                failures.push(Failure { file: Some(id), name: PathBuf::new(), error });
            }
        }
        failures
    }

    fn bring_one(&self, id: u64, entry: Option<FileRef>, file: &File) -> io::Result<()> {
        self.scanned.write(id, self.log.pool(), file.as_fd())?;
        set_modified(file.as_fd(), entry.map_or(0, |entry| self.log.modified_ns(entry)));
        Ok(())
    }

    /// The file with this id, if its lease is held: it cannot be opened by name then.
    pub(crate) fn lent(&self, id: u64) -> Option<Arc<File>> {
        self.leases.file(self.log.file_with_id(id)?)
    }

    /// Gives the kernel all of a file, and the file back to the kernel. `scanned` is how far the cleaner has scanned.
    ///
    /// # Errors
    /// The file does not take it; then it stays absorbed.
    pub(crate) fn settle(&mut self, entry: FileRef, scanned: u64) -> io::Result<()> {
        let log = Arc::clone(&self.log);
        let guard = match lock(&log, entry) {
            Ok(guard) if guard.absorber() != 0 => guard,
            // Somebody else has done it, or the entry is another file's by now.
            _ => {
                self.leases.give_back(entry);
                return Ok(());
            }
        };
        let lent = self.leases.file(entry);
        let is_lent = lent.is_some();
        if let Some(file) = lent.map_or_else(|| orphan(&log, &guard), |file| Ok(Some(file)))? {
            self.bring_all(&log, &guard, &file, scanned)?;
        }
        if !is_lent {
            guard.owe_place();
        }
        guard.stop_absorbing();
        // Under the lock: behind it the program may take a lease anew.
        self.leases.give_back(entry);
        drop(guard);
        Ok(())
    }

    fn bring_all(
        &mut self,
        log: &Log,
        guard: &FileGuard<'_>,
        file: &File,
        scanned: u64,
    ) -> io::Result<()> {
        let id = guard.id();
        let mut all = Absorbed::default();
        let head = log.head();
        // Those that were scanned are finished; those behind it are, if they are this file's, for its lock is held.
        let behind = Scanner::new(log.pool(), scanned, head);
        let since = self.settled.get(&id).copied().unwrap_or(0);
        let of_file = |header: &Header| header.file == id && header.position >= since;
        log.records(log.tail(), scanned).chain(behind).filter(of_file).for_each(|it| all.add(&it));
        all.write(id, log.pool(), file.as_fd())?;
        set_modified(file.as_fd(), log.modified_ns(guard.file()));
        // The program's place: the kernel's stood still.
        rustix::fs::seek(file, SeekFrom::Start(guard.place()))?;
        let settled = guard.begin().and_then(|mut ticket| ticket.settle());
        settled.map_err(io::Error::other)?;
        self.scanned.forget(id);
        self.settled.insert(id, head);
        Ok(())
    }
}

/// An absorbed file whose lease nobody holds; none: it is gone.
fn orphan(log: &Log, guard: &FileGuard<'_>) -> io::Result<Option<Arc<File>>> {
    match redo::open(log, guard) {
        Err(_) if guard.is_nameless() => Ok(None),
        opened => opened.map(|file| Some(Arc::new(file))),
    }
}

fn lock(log: &Log, entry: FileRef) -> Result<FileGuard<'_>, LockError> {
    loop {
        match log.lock(entry) {
            Err(LockError::Busy) => {}
            outcome => return outcome,
        }
    }
}
