//! kill -9 of a whole tree, its supervisor too, at random moments, then recovery: what was
//! acknowledged is there, and nothing is torn. The workers are programs/crash.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::bed::{Bed, Runner, TIMEOUT_S, replay};
use crate::process_tree::{self, ProcessTree};
use crate::programs::{python, source};
use crate::support::random::Random;
use crate::support::{ok, setting, succeed};

/// All kinds of workers, each with its way to write.
pub(crate) const KINDS: [&str; 12] = [
    "model", "model", "model", "records", "slots", "versions", "rotated", "large", "delete",
    "truncate", "persist", "wal",
];

/// A worker of each kind; `round` makes their seeds.
pub(crate) fn one_of_each(round: u64) -> Vec<String> {
    let seeds = (0..).map(|at| round * 100 + at);
    KINDS.iter().zip(seeds).map(|(kind, seed)| format!("{kind}.{seed}")).collect()
}

/// Some of them, for a small disk: the others take long where the disk is slow, and are for the
/// long tests.
pub(crate) fn a_few(round: u64) -> Vec<String> {
    if cfg!(feature = "soak") {
        let all = one_of_each(round).into_iter();
        return all.map(|name| name.replace("records", "fitting")).collect();
    }
    let kinds = ["model", "fitting", "slots", "versions", "delete"];
    kinds.map(|kind| format!("{kind}.{round}")).to_vec()
}

/// Running workers and what they have acknowledged so far.
pub(crate) struct Workers {
    child: Child,
    pub(crate) tree: ProcessTree,
    stdout: ChildStdout,
    acks: Vec<u8>,
    /// When all of them must have ended: what hangs is killed before.
    deadline: Instant,
}

impl Workers {
    pub(crate) fn start(pool: &Path, dir: &Path, names: &[String]) -> Self {
        let mut command = Runner::Run(pool).command("/usr/bin/python3", dir);
        command.arg("-B").arg(source("crash/crash.py")).args(["work", "."]).args(names);
        Self::spawn(command, pool)
    }

    /// Starts a shell script, which acknowledges by lines of the same form.
    pub(crate) fn start_script(pool: &Path, dir: &Path, script: &str) -> Self {
        let mut command = Runner::Run(pool).command("/bin/sh", dir);
        command.args(["-c", script]);
        Self::spawn(command, pool)
    }

    /// Starts `command`, which is to use `pool`.
    pub(crate) fn spawn(mut command: Command, pool: &Path) -> Self {
        let tree = ProcessTree::of(&mut command, pool);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the tree starts");
        let stdout = child.stdout.take().expect("it is piped");
        let deadline = Instant::now() + Duration::from_secs(TIMEOUT_S + 30);
        Self { child, tree, stdout, acks: Vec::new(), deadline }
    }

    /// The process that was spawned.
    pub(crate) fn launcher(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Reads acknowledgements until `worker` has sent `count`.
    pub(crate) fn wait_for(&mut self, worker: &str, count: usize) {
        let start = format!("{worker} ");
        while self.acknowledged(&start) < count {
            if !self.read(None) {
                let (had, status) = (self.acknowledged(&start), self.child.wait());
                // 137: they hung, and were killed for it.
                panic!("the workers ended ({status:?}) at {had} of {count} for {worker}");
            }
        }
    }

    /// Reads until some worker has printed `line`.
    pub(crate) fn wait_for_line(&mut self, line: &str) {
        while !self.acks.split(|&byte| byte == b'\n').any(|found| found == line.as_bytes()) {
            assert!(self.read(None), "the workers ended without {line}");
        }
    }

    /// Reads until some worker has printed a line that begins with `word` and a space: the rest of
    /// that line.
    pub(crate) fn wait_for_word(&mut self, word: &str) -> String {
        let start = format!("{word} ");
        loop {
            let text = String::from_utf8_lossy(&self.acks);
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            if let Some(rest) = whole.lines().find_map(|line| line.strip_prefix(&start)) {
                return rest.to_owned();
            }
            assert!(self.read(None), "the workers ended without {word}");
        }
    }

    /// Reads what comes until nothing has come for `quiet`, or `most` bytes came.
    pub(crate) fn wait_until_quiet(&mut self, quiet: Duration, most: usize) {
        let enough = self.acks.len() + most;
        while self.acks.len() < enough && self.read(Some(quiet)) {}
    }

    pub(crate) fn acknowledged(&self, start: &str) -> usize {
        self.acks
            .split(|&byte| byte == b'\n')
            .filter(|line| line.starts_with(start.as_bytes()))
            .count()
    }

    /// False at the end, or when nothing has come in time.
    ///
    /// # Panics
    /// A process that still writes at the deadline is one that a kill has missed.
    fn read(&mut self, timeout: Option<Duration>) -> bool {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.tree.kill();
            panic!("workers still run, long after they should have ended");
        }
        let wait = Timespec::try_from(timeout.unwrap_or(left).min(left)).expect("it is short");
        let mut events = [PollFd::new(&self.stdout, PollFlags::IN)];
        let ready = retry_on_intr(|| poll(&mut events, Some(&wait)));
        if ready.expect("a pipe can be waited for") == 0 {
            return timeout.is_none() && self.read(None);
        }
        let mut bytes = vec![0; 65536];
        let count = self.stdout.read(&mut bytes).expect("the pipe can be read");
        self.acks.extend_from_slice(&bytes[..count]);
        count > 0
    }

    /// After the kill: reads the acknowledgements still in the pipe, waits for all processes, and
    /// puts what was acknowledged into a file below `dir`.
    pub(crate) fn collect(mut self, dir: &Path) -> PathBuf {
        while self.read(None) {}
        let _ = self.child.wait();
        self.tree.wait();
        let path = dir.join("acks");
        std::fs::write(&path, &self.acks).expect("there is free space");
        path
    }
}

/// Prints what is found of each worker; fails where something acknowledged is missing or torn.
pub(crate) fn verify(dir: &Path, acks: &Path) {
    let mut check = python();
    check.arg(source("crash/crash.py")).arg("verify").arg(dir).arg(acks);
    print!("{}", succeed(&mut check));
}

pub(crate) fn seed() -> Random {
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    Random(seed)
}

/// The ways to recover: all must give the same.
pub(crate) fn recover(pool: &Path, round: u64) {
    match round % 3 {
        0 => drop(ok(["recover".as_ref(), pool.as_os_str()])),
        1 => replay(pool, None),
        _ => drop(succeed(&mut Runner::Run(pool).command("true", Path::new("/")))),
    }
}

/// When to kill: a worker, and how much it has done by then.
pub(crate) fn moment<'a>(names: &'a [String], random: &mut Random) -> (&'a String, usize) {
    let worker = &names[random.below(names.len())];
    // A large write takes as long as hundreds of others.
    let most = if worker.starts_with("large") { 20 } else { 200 };
    (worker, 1 + random.below(most))
}

#[test]
fn acknowledged_writes_survive_kill_9_of_the_whole_tree() {
    let (bed, mut random) = (Bed::new(), seed());
    for round in 0..setting("TIDEGATE_KILL_ROUNDS", 5) {
        let dir = bed.disk().join(format!("round.{round}"));
        std::fs::create_dir(&dir).unwrap();
        let names = one_of_each(round);
        let (worker, count) = moment(&names, &mut random);
        println!("round {round}: killed when {worker} has {count}");
        let mut workers = Workers::start(&bed.pool(), &dir, &names);
        workers.wait_for(worker, count);
        workers.tree.kill();
        let acks = workers.collect(bed.disk());
        recover(&bed.pool(), round);
        verify(&dir, &acks);
        process_tree::assert_nobody_uses(&bed.pool());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// Returns when it is gone: what it had is free then.
pub(crate) fn kill_supervisor(pool: &Path, workers: &Workers) {
    let supervisor = process_tree::supervisor_of(pool, workers.launcher());
    let handle = pidfd_open(supervisor, PidfdFlags::empty()).expect("it is alive");
    pidfd_send_signal(&handle, Signal::KILL).expect("it is alive");
    let mut events = [PollFd::new(&handle, PollFlags::IN)];
    retry_on_intr(|| poll(&mut events, None)).expect("a process can be waited for");
}

/// One process after the other: the others go on, with the supervisor gone too, and nothing is
/// lost.
#[test]
fn programs_go_on_when_the_supervisor_is_killed() {
    let bed = Bed::new();
    // A large write that the kernel alone has is cut short where its process is killed.
    let names: Vec<_> =
        one_of_each(1).into_iter().filter(|name| !name.starts_with("large")).collect();
    let mut workers = Workers::start(&bed.pool(), bed.disk(), &names);
    workers.wait_for(&names[0], 20);
    process_tree::kill_launchers(&bed.pool());
    kill_supervisor(&bed.pool(), &workers);
    let more = usize::try_from(setting("TIDEGATE_GO_ON", 20)).unwrap_or(20);
    for name in &names {
        let more = workers.acknowledged(&format!("{name} ")) + more;
        workers.wait_for(name, more);
    }
    workers.tree.kill();
    let acks = workers.collect(bed.disk());
    if cfg!(feature = "soak") {
        // Names that were changed around a log that has been full for long make a replay fail, and
        // say so.
        replay(&bed.pool(), None);
    } else {
        println!("{}", ok(["recover".as_ref(), bed.pool().as_os_str()]));
    }
    verify(bed.disk(), &acks);
}

/// A program that joins a pool whose supervisor was killed gets a new one; the writes of both trees
/// are there.
#[test]
fn a_second_run_takes_over_from_a_killed_supervisor() {
    let bed = Bed::new();
    let (first, second) = (bed.disk().join("first"), bed.disk().join("second"));
    std::fs::create_dir(&first).unwrap();
    std::fs::create_dir(&second).unwrap();
    let names = [String::from("records.1"), String::from("wal.2")];
    let mut one = Workers::start(&bed.pool(), &first, &names);
    one.wait_for(&names[0], 50);
    kill_supervisor(&bed.pool(), &one);
    let mut two = Workers::start(&bed.pool(), &second, &names);
    two.wait_for(&names[1], 100);
    one.wait_for(&names[0], 300);
    one.tree.kill();
    two.tree.kill();
    let (acks_one, acks_two) = (one.collect(&first), two.collect(&second));
    replay(&bed.pool(), None);
    verify(&first, &acks_one);
    verify(&second, &acks_two);
}

/// `NVCache`'s log was reset by a second process.
#[test]
fn two_trees_share_a_pool() {
    let bed = Bed::new();
    let dirs = ["first", "second"].map(|name| bed.disk().join(name));
    let names = [String::from("model.7"), String::from("records.8"), String::from("delete.9")];
    let mut trees = dirs.each_ref().map(|dir| {
        std::fs::create_dir(dir).unwrap();
        Workers::start(&bed.pool(), dir, &names)
    });
    for tree in &mut trees {
        tree.wait_for(&names[1], 200);
    }
    for tree in &mut trees {
        tree.tree.kill();
    }
    let acks: Vec<_> = trees.into_iter().zip(&dirs).map(|(tree, dir)| tree.collect(dir)).collect();
    ok(["recover".as_ref(), bed.pool().as_os_str()]);
    dirs.iter().zip(&acks).for_each(|(dir, acks)| verify(dir, acks));
}

/// A tree that ended by itself has nothing left to recover, and its pool says so.
#[test]
fn a_tree_that_ended_leaves_nothing_to_recover() {
    let bed = Bed::new();
    let mut command: Command = Runner::Run(&bed.pool()).command("/bin/sh", bed.disk());
    succeed(command.args(["-c", "for n in 1 2 3; do seq 1000 > $n; sync $n; done"]));
    process_tree::assert_nobody_uses(&bed.pool());
    let said = ok(["recover".as_ref(), bed.pool().as_os_str()]);
    println!("{said}");
    assert!(bed.disk().join("3").exists());
}
