//! Files stay plain if an overwrite changes more than their bytes and times.
//!
//! [`tidegate::log::cover`] decides by mode, capability and flags. Blocks that files share are not
//! its concern: admission finds them by [`extents`](crate::state::extents), and the calls that
//! share blocks make their files leave ([`transfer`](crate::hooks::transfer)).
//!
//! Entry point: [`is_overwritten_in_place`].

use std::ffi::c_int;

use tidegate::log::cover;

use crate::state::extended::CAPABILITY;
use crate::state::files::Seen;
use crate::sys::query;

/// Returns whether an overwrite of the file of `fd`, which was `seen`, changes its bytes and times
/// alone.
pub(super) fn is_overwritten_in_place(fd: c_int, seen: &Seen) -> bool {
    let inode_flags = || query::inode_flags(fd).ok();
    let extended_flags = || query::file_flags(fd).ok().map(|found| found.flags);
    let has_capability = || !has_no_capability(fd);
    let mode = seen.stat.st_mode;
    cover::is_overwritten_in_place(mode, has_capability, inode_flags, extended_flags)
}

/// Returns whether the file has no capability, which a write or a change of its owner would remove.
pub(super) fn has_no_capability(fd: c_int) -> bool {
    let capability = query::fgetxattr(fd, CAPABILITY, &mut []);
    matches!(capability, Err(libc::ENODATA | libc::EOPNOTSUPP))
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
        let from = world.log.ring().head();
        assert_eq!(open.sync(Sync::Data), 0);
        assert_eq!(world.records_since(from), "end");
        assert!(!world.is_covered(&open));
    }
}
