//! Tracks which executed programs are recorded, and why others are not.
//!
//! A process reports that it is about to execute a program, and a program that loads the library
//! reports its start. A program that was executed but did not report a start was not recorded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use tidegate_run::Program;

use super::summary::Summary;

#[derive(Default)]
pub(super) struct Programs {
    /// Programs that were executed and have not started yet, by process.
    executed: HashMap<u32, PathBuf>,
    /// Processes that have started a program whose execution was not reported before.
    started: HashSet<u32>,
    unrecorded: Vec<PathBuf>,
    count: u64,
}

impl Programs {
    /// Handles the report that a process is about to execute a program.
    pub(super) fn executed(&mut self, process: u32, path: PathBuf) {
        // A spawned process may start before its parent reports the spawn.
        if self.started.remove(&process) {
            return;
        }
        if let Some(before) = self.executed.insert(process, path) {
            self.unrecorded.push(before);
        }
    }

    /// Handles the report that the execution has failed.
    pub(super) fn not_executed(&mut self, process: u32) {
        self.executed.remove(&process);
    }

    /// Handles the start of a recorded program.
    pub(super) fn started(&mut self, process: u32) {
        self.count += 1;
        if self.executed.remove(&process).is_none() {
            self.started.insert(process);
        }
    }

    /// Adds the programs that were not recorded, and the causes, to `summary`.
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

/// Returns the path of an executed program; `folder` is empty unless `name` is relative.
pub(super) fn path_of(folder: &[u8], name: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(folder)).join(OsStr::from_bytes(name))
}
