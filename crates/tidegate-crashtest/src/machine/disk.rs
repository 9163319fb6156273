//! A disk that can lose its power: a loop device over a file in memory, with a small file system.
//!
//! The file has the data that the kernel wrote to the device, and not the data in its caches. So a
//! copy of the file is the disk after a power cut at that moment.

use std::ffi::CString;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{IFlags, ioctl_getflags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::image::Image;
use super::{PREFIX, succeed};
use crate::contents::bytes;
use crate::file_system::FileSystem;
use crate::model::crowd::{PROGRAM, PROGRAM_BYTES};
use crate::model::tree::Attributes;
use crate::model::{DIRECTORIES, FILES, Found, Node, State, Time, Times};

/// The file beside the tree whose sync from outside makes the journal commit.
pub const OUTSIDE: &str = "outside";
/// The file that [`Step::Prepare`](crate::sequence::Step::Prepare) makes.
const PREPARED: &str = "prepared";
/// Most attempts of a copy while writes go on.
const COPIES_MAX: usize = 200;
/// Time that a file system may be busy after its last user was killed.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The loop device, and the file system while it is mounted.
#[derive(Debug)]
pub struct Disk {
    file_system: FileSystem,
    backing: File,
    image_path: PathBuf,
    device: PathBuf,
    mount_point: PathBuf,
    is_mounted: bool,
    /// One more option of each mount.
    option: Option<String>,
    /// Another disk has this file system too, with the same identity.
    is_copy: bool,
    template: Image,
    /// The last cut since the disk was restored, and the writes up to that cut.
    last_cut: Option<(Writes, Image)>,
}

/// Numbers of writes and of discards that a device completed.
type Writes = (u64, u64);

impl Disk {
    /// Makes a disk in `dir` with the model's initial state and a copy of a program.
    ///
    /// # Errors
    /// A tool is missing, there is no loop device, or the kernel does not know the file system.
    pub fn new(
        dir: &Path,
        program: &Path,
        file_system: FileSystem,
        option: Option<String>,
    ) -> Result<Self> {
        // The loop device keeps this name after the directory is gone.
        let image = format!("{PREFIX}{}.image", std::process::id());
        let (path, mount_point) = (dir.join(image), dir.join("mnt"));
        let (size, mkfs): (u64, &[&str]) = match file_system {
            FileSystem::Ext4 => (16 << 20, &["mkfs.ext4", "-q", "-b4096", "-Jsize=4", "-I256"]),
            FileSystem::Xfs => (32 << 20, &["mkfs.xfs", "-q", "-dagcount=2"]),
            // Small file systems have data and metadata in the same blocks.
            FileSystem::Btrfs => (16 << 20, &["mkfs.btrfs", "-q", "--mixed", "-n4096", "-s4096"]),
        };
        let mut this = Self::attach(path, mount_point, file_system, size)?;
        this.option = option;
        // With these variables for tests, mkfs.xfs makes file systems below 300 MiB.
        let for_tests = ["TEST_DIR", "TEST_DEV", "QA_CHECK_FS"].map(|name| (name, "1"));
        succeed(Command::new(mkfs[0]).envs(for_tests).args(&mkfs[1..]).arg(&this.image_path))?;
        // This drops the zeroes that mkfs wrote.
        Image::read(&this.backing)?.write(&this.backing)?;
        this.mount()?;
        this.populate(program)?;
        this.unmount()?;
        this.template = Image::read(&this.backing)?;
        Ok(this)
    }

    /// Makes a loop device of a new file, and a directory to mount it at.
    fn attach(
        path: PathBuf,
        mount_point: PathBuf,
        file_system: FileSystem,
        size: u64,
    ) -> Result<Self> {
        let backing = File::options().read(true).write(true).create_new(true).open(&path)?;
        backing.set_len(size)?;
        fs::create_dir(&mount_point)?;
        let attach = succeed(Command::new("losetup").args(["--find", "--show"]).arg(&path))?;
        Ok(Self {
            file_system,
            backing,
            image_path: path,
            device: PathBuf::from(attach.trim()),
            mount_point,
            is_mounted: false,
            option: None,
            is_copy: false,
            template: Image::default(),
            last_cut: None,
        })
    }

    /// Makes a second disk to copy this one to.
    ///
    /// # Errors
    /// There is no loop device.
    pub fn beside(&self) -> Result<Self> {
        let (path, mount_point) =
            (self.image_path.with_extension("copy"), self.mount_point.with_extension("copy"));
        let size = self.backing.metadata()?.len();
        let mut copy = Self::attach(path, mount_point, self.file_system, size)?;
        copy.option.clone_from(&self.option);
        copy.is_copy = true;
        Ok(copy)
    }

    /// Returns the content of the device.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn image(&self) -> Result<Image> {
        Image::read(&self.backing)
    }

    fn populate(&self, program: &Path) -> Result<()> {
        DIRECTORIES.iter().try_for_each(|path| fs::create_dir(self.mount_point.join(path)))?;
        for (path, number, size) in FILES {
            fs::write(self.mount_point.join(path), bytes(number, 0, size))?;
        }
        fs::write(self.mount_point.join(OUTSIDE), "")?;
        let copy = self.mount_point.join(PROGRAM);
        fs::copy(program, &copy)?;
        File::options().write(true).open(copy)?.set_len(PROGRAM_BYTES)?;
        Ok(())
    }

    /// Returns whether the journal has the contents of files.
    pub fn has_data_in_journal(&self) -> bool {
        self.option.as_deref() == Some("data=journal")
    }

    /// Returns the path of the disk's file.
    pub fn image_path(&self) -> &Path {
        &self.image_path
    }

    /// Returns the path where the file system is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Restores the initial state.
    ///
    /// # Errors
    /// The image cannot be written.
    pub fn reset(&mut self) -> Result<()> {
        self.last_cut = None;
        self.template.write(&self.backing)
    }

    /// Restores the state of a cut.
    ///
    /// # Errors
    /// The image cannot be written.
    pub fn restore(&mut self, image: &Image) -> Result<()> {
        self.last_cut = None;
        image.write(&self.backing)
    }

    /// Mounts the file system and replays its journal. No timer commits or writes back in a test.
    ///
    /// # Errors
    /// The file system is damaged, or unknown.
    pub fn mount(&mut self) -> Result<()> {
        let options = match self.file_system {
            FileSystem::Ext4 => "commit=600,noinit_itable",
            FileSystem::Xfs if self.is_copy => "nouuid",
            FileSystem::Xfs => "",
            FileSystem::Btrfs => "commit=300,nodiscard",
        };
        let options = [Some(options), self.option.as_deref()].into_iter().flatten();
        let options: Vec<&str> = options.filter(|option| !option.is_empty()).collect();
        let options = CString::new(options.join(","))?;
        let name = self.file_system.name();
        mount(&self.device, &self.mount_point, name, MountFlags::NOATIME, options.as_c_str())
            .with_context(|| format!("cannot mount {} as {name}", self.device.display()))?;
        self.is_mounted = true;
        Ok(())
    }

    /// Unmounts the file system.
    ///
    /// # Errors
    /// The file system stays busy.
    pub fn unmount(&mut self) -> Result<()> {
        let deadline = Instant::now() + BUSY_TIMEOUT;
        while let Err(error) = unmount(&self.mount_point, UnmountFlags::empty()) {
            if error != Errno::BUSY || Instant::now() > deadline {
                bail!("cannot unmount {}: {error}", self.mount_point.display());
            }
            // The last references of killed processes end after a delay that no event announces.
            std::thread::yield_now();
        }
        self.is_mounted = false;
        Ok(())
    }

    /// Copies the content of the device; without writes since the last cut, returns that cut again.
    /// All programs must be stopped; this waits for the kernel's own writers.
    ///
    /// # Errors
    /// Writes do not end.
    pub fn cut(&mut self) -> Result<Image> {
        for _ in 0..COPIES_MAX {
            let before = self.writes()?;
            let image = match &self.last_cut {
                Some((writes, image)) if before == Some(*writes) => image.clone(),
                Some((_, image)) => Image::read_since(&self.backing, image)?,
                None => Image::read_since(&self.backing, &self.template)?,
            };
            if let (Some(writes), true) = (before, before == self.writes()?) {
                self.last_cut = Some((writes, image.clone()));
                return Ok(image);
            }
            std::thread::yield_now();
        }
        bail!("{}: something keeps writing", self.device.display())
    }

    /// Returns the writes that the device completed, or `None` while one is in progress.
    fn writes(&self) -> Result<Option<Writes>> {
        let name = self.device.file_name().context("a device has a name")?;
        let stat = fs::read_to_string(Path::new("/sys/block").join(name).join("stat"))?;
        let field = |index: usize| stat.split_whitespace().nth(index)?.parse::<u64>().ok();
        let (writes, in_flight, discards) = (field(4), field(8), field(11));
        Ok(writes.zip(discards).filter(|_| in_flight == Some(0)))
    }

    /// Returns the times that files show.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn times(&self) -> Result<Times> {
        let mut times = Times::new();
        read_times(&self.mount_point, "", &mut times)?;
        Ok(times)
    }

    /// Reads everything below the mount point.
    ///
    /// # Errors
    /// A file or directory cannot be read.
    pub fn read(&self) -> Result<State> {
        let mut state = State::new();
        read_directory(&self.mount_point, "", &mut state)?;
        state.remove(OUTSIDE);
        state.remove(PREPARED);
        state.remove("lost+found");
        Ok(state)
    }
}

fn read_directory(root: &Path, prefix: &str, state: &mut State) -> Result<()> {
    for entry in fs::read_dir(root.join(prefix))? {
        let path = format!("{prefix}{}", entry?.file_name().to_string_lossy());
        let found = read_node(&root.join(&path)).with_context(|| format!("cannot read {path}"))?;
        if found.node == Node::Directory {
            read_directory(root, &format!("{path}/"), state)?;
        }
        state.insert(path, found);
    }
    Ok(())
}

fn read_times(root: &Path, prefix: &str, times: &mut Times) -> Result<()> {
    for entry in fs::read_dir(root.join(prefix))? {
        let entry = entry?;
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            read_times(root, &format!("{path}/"), times)?;
        } else if metadata.is_file() {
            times.insert(path, modified(&metadata));
        }
    }
    Ok(())
}

fn read_node(path: &Path) -> Result<Found> {
    let metadata = path.symlink_metadata()?;
    let node = if metadata.is_dir() {
        Node::Directory
    } else if metadata.is_symlink() {
        Node::Symlink(fs::read_link(path)?.to_string_lossy().into_owned())
    } else {
        Node::File(fs::read(path)?)
    };
    let xattr = xattr_of(path, "user.crashtest")?;
    let attributes = Attributes {
        mode: metadata.permissions().mode() & 0o7777,
        xattr,
        has_capability: xattr_of(path, "security.capability")?.is_some(),
        has_acl: xattr_of(path, "system.posix_acl_access")?.is_some(),
        is_append_only: metadata.is_file() && is_append_only(path)?,
    };
    Ok(Found { node, attributes, links: metadata.nlink(), modified: modified(&metadata) })
}

fn xattr_of(path: &Path, name: &str) -> Result<Option<String>> {
    let mut value = [0; 64];
    match rustix::fs::lgetxattr(path, name, &mut value) {
        Ok(count) => Ok(Some(String::from_utf8_lossy(&value[..count]).into_owned())),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_append_only(path: &Path) -> Result<bool> {
    Ok(ioctl_getflags(File::open(path)?)?.contains(IFlags::APPEND))
}

fn modified(metadata: &Metadata) -> Time {
    Time::from(metadata.mtime()) * 1_000_000_000 + Time::from(metadata.mtime_nsec())
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = unmount(&self.mount_point, UnmountFlags::DETACH);
        }
        // The next campaign detaches a device that is left.
        let _ = succeed(Command::new("losetup").arg("-d").arg(&self.device));
    }
}
