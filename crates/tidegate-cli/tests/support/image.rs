//! File systems in images, each mounted by a loop device: they can be copied as disks are.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::file_system::{Kind, unmount};
use super::{succeed, tool};

/// A mounted image; undone when dropped.
pub struct Image {
    path: PathBuf,
    options: &'static str,
    loop_device: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
}

impl Image {
    /// Makes a file system in `dir/NAME.image` and mounts it on `dir/NAME`.
    pub fn make(kind: Kind, dir: &Path, name: &str) -> Self {
        let path = dir.join(name).with_extension("image");
        // XFS takes no less than 300 MiB.
        std::fs::File::create_new(&path).unwrap().set_len(320 << 20).unwrap();
        let (mkfs, package) = match kind {
            Kind::Ext4 => ("mkfs.ext4", "e2fsprogs"),
            Kind::Xfs => ("mkfs.xfs", "xfsprogs"),
        };
        succeed(tool(mkfs, package).arg("-q").arg(&path));
        // XFS mounts no second file system of a UUID otherwise.
        let options = if kind == Kind::Xfs { "nouuid" } else { "defaults" };
        Self::mount(path, options, dir.join(name))
    }

    fn mount(path: PathBuf, options: &'static str, mount_point: PathBuf) -> Self {
        std::fs::create_dir_all(&mount_point).unwrap();
        let losetup = succeed(tool("losetup", "mount").args(["--show", "--find"]).arg(&path));
        let this = Self { path, options, loop_device: losetup.trim().to_owned(), mount_point };
        this.mount_again();
        this
    }

    /// A copy of the image as it is, which is not mounted, at `dir/NAME.image`.
    pub fn copy(&self, dir: &Path, name: &str) -> ImageCopy {
        unmount(&self.mount_point);
        let path = dir.join(name).with_extension("image");
        std::fs::copy(&self.path, &path).unwrap();
        self.mount_again();
        ImageCopy { path, options: self.options, mount_point: dir.join(name) }
    }

    fn mount_again(&self) {
        let mut mount = tool("mount", "mount");
        succeed(mount.args(["-o", self.options, &self.loop_device]).arg(&self.mount_point));
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        for (name, argument) in
            [("umount", self.mount_point.as_os_str()), ("losetup", self.loop_device.as_ref())]
        {
            let mut command = tool(name, "mount");
            command.arg(if name == "umount" { "-l" } else { "-d" }).arg(argument);
            let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

/// A copy of an image, that is mounted where the test wants it.
pub struct ImageCopy {
    path: PathBuf,
    options: &'static str,
    /// Where it will be mounted.
    pub mount_point: PathBuf,
}

impl ImageCopy {
    /// Mounts it.
    pub fn mount(&self) -> Image {
        Image::mount(self.path.clone(), self.options, self.mount_point.clone())
    }
}
