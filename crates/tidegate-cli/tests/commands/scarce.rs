//! A server that gets no more memory, or has no more connections, lives, and serves those that ask
//! for little.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, await_said, ok, scratch, tidegate, tool};

const LARGEST_BYTES: usize = 32 << 20;

fn with_pool() -> (TempDir, PathBuf, PathBuf) {
    let dir = scratch();
    let (pool, socket) = (dir.path().join("pool"), dir.path().join("socket"));
    ok(["create", pool.to_str().unwrap(), "--engine=btt", "--size=64M"]);
    (dir, pool, socket)
}

/// A control group; removed when dropped, by when its processes must have ended.
struct Group(PathBuf);

impl Group {
    /// A group whose processes have at most so much memory; `name` is that of the test.
    fn with_memory(name: &str, bytes: u64) -> Self {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (hierarchy, limit) = if first.join("cgroup.procs").exists() {
            (first, "memory.limit_in_bytes")
        } else {
            // Version 2, where a child has only the controllers that its parent gives.
            let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let group = hierarchy.join(format!("tidegate-test-{name}-{}", std::process::id()));
        fs::create_dir(&group).expect("the test makes a control group, which needs root");
        let this = Self(group);
        fs::write(this.0.join(limit), bytes.to_string()).expect("the group limits memory");
        this
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        // The kernel takes a moment to account for the end of the last process.
        while fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
}

/// A small write that is read back.
fn expect_served(client: &mut Client, round: u8) {
    client.send_write(7, 4096, &[round; 4096]).unwrap();
    assert_eq!(client.receive().unwrap(), (7, 0));
    assert_eq!(client.read(4096, 4096).unwrap(), [round; 4096]);
}

/// A server in a control group of 400 MiB, from which its memory budget follows.
fn limited_server(group: &Group, pool: &Path, socket: &Path, option: &str) -> Server {
    let mut command = tool("sh", "dash");
    command.arg("-c").arg("echo $$ >\"$0\"/cgroup.procs && exec \"$@\"").arg(&group.0);
    command.arg(tidegate().get_program()).arg("serve").arg(pool).arg(option);
    command.arg(format!("--nbd=unix:{}", socket.display())).stderr(std::process::Stdio::null());
    Server::spawn(&mut command)
}

/// 200 clients ask for 25 GB and take no answer.
#[test]
fn a_server_lives_in_400_mib_whatever_its_clients_ask_for() {
    let (_dir, pool, socket) = with_pool();
    let group = Group::with_memory("floods", 400 << 20);
    let server = limited_server(&group, &pool, &socket, "--dram=none");
    let mut neighbour = Client::connect(&socket).unwrap();
    let flooding: Vec<_> = (0..200)
        .map(|_| {
            let mut client = Client::connect(&socket).unwrap();
            (0..4).for_each(|cookie| client.send_read(cookie, 0, LARGEST_BYTES).unwrap());
            client
        })
        .collect();
    (0..100).for_each(|round| expect_served(&mut neighbour, round));
    drop(flooding);
    assert_eq!(neighbour.read(0, LARGEST_BYTES).unwrap().len(), LARGEST_BYTES);
    expect_served(&mut neighbour, 200);
    assert!(server.stop(Signal::TERM).0.success());
}

/// Lets this process open as many files as the tests here do.
fn allow_many_files() {
    let files = Rlimit { current: Some(4096), maximum: Some(4096) };
    prlimit(None, Resource::Nofile, files).expect("so many files may be open");
}

/// A server in 400 MiB lives and serves a neighbour while 2,000 more clients each do `work`, and
/// behind that nothing.
fn expect_to_outlive(name: &str, mut work: impl FnMut(&mut Client)) {
    allow_many_files();
    let (_dir, pool, socket) = with_pool();
    let group = Group::with_memory(name, 400 << 20);
    let server = limited_server(&group, &pool, &socket, "--max-connections=2010");
    let mut neighbour = Client::connect(&socket).unwrap();
    let clients: Vec<_> = (0..2000)
        .map(|number| {
            let mut client = Client::connect(&socket).unwrap();
            work(&mut client);
            if number % 20 == 0 {
                expect_served(&mut neighbour, 1);
            }
            client
        })
        .collect();
    (0..100).for_each(|round| expect_served(&mut neighbour, round));
    drop(clients);
    expect_served(&mut neighbour, 200);
    assert!(server.stop(Signal::TERM).0.success());
}

/// Reads of these lengths are done at once, into the buffers of their connections.
#[test]
fn a_server_lives_in_400_mib_with_2000_clients_that_take_no_answers_of_ordinary_reads() {
    expect_to_outlive("untaken", |client| {
        for (cookie, len) in (0..8).zip([124 << 10, 256 << 10].into_iter().cycle()) {
            client.send_read(cookie, 0, len).unwrap();
        }
    });
}

#[test]
fn a_server_lives_in_400_mib_with_2000_clients_that_have_worked_and_are_idle() {
    const LEN: usize = 256 << 10;
    let data = vec![1; LEN];
    expect_to_outlive("idle", |client| {
        client.send_write(1, 0, &data).unwrap();
        assert_eq!(client.receive().unwrap(), (1, 0));
        assert_eq!(client.read(0, LEN).unwrap().len(), LEN);
    });
}

/// Of 2,000 clients a third says nothing, a third takes no answers, and a third begins writes of
/// 21 GB that it does not end.
#[test]
fn a_server_lives_in_400_mib_with_2000_clients_that_write_read_and_wait() {
    const CLIENTS: usize = 2000;
    allow_many_files();
    let (_dir, pool, socket) = with_pool();
    let group = Group::with_memory("many", 400 << 20);
    let server = limited_server(&group, &pool, &socket, "--max-connections=2010");
    let mut neighbour = Client::connect(&socket).unwrap();
    let data = vec![1; 64 << 10];
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let mut client = Client::connect(&socket).unwrap();
            match number % 3 {
                0 => {}
                1 => client.send_read(0, 0, LARGEST_BYTES).unwrap(),
                _ => client.begin_write(0, LARGEST_BYTES, &data).unwrap(),
            }
            client
        })
        .collect();
    (0..100).for_each(|round| expect_served(&mut neighbour, round));
    drop(clients);
    assert_eq!(neighbour.read(0, LARGEST_BYTES).unwrap()[..4096], [0; 4096]);
    expect_served(&mut neighbour, 200);
    assert!(server.stop(Signal::TERM).0.success());
}

fn address_space_bytes(process: Pid) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Memory that the system refuses is an error of the request that asked for it, and said once.
#[test]
fn memory_that_the_system_refuses_fails_only_the_request() {
    const ENOMEM: u32 = 12;
    const READS: u64 = 2;
    let (dir, pool, socket) = with_pool();
    let stderr = dir.path().join("stderr");
    let mut command = tidegate();
    command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{}", socket.display()));
    command.arg("--request-memory=4G").stderr(fs::File::create(&stderr).unwrap());
    let server = Server::spawn(&mut command);
    let mut clients: Vec<_> = (0..8).map(|_| Client::connect(&socket).unwrap()).collect();
    let mut neighbour = Client::connect(&socket).unwrap();
    // Threads have what they need from here on.
    clients.iter_mut().chain([&mut neighbour]).for_each(|it| expect_served(it, 1));
    let base = address_space_bytes(server.pid());
    let limit = Rlimit { current: Some(base + (100 << 20)), maximum: None };
    prlimit(Some(server.pid()), Resource::As, limit).unwrap();
    for client in &mut clients {
        (0..READS).for_each(|cookie| client.send_read(cookie, 0, LARGEST_BYTES).unwrap());
    }
    expect_served(&mut neighbour, 2);
    let mut refused = 0;
    for client in &mut clients {
        for _ in 0..READS {
            match client.receive().unwrap().1 {
                0 => drop(client.receive_data(LARGEST_BYTES).unwrap()),
                error => {
                    assert_eq!(error, ENOMEM);
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 0, "the server had memory for all");
    for client in &mut clients {
        expect_served(client, 3);
    }
    let said = || fs::read_to_string(&stderr).unwrap();
    let begins = "there is no memory for the data of a request, which fails";
    until_said(&stderr, begins, std::thread::yield_now);
    assert_eq!(said().lines().count(), 1, "{}", said());
    prlimit(Some(server.pid()), Resource::As, Rlimit { current: None, maximum: None }).unwrap();
    until_said(&stderr, "there is memory for the data of requests again, after", || {
        assert_eq!(neighbour.read(0, LARGEST_BYTES).unwrap().len(), LARGEST_BYTES);
    });
    assert!(server.stop(Signal::TERM).0.success());
    let count = said().lines().filter(|line| line.contains("memory for the data")).count();
    assert_eq!(count, 2, "{}", said());
}

/// Has `work` done until the server has said `what`: it is told when the shortage was over for five
/// seconds.
fn until_said(stderr: &Path, what: &str, work: impl FnMut()) {
    await_said(stderr, |said| said.contains(what), work);
}

/// Descriptors that are short are told, and again when there are enough, though no client comes.
#[test]
fn descriptors_that_are_short_are_told_when_they_are_and_when_there_are_enough() {
    let (dir, pool, socket) = with_pool();
    let stderr = dir.path().join("stderr");
    let mut command = tidegate();
    command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{}", socket.display()));
    let server = Server::spawn(command.stderr(fs::File::create(&stderr).unwrap()));
    let said = || fs::read_to_string(&stderr).unwrap();
    let mut neighbour = Client::connect(&socket).unwrap();
    let open = fs::read_dir(format!("/proc/{}/fd", server.pid().as_raw_nonzero())).unwrap().count();
    let files = |current: u64| Rlimit { current: Some(current), maximum: Some(4096) };
    prlimit(Some(server.pid()), Resource::Nofile, files(open as u64)).unwrap();
    let mut waiting = UnixStream::connect(&socket).unwrap();
    until_said(&stderr, "clients wait meanwhile; raise the limit", || {
        expect_served(&mut neighbour, 1);
    });
    assert!(!said().contains("again"), "{}", said());
    prlimit(Some(server.pid()), Resource::Nofile, files(1024)).unwrap();
    waiting.read_exact(&mut [0; 18]).expect("it was not forgotten");
    until_said(&stderr, "connections are accepted again, after", || {
        expect_served(&mut neighbour, 2);
    });
    assert_eq!(said().lines().count(), 2, "{}", said());
    assert!(server.stop(Signal::TERM).0.success());
}

/// Connections of which none says a word give their places up.
#[test]
fn silent_connections_keep_no_client_out_for_long() {
    expect_to_get_in(|socket| {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.read_exact(&mut [0; 18]).expect("each is taken");
        stream
    });
}

/// A request does not keep a place for long, either.
#[test]
fn connections_that_worked_once_keep_no_client_out_for_long() {
    expect_to_get_in(|socket| {
        let mut client = Client::connect(socket).unwrap();
        client.send_flush(1).unwrap();
        assert_eq!(client.receive().unwrap(), (1, 0));
        client.into_stream()
    });
}

/// Answers that are not taken are no work of their client's.
#[test]
fn connections_that_take_no_answer_keep_no_client_out_for_long() {
    let mut lens = [4 << 20, 256 << 10].into_iter().cycle();
    expect_to_get_in(|socket| {
        let mut client = Client::connect(socket).unwrap();
        client.send_read(1, 0, lens.next().unwrap()).unwrap();
        client.into_stream()
    });
}

/// Writes whose data does not come are no work of their client's.
#[test]
fn connections_that_end_no_write_keep_no_client_out_for_long() {
    expect_to_get_in(|socket| {
        let mut client = Client::connect(socket).unwrap();
        client.begin_write(0, 4 << 20, &[1; 4096]).unwrap();
        client.into_stream()
    });
}

/// As many connections as there may be by default, of which each is one of `connected` and one does
/// work, keep a new client out for five seconds at most; the one that works stays.
fn expect_to_get_in(mut connected: impl FnMut(&Path) -> UnixStream) {
    const DEFAULT_CONNECTIONS: usize = 256;
    const ALLOWED: Duration = Duration::from_secs(5);
    let (_dir, pool, socket) = with_pool();
    let server = Server::start(&pool, &socket, &[]);
    let mut working = Client::connect(&socket).unwrap();
    let silent: Vec<_> = (1..DEFAULT_CONNECTIONS).map(|_| connected(&socket)).collect();
    let start = Instant::now();
    let mut refused = 0;
    let mut client = loop {
        match Client::connect(&socket) {
            Ok(client) => break client,
            Err(_) => refused += 1,
        }
        expect_served(&mut working, 2);
        assert!(start.elapsed() < ALLOWED, "kept out for {:?}", start.elapsed());
    };
    expect_served(&mut client, 1);
    assert!(start.elapsed() < ALLOWED, "served after {:?}", start.elapsed());
    assert!(refused > 0, "the connections that are open were not at their limit");
    expect_served(&mut working, 3);
    drop(silent);
    assert!(server.stop(Signal::TERM).0.success());
}
