//! Logs when a file that a server has open is removed, or another file takes its name: the server
//! continues to use it, and its data is lost when the server ends.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};
use tidegate::device::watch::Notices;
use tidegate_serve::{StopHandle, Worker};

/// A file, and the listener that is notified of its removal.
pub(crate) struct Watched {
    /// A description, such as `the pool /mnt/pmem/pool`.
    name: String,
    file: File,
    notices: Notices,
}

impl Watched {
    /// Returns `file` with its listener, or `None` if it is a device.
    pub(crate) fn new(name: String, file: File, notices: Notices) -> Option<Self> {
        let is_file = file.metadata().is_ok_and(|found| found.is_file());
        is_file.then_some(Self { name, file, notices })
    }

    fn is_removed(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() == 0)
    }
}

/// Starts a thread that watches `files` until it is dropped.
///
/// # Errors
/// The system has no watch or no thread left.
pub(crate) fn watch(files: Vec<Watched>) -> Result<Worker> {
    let changes = watch_links(&files).context("the kernel takes no watch for files")?;
    let run = move |stop: &StopHandle| tell_removals(files, &changes, stop);
    Ok(Worker::start("removal-watch", StopHandle::new()?, run)?)
}

/// Returns a descriptor that is readable when the number of links of one of `files` has changed.
fn watch_links(files: &[Watched]) -> io::Result<OwnedFd> {
    let changes = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    for Watched { file, .. } in files {
        // This path leads to the file even after a rename.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        add_watch(&changes, path, WatchFlags::ATTRIB)?;
    }
    Ok(changes)
}

fn tell_removals(mut files: Vec<Watched>, changes: &OwnedFd, stop: &StopHandle) {
    loop {
        // A file may have been removed before it was watched.
        files.retain(|watched| {
            let is_removed = watched.is_removed();
            if is_removed {
                let name = &watched.name;
                let line = format!(
                    "{name} was removed: the server works on with it, and its data is lost when \
                     the server ends; `tidegate snapshot` makes a copy"
                );
                (watched.notices)(&line);
            }
            !is_removed
        });
        let mut ready = [PollFd::new(stop, PollFlags::IN), PollFd::new(changes, PollFlags::IN)];
        let polled = poll(&mut ready, None);
        if !ready[0].revents().is_empty() {
            return;
        }
        if polled.is_ok() {
            let mut buffer = [MaybeUninit::uninit(); 1024];
            let mut reader = Reader::new(changes.as_fd(), &mut buffer);
            while reader.next().is_ok() {}
        }
    }
}
