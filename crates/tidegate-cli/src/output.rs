//! Output of commands: results on standard output, progress on standard error, errors in one line.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tidegate::stack::StackError;
use tidegate::tier::Line;
use tidegate_run::Reporter;

use crate::log::{Level, printable, printable_lines, say};

/// Wrong usage that only shows after parsing, such as options that contradict each other: exit
/// status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// A failed write to standard output.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
struct OutputError(#[source] io::Error);

/// Prints `line`, which is one, on standard output.
///
/// # Errors
/// Standard output is full.
pub(crate) fn line(line: impl std::fmt::Display) -> io::Result<()> {
    printed(writeln!(io::stdout(), "{}", printable(&line.to_string())))
}

/// Prints the lines of `text` on standard output.
///
/// # Errors
/// Standard output is full.
pub(crate) fn lines(text: &str) -> io::Result<()> {
    printed(writeln!(io::stdout(), "{}", printable_lines(text)))
}

/// Returns the outcome of printing on standard output. A pipe that its reader has closed is no
/// failure.
///
/// # Errors
/// Standard output is full.
pub(crate) fn printed(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed.map_err(|error| io::Error::new(error.kind(), OutputError(error))),
    }
}

/// Prints one JSON object on standard output.
///
/// # Errors
/// Standard output is full.
pub(crate) fn json(object: &impl Serialize) -> io::Result<()> {
    lines(&escaped(&serde_json::to_string_pretty(object)?))
}

/// Returns JSON `text` without control characters in its strings: printing would show them in
/// another way than JSON's.
fn escaped(text: &str) -> String {
    let escape = |character: char| match character {
        '\n' => "\n".to_owned(),
        control if control.is_control() => format!("\\u{:04x}", u32::from(control)),
        other => other.to_string(),
    };
    text.chars().map(escape).collect()
}

/// Prints `label` and `value` as one aligned line.
///
/// # Errors
/// Standard output is full.
pub(crate) fn field(label: &str, value: impl std::fmt::Display) -> io::Result<()> {
    line(format_args!("{label:<14} {value}"))
}

/// Prints each line with its label aligned.
///
/// # Errors
/// Standard output is full.
pub(crate) fn print_lines(lines: &[Line]) -> io::Result<()> {
    lines.iter().try_for_each(|(label, text)| field(label, text))
}

/// Returns the error of a command that the stack refused: wrong usage if it has tried nothing.
pub(crate) fn stack_error(error: StackError) -> anyhow::Error {
    if error.is_usage() { UsageError(error.to_string()).into() } else { error.into() }
}

/// Returns `path` for people and programs in other directories. JSON has characters only, so other
/// bytes are replaced.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    absolute.to_string_lossy().into_owned().into()
}

/// Returns `text` as one line, as every error must be.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Prints the messages of a session of `tidegate run` on standard error.
pub(crate) struct Terminal {
    is_quiet: bool,
    recovery: Mutex<Option<ProgressBar>>,
}

impl Terminal {
    /// Creates a terminal, which prints nothing if `is_quiet`.
    pub(crate) fn new(is_quiet: bool) -> Self {
        Self { is_quiet, recovery: Mutex::new(None) }
    }
}

impl Reporter for Terminal {
    fn notice(&self, message: &str) {
        if !self.is_quiet {
            say(Level::Info, message);
        }
    }

    fn progress(&self, done: u64, total: u64) {
        if self.is_quiet {
            return;
        }
        let mut recovery = self.recovery.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = recovery.get_or_insert_with(|| progress("recovering"));
        bar.set_length(total);
        bar.set_position(done);
    }

    fn progress_ended(&self) {
        let bar = self.recovery.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
    }
}

/// Returns a progress bar on standard error without a length, shown on a terminal only.
pub(crate) fn progress(what: &'static str) -> ProgressBar {
    bar(what, "{msg} {wide_bar} {percent:>3}% {eta}")
}

/// Returns a spinner on standard error for work without a measure, shown on a terminal only.
pub(crate) fn spinner(what: &'static str) -> ProgressBar {
    let spinner = bar(what, "{spinner} {msg}, {elapsed}");
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

fn bar(what: &'static str, template: &str) -> ProgressBar {
    let target = if io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, target).with_style(style).with_message(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_control_characters_in_its_own_form() {
        let found = ["a\u{7f}b\u{85}\u{1}\"\n"];
        let text = escaped(&serde_json::to_string_pretty(&found).expect("texts are JSON"));
        let shown: String = text.chars().filter(|character| character.is_control()).collect();
        assert_eq!(shown, "\n\n", "the lines of the text");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).expect("it is JSON"), found);
    }
}
