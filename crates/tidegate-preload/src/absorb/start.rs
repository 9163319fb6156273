//! Which files are absorbed, from when on, and which never.
//!
//! Invariants: no other process ever shares the description of an absorbed file: before `fork`, `exec` and the sending of a
//! descriptor all is settled, and what was shared once is never absorbed again.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tidegate::log::{FileGuard, Log, Overlay};

use super::settle::{give_lease_back, settle_all, settle_patiently};
use super::{Absorbing, COUNT, FILES_ABSORBED, forget, locked, mark};
use crate::descriptors::{self, ABSORBED, DIRECT, NEVER, STICKY, STRIPPED, WRITE_ONLY};
use crate::logged::{Open, Sync, Written};
use crate::names::SignalsBlocked;
use crate::raw::{self, Errno};
use crate::supervisor::{self, Answer};
use crate::{files, process, quota};

/// Threads that are about to absorb a file.
static STARTING: AtomicU32 = AtomicU32::new(0);
/// Threads that are about to share all descriptors with another process: nothing is absorbed meanwhile.
static SHARING: AtomicU32 = AtomicU32::new(0);

/// After a write that was logged: absorbs the file, if it is written often and nobody else has it open.
#[inline]
pub(crate) fn consider(open: &Open, written: &Written<'_>) {
    const NOT: u32 = ABSORBED | NEVER | STICKY | DIRECT;
    if open.known.has(NOT) {
        return;
    }
    let (writes, before) = (descriptors::count_write(open.fd), process::writes_before());
    let is_due = if begins_last_page(open, written) {
        is_due_for_page(writes, before, written.end - written.at)
    } else {
        is_due(writes, before) && (!open.known.has(WRITE_ONLY) || ends_with_page(written))
    };
    if is_due {
        absorb(open, written);
    }
}

fn ends_with_page(written: &Written<'_>) -> bool {
    written.end.is_multiple_of(Overlay::PAGE_BYTES)
}

/// What the descriptor cannot read of the file's last page does not have to be read after this write, if it is the file's last.
#[inline]
fn begins_last_page(open: &Open, written: &Written<'_>) -> bool {
    let page = written.end - written.end % Overlay::PAGE_BYTES;
    open.known.has(WRITE_ONLY) && written.at <= page && page < written.end
}

/// Whether the file of a descriptor with so many writes is worth a lease: after `before` of them, and, since somebody else may
/// have wanted it meanwhile, after twice as many, and so on.
fn is_due(writes: u32, before: u32) -> bool {
    writes.checked_rem(before) == Some(0) && (writes / before).is_power_of_two()
}

/// The same for one that can be absorbed only when a write begins a page: whether that is the first such write since.
fn is_due_for_page(writes: u32, before: u32, write_bytes: u64) -> bool {
    let Some(doublings) = writes.checked_div(before).and_then(u32::checked_ilog2) else {
        return false;
    };
    let since = writes - (before << doublings);
    u64::from(since) <= Overlay::PAGE_BYTES / write_bytes.max(1)
}

#[cold]
fn absorb(open: &Open, written: &Written<'_>) {
    if process::in_vfork_child() || process::writes_unseen() || descriptors::is_shared(open.fd) {
        return;
    }
    let _signals = SignalsBlocked::new();
    cover(open);
    STARTING.fetch_add(1, Ordering::SeqCst);
    if SHARING.load(Ordering::SeqCst) == 0 {
        absorb_alone(open, written);
    }
    STARTING.fetch_sub(1, Ordering::SeqCst);
}

/// A program that opened a file with `O_SYNC` never syncs it: what it had before it was logged is brought to the disk now, once.
fn cover(open: &Open) {
    if open.known.has(STRIPPED) && open.sync(Sync::All) < 0 {
        // For the program to hear.
        if let Ok(guard) = open.log.lock(open.file) {
            guard.note_failure();
        }
    }
}

fn absorb_alone(open: &Open, written: &Written<'_>) {
    let Ok(guard) = open.log.lock(open.file) else { return };
    let fit = guard.is_covered() && !guard.is_sticky() && !guard.is_nameless();
    // What a dead writer left is done to the kernel's file, before anything is kept from that.
    let fit = fit && !guard.owner_died();
    // Once more, under the lock: see `never`.
    let fit = fit && !descriptors::get(open.fd).has(NEVER);
    if !fit || guard.absorber() != 0 || !has_space(open) {
        return;
    }
    // Of an absorption that somebody else has ended.
    forget(open.file);
    let Some(free) = FILES_ABSORBED.iter().find(|it| reserve(it)) else { return };
    let start = |overlay| start(open, &guard, written, free, overlay);
    let started = Overlay::new().ok().is_some_and(start);
    if !started {
        free.file.store(0, Ordering::Release);
    }
}

fn reserve(it: &Absorbing) -> bool {
    it.file.compare_exchange(0, u64::MAX, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Whether there is still room for what the log holds back. It is looked at again after each eighth of the log: what is not
/// brought yet is never more than all of the log, so that it and another eighth fit into twice the log.
#[inline]
pub(super) fn still_has_space(open: &Open, space_until: &AtomicU64) -> bool {
    if open.log.head() < space_until.load(Ordering::Relaxed) {
        return true;
    }
    space_until.store(next_look(open.log), Ordering::Relaxed);
    has_space(open)
}

fn next_look(log: &Log) -> u64 {
    log.head() + log.pool().ring_bytes() / 8
}

/// The file system has room for what the log may hold back, and quotas leave it: else a write that the kernel would refuse were
/// accepted.
fn has_space(open: &Open) -> bool {
    let (Ok(system), Ok(file)) = (raw::fstatfs(open.fd), raw::fstat(open.fd)) else { return false };
    // Its quotas are not told to those who may only write.
    if system.f_type == libc::BTRFS_SUPER_MAGIC {
        return false;
    }
    let free_bytes = system.f_bavail.saturating_mul(u64::try_from(system.f_bsize).unwrap_or(0));
    let left_bytes = free_bytes
        .min(quota::left_bytes(open.fd, quota::USER, file.st_uid))
        .min(quota::left_bytes(open.fd, quota::GROUP, file.st_gid));
    left_bytes / 2 > open.log.pool().ring_bytes()
}

fn start(
    open: &Open,
    guard: &FileGuard<'_>,
    written: &Written<'_>,
    free: &Absorbing,
    overlay: Overlay,
) -> bool {
    match supervisor::lease(open.file, open.fd) {
        Answer::Done => {}
        Answer::Refused(_) => {
            mark(open.file, |known| known.with(NEVER));
            return false;
        }
        Answer::None => {
            // It may have died after it took the lease.
            give_lease_back(open.fd);
            return false;
        }
    }
    // Behind the lease: nobody changes size or place any more but this process, and its lock is held.
    let (Ok(stat), Ok(place)) = (raw::fstat(open.fd), raw::lseek(open.fd, 0, libc::SEEK_CUR))
    else {
        supervisor::closed(open.file);
        return false;
    };
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if begins_last_page(open, written) {
        let (at, parts, position) = (written.at, written.parts, written.position);
        let begun = overlay.begin_with(open.log, at, parts, position);
        if size != written.end || begun.is_err() {
            supervisor::closed(open.file);
            return false;
        }
    }
    guard.start_absorbing(process::number(), size, place as u64);
    free.space_until.store(next_look(open.log), Ordering::Relaxed);
    free.overlay.store(Box::into_raw(Box::new(overlay)), Ordering::Release);
    free.file.store(open.file.to_word(), Ordering::Release);
    COUNT.fetch_add(1, Ordering::Relaxed);
    mark(open.file, |known| known.with(ABSORBED));
    true
}

/// Nothing is absorbed from now on, until [`shared`]: descriptors are about to get to another process.
#[cold]
pub(crate) fn sharing() {
    if process::in_vfork_child() {
        return;
    }
    SHARING.fetch_add(1, Ordering::SeqCst);
    while STARTING.load(Ordering::SeqCst) != 0 {
        raw::yield_now();
    }
    settle_all();
}

/// Ends what [`sharing`] began: no file that is open by now is absorbed again.
pub(crate) fn shared() {
    if !process::in_vfork_child() {
        descriptors::share_all();
        SHARING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The same in a forked child, where no other thread is.
pub(crate) fn inherited() {
    descriptors::share_all();
    SHARING.store(0, Ordering::SeqCst);
    STARTING.store(0, Ordering::SeqCst);
}

/// The kernel is about to use the file of `fd` in ways that are not seen, now or later.
///
/// # Errors
/// The kernel does not have all of it, and cannot take it.
pub(crate) fn never(fd: c_int) -> Result<(), Errno> {
    let Some((log, file)) = process::log().zip(files::of(fd).file()) else { return Ok(()) };
    // First: nobody absorbs it between the two.
    mark(file, |known| known.with(NEVER));
    {
        let _signals = SignalsBlocked::new();
        drop(locked(log, file));
    }
    if log.absorber_of(file) == process::number() {
        settle_patiently(log, file, fd)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_considered_again_after_twice_as_many_writes() {
        let due: Vec<_> = (1..500).filter(|writes| is_due(*writes, 32)).collect();
        assert_eq!(due, [32, 64, 128, 256]);
        assert!(!(1..100).any(|writes| is_due(writes, 0)), "never");
    }

    #[test]
    fn where_only_some_writes_will_do_the_next_of_them_is_due() {
        for bytes in [100, 1000, 4096, 9000] {
            let begins_page = |writes: &u32| u64::from(*writes) * bytes % 4096 < bytes;
            let is_due = |writes: &u32| is_due_for_page(*writes, 32, bytes);
            let due: Vec<_> = (1..4000).filter(begins_page).filter(is_due).collect();
            assert!(
                (7..=14).contains(&due.len()),
                "7 times it doubles, writes of {bytes}: {due:?}"
            );
            assert!(due[0] >= 32 && due[0] <= 32 + 4096 / 100);
        }
        assert!(!(1..100).any(|writes| is_due_for_page(writes, 0, 100)), "never");
    }
}
