//! File systems that are mounted beside a copy of themselves: a clone, a snapshot of their volume.
//!
//! A copy has the UUID and the handles of the original, and after a restart the two cannot be told
//! apart. So no file of either is covered while both are mounted. If a copy is mounted later, the
//! stories of the file system are ended first.

use std::collections::BTreeSet;

use tidegate::log::recover::MountedIds;
use tidegate::log::{FileSystemId, Log};

/// The UUIDs that several mounted file systems have.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    mounted: MountedIds,
    ids: BTreeSet<FileSystemId>,
}

impl Copies {
    /// Reads the mounts again. If that fails, the former result stays.
    pub(crate) fn look(&mut self, log: &Log) {
        let Ok(copied) = self.mounted.copied() else { return };
        let former = std::mem::replace(&mut self.ids, copied);
        for gone in former.difference(&self.ids).filter_map(|id| log.file_systems().with_uuid(id)) {
            log.file_systems().note_copies(gone, false);
        }
    }

    /// Notes in the log which of its file systems have copies, so that programs see it. Returns
    /// those that were not noted before.
    pub(crate) fn note(&self, log: &Log) -> Vec<FileSystemId> {
        let is_new = |id: &&FileSystemId| {
            log.file_systems()
                .with_uuid(id)
                .is_some_and(|reference| log.file_systems().note_copies(reference, true))
        };
        self.ids.iter().filter(is_new).copied().collect()
    }
}

/// Returns whether the log notes copies of the file system with this UUID.
pub(crate) fn has_copies(log: &Log, id: &FileSystemId) -> bool {
    log.file_systems()
        .with_uuid(id)
        .is_some_and(|reference| log.file_systems().has_copies(reference))
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    #[test]
    fn a_file_system_that_the_log_knows_is_told_of_once_until_its_copy_is_gone() {
        let trial = Trial::new();
        let (copied, other) = ([7; 16], [8; 16]);
        let id_of = |id: &FileSystemId| tidegate::log::identity(id, 0, b"");
        let mut copies = Copies { ids: BTreeSet::from([copied]), ..Copies::default() };
        assert!(copies.note(&trial.log).is_empty(), "the log does not know it");
        let reference = trial.log.file_systems().find_or_add(id_of(&copied), true).unwrap();
        let single = trial.log.file_systems().find_or_add(id_of(&other), true).unwrap();
        assert_eq!(copies.note(&trial.log), [copied]);
        assert!(copies.note(&trial.log).is_empty(), "it was told of");
        assert!(
            trial.log.file_systems().has_copies(reference)
                && trial.log.file_systems().is_refused(reference)
        );
        assert!(!trial.log.file_systems().has_copies(single) && !has_copies(&trial.log, &other));
        copies.look(&trial.log);
        assert!(!trial.log.file_systems().has_copies(reference), "nothing of this UUID is mounted");
    }
}
