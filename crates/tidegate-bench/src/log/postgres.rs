//! `PostgreSQL` and pgbench: one cluster, whose server is started in each way in turn.
//!
//! Invariant: if this process runs as root, server, cluster and pool belong to the user that the
//! Debian package created. The server refuses to run as root, and a pool of another user is not
//! used. pgbench itself is not under `tidegate run`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::bed::{Pool, Way, set_mode, under};
use super::{Bench, LogArgs, Part, RUN_PREFIX};
use crate::block::scratch;
use crate::child::{Child, find_program, output_of};
use crate::error::{BenchError, Result};
use crate::measure::{Key, Op, Sample};
use crate::nbd::this_server;
use crate::programs::call;
use crate::workload::latencies;

/// Directory of the server's programs in Debian.
const PROGRAMS: &str = "/usr/lib/postgresql/15/bin";
const PACKAGE: &str = "postgresql-15";
/// The user that the package creates.
const USER: &str = "postgres";
/// Name of the cluster's superuser.
const ROLE: &str = "bench";
/// Numbers of concurrent clients.
pub(super) const CLIENTS: [usize; 2] = [1, 4];
/// Branches: more than there are clients, so that clients do not wait for each other.
const SCALE: u64 = 10;
/// Case of pgbench's transactions.
pub(super) const CASE: &str = "run-postgres-pgbench";

/// Returns a separate pool, since it belongs to another user.
fn pool(args: &LogArgs) -> Pool {
    args.pool("postgres/pool", 1 << 30)
}

/// Checks that the server's programs are installed.
pub(super) fn find_programs() -> Result<()> {
    if Path::new(PROGRAMS).is_dir() {
        return Ok(());
    }
    Err(BenchError::Missing { what: format!("directory {PROGRAMS}"), package: PACKAGE })
}

/// Measures pgbench against servers started in all ways.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    bench.progress.step("postgres: cluster", std::time::Duration::ZERO);
    let cluster = Cluster::new(bench)?;
    let ways = Way::all(&bench.args.policies, false);
    let name = |way: Way| format!("{} {}", way.policy(), CASE.trim_start_matches(RUN_PREFIX));
    bench.in_turns(Part::Postgres, &ways, name, |bench, way| {
        bench.bed.sync_disk()?;
        let pool = pool(bench.args);
        let words = under(&cluster.tidegate, way.runner, &bench.bed.pool(pool), pool.bytes);
        let server = cluster.server(&words, way.syncs)?;
        for threads in CLIENTS {
            let sample = cluster.pgbench(bench.args.seconds, threads)?;
            let key = Key::new(way.policy(), CASE, Op::Write, 0);
            bench.collector.add(Key { threads, ..key }, sample);
        }
        cluster.stop(server).map(|()| None)
    })
}

/// The data of a server, with the server's user and a Tidegate that this user can reach.
struct Cluster {
    dir: PathBuf,
    tidegate: PathBuf,
    become_user: Vec<OsString>,
}

impl Cluster {
    fn new(bench: &Bench<'_>) -> Result<Self> {
        let (dir, pool) = (bench.bed.file("postgres"), bench.bed.pool(pool(bench.args)));
        let ids = user()?;
        for dir in [&dir, pool.parent().unwrap_or(&dir)] {
            std::fs::create_dir(dir).map_err(BenchError::os("create", dir))?;
            if let Some((uid, gid)) = ids {
                std::os::unix::fs::chown(dir, Some(uid), Some(gid))
                    .map_err(BenchError::os("give away", dir))?;
            }
        }
        let become_user = ids.map(become_user).transpose()?;
        let become_user = become_user.unwrap_or_default();
        let cluster = Self { tidegate: install(&dir)?, dir, become_user };
        cluster.make()?;
        Ok(cluster)
    }

    fn make(&self) -> Result<()> {
        let options = ["--no-sync", "--no-instructions", "--encoding=UTF8", "--auth=trust"];
        let role = format!("--username={ROLE}");
        self.call("initdb", &[&options[..], &[&role, "--pgdata=data"]].concat())?;
        let server = self.server(&[], false)?;
        let scale = SCALE.to_string();
        self.client("pgbench", &["-q", "-i", "-s", &scale, "postgres"])?;
        self.stop(server)
    }

    /// Starts a server by `words`, and waits until it is ready.
    fn server(&self, words: &[OsString], syncs: bool) -> Result<Child> {
        let shell = ["/bin/sh", "-c", "cd \"$0\"; exec \"$@\" 2>&1"].map(OsString::from);
        let fsync = format!("fsync={}", if syncs { "on" } else { "off" });
        let sockets = format!("unix_socket_directories={}", self.dir.display());
        let options = ["-D", "data", "-c", "listen_addresses=", "-c", &fsync, "-c", &sockets];
        let options = options.map(OsString::from);
        let place = [self.dir.clone().into()];
        let command =
            [&self.become_user, &shell[..], &place, words, &[program("postgres").into()], &options]
                .concat();
        let child = Child::start(Path::new(&command[0]), &command[1..])?;
        child.wait_for_line("ready to accept connections")?;
        Ok(child)
    }

    /// Shuts the server down, with a checkpoint, and waits until all its writes are in the files.
    fn stop(&self, server: Child) -> Result<()> {
        self.call("pg_ctl", &["--pgdata=data", "--mode=fast", "--wait", "stop"])?;
        server.end()
    }

    fn pgbench(&self, seconds: f64, clients: usize) -> Result<Sample> {
        let logs = scratch(Path::new("/dev/shm"))?;
        let prefix = logs.path().join("log").display().to_string();
        // pgbench takes whole seconds only.
        let (clients, time) = (clients.to_string(), seconds.ceil().to_string());
        let threads = if clients == "1" { "1" } else { "2" };
        let options = ["-n", "-c", &clients, "-j", threads, "-T", &time, "-l", "postgres"];
        let prefix = format!("--log-prefix={prefix}");
        let output = self.client("pgbench", &[&[&*prefix], &options[..]].concat())?;
        let mut lines = String::new();
        for entry in std::fs::read_dir(logs.path()).into_iter().flatten().flatten() {
            let path = entry.path();
            lines += &std::fs::read_to_string(&path).map_err(BenchError::os("read", &path))?;
        }
        parse(&output, &lines)
    }

    /// Runs a program of the package as the server's user.
    fn call(&self, name: &str, args: &[&str]) -> Result<String> {
        let words = [&self.become_user[..], &[program(name).into()]].concat();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(args).current_dir(&self.dir).env("LC_ALL", "C");
        output_of(command)
    }

    /// Runs a client program of the server.
    fn client(&self, name: &str, args: &[&str]) -> Result<String> {
        let mut command = Command::new(program(name));
        command.env("PGHOST", &self.dir).env("PGUSER", ROLE).args(args);
        output_of(command)
    }
}

fn program(name: &str) -> PathBuf {
    Path::new(PROGRAMS).join(name)
}

/// Returns the server's user and group, or `None` for the user of this process, which is not root.
fn user() -> Result<Option<(u32, u32)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let id = |option| {
        let text = call("id", "coreutils", &[option, USER])?;
        let wrong = || BenchError::program("id", format!("printed \"{}\"", text.trim()));
        text.trim().parse::<u32>().map_err(|_| wrong())
    };
    Ok(Some((id("-u")?, id("-g")?)))
}

fn become_user((uid, gid): (u32, u32)) -> Result<Vec<OsString>> {
    let mut words: Vec<OsString> = vec![find_program("setpriv", "util-linux")?.into()];
    words.push("--clear-groups".into());
    words.extend([format!("--reuid={uid}"), format!("--regid={gid}")].map(OsString::from));
    words.push("--".into());
    Ok(words)
}

/// Copies Tidegate to `dir`, where another user can reach it.
fn install(dir: &Path) -> Result<PathBuf> {
    let tidegate = this_server()?;
    let mut copy = PathBuf::new();
    for file in [tidegate.with_file_name("libtidegate_preload.so"), tidegate] {
        copy = dir.join(file.file_name().unwrap_or_default());
        std::fs::copy(&file, &copy).map_err(BenchError::os("copy", &file))?;
        set_mode(&copy, 0o755)?;
    }
    Ok(copy)
}

/// Parses the output of pgbench and its log, which has a line for each transaction, with its time
/// in µs as the third word.
fn parse(output: &str, log: &str) -> Result<Sample> {
    let wrong = |what: &str| BenchError::program("pgbench", format!("printed no {what}"));
    let rate = output.lines().find_map(|line| line.strip_prefix("tps = "));
    let rate = rate.and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
    let tps = rate.filter(|tps| *tps > 0.0).ok_or_else(|| wrong("\"tps = \""))?;
    let mut histogram = latencies();
    let times = log.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok());
    times.for_each(|us| histogram.saturating_record(us * 1000));
    if histogram.is_empty() {
        return Err(wrong("times of transactions"));
    }
    Ok(Sample::new(&histogram, histogram.len() as f64 / tps, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_run_is_read() {
        let output = "number of transactions actually processed: 3\nlatency average = 0.5 ms\n\
                      tps = 1500.25 (without initial connection time)\n";
        let log =
            "0 199 2241 0 1175850568 995598\n0 200 2465 0 1175850568 998079\n1 63 2173 0 1 2\n";
        let sample = parse(output, log).unwrap();
        assert_eq!((sample.ops, sample.max_ns / 1_000_000), (3, 2));
        assert!((sample.ops_per_s - 1500.25).abs() < 1e-6, "{sample:?}");
        assert!(parse("pgbench: error: connection refused", log).is_err());
        assert!(parse(output, "").is_err());
    }
}
