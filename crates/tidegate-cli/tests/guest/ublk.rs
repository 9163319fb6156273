//! Pools as block devices of the guest, by the kernel's ublk driver, with the server in the guest:
//! what users see of the disk, of kills and stops of its server, and of a power cut.

use std::sync::LazyLock;

use crate::run::{libraries, read, root_of_run};
use crate::vm::{Guest, Lab, Nvdimm, System};

/// A root with the shipped `tidegate`, the driver, and the programs of ext4.
static SYSTEM: LazyLock<System> = LazyLock::new(|| {
    let mut root = root_of_run();
    root.modules.push("block/ublk_drv");
    for program in ["mke2fs", "e2fsck"] {
        let path = std::path::Path::new("/sbin").join(program);
        root.files.push((format!("bin/{program}-ext4"), read(&path)));
        root.files.extend(libraries(&path));
    }
    root.functions = concat!(include_str!("functions"), include_str!("functions-ublk"));
    System::with(&root)
});

/// The disk of the first server.
const DISK: &str = "/dev/ublkb0";
/// Bytes of the exchange that loads write.
pub(crate) const LOAD_MIB: usize = 16;

fn boot(lab: &Lab) -> Guest {
    boot_with(lab, &[])
}

fn boot_with(lab: &Lab, nvdimms: &[Nvdimm]) -> Guest {
    let mut guest = Guest::boot_system(&SYSTEM, lab, nvdimms, None);
    guest.run("with_driver");
    guest
}

/// Fills the part of the exchange that loads write. Returns its sum.
pub(crate) fn fill(guest: &mut Guest) -> String {
    let data: Vec<u8> =
        (0..LOAD_MIB << 20).map(|at| crate::pool::mix(at as u64).to_le_bytes()[0]).collect();
    guest.fill_exchange(&data);
    let exchange = guest.exchange();
    guest.run(&format!("sum {exchange} {LOAD_MIB}"))
}

/// Returns what the kernel tells of a disk's queue.
fn queue_fact(guest: &mut Guest, name: &str) -> String {
    guest.run(&format!("cat /sys/block/ublkb0/queue/{name}"))
}

fn create(guest: &mut Guest, arguments: &str) {
    guest.run(&format!("tidegate create /dev/shm/pool {arguments} >/tmp/created 2>&1"));
}

/// Asserts that the kernel has seen no I/O error.
pub(crate) fn assert_no_io_error(guest: &mut Guest) {
    let (status, found) = guest.try_run("dmesg | grep -i 'i/o error'");
    assert_eq!(status, 1, "{found}");
}

#[test]
fn a_btt_is_a_disk_of_this_machine() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    let (sum, exchange) = (fill(&mut guest), guest.exchange());
    for block_bytes in ["512", "4096"] {
        create(&mut guest, &format!("--engine btt --size 64M --force --block-size {block_bytes}"));
        let told = guest.run("serve /dev/shm/pool --ublk");
        assert_eq!(told.split_whitespace().collect::<Vec<_>>(), ["ublk", DISK]);
        assert_eq!(queue_fact(&mut guest, "logical_block_size"), block_bytes);
        assert_eq!(
            queue_fact(&mut guest, "write_cache"),
            "write through",
            "all writes are durable"
        );
        guest.run(&format!("dd if={exchange} of={DISK} bs=1M count={LOAD_MIB} conv=fsync 2>&1"));
        assert_eq!(guest.run(&format!("sum {DISK} {LOAD_MIB}")), sum);
        guest.run(&format!("blkdiscard -o 1048576 -l 1048576 {DISK}"));
        let one_mib = "bs=1M count=1 iflag=direct";
        if block_bytes == "4096" {
            // Blocks of 512 bytes keep what they hold.
            guest.run(&format!("dd if={DISK} {one_mib} skip=1 | cmp - /dev/zero 2>&1 | grep EOF"));
        }
        guest.run(&format!(
            "dd if={DISK} {one_mib} >/tmp/first && cmp -n 1048576 /tmp/first {exchange}"
        ));
        let counted = guest.run("tidegate stat /dev/shm/pool | grep 'front_end ublk'");
        assert!(counted.ends_with("trims                      1"), "{counted}");
        guest.run("stop_server");
        assert_eq!(guest.try_run(&format!("[ -e {DISK} ]")).0, 1, "the disk is deleted");
        guest.run("tidegate check /dev/shm/pool");
    }
    assert_no_io_error(&mut guest);
    guest.power_off();
}

/// A load, and a file system, go on over kills of the server of a cache.
#[test]
fn users_of_a_disk_notice_no_kill_of_its_server() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    let (sum, exchange) = (fill(&mut guest), guest.exchange());
    guest.run("truncate -s 48M /dev/shm/backing");
    create(&mut guest, "--engine cache --size 24M");
    let serve = "serve /dev/shm/pool --ublk --backing /dev/shm/backing";
    guest.run(serve);
    guest.run(&format!("load {exchange} {DISK}"));
    for _ in 0..3 {
        guest.run("await_parts 25");
        guest.run("kill_server");
        let told = guest.run(serve);
        assert!(told.ends_with("/dev/ublkb0, taken up from the last server"), "{told}");
    }
    guest.run("end_load");
    assert_eq!(guest.run(&format!("sum {DISK} {LOAD_MIB}")), sum);

    guest.run(&format!("mke2fs-ext4 -q -t ext4 {DISK} 2>&1 && mount -t ext4 {DISK} /mnt"));
    guest.run(&format!("dd if={exchange} of=/mnt/file bs=1M count={LOAD_MIB} conv=fsync 2>&1"));
    guest.run("kill_server");
    guest.run("echo waits >/mnt/second; sync & flusher=$!");
    guest.run(serve);
    guest.run("wait $flusher && echo 3 >/proc/sys/vm/drop_caches");
    assert_eq!(guest.run(&format!("sum /mnt/file {LOAD_MIB}")), sum);
    guest.run("umount /mnt && stop_server");
    guest.run(serve);
    guest.run(&format!("e2fsck-ext4 -fn {DISK} 2>&1"));
    guest.run("stop_server && tidegate check /dev/shm/pool");
    assert_no_io_error(&mut guest);
    guest.power_off();
}

#[test]
fn a_stop_keeps_a_disk_in_use_for_the_next_server_of_its_pool() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    create(&mut guest, "--engine btt --size 32M");
    guest.run("serve /dev/shm/pool --ublk");
    guest.run(&format!("open_disk {DISK}"));
    let told = guest.run("stop_server");
    assert!(told.contains("/dev/ublkb0 is in use and stays"), "{told}");

    let refused = |guest: &mut Guest, arguments: &str| {
        let (status, told) = guest.try_run(&format!("serve /dev/shm/pool {arguments}"));
        assert_eq!(status, 1, "{told}");
        told
    };
    let told = refused(&mut guest, "--ublk=3");
    assert!(told.contains("say --ublk=0, or delete it by `tidegate detach`"), "{told}");
    let told = refused(&mut guest, "--ublk --read-only");
    assert!(told.contains("read-only: false before, true now"), "{told}");
    let told = refused(&mut guest, "--ublk --dram transit:2M");
    assert!(told.contains("a kill of this server loses writes"), "{told}");
    // Another pool gets a disk of its own.
    guest.run("cp /dev/shm/pool /dev/shm/copy");
    assert!(guest.run("serve /dev/shm/copy --ublk").ends_with("/dev/ublkb1"));
    guest.run("stop_server");

    let told = guest.run("serve /dev/shm/pool --ublk");
    assert!(told.ends_with("taken up from the last server"), "{told}");
    guest.run(&format!("dd if={DISK} of=/dev/null bs=4k count=1 iflag=direct 2>&1"));
    guest.run("close_disk && stop_server");
    assert_eq!(guest.try_run(&format!("[ -e {DISK} ]")).0, 1, "the disk is deleted");
    guest.power_off();
}

#[test]
fn what_a_killed_server_leaves_can_be_deleted() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    create(&mut guest, "--engine btt --size 32M");
    assert!(guest.run("serve /dev/shm/pool --ublk=4").ends_with("/dev/ublkb4"));
    guest.run("kill_server && open_disk /dev/ublkb4");
    // The request waits for a server that does not come.
    guest.run("dd if=/dev/ublkb4 of=/dev/null bs=4k count=1 iflag=direct 2>/tmp/dd & reader=$!");
    let told = guest.run("tidegate detach /dev/shm/pool");
    assert_eq!(told, "/dev/ublkb4: deleted; it was of /dev/shm/pool");
    assert_eq!(guest.try_run("wait $reader").0, 1, "the waiting request fails");
    guest.run("close_disk");
    let told = guest.run("tidegate detach /dev/shm/pool");
    assert_eq!(told, "/dev/shm/pool: no server left a block device");
    guest.power_off();
}

/// A kill loses what only a DRAM tier had, so no server may go on as if nothing had happened.
#[test]
fn a_disk_with_a_write_cache_fails_with_its_server() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    create(&mut guest, "--engine btt --size 32M");
    let serve = "serve /dev/shm/pool --ublk --dram transit:4M";
    guest.run(serve);
    assert_eq!(queue_fact(&mut guest, "write_cache"), "write back");
    guest.run(&format!("open_disk {DISK} && kill_server"));
    assert!(guest.run(serve).ends_with("/dev/ublkb1"), "the old disk still has a user");
    let read = guest.run("dd bs=4k skip=99 count=1 <&9 2>/tmp/dd | wc -c");
    assert_eq!(read, "0", "the old disk has no data any more");
    guest.run("close_disk && dd if=/dev/zero of=/dev/ublkb1 bs=4k count=9 2>&1");
    guest.run("open_disk /dev/ublkb1");
    let told = guest.run("stop_server");
    assert!(told.contains("/dev/ublkb1 was in use and is deleted"), "{told}");
    guest.run("close_disk");
    guest.power_off();
}

#[test]
fn without_driver_or_right_to_write_the_error_says_so() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    create(&mut guest, "--engine btt --size 32M");
    guest.run("serve /dev/shm/pool --ublk --read-only");
    assert_eq!(guest.run("cat /sys/block/ublkb0/ro"), "1");
    assert_ne!(guest.try_run(&format!("dd if=/dev/zero of={DISK} bs=4k count=1 2>&1")).0, 0);
    guest.run(&format!("dd if={DISK} of=/dev/null bs=4k count=1 2>&1"));
    guest.run("stop_server");
    guest.run("rmmod ublk_drv");
    let (status, told) = guest.try_run("serve /dev/shm/pool --ublk");
    assert_eq!(status, 1);
    assert!(told.contains("/dev/ublk-control is not there") && told.contains("modprobe"), "{told}");
    guest.power_off();
}

#[test]
fn a_pool_that_appears_while_others_are_served_becomes_a_disk() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    create(&mut guest, "--engine btt --size 32M");
    guest.run("cp /dev/shm/pool /dev/shm/away");
    for (name, pool) in [("late", "late"), ("early", "pool")] {
        guest.run(&format!(
            "printf '[[device]]\\nexport = \"{name}\"\\npool = \"/dev/shm/{pool}\"\\nublk = true\\n' \
             >>/tmp/config"
        ));
    }
    let told = guest.run("serve --config /tmp/config");
    assert_eq!(told.split_whitespace().collect::<Vec<_>>(), ["ublk", DISK]);
    guest.run("await_said 'opens it once /dev/shm/late is there'");
    guest.run("mv /dev/shm/away /dev/shm/late && await_said 'late: the device is served now'");
    for disk in [DISK, "/dev/ublkb1"] {
        guest.run(&format!("dd if=/dev/zero of={disk} bs=1M count=1 conv=fsync 2>&1"));
    }
    let listed = guest.run("tidegate list --csv");
    let rows: Vec<_> = listed.lines().skip(1).collect();
    let starts = ["late,/dev/ublkb1,up,", "early,/dev/ublkb0,up,"];
    let are_listed = rows.iter().zip(starts).all(|(row, start)| row.starts_with(start));
    assert!(rows.len() == 2 && are_listed, "{listed}");
    guest.run("stop_server");
    assert_eq!(guest.try_run("ls /dev/ublkb* 2>/dev/null").1, "", "the disks are deleted");
    assert_no_io_error(&mut guest);
    guest.power_off();
}

/// The server of `attach` outlives the command, holds no directory, and ends by `detach`.
#[test]
fn a_pool_is_attached_and_detached_by_a_command_each() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    let (sum, exchange) = (fill(&mut guest), guest.exchange());
    guest.run("mkdir /tmp/folder && mount -t tmpfs none /tmp/folder && cd /tmp/folder");
    let (status, told) = guest.try_run("tidegate attach none 2>&1");
    assert!(status == 1 && told.contains("No such file"), "{told}");
    create(&mut guest, "--engine cache --size 24M");
    guest.run("truncate -s 48M /dev/shm/backing");
    let attach = "tidegate attach ../../dev/shm/pool --backing /dev/shm/backing";
    assert_eq!(guest.run(attach), DISK);
    assert_eq!(guest.run(attach), DISK, "it is attached already");
    guest.run("cd / && umount /tmp/folder");
    guest.run(&format!("mke2fs-ext4 -q -t ext4 {DISK} 2>&1 && mount -t ext4 {DISK} /mnt"));
    guest.run(&format!("dd if={exchange} of=/mnt/file bs=1M count={LOAD_MIB} 2>&1"));
    let (status, told) = guest.try_run("tidegate detach /dev/shm/pool 2>&1");
    assert!(status == 1 && told.contains("its block device is in use: unmount"), "{told}");
    guest.run("umount /mnt");
    let told = guest.run("tidegate detach /dev/shm/pool");
    assert_eq!(told, "/dev/ublkb0: deleted; /dev/shm/pool has its data");
    assert_eq!(guest.try_run(&format!("[ -e {DISK} ]")).0, 1, "the disk is deleted");
    assert!(guest.run("dmesg").contains("SIGTERM: stopping"), "the server has logged there");

    let told = guest.run("tidegate detach /dev/shm/pool");
    assert_eq!(told, "/dev/shm/pool: no server left a block device");
    let told = guest.run("tidegate attach --ublk=3 /dev/shm/pool --backing /dev/shm/backing");
    assert_eq!(told, "/dev/ublkb3");
    guest.run("mount -t ext4 /dev/ublkb3 /mnt");
    assert_eq!(guest.run(&format!("sum /mnt/file {LOAD_MIB}")), sum);
    guest.run("umount /mnt && tidegate detach /dev/shm/pool && tidegate check /dev/shm/pool");
    assert_no_io_error(&mut guest);
    guest.power_off();
}

/// A reload changes the device of a disk in use with a pause for its users, and takes no disk from
/// them.
#[test]
fn a_reload_changes_a_disk_in_use_and_takes_none_away() {
    let lab = Lab::enter();
    let mut guest = boot(&lab);
    let (sum, exchange) = (fill(&mut guest), guest.exchange());
    create(&mut guest, "--engine btt --size 32M");
    guest.run("cp /dev/shm/pool /dev/shm/copy");
    let device = |name: &str, more: &str| {
        format!("[[device]]\\nexport = \"{name}\"\\npool = \"/dev/shm/{name}\"\\n{more}\\n")
    };
    let write = |guest: &mut Guest, devices: &[String]| {
        guest.run(&format!("printf '{}' >/tmp/config", devices.concat()));
    };
    let (pool, copy) = (device("pool", "ublk = true"), device("copy", "ublk = true"));
    write(&mut guest, &[pool.clone(), copy.clone()]);
    guest.run("serve --config /tmp/config");
    let listed = guest.run("tidegate list --csv | grep '^pool'");
    let disk = listed.split(',').nth(1).expect("a disk").to_owned();
    guest.run(&format!("open_disk {disk} && load {exchange} {disk} && await_parts 25"));

    let changed = device("pool", "ublk = true\\ncontrol = \"unix:/tmp/control\"");
    write(&mut guest, &[changed.clone(), copy.clone()]);
    let told = guest.run("tidegate reload 9<&-");
    assert!(told.ends_with("pool is served by its new table"), "{told}");
    guest.run("await_parts 25 && tidegate stat /tmp/control 9<&-");
    let read_only = device("pool", "ublk = true\\nread-only = true");
    for devices in [vec![copy.clone()], vec![read_only, copy.clone()]] {
        write(&mut guest, &devices);
        let (status, told) = guest.try_run("tidegate reload 9<&- 2>&1");
        let is_kept = told.contains("pool is as before: its block device is in use");
        assert!(status == 1 && is_kept, "{told}");
    }
    guest.run("end_load && close_disk");
    assert_eq!(guest.run(&format!("sum {disk} {LOAD_MIB}")), sum);
    assert_no_io_error(&mut guest);

    write(&mut guest, &[copy]);
    let told = guest.run("tidegate reload");
    assert!(told.ends_with("pool is closed"), "{told}");
    assert_eq!(guest.try_run(&format!("[ -e {disk} ]")).0, 1, "the disk is deleted");
    guest.run("tidegate check /dev/shm/pool && stop_server");
    guest.power_off();
}

#[test]
fn what_was_synced_to_a_disk_is_there_after_a_power_cut() {
    let lab = Lab::enter();
    let nvdimm = Nvdimm::plain(&lab.path("nvdimm"));
    let file = std::fs::File::create(&nvdimm.path).and_then(|file| file.set_len(64 << 20));
    file.expect("the NVDIMM's file can be made");
    let mut guest = boot_with(&lab, std::slice::from_ref(&nvdimm));
    let (sum, exchange, region) = (fill(&mut guest), guest.exchange(), guest.region(1));
    let pool = format!("/dev/dax{region}.0");
    guest.run(&format!("devdax {region}"));
    guest.run(&format!("tidegate create {pool} --engine btt --size 62M >/tmp/created 2>&1"));
    guest.run(&format!("serve {pool} --ublk"));
    guest.run(&format!("mke2fs-ext4 -q -t ext4 {DISK} 2>&1 && mount -t ext4 {DISK} /mnt"));
    guest.run(&format!("dd if={exchange} of=/mnt/file bs=1M count={LOAD_MIB} conv=fsync 2>&1"));
    guest.cut();

    let mut guest = boot_with(&lab, std::slice::from_ref(&nvdimm));
    let pool = format!("/dev/dax{}.0", guest.region(1));
    guest.run(&format!("devdax {}; tidegate check {pool}", guest.region(1)));
    guest.run(&format!("serve {pool} --ublk"));
    guest.run(&format!("mount -t ext4 {DISK} /mnt"));
    assert_eq!(guest.run(&format!("sum /mnt/file {LOAD_MIB}")), sum);
    guest.run(&format!("umount /mnt && e2fsck-ext4 -fn {DISK} 2>&1 && stop_server"));
    guest.power_off();
}
