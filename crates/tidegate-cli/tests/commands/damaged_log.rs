//! A log that has lost what was acknowledged: `check`, `serve` and `recover` say what, none goes on
//! by itself, and `recover --salvage` does.

use std::fs::File;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use rustix::process::Signal;
use tidegate::log::layout::RING_OFFSET;
use tidegate::log::recover::{file_system_id, handle_of, identity_of};
use tidegate::log::{
    CONTROL_BYTES, CoverState, Definition, FileKey, Header, Log, LogOptions, LogPool, RecordKind,
    Ring, Scanner, create,
};
use tidegate::pmem::{Region, RegionOptions, SharedMemory};

use crate::behind::{Scene, kill, read, write};
use crate::killed_cache::{self, killed_cache};
use crate::support::{ok, run, scratch};

fn open_pool(path: &Path) -> LogPool {
    LogPool::open(Arc::new(Region::open(path, &RegionOptions::default()).unwrap())).unwrap()
}

/// The records of writes, from the first one on.
fn writes(pool: &LogPool) -> Vec<Header> {
    let records = Scanner::new(pool, pool.tail().unwrap(), pool.limit().unwrap());
    records.filter(|record| record.kind == RecordKind::Write).collect()
}

/// Writes over bytes of the log.
fn spoil(pool: &LogPool, position: u64, bytes: &[u8]) {
    let at = pool.superblock().data_offset + RING_OFFSET + position % pool.ring_bytes();
    pool.region().write(at, bytes).unwrap();
}

fn command(name: &str, pool: &Path, more: &[&str]) -> Output {
    run([&[name, pool.to_str().unwrap()], more].concat())
}

/// What the command says when it fails.
fn failure(name: &str, pool: &Path, more: &[&str]) -> String {
    let output = command(name, pool, more);
    assert_eq!(output.status.code(), Some(1), "{name}");
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

/// A log of four writes to three blocks, whose server was killed.
fn killed() -> Scene {
    let scene = Scene::new("log");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    for (lba, byte) in [(3, 1), (3, 2), (5, 3), (7, 4)] {
        write(&mut client, lba, byte);
    }
    kill(server);
    scene
}

#[test]
fn a_damaged_write_of_a_device_is_named_and_what_comes_back_too() {
    let scene = killed();
    let pool = open_pool(&scene.pool());
    let found = writes(&pool);
    spoil(&pool, found[1].data_position() + 100, &[9; 16]);
    drop(pool);
    let expected = format!(
        "the record at position {} of the log, 4096 bytes at offset 12288, was acknowledged and is damaged; without it \
         that of position {} comes back",
        found[1].position, found[0].position
    );
    for said in [
        failure("check", &scene.pool(), &[]),
        failure("check", &scene.pool(), &["--repair"]),
        failure("recover", &scene.pool(), &[]),
        scene.refusal(&[&scene.backing("disk")]),
        scene.refusal(&[&scene.backing("disk"), "--force"]),
    ] {
        assert!(said.contains(&expected), "{said}");
    }
    let refused = scene.refusal(&[&scene.backing("disk")]);
    assert!(refused.contains("tidegate recover --salvage"), "{refused}");
    let advised = failure("check", &scene.pool(), &[]);
    let expected_advice = "check --repair` restores what the pool itself proves; for the rest \
                           restore a backup, or go on without it: `tidegate recover --salvage`";
    assert!(advised.ends_with(&format!("{expected_advice}\n")), "{advised}");
    let advised = failure("check", &scene.pool(), &["--repair"]);
    let expected_advice = "1 fault that cannot be repaired; restore a backup, or go on without \
                           what is damaged: `tidegate recover --salvage`";
    assert!(advised.ends_with(&format!("{expected_advice}\n")), "{advised}");
    assert_eq!(scene.in_file("disk", 5), 0, "nothing was written to the backing");
    let said = ok(["recover", scene.pool().to_str().unwrap(), "--salvage"]);
    assert!(said.contains("1 lost part passed over") && said.contains(&expected), "{said}");
    assert_eq!([3, 5, 7].map(|lba| scene.in_file("disk", lba)), [1, 3, 4]);
    assert!(command("check", &scene.pool(), &[]).status.success());
    let server = scene.serve("disk", &[]);
    assert_eq!(read(&mut scene.client(), 3), 1);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn writes_of_a_device_that_are_gone_are_missed() {
    let scene = killed();
    let pool = open_pool(&scene.pool());
    let found = writes(&pool);
    spoil(&pool, found[2].position, &[9; 4160]);
    drop(pool);
    let expected =
        format!("4160 bytes of the log from position {} on were acknowledged", found[2].position);
    for name in ["check", "recover"] {
        let said = failure(name, &scene.pool(), &[]);
        assert!(said.contains(&expected), "{said}");
    }
    ok(["recover", scene.pool().to_str().unwrap(), "--salvage"]);
    assert_eq!([3, 5, 7].map(|lba| scene.in_file("disk", lba)), [2, 0, 4]);
}

#[test]
fn of_the_last_write_nobody_can_know_and_the_check_says_so() {
    let scene = killed();
    let pool = open_pool(&scene.pool());
    let found = writes(&pool);
    spoil(&pool, found[3].position, &[9; 4160]);
    drop(pool);
    let said = ok(["check", scene.pool().to_str().unwrap()]);
    let expected = format!("whether records from position {} on", found[2].position);
    assert!(said.contains(&expected), "{said}");
    let server = scene.serve("disk", &[]);
    assert_eq!([3, 5, 7].map(|lba| read(&mut scene.client(), lba)), [2, 3, 0]);
    assert!(server.stop(Signal::TERM).0.success());
}

/// The advice is that of what is damaged: a dirty page of a cache cannot be salvaged, nor read.
#[test]
fn a_damaged_dirty_page_of_a_cache_has_advice_of_its_own() {
    let scene = killed_cache();
    // Not the page that was written last: a crash could have left that one.
    killed_cache::damage(&scene, (0xC3, 4), 0, b"other bytes");
    for more in [&[][..], &["--repair"]] {
        let said = failure("check", &scene.pool(), more);
        assert!(said.contains("the data of the dirty page at offset"), "{said}");
        let advice = "a read of a damaged dirty page fails until all of the page is written anew: \
                      restore it from a backup\n";
        assert!(said.ends_with(advice) && !said.contains("salvage"), "{said}");
    }
}

/// A pool with records of two files, as a supervisor leaves it that lost its power.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let this = Self { folder: scratch() };
        let pool = this.path("pool");
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(&pool).unwrap();
        file.set_len(8 << 20).unwrap();
        let region = Arc::new(Region::open(&pool, &RegionOptions::default()).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        let pool = LogPool::open(region).unwrap();
        let ring_bytes = pool.ring_bytes();
        let control = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
        let log = Ring::start(pool, control, ring_bytes).map(Log::over).unwrap();
        this.cover(&log, "one");
        this.cover(&log, "two");
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn content(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// A file of dots, of which the log has what follows.
    fn cover(&self, log: &Log, name: &str) {
        let path = self.path(name);
        std::fs::write(&path, "........").unwrap();
        let file = File::open(&path).unwrap();
        let stat = file.metadata().unwrap();
        let identity = identity_of(&file).unwrap();
        let definition = Definition {
            identity,
            file_system: file_system_id(&file).unwrap_or_default(),
            handle: handle_of(&file).unwrap(),
            covered: false,
            starts: true,
            size_bytes: 0,
            device: stat.dev(),
            inode: stat.ino(),
            path: path.as_os_str().as_bytes(),
        };
        let key = FileKey { device: stat.dev(), inode: stat.ino(), identity };
        let guard = log.lock(log.entry_for(&key).unwrap()).unwrap();
        guard.begin_story(&definition, 0).unwrap();
        let (unlogged, synced_from) = (guard.unlogged(), log.ring().head());
        let state = CoverState { unlogged, synced_from, size: 8, is_dense: true };
        assert!(guard.cover(&state, &definition).unwrap());
        let mut ticket = guard.begin().unwrap();
        for (offset, data) in [(0, name), (5, name)] {
            ticket.write(offset, &[IoSlice::new(data.as_bytes())], false).unwrap();
        }
    }
}

#[test]
fn a_damaged_write_of_a_file_is_named_and_the_file_is_left_alone() {
    let files = Files::new();
    let pool = open_pool(&files.path("pool"));
    let found = writes(&pool);
    // The last one of its file: no record of that file follows, but one of another.
    spoil(&pool, found[1].data_position(), b"#");
    drop(pool);
    // Not the undamaged write before it: the file is in the log whole, or not at all.
    let expected = format!(
        "one: the record at position {} of the log, 3 bytes at offset 5, was acknowledged and is damaged; \
         what is left without it is the file as its disk has it",
        found[1].position
    );
    let said = failure("check", &files.path("pool"), &[]);
    assert!(said.contains(&expected) && said.contains("1 fault"), "{said}");
    let said = failure("recover", &files.path("pool"), &[]);
    assert!(said.contains(&expected) && said.contains("--salvage"), "{said}");
    assert_eq!(files.content("two"), "........", "nothing was touched");
    ok(["recover", files.path("pool").to_str().unwrap(), "--salvage"]);
    assert_eq!([files.content("one"), files.content("two")], ["........", "two..two"]);
}

#[test]
fn writes_of_files_that_are_gone_are_missed() {
    let files = Files::new();
    let pool = open_pool(&files.path("pool"));
    let found = writes(&pool);
    spoil(&pool, found[0].position, &[9; 128]);
    drop(pool);
    let expected = format!(
        "128 bytes of the log from position {} on were acknowledged and are lost, and of which files they told",
        found[0].position
    );
    for name in ["check", "recover"] {
        let said = failure(name, &files.path("pool"), &[]);
        assert!(said.contains(&expected), "{said}");
    }
    ok(["recover", files.path("pool").to_str().unwrap(), "--salvage"]);
    assert_eq!([files.content("one"), files.content("two")], [".....one", "two..two"]);
}
