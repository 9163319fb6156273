//! What tests that were killed have left: directories, which are named after their process, and
//! with them running programs, mounts, loop devices, and control memories of pools.
//!
//! Nothing is touched that a living process may want: a directory goes when the process that it is
//! named after is dead, a control memory when its pool is gone and nobody maps it.

use std::collections::{HashSet, VecDeque};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::tool;

const PREFIX: &str = "tidegate-test.";
/// How long the kernel may take to show a process.
const TIMEOUT: Duration = Duration::from_secs(2);
const SHARED_MEMORY: &str = "/dev/shm";
/// What programs of tests have in their environment: not a shell that a person has gone there with.
const VARIABLES: [&str; 3] = ["TIDEGATE_POOL", "TIDEGATE_TEST_TREE", "PGHOST"];

/// What the names of this process's directories begin with.
pub fn prefix() -> String {
    format!("{PREFIX}{}.", std::process::id())
}

/// Removes what dead processes have left in `parent`, and control memories without pools. Where two
/// do it at once, one finds things gone.
pub fn remove(parent: &Path) {
    names_in(parent).iter().filter(|name| is_of_dead(name)).for_each(|name| {
        clear(&parent.join(name));
    });
    remove_control_memories();
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Whether a directory's name tells of a process that is there no more.
fn is_of_dead(name: &str) -> bool {
    let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('.'));
    let number: Option<u32> = process.and_then(|(number, _)| number.parse().ok());
    number.is_some_and(|number| !Path::new(&format!("/proc/{number}")).exists())
}

fn clear(dir: &Path) {
    let text = dir.display().to_string();
    let variables = VARIABLES.map(|name| format!("{name}={text}"));
    let shown = variables.iter().map(|variable| ("environ", variable.as_bytes()));
    let shown: Vec<_> = shown.chain([("maps", text.as_bytes())]).collect();
    for pid in processes_with(&shown) {
        // It may have gone by itself.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let points: Vec<_> = points.filter(|point| point.starts_with(&text)).collect();
    for point in points.into_iter().rev() {
        quietly(tool("umount", "mount").arg("-l").arg(point));
    }
    let list = tool("losetup", "mount").args(["--list", "-nO", "NAME,BACK-FILE"]).output();
    let list = list.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    for line in list.unwrap_or_default().lines().filter(|line| line.contains(&text)) {
        quietly(tool("losetup", "mount").arg("-d").args(line.split(' ').next()));
    }
    // What cannot be removed yet, the next run of the tests removes.
    let _ = std::fs::remove_dir_all(dir);
}

fn quietly(command: &mut Command) {
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// What a look at processes has found.
#[derive(Default)]
pub struct Found {
    /// One of the files of `/proc/PID` contains what was looked for.
    pub shown: Vec<i32>,
    /// The kernel does not say: these wait for a disk in the middle of a change of their mappings.
    pub stuck: Vec<i32>,
}

/// Processes of which one of the files of `/proc/PID` contains the bytes beside its name.
pub fn processes_with(shown: &[(&str, &[u8])]) -> Vec<i32> {
    find_processes(shown, |_| true).shown
}

/// As [`processes_with`], of the processes for which `is_asked` holds.
pub fn find_processes(shown: &[(&str, &[u8])], is_asked: impl Fn(i32) -> bool) -> Found {
    let names = names_in(Path::new("/proc")).into_iter();
    let pids = names.filter_map(|name| name.parse().ok()).filter(|pid| is_asked(*pid));
    let mut left: VecDeque<i32> = pids.collect();
    let wanted: Vec<_> =
        shown.iter().map(|(file, bytes)| ((*file).to_owned(), bytes.to_vec())).collect();
    let mut found = Found::default();
    while !left.is_empty() {
        let answers = ask_for_each(left.clone().into(), wanted.clone());
        loop {
            let answer = answers.recv_timeout(TIMEOUT);
            let Some(pid) = left.pop_front() else { break };
            match answer {
                Ok(true) => found.shown.push(pid),
                Ok(false) => {}
                Err(_) => {
                    found.stuck.push(pid);
                    break;
                }
            }
        }
    }
    found
}

/// Answers in a thread of its own, which a process that is stuck takes with it.
fn ask_for_each(pids: Vec<i32>, wanted: Vec<(String, Vec<u8>)>) -> Receiver<bool> {
    let (answer, answers) = channel();
    let is_shown = move |pid: i32| {
        wanted.iter().any(|(file, wanted)| {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default(); // gone, or not ours
            bytes.windows(wanted.len()).any(|window| window == wanted)
        })
    };
    std::thread::spawn(move || pids.into_iter().all(|pid| answer.send(is_shown(pid)).is_ok()));
    answers
}

/// Control memories are named after their pool's device and inode.
fn remove_control_memories() {
    let shared = Path::new(SHARED_MEMORY);
    let Ok(device) = shared.metadata().map(|metadata| metadata.dev()) else { return };
    let users = names_in(shared).into_iter().filter(|name| name.starts_with("tidegate-"));
    // First the names, then the pools: a user that makes a pool now is not taken for one whose
    // pool is gone.
    let files: Vec<_> = users
        .flat_map(|user| {
            names_in(&shared.join(&user)).into_iter().map(move |name| (user.clone(), name))
        })
        .map(|(user, name)| (shared.join(user).join(&name), name))
        .collect();
    let mut inodes = HashSet::new();
    collect_inodes(shared, &mut inodes);
    for (path, name) in files {
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let stem = name.split_once('.').and_then(|(stem, _)| stem.split_once('-'));
        let pool = stem.and_then(|(device, inode)| number(device).zip(number(inode)));
        if pool.is_some_and(|(of, inode)| of == device && !inodes.contains(&inode))
            && processes_with(&[("maps", path.as_os_str().as_encoded_bytes())]).is_empty()
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn collect_inodes(dir: &Path, inodes: &mut HashSet<u64>) {
    for path in names_in(dir).into_iter().map(|name| dir.join(name)) {
        if let Ok(metadata) = path.symlink_metadata() {
            inodes.insert(metadata.ino());
            if metadata.is_dir() {
                collect_inodes(&path, inodes);
            }
        }
    }
}
