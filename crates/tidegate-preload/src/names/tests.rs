//! Operations on real files, and what the log says of them.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD};

use super::*;
use crate::known_folder::{
    self,
    tests::{IN_TESTS, learn_twice},
};
use crate::path::Opened;
use crate::testing::{World, c_path, look};

const FAILED: isize = -(libc::EPERM as isize);

fn done(result: std::io::Result<()>) -> isize {
    result.unwrap();
    0
}

fn unlink_file(world: &World, path: &Path, operation: impl FnOnce() -> isize) -> isize {
    let path = c_path(path);
    let name = Name { directory: libc::AT_FDCWD, path: &path };
    changing(&world.log, || unlink::unlink(&world.log, name, operation))
}

fn rename_file(
    world: &World,
    from: &Path,
    to: &Path,
    flags: u32,
    operation: impl FnOnce() -> isize,
) -> isize {
    let (from, to) = (c_path(from), c_path(to));
    let (from, to) = (
        Name { directory: libc::AT_FDCWD, path: &from },
        Name { directory: libc::AT_FDCWD, path: &to },
    );
    changing(&world.log, || rename::rename(&world.log, from, to, flags, operation))
}

fn link_file(
    world: &World,
    old: Name<'_>,
    new: &Path,
    flags: i32,
    operation: impl FnOnce() -> isize,
) -> isize {
    let new = c_path(new);
    let new = Name { directory: libc::AT_FDCWD, path: &new };
    changing(&world.log, || link::link(&world.log, old, new, flags, operation))
}

#[test]
fn a_known_directory_that_became_a_link_unseen_is_asked_for() {
    let _tests = IN_TESTS.lock().unwrap();
    let world = World::new();
    fs::create_dir(world.path("known")).unwrap();
    let (one, other) = (world.live_file("known/one"), world.live_file("known/other"));
    learn_twice(&world.log, &one, &one);
    assert!(known_folder::knows(&world.log, &c_path(&one)).is_some());
    unlink_file(&world, &one, || done(fs::remove_file(&one)));
    // By a process that does not count it.
    fs::rename(world.path("known"), world.path("moved")).unwrap();
    std::os::unix::fs::symlink("moved", world.path("known")).unwrap();
    assert!(known_folder::knows(&world.log, &c_path(&other)).is_some());
    unlink_file(&world, &other, || done(fs::remove_file(&other)));
    assert_eq!(world.records()[4..], ["unlink known/one", "unlink moved/other"]);
}

#[test]
fn the_end_of_a_live_files_name_is_recorded() {
    let world = World::new();
    let path = world.live_file("a");
    let target = look(&path);
    let before = world.log.names_unlogged();
    assert_eq!(unlink_file(&world, &path, || done(fs::remove_file(&path))), 0);
    assert_eq!(world.records()[2..], ["unlink a"]);
    assert_eq!(world.log.names_unlogged(), before);
    assert!(target.known(&world.log).unwrap().guard.is_nameless());
}

#[test]
fn a_file_with_another_name_is_not_nameless() {
    let world = World::new();
    let path = world.live_file("a");
    fs::hard_link(&path, world.path("b")).unwrap();
    unlink_file(&world, &path, || done(fs::remove_file(&path)));
    assert!(!world.subject(&world.path("b")).guard.is_nameless());
}

#[test]
fn who_had_a_name_that_is_gone_is_recorded() {
    let world = World::new();
    let path = world.file("a");
    let identity = look(&path).key().unwrap().identity;
    unlink_file(&world, &path, || done(fs::remove_file(&path)));
    assert!(world.log.names_covered());
    assert_eq!(world.records(), ["unlink a"]);
    assert_eq!(world.headers()[0].aux, identity);
    assert_eq!(world.log.in_the_middle().count(), 0);
    // Recovery lets a new file have the name, and removes the old one from it.
    assert!(!world.plan().is_empty() && world.plan().findings().total() == 0);
}

#[test]
fn a_removal_that_the_kernel_refuses_is_voided_for_unknown_files_too() {
    let world = World::new();
    let path = world.file("a");
    assert_eq!(unlink_file(&world, &path, || FAILED), FAILED);
    assert_eq!(world.records(), ["unlink a", "void"]);
    assert!(world.plan().is_empty());
}

#[test]
fn names_of_what_is_no_file_are_counted() {
    let world = World::new();
    let path = world.path("link");
    std::os::unix::fs::symlink("x", &path).unwrap();
    unlink_file(&world, &path, || done(fs::remove_file(&path)));
    assert!(!world.log.names_covered());
    assert!(world.records().is_empty());
}

#[test]
fn a_file_that_the_log_did_not_know_is_defined_before_it_moves() {
    let world = World::new();
    let (from, to) = (world.file("a"), world.file("b"));
    let replaced = look(&to).key().unwrap().identity;
    rename_file(&world, &from, &to, 0, || done(fs::rename(&from, &to)));
    assert_eq!(world.records(), ["define a", "rename a b over another"]);
    assert_eq!(world.headers()[1].aux, replaced);
    assert!(world.log.names_covered());
    let plan = world.plan();
    assert_eq!((plan.files().len(), plan.findings().total()), (1, 0));
}

#[test]
fn a_live_file_with_another_name_is_settled_and_defined_anew() {
    let world = World::new();
    let path = world.live_file("a");
    fs::hard_link(&path, world.path("b")).unwrap();
    unlink_file(&world, &path, || done(fs::remove_file(&path)));
    assert_eq!(world.records()[2..], ["retire", "unlink a"]);
    let subject = world.subject(&world.path("b"));
    assert!(!subject.guard.is_covered() && !subject.guard.is_sticky());
    assert!(subject.guard.begin().unwrap().needs_define());
}

#[test]
fn a_removal_in_the_middle_of_which_a_process_died_is_voided() {
    let world = World::new();
    let path = world.file("a");
    let identity = look(&path).key().unwrap().identity;
    std::thread::scope(|scope| {
        let dying = scope.spawn(|| {
            let names = world.log.lock_names().unwrap();
            let mut ticket = world.log.begin_on_names().unwrap();
            ticket.unlink(path.to_str().unwrap().as_bytes(), identity).unwrap();
            std::mem::forget((ticket, names));
        });
        dying.join().unwrap();
    });
    changing(&world.log, || 0);
    assert_eq!(world.records(), ["unlink a", "void"]);
    assert_eq!(world.log.in_the_middle().count(), 0);
}

#[test]
fn a_name_that_is_not_there_changes_nothing() {
    let world = World::new();
    assert_eq!(unlink_file(&world, &world.path("a"), || FAILED), FAILED);
    assert_eq!(rename_file(&world, &world.path("a"), &world.path("b"), 0, || FAILED), FAILED);
    assert!(world.log.names_covered());
}

#[test]
fn what_the_kernel_refuses_is_voided() {
    let world = World::new();
    let path = world.live_file("a");
    assert_eq!(unlink_file(&world, &path, || FAILED), FAILED);
    assert_eq!(rename_file(&world, &path, &world.path("b"), 0, || FAILED), FAILED);
    assert_eq!(world.records()[2..], ["unlink a", "void", "rename a b", "void"]);
    let headers = world.headers();
    assert_eq!((headers[3].aux, headers[5].aux), (headers[2].position, headers[4].position));
    assert!(!world.subject(&path).guard.is_nameless());
}

#[test]
fn a_rename_says_what_it_replaces() {
    let world = World::new();
    let (from, to) = (world.live_file("a"), world.live_file("b"));
    let replaced = look(&to);
    rename_file(&world, &from, &to, 0, || done(fs::rename(&from, &to)));
    assert_eq!(world.records()[4..], ["rename a b over another"]);
    assert_eq!(world.headers()[4].aux, replaced.key().unwrap().identity);
    assert!(replaced.known(&world.log).unwrap().guard.is_nameless());
    assert!(!world.subject(&to).guard.is_nameless());
    assert!(world.log.names_covered());
}

#[test]
fn a_file_that_replaces_a_live_one_is_defined() {
    let world = World::new();
    let (from, to) = (world.file("a"), world.live_file("b"));
    rename_file(&world, &from, &to, 0, || done(fs::rename(&from, &to)));
    assert_eq!(world.records()[2..], ["define a", "rename a b over another"]);
}

#[test]
fn what_replaces_a_live_file_and_is_no_file_retires_it_first() {
    let world = World::new();
    let (from, to) = (world.path("link"), world.live_file("b"));
    std::os::unix::fs::symlink("x", &from).unwrap();
    let before = world.log.names_unlogged();
    rename_file(&world, &from, &to, 0, || {
        assert_eq!(world.records()[2..], ["retire"]);
        done(fs::rename(&from, &to))
    });
    assert!(world.log.names_unlogged() > before);
}

#[test]
fn files_that_exchange_their_names_are_retired_first() {
    let world = World::new();
    let (one, other) = (world.live_file("a"), world.live_file("b"));
    rename_file(&world, &one, &other, libc::RENAME_EXCHANGE, || {
        assert_eq!(world.records()[4..], ["retire", "retire"]);
        0
    });
    for path in [&one, &other] {
        let subject = world.subject(path);
        assert!(
            !subject.guard.is_covered()
                && !subject.guard.is_sticky()
                && !subject.guard.is_nameless()
        );
    }
}

#[test]
fn names_of_one_file_and_refused_replacements_change_nothing() {
    let world = World::new();
    let path = world.live_file("a");
    let same = world.path("same");
    fs::hard_link(&path, &same).unwrap();
    rename_file(&world, &path, &same, 0, || 0);
    rename_file(&world, &path, &world.live_file("b"), libc::RENAME_NOREPLACE, || FAILED);
    assert!(!world.records().iter().any(|record| record.starts_with("rename")));
    assert!(world.log.names_covered());
}

#[test]
fn a_renamed_directory_uncovers_what_is_made_below_it() {
    let world = World::new();
    let (from, to) = (world.path("d"), world.path("e"));
    fs::create_dir(&from).unwrap();
    rename_file(&world, &from, &to, 0, || done(fs::rename(&from, &to)));
    assert!(!world.log.names_covered());
}

#[test]
fn a_name_that_is_no_file_uncovers_its_directory_only() {
    let world = World::new();
    for folder in ["one", "two"] {
        fs::create_dir(world.path(folder)).unwrap();
    }
    let covered = |folder: &str| {
        let found = world.log.find(&look(&world.path(folder)).key().unwrap()).unwrap();
        found.is_none_or(|file| world.log.names_covered_in(file))
    };
    let made = c_path(&world.path("one/made"));
    let name = Name { directory: libc::AT_FDCWD, path: &made };
    let make = || done(fs::create_dir(world.path("one/made")));
    assert_eq!(folders::folder_made(&world.log, name, make), 0);
    assert!(!covered("one") && !covered("one/made") && covered("two"));
    assert!(world.log.names_covered());
    // A directory that nobody can tell uncovers all.
    let lost = c_path(&world.path("absent/made"));
    let name = Name { directory: libc::AT_FDCWD, path: &lost };
    folders::unlogged_in(&world.log, name, || FAILED);
    assert!(covered("two") && !world.log.names_covered());
}

#[test]
fn a_further_name_of_a_live_file_is_recorded() {
    let world = World::new();
    let (old, new) = (world.live_file("a"), world.path("b"));
    let path = c_path(&old);
    let name = Name { directory: libc::AT_FDCWD, path: &path };
    link_file(&world, name, &new, 0, || done(fs::hard_link(&old, &new)));
    assert_eq!(world.records()[2..], ["link b"]);
}

#[test]
fn a_first_name_is_made_durable_by_the_next_sync() {
    let world = World::new();
    let new = world.path("a");
    let mut options = fs::File::options();
    let file = options.write(true).custom_flags(libc::O_TMPFILE).open(world.path("")).unwrap();
    let link = c_path(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())));
    let nameless = Target::of(Opened::path(libc::AT_FDCWD, &link, 0).unwrap()).unwrap();
    nameless.entered(&world.log).unwrap().guard.mark_nameless();
    let ways = [
        (Name { directory: file.as_raw_fd(), path: c"" }, libc::AT_EMPTY_PATH),
        (Name { directory: libc::AT_FDCWD, path: &link }, libc::AT_SYMLINK_FOLLOW),
    ];
    for (old, flags) in ways {
        assert_eq!(link_file(&world, old, &new, flags, || FAILED), FAILED);
        assert!(nameless.known(&world.log).unwrap().guard.is_nameless());
    }
    let publish = || {
        rustix::fs::linkat(CWD, &link, CWD, &new, AtFlags::SYMLINK_FOLLOW).unwrap();
        0
    };
    nameless.known(&world.log).map(|it| it.guard.synced(it.guard.unlogged())).unwrap();
    assert_eq!(link_file(&world, ways[1].0, &new, ways[1].1, publish), 0);
    let subject = world.subject(&new);
    assert!(!subject.guard.is_nameless() && !subject.guard.is_covered());
    assert!(!world.log.names_covered());
}

/// Leaves the lock of names and of the file behind as a killed process does, with what `append` recorded.
fn die_in_the_middle(
    world: &World,
    path: &Path,
    append: impl Fn(&mut tidegate::log::Ticket<'_>) -> u64 + Sync,
) {
    let target = look(path);
    std::thread::scope(|scope| {
        let dying = scope.spawn(|| {
            let names = world.log.lock_names().unwrap();
            let subject = target.known(&world.log).unwrap();
            let mut ticket = subject.guard.begin().unwrap();
            append(&mut ticket);
            std::mem::forget(ticket);
            std::mem::forget((subject, names));
        });
        dying.join().unwrap();
    });
}

#[test]
fn what_the_dead_left_half_done_is_voided_where_it_was_not_done() {
    let world = World::new();
    let path = world.live_file("a");
    die_in_the_middle(&world, &path, |ticket| {
        ticket.unlink(path.to_str().unwrap().as_bytes()).unwrap()
    });
    changing(&world.log, || 0);
    assert_eq!(world.records()[2..], ["unlink a", "void"]);
    assert_eq!(world.log.in_the_middle().count(), 0);
}

#[test]
fn what_the_dead_had_done_stays() {
    let world = World::new();
    let (path, to) = (world.live_file("a"), world.path("b"));
    let (from_bytes, to_bytes) =
        (path.to_str().unwrap().as_bytes(), to.to_str().unwrap().as_bytes());
    die_in_the_middle(&world, &path, |ticket| ticket.rename(from_bytes, to_bytes, 0).unwrap());
    fs::rename(&path, &to).unwrap();
    changing(&world.log, || 0);
    assert_eq!(world.records()[2..], ["rename a b"]);
    assert_eq!(world.log.in_the_middle().count(), 0);
}

#[test]
fn without_descriptors_what_the_log_has_is_retired_first() {
    let world = World::new();
    let path = world.live_file("a");
    let c_path = c_path(&path);
    let name = Name { directory: libc::AT_FDCWD, path: &c_path };
    let operation = || {
        assert_eq!(world.records()[2..], ["retire"]);
        0
    };
    changing(&world.log, || settled(&world.log, &[name], libc::AT_SYMLINK_NOFOLLOW, operation));
    let subject = world.subject(&path);
    assert!(!subject.guard.is_covered() && !subject.guard.is_sticky());
}

#[test]
fn signals_are_as_before_behind_an_operation() {
    let blocked = || {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigBlk")).unwrap().to_owned()
    };
    let world = World::new();
    let before = blocked();
    signals::installed(libc::SIGTERM, 4096);
    changing(&world.log, || {
        assert_ne!(blocked(), before, "signals from outside are blocked");
        0
    });
    assert_eq!(blocked(), before);
}
