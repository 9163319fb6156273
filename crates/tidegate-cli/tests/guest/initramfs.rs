//! The guest's root file system: busybox, the NVDIMM modules and `init`, as one cpio archive in
//! memory.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::once::once_per_run;

/// The modules that the guest inserts, in this order.
const MODULES: [&str; 4] =
    ["nvdimm/libnvdimm", "nvdimm/nd_btt", "nvdimm/nd_pmem", "acpi/nfit/nfit"];

/// What a root has beside busybox, the NVDIMM modules and `init`.
#[derive(Default)]
pub(crate) struct Addition {
    /// Modules below `kernel/drivers`, inserted behind the others.
    pub(crate) modules: Vec<&'static str>,
    /// Files by their path in the root. Their directories are made.
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// Shell functions, which `init` has beside its own.
    pub(crate) functions: &'static str,
}

/// The newest installed cloud kernel: its image and its modules.
pub(crate) struct Kernel {
    /// The bootable image, unpacked: in emulation, that takes the guest a second at each boot.
    pub(crate) image: PathBuf,
    drivers: PathBuf,
}

impl Kernel {
    /// Finds the newest `/boot/vmlinuz-*-cloud-*`.
    pub(crate) fn newest() -> Self {
        let release = std::fs::read_dir("/boot")
            .expect("/boot can be read")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned()))
            .filter(|release| release.contains("-cloud-"))
            .max_by_key(|release| version(release))
            .expect("no /boot/vmlinuz-*-cloud-*: install the package linux-image-6.12-cloud-amd64");
        let image = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest-kernel");
        once_per_run("guest-kernel", || {
            let packed = std::fs::read(format!("/boot/vmlinuz-{release}"));
            let unpacked = unpacked(&packed.expect("the kernel can be read"));
            std::fs::write(&image, unpacked).expect("the kernel can be written");
        });
        Self { image, drivers: Path::new("/lib/modules").join(release).join("kernel/drivers") }
    }

    /// The archive that the kernel unpacks as its root.
    pub(crate) fn initramfs(&self, addition: &Addition) -> Vec<u8> {
        let busybox = std::fs::read("/usr/bin/busybox")
            .or_else(|_| std::fs::read("/bin/busybox"))
            .expect("no /usr/bin/busybox: install the package busybox-static");
        let mut archive = Archive::default();
        archive.file("bin/busybox", &busybox);
        archive.file("bin/sh", &busybox);
        archive.file("init", include_bytes!("init"));
        archive.file("functions", addition.functions.as_bytes());
        for (order, module) in (10..).zip(MODULES.iter().chain(&addition.modules)) {
            archive.file(&format!("modules/{order}.ko"), &self.module(module));
        }
        for (path, bytes) in &addition.files {
            archive.file(path, bytes);
        }
        archive.finish()
    }

    /// A module, unpacked: busybox inserts no compressed ones.
    fn module(&self, name: &str) -> Vec<u8> {
        let path = self.drivers.join(format!("{name}.ko.xz"));
        let xz = Command::new("xz").arg("-dc").arg(&path).output();
        let out = xz.expect("cannot run xz: install the package xz-utils");
        assert!(
            out.status.success(),
            "{}: {} (packages linux-image-6.12-cloud-amd64, xz-utils)",
            path.display(),
            String::from_utf8_lossy(&out.stderr).trim()
        );
        out.stdout
    }
}

/// The kernel in a bootable image of the kernel's boot protocol.
fn unpacked(image: &[u8]) -> Vec<u8> {
    let word = |at: usize| {
        let bytes = image[at..at + 4].try_into().expect("four bytes");
        u32::from_le_bytes(bytes) as usize
    };
    assert_eq!(&image[0x202..0x206], b"HdrS", "an image of the boot protocol");
    let (sectors, payload, payload_bytes) = (usize::from(image[0x1f1]), word(0x248), word(0x24c));
    let start = (sectors + 1) * 512 + payload;
    // Behind the frame is the size of what is in it.
    let mut frame = zstd::Decoder::with_buffer(&image[start..start + payload_bytes])
        .expect("a decoder has memory")
        .single_frame();
    let mut kernel = Vec::new();
    frame.read_to_end(&mut kernel).expect("Debian packs its kernels by zstd");
    kernel
}

/// The numbers in a kernel release, for comparing two.
fn version(release: &str) -> Vec<u32> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// A cpio archive of the "newc" kind, the one that the kernel unpacks.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: BTreeSet<String>,
}

impl Archive {
    /// A file, with the directories above it.
    fn file(&mut self, path: &str, data: &[u8]) {
        for (at, _) in path.match_indices('/') {
            if self.directories.insert(path[..at].to_owned()) {
                self.entry(&path[..at], 0o040_755, &[]);
            }
        }
        self.entry(path, 0o100_755, data);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, data: &[u8]) {
        self.entries += 1;
        let data_bytes = u32::try_from(data.len()).expect("a file of the initramfs is small");
        let name_bytes = u32::try_from(path.len() + 1).expect("a path of the initramfs is short");
        // inode, mode, uid, gid, links, mtime, size, device (2), special device (2), name size,
        // checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, data_bytes, 0, 0, 0, 0, name_bytes, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(data);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
