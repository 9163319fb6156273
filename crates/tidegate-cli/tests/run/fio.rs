//! fio writes and verifies, with every way into a file that it has. Engines that write behind
//! libc's back must be noticed, and mix with others.

use crate::bed::Bed;
use crate::support::tool;

fn fio_verifies(engine: &str, options: &str) {
    drop(tool("fio", "fio"));
    let script = format!(
        "fio --output=report --name=job --ioengine={engine} --size=8M --bs=4k --rw=randwrite \
         --randseed=7 --allrandrepeat=1 --verify=crc32c --verify_fatal=1 --do_verify=1 --buffer_pattern=0x5a \
         --verify_state_save=0 --filename_format='file.$jobnum' {options} || {{ cat report; exit 1; }}; rm report"
    );
    // What the file holds differs from run to run (fio's headers have times): the verification is
    // the test.
    let printed = Bed::new().same(|runner, dir| {
        let printed = runner.script(&format!("{script}; stat -c '%n %s' *; rm file*"), dir);
        format!("{printed}{:?}", std::fs::read_dir(dir).map(Iterator::count))
    });
    assert!(printed.contains("exit status: 0"), "fails without Tidegate too:\n{printed}");
}

#[test]
fn psync_with_fsync() {
    fio_verifies("psync", "--fsync=4");
}

#[test]
fn psync_synchronous_of_two_processes() {
    fio_verifies("psync", "--sync=dsync --numjobs=2");
}

#[test]
fn vectors_at_positions() {
    fio_verifies("pvsync2", "--fdatasync=2 --rw=randrw");
}

#[test]
fn libaio_direct() {
    fio_verifies("libaio", "--iodepth=8 --direct=1 --fsync=16");
}

#[test]
fn io_uring() {
    fio_verifies("io_uring", "--iodepth=8 --fsync=16");
}

#[test]
fn posix_aio() {
    fio_verifies("posixaio", "--iodepth=4 --fsync=16");
}

#[test]
fn shared_mapping() {
    fio_verifies("mmap", "--fsync=32");
}

#[test]
fn splice() {
    fio_verifies("splice", "--fsync=32");
}

/// Half of the jobs write behind libc's back, half by pwrite, in turns, into one file.
#[test]
fn engines_mixed_in_one_file() {
    let jobs = ["psync", "io_uring", "mmap", "psync", "libaio"].map(|engine| {
        format!("--name={engine} --ioengine={engine} --stonewall --filename=file.0 --offset=0 --size=4M --iodepth=4 --fsync=8")
    });
    fio_verifies("psync", &jobs.join(" "));
}
