//! `tidegate run`: runs a program and all processes that it starts, with a log before their files.

mod volatile;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use tidegate::log::cover::Cause;
use tidegate::size::Size;
use tidegate_run::{
    Asked, Choice, Launch, Library, Plan, PoolPaths, Program, Reply, Request, SIGNAL_STATUS,
    Session, SessionOptions, ask_at, default_pool, environment, is_empty, prepare_pool, tell,
};

use super::create::check_log_size;
use crate::args::RunArgs;
use crate::log::{Level, say};
use crate::output::{Terminal, UsageError};

/// Size of a new pool unless given.
const DEFAULT_SIZE: Size = Size { bytes: 1 << 30 };

/// Runs the program, and returns its exit status.
///
/// # Errors
/// The program cannot be run this way, or the pool cannot be used.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let Some(name) = args.command.first() else {
        return Err(UsageError("no program is given: tidegate run -- CMD ARG...".into()).into());
    };
    let program = Program::find(name, std::env::var_os("PATH").as_deref(), &args.trust)?;
    if let Some(scope) = args.volatile {
        return volatile::run(args, &program, scope);
    }
    let library = Library::RUN.find()?;
    let size = args.size.unwrap_or(DEFAULT_SIZE);
    let path = args.pool.clone().map_or_else(default_pool, Ok)?;
    if !path.exists() || is_empty(&path) {
        check_log_size(&path, size)?;
    }
    let pool = prepare_pool(&path, size)?;
    let paths = PoolPaths::of_pool(&pool.path)?;
    let terminal = Terminal::new(args.quiet);
    let options = SessionOptions { latencies: args.stats, ..SessionOptions::default() };
    let session = Session::open(&pool.path, &paths, options, &terminal);
    let session = session.inspect_err(|_| pool.undo(&paths))?;
    let pool = pool.path;
    if !args.quiet {
        announce(&pool, &session, args.size);
    }
    let RunArgs { include, exclude, trust, every_write, .. } = args;
    let choice = Choice { include, exclude, trust, every_write: *every_write };
    let environment = environment(&library, &pool, &paths, choice);
    let (filter, adopts) = (None, false);
    let plan = Plan { program: &program, command: &args.command, environment, filter, adopts };
    let finished = session.during(|| {
        suspend_for(&program, &paths, &terminal)?;
        let launch = start(plan)?;
        launch.wait().context("cannot wait for the program")
    })?;
    if let (true, Some(statistics)) = (args.stats, finished.statistics) {
        for (label, value) in statistics.lines() {
            say(Level::Info, format_args!("{label:<14} {value}"));
        }
    }
    let interrupted = finished.interrupted_by.map(|signal| SIGNAL_STATUS + signal);
    Ok(exit_code(interrupted.unwrap_or(finished.returned)))
}

fn start(plan: Plan<'_>) -> Result<Launch> {
    let program = plan.program;
    Launch::start(plan).with_context(|| format!("cannot run {}", program.file.display()))
}

fn exit_code(status: i32) -> ExitCode {
    ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX))
}

/// Suspends logging as long as this launcher lives, if `program` cannot be watched. For a trusted
/// program, only notifies the supervisor.
fn suspend_for(program: &Program, paths: &PoolPaths, terminal: &Terminal) -> Result<()> {
    let Some(cause) = program.unwatched else { return Ok(()) };
    let program = Some(program.file.display().to_string());
    if cause == Cause::Trusted {
        return tell(paths, &Request::Plain { cause, program });
    }
    let process = std::process::id().cast_signed();
    let request = Request::Suspend { process, cause: Some(cause), program };
    let asked = ask_at(paths, &request, terminal).context("cannot suspend the log")?;
    match asked {
        Asked::Reply(Reply::Suspended) => Ok(()),
        _ => anyhow::bail!("cannot suspend the log: its supervisor gave no answer"),
    }
}

/// Prints one line on standard error: the pool, and the effect of a power cut.
fn announce(pool: &Path, session: &Session<'_>, asked: Option<Size>) {
    let welcome = &session.welcome;
    let size = Size { bytes: welcome.pool_bytes };
    let kept = match asked {
        Some(asked) if asked != size => {
            format!(" (it keeps its size; --size {asked} has no effect)")
        }
        _ => String::new(),
    };
    let recovered = match &welcome.recovered {
        Some(recovered) => format!("; recovered: {recovered}"),
        None => String::new(),
    };
    say(
        Level::Info,
        format_args!(
            "pool {}, {size}{kept}, {}; power cut: {}{recovered}",
            pool.display(),
            welcome.kind,
            welcome.power_cut
        ),
    );
}
