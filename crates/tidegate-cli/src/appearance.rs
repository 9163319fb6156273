//! Waits for a file or a device that does not exist yet, without looking for it again and again,
//! and for a file that another process still writes.
//!
//! inotify tells of new names in the nearest directory that exists, and the table of mounts of file
//! systems that are mounted over a directory.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use tidegate_serve::StopHandle;

const MOUNTS: &str = "/proc/self/mountinfo";
/// Time after the last change of a file in which its writer may go on, such as a copy.
const REST: Duration = Duration::from_secs(5);

/// Returns the first of `paths` that does not exist. A link exists even if it leads nowhere.
pub(crate) fn first_absent(paths: &[PathBuf]) -> Option<&Path> {
    let is_absent = |path: &&PathBuf| {
        path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    paths.iter().find(is_absent).map(PathBuf::as_path)
}

/// Waits until `stop` is signalled or `limit` has passed. Returns whether `stop` is signalled.
pub(crate) fn pause(limit: Duration, stop: &StopHandle) -> bool {
    wait(&[], Some(limit), stop)
}

/// Waits until none of `paths` is absent, or until `stop` is signalled. Returns whether `stop` is
/// signalled. Where a directory cannot be watched, looks at the paths each `interval`.
pub(crate) fn await_paths(paths: &[PathBuf], interval: Duration, stop: &StopHandle) -> bool {
    loop {
        // Before the look: a name that comes after it is noticed.
        let watches = watch(paths);
        if first_absent(paths).is_none() {
            return false;
        }
        let (fds, limit) = match &watches {
            Ok(Watches { names, mounts }) => (
                &[PollFd::new(names, PollFlags::IN), PollFd::new(mounts, PollFlags::PRI)][..],
                None,
            ),
            Err(_) => (&[][..], Some(interval)),
        };
        if wait(fds, limit, stop) {
            return true;
        }
    }
}

/// Waits until no file of `paths` has changed for [`REST`], or until `stop` is signalled. Returns
/// whether `stop` is signalled. A pool that is copied into its place may look whole before it is.
pub(crate) fn await_rest(paths: &[PathBuf], stop: &StopHandle) -> bool {
    while let Some(left) = paths.iter().filter_map(|path| rest_left(path)).max() {
        if pause(left, stop) {
            return true;
        }
    }
    false
}

/// Returns the time until the file at `path` has rested. Returns `None` if it has, or is no file.
fn rest_left(path: &Path) -> Option<Duration> {
    let found = path.metadata().ok().filter(Metadata::is_file)?;
    // A change in the future was made by another clock, and tells nothing.
    let age = found.modified().ok()?.elapsed().ok()?;
    REST.checked_sub(age).filter(|left| !left.is_zero())
}

/// Descriptors that have an event when an absent path may have appeared.
struct Watches {
    names: OwnedFd,
    mounts: File,
}

fn watch(paths: &[PathBuf]) -> io::Result<Watches> {
    let mounts = File::open(MOUNTS)?;
    let names = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    // A directory that goes away, or gets another name, is watched no longer.
    let events = WatchFlags::CREATE
        | WatchFlags::MOVED_TO
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    for path in paths {
        add_watch(&names, nearest_directory(path)?, events)?;
    }
    Ok(Watches { names, mounts })
}

/// Returns the directory nearest to `path` that exists.
fn nearest_directory(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let nearest = path.ancestors().skip(1).find(|parent| parent.is_dir());
    nearest.map(Path::to_path_buf).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Waits for an event of `fds` or of `stop`, at most `limit`. Returns whether `stop` is signalled.
fn wait(fds: &[PollFd<'_>], limit: Option<Duration>, stop: &StopHandle) -> bool {
    let mut ready = vec![PollFd::new(stop, PollFlags::IN)];
    ready.extend_from_slice(fds);
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let _ = poll(&mut ready, limit.as_ref());
    !ready[0].revents().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_appears_step_by_step_ends_the_wait() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, path) = (dir.path().join("folder"), dir.path().join("folder/pool"));
        let paths = [path.clone()];
        let stop = StopHandle::new().unwrap();
        assert_eq!(first_absent(&paths), Some(path.as_path()));
        assert_eq!(nearest_directory(&path).unwrap(), dir.path());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| await_paths(&paths, Duration::from_secs(60), &stop));
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(dir.path().join("other"), "").unwrap();
            assert!(!waiting.is_finished());
            std::fs::write(folder.join("new"), "").unwrap();
            std::fs::rename(folder.join("new"), &path).unwrap();
            assert!(!waiting.join().unwrap());
        });
        assert_eq!(first_absent(&paths), None);
    }

    #[test]
    fn a_file_rests_some_seconds_after_its_last_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let file = File::create_new(&path).unwrap();
        assert!(rest_left(&path).is_some_and(|left| left <= REST && left > REST / 2));
        let now = std::time::SystemTime::now();
        for changed in [now - REST, now + REST] {
            file.set_modified(changed).unwrap();
            assert_eq!(rest_left(&path), None);
        }
        assert_eq!((rest_left(dir.path()), rest_left(&dir.path().join("none"))), (None, None));
        assert!(!await_rest(&[path], &StopHandle::new().unwrap()));
    }

    #[test]
    fn a_stop_ends_each_wait() {
        let stop = StopHandle::new().unwrap();
        assert!(!pause(Duration::ZERO, &stop));
        stop.stop();
        assert!(pause(Duration::from_secs(60), &stop));
        assert!(await_paths(&["/nowhere/at/all".into()], Duration::from_secs(60), &stop));
    }
}
