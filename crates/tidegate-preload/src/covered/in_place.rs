//! Files of which an overwrite changes more than bytes: they stay plain.
//!
//! The log answers an `fdatasync` after mere overwrites because the kernel would commit nothing of
//! the journal for it. There are files for which it would: their overwrites go through the journal
//! or to other blocks, or take an attribute away. What another file shares is no matter of this
//! module: [`extents`](crate::extents) finds it when the file is covered, and the calls that share
//! blocks make their files leave ([`transfer`](crate::transfer)).
//!
//! Entry point: [`Open::is_overwritten_in_place`].

use super::Open;
use crate::files::Seen;
use crate::query;

/// Bits of the mode that a write clears.
const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
/// Flag of a file of ext4 whose data goes through the journal.
const FS_JOURNAL_DATA_FL: u32 = 0x4000;
/// Flag of a file of XFS on the real-time device, which may be one that is never overwritten.
const FS_XFLAG_REALTIME: u32 = 0x1;

impl Open {
    /// Whether an overwrite of the file, which was `seen`, changes its bytes and times alone.
    pub(super) fn is_overwritten_in_place(&self, seen: &Seen) -> bool {
        // A file system without these flags has no such files.
        let is_journaled =
            || query::inode_flags(self.fd).is_ok_and(|flags| flags & FS_JOURNAL_DATA_FL != 0);
        let is_realtime =
            || query::file_flags(self.fd).is_ok_and(|found| found.flags & FS_XFLAG_REALTIME != 0);
        seen.stat.st_mode & SET_ID_BITS == 0
            && self.has_no_capability()
            && !is_journaled()
            && !is_realtime()
    }

    /// The file has no capability, which a write or a change of its owner would take away.
    pub(super) fn has_no_capability(&self) -> bool {
        let capability = query::fgetxattr(self.fd, c"security.capability", &mut []);
        matches!(capability, Err(libc::ENODATA | libc::EOPNOTSUPP))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::Sync;
    use crate::testing::World;

    #[test]
    fn a_file_whose_mode_a_write_changes_stays_plain() {
        let world = World::new();
        for (mode, is_covered) in [(0o644, true), (0o4755, false), (0o2755, false)] {
            let name = format!("{mode:o}");
            let file = world.file(&name);
            file.set_permissions(PermissionsExt::from_mode(mode)).unwrap();
            let open = world.open(&file, 0);
            world.keep(&open);
            assert_eq!(open.admit(Sync::All), 0);
            assert_eq!(world.is_covered(&open), is_covered, "{name}");
        }
    }

    #[test]
    fn a_covered_file_leaves_at_the_first_sync_after_its_mode_has_become_one_that_writes_change() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        file.set_permissions(PermissionsExt::from_mode(0o4755)).unwrap();
        world.log.note_own_change(open.entry().unwrap().file);
        let from = world.log.head();
        assert_eq!(open.sync(Sync::Data), 0);
        assert_eq!(world.records_since(from), "end");
        assert!(!world.is_covered(&open));
    }
}
