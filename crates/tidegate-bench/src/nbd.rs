//! NBD servers over unix sockets, side by side: `bench nbd`.
//!
//! Invariants:
//! 1. All servers run during the whole measurement, idle outside their turns. nbdcopy fills each
//!    once with random bytes before the first run that counts.
//! 2. Servers take turns: each is measured once in a repetition, under the same conditions.
//! 3. Every server ends with this process, however the process ends.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use strum::VariantArray;
use tempfile::TempDir;
use tidegate::btt::BttOptions;
use tidegate::cache::{self, CacheOptions};
use tidegate::pmem::MediaModel;

use crate::block::{create_region, pool_bytes, scratch};
use crate::child::{Child, find_program, output_of, seconds_of, this_program};
use crate::common::CommonArgs;
use crate::error::{BenchError, Result, require};
use crate::fio;
use crate::measure::{Collector, Key, Op, Sample, Series};
use crate::output::OutputArgs;
use crate::pattern::Rng;
use crate::policy::by_name;
use crate::progress::Progress;

/// Case of random requests by fio.
pub(crate) const RANDOM: &str = "nbd-random";
/// Case of a copy of a file onto the whole device.
pub(crate) const COPY_IN: &str = "nbdcopy-in";
/// Case of a copy of the whole device to nowhere.
pub(crate) const COPY_OUT: &str = "nbdcopy-out";

/// Size of fio's requests in bytes.
const BLOCK_BYTES: u64 = 4096;

/// A server to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Policy {
    /// `tidegate serve` on a BTT.
    Btt,
    /// `tidegate serve` on a cache of twice the size, before a device that keeps nothing.
    Cache,
    /// `tidegate serve` on a log, before a device that keeps nothing.
    Log,
    /// nbdkit's memory plugin.
    #[strum(serialize = "peer:nbdkit-memory")]
    NbdkitMemory,
    /// nbdkit's file plugin on a file beside the pool.
    #[strum(serialize = "peer:nbdkit-file")]
    NbdkitFile,
    /// qemu-nbd on a raw file beside the pool.
    #[strum(serialize = "peer:qemu-nbd")]
    QemuNbd,
}

impl Policy {
    fn name(self) -> &'static str {
        self.into()
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        by_name("server", Self::VARIANTS, Self::name, text)
    }
}

/// Arguments of `bench nbd`.
#[derive(Debug, Clone, Args)]
pub struct NbdArgs {
    /// Servers to compare: btt, cache (all of it fits), log, peer:nbdkit-memory, peer:nbdkit-file,
    /// peer:qemu-nbd
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "btt,peer:nbdkit-memory,peer:nbdkit-file,peer:qemu-nbd"
    )]
    pub policies: Vec<Policy>,
    /// Jobs of fio, each a process with a connection, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// Requests in flight of each job, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,32")]
    pub iodepth: Vec<u32>,
    /// Command that serves the BTT, the cache or the log; {pool} and {socket} stand for the paths
    /// [default: the tidegate beside this program]
    #[arg(long, value_name = "COMMAND")]
    pub server: Option<String>,
    /// What all measurements share.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// A running server.
struct Server {
    policy: Policy,
    uri: String,
    _process: Child,
}

/// Returns the planned time of [`measure`].
pub fn planned(args: &NbdArgs) -> Duration {
    let servers = u32::try_from(args.policies.len()).unwrap_or(u32::MAX);
    planned_hits(args) + copy_cost(args) * 2 * args.common.repetitions * servers
}

/// Returns the planned time of [`measure`] without copies.
pub(crate) fn planned_hits(args: &NbdArgs) -> Duration {
    let servers = u32::try_from(args.policies.len()).unwrap_or(u32::MAX);
    let runs = u32::try_from(groups(args).len()).unwrap_or(u32::MAX);
    (copy_cost(args) + step_cost(args) * runs * args.common.repetitions) * servers
}

fn step_cost(args: &NbdArgs) -> Duration {
    // fio ramps up for a fifth of the time, and starts and stops in half a second.
    Duration::from_secs_f64(args.common.seconds() * 1.2 + 0.5)
}

fn copy_cost(args: &NbdArgs) -> Duration {
    Duration::from_nanos(args.common.size)
}

/// Measures all servers and combinations that `args` name: copies if `copies`, then random
/// requests.
///
/// # Errors
/// [`BenchError::Missing`] if a program is not installed, and errors that the programs report.
pub fn measure(args: &NbdArgs, progress: &mut Progress, copies: bool) -> Result<Vec<Series>> {
    args.common.check()?;
    find_programs(args)?;
    let has_zero = args.threads.contains(&0) || args.iodepth.contains(&0);
    require(!has_zero, "--threads and --iodepth: expected at least 1")?;
    let dir = scratch(&args.common.dir)?;
    let (source, collector) = (random_file(&dir, args.common.size)?, Collector::default());
    let mut bench = Bench { args, dir, source, progress, collector };
    let servers: Vec<_> =
        args.policies.iter().map(|&policy| bench.start(policy)).collect::<Result<_>>()?;
    bench.fill(&servers)?;
    if copies {
        bench.copies(&servers)?;
    }
    bench.random(&servers)?;
    Ok(bench.collector.into_series())
}

/// Checks that all programs for [`measure`] are installed, before other measurements run for
/// minutes.
///
/// # Errors
/// [`BenchError::Missing`], or [`BenchError::Program`] for our own server.
pub fn find_programs(args: &NbdArgs) -> Result<()> {
    find_program("fio", "fio")?;
    find_program("nbdcopy", "libnbd-bin")?;
    for policy in &args.policies {
        match policy {
            Policy::Btt | Policy::Cache | Policy::Log => {
                drop(server_command(args, Path::new("pool"), Path::new("socket"), "")?);
            }
            Policy::NbdkitMemory | Policy::NbdkitFile => drop(find_program("nbdkit", "nbdkit")?),
            Policy::QemuNbd => drop(find_program("qemu-nbd", "qemu-utils")?),
        }
    }
    Ok(())
}

/// Returns the workloads of fio for each server, as keys without a policy.
fn groups(args: &NbdArgs) -> Vec<Key> {
    let mut groups = Vec::new();
    for op in [Op::Write, Op::Read] {
        for &iodepth in &args.iodepth {
            let key = |&threads| Key { threads, iodepth, ..Key::new("", RANDOM, op, BLOCK_BYTES) };
            groups.extend(args.threads.iter().map(key));
        }
    }
    groups
}

struct Bench<'a> {
    args: &'a NbdArgs,
    dir: TempDir,
    /// Random bytes to fill the servers with.
    source: PathBuf,
    progress: &'a mut Progress,
    collector: Collector,
}

impl Bench<'_> {
    /// Measures nbdcopy in and out, repetition by repetition.
    fn copies(&mut self, servers: &[Server]) -> Result<()> {
        let cost = copy_cost(self.args);
        for repetition in 1..=self.args.common.repetitions {
            for (case, op) in [(COPY_IN, Op::Write), (COPY_OUT, Op::Read)] {
                for server in servers {
                    let name = server.policy.name();
                    self.progress.step(&format!("{name} {case}, run {repetition}"), cost);
                    let elapsed_s = self.copy(server, case)?;
                    let key = Key::new(name, case, op, self.args.common.size);
                    self.collector.add(key, Sample::single(elapsed_s));
                }
            }
        }
        Ok(())
    }

    /// Fills the servers by nbdcopy once, without counting it.
    fn fill(&mut self, servers: &[Server]) -> Result<()> {
        for server in servers {
            self.progress.step(&format!("{}: fill", server.policy.name()), copy_cost(self.args));
            self.copy(server, COPY_IN)?;
        }
        Ok(())
    }

    fn copy(&self, server: &Server, case: &str) -> Result<f64> {
        let mut command = Command::new(find_program("nbdcopy", "libnbd-bin")?);
        match case {
            COPY_IN => command.arg(&self.source).arg(&server.uri),
            _ => command.arg(&server.uri).arg("null:"),
        };
        seconds_of(command)
    }

    fn random(&mut self, servers: &[Server]) -> Result<()> {
        for group in groups(self.args) {
            let Key { op, threads, iodepth, .. } = group;
            for repetition in 1..=self.args.common.repetitions {
                for server in servers {
                    let (name, kind) = (server.policy.name(), op.name());
                    let what =
                        format!("{name} {kind}, {threads} jobs, depth {iodepth}, run {repetition}");
                    self.progress.step(&what, step_cost(self.args));
                    let key = Key { policy: name.to_owned(), ..group.clone() };
                    let sample = self.fio(server, &key)?;
                    self.collector.add(key, sample);
                }
            }
        }
        Ok(())
    }

    fn fio(&self, server: &Server, &Key { op, threads, iodepth, .. }: &Key) -> Result<Sample> {
        let runtime_ms = (self.args.common.seconds() * 1e3).round();
        let mut command = fio::command("nbd", op, self.dir.path())?;
        command.args(["--ioengine=nbd", "--time_based", "--norandommap", "--randrepeat=0"]);
        command.arg("--group_reporting").args([
            format!("--uri={}", server.uri),
            format!("--bs={BLOCK_BYTES}"),
            format!("--size={}", self.args.common.size),
            format!("--numjobs={threads}"),
            format!("--iodepth={iodepth}"),
            format!("--runtime={runtime_ms}ms"),
            format!("--ramp_time={}ms", (runtime_ms / 5.0).round()),
        ]);
        fio::parse(&output_of(command)?, op)
    }

    fn start(&self, policy: Policy) -> Result<Server> {
        let name = policy.name().trim_start_matches("peer:");
        let (pool, socket) = (self.path(name, "pool"), self.path(name, "sock"));
        let size = self.args.common.size;
        let process = match policy {
            Policy::Btt => {
                create_pool(&pool, pool_bytes(size))?;
                self.start_tidegate(&pool, &socket, "")?
            }
            // Everything fits, and nothing has to be cleaned.
            Policy::Cache => {
                create_cache(&pool, pool_bytes(2 * size + size / 8))?;
                let more = format!(" --backing null:{size} --mode wb");
                self.start_tidegate(&pool, &socket, &more)?
            }
            // The cleaner runs all the time, to a device that costs nothing.
            Policy::Log => {
                let mut create = Command::new(this_server()?);
                create.args(["create", "--engine", "log", "--size", &size.to_string()]).arg(&pool);
                output_of(create)?;
                self.start_tidegate(&pool, &socket, &format!(" --backing null:{size}"))?
            }
            Policy::NbdkitMemory => {
                start_nbdkit(&socket, ["memory".into(), format!("size={size}").into()])?
            }
            Policy::NbdkitFile => start_nbdkit(&socket, ["file".into(), self.image(name)?.into()])?,
            Policy::QemuNbd => {
                let program = find_program("qemu-nbd", "qemu-utils")?;
                let options = ["--persistent", "--format=raw", "--shared=4", "--socket"];
                let paths = [socket.clone(), self.image(name)?];
                let words = options.map(PathBuf::from).into_iter().chain(paths);
                start_peer(&program, words, &socket)?
            }
        };
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        Ok(Server { policy, uri, _process: process })
    }

    fn start_tidegate(&self, pool: &Path, socket: &Path, more: &str) -> Result<Child> {
        let (program, args) = server_command(self.args, pool, socket, more)?;
        let child = Child::start(&program, args)?;
        child.wait_for_line("ready")?;
        Ok(child)
    }

    /// Returns the path of a file of the server `name`.
    fn path(&self, name: &str, extension: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.{extension}"))
    }

    /// Creates an empty file of the device's size.
    fn image(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name, "img");
        let file = std::fs::File::create(&path).map_err(BenchError::os("create", &path))?;
        file.set_len(self.args.common.size).map_err(BenchError::os("size", &path))?;
        Ok(path)
    }
}

fn start_nbdkit(socket: &Path, plugin: [OsString; 2]) -> Result<Child> {
    let program = find_program("nbdkit", "nbdkit")?;
    let options = ["--foreground".into(), "--unix".into(), socket.into()];
    start_peer(&program, options.into_iter().chain(plugin), socket)
}

fn start_peer<W: AsRef<OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = W>,
    socket: &Path,
) -> Result<Child> {
    let mut child = Child::start(program, args)?;
    child.wait_for_socket(socket)?;
    Ok(child)
}

/// Returns the command that serves a pool, with the options `more` for its engine.
fn server_command(
    args: &NbdArgs,
    pool: &Path,
    socket: &Path,
    more: &str,
) -> Result<(PathBuf, Vec<String>)> {
    if let Some(template) = &args.server {
        return fill_in(&format!("{template}{more}"), pool, socket);
    }
    let program = this_server()?;
    let media = &args.common.media;
    let args = format!("serve {{pool}} --nbd unix:{{socket}} --media {media}{more}");
    Ok((program, words(&args, pool, socket).collect()))
}

/// Returns the path of the `tidegate` beside this program.
pub(crate) fn this_server() -> Result<PathBuf> {
    let program = this_program()?.with_file_name("tidegate");
    if !program.is_file() {
        let found = "is not there; build it: cargo build --release -p tidegate-cli";
        return Err(BenchError::program(&program.display().to_string(), found));
    }
    Ok(program)
}

/// Returns the words of a command with `{pool}` and `{socket}` in it, split at spaces before the
/// paths are filled in.
fn words<'a>(
    template: &'a str,
    pool: &Path,
    socket: &Path,
) -> impl Iterator<Item = String> + use<'a> {
    let (pool, socket) = (pool.display().to_string(), socket.display().to_string());
    let fill = move |word: &str| word.replace("{pool}", &pool).replace("{socket}", &socket);
    template.split_whitespace().map(fill)
}

/// Parses a `--server` command into its program and arguments.
fn fill_in(template: &str, pool: &Path, socket: &Path) -> Result<(PathBuf, Vec<String>)> {
    let mut words = words(template, pool, socket);
    let program =
        words.next().ok_or_else(|| BenchError::Usage("--server: expected a command".to_owned()))?;
    let program =
        if program.contains('/') { program.into() } else { find_program(&program, "tidegate")? };
    Ok((program, words.collect()))
}

/// Creates a pool with a cache in it.
pub(crate) fn create_cache(path: &Path, bytes: u64) -> Result<()> {
    let region = create_region(path, &MediaModel::default(), bytes)?;
    cache::create(&region, &CacheOptions::default())?;
    Ok(())
}

/// Creates a pool with a BTT in it.
pub(crate) fn create_pool(path: &Path, bytes: u64) -> Result<()> {
    let region = create_region(path, &MediaModel::default(), bytes)?;
    let made = tidegate::btt::create(&region, &BttOptions::default());
    made.map(drop).map_err(BenchError::device("btt"))
}

fn random_file(dir: &TempDir, bytes: u64) -> Result<PathBuf> {
    let path = dir.path().join("random");
    let mut rng = Rng::new(1, 0);
    let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
    while (content.len() as u64) < bytes {
        content.extend(rng.next_u64().to_le_bytes());
    }
    std::fs::write(&path, content).map_err(BenchError::os("write", &path))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_split_before_paths_with_spaces_are_filled_in() {
        let (program, args) = fill_in(
            "/bin/x serve {pool} --nbd unix:{socket}",
            Path::new("/a b/p"),
            Path::new("/s"),
        )
        .unwrap();
        assert_eq!(program, Path::new("/bin/x"));
        assert_eq!(args, ["serve", "/a b/p", "--nbd", "unix:/s"]);
        assert!(fill_in(" ", Path::new("p"), Path::new("s")).unwrap_err().is_usage());
    }

    #[test]
    fn every_server_has_a_name_that_parses() {
        for name in ["btt", "peer:nbdkit-memory", "peer:nbdkit-file", "peer:qemu-nbd"] {
            assert_eq!(name.parse::<Policy>().unwrap().name(), name);
        }
        assert!("nbdkit".parse::<Policy>().unwrap_err().contains("peer:qemu-nbd"));
    }
}
