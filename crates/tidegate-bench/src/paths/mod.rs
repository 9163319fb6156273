//! The cost of each hot path: instructions, locked operations, fences and cache lines written back.
//!
//! Times hardly show a small loss on a shared machine; counts are equal in each run. A file of
//! limits bounds the counts: a change that raises a count has to raise its limit.

mod instruction;
mod step;
mod work;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};
use strum::VariantArray;

use self::step::Counts;
pub use self::work::HotPath;
use self::work::{OVERWRITE, OVERWRITE_NUMBERS};
use crate::block::scratch;
use crate::child::{find_program, this_program};
use crate::error::{BenchError, Result};
use crate::nbd::this_server;
use crate::table::Table;

/// Allowed difference of instructions from the limit in per cent. In a debug build the compiler
/// inlines other functions when code beside them changes; the other counts are exact.
const TOLERANCE_PCT: u64 = 20;
/// Bytes of the pool of `tidegate run`.
const RUN_POOL_BYTES: &str = "64M";

/// Counts instructions of the hot paths (x86-64 only)
#[derive(Debug, Clone, Args)]
pub struct PathsArgs {
    /// Fail where a count is above the one in this file
    #[arg(long, value_name = "FILE")]
    pub limits: Option<PathBuf>,
    /// Write the counts to the file of limits
    #[arg(long, requires = "limits")]
    pub update: bool,
    /// Directory on a disk, for the file under `tidegate run`
    #[arg(long, default_value = "/var/tmp")]
    pub dir: PathBuf,
}

/// The part of the program that is traced.
#[derive(Debug, Clone, Subcommand)]
pub enum PathCommand {
    /// Repeat the operation of a hot path for a tracer
    #[command(hide = true)]
    PathChild {
        /// The path.
        path: HotPath,
    },
}

impl PathCommand {
    /// Runs the traced part.
    ///
    /// # Errors
    /// Pool or device refuse.
    pub fn run(&self) -> Result<()> {
        let Self::PathChild { path } = self;
        path.work()
    }
}

impl PathsArgs {
    /// Counts, prints a table, and compares with the limits or writes them.
    ///
    /// # Errors
    /// A count is above its limit; a path cannot be traced; the file of limits cannot be used.
    pub fn run(&self) -> Result<()> {
        let mut counts = BTreeMap::new();
        for path in HotPath::VARIANTS {
            let mut command = Command::new(this_program()?);
            command.args(["path-child", path.into()]);
            counts.insert(<&str>::from(path), median_of(command)?);
        }
        counts.insert("covered-overwrite", self.covered_overwrite()?);
        println!("{}", table(&counts).markdown());
        match &self.limits {
            Some(file) if self.update => {
                std::fs::write(file, in_file(&counts)).map_err(BenchError::os("write", file))
            }
            Some(file) => {
                let text = std::fs::read_to_string(file).map_err(BenchError::os("read", file))?;
                compare(&counts, &text).map_err(|found| BenchError::program("paths", found))
            }
            None => Ok(()),
        }
    }

    fn covered_overwrite(&self) -> Result<Counts> {
        let (dir, pool) = (scratch(&self.dir)?, scratch(Path::new("/dev/shm"))?);
        let mut command = Command::new(this_server()?);
        command.args(["run", "--quiet", "--size", RUN_POOL_BYTES, "--pool"]);
        command.arg(pool.path().join("pool")).arg("--").arg(find_program("python3", "python3")?);
        command.args(["-c", OVERWRITE]).arg(dir.path().join("overwritten"));
        command.args(OVERWRITE_NUMBERS.map(|number| number.to_string()));
        median_of(command)
    }
}

/// Returns the median of the counts of the operations of `command`.
fn median_of(command: Command) -> Result<Counts> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut counts = step::count(command)?;
    counts.sort_unstable();
    let median = counts.get(counts.len() / 2).copied();
    median.ok_or_else(|| BenchError::program(&name, "no operation was traced".to_owned()))
}

fn table(counts: &BTreeMap<&str, Counts>) -> Table {
    let headers = ["path", "instructions", "locked", "fences", "lines written back"];
    let mut table = Table::new("hot-paths", "Instructions of hot paths", &headers);
    for (path, counts) in counts {
        let mut row = vec![(*path).to_owned()];
        row.extend(counts.all().map(|count| count.to_string()));
        table.push(row);
    }
    table
}

impl Counts {
    fn all(&self) -> [u64; 4] {
        [self.instructions, self.locked, self.fences, self.write_backs]
    }
}

fn in_file(counts: &BTreeMap<&str, Counts>) -> String {
    let mut text = String::from(
        "# Most instructions, locked operations, fences and cache lines written back of each hot\n\
         # path, as `tidegate-bench paths` counts them in a debug build. A change that raises a\n\
         # number says why. `tidegate-bench paths --limits THIS --update` writes it.\n",
    );
    for (path, counts) in counts {
        let [instructions, locked, fences, lines] = counts.all();
        let _ = writeln!(text, "{path} {instructions} {locked} {fences} {lines}");
    }
    text
}

/// Compares `counts` with the limits in `text`.
fn compare(counts: &BTreeMap<&str, Counts>, text: &str) -> std::result::Result<(), String> {
    let mut limits = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let path = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
        let numbers: [u64; 4] =
            numbers.try_into().map_err(|_| format!("{line:?}: expected a path and 4 numbers"))?;
        limits.insert(path, numbers);
    }
    let mut above = String::new();
    for (path, counts) in counts {
        let Some([instructions, exact @ ..]) = limits.remove(path) else {
            let _ = write!(above, "{path} has no limit; ");
            continue;
        };
        let [found, exact_found @ ..] = counts.all();
        let most = instructions + instructions * TOLERANCE_PCT / 100;
        // Below half the limit, another path was counted, or the limit can be lowered.
        if found > most
            || found < instructions / 2
            || exact_found.iter().zip(exact).any(|(found, most)| *found > most)
        {
            let _ = write!(above, "{path}: {:?}, at most [{most}, {exact:?}]; ", counts.all());
        }
    }
    for path in limits.keys() {
        let _ = write!(above, "{path} is no hot path; ");
    }
    if above.is_empty() { Ok(()) } else { Err(above) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTS: Counts = Counts { instructions: 1000, locked: 3, fences: 2, write_backs: 1 };

    #[test]
    fn counts_above_a_limit_are_told() {
        let counts = BTreeMap::from([("btt-write", COUNTS)]);
        assert_eq!(compare(&counts, &in_file(&counts)), Ok(()));
        assert_eq!(compare(&counts, "btt-write 840 3 2 1"), Ok(()), "compilers differ");
        for text in [
            "btt-write 830 3 2 1",
            "btt-write 2002 3 2 1",
            "btt-write 1000 2 2 1",
            "btt-write 1000 3 1 1",
            "btt-write 1000 3 2 0",
            "",
            "btt-write 1000 3 2 1\nbtt-rite 1 1 1 1",
            "btt-write 1000 3 2",
        ] {
            assert!(compare(&counts, text).is_err(), "{text}");
        }
    }
}
