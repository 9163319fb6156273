//! The state of `tidegate run` over the ring: the table of covered files, and messages between
//! processes and the supervisor about files, file systems and programs.
//!
//! Map: [`Log`] finds files; `guard` is a file's lock; `story` begins and ends the logging of a
//! file's changes; `naming` covers new files and names; `supervising` is for the supervisor. Types
//! of their own: [`FileSystems`], [`Lanes`], [`Processes`], [`Keepers`], [`Operations`],
//! [`RealSyncList`].

pub(super) mod copy;
pub(super) mod file_systems;
mod guard;
pub(super) mod keepers;
pub(super) mod lanes;
pub(super) mod naming;
pub(super) mod operations;
pub(super) mod processes;
pub(super) mod real_syncs;
pub(super) mod story;
mod supervising;

use std::collections::{HashMap, HashSet};

pub use file_systems::FileSystems;
pub use guard::FileGuard;
pub use keepers::Keepers;
pub use lanes::Lanes;
pub use operations::Operations;
pub use processes::Processes;
pub use real_syncs::RealSyncList;

use super::control::table::{self, Entry, FileKey, FileRef};
use super::error::LogError;
use super::pool::record::RecordKind;
use super::ring::Ring;
use crate::sync::Ordering;

/// A log of files in use.
pub struct Log {
    ring: Ring,
}

impl Log {
    /// Returns the log of files over `ring`.
    pub fn over(ring: Ring) -> Self {
        Self { ring }
    }

    /// Returns the ring of records.
    #[inline]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Returns the pending changes of each file system.
    #[inline]
    pub fn file_systems(&self) -> FileSystems<'_> {
        FileSystems { ring: &self.ring }
    }

    /// Returns the calls that threads make around the log at present.
    #[inline]
    pub fn lanes(&self) -> Lanes<'_> {
        Lanes { log: self }
    }

    /// Returns the state of processes and the known programs.
    #[inline]
    pub fn processes(&self) -> Processes<'_> {
        Processes { log: self }
    }

    /// Returns the files that processes keep unlogged.
    pub fn keepers(&self) -> Keepers<'_> {
        Keepers { log: self }
    }

    /// Returns the operations in progress.
    pub fn operations(&self) -> Operations<'_> {
        Operations { log: self }
    }

    /// Returns the list of real syncs.
    pub fn real_syncs(&self) -> RealSyncList<'_> {
        RealSyncList { control: &self.ring.control }
    }

    #[inline]
    fn entry(&self, file: FileRef) -> Entry<'_> {
        table::entry(&self.ring.control, file.index)
    }

    fn entries(&self) -> impl Iterator<Item = (FileRef, Entry<'_>)> {
        table::all(&self.ring.control)
    }

    /// Returns the entry of the file with this key; adds one if there is none.
    ///
    /// # Errors
    /// [`LogError::TableFull`], [`LogError::Lock`].
    pub fn entry_for(&self, key: &FileKey) -> Result<FileRef, LogError> {
        table::find_or_add(&self.ring.control, key)
    }

    /// Returns the entry of the file with this key, if it has one.
    ///
    /// # Errors
    /// [`LogError::Lock`].
    pub fn find(&self, key: &FileKey) -> Result<Option<FileRef>, LogError> {
        table::find_only(&self.ring.control, key)
    }

    /// Returns whether a file with these numbers may have an entry, with few loads and no lock.
    pub fn may_have(&self, device: u64, inode: u64) -> bool {
        table::may_have(&self.ring.control, device, inode)
    }

    /// Returns the number of the file's device.
    pub fn device_of(&self, file: FileRef) -> u64 {
        self.entry(file).device().load(Ordering::Relaxed)
    }

    /// Returns the device numbers of all files with an entry, one for each file.
    pub fn devices(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries().map(|(_, entry)| entry.device().load(Ordering::Relaxed))
    }

    /// Returns the key of an entry's file.
    pub fn key_of(&self, file: FileRef) -> FileKey {
        self.entry(file).key()
    }

    /// Returns the entries that have one of these ids, by one walk through the table.
    pub fn files_with_ids(&self, ids: impl IntoIterator<Item = u64>) -> HashMap<u64, FileRef> {
        // Files without an id have 0 there.
        let wanted: HashSet<u64> = ids.into_iter().filter(|id| *id != 0).collect();
        let found = self
            .entries()
            .map(|(file, entry)| (entry.id().load(Ordering::Acquire), file))
            .filter(|(id, _)| wanted.contains(id));
        found.take(wanted.len()).collect()
    }

    /// Returns the file's id in records, 0 if it has none yet.
    pub fn id_of(&self, file: FileRef) -> u64 {
        self.entry(file).id().load(Ordering::Acquire)
    }

    /// Returns the payload of the file's last definition, for [`Definition::decode`]; `None` if the
    /// definition is retired or cannot be read.
    ///
    /// [`Definition::decode`]: crate::log::Definition::decode
    pub fn definition_of(&self, file: FileRef) -> Option<Vec<u8>> {
        let entry = self.entry(file);
        let position = entry.defined_at().load(Ordering::Acquire);
        if position < self.ring.tail() || !self.is_current(file) {
            return None;
        }
        let header = self.ring.pool().read_header(position).ok()??;
        let mut payload = vec![0; header.payload_bytes as usize];
        self.ring.pool().read_payload(&header, 0, &mut payload).ok()?;
        (header.kind == RecordKind::Define).then_some(payload)
    }

    /// Returns whether the entry still belongs to the file of this reference.
    pub(in crate::log) fn is_current(&self, file: FileRef) -> bool {
        self.entry(file).is_of(file)
    }
}
