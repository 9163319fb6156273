//! The identity of a disk, as a function of the facts that the system and the disk tell.
//!
//! Invariants:
//! 1. The identity does not depend on names that the kernel gives: after a boot another disk may
//!    have the name.
//! 2. If the disk tells an identity of its own, the identity does not depend on bytes that a client
//!    changes through a pool. If it tells none, the UUID of its content takes that part.
//! 3. A disk without any of these facts has no identity.

use super::areas::ContentId;
use crate::log::{FileSystemId, identity};

/// The file system id in identities of disks, and of files without a handle.
pub(super) const NO_FILE_SYSTEM: FileSystemId = [0; 16];

/// Keeps identities of disks apart from identities of files.
const DISK: i32 = -2;
/// Keeps identities of partitions apart.
const PARTITION: i32 = -5;
/// Keeps identities by content apart.
const CONTENT: i32 = -6;
/// Keeps identities of loop devices apart.
const LOOP: i32 = -7;

/// The attributes that identify a disk, in its folder of sysfs; best first.
const ATTRIBUTES: &[&str] = &["dm/uuid", "md/uuid", "uuid", "wwid", "device/wwid", "serial"];

/// The attributes that together identify an RBD image.
const RBD_ATTRIBUTES: &[&str] =
    &["device/cluster_fsid", "device/pool_id", "device/image_id", "device/snap_id"];

/// The facts about a disk.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// The identity that the disk tells itself; for a partition, that of its whole disk.
    pub(super) said: Option<Vec<u8>>,
    /// The file behind a loop device.
    pub(super) looped: Option<Looped>,
    /// Which partition of the disk this is.
    pub(super) partition: Option<Partition>,
    /// The content of the disk or partition.
    pub(super) content: Option<ContentId>,
    /// Its size in bytes.
    pub(super) size_bytes: u64,
}

impl Facts {
    /// Returns whether the disk is known by its content, because it has no number of its own.
    pub(super) fn is_known_by_content(&self) -> bool {
        self.said.is_none() && self.looped.is_none()
    }
}

/// The file behind a loop device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Looped {
    /// The identity of the file.
    pub(super) identity: u64,
    /// Where in the file the device begins.
    pub(super) offset: u64,
}

/// A partition.
#[derive(Debug, Clone, Default)]
pub(super) struct Partition {
    /// Its number.
    pub(super) number: u32,
    /// Where it begins, in bytes.
    pub(super) start: u64,
    /// Its PARTUUID.
    pub(super) uuid: Option<String>,
}

/// Returns the first of [`ATTRIBUTES`] that identifies the disk; `read` reads one attribute.
pub(super) fn said(read: impl Fn(&str) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
    let told = ATTRIBUTES.iter().filter_map(|name| read(name)).find(|text| !is_blank(text));
    told.or_else(|| {
        let parts: Option<Vec<_>> = RBD_ATTRIBUTES.iter().map(|name| read(name)).collect();
        parts.map(|parts| parts.concat())
    })
}

/// Returns whether the text has only zeroes and separators, as a virtual disk without a number has.
fn is_blank(text: &[u8]) -> bool {
    text.trim_ascii().iter().all(|byte| b"0-_. :".contains(byte))
}

/// Returns the identity of the disk, or `None` if nothing tells it from others.
pub(super) fn identity_of(facts: &Facts) -> Option<u64> {
    let Facts { said, looped, partition, content, size_bytes } = facts;
    let whole = match (said, looped) {
        (Some(said), _) => Some((DISK, said.clone())),
        (None, Some(Looped { identity, offset })) => {
            Some((LOOP, [identity.to_le_bytes(), offset.to_le_bytes()].concat()))
        }
        (None, None) => None,
    };
    let content = || content.as_ref().map(ContentId::to_bytes).unwrap_or_default();
    let of = |kind, parts: &[&[u8]]| Some(identity(&NO_FILE_SYSTEM, kind, &parts.concat()));
    let size = size_bytes.to_le_bytes();
    match (whole, partition) {
        (Some((kind, whole)), None) => of(kind, &[&whole]),
        (Some((kind, whole)), Some(it)) => {
            let which = it.uuid.clone().unwrap_or_else(|| format!("number {}", it.number));
            let start = it.start.to_le_bytes();
            of(PARTITION, &[&kind.to_le_bytes(), &whole, &[0], which.as_bytes(), &[0], &start])
        }
        (None, Some(Partition { uuid: Some(uuid), start, .. })) => {
            let start = start.to_le_bytes();
            of(CONTENT, &[uuid.as_bytes(), &[0], &start, &size, &content()])
        }
        (None, _) if content().is_empty() => None,
        (None, _) => of(CONTENT, &[&[0], &size, &content()]),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A disk in the view of sysfs and of its sectors.
    #[derive(Clone, Default)]
    struct Disk {
        /// The kernel's name for the disk, which must not matter.
        name: &'static str,
        attributes: Vec<(&'static str, &'static str)>,
        looped: Option<(u64, u64)>,
        partition: Option<(u32, u64, &'static str)>,
        content: Option<(&'static str, &'static str)>,
        size_bytes: u64,
    }

    impl Disk {
        fn identity(&self) -> Option<u64> {
            identity_of(&self.facts())
        }

        fn facts(&self) -> Facts {
            let read = |name: &str| {
                let found = self.attributes.iter().find(|(known, _)| *known == name)?;
                Some(format!("{}\n", found.1).into_bytes())
            };
            let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            Facts {
                said: said(read),
                looped: self.looped.map(|(identity, offset)| Looped { identity, offset }),
                partition: self.partition.map(|(number, start, uuid)| Partition {
                    number,
                    start,
                    uuid: text(uuid),
                }),
                content: self.content.map(|(kind, uuid)| ContentId::new(kind, uuid.as_bytes())),
                size_bytes: self.size_bytes,
            }
        }
    }

    fn disk(name: &'static str, attributes: &[(&'static str, &'static str)]) -> Disk {
        Disk { name, attributes: attributes.to_vec(), size_bytes: 1 << 30, ..Disk::default() }
    }

    /// Disks that all differ, of every kind with an identity.
    fn different() -> Vec<Disk> {
        let mut disks = vec![
            disk("sda", &[("device/wwid", "naa.5000c500a1b2c3d4")]),
            disk("sdb", &[("device/wwid", "naa.5000c500a1b2c3d5")]),
            disk("sdc", &[("device/wwid", "naa.5000c500a1b2c3d")]),
            disk("nvme0n1", &[("uuid", "3f6a"), ("wwid", "uuid.3f6a")]),
            disk("nvme1n1", &[("wwid", "eui.0025385b71b00001")]),
            disk("vda", &[("serial", "root")]),
            disk("vdb", &[("serial", "root2")]),
            disk("dm-0", &[("dm/uuid", "LVM-aaaa")]),
            disk("dm-1", &[("dm/uuid", "LVM-aaaabbbb")]),
            disk("md0", &[("md/uuid", "11111111")]),
        ];
        let image = [("device/cluster_fsid", "f1"), ("device/pool_id", "2")];
        for (image_id, snap_id) in [("10", "18446744073709551614"), ("11", "4"), ("11", "5")] {
            let more = [("device/image_id", image_id), ("device/snap_id", snap_id)];
            disks.push(disk("rbd0", &[&image[..], &more[..]].concat()));
        }
        disks.extend(
            [(7, 0), (7, 1 << 20), (8, 0)]
                .map(|looped| Disk { looped: Some(looped), ..disk("loop0", &[]) }),
        );
        // Partitions of two disks with a number, of a loop device, and of a disk without a number.
        for whole in [disks[0].clone(), disks[1].clone(), disks[13].clone(), disk("vdc", &[])] {
            for partition in [(1, 1 << 20, "aa"), (2, 1 << 25, "ab"), (1, 1 << 21, "aa")] {
                disks.push(Disk { partition: Some(partition), ..whole.clone() });
            }
        }
        for partition in [(1, 1 << 20, ""), (2, 1 << 20, ""), (1, 1 << 21, "")] {
            disks.push(Disk { partition: Some(partition), ..disks[0].clone() });
        }
        let contents = [("ext", "u1"), ("ext", "u2"), ("xfs", "u1"), ("gpt", "u1"), ("swap", "u3")];
        disks.extend(contents.map(|content| Disk { content: Some(content), ..disk("nbd0", &[]) }));
        disks.push(Disk {
            content: Some(("ext", "u1")),
            size_bytes: 1 << 31,
            ..disk("drbd0", &[])
        });
        disks
    }

    #[test]
    fn different_disks_never_have_one_identity() {
        let mut seen = HashMap::new();
        for (number, disk) in different().iter().enumerate() {
            let found = disk.identity().unwrap_or_else(|| panic!("{number} {}", disk.name));
            assert_eq!(seen.insert(found, number), None, "{number} {}", disk.name);
        }
    }

    #[test]
    fn a_disk_keeps_its_identity_under_another_name_and_with_other_content() {
        for disk in different() {
            let first = disk.identity();
            let renamed = Disk { name: "sdz", ..disk.clone() };
            assert_eq!(renamed.identity(), first, "{}", disk.name);
            let says_something = !disk.attributes.is_empty() || disk.looped.is_some();
            assert_eq!(disk.facts().is_known_by_content(), !says_something, "{}", disk.name);
            if says_something {
                let formatted = Disk { content: Some(("ext", "new")), ..disk.clone() };
                assert_eq!(formatted.identity(), first, "{}: formatted", disk.name);
            }
        }
    }

    #[test]
    fn a_disk_that_says_nothing_has_no_identity() {
        let silent = [
            disk("nbd0", &[]),
            disk("vda", &[("serial", "")]),
            disk("vdb", &[("serial", "0000-0000")]),
            disk("dm-3", &[("dm/uuid", "")]),
            disk("zram0", &[]),
            disk("rbd0", &[("device/pool_id", "2")]),
            Disk { partition: Some((1, 1 << 20, "")), ..disk("nbd0p1", &[]) },
        ];
        for disk in silent {
            assert_eq!(disk.identity(), None, "{}", disk.name);
        }
    }
}
