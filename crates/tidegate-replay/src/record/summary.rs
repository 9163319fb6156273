//! Formats the totals of a recording for users.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use tidegate_record::event::Unseen;

macro_rules! operations {
    ($($name:ident = $row:literal, $words:literal;)*) => {
        /// An operation that has rows.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) enum Operation { $($name,)* }

        impl Operation {
            /// Returns the name in a row.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Self::$name => $row,)* }
            }

            /// Returns a plural for users.
            const fn words(self) -> &'static str {
                match self { $(Self::$name => $words,)* }
            }
        }
    };
}

operations! {
    Read = "read", "reads";
    Write = "write", "writes";
    Fsync = "fsync", "fsync";
    Fdatasync = "fdatasync", "fdatasync";
    Sync = "sync", "sync";
    Syncfs = "syncfs", "syncfs";
    SyncRange = "sync_file_range", "sync_file_range";
    Truncate = "truncate", "truncations";
    Fallocate = "fallocate", "fallocate";
    Rename = "rename", "renames";
    Unlink = "unlink", "removals";
}

/// Totals of the recording, and of unrecorded events.
#[derive(Debug, Default)]
pub(super) struct Summary {
    operations: BTreeMap<Operation, u64>,
    read_bytes: u64,
    written_bytes: u64,
    /// Number of files in the trace.
    pub(super) files: u64,
    /// Number of recorded programs.
    pub(super) programs: u64,
    unseen: BTreeMap<Unseen, u64>,
    /// Number of failed syncs.
    pub(super) failed_syncs: u64,
    /// Number of events that found no space or no recorder.
    pub(super) lost: u64,
    /// Number of events of unknown files.
    pub(super) unknown: u64,
    unwatched: Vec<String>,
    /// The error of writing the trace, if any.
    pub(super) written: Option<io::Error>,
}

impl Summary {
    /// Counts an operation. The second number is the length of a read or a write.
    pub(super) fn add(&mut self, operation: Operation, [_, len]: [u64; 2]) {
        *self.operations.entry(operation).or_insert(0) += 1;
        match operation {
            Operation::Read => self.read_bytes += len,
            Operation::Write => self.written_bytes += len,
            _ => {}
        }
    }

    pub(super) fn add_unseen(&mut self, what: Unseen) {
        *self.unseen.entry(what).or_insert(0) += 1;
    }

    pub(super) fn add_unwatched(&mut self, program: &Path, cause: &str) {
        self.unwatched.push(format!("{} {cause}", program.display()));
    }

    /// Prints the summary to standard error. The trace at `path` took `elapsed` to record.
    pub(super) fn print(&self, path: &Path, elapsed: Duration) {
        for line in self.lines(path, elapsed) {
            eprintln!("tidegate: {line}");
        }
    }

    pub(super) fn lines(&self, path: &Path, elapsed: Duration) -> Vec<String> {
        let count: u64 = self.operations.values().sum();
        let (path, seconds) = (path.display(), elapsed.as_secs_f64());
        let mut lines = vec![format!(
            "{path}: {count} operations on {} files by {} programs in {seconds:.1} s",
            self.files, self.programs
        )];
        let operations = self.operations.iter().map(|(operation, count)| match operation {
            Operation::Read => format!("{count} reads of {}", bytes(self.read_bytes)),
            Operation::Write => format!("{count} writes of {}", bytes(self.written_bytes)),
            other => format!("{count} {}", other.words()),
        });
        let operations = operations.collect::<Vec<_>>().join(", ");
        lines.extend(Some(operations).filter(|line| !line.is_empty()));
        lines.extend(self.not_seen());
        lines.extend(self.unwatched.iter().map(|program| format!("not recorded: {program}")));
        if count > 0 {
            lines.push(format!("go on with: tidegate replay {path}"));
        }
        lines
    }

    /// Returns a line about operations that have no rows, if there are any.
    fn not_seen(&self) -> Option<String> {
        let unseen = self.unseen.iter().map(|(what, count)| format!("{count} {}", what.words()));
        let lost = self.lost + self.unknown;
        let others = [(lost, "events that were lost"), (self.failed_syncs, "syncs that failed")];
        let others = others.iter().filter(|(count, _)| *count > 0);
        let others = others.map(|(count, what)| format!("{count} {what}"));
        let all = unseen.chain(others).collect::<Vec<_>>().join(", ");
        Some(format!("not in the trace: {all}")).filter(|_| !all.is_empty())
    }
}

#[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
fn bytes(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    match bytes as f64 {
        small if small < KIB => format!("{bytes} bytes"),
        some if some < KIB * KIB => format!("{:.1} KiB", some / KIB),
        many if many < KIB * KIB * KIB => format!("{:.1} MiB", many / KIB / KIB),
        most => format!("{:.1} GiB", most / KIB / KIB / KIB),
    }
}
