//! The program's messages on standard error: lines for people, or JSON objects for programs.
//!
//! If standard error of a server is the journal, each line begins with its priority as systemd
//! reads it; if it is neither the journal nor a terminal, such as a file or a pipe, with the time.
//!
//! Invariant: no thread of a server waits for its standard error, which may be a full pipe or a
//! halted terminal. A thread of the [log](queue) writes the lines.

mod queue;

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use clap::ValueEnum;
use queue::Queue;
use serde::Serialize;

/// How much a line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// Something is lost, or does not work
    Error,
    /// Something may soon be, or is not as it should be
    Warning,
    /// Something happened
    Info,
}

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Lines for people
    Text,
    /// A JSON object a line: time, level, device, message
    Json,
}

/// The log settings of a server.
struct Setup {
    format: Format,
    level: Level,
    prefix: Prefix,
}

/// The log of a server.
struct Log {
    setup: Setup,
    queue: Queue,
}

/// The prefix of a line of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    Nothing,
    Time,
    /// `<4>`: the journal has the time.
    Priority,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// Sets up the log of a server. Only the first call has an effect.
///
/// # Errors
/// The system refuses a thread.
pub(crate) fn set_up(format: Format, level: Level) -> Result<()> {
    let setup = Setup { format, level, prefix: prefix() };
    if LOG.set(Log { setup, queue: Queue::default() }).is_err() {
        return Ok(());
    }
    let write = || LOG.get().into_iter().for_each(Log::write_lines);
    let thread = std::thread::Builder::new().name("log".into()).spawn(write);
    thread.map(drop).context("cannot start a thread")
}

/// Waits until standard error has the lines of a server, at most `timeout`.
pub(crate) fn flush(timeout: Duration) {
    if let Some(log) = LOG.get() {
        log.queue.wait_until_written(timeout);
    }
}

impl Log {
    /// Writes the lines of the queue as long as the process lives.
    fn write_lines(&self) {
        loop {
            let taken = self.queue.take();
            let dropped = (taken.dropped > 0).then(|| {
                let message = format!(
                    "{} lines of the log are missing here: standard error took no more",
                    taken.dropped
                );
                rendered(&self.setup, None, Level::Warning, &message)
            });
            taken.lines.iter().chain(&dropped).for_each(|line| write(line));
            self.queue.note_written();
        }
    }
}

/// Writes `line` to standard error. A closed standard error is no failure.
fn write(line: &str) {
    // A single call keeps lines of several threads apart.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Returns the prefix that fits standard error.
fn prefix() -> Prefix {
    let Ok(found) = std::fs::metadata("/proc/self/fd/2") else { return Prefix::Nothing };
    let journal = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    prefix_for(&journal, (found.dev(), found.ino()), io::stderr().is_terminal())
}

/// Returns the prefix for a standard error with this device number and inode. systemd names the
/// journal's file in `JOURNAL_STREAM`, here `journal`: a program that was started by a process in
/// the journal may write elsewhere.
fn prefix_for(journal: &str, (device, inode): (u64, u64), is_terminal: bool) -> Prefix {
    if journal == format!("{device}:{inode}") {
        Prefix::Priority
    } else if is_terminal {
        Prefix::Nothing
    } else {
        Prefix::Time
    }
}

/// A line of JSON.
#[derive(Serialize)]
struct Entry<'a> {
    time: String,
    level: Level,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'a str>,
    message: &'a str,
}

/// Writes `message` to standard error. A server does not wait for it, and drops lines that standard
/// error does not take in time.
pub(crate) fn say(level: Level, message: impl std::fmt::Display) {
    say_of(None, level, message);
}

/// Writes `message` about one `device` of several to standard error, like [`say`].
pub(crate) fn say_of(device: Option<&str>, level: Level, message: impl std::fmt::Display) {
    match LOG.get() {
        Some(log) if level > log.setup.level => {}
        Some(log) => log.queue.push(rendered(&log.setup, device, level, &message.to_string())),
        None => write(&plain(device, &message.to_string())),
    }
}

fn rendered(setup: &Setup, device: Option<&str>, level: Level, message: &str) -> String {
    let time = || humantime::format_rfc3339_millis(SystemTime::now()).to_string();
    match (setup.format, setup.prefix) {
        (Format::Json, _) => {
            let entry = Entry { time: time(), level, device, message };
            serde_json::to_string(&entry).unwrap_or_else(|_| plain(device, message))
        }
        (Format::Text, Prefix::Nothing) => plain(device, message),
        (Format::Text, Prefix::Time) => format!("{} {}", time(), plain(device, message)),
        (Format::Text, Prefix::Priority) => {
            let priority = match level {
                Level::Error => 3,
                Level::Warning => 4,
                Level::Info => 6,
            };
            format!("<{priority}>{}", plain(device, message))
        }
    }
}

fn plain(device: Option<&str>, message: &str) -> String {
    let mut text = String::from("tidegate: ");
    if let Some(device) = device {
        // Writing to a string does not fail.
        let _ = write!(text, "{}: ", printable(device));
    }
    text + &printable(message)
}

/// Returns `text` with control characters escaped: terminals would obey them, an end of a line
/// begins what looks like another message, and names of files may have them.
pub(crate) fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escape).collect()
}

/// Returns the lines of `text`, each [`printable`].
pub(crate) fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(format: Format, prefix: Prefix) -> String {
        let setup = Setup { format, level: Level::Info, prefix };
        rendered(&setup, Some("db"), Level::Warning, "a \"b\"\u{1b}")
    }

    #[test]
    fn lines_have_the_time_where_neither_the_journal_nor_a_terminal_shows_it() {
        const STDERR: (u64, u64) = (8, 1234);
        assert_eq!(prefix_for("8:1234", STDERR, false), Prefix::Priority);
        for journal in ["", "8:123", "81:234", "8:12345", "8"] {
            assert_eq!(prefix_for(journal, STDERR, false), Prefix::Time, "{journal:?}");
            assert_eq!(prefix_for(journal, STDERR, true), Prefix::Nothing, "{journal:?}");
        }
    }

    #[test]
    fn lines_suit_what_reads_them() {
        assert_eq!(shown(Format::Text, Prefix::Nothing), "tidegate: db: a \"b\"\\u{1b}");
        assert_eq!(shown(Format::Text, Prefix::Priority), "<4>tidegate: db: a \"b\"\\u{1b}");
        let timed = shown(Format::Text, Prefix::Time);
        let (time, rest) = timed.split_once(' ').unwrap();
        assert!(humantime::parse_rfc3339(time).is_ok() && rest.starts_with("tidegate: db: "));
        let json = shown(Format::Json, Prefix::Time);
        let entry: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(entry["message"], "a \"b\"\u{1b}");
        assert_eq!((&entry["level"], &entry["device"]), (&"warning".into(), &"db".into()));
    }
}
