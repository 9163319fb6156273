//! Mounts, as the kernel lists them: the mount of a path, for messages, and all mounts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mount.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The mount's number.
    pub(crate) number: u64,
    /// The device's numbers, as text.
    pub(crate) device: String,
    /// Whether programs may write to the mount.
    pub(crate) is_writable: bool,
    /// The mount point.
    pub(crate) point: PathBuf,
    /// The type of its file system.
    pub(crate) kind: String,
    /// The device, or a name in its place.
    pub(crate) source: String,
}

impl Mount {
    /// Returns the mount of `path`, an absolute one; `None` if the system does not tell.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        Self::of_path_in(path, &std::fs::read("/proc/self/mountinfo").ok()?)
    }

    /// Returns the major and minor number of the device.
    pub(crate) fn device_numbers(&self) -> Option<(u32, u32)> {
        let (major, minor) = self.device.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// Returns all mounts in the text of `mountinfo`.
    pub(crate) fn all_in(mounts: &[u8]) -> impl Iterator<Item = Self> {
        mounts.split(|byte| *byte == b'\n').filter_map(Self::of_line)
    }

    /// Returns the mount of `path` in the text of `mountinfo`. Of several mounts at one point the
    /// last one hides the others.
    fn of_path_in(path: &Path, mounts: &[u8]) -> Option<Self> {
        let above = Self::all_in(mounts).filter(|mount| path.starts_with(&mount.point));
        above.max_by_key(|mount| mount.point.components().count())
    }

    fn of_line(line: &[u8]) -> Option<Self> {
        let text = |field: &[u8]| String::from_utf8_lossy(&unescaped(field)).into_owned();
        let mut fields = line.split(|byte| *byte == b' ');
        let number = text(fields.next()?).parse().ok()?;
        let device = text(fields.nth(1)?);
        let point = OsString::from_vec(unescaped(fields.nth(1)?)).into();
        let is_writable = fields.next()?.split(|byte| *byte == b',').any(|option| option == b"rw");
        // Optional fields end with a hyphen.
        let mut behind = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, source) = (text(behind.next()?), text(behind.next()?));
        Some(Self { number, device, is_writable, point, kind, source })
    }

    /// Returns the command that gives the file system a UUID, for types whose UUIDs tidegate uses.
    pub(crate) fn uuid_command(&self) -> Option<String> {
        let Self { kind, source, .. } = self;
        match kind.as_str() {
            "ext4" => Some(format!("tune2fs -U random {source}")),
            "xfs" => Some(format!("xfs_admin -U generate {source}")),
            _ => None,
        }
    }
}

/// Decodes a field of `/proc/mounts` or `/proc/self/mountinfo`, where blanks and backslashes are
/// three octal digits behind a backslash.
pub(crate) fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, behind @ ..] = rest {
        let octal = behind.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            bytes.push(byte);
            rest = &behind[3..];
        } else {
            bytes.push(*first);
            rest = behind;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_lies_on_the_last_mount_of_the_deepest_point_above_it() {
        let mounts = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
            30 22 0:40 / /srv rw,relatime shared:7 master:1 - btrfs /dev/sdb rw\n\
            31 22 8:33 / /srv/a\\040b rw - xfs /dev/old rw\n\
            32 22 8:34 / /srv/a\\040b rw - ext4 /dev/new rw\nbroken";
        let found = |path| Mount::of_path_in(Path::new(path), mounts).map(|it| it.source);
        assert_eq!(found("/etc/x").as_deref(), Some("/dev/sda1"));
        assert_eq!(found("/srv/x/y").as_deref(), Some("/dev/sdb"));
        assert_eq!(found("/srvx").as_deref(), Some("/dev/sda1"));
        assert_eq!(found("/srv/a b/c").as_deref(), Some("/dev/new"));
        assert_eq!(found("relative"), None);
    }

    #[test]
    fn only_ext4_and_xfs_are_given_a_uuid() {
        let command = |kind: &str| {
            let line = format!("22 1 8:1 / / rw - {kind} /dev/x rw");
            Mount::of_line(line.as_bytes()).unwrap().uuid_command()
        };
        assert_eq!(command("ext4").as_deref(), Some("tune2fs -U random /dev/x"));
        assert_eq!(command("xfs").as_deref(), Some("xfs_admin -U generate /dev/x"));
        assert_eq!(command("btrfs"), None);
    }
}
