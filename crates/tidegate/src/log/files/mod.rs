//! The state of `run` over the ring: the table of covered files, and what processes and the
//! supervisor tell each other of files, file systems and programs.
//!
//! Map: [`Log`] finds files; `guard` is the lock of one; `story` says from where to where its
//! changes are logged; `naming` covers new files and names; `supervising` is for the supervisor.
//! Types of their own: [`FileSystems`], [`Lanes`], [`Processes`], [`Keepers`], [`Operations`],
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

    /// Returns what is pending in each file system.
    #[inline]
    pub fn file_systems(&self) -> FileSystems<'_> {
        FileSystems { ring: &self.ring }
    }

    /// Returns what threads do around the log at this moment.
    #[inline]
    pub fn lanes(&self) -> Lanes<'_> {
        Lanes { log: self }
    }

    /// Returns what is known of processes and their programs.
    #[inline]
    pub fn processes(&self) -> Processes<'_> {
        Processes { log: self }
    }

    /// Returns which process keeps which file unlogged.
    pub fn keepers(&self) -> Keepers<'_> {
        Keepers { log: self }
    }

    /// Returns the operations in the middle.
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

    /// The entry of the file with this key; one is made for it where there is none.
    ///
    /// # Errors
    /// [`LogError::TableFull`], [`LogError::Lock`].
    pub fn entry_for(&self, key: &FileKey) -> Result<FileRef, LogError> {
        table::find_or_add(&self.ring.control, key)
    }

    /// The entry of the file with this key, if it has one.
    ///
    /// # Errors
    /// [`LogError::Lock`].
    pub fn find(&self, key: &FileKey) -> Result<Option<FileRef>, LogError> {
        table::find_only(&self.ring.control, key)
    }

    /// A file of these numbers may have an entry. Costs a load or two, takes no lock.
    pub fn may_have(&self, device: u64, inode: u64) -> bool {
        table::may_have(&self.ring.control, device, inode)
    }

    /// The number of the device that the file is on.
    pub fn device_of(&self, file: FileRef) -> u64 {
        self.entry(file).device().load(Ordering::Relaxed)
    }

    /// The numbers of the devices of all files that have an entry, one for each file.
    pub fn devices(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries().map(|(_, entry)| entry.device().load(Ordering::Relaxed))
    }

    /// What the kernel calls the file of an entry.
    pub fn key_of(&self, file: FileRef) -> FileKey {
        self.entry(file).key()
    }

    /// The entries of the files with these ids, of those that have one: one walk through the table
    /// for all of them.
    pub fn files_with_ids(&self, ids: impl IntoIterator<Item = u64>) -> HashMap<u64, FileRef> {
        // 0 is the id of all files that have none yet.
        let wanted: HashSet<u64> = ids.into_iter().filter(|id| *id != 0).collect();
        let found = self
            .entries()
            .map(|(file, entry)| (entry.id().load(Ordering::Acquire), file))
            .filter(|(id, _)| wanted.contains(id));
        found.take(wanted.len()).collect()
    }

    /// The id that records name the file by, 0 if it has none yet.
    pub fn id_of(&self, file: FileRef) -> u64 {
        self.entry(file).id().load(Ordering::Acquire)
    }

    /// The payload of the file's last definition, if that is not retired: see
    /// [`Definition::decode`].
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

    /// The entry is still that of the file it was made for.
    pub(in crate::log) fn is_current(&self, file: FileRef) -> bool {
        self.entry(file).is_of(file)
    }
}
