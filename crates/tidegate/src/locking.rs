//! Locks files against other processes, by `flock`.
//!
//! A process that was killed may leave its lock for a moment. A reader of `/proc/PID/maps` holds
//! its memory, and mapped memory holds the locked file. So this module waits for a lock whose owner
//! does not live, and refuses one whose owner lives at once.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rustix::event::{Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How long the kernel may take to release the lock of a process that was killed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of the attempts to get a lock.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: PAUSE_NS };
const PAUSE_NS: i64 = 5_000_000;
/// The flag of a process that is ending, in `/proc/PID/stat`: `PF_EXITING`.
const EXITING: u64 = 4;

/// Whether others may have the lock, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Those that share it may.
    Shared,
    /// No one may.
    Exclusive,
}

impl LockMode {
    /// Returns the request for the lock that does not wait.
    fn at_once(self) -> FlockOperation {
        match self {
            Self::Shared => FlockOperation::NonBlockingLockShared,
            Self::Exclusive => FlockOperation::NonBlockingLockExclusive,
        }
    }
}

/// Locks `file` until its last descriptor is closed. Waits up to 2 s for a lock whose owner is dead
/// or not to be seen from this PID namespace.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another owner has the lock, or the kernel's error.
pub fn lock(file: &File, mode: LockMode) -> io::Result<()> {
    match flock(file, mode.at_once()) {
        Err(Errno::WOULDBLOCK) if !has_living_owner(file)? => {
            lock_within(file, mode, RELEASE_TIMEOUT)
        }
        locked => Ok(locked?),
    }
}

/// Locks `file` until its last descriptor is closed. Waits up to `timeout`, also for an owner that
/// lives.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] after `timeout`, or the kernel's error.
pub fn lock_within(file: &File, mode: LockMode, timeout: Duration) -> io::Result<()> {
    let mut left = timeout.as_nanos() / u128::from(PAUSE_NS.unsigned_abs());
    loop {
        match flock(file, mode.at_once()) {
            Err(Errno::WOULDBLOCK) if left > 0 => left -= 1,
            locked => return Ok(locked?),
        }
        // The kernel has no event for the release of a lock, and no wait for one with a timeout.
        let _ = poll(&mut [], Some(&PAUSE));
    }
}

/// Returns whether a process that lives owns a lock of `file`, or that cannot be told.
fn has_living_owner(file: &File) -> io::Result<bool> {
    let inode = file.metadata()?.ino();
    let Ok(locks) = std::fs::read_to_string("/proc/locks") else { return Ok(true) };
    Ok(owners(&locks, inode).any(lives))
}

/// Returns the processes that own locks by `flock` of files with number `inode`, of any device,
/// in the text of `/proc/locks`. The kernel names the owner's device otherwise than `stat` does.
fn owners(locks: &str, inode: u64) -> impl Iterator<Item = u64> {
    locks.lines().filter_map(move |line| {
        // "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"; "1: -> FLOCK ..." waits for it.
        let mut words = line.split_whitespace().skip(1);
        let is_owned = words.next() == Some("FLOCK");
        let process = words.nth(2)?.parse().ok()?;
        let of = words.next()?.rsplit(':').next()?;
        (is_owned && of.parse() == Ok(inode)).then_some(process)
    })
}

/// Returns whether the process is there, and not about to end.
fn lives(process: u64) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| is_living(&stat))
}

fn is_living(stat: &str) -> bool {
    // The name before the last parenthesis may be anything.
    let words = stat.rsplit(')').next().unwrap_or_default();
    let mut words = words.split_whitespace();
    let state = words.next();
    let flags: Option<u64> = words.nth(5).and_then(|word| word.parse().ok());
    !matches!(state, None | Some("Z" | "X")) && flags.is_some_and(|flags| flags & EXITING == 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_from_the_kernels_list() {
        let list = "1: FLOCK  ADVISORY  WRITE 1204 fe:00:77 0 EOF
1: -> FLOCK  ADVISORY  WRITE 1300 fe:00:77 0 EOF
2: POSIX  ADVISORY  WRITE 1205 fe:00:77 0 EOF
3: FLOCK  ADVISORY  READ 1206 00:1a:77 0 EOF
4: FLOCK  ADVISORY  WRITE 1207 fe:00:78 0 EOF
5: FLOCK
6: OFDLCK ADVISORY  READ -1 00:05:77 0 EOF
";
        assert_eq!(owners(list, 77).collect::<Vec<_>>(), [1204, 1206]);
    }

    #[test]
    fn a_process_that_is_ending_does_not_live() {
        let stat = |state, flags| format!("7 (a) Z (b) {state} 1 7 7 0 -1 {flags} 99 0 0");
        assert!(is_living(&stat("S", "4194304")));
        assert!(!is_living(&stat("R", "4194308")));
        assert!(!is_living(&stat("Z", "4194304")));
        assert!(!is_living(""));
        assert!(lives(std::process::id().into()) && !lives(u64::from(u32::MAX)));
    }

    fn two_opens() -> [File; 2] {
        let file = tempfile::NamedTempFile::new().unwrap();
        [(); 2].map(|()| File::open(file.path()).unwrap())
    }

    #[test]
    fn a_living_owner_is_not_waited_for() {
        let [one, other] = two_opens();
        lock(&one, LockMode::Shared).unwrap();
        lock(&other, LockMode::Shared).unwrap();
        assert!(has_living_owner(&other).unwrap());
        let error = lock(&other, LockMode::Exclusive).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    /// The owner is the process that asked for the lock, here a program that has ended.
    #[test]
    fn a_dead_owner_is_waited_for() {
        let [one, other] = two_opens();
        let mut program = std::process::Command::new("flock");
        let input = one.try_clone().unwrap();
        assert!(program.args(["-x", "0"]).stdin(input).status().unwrap().success());
        drop(program);
        assert!(!has_living_owner(&other).unwrap());
        let waits = std::thread::spawn(move || lock(&other, LockMode::Exclusive));
        drop(one);
        waits.join().unwrap().unwrap();
    }

    #[test]
    fn a_wait_ends_with_the_lock_or_the_timeout() {
        let [one, other] = two_opens();
        lock(&one, LockMode::Exclusive).unwrap();
        let error = lock_within(&other, LockMode::Shared, Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let waits = std::thread::spawn(move || {
            lock_within(&other, LockMode::Exclusive, Duration::from_secs(30))
        });
        drop(one);
        waits.join().unwrap().unwrap();
    }
}
