//! What others wrote, against the real binary: libnbd's tools, QEMU's, fio, and ext4 on nbdfuse and
//! a loop device. `TIDEGATE_FIO_SECONDS` sets how long fio verifies, 5 unless set.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use tempfile::TempDir;
use tidegate::dram::Policy;

use support::file_system::FileSystem;
use support::{Server, ok, scratch, setting, succeed, tool};

/// A BTT pool that is being served on a unix socket.
struct Served {
    dir: TempDir,
    server: Server,
}

impl Served {
    fn new(size: &str, block_size: &str) -> Self {
        Self::with_dram(size, block_size, "none")
    }

    fn with_dram(size: &str, block_size: &str, dram: &str) -> Self {
        let dir = scratch();
        let pool = dir.path().join("pool");
        let options = ["--engine=btt", "--size", size, "--block-size", block_size];
        ok(["create", pool.to_str().unwrap()].into_iter().chain(options));
        let server =
            Server::start(&pool, &dir.path().join("socket"), &["--export", "disk", "--dram", dram]);
        Self { dir, server }
    }

    /// A log of `log_size` over a file of `size`.
    fn with_log(size: &str, log_size: &str) -> Self {
        let dir = scratch();
        let (pool, backing) = (dir.path().join("pool"), dir.path().join("backing"));
        ok(["create", pool.to_str().unwrap(), "--engine=log", "--size", log_size]);
        succeed(tool("truncate", "coreutils").args(["--size", size]).arg(&backing));
        let backing = format!("--backing={}", backing.display());
        let args = ["--export", "disk", &backing];
        let server = Server::start(&pool, &dir.path().join("socket"), &args);
        Self { dir, server }
    }

    /// A cache of 16 MiB before a file of 160 MiB, made and served with more options, and with
    /// `settings` of `tidegate set`.
    fn with_cache(made: &[&str], served: &[&str], settings: &[&str]) -> Self {
        let dir = scratch();
        let (pool, backing) = (dir.path().join("pool"), dir.path().join("backing"));
        let create = ["create", pool.to_str().unwrap(), "--engine=cache", "--size=16M"];
        ok([create.as_slice(), made].concat());
        succeed(tool("truncate", "coreutils").arg("--size=160M").arg(&backing));
        let backing = format!("--backing={}", backing.display());
        let args = [&["--export", "disk", &backing], served].concat();
        let server = Server::start(&pool, &dir.path().join("socket"), &args);
        if !settings.is_empty() {
            ok([&["set", pool.to_str().unwrap()], settings].concat());
        }
        Self { dir, server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path("socket").display())
    }

    fn size_bytes(&self) -> u64 {
        let size = succeed(tool("nbdinfo", "libnbd-bin").arg("--size").arg(self.uri()));
        size.trim().parse().expect("nbdinfo prints a number")
    }

    /// Stops the server, which must have nothing to complain of, and checks the pool.
    fn finish(self) {
        let (status, _) = self.server.stop(Signal::TERM);
        assert!(status.success(), "{status}");
        ok(["check".as_ref(), self.dir.path().join("pool").as_os_str()]);
    }
}

#[test]
fn nbdinfo_sees_what_the_server_promises() {
    let served = Served::new("64M", "4096");
    let text = succeed(tool("nbdinfo", "libnbd-bin").arg("--json").arg(served.uri()));
    let info: serde_json::Value = serde_json::from_str(&text).expect("nbdinfo prints JSON");
    let export = &info["exports"][0];
    assert_eq!(export["export-name"], "disk");
    assert_eq!(export["export-size"], served.size_bytes());
    assert_eq!(export["is_read_only"], false);
    for promise in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn"] {
        assert_eq!(export[promise], true, "{promise}");
    }
    assert_eq!(export["block_size_minimum"], 4096);
    let list = succeed(tool("nbdinfo", "libnbd-bin").arg("--list").arg(served.uri()));
    assert!(list.contains("export=\"disk\""), "{list}");
    served.finish();
}

/// Sends requests that libnbd would not let through, and prints the error of each. The last write
/// and the read are good.
const REFUSED: &str = "import nbd, sys
disk = nbd.NBD()
disk.set_strict_mode(0)
disk.connect_uri(sys.argv[1])
end = disk.get_size()
for size, offset in (8192, end - 4096), (48 << 20, 0), (64 << 20, 0), (100, 7), (4096, 4096):
    try:
        disk.pwrite(b'x' * size, offset)
        print('done')
    except nbd.Error as error:
        print(error.errno)
print(disk.pread(512, 4096)[:1].hex())
disk.shutdown()";

#[test]
fn libnbd_goes_on_behind_writes_that_are_refused() {
    let served = Served::new("128M", "512");
    let refused = |uri: String| {
        // Debian's own, which has the package.
        succeed(tool("/usr/bin/python3", "python3-libnbd").args(["-c", REFUSED, &uri]))
    };
    assert_eq!(refused(served.uri()), "ENOSPC\nEOVERFLOW\nEOVERFLOW\nEINVAL\ndone\n78\n");
    let (pool, socket) = (served.path("pool"), served.path("read-only"));
    assert!(served.server.stop(Signal::TERM).0.success());
    let server = Server::start(&pool, &socket, &["--export", "disk", "--read-only"]);
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    assert_eq!(refused(uri), "EPERM\n".repeat(5) + "78\n");
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn nbdcopy_in_and_out_gives_the_same_bytes() {
    let served = Served::new("128M", "512");
    let size_bytes = usize::try_from(served.size_bytes()).unwrap();
    let image: Vec<u8> =
        (0..size_bytes).map(|at| (at / 512 * 31 + at % 251).to_le_bytes()[0]).collect();
    let (image_in, image_out) = (served.path("in.img"), served.path("out.img"));
    std::fs::write(&image_in, &image).unwrap();
    succeed(tool("nbdcopy", "libnbd-bin").arg("--flush").arg(&image_in).arg(served.uri()));
    succeed(tool("nbdcopy", "libnbd-bin").arg(served.uri()).arg(&image_out));
    assert!(std::fs::read(&image_out).unwrap() == image, "what came out is not what went in");
    served.finish();
}

#[test]
fn qemu_io_writes_zeroes_discards_and_reads_patterns() {
    let served = Served::new("64M", "4096");
    let mut qemu_io = tool("qemu-io", "qemu-utils");
    qemu_io.args(["-f", "raw"]).arg(served.uri());
    for command in [
        "write -P 0x5a 1M 256k",
        "write -f -P 0xa5 2M 4k",
        "flush",
        "write -z 1088k 64k",
        "write -z -u 1216k 4k",
        "discard 2M 4k",
        "read -P 0x5a 1M 64k",
        "read -P 0 1088k 64k",
        "read -P 0x5a 1152k 64k",
        "read -P 0 1216k 4k",
        "read -P 0 8M 1M",
    ] {
        qemu_io.args(["-c", command]);
    }
    let output = succeed(&mut qemu_io);
    assert!(!output.contains("failed"), "{output}");
    served.finish();
}

#[test]
fn qemu_img_converts_compares_and_checks() {
    let served = Served::new("64M", "512");
    let copy = served.path("copy.qcow2");
    succeed(
        tool("qemu-io", "qemu-utils")
            .args(["-f", "raw", "-c", "write -P 7 3M 5M"])
            .arg(served.uri()),
    );
    succeed(
        tool("qemu-img", "qemu-utils")
            .args(["convert", "-f", "raw", "-O", "qcow2"])
            .arg(served.uri())
            .arg(&copy),
    );
    succeed(tool("qemu-img", "qemu-utils").arg("check").arg(&copy));
    succeed(
        tool("qemu-img", "qemu-utils")
            .args(["compare", "-f", "raw", "-F", "qcow2"])
            .arg(served.uri())
            .arg(&copy),
    );
    // And a qcow2 image that lives on the device itself.
    succeed(
        tool("qemu-img", "qemu-utils").args(["create", "-f", "qcow2"]).arg(served.uri()).arg("48M"),
    );
    succeed(
        tool("qemu-io", "qemu-utils")
            .args(["-f", "qcow2", "-c", "write -P 9 1M 16M"])
            .arg(served.uri()),
    );
    succeed(tool("qemu-img", "qemu-utils").args(["check", "-f", "qcow2"]).arg(served.uri()));
    served.finish();
}

#[test]
fn fio_verifies_checksums_from_four_jobs() {
    fio_verifies(Served::new("160M", "4096"), setting("TIDEGATE_FIO_SECONDS", 5));
}

/// A cache of a sixteenth of the blocks in use, so that it overruns, with a flush now and then.
#[test]
fn fio_verifies_checksums_through_every_dram_tier() {
    let seconds = setting("TIDEGATE_FIO_SECONDS", 5).div_ceil(5);
    for &policy in Policy::ALL.iter().filter(|policy| **policy != Policy::None) {
        println!("{policy}");
        fio_verifies(Served::with_dram("160M", "4096", &format!("{policy}:8M")), seconds);
    }
}

/// A log of a tenth of what fio writes: it is cleaned all the while.
#[test]
fn fio_verifies_checksums_through_a_log() {
    fio_verifies(Served::with_log("160M", "16M"), setting("TIDEGATE_FIO_SECONDS", 5));
}

/// A cache of a tenth of what fio writes and reads, with lines of one page and of several.
#[test]
fn fio_verifies_checksums_through_a_cache() {
    let seconds = setting("TIDEGATE_FIO_SECONDS", 5).div_ceil(2);
    for line_size in ["4K", "16K", "64K"] {
        println!("lines of {line_size}");
        fio_verifies(Served::with_cache(&["--line-size", line_size], &[], &[]), seconds);
    }
}

#[test]
fn fio_verifies_checksums_in_each_mode_of_a_cache() {
    let seconds = setting("TIDEGATE_FIO_SECONDS", 5).div_ceil(4);
    for mode in ["wt", "wb", "wa", "wi", "wo", "pt"] {
        println!("mode {mode}");
        fio_verifies(Served::with_cache(&[], &["--mode", mode], &[]), seconds);
    }
}

#[test]
fn fio_verifies_checksums_through_a_cache_with_atomic_flush_and_one_that_decides_by_cost() {
    let seconds = setting("TIDEGATE_FIO_SECONDS", 5).div_ceil(4);
    fio_verifies(Served::with_cache(&[], &["--atomic-flush"], &[]), seconds);
    fio_verifies(Served::with_cache(&[], &[], &["cost=auto"]), seconds);
}

/// Blocks of 512 bytes: parts of pages.
#[test]
fn fio_verifies_checksums_in_each_granularity_of_a_cache() {
    let seconds = setting("TIDEGATE_FIO_SECONDS", 5).div_ceil(4);
    for (granularity, modes) in [("page", &["wb", "wo"][..]), ("record", &["wb", "wo", "wt", "wa"])]
    {
        for mode in modes {
            println!("granularity {granularity}, mode {mode}");
            let setting = format!("granularity={granularity}");
            let made = ["--block-size=512"];
            let served = Served::with_cache(&made, &["--mode", mode], &[&setting]);
            fio_verifies_blocks("512", served, seconds);
        }
    }
}

fn fio_verifies(served: Served, seconds: u64) {
    fio_verifies_blocks("4k", served, seconds);
}

fn fio_verifies_blocks(block_size: &str, served: Served, seconds: u64) {
    let mut fio = tool("fio", "fio");
    fio.args([
        "--name=verify",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--iodepth=16",
        "--numjobs=4",
        "--fsync=256",
    ]);
    fio.arg(format!("--bs={block_size}"));
    fio.args([
        "--size=32M",
        "--offset_increment=32M",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=1024",
    ]);
    fio.arg(format!("--uri={}", served.uri()));
    verify_for_a_while(&mut fio, served.dir.path(), seconds);
    served.finish();
}

#[test]
fn ext4_on_nbdfuse_and_a_loop_device_holds_what_fio_wrote() {
    let served = Served::new("256M", "4096");
    let file_system = FileSystem::make(served.dir.path(), &served.uri());
    let mut fio = tool("fio", "fio");
    fio.args([
        "--name=files",
        "--ioengine=psync",
        "--rw=randwrite",
        "--bs=4k",
        "--numjobs=2",
        "--fsync=32",
    ]);
    fio.args(["--size=24M", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=512"]);
    fio.arg(format!("--directory={}", file_system.mount_point.display()));
    verify_for_a_while(&mut fio, served.dir.path(), setting("TIDEGATE_FIO_SECONDS", 5));
    let device = file_system.unmount();
    succeed(tool("e2fsck", "e2fsprogs").arg("-fn").arg(&device));
    drop(file_system);
    served.finish();
}

/// Runs a fio job that verifies what it writes, again and again until its time is over.
fn verify_for_a_while(fio: &mut Command, dir: &Path, seconds: u64) {
    fio.args(["--time_based", "--group_reporting", "--output-format=json"]);
    fio.arg(format!("--runtime={seconds}")).current_dir(dir);
    let text = succeed(fio);
    let start = text.find('{').expect("fio prints JSON");
    let report: serde_json::Value = serde_json::from_str(&text[start..]).expect("fio prints JSON");
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0);
    for direction in ["write", "read"] {
        let count = job[direction]["total_ios"].as_u64().unwrap();
        assert!(count > 0, "fio did no {direction}");
    }
}

#[test]
fn tls_clients_are_served_and_others_refused() {
    let dir = scratch();
    let pool = dir.path().join("pool");
    ok(["create", pool.to_str().unwrap(), "--engine=btt", "--size=32M"]);
    write_certificates(dir.path());
    let mut serve = support::tidegate();
    serve.current_dir(dir.path()).args(["serve", "pool", "--nbd=tcp:localhost:0", "--tls=require"]);
    let server =
        Server::spawn(serve.args(["--tls-cert=server-cert.pem", "--tls-key=server-key.pem"]));
    let listening = server
        .banner
        .iter()
        .find_map(|line| line.rsplit_once("tcp:"))
        .expect("it says where it listens");
    let port = listening.1.rsplit(':').next().unwrap().trim_matches(|c: char| !c.is_ascii_digit());
    let secure = format!("nbds://localhost:{port}/?tls-certificates={}", dir.path().display());
    let size = succeed(tool("nbdinfo", "libnbd-bin").arg("--size").arg(secure));
    assert!(size.trim().parse::<u64>().unwrap() > 16 << 20);
    let clear =
        tool("nbdinfo", "libnbd-bin").arg(format!("nbd://localhost:{port}")).output().unwrap();
    assert!(!clear.status.success(), "a client without TLS was served");
    let (status, _) = server.stop(Signal::INT);
    assert!(status.success(), "{status}");
}

/// A certificate for `localhost`, signed by an authority of its own, under the names that libnbd
/// looks for.
fn write_certificates(dir: &Path) {
    let mut authority = rcgen::CertificateParams::new([]).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let authority_cert = authority.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::from_params(&authority, &authority_key);
    let server_key = rcgen::KeyPair::generate().unwrap();
    let server = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
    let server_cert = server.signed_by(&server_key, &issuer).unwrap();
    std::fs::write(dir.join("ca-cert.pem"), authority_cert.pem()).unwrap();
    std::fs::write(dir.join("server-cert.pem"), server_cert.pem()).unwrap();
    std::fs::write(dir.join("server-key.pem"), server_key.serialize_pem()).unwrap();
}
