//! An ext4 file system that we write to a BTT, the kernel mounts and changes, and we read back.

use std::fs;
use std::path::Path;
use std::process::Command;

use tidegate::btt::BttOptions;
use tidegate::device::{BlockDevice, BlockDeviceExt, WriteFlags};

use crate::pool::{assert_clean, create_pool, open_pool, read_all, stamped};
use crate::vm::{Guest, Lab, Nvdimm};

/// Enough for a journal.
const POOL_BYTES: u64 = 32 << 20;

#[test]
fn the_kernel_mounts_ext4_from_our_btt_and_we_read_what_it_wrote() {
    for lba_bytes in [512, 4096] {
        exchange_file_system(lba_bytes);
    }
}

fn exchange_file_system(lba_bytes: u32) {
    let lab = Lab::enter();
    let (pool, image) = (lab.path("pool"), lab.path("image"));
    create_pool(&pool, POOL_BYTES, &BttOptions { lba_bytes, ..BttOptions::default() });
    let tree = lab.path("tree");
    make_tree(&tree);
    let device = open_pool(&pool);
    make_file_system(&image, &tree, device.geometry().size_bytes());
    let content = fs::read(&image).expect("the image can be read");
    device.write(0, &content, WriteFlags::default()).expect("the pool can be written");
    drop(device);

    let mut guest = Guest::boot(&lab, &[Nvdimm::plain(&pool)]);
    let disk = guest.disk(1);
    guest.run(&format!("mount -t ext4 {disk} /mnt"));
    guest.run("(cd /mnt && sha256sum -c sums) 2>&1");
    guest.run("mkdir /mnt/copy && cp -r /mnt/files /mnt/sums /mnt/copy && rm /mnt/files/2");
    guest.run("umount /mnt");
    guest.power_off();

    assert_clean(&pool);
    fs::write(&image, read_all(&open_pool(&pool))).expect("the image can be written");
    run(Command::new("e2fsck").arg("-fn").arg(&image));
    let out = lab.path("out");
    fs::create_dir(&out).expect("a directory can be made");
    let dump = format!("rdump / {}", out.display());
    run(Command::new("debugfs").args(["-R", &dump]).arg(&image));
    run(Command::new("sha256sum").args(["-c", "--strict", "sums"]).current_dir(out.join("copy")));
    assert!(!out.join("files/2").exists(), "the kernel removed it");
}

/// Files of several sizes, and a list of their sums.
fn make_tree(tree: &Path) {
    fs::create_dir_all(tree.join("files")).expect("a directory can be made");
    let mut names = Vec::new();
    for (number, blocks) in [0, 1, 2, 200, 1000].into_iter().enumerate() {
        let name = format!("files/{number}");
        fs::write(tree.join(&name), stamped(0..blocks, number as u64, 4096))
            .expect("a file can be written");
        names.push(name);
    }
    let sums = run(Command::new("sha256sum").args(&names).current_dir(tree));
    fs::write(tree.join("sums"), sums).expect("a file can be written");
}

fn make_file_system(image: &Path, tree: &Path, bytes: u64) {
    let blocks = (bytes / 4096).to_string();
    run(Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096", "-d"])
        .arg(tree)
        .arg(image)
        .arg(blocks));
    // Up to the end of the disk, which need not be whole blocks of the file system.
    let file = fs::File::options().write(true).open(image).and_then(|file| file.set_len(bytes));
    file.expect("the image can be sized");
}

/// Runs a command that must succeed, and returns what it printed.
fn run(command: &mut Command) -> Vec<u8> {
    let out = command.output().unwrap_or_else(|err| {
        panic!("{command:?}: {err}: install the packages e2fsprogs and coreutils")
    });
    let (stdout, stderr) = (&out.stdout, String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}{stderr}", String::from_utf8_lossy(stdout));
    out.stdout
}
