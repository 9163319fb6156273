//! Absorbed files, on the cleaner's side: the kernel is told what was kept from it.
//!
//! Invariants:
//! 1. The tail does not pass an absorbed record before the kernel has its bytes, but for those that a record behind the new tail has
//!    too, and the sync that follows covers them.
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
    FileGuard, FileRef, Header, LockError, Log, Unbrought, set_modified, write_in_place,
};

use super::leases::Leases;
use super::pace::{PART_BYTES, Part};
use super::redo;
use super::writeback::{Failure, Writeback};

/// What the cleaner knows of absorbed files.
pub(crate) struct AbsorbedFiles {
    log: Arc<Log>,
    leases: Leases,
    unbrought: Unbrought,
}

impl AbsorbedFiles {
    /// None yet.
    pub(crate) fn new(log: &Arc<Log>, leases: Leases) -> Self {
        Self { log: Arc::clone(log), leases, unbrought: Unbrought::default() }
    }

    /// Notes what was settled before this cleaner had the right to.
    pub(crate) fn note_settled(&mut self) {
        self.unbrought.note_settled(&self.log);
    }

    /// Takes a record that the cleaner has scanned.
    pub(crate) fn add(&mut self, header: &Header) {
        self.unbrought.add(header);
    }

    /// The records before `position` were retired.
    pub(crate) fn retired(&mut self, position: u64) {
        self.unbrought.retired(position);
    }

    /// Something that was scanned is still to be brought.
    pub(crate) fn has_unbrought(&self) -> bool {
        !self.unbrought.scanned().is_empty()
    }

    /// How many bytes [`bring`](Self::bring) gives the kernel, by file.
    pub(crate) fn bytes_to_bring(&self, goal: u64) -> HashMap<u64, u64> {
        let scanned = self.unbrought.scanned();
        scanned.files().map(|id| (id, scanned.bytes(id, goal))).collect()
    }

    /// Lends `writeback` the descriptors of all files whose leases are held: to open such a file would break its lease.
    pub(crate) fn lend(&self, writeback: &mut Writeback) {
        for (entry, file) in self.leases.all() {
            writeback.adopt(self.log.id_of(entry), &file);
        }
    }

    /// Gives the kernel the bytes of all absorbed records before `goal`, in the order of the files. What failed. `scanned` is how
    /// far the cleaner has scanned. `brought` hears of each part that the kernel has.
    pub(crate) fn bring(
        &mut self,
        goal: u64,
        scanned: u64,
        brought: &mut dyn FnMut(Part) -> Result<(), Failure>,
    ) -> Vec<Failure> {
        let mut failures = Vec::new();
        let ids: Vec<_> = self.unbrought.scanned().files().collect();
        let entries = self.log.files_with_ids(ids.iter().copied());
        for id in ids {
            let Some(entry) = entries.get(&id).copied() else { continue };
            let failed = |error| Failure { file: Some(id), name: PathBuf::new(), error };
            let outcome = match self.leases.file(entry) {
                Some(file) => {
                    let outcome = self.bring_one(id, goal, &file, brought);
                    set_modified(file.as_fd(), self.log.modified_ns(entry));
                    outcome
                }
                // Of a supervisor that died. What cannot be read was told of when it was scanned.
                None => self.settle(entry, scanned).map(drop).map_err(failed),
            };
            failures.extend(outcome.err());
        }
        failures
    }

    fn bring_one(
        &self,
        id: u64,
        goal: u64,
        file: &File,
        brought: &mut dyn FnMut(Part) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (mut part, mut refused) = (Part::of(id), None);
        let outcome = self.unbrought.scanned().bring(id, goal, self.log.pool(), |offset, bytes| {
            write_in_place(file.as_fd(), offset, bytes)?;
            part.add(offset, bytes.len() as u64);
            if part.bytes >= PART_BYTES {
                // Not a reason to stop: all is brought before anything is synced or given up.
                refused =
                    brought(std::mem::replace(&mut part, Part::of(id))).err().or(refused.take());
            }
            Ok(())
        });
        outcome.map_err(|error| Failure { file: Some(id), name: PathBuf::new(), error })?;
        if part.bytes > 0 {
            brought(part)?;
        }
        refused.map_or(Ok(()), Err)
    }

    /// The file of this entry, if its lease is held: it cannot be opened by name then.
    pub(crate) fn lent(&self, entry: FileRef) -> Option<Arc<File>> {
        self.leases.file(entry)
    }

    /// Gives the kernel all of a file, and the file back to the kernel. `scanned` is how far the cleaner has scanned. How many bytes of
    /// the log could not be read: what they say is lost, if it is about this file.
    ///
    /// # Errors
    /// The file does not take it; then it stays absorbed.
    pub(crate) fn settle(&mut self, entry: FileRef, scanned: u64) -> io::Result<u64> {
        let log = Arc::clone(&self.log);
        let guard = match lock(&log, entry) {
            Ok(guard) if guard.absorber() != 0 => guard,
            // Somebody else has done it, or the entry is another file's by now.
            _ => {
                self.leases.give_back(entry);
                return Ok(0);
            }
        };
        let mut unreadable_bytes = 0;
        let lent = self.leases.file(entry);
        let is_lent = lent.is_some();
        if let Some(file) = lent.map_or_else(|| orphan(&log, &guard), |file| Ok(Some(file)))? {
            unreadable_bytes = self.bring_all(&log, &guard, &file, scanned)?;
        }
        if !is_lent {
            guard.owe_place();
        }
        guard.stop_absorbing();
        // Under the lock: behind it the program may take a lease anew.
        self.leases.give_back(entry);
        drop(guard);
        Ok(unreadable_bytes)
    }

    fn bring_all(
        &mut self,
        log: &Log,
        guard: &FileGuard<'_>,
        file: &File,
        scanned: u64,
    ) -> io::Result<u64> {
        self.unbrought.settle(guard, scanned, |all| {
            all.write(guard.id(), log.pool(), file.as_fd())?;
            set_modified(file.as_fd(), log.modified_ns(guard.file()));
            // The program's place: the kernel's stood still.
            rustix::fs::seek(file, SeekFrom::Start(guard.place()))?;
            Ok(())
        })
    }
}

/// An absorbed file whose lease nobody holds; none: it is gone.
fn orphan(log: &Log, guard: &FileGuard<'_>) -> io::Result<Option<Arc<File>>> {
    match redo::open(log, guard) {
        Err(_) if guard.is_nameless() => Ok(None),
        opened => opened.map(|file| file.map(Arc::new)),
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

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileExt;

    use tidegate::log::Ticket;
    use tidegate::pmem::{Region, RegionOptions};

    use super::super::trial::{Trial, define, log_over};
    use super::*;

    const POOL_BYTES: u64 = 1 << 20;

    /// A log in a file, which can lose its end.
    fn log_in(path: &std::path::Path) -> Arc<Log> {
        File::create(path).unwrap().set_len(POOL_BYTES).unwrap();
        log_over(Region::open(path, &RegionOptions::default()).unwrap())
    }

    /// A file of 3 bytes of which a process that is dead has absorbed a write, with no lease held on it.
    fn absorbed_by_the_dead(trial: &Trial) -> FileRef {
        let file = trial.file("file", b"abc");
        let entry = trial.log.entry_for(&Trial::key(&file)).unwrap();
        let guard = trial.log.lock(entry).unwrap();
        guard.start_absorbing(u32::MAX, 0, 3);
        let mut ticket = guard.begin().unwrap();
        define(&mut ticket, &file, &trial.path("file"));
        ticket.absorb(1, &[IoSlice::new(b"x")]).unwrap();
        entry
    }

    fn settle(trial: &Trial, entry: FileRef) -> io::Result<u64> {
        let mut absorbed = AbsorbedFiles::new(&trial.log, Leases::default());
        absorbed.settle(entry, trial.log.tail())
    }

    #[test]
    fn a_file_of_a_dead_process_is_settled_by_its_name() {
        let trial = Trial::new();
        let entry = absorbed_by_the_dead(&trial);
        assert_eq!(settle(&trial, entry).unwrap(), 0);
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"axc");
        assert_eq!(trial.log.absorber_of(entry), 0);
    }

    /// Else the log is kept for it, for ever.
    #[test]
    fn a_file_whose_remover_died_is_owed_nothing() {
        let trial = Trial::new();
        let entry = absorbed_by_the_dead(&trial);
        let guard = trial.log.lock(entry).unwrap();
        let path = trial.path("file");
        guard.begin().unwrap().unlink(path.as_os_str().as_encoded_bytes()).unwrap();
        // Killed right behind this.
        std::fs::remove_file(&path).unwrap();
        drop(guard);
        assert_eq!(settle(&trial, entry).unwrap(), 0);
        assert_eq!(trial.log.absorber_of(entry), 0);
    }

    /// Records that another file gets the name of [`absorbed_by_the_dead`] one.
    fn replace(trial: &Trial, replaced: FileRef, happens: impl FnOnce(&mut Ticket<'_>, u64)) {
        let (from, to) = (trial.path("another"), trial.path("file"));
        let another = trial.file("another", b"xyz");
        let replaced = trial.log.key_of(replaced).identity;
        trial.record(&another, "another", |ticket| {
            let [from, to] = [&from, &to].map(|path| path.as_os_str().as_encoded_bytes());
            let position = ticket.rename(from, to, replaced).unwrap();
            happens(ticket, position);
        });
    }

    #[test]
    fn a_file_whose_replacer_died_is_owed_nothing() {
        let trial = Trial::new();
        let entry = absorbed_by_the_dead(&trial);
        // Killed right behind this.
        replace(&trial, entry, |_, _| {
            std::fs::rename(trial.path("another"), trial.path("file")).unwrap();
        });
        assert_eq!(settle(&trial, entry).unwrap(), 0);
        assert_eq!(trial.log.absorber_of(entry), 0);
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"xyz");
    }

    #[test]
    fn a_file_that_was_not_replaced_stays_in_the_log() {
        let trial = Trial::new();
        let entry = absorbed_by_the_dead(&trial);
        replace(&trial, entry, |ticket, position| {
            ticket.void(position).unwrap();
        });
        std::fs::rename(trial.path("file"), trial.path("elsewhere")).unwrap();
        assert_eq!(settle(&trial, entry).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_ne!(trial.log.absorber_of(entry), 0);
    }

    #[test]
    fn a_file_that_the_log_has_nothing_of_is_owed_nothing() {
        let trial = Trial::new();
        let entry = absorbed_by_the_dead(&trial);
        trial.log.retire_to(trial.log.head()).unwrap();
        assert_eq!(settle(&trial, entry).unwrap(), 0);
        assert_eq!(trial.log.absorber_of(entry), 0);
    }

    #[test]
    fn a_file_that_somebody_has_taken_away_stays_in_the_log() {
        let trial = Trial::new();
        let entry = absorbed_by_the_dead(&trial);
        std::fs::rename(trial.path("file"), trial.path("elsewhere")).unwrap();
        assert_eq!(settle(&trial, entry).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_ne!(trial.log.absorber_of(entry), 0);
    }

    #[test]
    fn what_cannot_be_read_when_a_file_is_settled_is_told() {
        let trial = Trial::new();
        let pool = trial.path("pool");
        let log = log_in(&pool);
        let file = trial.file("file", b"");
        let entry = log.entry_for(&Trial::key(&file)).unwrap();
        let leases = Leases::default();
        leases.take(&log, entry, OwnedFd::from(file.try_clone().unwrap())).unwrap();
        let guard = log.lock(entry).unwrap();
        guard.start_absorbing(std::process::id(), 0, 0);
        let absorb = |offset: u64, data: &[u8]| {
            let mut ticket = guard.begin().unwrap();
            if ticket.needs_define() {
                define(&mut ticket, &file, &trial.path("file"));
            }
            ticket.absorb(offset, &[IoSlice::new(data)]).unwrap()
        };
        // Up to the last pages of the ring, which are lost, and on at its start.
        let ring_bytes = log.pool().ring_bytes();
        while ring_bytes - log.head() % ring_bytes > 16384 {
            absorb(0, &[b'a'; 4000]);
            log.retire_to(log.safe_position()).unwrap();
        }
        let mut offset = 0;
        while log.head() % ring_bytes > 8192 {
            absorb(offset, &[b'b'; 2000]);
            offset += 2000;
        }
        drop(guard);
        File::options().write(true).open(&pool).unwrap().set_len(POOL_BYTES - 12288).unwrap();
        let mut absorbed = AbsorbedFiles::new(&log, leases);
        let lost_bytes = absorbed.settle(entry, log.tail()).unwrap();
        assert!(lost_bytes >= 4096, "{lost_bytes}");
        let mut last = [0; 2000];
        file.read_exact_at(&mut last, offset - 2000).unwrap();
        assert_eq!(last, [b'b'; 2000], "what can be read is there");
        assert_eq!(log.absorber_of(entry), 0);
    }
}
