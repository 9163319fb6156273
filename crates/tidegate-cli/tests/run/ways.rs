//! Each call that changes files, by each way in which a program reaches it: what was synced after
//! it is there after a power cut. Either the preload library sees the change, or the process counts
//! as one that is not watched.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::bed::{Bed, Runner};
use crate::crash::Workers;
use crate::power::Disk;
use crate::programs::compiled;
use crate::support::{preload_library, run, scratch, succeed, tidegate, tool};

/// The files that programs/ways.c changes.
fn prepare(dir: &Path) {
    fs::create_dir(dir).unwrap();
    for number in 0..10 {
        fs::write(dir.join(format!("f{number}")), [b'-'; 8192]).unwrap();
    }
    for name in ["new", "old", "gone"] {
        fs::write(dir.join(name), name).unwrap();
    }
    rustix::fs::sync();
}

/// What is there of each change.
fn changes(dir: &Path) -> Vec<(&'static str, bool)> {
    let begins = |name: &str, byte: u8| {
        fs::read(dir.join(name)).is_ok_and(|bytes| bytes.first() == Some(&byte))
    };
    let len = |name: &str| fs::metadata(dir.join(name)).map_or(0, |found| found.len());
    let mode = |name: &str| {
        fs::metadata(dir.join(name)).map_or(0, |found| found.permissions().mode() & 0o777)
    };
    let exists = |name: &str| fs::symlink_metadata(dir.join(name)).is_ok();
    let attribute = rustix::fs::getxattr(dir.join("f8"), c"user.way", &mut [0_u8; 8][..]);
    vec![
        ("pwrite", begins("f0", b'L')),
        ("write", begins("f1", b'L')),
        ("writev", begins("f2", b'L')),
        ("ftruncate", len("f3") == 10),
        ("truncate", len("f4") == 10),
        ("fallocate", begins("f5", 0)),
        ("fchmod", mode("f6") == 0o600),
        ("chmod", mode("f7") == 0o600),
        ("fsetxattr", attribute.is_ok()),
        ("rename", begins("old", b'n') && !exists("new")),
        ("link", exists("linked")),
        ("unlink", !exists("gone")),
        ("symlink", exists("symbolic")),
        ("mkdir", exists("made")),
    ]
}

/// The synced changes survive a power cut, whether plain or under `run`.
fn survives(way: &str) {
    // Instructions of their own are for the object and the child only.
    let program = compiled("ways", &["-ldl", "-DOWN=0"]);
    let (object, child) = (compiled("ways", &["-shared", "-fPIC"]), compiled("ways", &["-static"]));
    let plain_object = compiled("ways", &["-shared", "-fPIC", "-DOWN=0"]);
    let object = if ["own", "constructor"].contains(&way) { object } else { plain_object };
    let mut disk = Disk::new();
    let dir = disk.mount_point().join("ways");
    prepare(&dir);
    let mut command = Runner::Run(&disk.pool()).command(&program, &dir);
    command.arg(way).args([object, child]);
    let mut workers = Workers::spawn(command, &disk.pool());
    workers.wait_for_line("done");
    disk.cut(workers, "none");
    let lost: Vec<_> = changes(&dir).into_iter().filter(|(_, is_there)| !is_there).collect();
    assert!(lost.is_empty(), "by {way}: {lost:?}");
}

macro_rules! ways {
    ($(fn $test:ident() = $way:literal;)*) => {
        $(#[test] fn $test() { survives($way); })*
    };
}

ways! {
    fn by_the_public_name() = "name";
    fn by_another_name() = "alias";
    fn by_dlsym_of_the_default() = "default";
    fn by_dlsym_of_the_next() = "next";
    fn by_dlsym_of_the_c_library() = "handle";
    fn by_dlvsym_of_the_c_library() = "version";
    fn by_an_object() = "object";
    fn by_an_object_that_binds_to_itself() = "deepbind";
    fn by_another_namespace() = "namespace";
    fn by_syscall() = "syscall";
    fn by_an_object_with_instructions_of_its_own() = "own";
    fn by_the_constructor_of_an_object() = "constructor";
    fn by_a_static_child() = "child";
}

/// As with `authbind` and `socket_wrapper`, in whichever order the libraries are.
#[test]
fn another_library_that_binds_is_asked_once() {
    preload_library();
    let bed = Bed::new();
    let other = compiled("bound", &["-shared", "-fPIC", "-ldl"]).display().to_string();
    let program = "import socket
for family, address in (socket.AF_INET, ('127.0.0.1', 0)), (socket.AF_UNIX, 'socket'):
    socket.socket(family).bind(address)";
    let run = || {
        let mut command = tidegate();
        command.args(["run", "-q", "--size=64M", "--pool"]).arg(bed.pool());
        command.current_dir(bed.disk()).arg("--");
        command
    };
    let set = format!("LD_PRELOAD={other}");
    let mut behind = run();
    behind.args(["/usr/bin/python3", "-c", program]).env("LD_PRELOAD", &other);
    assert_eq!(succeed(&mut behind), "bound\nbound\n");
    fs::remove_file(bed.disk().join("socket")).unwrap();
    let mut in_front = run();
    in_front.args(["env", &set, "/usr/bin/python3", "-c", program]);
    assert_eq!(succeed(&mut in_front), "bound\nbound\n");
}

/// Nobody who asks what the dynamic linker loads is told of the library, and `run` says nothing.
#[test]
fn lists_of_libraries() {
    preload_library();
    let (bed, linker) = (Bed::new(), "/lib64/ld-linux-x86-64.so.2");
    let list = |text: &str| {
        let names = text.lines().map(|line| line.split(" (0x").next().unwrap_or_default().trim());
        let mut names: Vec<_> = names.map(str::to_owned).collect();
        names.sort();
        names
    };
    for script in [
        "ldd /bin/true".to_owned(),
        "LD_TRACE_LOADED_OBJECTS=1 /bin/true".to_owned(),
        format!("{linker} --list /bin/true"),
        format!("LD_TRACE_LOADED_OBJECTS=1 {linker} /bin/true"),
        format!("{linker} --verify /bin/true; echo $?"),
    ] {
        let plain = succeed(tool("sh", "dash").args(["-c", &script]));
        let pool = bed.pool();
        let pooled = ["--size=64M", "--pool", pool.to_str().unwrap()];
        // Without a log, options of the dynamic linker are not looked at.
        let volatile = (!script.contains("--list")).then_some(&["--volatile"][..]);
        for options in [Some(&pooled[..]), volatile].into_iter().flatten() {
            let mut command = tidegate();
            command.args(["run", "-q"]).args(options);
            let output = command.args(["--", "sh", "-c", &script]).output().unwrap();
            let listed = list(&String::from_utf8_lossy(&output.stdout));
            assert_eq!(listed, list(&plain), "{options:?}: {script}");
            assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{options:?}: {script}");
        }
    }
}
