//! `fchown` to the owner that a file already has: `SQLite` as root, each time it opens a journal.
//!
//! Invariants:
//! 1. Such a call sets only the file's ctime. It puts the inode into the journal, as growth does:
//!    the next sync is a mark, or a real sync while a change is pending.
//! 2. A call that may have changed more is counted as pending, like any change of attributes.

use std::ffi::c_int;

use libc::{gid_t, uid_t};
use tidegate::log::{Change, PlainCall};

use super::in_place::has_no_capability;
use super::{Open, plain};
use crate::sys::query;

/// Bits of the mode that a change of the owner clears.
const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;

/// Makes `call`, which is `fchown` to `user` and `group`, if the file is covered and already has
/// that owner. Returns the call's result, or `None` if the call was not made.
pub(crate) fn chown_to_same(
    open: &Open,
    user: uid_t,
    group: gid_t,
    call: impl FnOnce() -> c_int,
) -> Option<c_int> {
    let Open { log, fd, .. } = *open;
    let entry = open.entry_if_any()?;
    let guard = open.lock(entry).ok().filter(|guard| guard.is_covered())?;
    // Another thread's change of the owner is counted before and after its call. If that call began
    // before this first count and has not ended at the second count, a sync that waits for its end
    // also waits for this call. In every other case the two counts differ.
    let changes = log.file_systems().changes(entry.file_system);
    if !has_owner(fd, user, group) {
        return None;
    }
    let in_flight = plain::in_lane(log, PlainCall::Metadata);
    let result = call();
    if log.file_systems().changes(entry.file_system) != changes {
        log.note_own_change(entry.file);
        log.file_systems().note_change_everywhere();
    }
    drop(in_flight);
    let (journaled, size) = ((result == 0).then_some(changes), guard.size());
    guard.note_change(Change { bytes: 0, grew: true, journaled, size });
    Some(result)
}

/// Returns whether `fchown` to `user` and `group` changes no owner, no mode and no capabilities; -1
/// stands for any owner.
fn has_owner(fd: c_int, user: uid_t, group: gid_t) -> bool {
    let Ok(stat) = query::fstat(fd) else { return false };
    [stat.st_uid, uid_t::MAX].contains(&user)
        && [stat.st_gid, gid_t::MAX].contains(&group)
        && stat.st_mode & SET_ID_BITS == 0
        && has_no_capability(fd)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::super::Sync;
    use super::*;
    use crate::testing::World;

    #[test]
    fn a_call_that_changes_no_owner_is_marked_by_the_next_sync() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let owner = file.metadata().unwrap();
        for user in [owner.uid(), uid_t::MAX] {
            let from = world.log.ring().head();
            assert_eq!(chown_to_same(&open, user, owner.gid(), || 0), Some(0));
            let guard = open.lock(open.entry().unwrap()).unwrap();
            assert!(!guard.has_own_changes() && guard.has_grown());
            drop(guard);
            assert_eq!(open.sync(Sync::Data), 0);
            assert_eq!(world.records_since(from), "mark:4");
        }
    }

    #[test]
    fn a_call_that_changes_the_owner_is_not_made() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let (user, group) = file.metadata().map(|data| (data.uid(), data.gid())).unwrap();
        let never = || unreachable!("it changes the owner");
        assert_eq!(chown_to_same(&open, user + 1, group, never), None);
        assert_eq!(chown_to_same(&open, user, group + 1, never), None);
        let plain = world.file("plain");
        assert_eq!(chown_to_same(&world.open(&plain, 0), user, group, never), None);
        file.set_permissions(PermissionsExt::from_mode(0o4755)).unwrap();
        assert_eq!(
            chown_to_same(&open, user, group, never),
            None,
            "it would clear a bit of the mode"
        );
    }

    #[test]
    fn a_change_by_another_thread_meanwhile_makes_the_next_sync_real() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let owner = file.metadata().unwrap();
        let entry = open.entry().unwrap();
        let call = || {
            world.log.file_systems().note_change(entry.file_system);
            0
        };
        assert_eq!(chown_to_same(&open, owner.uid(), owner.gid(), call), Some(0));
        assert!(open.lock(entry).unwrap().has_own_changes());
        assert!(world.log.file_systems().is_pending(entry.file_system));
    }
}
