//! Power cuts that once left files worse than without Tidegate: whatever a program calls, each file
//! is left as plain ext4 may leave it. Each case is also run plain, which shows that what it allows
//! is what ext4 does.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::bed::{Bed, Runner, replay};
use crate::crash::Workers;
use crate::power::Disk;
use crate::programs::{compiled, source};
use crate::support::{ok, preload_library, run, scratch, succeed, tidegate, tool};
use crate::traced::Traced;

/// The files of a directory and what is in them.
type Files = BTreeMap<String, Vec<u8>>;

/// What happens between the program's last call and the power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    /// The journal commits, since a process outside syncs another file.
    Commit,
}

/// A shell script whose power is cut.
struct Case<'a> {
    /// The files that are there before, on the disk.
    files: &'a [(&'a str, &'a [u8])],
    script: &'a str,
}

impl Case<'_> {
    /// Checks what each of the runs leaves: plain or not, its files covered before or not, with a
    /// commit or without one.
    fn check(&self, is_allowed: impl Fn(&Files, Before) -> bool) {
        let mut disk = Disk::new();
        let pool = disk.pool();
        for before in [Before::Nothing, Before::Commit] {
            for (runner, covered) in
                [(Runner::Plain, false), (Runner::Run(&pool), false), (Runner::Run(&pool), true)]
            {
                let found = self.cut(&mut disk, runner, covered, before);
                let shown = shown(&found);
                assert!(
                    is_allowed(&found, before),
                    "{runner:?}, covered {covered}, {before:?}: {shown:?}"
                );
            }
        }
    }

    fn cut(&self, disk: &mut Disk, runner: Runner<'_>, covered: bool, before: Before) -> Files {
        let dir = disk.mount_point().join("case");
        std::fs::create_dir(&dir).unwrap();
        for (name, content) in self.files {
            std::fs::write(dir.join(name), content).unwrap();
        }
        sync_file_system(&disk.mount_point());
        let mut command = runner.command("/usr/bin/python3", &dir);
        let script = format!("set -e; {}; echo done; exec sleep 1000", self.script);
        command.arg("-B").arg(source("cover.py")).arg(script);
        if covered {
            command.args(self.files.iter().map(|(name, _)| name));
        }
        let mut workers = Workers::spawn(command, &disk.pool());
        workers.wait_for_line("done");
        if before == Before::Commit {
            let mut outside = File::create(disk.mount_point().join("outside")).unwrap();
            outside.write_all(b"outside").unwrap();
            outside.sync_all().unwrap();
        }
        disk.lose_power(workers, "none");
        if let Runner::Run(pool) = runner {
            replay(pool, None);
        }
        let found = files_in(&dir);
        std::fs::remove_dir_all(&dir).unwrap();
        found
    }
}

fn sync_file_system(mount_point: &Path) {
    rustix::fs::syncfs(File::open(mount_point).unwrap()).unwrap();
}

fn files_in(dir: &Path) -> Files {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    entries.map(|entry| (name(&entry.path()), std::fs::read(entry.path()).unwrap())).collect()
}

/// For people: the length of each file and how it begins.
fn shown(files: &Files) -> Vec<String> {
    let begin = |content: &[u8]| content[..content.len().min(20)].escape_ascii().to_string();
    let lines = files.iter().map(|(name, it)| format!("{name}: {} {}", it.len(), begin(it)));
    lines.collect()
}

fn content<'f>(files: &'f Files, name: &str) -> Option<&'f [u8]> {
    files.get(name).map(Vec::as_slice)
}

#[test]
fn a_file_that_sed_replaces_is_old_or_new() {
    let case = Case { files: &[("final", b"it is OLD\n")], script: "sed -i s/OLD/NEW/g final" };
    case.check(|found, before| match content(found, "final") {
        Some(b"it is NEW\n") => true,
        Some(b"it is OLD\n") => before == Before::Nothing,
        _ => false,
    });
}

#[test]
fn a_file_that_a_copy_is_renamed_over_is_old_or_new() {
    let files: &[(&str, &[u8])] = &[("final", b"old"), ("other", b"new")];
    let case = Case { files, script: "cp other tmp && mv tmp final" };
    case.check(|found, before| match content(found, "final") {
        Some(b"new") => true,
        Some(b"old") => before == Before::Nothing,
        _ => false,
    });
}

const OLD: [u8; 10_000] = [b'o'; 10_000];
const NEW: &[u8] = b"0123456789";

/// Neither new bytes before old ones, nor old bytes behind a commit.
fn is_old_empty_or_new(found: &Files, before: Before) -> bool {
    match content(found, "final") {
        Some(b"" | NEW) => true,
        Some(found) => found == OLD && before == Before::Nothing,
        None => false,
    }
}

#[test]
fn a_file_that_is_emptied_when_it_is_opened_is_no_mixture() {
    let case = Case { files: &[("final", &OLD)], script: "printf 0123456789 > final" };
    case.check(is_old_empty_or_new);
}

#[test]
fn a_file_that_is_emptied_first_of_all_is_no_mixture() {
    let script = "/usr/bin/python3 -c 'import os
file = os.open(\"final\", os.O_RDWR)
os.ftruncate(file, 0)
os.write(file, b\"0123456789\")'";
    Case { files: &[("final", &OLD)], script }.check(is_old_empty_or_new);
}

#[test]
fn a_file_that_is_emptied_and_synced_is_new() {
    for empty in ["os.ftruncate(file, 0)", "os.close(os.open(\"final\", os.O_WRONLY | os.O_TRUNC))"]
    {
        let script = format!(
            "/usr/bin/python3 -c 'import os
file = os.open(\"final\", os.O_RDWR)
{empty}
os.write(file, b\"0123456789\")
os.fsync(file)'"
        );
        let case = Case { files: &[("final", &OLD)], script: &script };
        case.check(|found, _| content(found, "final") == Some(NEW));
    }
}

#[test]
fn a_synced_file_of_a_static_program_is_not_lost_by_a_rename() {
    let program = compiled("static", &["-static"]);
    let script = format!("printf one > tmp; {} tmp; sync tmp; mv tmp final", program.display());
    let case = Case { files: &[("final", b"old")], script: &script };
    case.check(|found, before| {
        let new = Some(&b"one two "[..]);
        match (content(found, "final"), content(found, "tmp")) {
            (found, None) => found == new,
            (Some(b"old"), found) => found == new && before == Before::Nothing,
            _ => false,
        }
    });
}

/// It has a dynamic linker, and makes its system calls itself.
#[test]
fn what_a_go_program_has_synced_is_not_older() {
    let script = format!("{} final", compiled("go", &[]).display());
    let case = Case { files: &[("final", b"old")], script: &script };
    case.check(|found, _| content(found, "final") == Some(b"new"));
}

/// Its rename is unseen, and the sync of its directory would commit it.
#[test]
fn what_a_program_has_renamed_by_a_call_of_its_own_is_there_when_its_directory_was_synced() {
    let script = format!("{} tmp final", compiled("own", &[]).display());
    let case = Case { files: &[("final", b"old")], script: &script };
    case.check(|found, _| {
        content(found, "final") == Some(b"new") && content(found, "tmp").is_none()
    });
}

#[test]
fn a_rename_by_io_uring_is_there_when_its_directory_was_synced() {
    let program = compiled("uring", &[]);
    let script = format!("{} tmp final", program.display());
    let files: &[(&str, &[u8])] = &[("final", b"old"), ("tmp", b"new")];
    let case = Case { files, script: &script };
    case.check(|found, _| {
        content(found, "final") == Some(b"new") && content(found, "tmp").is_none()
    });
}

/// Punches a hole by a shared mapping that is only readable, by each name of the call.
#[test]
fn a_hole_by_advice_about_a_readable_mapping_is_there_after_a_sync() {
    let number = if cfg!(target_arch = "x86_64") { 28 } else { 233 };
    for advise in [
        "memory.madvise(mmap.MADV_REMOVE, 4096, 4096)",
        "c.posix_madvise(at, length, 9)",
        &format!("c.syscall({number}, at, length, 9)"),
        "c.process_madvise(os.pidfd_open(os.getpid()), (ctypes.c_void_p * 2)(at, 4096), 1, 9, 0)",
    ] {
        let script = format!(
            "/usr/bin/python3 -c 'import ctypes, mmap, os
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
file = os.open(\"file\", os.O_RDWR)
memory = mmap.mmap(file, 16384, mmap.MAP_SHARED, mmap.PROT_READ)
start = c.mmap(None, ctypes.c_size_t(16384), 1, 1, file, ctypes.c_long(0))
at, length = ctypes.c_void_p(start + 4096), ctypes.c_size_t(4096)
os.pwrite(file, b\"n\" * 16384, 0)
os.fdatasync(file)
{advise}
os.fsync(file)'"
        );
        let case = Case { files: &[("file", &[b'o'; 16384])], script: &script };
        let expected = [&[b'n'; 4096][..], &[0; 4096], &[b'n'; 8192]].concat();
        // Older kernels take this advice from `madvise` only.
        let is_optional = advise.starts_with("c.process");
        case.check(|found, _| {
            let found = content(found, "file");
            found == Some(&expected) || is_optional && found == Some(&[b'n'; 16384])
        });
    }
}

/// A program that writes and does not sync.
const WITHOUT_SYNC: &str = "import os, time
file = os.open('file', os.O_RDWR)
os.pwrite(file, b'new', 0)
os.close(os.open('done', os.O_WRONLY | os.O_CREAT))
print('done', flush=True)
time.sleep(1000)";

#[test]
fn with_every_write_what_was_written_is_not_lost() {
    for (options, expected) in [(&["--every-write"][..], b"new"), (&[], b"old")] {
        let mut disk = Disk::new();
        std::fs::write(disk.mount_point().join("file"), "old").unwrap();
        sync_file_system(&disk.mount_point());
        preload_library();
        let mut command = tidegate();
        command.args(["run", "--size=64M", "--pool"]).arg(disk.pool()).args(options);
        command.args(["--", "/usr/bin/python3", "-c", WITHOUT_SYNC]);
        command.current_dir(disk.mount_point());
        let mut workers = Workers::spawn(command, &disk.pool());
        workers.wait_for_line("done");
        disk.lose_power(workers, "none");
        replay(&disk.pool(), None);
        let found = std::fs::read(disk.mount_point().join("file")).unwrap();
        assert!(found == expected, "{options:?}: {}", found.escape_ascii());
    }
}

#[test]
fn with_every_write_a_stream_over_a_descriptor_is_synced_when_it_ends() {
    for way in ["fclose", "fcloseall", "exit"] {
        let mut disk = Disk::new();
        preload_library();
        let mut command = tidegate();
        command.args(["run", "--size=64M", "--every-write", "--pool"]).arg(disk.pool()).arg("--");
        command.arg(compiled("streams", &[])).arg(way).current_dir(disk.mount_point());
        let mut workers = Workers::spawn(command, &disk.pool());
        workers.wait_for_line("done");
        disk.lose_power(workers, "none");
        replay(&disk.pool(), None);
        let found = std::fs::read(disk.mount_point().join("written")).unwrap_or_default();
        assert!(found == b"new", "{way}: {}", found.escape_ascii());
    }
}

/// A first writer is stopped when the kernel has entered its write; a second one writes and syncs
/// the same bytes.
struct StoppedWriter {
    disk: Disk,
    workers: Workers,
    traced: Traced,
}

impl StoppedWriter {
    fn new(plain: bool) -> Self {
        let disk = Disk::new();
        let pool = disk.pool();
        let runner = if plain { Runner::Plain } else { Runner::Run(&pool) };
        let mut command = runner.command("/usr/bin/python3", &disk.mount_point());
        command.arg("-B").arg(source("writers.py"));
        let mut workers = Workers::spawn(command, &pool);
        let mut traced = Traced::start(&[], &workers.wait_for_word("child"));
        let go = |name| std::fs::write(disk.mount_point().join(name), "").unwrap();
        go("first");
        traced.wait_for("stopped");
        go("second");
        workers.wait_for_line("second has written");
        Self { disk, workers, traced }
    }

    /// What the file has after a power cut and recovery.
    fn cut(self, plain: bool) -> Vec<u8> {
        let Self { mut disk, workers, traced } = self;
        disk.lose_power(workers, "none");
        drop(traced);
        if !plain {
            replay(&disk.pool(), None);
        }
        std::fs::read(disk.mount_point().join("file")).unwrap()
    }
}

#[test]
fn what_was_synced_behind_a_stopped_writer_is_not_older() {
    for plain in [true, false] {
        let found = StoppedWriter::new(plain).cut(plain);
        assert!(found == [b'B'; 4096], "plain {plain}: {}", found[..9].escape_ascii());
    }
}

#[test]
fn a_stopped_writer_that_goes_on_writes_last() {
    for plain in [true, false] {
        let mut stopped = StoppedWriter::new(plain);
        stopped.traced.release();
        stopped.workers.wait_for_line("first has written");
        let found = stopped.cut(plain);
        assert!(found == [b'A'; 4096], "plain {plain}: {}", found[..9].escape_ascii());
    }
}

const FILE_BYTES: usize = 60_000;

/// An ext4 that cannot write back one file once its image has a hole there, in a tmpfs without free
/// space.
struct FullDisk {
    dir: tempfile::TempDir,
}

impl FullDisk {
    fn new() -> Self {
        let this = Self { dir: scratch() };
        let mount = || tool("mount", "mount");
        succeed(mount().args(["-t", "tmpfs", "-o", "size=72M", "tmpfs"]).arg(this.dir.path()));
        std::fs::create_dir(this.mount_point()).unwrap();
        let image = this.image();
        succeed(tool("truncate", "coreutils").args(["-s", "64M"]).arg(&image));
        succeed(tool("mkfs.ext4", "e2fsprogs").args(["-q", "-b4096"]).arg(&image));
        succeed(tool("fallocate", "util-linux").args(["-l", "64M"]).arg(&image));
        succeed(mount().args(["-o", "loop"]).arg(&image).arg(this.mount_point()));
        std::fs::write(this.file(), vec![b'o'; FILE_BYTES]).unwrap();
        sync_file_system(&this.mount_point());
        this
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn file(&self) -> PathBuf {
        self.mount_point().join("file")
    }

    /// Where the file is on the disk, in bytes.
    fn offset(&self) -> u64 {
        let mut filefrag = tool("filefrag", "e2fsprogs");
        let printed = succeed(filefrag.args(["-v", "-b4096"]).arg(self.file()));
        let extents: Vec<_> =
            printed.lines().filter(|line| line.trim_start().starts_with("0:")).collect();
        assert!(extents.len() == 1 && printed.contains("1 extent found"), "{printed}");
        let place = extents[0].split(':').nth(2).and_then(|range| range.split("..").next());
        let block: u64 = place.and_then(|it| it.trim().parse().ok()).expect("a block");
        block * 4096
    }

    /// From now on the file cannot be written back.
    fn take_space(&self) {
        sync_file_system(&self.mount_point());
        let mut punch = tool("fallocate", "util-linux");
        punch.args(["--punch-hole", "-o", &self.offset().to_string(), "-l", "61440"]);
        succeed(punch.arg(self.image()));
        let mut rest = File::create(self.dir.path().join("rest")).unwrap();
        std::io::copy(&mut std::io::repeat(0), &mut rest).expect_err("the tmpfs has an end");
    }

    fn give_space(&self) {
        std::fs::remove_file(self.dir.path().join("rest")).unwrap();
    }

    /// What the disk has, not the page cache.
    fn on_disk(&self) -> Vec<u8> {
        let image = std::fs::read(self.image()).unwrap();
        let start = usize::try_from(self.offset()).unwrap();
        image[start..start + FILE_BYTES].to_vec()
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        for path in [self.mount_point(), self.dir.path().to_path_buf()] {
            let _ = tool("umount", "mount").arg("-l").arg(path).status();
        }
    }
}

/// A program that writes and syncs when it is told to.
struct Commanded {
    workers: Workers,
    pipe: File,
    number: usize,
}

impl Commanded {
    fn start(runner: Runner<'_>, pool: &Path, dir: &Path, pipe: &Path) -> Self {
        rustix::fs::mknodat(rustix::fs::CWD, pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        let mut command = runner.command("/usr/bin/python3", dir);
        command.arg("-B").arg(source("commanded.py")).arg(pipe);
        let mut workers = Workers::spawn(command, pool);
        workers.wait_for_line("ready");
        Self { workers, pipe: File::options().write(true).open(pipe).unwrap(), number: 0 }
    }

    /// How the call went: OK, or the error's name.
    fn tell(&mut self, what: &str) -> String {
        writeln!(self.pipe, "{what}").unwrap();
        self.number += 1;
        self.workers.wait_for_word(&(self.number - 1).to_string())
    }
}

/// The error of a write-back is told to the sync of a process outside first.
fn error_that_is_seen_outside_first(see: impl Fn(&FullDisk, &File) -> std::io::Result<()>) {
    let bed = Bed::new();
    for plain in [true, false] {
        let (full, pool) = (FullDisk::new(), bed.pool());
        let runner = if plain { Runner::Plain } else { Runner::Run(&pool) };
        let pipe = bed.pool_dir().join(format!("pipe.{plain}"));
        let mut program = Commanded::start(runner, &pool, &full.mount_point(), &pipe);
        full.take_space();
        let outside = File::open(full.file()).unwrap();
        assert_eq!(program.tell("write"), "OK");
        see(&full, &outside).expect_err("the disk is full");
        see(&full, &outside).expect("it was told once");
        if plain {
            assert_ne!(program.tell("sync"), "OK");
        } else {
            // The log has the bytes, until the supervisor finds that the disk did not take them.
            let flushed = run(["flush".as_ref(), pool.as_os_str()]);
            assert!(!flushed.status.success(), "{flushed:?}");
            assert_eq!(program.tell("sync"), "EIO");
            full.give_space();
            println!("{}", ok(["flush".as_ref(), pool.as_os_str()]));
            // The program's own descriptor has not seen the kernel's error: a sync that is real
            // tells it.
            let then = [program.tell("sync"), program.tell("sync")];
            assert_eq!(then[1], "OK", "{then:?}");
            assert!(full.on_disk() == b"new".repeat(20_000), "the disk has not what was written");
        }
        program.workers.tree.kill();
        program.workers.collect(bed.pool_dir());
        crate::process_tree::await_nobody_uses(&pool);
    }
}

#[test]
fn an_error_that_an_fsync_outside_saw_first() {
    error_that_is_seen_outside_first(|_, outside| outside.sync_all());
}

#[test]
fn an_error_that_a_syncfs_outside_saw_first() {
    error_that_is_seen_outside_first(|_, outside| Ok(rustix::fs::syncfs(outside)?));
}
