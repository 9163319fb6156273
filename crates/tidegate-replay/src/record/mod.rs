//! `tidegate record`: records a trace of a running program.
//!
//! The library that is preloaded into the program (`tidegate-record-preload`) reports operations
//! through memory that survives the program. A thread of the recorder drains the events
//! (`recorder`), sorts them by time, resolves files and their names (`files`), and writes rows of
//! the format `csv` (`rows`), which `tidegate replay` reads. `programs` tracks which processes are
//! recorded, and `summary` prints the totals.

mod files;
mod programs;
mod recorder;
mod rows;
mod summary;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use tidegate::glob::Filter;
use tidegate_record::rings::Rings;
use tidegate_run::{Launch, Library, Plan, Program};

use crate::error::{Error, Result, with_causes};
use recorder::Recorder;
use rows::Rows;

/// Preferred directory of shared memory.
const SHARED_MEMORY: &str = "/dev/shm";
/// The variable that passes the path of the rings to the library.
const RINGS_VARIABLE: &str = "TIDEGATE_RECORD";

/// Arguments of `tidegate record`.
#[derive(Debug, clap::Args)]
pub struct RecordArgs {
    /// The trace to write, compressed if the name ends in .zst; CMD.csv.zst in the current
    /// directory unless given
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Record only files whose absolute path matches; `*` and `?` also match slashes; may be
    /// repeated
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<OsString>,
    /// Do not record files whose absolute path matches; stronger than --include; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<OsString>,
    /// Print nothing on standard error but errors
    #[arg(short, long)]
    pub quiet: bool,
    /// The program, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

impl RecordArgs {
    /// Runs the program, writes the trace, and returns the program's exit status.
    ///
    /// # Errors
    /// The program cannot be started, or the trace cannot be written.
    pub fn run(&self) -> Result<ExitCode> {
        let name =
            self.command.first().ok_or_else(|| Error::Usage("no program is given".into()))?;
        let program = Program::find(name, std::env::var_os("PATH").as_deref(), &[])
            .map_err(|error| Error::Start(with_causes(&error)))?;
        let library = Library::RECORD.find().map_err(|error| Error::Start(format!("{error:#}")))?;
        let output = self.output.clone().unwrap_or_else(|| default_output(&program.file));
        let rows = Rows::create(&output)?;
        let memory = Memory::new()?;
        let begun = Instant::now();
        let recorder =
            Recorder::start(Arc::clone(&memory.rings), self.filter(), rows).map_err(|error| {
                Error::Start(format!("cannot start the recorder's thread: {error}"))
            })?;
        let environment = vec![
            tidegate_run::preloaded(&library),
            (RINGS_VARIABLE, Some(memory.path.clone().into())),
        ];
        let plan = Plan {
            program: &program,
            command: &self.command,
            environment,
            filter: None,
            adopts: false,
        };
        let status = run_to_its_end(plan, &program.file);
        let mut summary = recorder.finish();
        if let Some(cause) = program.unwatched {
            summary.add_unwatched(&program.file, cause.reason());
        }
        let status = status?;
        let written = summary.written.take();
        written.map_or(Ok(()), |error| Err(Error::io(&output)(error)))?;
        if !self.quiet {
            summary.print(&output, begun.elapsed());
        }
        Ok(ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)))
    }

    fn filter(&self) -> Filter {
        let lines = |globs: &[OsString]| -> &'static [u8] {
            globs.join(std::ffi::OsStr::new("\n")).into_vec().leak()
        };
        Filter { include: lines(&self.include), exclude: lines(&self.exclude) }
    }
}

fn run_to_its_end(plan: Plan<'_>, file: &Path) -> Result<i32> {
    let failed =
        |what: &str, error| Error::Start(format!("cannot {what} {}: {error}", file.display()));
    let launch = Launch::start(plan).map_err(|error| failed("run", error))?;
    launch.wait().map_err(|error| failed("wait for", error))
}

/// Returns the default path of a trace of `program`.
fn default_output(program: &Path) -> PathBuf {
    let mut name = program.file_name().unwrap_or_default().to_owned();
    name.push(".csv.zst");
    name.into()
}

/// The rings, in a file that is removed when the recorder ends.
struct Memory {
    path: PathBuf,
    rings: Arc<Rings>,
}

impl Memory {
    fn new() -> Result<Self> {
        let shared = Path::new(SHARED_MEMORY);
        let folder = if shared.is_dir() { shared.into() } else { std::env::temp_dir() };
        let path = folder.join(format!("tidegate-record-{}", std::process::id()));
        // An existing file belongs to a killed recorder that had this process's number.
        let _ = std::fs::remove_file(&path);
        let rings = Rings::create(&path).map_err(|error| Error::Start(with_causes(&error)))?;
        Ok(Self { path, rings: Arc::new(rings) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The next recorder with this process number removes a file that remains.
        let _ = std::fs::remove_file(&self.path);
    }
}
