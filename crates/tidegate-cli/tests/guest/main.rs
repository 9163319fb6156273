//! The Linux kernel's own BTT driver against ours, in a QEMU guest.
//!
//! A test makes files, boots Debian's cloud kernel with them as NVDIMMs, and drives the guest's
//! shell line by line over a serial port, so that a test is one piece of Rust although its steps
//! run on both sides. Nothing waits by time: each step ends with a line from the guest, and a guest
//! that is silent for a minute is killed and fails the test with the end of its console.
//!
//! - *The guest* ([`vm`]) runs under plain emulation (no KVM needed) and boots in about 3 seconds.
//!   Its root ([`initramfs`]) is busybox, four modules of the installed kernel, and the script
//!   `init`, which has a shell function for each thing that is done to an NVDIMM: `detach`,
//!   `attach`, `format`, `label`. One guest runs at a time, as emulation takes all the CPU.
//! - *The NVDIMM* is a file that both sides map: what the guest stores is in the file at once and
//!   the other way round. While a namespace is detached from its driver, the host may put any image
//!   there; attaching it makes the kernel look for a BTT and recover it. So one boot tries hundreds
//!   of images.
//! - *Data* goes in and out through one more NVDIMM, the exchange, so that the host makes and
//!   judges all content: blocks stamped with their number and generation ([`pool`]).
//! - *A power cut* is a copy of the file while the guest stands still between two instructions, or
//!   a kill.
//!
//! What is tried: [`formats`] (lba sizes, both flog paddings, versions 1.1 and 2.0, two arenas,
//! zeroed and lost blocks), [`ext4`], the kernel's crash images opened by us ([`kernel_crash`]) and
//! ours opened by the kernel ([`our_crash`], driven by the crash simulator). [`run`] cuts the power
//! of a guest in which a program works under `tidegate run`, with its pool on an NVDIMM; [`quota`]
//! has a program there meet a limit of its file system. In [`ublk`], pools are disks of the guest
//! by its own kernel; in [`vhost_user`], by a server of the host.
//!
//! Needed, as Debian packages: linux-image-6.12-cloud-amd64, qemu-system-x86, busybox-static,
//! xz-utils, e2fsprogs; and the right to read /boot and /lib/modules. A test without them fails and
//! names the package.

mod ext4;
mod formats;
mod image;
mod initramfs;
mod kernel_crash;
mod label;
mod our_crash;
mod pool;
mod quota;
mod run;
#[path = "../support/mod.rs"]
mod support;
mod ublk;
mod vhost_user;
mod vm;
