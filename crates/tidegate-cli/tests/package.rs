//! The Debian package: what is in it, and a service that is installed, killed, upgraded and purged
//! in a root of its own, and keeps its data.

#[path = "support/nbd.rs"]
mod nbd;
mod support;

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use tempfile::TempDir;

use nbd::Client;
use support::{Server, preload_library, scratch, succeed, tool};

/// Packages of the version of this build and of a later one.
struct Packages {
    dir: TempDir,
}

impl Packages {
    fn build(versions: &[&str]) -> Self {
        let this = Self { dir: tempfile::tempdir().unwrap() };
        let built = this.dir.path().join("built");
        std::fs::create_dir(&built).unwrap();
        let binary = Path::new(env!("CARGO_BIN_EXE_tidegate"));
        symlink(binary, built.join("tidegate")).unwrap();
        let library = preload_library();
        symlink(library, built.join(library.file_name().unwrap())).unwrap();
        let for_c = binary.with_file_name("libtidegate_capi.a");
        symlink(&for_c, built.join("libtidegate_capi.a")).unwrap();
        // The others are beside it only where the whole workspace is built.
        for name in [
            "tidegate-bench",
            "tidegate-replay",
            "libtidegate_volatile.so",
            "libtidegate_record_preload.so",
        ] {
            let there = binary.with_file_name(name);
            symlink(if there.exists() { &there } else { binary }, built.join(name)).unwrap();
        }
        for version in versions {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/deb");
            let mut deb = Command::new(script);
            deb.arg(this.dir.path()).env("TIDEGATE_BUILT", &built);
            deb.env("TIDEGATE_DEB_VERSION", version).env("DPKG_DEB_COMPRESSOR_TYPE", "none");
            let named = succeed(&mut deb);
            assert_eq!(Path::new(named.trim()), this.path(version));
        }
        this
    }

    fn path(&self, version: &str) -> PathBuf {
        let arch = succeed(tool("dpkg", "dpkg").arg("--print-architecture"));
        self.dir.path().join(format!("tidegate_{version}_{}.deb", arch.trim()))
    }
}

#[test]
fn the_package_has_what_a_package_has() {
    let packages = Packages::build(&["1.0"]);
    let package = packages.path("1.0");
    let info = |args: &[&str]| {
        succeed(tool("dpkg-deb", "dpkg").arg(args[0]).arg(&package).args(&args[1..]))
    };
    let contents = info(&["--contents"]);
    for file in [
        "./usr/bin/tidegate",
        "./usr/lib/tidegate/libtidegate_preload.so",
        "./usr/lib/tidegate/libtidegate_volatile.so",
        "./usr/lib/tidegate/libtidegate_record_preload.so",
        "./usr/lib/systemd/system/tidegate.service",
        "./usr/lib/systemd/system/tidegate-ublk@.service",
        "./usr/lib/systemd/system/tidegate.socket",
        "./usr/lib/sysusers.d/tidegate.conf",
        "./usr/lib/libtidegate.so.0",
        "./usr/lib/libtidegate.so -> libtidegate.so.0",
        "./usr/lib/tidegate/pmemblk/libpmemblk.so.1",
        "./usr/include/tidegate.h",
        "./usr/share/man/man1/tidegate-serve.1.gz",
        "./usr/share/man/man3/tidegate.3.gz",
        "./usr/share/doc/tidegate/examples/blocks.c",
        "./usr/share/bash-completion/completions/tidegate",
        "./usr/share/zsh/vendor-completions/_tidegate",
        "./usr/share/doc/tidegate/copyright",
        "./usr/share/doc/tidegate/changelog.gz",
        "./etc/tidegate/tidegate.toml",
    ] {
        assert!(
            contents.lines().any(|line| line.ends_with(&format!(" {file}"))),
            "{file}: {contents}"
        );
    }
    for line in contents.lines() {
        let mode = &line[..10];
        assert!(line[10..].trim_start().starts_with("root/root "), "{line}");
        let is_link = mode.starts_with('l');
        assert!(!mode.contains(['s', 't']) && (is_link || &mode[8..9] != "w"), "{line}");
        assert!(!line.contains("/usr/local") && !line.contains(".debug"), "{line}");
    }
    assert_eq!(info(&["--field", "Package"]).trim(), "tidegate");
    assert!(info(&["--field", "Depends"]).contains("libc6 (>= "), "{}", info(&["--info"]));
    assert_eq!(info(&["--info", "conffiles"]).trim(), "/etc/tidegate/tidegate.toml");
    assert_eq!(info(&["--info", "triggers"]).trim(), "activate-noawait ldconfig");
    for script in ["postinst", "prerm", "postrm"] {
        let text = info(&["--info", script]);
        assert!(text.starts_with("#!/bin/sh\n") && text.contains("set -e"), "{script}");
        assert!(
            !text.contains("systemctl enable") && !text.contains("systemctl start"),
            "{script}"
        );
    }
    let unpacked = packages.dir.path().join("unpacked");
    succeed(tool("dpkg-deb", "dpkg").arg("--raw-extract").arg(&package).arg(&unpacked));
    succeed(
        tool("md5sum", "coreutils")
            .args(["--quiet", "-c", "DEBIAN/md5sums"])
            .current_dir(&unpacked),
    );
    let program = unpacked.join("usr/bin/tidegate");
    assert!(succeed(Command::new(&program).arg("--version")).starts_with("tidegate "));
    let unit = unpacked.join("usr/lib/systemd/system/tidegate.service");
    assert!(
        std::fs::read_to_string(unit).unwrap().contains("\nExecStart=/usr/bin/tidegate serve ")
    );
}

/// A root of its own: what is changed there is gone with it.
struct Root {
    /// On tmpfs, as an upper layer must be on no layered file system.
    dir: TempDir,
}

impl Root {
    /// What `make` puts into the directory `root`, with the files of the kernel.
    fn made(make: impl FnOnce(&Path)) -> Self {
        let this = Self { dir: scratch() };
        std::fs::create_dir(this.path("")).unwrap();
        make(&this.path(""));
        this.mount(&["-t", "proc", "proc"], "proc");
        this.mount(&["--bind", "/dev"], "dev");
        this.mount(&["--bind", "/dev/shm"], "dev/shm");
        this.mount(&["-t", "tmpfs", "run"], "run");
        this
    }

    /// This machine's files, under a layer that takes what is written.
    fn of_this_machine() -> Self {
        Self::made(|root| {
            let layers = ["upper", "work"].map(|name| root.with_file_name(name));
            for layer in &layers {
                std::fs::create_dir(layer).unwrap();
            }
            let [upper, work] = layers.each_ref().map(|layer| layer.display());
            let mut mount = tool("mount", "mount");
            mount.args(["-t", "overlay", "overlay", "-o"]);
            mount.arg(format!("lowerdir=/,upperdir={upper},workdir={work}"));
            succeed(mount.arg(root));
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("root").join(name)
    }

    fn mount(&self, args: &[&str], at: &str) {
        std::fs::create_dir_all(self.path(at)).unwrap();
        succeed(tool("mount", "mount").args(args).arg(self.path(at)));
    }

    /// `chroot` for `user`.
    fn command(&self, user: &str, args: &[&str]) -> Command {
        let mut chroot = tool("chroot", "coreutils");
        chroot.arg(format!("--userspec={user}")).arg(self.path("")).args(args);
        chroot.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env_remove("NOTIFY_SOCKET");
        chroot
    }

    fn root(&self, args: &[&str]) -> String {
        succeed(&mut self.command("root:root", args))
    }

    fn install(&self, package: &Path) {
        std::fs::copy(package, self.path("root/new.deb")).unwrap();
        self.root(&[
            "env",
            "DEBIAN_FRONTEND=noninteractive",
            "dpkg",
            "--force-unsafe-io",
            "-i",
            "/root/new.deb",
        ]);
    }

    /// Starts what the unit starts, as the user that it names.
    fn serve(&self) -> Server {
        let unit = self.path("usr/lib/systemd/system/tidegate.service");
        let unit = std::fs::read_to_string(unit).unwrap();
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        let user = format!("{}:{}", value("User="), value("Group="));
        self.root(&["install", "-d", "-o", "tidegate", "-g", "tidegate", "/run/tidegate"]);
        let start: Vec<_> = value("ExecStart=").split(' ').collect();
        Server::spawn(self.command(&user, &start).stderr(Stdio::null()))
    }

    fn client(&self) -> Client {
        Client::connect(&self.path("run/tidegate/tidegate.sock")).unwrap()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for at in ["run", "dev/shm", "dev", "proc", ""] {
            let mut umount = Command::new("umount");
            let _ = umount.arg("--lazy").arg(self.path(at)).stderr(Stdio::null()).status();
        }
    }
}

fn a_service_keeps_its_data(root: &Root) {
    let packages = Packages::build(&["1.0", "1.1"]);
    root.install(&packages.path("1.0"));
    let enabled = root.path("etc/systemd/system/multi-user.target.wants/tidegate.service");
    assert!(!enabled.exists() && enabled.symlink_metadata().is_err(), "it is enabled by surprise");
    let pool = "/var/lib/tidegate/db";
    let mut create = root.command("tidegate:tidegate", &["/usr/bin/tidegate", "create", pool]);
    succeed(create.args(["--engine=btt", "--size=32M"]));
    let config = "etc/tidegate/tidegate.toml";
    let mut file = std::fs::File::options().append(true).open(root.path(config)).unwrap();
    writeln!(file, "[[device]]\nexport = \"db\"\npool = \"{pool}\"").unwrap();
    let ours = std::fs::read_to_string(root.path(config)).unwrap();

    let server = root.serve();
    let mut client = root.client();
    client.send_write(1, 8192, &[0x42; 4096]).unwrap();
    assert_eq!(client.receive().unwrap(), (1, 0));
    rustix::process::kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();

    root.install(&packages.path("1.1"));
    assert_eq!(std::fs::read_to_string(root.path(config)).unwrap(), ours, "the file is the user's");
    let server = root.serve();
    assert_eq!(root.client().read(8192, 4096).unwrap(), [0x42; 4096]);
    assert!(server.stop(Signal::TERM).0.success());

    root.root(&["dpkg", "--purge", "tidegate"]);
    assert!(!root.path("usr/bin/tidegate").exists() && !root.path(config).exists());
    assert!(root.path(&pool[1..]).exists(), "a purge removes data");
}

#[test]
fn an_installed_service_is_killed_upgraded_and_keeps_its_data() {
    a_service_keeps_its_data(&Root::of_this_machine());
}

/// The packages of a fresh Debian come from the mirrors.
#[cfg(feature = "soak")]
#[test]
fn the_same_holds_in_a_fresh_debian() {
    let suite =
        succeed(Command::new("sh").args(["-c", ". /etc/os-release; echo $VERSION_CODENAME"]));
    let root = Root::made(|root| {
        let mut make = tool("debootstrap", "debootstrap");
        succeed(make.args(["--variant=minbase", suite.trim()]).arg(root));
    });
    a_service_keeps_its_data(&root);
}
