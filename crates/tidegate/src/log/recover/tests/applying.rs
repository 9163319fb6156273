//! Single histories, applied to real files.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use parking_lot::Mutex;
use rustix::io::Errno;
use tempfile::TempDir;
use uuid::Uuid;

use super::journal::Journal;
use super::test_files::{TestFiles, Trouble};
use crate::log::recover::{
    ApplyOptions, Failure, FileSystem, Finding, LocalFiles, Outcome, Progress, apply,
};

struct World {
    folder: TempDir,
    log: Journal,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        Self { folder, log: Journal::default() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("temporary paths are text").into()
    }

    /// A file that is there, and its identity.
    fn put(&self, name: &str, bytes: &str) -> u64 {
        fs::write(self.path(name), bytes).expect("a small file can be written");
        self.identity(name)
    }

    fn identity(&self, name: &str) -> u64 {
        let path = PathBuf::from(self.path(name));
        LocalFiles.look(&path).expect("it can be looked at").expect("it is there").identity
    }

    /// A file that is there and that the log knows.
    fn known(&mut self, file: u64, name: &str, bytes: &str) -> u64 {
        let identity = self.put(name, bytes);
        self.log.define(file, identity, false, &self.path(name));
        identity
    }

    fn rename(&mut self, file: u64, from: &str, to: &str, replaced: u64) {
        let (from, to) = (self.path(from), self.path(to));
        self.log.rename(file, &from, &to, replaced);
    }

    fn recover(&mut self) -> Outcome {
        self.recover_with(&TestFiles::new(Trouble::None))
    }

    fn recover_with(&mut self, files: &TestFiles) -> Outcome {
        let plan = self.log.plan();
        let mut noted = self.log.clone();
        let options = ApplyOptions { pool: Uuid::nil(), workers: 2 };
        let outcome = apply(&plan, &self.log, files, options, &|_| (), &mut |new| {
            noted.note(&new);
            Ok(())
        });
        self.log = noted;
        outcome
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path(name)).ok()
    }

    /// All names.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).expect("the folder can be read");
        let name = |entry: io::Result<fs::DirEntry>| {
            entry.expect("the folder can be read").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<_> = entries.map(name).collect();
        names.sort();
        names
    }
}

fn complete(outcome: &Outcome) {
    assert!(outcome.is_complete(), "{:?}", outcome.failures);
}

#[test]
fn two_files_swap_their_names() {
    for without_links in [false, true] {
        let mut world = World::new();
        world.known(1, "a", "one");
        world.known(2, "b", "two");
        world.rename(1, "a", "t", 0);
        world.rename(2, "b", "a", 0);
        world.rename(1, "t", "b", 0);
        let mut files = TestFiles::new(Trouble::None);
        files.without_links = without_links;
        let outcome = world.recover_with(&files);
        // Both names are to be kept, by the other file: without links, either file moves to its temporary name first.
        complete(&outcome);
        assert_eq!((world.read("a"), world.read("b")), (Some("two".into()), Some("one".into())));
        assert_eq!(world.names(), ["a", "b"]);
    }
}

#[test]
fn names_go_round_in_circles() {
    let mut world = World::new();
    for (file, name) in [(1, "a"), (2, "b"), (3, "c")] {
        world.known(file, name, name);
    }
    world.rename(3, "c", "t", 0);
    world.rename(2, "b", "c", 0);
    world.rename(1, "a", "b", 0);
    world.rename(3, "t", "a", 0);
    complete(&world.recover());
    assert_eq!(["a", "b", "c"].map(|name| world.read(name).expect("there")), ["c", "a", "b"]);
    assert_eq!(world.names(), ["a", "b", "c"]);
}

#[test]
fn a_lost_file_is_made_again_with_its_directory_owner_and_mode() {
    let mut world = World::new();
    let path = world.path("x/y/file");
    world.log.define(1, 11, true, &path);
    world.log.write(1, 0, b"hello");
    world.log.write(1, 5, b" world");
    world.log.set_size(1, 20);
    world.log.zero(1, 0, 2);
    let outcome = world.recover();
    complete(&outcome);
    assert_eq!((outcome.files_created, outcome.names_placed, outcome.written_bytes), (1, 1, 9));
    let mut expected = b"\0\0llo world".to_vec();
    expected.resize(20, 0);
    assert_eq!(fs::read(&path).expect("it is there"), expected);
    let mode = fs::metadata(&path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);
    let folder = fs::metadata(world.path("x")).expect("it is there");
    assert_eq!(folder.permissions().mode() & 0o777, 0o700);
    let before = world.identity("x/y/file");
    complete(&world.recover());
    assert_eq!(world.identity("x/y/file"), before, "a second recovery finds what the first made");
}

#[test]
fn what_the_log_does_not_know_is_not_touched() {
    let mut world = World::new();
    world.put("a", "stranger");
    let path = world.path("a");
    world.log.define(1, 11, true, &path);
    world.log.write(1, 0, b"mine");
    let outcome = world.recover();
    assert!(matches!(outcome.failures[..], [Failure::Occupied { .. }]));
    assert_eq!(world.read("a").as_deref(), Some("stranger"));
    // It is moved away: the next recovery has the rest already.
    fs::rename(world.path("a"), world.path("stranger")).expect("a file can be renamed");
    complete(&world.recover());
    assert_eq!(world.read("a").as_deref(), Some("mine"));
    assert_eq!(world.names(), ["a", "stranger"]);
}

#[test]
fn a_stranger_that_the_log_saw_replaced_is_replaced() {
    let mut world = World::new();
    let old = world.put("a", "old");
    world.known(1, "t", "new");
    world.rename(1, "t", "a", old);
    complete(&world.recover());
    assert_eq!(world.read("a").as_deref(), Some("new"));
    assert_eq!(world.names(), ["a"]);
}

#[test]
fn a_removed_name_goes_only_with_the_file_that_had_it() {
    let mut world = World::new();
    world.known(1, "a", "dead");
    let (a, b) = (world.path("a"), world.path("b"));
    world.log.unlink(1, &a);
    world.log.define(2, 12, true, &b);
    world.log.unlink(2, &b);
    world.put("b", "stranger");
    let outcome = world.recover();
    complete(&outcome);
    assert_eq!(world.names(), ["b"]);
    assert_eq!(outcome.names_removed, 1);
}

#[test]
fn a_symbolic_link_is_not_followed() {
    let mut world = World::new();
    let target = world.known(1, "target", "bytes");
    fs::create_dir(world.path("sub")).expect("a folder can be made");
    fs::rename(world.path("target"), world.path("sub/elsewhere")).expect("a file can be renamed");
    symlink(world.path("sub/elsewhere"), world.path("target")).expect("a link can be made");
    world.log.write(1, 0, b"BYTES");
    let outcome = world.recover();
    assert!(matches!(outcome.failures[..], [Failure::Missing { .. }]));
    assert_eq!(world.identity("sub/elsewhere"), target);
    assert_eq!(world.read("sub/elsewhere").as_deref(), Some("bytes"));
}

#[test]
fn a_missing_file_that_was_not_made_here_is_reported_and_the_others_go_on() {
    let mut world = World::new();
    world.known(1, "a", "a");
    world.known(2, "b", "b");
    fs::remove_file(world.path("a")).expect("a file can be removed");
    world.log.write(1, 0, b"A");
    world.log.write(2, 0, b"B");
    let outcome = world.recover();
    assert!(matches!(outcome.failures[..], [Failure::Missing { .. }]));
    assert_eq!(world.read("b").as_deref(), Some("B"));
}

#[test]
fn a_file_whose_last_rename_was_lost_is_found_beside_its_name() {
    let mut world = World::new();
    world.put("file", "old");
    world.known(1, "temp", "new");
    world.known(2, "moved", "two");
    let (file, moved) = (world.path("file"), world.path("moved"));
    let identity = world.identity("temp");
    world.log.records.clear();
    // What the log saw at these names is still at others.
    world.log.define(1, identity, false, &file);
    world.log.write(1, 0, b"NEW");
    let identity = world.identity("moved");
    world.log.define(2, identity, false, &world.path("before"));
    world.log.rename(2, &world.path("before"), &world.path("after"), 0);
    let outcome = world.recover();
    complete(&outcome);
    assert_eq!(world.read("file").as_deref(), Some("old"), "the log does not know that one");
    assert_eq!(world.read("temp").as_deref(), Some("NEW"));
    assert_eq!(world.read("after").as_deref(), Some("two"));
    assert_eq!(world.names(), ["after", "file", "moved", "temp"]);
    assert!(matches!(outcome.findings.kept(), [Finding::Elsewhere { .. }]));
    assert!(PathBuf::from(moved).exists());
}

#[test]
fn a_name_that_the_log_does_not_have_keeps_a_dead_file_alive() {
    let mut world = World::new();
    world.known(1, "a", "old");
    fs::hard_link(world.path("a"), world.path("other")).expect("a file can be linked");
    world.log.write(1, 0, b"new");
    let path = world.path("a");
    world.log.unlink(1, &path);
    complete(&world.recover());
    assert_eq!(world.names(), ["other"]);
    assert_eq!(world.read("other").as_deref(), Some("new"));
}

#[test]
fn what_an_interrupted_recovery_left_without_a_note_is_removed() {
    let mut world = World::new();
    let path = world.path("a");
    world.log.define(1, 11, true, &path);
    world.log.write(1, 0, b"all of it");
    let id = world.log.id(1);
    world.put(&format!(".tidegate-recover-{}-{id}", Uuid::nil()), "a part");
    complete(&world.recover());
    assert_eq!(world.names(), ["a"]);
    assert_eq!(world.read("a").as_deref(), Some("all of it"));
}

#[test]
fn without_the_note_nothing_gets_its_name() {
    let mut world = World::new();
    let path = world.path("a");
    world.log.define(1, 11, true, &path);
    let plan = world.log.plan();
    let options = ApplyOptions { pool: Uuid::nil(), workers: 1 };
    let files = TestFiles::new(Trouble::None);
    let outcome =
        apply(&plan, &world.log, &files, options, &|_| (), &mut |_| Err(Errno::NOSPC.into()));
    assert!(matches!(outcome.failures[..], [Failure::Io { .. }]));
    assert_eq!(world.read("a"), None);
    complete(&world.recover());
    assert_eq!(world.names(), ["a"]);
}

#[test]
fn a_full_disk_keeps_one_file_back_and_no_part_of_it() {
    let mut world = World::new();
    for (file, name) in [(1, "a"), (2, "b")] {
        let path = world.path(name);
        world.log.define(file, 10 + file, true, &path);
        world.log.write(file, 0, b"data");
    }
    // Whichever file comes to it: of the first operations, two looks for each file at its path and temporary name, make, examine.
    let mut failed = 0;
    for at in 4..8 {
        let outcome = world.recover_with(&TestFiles::new(Trouble::FailAt(at, Errno::NOSPC)));
        failed += outcome.failures.len();
        for name in world.names() {
            assert_eq!(world.read(&name).as_deref(), Some("data"), "{name}");
        }
    }
    assert!(failed > 0);
    complete(&world.recover());
    assert_eq!(world.names(), ["a", "b"]);
}

#[test]
fn a_file_that_blocks_another_is_not_lost_with_it() {
    let mut world = World::new();
    world.known(1, "a", "one");
    world.known(2, "t", "two");
    world.put("b", "stranger");
    world.rename(1, "a", "b", 0);
    world.rename(2, "t", "a", 0);
    let outcome = world.recover();
    assert_eq!(outcome.failures.len(), 2, "{:?}", outcome.failures);
    assert_eq!(world.names(), ["a", "b", "t"]);
    fs::remove_file(world.path("b")).expect("a file can be removed");
    complete(&world.recover());
    assert_eq!(world.names(), ["a", "b"]);
    assert_eq!(world.read("b").as_deref(), Some("one"));
}

#[test]
fn a_file_moved_from_outside_is_passed_over() {
    let mut world = World::new();
    let path = world.path("a");
    world.log.define(1, 11, true, &path);
    world.log.write(1, 0, b"data");
    world.known(2, "a", "outside");
    let outcome = world.recover();
    complete(&outcome);
    let kinds = outcome.findings.kept();
    assert!(matches!(kinds, [Finding::Displaced { .. }, Finding::Vanished { .. }]), "{kinds:?}");
    assert_eq!(world.read("a").as_deref(), Some("outside"));
}

#[test]
fn links_share_one_file() {
    let mut world = World::new();
    let (a, b) = (world.path("a"), world.path("b"));
    world.log.define(1, 11, true, &a);
    world.log.link(1, &b);
    complete(&world.recover());
    let inode = |name: &str| fs::metadata(world.path(name)).expect("it is there").ino();
    assert_eq!(inode("a"), inode("b"));
    assert_eq!(world.names(), ["a", "b"]);
}

#[test]
fn a_directory_that_cannot_be_made_is_reported() {
    let mut world = World::new();
    world.put("folder", "is a file");
    let path = world.path("folder/file");
    world.log.define(1, 11, true, &path);
    let outcome = world.recover();
    assert!(matches!(outcome.failures[..], [Failure::Io { .. }]));
    assert_eq!(world.names(), ["folder"]);
}

#[test]
fn progress_only_grows_and_ends_with_all() {
    let mut world = World::new();
    for file in 0..20 {
        let path = world.path(&format!("file {file}"));
        world.log.define(file + 1, file + 100, true, &path);
        world.log.write(file + 1, 0, &[1; 1000]);
    }
    let seen = Mutex::new(Vec::new());
    let tell = |progress: Progress| seen.lock().push(progress);
    let plan = world.log.plan();
    let files = TestFiles::new(Trouble::None);
    let options = ApplyOptions { pool: Uuid::nil(), workers: 4 };
    complete(&apply(&plan, &world.log, &files, options, &tell, &mut |_| Ok(())));
    let seen = seen.into_inner();
    assert!(seen.is_sorted_by_key(|progress| progress.done_bytes));
    assert_eq!(seen.last().copied(), Some(Progress { done_bytes: 20_000, total_bytes: 20_000 }));
}
