//! Removes directories, loop devices and control groups of harnesses that were killed. Their names
//! contain the number of the process.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{PREFIX, succeed};

/// Returns whether a name or path has the mark of a harness whose process has ended.
fn is_of_dead(text: &str) -> bool {
    let Some((_, rest)) = text.split_once(PREFIX) else { return false };
    let digits = rest.split(|character: char| !character.is_ascii_digit()).next();
    let number = digits.and_then(|digits| digits.parse::<u32>().ok());
    number.is_some_and(|number| !Path::new(&format!("/proc/{number}")).exists())
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Removes abandoned directories in `parent`, and detaches abandoned loop devices. A later call
/// removes those that are still in use.
pub fn remove(parent: &Path) {
    for name in names_in(Path::new("/sys/block")) {
        let file = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
        if file.is_ok_and(|file| is_of_dead(&file)) {
            let _ = succeed(Command::new("losetup").arg("-d").arg(format!("/dev/{name}")));
        }
    }
    for name in names_in(parent).iter().filter(|name| is_of_dead(name)) {
        // A machine's files were in its namespace; the directory may hold a compiled program.
        let _ = fs::remove_dir_all(parent.join(name));
    }
}

/// Kills the processes of abandoned control groups, and removes the groups.
pub fn remove_groups(hierarchy: &Path) {
    for name in names_in(hierarchy).iter().filter(|name| is_of_dead(name)) {
        let _ = fs::write(hierarchy.join(name).join("cgroup.kill"), "1");
        let _ = fs::remove_dir(hierarchy.join(name));
    }
}
