//! `tidegate doctor`: looks for the parts of this machine that the commands need.

use std::fmt;
use std::path::Path;

use anyhow::Result;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use tidegate::log::CONTROL_BYTES;
use tidegate::pmem::{Domain, Region, RegionOptions};
use tidegate::size::Size;
use tidegate_run::{Coverage, coverage, dax_mounts};
use tidegate_serve::nbd::{DESCRIPTORS_PER_CONNECTION, Limits};

use crate::args::DoctorArgs;
use crate::control;
use crate::output::{json, line, one_line};

/// Shared memory that the commands may need, in bytes, with some to spare. `run` takes the most.
const SHARED_BYTES: u64 = CONTROL_BYTES.next_multiple_of(8 << 20);

/// How a topic stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// All is there.
    Ok,
    /// It works with less than it could.
    Limited,
    /// It is not there.
    Missing,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        };
        f.pad(word)
    }
}

/// A topic and its state.
#[derive(Debug, Serialize)]
struct Finding {
    topic: &'static str,
    state: State,
    found: String,
    /// The step that cures it, or its meaning.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn ok(topic: &'static str, found: impl Into<String>) -> Self {
        Self { topic, state: State::Ok, found: found.into(), advice: None }
    }

    fn but(
        topic: &'static str,
        state: State,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { topic, state, found: found.into(), advice: Some(advice.into()) }
    }
}

/// The findings, as JSON has them.
#[derive(Serialize)]
struct Findings {
    findings: Vec<Finding>,
}

/// Runs the command.
///
/// # Errors
/// Standard output is full.
pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let findings = findings();
    if args.json {
        json(&Findings { findings })?;
        return Ok(());
    }
    for Finding { topic, state, found, advice } in &findings {
        line(format_args!("{state:<8} {topic:<20} {}", one_line(found)))?;
        if let Some(advice) = advice {
            line(format_args!("{:<29} {}", "", one_line(advice)))?;
        }
    }
    Ok(())
}

fn findings() -> Vec<Finding> {
    let mut findings = vec![persistent_memory(), write_back(), shared_memory()];
    findings.extend(file_systems());
    findings.extend([ublk(), huge_pages(), open_files(), request_memory(), servers()]);
    findings
}

/// DAX file systems, devdax devices, and disks of persistent memory without either.
fn persistent_memory() -> Finding {
    const TOPIC: &str = "persistent memory";
    let mounts = dax_mounts().into_iter().map(|mount| mount.display().to_string());
    let devices = names_in("/dev", "dax").into_iter().map(|name| format!("/dev/{name}"));
    let usable: Vec<_> = mounts.chain(devices).collect();
    if !usable.is_empty() {
        return Finding::ok(TOPIC, usable.join(", "));
    }
    let disks = names_in("/sys/block", "pmem");
    if let Some(disk) = disks.first() {
        return Finding::but(
            TOPIC,
            State::Limited,
            format!("/dev/{disk}, without a DAX file system"),
            format!("mkfs.ext4 /dev/{disk}, and mount it with -o dax=always"),
        );
    }
    Finding::but(
        TOPIC,
        State::Missing,
        "none (no DAX file system, no devdax device)",
        "`run --volatile` needs none; a pool on tmpfs, such as /dev/shm/pool, is for trials: a power \
         cut loses it",
    )
}

/// Returns the names in `directory` that begin with `prefix`, in order.
fn names_in(directory: &str, prefix: &str) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.starts_with(prefix)).collect();
    names.sort();
    names
}

/// Whether this CPU writes lines back, as persistent memory needs it.
fn write_back() -> Finding {
    const TOPIC: &str = "write-back of lines";
    let options = RegionOptions { domain: Some(Domain::Adr), ..RegionOptions::default() };
    match Region::anonymous_with(4096, &options).map(|region| region.domain()) {
        Ok(Domain::Adr) => Finding::ok(TOPIC, "by the CPU"),
        _ => Finding::but(
            TOPIC,
            State::Limited,
            "by msync only",
            "this CPU has no instruction for it: each sync is a system call",
        ),
    }
}

/// The memory that programs under `run` share with their supervisor.
fn shared_memory() -> Finding {
    const TOPIC: &str = "shared memory";
    let path = Path::new("/dev/shm");
    match rustix::fs::statvfs(path) {
        Ok(found) => {
            let free = Size { bytes: found.f_bavail.saturating_mul(found.f_frsize) };
            let has = format!("/dev/shm, {free} free");
            if free.bytes >= SHARED_BYTES {
                return Finding::ok(TOPIC, has);
            }
            let needed = Size { bytes: SHARED_BYTES };
            let advice = format!(
                "`run`, `record` and the sockets of servers may need {needed}: remove files there, \
                 or make it larger (mount -o remount,size=)"
            );
            Finding::but(TOPIC, State::Limited, has, advice)
        }
        Err(error) => Finding::but(
            TOPIC,
            State::Missing,
            format!("/dev/shm: {error}"),
            "`run` needs it, and commands find servers there: mount a tmpfs",
        ),
    }
}

/// The file systems whose files `run` covers, or why it covers none of one.
fn file_systems() -> Vec<Finding> {
    const TOPIC: &str = "files under run";
    let Ok(all) = coverage() else { return Vec::new() };
    let finding = |one: Coverage| {
        let found = format!("{} ({})", one.mount.display(), one.kind);
        match one.obstacle {
            None => Finding::ok(TOPIC, found),
            Some(obstacle) => {
                let advice = format!("real syncs there: {obstacle}");
                Finding::but(TOPIC, State::Limited, found, advice)
            }
        }
    };
    all.into_iter().map(finding).collect()
}

fn ublk() -> Finding {
    const TOPIC: &str = "block devices (ublk)";
    match tidegate_serve::ublk::expect_driver() {
        Ok(()) => Finding::ok(TOPIC, "the driver answers"),
        Err(error) => {
            let found = "`serve --ublk` and `attach` do not work here";
            let advice = format!("{:#}", anyhow::Error::from(error));
            Finding::but(TOPIC, State::Missing, found, advice)
        }
    }
}

/// Whether the memory of pools on tmpfs may have huge pages.
fn huge_pages() -> Finding {
    const TOPIC: &str = "huge pages on tmpfs";
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let text = std::fs::read_to_string(SETTING).unwrap_or_default();
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("not there");
    match chosen {
        "never" | "deny" | "not there" => Finding::but(
            TOPIC,
            State::Limited,
            chosen,
            format!(
                "pools on tmpfs are mapped by small pages; to change that: echo advise > {SETTING}"
            ),
        ),
        _ => Finding::ok(TOPIC, chosen),
    }
}

fn open_files() -> Finding {
    const TOPIC: &str = "open files";
    let needed = (Limits::default().connections as u64).saturating_mul(DESCRIPTORS_PER_CONNECTION);
    let limit = getrlimit(Resource::Nofile).maximum;
    let shown = limit.map_or_else(|| "no limit".into(), |limit| format!("at most {limit}"));
    match limit {
        Some(limit) if limit <= needed => Finding::but(
            TOPIC,
            State::Limited,
            shown,
            format!(
                "a server with all its connections needs {needed} and some: raise the limit (ulimit \
                 -n, LimitNOFILE=), or set --max-connections"
            ),
        ),
        _ => Finding::ok(TOPIC, shown),
    }
}

fn request_memory() -> Finding {
    let bytes = Limits::default().memory_bytes as u64;
    Finding::ok("request memory", format!("{} unless --request-memory is given", Size { bytes }))
}

/// The servers of this user.
fn servers() -> Finding {
    const TOPIC: &str = "servers";
    let servers = control::list();
    let all = servers.devices.len();
    let down = servers.devices.iter().filter(|device| device.state == "down").count();
    let silent = servers.silent.len();
    let found = format!("devices: {all}, down: {down}; servers that do not answer: {silent}");
    if down + silent == 0 {
        return Finding::ok(TOPIC, found);
    }
    Finding::but(TOPIC, State::Limited, found, "`tidegate list` shows them, with the causes")
}
