//! `tidegate-crashtest`: crash tests of `tidegate run`, one or many.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use tidegate_crashtest::campaign::{Report, Setup, Test};
use tidegate_crashtest::file_system::FileSystem;
use tidegate_crashtest::generator;
use tidegate_crashtest::machine::{Cuts, Fault, Runner};
use tidegate_crashtest::model::TimeRule;
use tidegate_crashtest::random::Random;
use tidegate_crashtest::sequence::Sequence;
use tidegate_crashtest::variation::{Extra, varied, vary};
use tidegate_crashtest::worker;

/// Cuts the power after short sequences of file operations, recovers, and compares the result with
/// the allowed outcomes
#[derive(Debug, Parser)]
#[command(name = "tidegate-crashtest", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tests the given sequences, with a cut after each step
    Check {
        #[command(flatten)]
        on: On,
        /// Steps between "; ", such as 'append d0/A 3000; fsync .; rename d0/A d0/B'
        #[arg(required = true)]
        sequences: Vec<Sequence>,
    },
    /// Tests all sequences of some lengths, and samples of longer ones, except sequences with an
    /// operation that the file system lacks
    Run {
        #[command(flatten)]
        on: On,
        #[command(flatten)]
        choice: Choice,
    },
    /// Prints the sequences that `run` would test
    List {
        #[command(flatten)]
        choice: Choice,
    },
    /// Tests the sequences from its standard input
    #[command(hide = true)]
    Worker {
        /// An empty directory.
        dir: PathBuf,
        /// The directory of the compiled interpreter.
        programs: PathBuf,
        #[command(flatten)]
        on: On,
    },
}

#[derive(Debug, Args)]
struct On {
    /// The file system
    #[arg(long, value_enum, default_value = "ext4")]
    file_system: FileSystem,
    /// Run the program under `tidegate run` of this binary; without it, as it is, with real syncs
    #[arg(long)]
    tidegate: Option<PathBuf>,
    /// One more option for `tidegate run`
    #[arg(long, allow_hyphen_values = true)]
    run_option: Vec<String>,
    /// Cover files when users' files are, not at a descriptor's first sync
    #[arg(long)]
    default_admission: bool,
    /// Size of the pool; in one of 128K the log is full soon
    #[arg(long, default_value = "1M")]
    pool_size: String,
    /// Plant a mistake, which must be found: dropped-syncs, lost-records, missed-renames,
    /// missed-directories, early-retire or plain-names
    #[arg(long, value_parser = parse_fault)]
    fault: Option<Fault>,
    /// One more option of the mounts, such as data=journal
    #[arg(long)]
    mount_option: Option<String>,
    /// Compare the times when files were modified, too
    #[arg(long, value_enum)]
    times: Option<TimeRule>,
    /// Number of machines that work at once: four to a CPU unless given, for they wait for
    /// processes and mounts
    #[arg(long, default_value_t = default_workers(), hide_default_value = true)]
    workers: usize,
}

#[derive(Debug, Args)]
struct Choice {
    /// All sequences of this number of operations; may be repeated
    #[arg(long, value_delimiter = ',')]
    all: Vec<usize>,
    /// Add variants of these sequences, with one action from outside after one of their steps
    #[arg(long)]
    outside: bool,
    /// Add variants of these sequences, with one variation of a kind: all, way, kill, outside,
    /// second, clone, crowd, attributes, append-only, reflink, patch, or one of way-NAME and
    /// kill-NAME. Samples get one to three variations
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = parse_extra)]
    with: Vec<Extras>,
    /// Sampled sequences of two to four operations, with a cut after each step
    #[arg(long, default_value_t = 0)]
    samples: u64,
    /// Seed of the samples
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Of all these, only sequences whose number leaves the remainder PART when divided by PARTS
    #[arg(long, value_name = "PART/PARTS", value_parser = parse_part)]
    part: Option<(usize, usize)>,
}

/// The kinds of one name.
#[derive(Debug, Clone)]
struct Extras(Vec<Extra>);

fn parse_extra(text: &str) -> Result<Extras, String> {
    Extra::named(text).map(Extras).map_err(|error| error.to_string())
}

fn default_workers() -> usize {
    4 * std::thread::available_parallelism().map_or(1, usize::from)
}

fn parse_fault(text: &str) -> Result<Fault, String> {
    let fault = Fault::ALL.iter().find(|(_, name)| *name == text).map(|(fault, _)| *fault);
    let names = Fault::ALL.map(|(_, name)| name).join(", ");
    fault.ok_or_else(|| format!("one of {names} is expected"))
}

fn parse_part(text: &str) -> Result<(usize, usize), String> {
    let numbers = text
        .split_once('/')
        .and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?)));
    numbers
        .filter(|(_, parts)| *parts > 0)
        .ok_or_else(|| "PART/PARTS is expected, such as 0/10".into())
}

impl On {
    fn setup(&self) -> Result<Setup> {
        let runner = match &self.tidegate {
            None => Runner::Plain,
            Some(binary) => Runner::Tidegate {
                binary: binary.canonicalize()?,
                options: self.run_option.clone(),
                covers_at_once: !self.default_admission,
                pool_size: self.pool_size.clone(),
            },
        };
        Ok(Setup {
            harness: std::env::current_exe()?,
            programs: None,
            file_system: self.file_system,
            runner,
            fault: self.fault,
            time_rule: self.times,
            mount_option: self.mount_option.clone(),
            workers: self.workers,
        })
    }
}

/// Returns the command line that tests one sequence again.
fn again(setup: &Setup, sequence: &Sequence) -> String {
    let arguments = setup.arguments();
    let arguments: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
    format!("tidegate-crashtest check {} '{}'", arguments.join(" "), sequence.one_line())
}

impl Choice {
    fn tests(&self) -> Vec<Test> {
        let all = self.all.iter().flat_map(|length| generator::all(*length));
        let all = all.flat_map(|sequence| {
            if self.outside { generator::with_outside(&sequence) } else { vec![sequence] }
        });
        let extras: Vec<Extra> = self.with.iter().flat_map(|it| it.0.iter().copied()).collect();
        let all = all.flat_map(|sequence| {
            let varied = extras.iter().flat_map(|extra| varied(&sequence, *extra));
            let varied: Vec<Sequence> = varied.collect();
            std::iter::once(sequence).chain(varied)
        });
        let all = all.map(|sequence| Test { sequence, cuts: Cuts::Last });
        let samples = (0..self.samples).map(|number| {
            let length = 2 + usize::try_from(number % 3).unwrap_or_default();
            let seed = self.seed.wrapping_mul(1 << 32) + number;
            let mut sequence = generator::sample(length, seed);
            if !extras.is_empty() {
                sequence = vary(sequence, &extras, &mut Random::new(seed));
            }
            Test { sequence, cuts: Cuts::All }
        });
        let (part, parts) = self.part.unwrap_or((0, 1));
        all.chain(samples).skip(part).step_by(parts).collect()
    }
}

fn run(on: &On, tests: Vec<Test>) -> Result<Report> {
    let bar = ProgressBar::new(tests.len() as u64);
    let style = "{bar:40} {pos}/{len} {per_sec} {eta} left, {msg}";
    bar.set_style(ProgressStyle::with_template(style)?);
    let found = std::sync::atomic::AtomicU64::new(0);
    let setup = on.setup()?;
    let report = setup.run(tests, |test, violations| {
        let count = violations.len() as u64;
        let count = found.fetch_add(count, std::sync::atomic::Ordering::Relaxed) + count;
        bar.set_message(format!("{count} violations"));
        bar.inc(1);
        if !violations.is_empty() {
            bar.suspend(|| {
                println!(
                    "{}: {}\n  {}",
                    setup.file_system.name(),
                    violations.join("\n  "),
                    again(&setup, &test.sequence)
                );
            });
        }
    })?;
    bar.finish_and_clear();
    for (sequence, error) in &report.errors {
        println!("not tested: {error}\n  {}", again(&setup, sequence));
    }
    println!("{report}");
    Ok(report)
}

fn main() -> Result<ExitCode> {
    let report = match Cli::parse().command {
        Command::Check { on, sequences } => {
            let tests = sequences.into_iter().map(|sequence| Test { sequence, cuts: Cuts::All });
            run(&on, tests.collect())?
        }
        Command::Run { on, choice } => {
            let mut tests = choice.tests();
            tests.retain(|test| on.file_system.can_execute(&test.sequence));
            run(&on, tests)?
        }
        Command::List { choice } => {
            let (tests, mut out) = (choice.tests(), std::io::stdout().lock());
            let mut lines = tests.iter().map(|test| writeln!(out, "{}", test.sequence.one_line()));
            // A failed write ends the list: the reader has closed the pipe.
            let _ = lines.find(Result::is_err);
            return Ok(ExitCode::SUCCESS);
        }
        Command::Worker { dir, programs, on } => {
            let setup = on.setup()?;
            let Setup { file_system, runner, fault, time_rule, mount_option, .. } = setup;
            worker::work(&dir, &programs, file_system, runner, fault, time_rule, mount_option)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let is_good = report.violations.is_empty() && report.errors.is_empty();
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
