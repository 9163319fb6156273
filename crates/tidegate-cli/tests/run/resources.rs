//! What a program has for itself, with Tidegate as without it: its stacks, its memory, and disks
//! that it mounts and unmounts.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use crate::bed::{Bed, Runner};
use crate::programs::compiled;
use crate::support::small::Small;
use crate::support::succeed;

/// What hooks may take of a stack that is as small as the kernel allows.
const STACK_BYTES_MAX: usize = 2048;

/// Returns the stack that each call takes beyond a function that calls nothing, in the order of
/// `programs/stack.c`.
fn stacks(runner: Runner<'_>, place: &str, dir: &Path) -> Vec<(String, usize)> {
    std::fs::create_dir(dir).unwrap();
    let printed = succeed(runner.command(compiled("stack", &[]), dir).arg(place));
    let line = |line: &str| {
        let (name, bytes) = line.split_once(' ').unwrap();
        (name.to_owned(), bytes.parse().unwrap())
    };
    let taken: Vec<(String, usize)> = printed.lines().map(line).collect();
    let nothing = taken[0].1;
    taken.into_iter().map(|(name, bytes)| (name, bytes - nothing)).collect()
}

/// No call takes much more of a stack under `run` than it takes plain.
fn takes_little_of_a_stack(place: &str) {
    let bed = Bed::new();
    let pool = bed.pool();
    let plain = stacks(Runner::Plain, place, &bed.disk().join("plain"));
    let run = stacks(Runner::Run(&pool), place, &bed.disk().join("run"));
    let mut beyond = String::new();
    for ((name, plain), (_, run)) in plain.into_iter().zip(run) {
        println!("{name}: {plain}, under run {run}");
        if run > plain + STACK_BYTES_MAX {
            write!(beyond, "{name}: {} bytes more, ", run - plain).unwrap();
        }
    }
    assert!(beyond.is_empty(), "{beyond}");
}

#[test]
fn no_call_takes_more_of_a_handler_s_stack_than_allowed() {
    takes_little_of_a_stack("handler");
}

#[test]
fn no_call_takes_more_of_a_thread_s_stack_than_allowed() {
    takes_little_of_a_stack("thread");
}

/// A script that mounts a disk, has `program` write to it, and unmounts it.
fn mounted_for(program: &str) -> bool {
    let (small, bed) = (Small::new("64M"), Bed::new());
    small.unmount();
    let (image, mount, pool) = (small.image(), small.mount_point(), bed.pool());
    let script = format!(
        "mount -o loop,commit=300 {} {mount} && cd {mount} && /usr/bin/python3 -c '{program}' \
         && cd / && umount {mount}",
        image.display(),
        mount = mount.display()
    );
    let printed = Runner::Run(&pool).script(&script, bed.disk());
    small.mount();
    println!("{printed}");
    printed.ends_with("exit status: 0\n")
}

#[test]
fn a_disk_can_be_unmounted_right_after_the_program_that_wrote_to_it() {
    assert!(mounted_for(
        "import os
f = os.open(\"f\", os.O_RDWR | os.O_CREAT)
for i in range(10):
    os.pwrite(f, b\"x\" * 4096, 0)
    os.fdatasync(f)"
    ));
    assert!(mounted_for(
        "import os
for i in range(10):
    f = os.open(f\"t{i}\", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.write(f, b\"x\")
    os.fsync(f)
    os.close(f)
    os.rename(f\"t{i}\", f\"n{i}\")"
    ));
}

/// Prints the memory that is locked, or that a program can have.
const MEMORY: &str = r#"
import ctypes, mmap, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
if sys.argv[1] == "address space":
    resource.setrlimit(resource.RLIMIT_AS, (300 << 20, resource.RLIM_INFINITY))
    print(mmap.mmap(-1, 150 << 20)[0])
else:
    flags = {"all": 3, "current": 1, "on fault": 7}[sys.argv[1]]
    print(libc.mlockall(flags), status("VmLck") < 100 << 10)
    print(libc.munlockall(), status("VmLck"))
"#;

#[test]
fn a_program_has_its_memory_for_itself() {
    let bed = Bed::new();
    let pool = bed.pool();
    for what in ["all", "current", "on fault", "address space"] {
        let printed = [Runner::Plain, Runner::Run(&pool)].map(|runner| {
            let mut command = runner.command("/usr/bin/python3", bed.disk());
            succeed(command.args(["-B", "-c", MEMORY, what]))
        });
        println!("{what}: {printed:?}");
        assert_eq!(printed[0], printed[1], "{what}");
    }
}

/// With the limit of 8 MiB that most users have. It holds for the run as a whole: a program that
/// gave its rights up inside of one would not be watched.
#[test]
fn a_user_can_lock_the_memory_of_a_small_program() {
    let bed = Bed::new();
    let program = compiled("locked", &[]);
    let pool = bed.pool();
    for runner in [Runner::Plain, Runner::Run(&pool)] {
        let inner = runner.command(&program, bed.disk());
        let mut command = Command::new("prlimit");
        command.args(["--memlock=8388608", "setpriv", "--bounding-set=-ipc_lock"]);
        command.args(["--inh-caps=-ipc_lock", "--"]).arg(inner.get_program());
        succeed(command.args(inner.get_args()).current_dir(bed.disk()));
    }
}
