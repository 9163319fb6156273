//! The Linux kernel's own BTT driver against ours, in a QEMU guest.
//!
//! (header to come)

mod ext4;
mod formats;
mod image;
mod initramfs;
mod kernel_crash;
mod label;
mod pool;
mod vm;
