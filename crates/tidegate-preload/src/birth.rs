//! Files that this process has just made.
//!
//! Invariant: what the kernel said of the file when it was made is what its definition says; but for its name, which is looked at
//! under the lock of names, by which no process of the tree changes it before the definition is in the log.

use tidegate::log::Definition;

use crate::files::{self, Seen};
use crate::logged::Open;
use crate::names;
use crate::path::PathBuffer;

/// The file was made by this process just now, and `seen` since: all of it is in the log from the start.
pub(crate) fn born(open: &Open, seen: &Seen) {
    if defined(open, seen).is_none() {
        open.born();
    }
}

/// Defines the file, if nothing has to be waited for.
fn defined(open: &Open, seen: &Seen) -> Option<()> {
    let _names = names::lock(open.log)?;
    let guard = open.log.lock(open.file).ok()?;
    guard.mark_born();
    let mut ticket = guard.begin().ok()?;
    let mut path = PathBuffer::new();
    files::path_of(open.fd, &seen.stat, &mut path).ok()?;
    guard.note_mount(seen.mount);
    let key = open.log.key_of(guard.file());
    let libc::stat { st_mode: mode, st_uid: uid, st_gid: gid, .. } = seen.stat;
    let definition = Definition {
        identity: key.identity,
        device: key.device,
        inode: key.inode,
        mode,
        uid,
        gid,
        born: true,
        path: path.as_bytes(),
    };
    ticket.define(&definition).ok()
}
