//! Leases: files whose writes a process keeps from the kernel, as long as nobody else wants them.
//!
//! A process asks for a lease on a file that only it has open, and sends a copy of its descriptor. The kernel then lets
//! nobody else open the file before the lease is given back, and tells us that somebody waits by a signal.
//!
//! Invariants:
//! 1. A file is absorbed only while its lease is held here, and settled before the lease is given back.
//! 2. The copies of descriptors are of the very descriptions that the programs use: nothing is opened here, which would
//!    break the lease. A lease belongs to the description: it outlives the supervisor that took it, and whoever has the
//!    description can give it back.
//! 3. After the death of a supervisor, its leases are held here ([`Leases::adopt_all`]) before anybody cleans.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use tidegate::log::recover::identity_of;
use tidegate::log::{FileRef, Log, can_write_in_place};

use super::kernel;

/// The leases of a supervisor, for its loop and its cleaner.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases {
    held: Arc<Mutex<HashMap<u64, Arc<File>>>>,
}

impl Leases {
    fn held(&self) -> MutexGuard<'_, HashMap<u64, Arc<File>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a write lease on `descriptor`, a copy of a process's only one of the file of `entry`.
    ///
    /// # Errors
    /// It is another file, somebody else has it open, or the file system has no leases.
    pub(crate) fn take(&self, log: &Log, entry: FileRef, descriptor: OwnedFd) -> io::Result<()> {
        let file = of_entry(log, entry, descriptor)?;
        if !can_write_in_place(file.as_fd()) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        kernel::take_lease(&file)?;
        self.held().insert(entry.to_word(), Arc::new(file));
        Ok(())
    }

    /// The file of `entry`, if its lease is held.
    pub(crate) fn file(&self, entry: FileRef) -> Option<Arc<File>> {
        self.held().get(&entry.to_word()).cloned()
    }

    /// All files whose leases are held.
    pub(crate) fn all(&self) -> Vec<(FileRef, Arc<File>)> {
        let held = self.held();
        held.iter().map(|(word, file)| (FileRef::from_word(*word), Arc::clone(file))).collect()
    }

    /// Files that somebody else waits for.
    pub(crate) fn wanted(&self) -> Vec<FileRef> {
        let held = self.held();
        let wanted = held.iter().filter(|(_, file)| !kernel::holds_lease(file));
        wanted.map(|(word, _)| FileRef::from_word(*word)).collect()
    }

    /// Gives a lease back.
    pub(crate) fn give_back(&self, entry: FileRef) {
        let file = self.held().remove(&entry.to_word());
        // Whoever waits gets it at the latest when the copy of the descriptor goes.
        let _ = file.map(|file| kernel::give_lease_back(&file));
    }

    /// After the death of another supervisor: holds its leases, by copies of the descriptors of the processes that absorb the
    /// files. A process whose descriptors are not ours to copy is asked for one, by a mark on the file.
    pub(crate) fn adopt_all(&self, log: &Log) {
        for entry in log.absorbed_by(None) {
            // Nobody has the file open where the process is gone: the lease went with it.
            if self.adopt_of(log, entry, log.absorber_of(entry)).is_err() {
                log.want_settled(entry);
            }
        }
    }

    /// Holds the lease on the description of `descriptor`, which another supervisor took, unless it is held already.
    ///
    /// # Errors
    /// It is another file, or nothing can be written by it.
    pub(crate) fn adopt(&self, log: &Log, entry: FileRef, descriptor: OwnedFd) -> io::Result<()> {
        if self.file(entry).is_some() {
            return Ok(());
        }
        if !can_write(&descriptor) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = of_entry(log, entry, descriptor)?;
        // Fails where somebody waits for the file already: for what is still to be done before the lease ends it is enough.
        let _ = kernel::take_lease(&file);
        self.held().insert(entry.to_word(), Arc::new(file));
        Ok(())
    }

    fn adopt_of(&self, log: &Log, entry: FileRef, process: u32) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let key = log.key_of(entry);
        let handle = Pid::from_raw(process.cast_signed()).ok_or_else(gone)?;
        let handle = rustix::process::pidfd_open(handle, PidfdFlags::empty())?;
        for link in std::fs::read_dir(format!("/proc/{process}/fd"))? {
            let link = link?.path();
            // Followed without being opened.
            let Ok(found) = rustix::fs::stat(&link) else { continue };
            if (found.st_dev, found.st_ino) != (key.device, key.inode) {
                continue;
            }
            let number = link.file_name().and_then(|name| name.to_str()?.parse().ok());
            let flags = PidfdGetfdFlags::empty();
            let copy = rustix::process::pidfd_getfd(&handle, number.ok_or_else(gone)?, flags)?;
            if self.adopt(log, entry, copy).is_ok() {
                return Ok(());
            }
        }
        Err(gone())
    }
}

/// Whether it is no `O_PATH` one: a lease lets a process have such of the file too, and it names files by them.
fn can_write(descriptor: &OwnedFd) -> bool {
    let flags = rustix::fs::fcntl_getfl(descriptor);
    flags.is_ok_and(|flags| !flags.contains(OFlags::PATH) && flags.intersects(OFlags::RWMODE))
}

/// The file of `descriptor`, which must be that of `entry`.
fn of_entry(log: &Log, entry: FileRef, descriptor: OwnedFd) -> io::Result<File> {
    let file = File::from(descriptor);
    if identity_of(&file)? != log.key_of(entry).identity {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(file)
}

/// Where the kernel's signals about leases arrive.
pub(crate) struct Bell {
    receiver: UnixStream,
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

impl Bell {
    /// Hears the signals from now on.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn new() -> io::Result<Self> {
        let (receiver, sender) = UnixStream::pair()?;
        receiver.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(libc::SIGIO, sender)?;
        Ok(Self { receiver })
    }

    /// Is ready no more until the next signal.
    pub(crate) fn silence(&self) {
        let mut heard = [0_u8; 64];
        while rustix::io::read(&self.receiver, &mut heard).is_ok_and(|heard| heard > 0) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_held_until_somebody_else_wants_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        kernel::take_lease(&file).unwrap();
        assert!(kernel::holds_lease(&file));
        std::thread::scope(|scope| {
            let bell = Bell::new().unwrap();
            let other = scope.spawn(|| File::open(&path).map(drop));
            let mut events = [rustix::event::PollFd::new(&bell, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut events, None).unwrap();
            bell.silence();
            assert!(!kernel::holds_lease(&file));
            kernel::give_lease_back(&file).unwrap();
            other.join().unwrap().unwrap();
        });
        let _second = File::open(&path).unwrap();
        assert!(kernel::take_lease(&file).is_err(), "somebody else has it open");
    }
}
