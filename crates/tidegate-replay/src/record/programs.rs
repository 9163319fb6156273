//! Programs that recorded processes execute: which of them are recorded, and why others are not.
//!
//! A process tells that it is about to execute a program, and a program that loads the library
//! tells that it has started. One that was executed and has not started was not recorded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use tidegate_run::Program;

use super::summary::Summary;

#[derive(Default)]
pub(super) struct Programs {
    /// By process: what it executes, and has not started yet.
    executed: HashMap<u32, PathBuf>,
    /// Processes that have started a program, and were told of by no other before.
    started: HashSet<u32>,
    unrecorded: Vec<PathBuf>,
    count: u64,
}

impl Programs {
    /// A process is about to execute a program.
    pub(super) fn executed(&mut self, process: u32, path: PathBuf) {
        // A process that another one spawns may run before that one can tell.
        if self.started.remove(&process) {
            return;
        }
        if let Some(before) = self.executed.insert(process, path) {
            self.unrecorded.push(before);
        }
    }

    /// It did not.
    pub(super) fn not_executed(&mut self, process: u32) {
        self.executed.remove(&process);
    }

    /// A process runs a program that is recorded.
    pub(super) fn started(&mut self, process: u32) {
        self.count += 1;
        if self.executed.remove(&process).is_none() {
            self.started.insert(process);
        }
    }

    /// Says which programs were not recorded, and why.
    pub(super) fn end(self, summary: &mut Summary) {
        summary.programs = self.count;
        let search_path = std::env::var_os("PATH");
        let paths = self.unrecorded.into_iter().chain(self.executed.into_values());
        let mut causes = BTreeMap::new();
        for path in paths {
            let found = Program::find(path.as_os_str(), search_path.as_deref(), &[]);
            let (file, cause) = match found {
                Ok(Program { file, unwatched: Some(cause), .. }) => (file, cause.reason()),
                Ok(Program { file, .. }) => (file, "was started without the recorder's library"),
                Err(_) => (path, "cannot be looked at"),
            };
            causes.insert(file, cause);
        }
        for (file, cause) in causes {
            summary.add_unwatched(&file, cause);
        }
    }
}

/// The path of a program that is executed, from its folder, if it is relative, and its name.
pub(super) fn path_of(folder: &[u8], name: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(folder)).join(OsStr::from_bytes(name))
}
