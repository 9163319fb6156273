//! The visible state of a backing that changes when another program writes to it.

#![expect(clippy::disallowed_methods, reason = "times of files are compared with the system's")]

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use super::areas::Areas;
use super::disk::facts_of;
use super::facts::identity_of;
use super::inode::identity_of_file;
use super::loops::whole_file_behind;
use super::sysfs::{folder_of, number};
use crate::device::{BlockDevice, BlockDeviceExt, DeviceError};
use crate::pool::BackingState;

/// Fields of the file `stat` of a disk in sysfs: sectors written, and sectors discarded.
const CHANGED_SECTORS: [usize; 2] = [6, 13];

/// Looks at an open backing.
pub struct Observer {
    /// The identity of the backing when it was opened.
    identity: Option<u64>,
    /// The backing is a disk that is known by its content.
    is_known_by_content: bool,
    /// Returns the identity that an earlier release gave to the backing, for its size.
    former: Option<Former>,
    source: Source,
}

/// Returns an identity for a size in bytes.
pub(crate) type Former = Box<dyn Fn(u64) -> u64 + Send + Sync>;

enum Source {
    File(File),
    /// A disk.
    Disk(Disk),
    Device(Arc<dyn BlockDevice>),
}

struct Disk {
    file: File,
    /// Its folder in sysfs.
    folder: PathBuf,
    /// The file of a loop device that is all of it.
    image: Option<File>,
}

impl Observer {
    /// Looks at the file or disk `file`.
    pub(super) fn of_file(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if metadata.file_type().is_block_device() {
            return Self::of_disk(file);
        }
        let identity = Some(identity_of_file(file, &metadata)?);
        let source = Source::File(file.try_clone()?);
        Ok(Self { identity, is_known_by_content: false, former: None, source })
    }

    /// Looks at `file` as at a disk. A regular file is a disk without numbers of its own.
    pub(crate) fn of_disk(file: &File) -> io::Result<Self> {
        let (facts, folder) = (facts_of(file)?, folder_of(&file.metadata()?));
        let (identity, is_known_by_content) = (identity_of(&facts), facts.is_known_by_content());
        let image = whole_file_behind(file, &folder);
        let source = Source::Disk(Disk { file: file.try_clone()?, folder, image });
        Ok(Self { identity, is_known_by_content, former: None, source })
    }

    /// Looks at a device that `identity` tells from all others.
    pub(crate) fn of_device(identity: u64, device: Arc<dyn BlockDevice>) -> Self {
        let source = Source::Device(device);
        Self { identity: Some(identity), is_known_by_content: false, former: None, source }
    }

    /// Knows also the identity that an earlier release gave to the backing.
    pub(crate) fn formerly(self, former: Former) -> Self {
        Self { former: Some(former), ..self }
    }

    /// Returns `kept`, the state of a backing in a pool, with the present identity, if an earlier
    /// release noted this backing with another one.
    pub fn translate(&self, kept: BackingState) -> BackingState {
        if self.is_former(kept.said, kept.size_bytes) {
            BackingState { said: self.identity.unwrap_or_default(), ..kept }
        } else {
            kept
        }
    }

    /// Returns whether `identity` is that of an earlier release for this backing with the size
    /// `size_bytes`.
    pub fn is_former(&self, identity: u64, size_bytes: u64) -> bool {
        self.former.as_ref().is_some_and(|former| former(size_bytes) == identity)
    }

    /// Returns the identity of the backing, which outlasts renames and restarts and is never 0.
    /// Returns `None` if nothing tells the backing from others.
    pub fn identity(&self) -> Option<u64> {
        self.identity
    }

    /// Returns the present identity of a disk to which clients give another one by another file
    /// system; 0 if it has none now. Returns `None` for other backings, and if the disk cannot be
    /// read.
    pub fn identity_by_content(&self) -> Option<u64> {
        match &self.source {
            Source::Disk(Disk { file, .. }) if self.is_known_by_content => {
                Some(identity_of(&facts_of(file).ok()?).unwrap_or_default())
            }
            _ => None,
        }
    }

    /// Returns whether the kernel may change the time of the backing long after a write: a loop
    /// device has a page cache of its own above its file.
    pub fn is_timed_late(&self) -> bool {
        matches!(&self.source, Source::Disk(Disk { image: Some(_), .. }))
    }

    /// Makes the state that [`observe`](Self::observe) returns outlast a power failure.
    ///
    /// # Errors
    /// The backing failed.
    pub fn sync(&self) -> io::Result<()> {
        match &self.source {
            Source::File(file) | Source::Disk(Disk { file, .. }) => file.sync_all(),
            Source::Device(device) => device.flush().map_err(io::Error::other),
        }
    }

    /// Makes the state outlast a power failure, once a flush of the backing has made all writes
    /// durable. Flushes no device: a flush reports a loss of writes once, and has to report it to
    /// the tier that has the data.
    ///
    /// # Errors
    /// The backing failed.
    pub fn sync_flushed(&self) -> io::Result<()> {
        match &self.source {
            Source::File(file) | Source::Disk(Disk { file, .. }) => file.sync_all(),
            Source::Device(_) => Ok(()),
        }
    }

    /// Returns the present state of the backing, as far as it is known.
    ///
    /// # Errors
    /// The backing cannot be read.
    pub fn observe(&self) -> io::Result<BackingState> {
        let seen = self.nothing_yet();
        match &self.source {
            Source::File(file) => {
                let metadata = file.metadata()?;
                let size_bytes = metadata.len();
                let areas = Areas::of_file(file, size_bytes)?.checksum();
                let modified_ns = modified_ns(&metadata);
                Ok(BackingState { size_bytes, modified_ns, areas, ..seen })
            }
            Source::Disk(Disk { file, folder, image }) => {
                let size_bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
                let areas = Areas::of_file(file, size_bytes)?.checksum();
                // A client may have made another file system, whose UUID alone identifies some
                // disks.
                let said = identity_of(&facts_of(file)?).unwrap_or_default();
                let image = image.as_ref().and_then(|it| it.metadata().ok());
                let modified_ns = image.as_ref().map_or(0, modified_ns);
                let seen = BackingState { said, size_bytes, modified_ns, areas, ..seen };
                Ok(with_counters(seen, folder))
            }
            Source::Device(device) => self.of_source(&**device).map_err(io::Error::other),
        }
    }

    /// Returns the state of a backing that was opened as a device; of a file or a disk only the
    /// identity and the time.
    pub(crate) fn observe_device(&self) -> Result<BackingState, DeviceError> {
        match &self.source {
            Source::Device(device) => self.of_source(&**device),
            Source::File(_) | Source::Disk(_) => Ok(self.nothing_yet()),
        }
    }

    fn of_source(&self, device: &dyn BlockDevice) -> Result<BackingState, DeviceError> {
        let geometry = device.geometry();
        let areas = if geometry.keeps_data { Areas::of_device(device)?.checksum() } else { 0 };
        Ok(BackingState { size_bytes: geometry.size_bytes(), areas, ..self.nothing_yet() })
    }

    /// Returns a state with identity and time only.
    fn nothing_yet(&self) -> BackingState {
        let said = self.identity.unwrap_or_default();
        BackingState { noted_ns: now_ns(), said, ..BackingState::default() }
    }
}

/// Adds the kernel's counts for the disk in `folder` to the state `seen`.
fn with_counters(seen: BackingState, folder: &Path) -> BackingState {
    let whole = folder.join("..");
    let sequence = [folder, &whole].into_iter().find_map(|it| number(&it.join("diskseq")));
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.trim().parse::<Uuid>().map_or([0; 16], Uuid::into_bytes);
    let counted = std::fs::read_to_string(folder.join("stat")).unwrap_or_default();
    let fields: Vec<u64> = counted.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    let changed_sectors = CHANGED_SECTORS.iter().filter_map(|at| fields.get(*at)).sum();
    BackingState { boot, disk_sequence: sequence.unwrap_or_default(), changed_sectors, ..seen }
}

/// Returns the system's time, in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    wall_ns(SystemTime::now())
}

fn modified_ns(metadata: &Metadata) -> u64 {
    metadata.modified().map_or(0, wall_ns)
}

fn wall_ns(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or_default()
}
