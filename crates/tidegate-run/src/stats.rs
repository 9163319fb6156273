//! The counters of a supervisor, as text and for scripts.

use std::collections::BTreeMap;
use std::iter::once;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize, Serializer};
use tidegate::log::cover::Cause;
use tidegate::log::{Counter, Log, RealSyncs};

use tidegate::size::Size;
use tidegate::stats::histogram::upper_bound_ns;

/// The key of syncs of files on file systems that are not logged.
pub(crate) const UNSUPPORTED: &str = "unsupported";

/// Reasons of real syncs: the counter, the key for scripts, and the description for a file with
/// such syncs. A sync may have none of these reasons.
const REASONS: [(Counter, &str, &str); 15] = [
    (Counter::SyncsNotYet, "not_yet", "not yet in the log"),
    (Counter::SyncsPending, "pending", "changes of names or attributes in the file system"),
    (Counter::SyncsOwn, "own", "changes of the file's own names or attributes"),
    (Counter::SyncsPinned, "pinned", "mapped, streamed or written directly"),
    (Counter::SyncsUnsupported, UNSUPPORTED, "on a file system that is not logged"),
    (Counter::SyncsSuspended, "suspended", "a process ran that cannot be watched"),
    (Counter::SyncsByGain, "by_gain", "costs more to log than to sync"),
    (Counter::SyncsInterrupted, "interrupted", "a process was killed while it changed it"),
    (Counter::SyncsOutside, "outside", "a process outside changed its size"),
    (Counter::SyncsRefused, "refused", "could not be logged"),
    (Counter::SyncsExcluded, "excluded", "kept out by --include or --exclude"),
    (Counter::SyncsNewPending, "new_pending", "new, while other changes of names were pending"),
    (Counter::SyncsNewRefused, "new_refused", "new, and no record can make it again"),
    (Counter::SyncsOfDirectories, "directories", "a directory"),
    // These syncs are not calls of `fsync`.
    (Counter::SyncsSynchronous, "synchronous", "written with O_SYNC or O_DSYNC"),
];

/// The most files in text; `--json` has all files that are listed.
const FILES_SHOWN: usize = 10;

/// The real syncs of one file by one process for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSyncs {
    /// Path of the file, or its end where the path is long.
    pub file: String,
    /// Program of the process.
    pub program: String,
    /// Number of the process.
    pub process: u32,
    /// The reason of the syncs: a key of [`Statistics::real_syncs`].
    pub cause: String,
    /// The number of these syncs.
    pub number: u64,
}

impl FileSyncs {
    fn of(row: &RealSyncs) -> Self {
        let (_, cause, _) = reason(|(counter, _, _)| *counter as u64 == row.cause);
        Self {
            file: text(&row.names.path),
            program: text(&row.names.program),
            process: row.process,
            cause: cause.into(),
            number: row.number,
        }
    }

    /// Returns a line of text.
    fn line(&self) -> String {
        let (_, _, why) = reason(|(_, key, _)| *key == self.cause);
        let Self { file, program, process, number, .. } = self;
        format!("{number} of {file} by {program} ({process}): {why}")
    }
}

fn reason(
    is_it: impl Fn(&(Counter, &'static str, &'static str)) -> bool,
) -> (Counter, &'static str, &'static str) {
    REASONS.into_iter().find(is_it).unwrap_or((Counter::SyncsReal, "", "unknown"))
}

/// Decodes a name that a program chose, and replaces the control characters.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let chars = String::from_utf8_lossy(&bytes[..end]);
    chars.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Serializes a path, which may have bytes that are no characters: these are replaced.
fn in_characters<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// The output of `tidegate stat --json`; the keys are a contract with scripts. Counts begin with
/// the supervisor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// The pool.
    #[serde(serialize_with = "in_characters")]
    pub pool: PathBuf,
    /// Whether a supervisor has the pool open.
    pub live: bool,
    /// Bytes of the log's ring.
    pub log_bytes: u64,
    /// Bytes of the log that are not on the files' disks for certain.
    pub log_used_bytes: u64,
    /// The highest value of that number.
    pub log_used_max_bytes: u64,
    /// Processes in the tree.
    pub processes: u64,
    /// Writes that were logged.
    pub writes: u64,
    /// Bytes of these writes.
    pub written_bytes: u64,
    /// Writes that went to the kernel only.
    pub unlogged_writes: u64,
    /// Syncs that had nothing left to do.
    pub fsyncs_skipped: u64,
    /// Syncs that the kernel did.
    pub fsyncs_done: u64,
    /// Mean time of syncs of files that can be covered; 0 if none was measured.
    pub fsync_mean_ns: u64,
    /// Syncs that the kernel did, by reason.
    pub real_syncs: BTreeMap<String, u64>,
    /// Files with the most such syncs, in falling order.
    pub real_syncs_by_file: Vec<FileSyncs>,
    /// Such syncs of files that are not listed.
    pub real_syncs_unlisted: u64,
    /// New files that the log has whole, so that their first sync was skipped.
    pub made: u64,
    /// Changes of names that were recorded.
    pub names_recorded: u64,
    /// How often a file left the log, with a real sync.
    pub left: u64,
    /// Programs whose syncs are real ones, with the reason.
    pub plain: Vec<(String, Cause)>,
    /// Waits of a writer for space in the log.
    pub stalls: u64,
    /// Time that writers waited for space.
    pub stalled_ns: u64,
    /// Half of the logged writes took at most this long in the log.
    pub log_p50_ns: u64,
    /// 99 % of the logged writes took at most this long.
    pub log_p99_ns: u64,
    /// 99.9 % of the logged writes took at most this long.
    pub log_p999_ns: u64,
    /// Files that were logged.
    pub files: u64,
    /// Bytes of files that the cleaner made durable on their disks.
    pub written_back_bytes: u64,
    /// Syncs of the cleaner.
    pub cleaner_syncs: u64,
    /// Syncs of the cleaner that failed, and were tried again.
    pub cleaner_errors: u64,
}

impl Statistics {
    /// Returns lines of text, each with its title, without line ends.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let size = |bytes| Size { bytes };
        let micros = |ns: u64| format!("{:.2} µs", thousandths(ns));
        let mut lines = vec![
            ("writes", format!("{} logged, {} not", self.writes, self.unlogged_writes)),
            ("written", size_or_none(self.written_bytes)),
            ("fsyncs", self.syncs()),
        ];
        lines.extend(self.real_sync_lines().map(|line| ("real fsyncs", line)));
        if self.made + self.names_recorded > 0 {
            let (made, names) = (self.made, self.names_recorded);
            lines.push(("new files", format!("{made} logged whole, {names} changes of names")));
        }
        if self.left > 0 {
            lines.push(("left", format!("{} times a file left the log, synced", self.left)));
        }
        for (program, cause) in &self.plain {
            lines.push(("plain", format!("{program} {}", cause.reason())));
        }
        if self.log_p50_ns > 0 {
            let (p50, p99) = (micros(self.log_p50_ns), micros(self.log_p99_ns));
            lines.push((
                "log latency",
                format!("p50 {p50}, p99 {p99}, p99.9 {}", micros(self.log_p999_ns)),
            ));
        }
        let (most, all) = (size_or_none(self.log_used_max_bytes), size(self.log_bytes));
        let stalls = match self.stalls {
            0 => "no waits for space".into(),
            number if self.stalled_ns == 0 => format!("{number} waits for space"),
            number => {
                let stalled = thousandths(self.stalled_ns / 1_000_000);
                format!("{number} waits for space, {stalled:.2} s")
            }
        };
        lines.push(("log", format!("at most {most} of {all} in use; {stalls}")));
        lines.push(("files", self.files.to_string()));
        lines.push((
            "written back",
            format!("{} in {} syncs", size_or_none(self.written_back_bytes), self.cleaner_syncs),
        ));
        if self.cleaner_errors > 0 {
            lines.push(("errors", format!("{} syncs of the cleaner failed", self.cleaner_errors)));
        }
        lines
    }

    /// Returns the lines of `tidegate stat`.
    pub fn status_lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("pool", self.pool.display().to_string())];
        let used = size_or_none(self.log_used_bytes);
        if !self.live {
            lines.push(("supervisor", "none: no program runs on this pool".into()));
            lines.push(("log", format!("{used} in use")));
            return lines;
        }
        lines.push(("supervisor", format!("lives, with {} processes", self.processes)));
        lines.push(("in use now", used));
        lines.extend(self.lines());
        lines
    }

    /// Returns lines about real syncs: their number by reason, and the files with the most.
    fn real_sync_lines(&self) -> impl Iterator<Item = String> {
        let counted = |(_, key, why): (_, &str, _)| {
            let number = self.real_syncs.get(key).copied().filter(|number| *number > 0)?;
            Some(format!("{why}: {number}"))
        };
        let reasons = REASONS.into_iter().filter_map(counted).collect::<Vec<_>>().join(", ");
        let shown = self.real_syncs_by_file.iter().take(FILES_SHOWN).map(FileSyncs::line);
        let hidden = self.real_syncs_by_file.iter().skip(FILES_SHOWN).map(|file| file.number);
        let others = match hidden.sum::<u64>() + self.real_syncs_unlisted {
            0 => String::new(),
            number => format!("{number} of other files"),
        };
        once(reasons).chain(shown).chain(once(others)).filter(|line| !line.is_empty())
    }

    fn syncs(&self) -> String {
        let counts = format!("{} skipped, {} done", self.fsyncs_skipped, self.fsyncs_done);
        match self.fsync_mean_ns {
            0 => counts,
            mean_ns => format!("{counts}, {:.2} ms each on average", thousandths(mean_ns / 1000)),
        }
    }
}

/// Returns `value / 1000`, without the loss of a cast.
fn thousandths(value: u64) -> f64 {
    std::time::Duration::from_millis(value).as_secs_f64()
}

/// Returns a size as text; "nothing" for 0.
fn size_or_none(bytes: u64) -> String {
    if bytes == 0 { "nothing".into() } else { Size { bytes }.to_string() }
}

/// The cleaner's counters beside the log's own.
#[derive(Debug, Default)]
pub struct CleanerCounts {
    written_back_bytes: AtomicU64,
    files: AtomicU64,
    errors: AtomicU64,
}

impl CleanerCounts {
    /// Counts `bytes` that a sync made durable, and sets the number of files seen until then.
    pub fn written_back(&self, bytes: u64, files: u64) {
        self.written_back_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.files.store(files, Ordering::Relaxed);
    }

    /// Counts a sync that failed.
    pub fn failed(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }
}

impl Statistics {
    /// Returns the counters of `log`, the pool at `pool`.
    pub fn of(pool: &Path, log: &Log, counts: &CleanerCounts) -> Self {
        let stats = log.ring().stats();
        let total = |counter| stats.total(counter);
        // In this order: the tail could overtake a head that was read first.
        let tail = log.ring().tail();
        let used_bytes = log.ring().head().saturating_sub(tail);
        let measured = total(Counter::SyncsReal);
        let fsync_mean_ns = total(Counter::SyncsRealNs).checked_div(measured).unwrap_or(0);
        let others = [Counter::SyncsUnsupported, Counter::SyncsOfDirectories];
        let fsyncs_done = measured + others.into_iter().map(total).sum::<u64>();
        let fsyncs_skipped = total(Counter::SyncsSkipped);
        let latencies = stats.latencies();
        let (by_file, real_syncs_unlisted) = log.real_syncs().rows();
        Self {
            pool: pool.to_path_buf(),
            live: true,
            log_bytes: log.ring().pool().ring_bytes(),
            log_used_bytes: used_bytes,
            log_used_max_bytes: total(Counter::HighWaterBytes).max(used_bytes),
            processes: 0,
            writes: total(Counter::Writes),
            written_bytes: total(Counter::WriteBytes),
            unlogged_writes: total(Counter::UnloggedWrites),
            fsyncs_skipped,
            fsyncs_done,
            fsync_mean_ns,
            real_syncs: REASONS.map(|(counter, key, _)| (key.into(), total(counter))).into(),
            real_syncs_by_file: by_file.iter().map(FileSyncs::of).collect(),
            real_syncs_unlisted,
            made: total(Counter::SyncsMade),
            names_recorded: total(Counter::NamesRecorded),
            left: total(Counter::Leaves),
            plain: Vec::new(),
            stalls: total(Counter::FullWaits),
            stalled_ns: total(Counter::FullWaitNs),
            log_p50_ns: percentile(&latencies, 500),
            log_p99_ns: percentile(&latencies, 990),
            log_p999_ns: percentile(&latencies, 999),
            files: counts.files.load(Ordering::Relaxed),
            written_back_bytes: counts.written_back_bytes.load(Ordering::Relaxed),
            cleaner_syncs: total(Counter::CleanerSyncs),
            cleaner_errors: counts.errors.load(Ordering::Relaxed),
        }
    }
}

/// Returns the longest time among the fastest `thousandths` of all; 0 if there are none.
fn percentile(latencies: &[u64], thousandths: u64) -> u64 {
    let all: u64 = latencies.iter().sum();
    let wanted = (all * thousandths).div_ceil(1000).max(1);
    let mut seen = 0;
    let bucket = latencies.iter().position(|number| {
        seen += number;
        seen >= wanted
    });
    bucket.map_or(0, upper_bound_ns)
}

#[cfg(test)]
mod tests {
    use tidegate::log::BUCKETS;

    use super::super::trial::Trial;
    use super::*;

    #[test]
    fn a_tail_that_is_ahead_leaves_nothing_in_use() {
        let trial = Trial::new();
        trial.log.ring().show_space(trial.log.ring().head() + 4096);
        let counts = CleanerCounts::default();
        assert_eq!(Statistics::of(Path::new("pool"), &trial.log, &counts).log_used_bytes, 0);
    }

    #[test]
    fn percentiles_are_those_of_the_counts() {
        let mut latencies = [0; BUCKETS];
        assert_eq!(percentile(&latencies, 500), 0);
        latencies[3] = 500;
        latencies[7] = 499;
        latencies[100] = 1;
        assert_eq!(percentile(&latencies, 500), upper_bound_ns(3));
        assert_eq!(percentile(&latencies, 501), upper_bound_ns(7));
        assert_eq!(percentile(&latencies, 999), upper_bound_ns(7));
        assert_eq!(percentile(&latencies, 1000), upper_bound_ns(100));
    }

    fn file(number: u32) -> FileSyncs {
        FileSyncs {
            file: format!("/d/{number}"),
            program: "sh".into(),
            process: 7,
            cause: "directories".into(),
            number: 1,
        }
    }

    #[test]
    fn names_have_nothing_that_a_terminal_obeys() {
        assert_eq!(text(b"/a\x1b[31m\xff\n\0behind"), "/a?[31m\u{fffd}?");
    }

    #[test]
    fn the_summary_has_units_and_says_what_it_does_not_know() {
        let statistics = Statistics {
            fsyncs_skipped: 1000,
            fsyncs_done: 4,
            fsync_mean_ns: 2_500_000,
            real_syncs: [("not_yet".into(), 1), ("own".into(), 0), ("directories".into(), 13)]
                .into(),
            real_syncs_by_file: (0..12).map(file).collect(),
            real_syncs_unlisted: 2,
            log_bytes: 1 << 30,
            ..Statistics::default()
        };
        assert_eq!(statistics.syncs(), "1000 skipped, 4 done, 2.50 ms each on average");
        assert_eq!(Statistics::default().syncs(), "0 skipped, 0 done");
        let lines: Vec<_> = statistics.real_sync_lines().collect();
        assert_eq!(lines[0], "not yet in the log: 1, a directory: 13");
        assert_eq!(lines[1], "1 of /d/0 by sh (7): a directory");
        assert_eq!((lines.len(), &*lines[11]), (12, "4 of other files"));
        let text = statistics.lines().into_iter().map(|(_, value)| value).collect::<Vec<_>>();
        assert!(
            text.contains(&"at most nothing of 1G in use; no waits for space".into()),
            "{text:?}"
        );
    }
}
