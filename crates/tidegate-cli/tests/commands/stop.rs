//! A stop ends at its deadline, whatever a backing, a client or a copy does: what the backing lacks
//! stays in the pool, and the server says so.

use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::OFlags;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::behind::{Scene, kill, read, write};
use crate::nbd::Client;
use crate::support::{Server, ok, scratch, tidegate};

const BLOCKS: usize = 20;

/// The server of `scene` over `disk` behind `layer`, with its standard error in a pipe.
fn serve(scene: &Scene, layer: &str, more: &[&str]) -> Server {
    let backing = format!("--backing={layer}{}", scene.path("disk").display());
    serve_by(scene, &[&[backing.as_str()], more].concat())
}

fn serve_by(scene: &Scene, args: &[&str]) -> Server {
    Server::spawn(serving(scene, args).stderr(Stdio::piped()))
}

/// The command of a server of `scene`.
fn serving(scene: &Scene, args: &[&str]) -> Command {
    let mut command = tidegate();
    command.arg("serve").arg(scene.pool());
    command.arg(format!("--nbd=unix:{}", scene.path("socket").display())).args(args);
    command
}

fn write_all(scene: &Scene, byte: u8) {
    let mut client = scene.client();
    (0..BLOCKS).for_each(|lba| write(&mut client, lba, byte));
}

/// The status of a server that was told to stop, and what it said.
fn await_end(mut server: Server) -> (Option<i32>, String) {
    let mut stderr = server.stderr();
    let (status, _) = server.wait();
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    (status.code(), said)
}

fn assert_kept(scene: &Scene, byte: u8) {
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (0..BLOCKS).for_each(|lba| assert_eq!(read(&mut client, lba), byte));
    drop(client);
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!(scene.in_file("disk", 3), byte);
}

#[test]
fn a_stop_leaves_in_the_pool_what_a_hanging_backing_does_not_take() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        let server = serve(&scene, "delay:20s,", &["--stop-timeout=1"]);
        write_all(&scene, 5);
        kill_process(server.pid(), Signal::TERM).unwrap();
        let (code, said) = await_end(server);
        let pool = scene.pool().display().to_string();
        let told = format!("that the backing lacks stay in {pool}: `tidegate flush {pool}`");
        assert!(code == Some(1) && said.contains(&told), "{code:?}: {said}");
        assert_kept(&scene, 5);
    }
}

/// The log has free space for what the DRAM tier holds. Only a read waits for the backing.
#[test]
fn a_stop_keeps_what_a_dram_tier_has_while_a_read_hangs() {
    let scene = Scene::new("log");
    let server = serve(&scene, "delay:60s,", &["--stop-timeout=3", "--dram=transit:4M"]);
    write_all(&scene, 6);
    let mut reader = scene.client();
    reader.send_read(1, 8 << 20, 4096).unwrap();
    write_all(&scene, 6);
    kill_process(server.pid(), Signal::TERM).unwrap();
    let (code, said) = await_end(server);
    assert!(code == Some(1) && !said.contains("in the DRAM tier are lost"), "{code:?}: {said}");
    assert_kept(&scene, 6);
}

/// Each pool of a server is closed, whatever the backing of another one does.
#[test]
fn a_hanging_backing_keeps_no_other_pool_from_its_stop() {
    let (hanging, other) = (Scene::new("log"), scratch());
    let pool = other.path().join("pool");
    ok(["create", pool.to_str().unwrap(), "--engine=btt", "--size=32M"]);
    let (sockets, config) = (hanging.path("socket"), hanging.path("config.toml"));
    let text = format!(
        "nbd = [\"unix:{}\"]\nstop-timeout = 2\n\n[[device]]\npool = \"{}\"\nexport = \"a\"\n\
         backing = \"delay:60s,{}\"\n\n[[device]]\npool = \"{}\"\nexport = \"b\"\n\
         dram = \"lru:4M\"\n",
        sockets.display(),
        hanging.pool().display(),
        hanging.path("disk").display(),
        pool.display(),
    );
    std::fs::write(&config, text).unwrap();
    let mut command = tidegate();
    command.args(["serve", "--config"]).arg(&config).stderr(Stdio::piped());
    let server = Server::spawn(&mut command);
    for export in ["a", "b"] {
        let mut client = Client::connect_to(&sockets, export).unwrap();
        (0..BLOCKS).for_each(|lba| write(&mut client, lba, 7));
    }
    kill_process(server.pid(), Signal::TERM).unwrap();
    let (code, said) = await_end(server);
    assert_eq!(code, Some(1), "{said}");
    let socket = other.path().join("socket");
    let server = Server::start(&pool, &socket, &[]);
    let mut client = Client::connect(&socket).unwrap();
    (0..BLOCKS).for_each(|lba| assert_eq!(read(&mut client, lba), 7, "{said}"));
    assert!(server.stop(Signal::TERM).0.success());
}

/// What a DRAM tier could not write into the pool is lost, and said to be.
#[test]
fn a_stop_tells_what_a_dram_tier_loses() {
    let scene = Scene::new("log");
    // The log is full, and its backing takes nothing.
    let server = serve(&scene, "delay:60s,", &["--stop-timeout=1", "--dram=lru:12M"]);
    let mut client = scene.client();
    (0..10).for_each(|mib| {
        client.send_write(mib, mib << 20, &vec![6; 1 << 20]).unwrap();
        assert_eq!(client.receive().unwrap(), (mib, 0));
    });
    drop(client);
    kill_process(server.pid(), Signal::TERM).unwrap();
    let (code, said) = await_end(server);
    assert!(code == Some(1) && said.contains("in the DRAM tier are lost"), "{code:?}: {said}");
    let told = "that the backing lacks stay in";
    assert!(said.contains(told), "{said}");
}

#[test]
fn a_second_signal_ends_a_stop_that_has_time_left() {
    let scene = Scene::new("cache");
    let server = serve(&scene, "delay:20s,", &["--stop-timeout=900"]);
    write_all(&scene, 7);
    let began = Instant::now();
    kill_process(server.pid(), Signal::TERM).unwrap();
    while scene.path("socket").exists() {
        std::thread::yield_now();
    }
    kill_process(server.pid(), Signal::INT).unwrap();
    let (code, said) = await_end(server);
    assert!(code == Some(1) && said.contains("stay in"), "{code:?}: {said}");
    assert!(began.elapsed().as_secs() < 18);
    assert_kept(&scene, 7);
}

/// A client that asks for much and takes nothing keeps no server.
#[test]
fn a_client_that_takes_no_replies_keeps_no_server() {
    let scene = Scene::new("cache");
    let server = serve(&scene, "", &["--stop-timeout=1"]);
    write_all(&scene, 8);
    let mut client = scene.client();
    (0..64).for_each(|cookie| client.send_read(cookie, 0, 8 << 20).unwrap());
    kill_process(server.pid(), Signal::TERM).unwrap();
    let (code, said) = await_end(server);
    assert!(code.is_some(), "{said}");
    drop(client);
    assert_kept(&scene, 8);
}

/// A pipe whose reader takes nothing, and which is full.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let blocking = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, blocking | OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    rustix::fs::fcntl_setfl(&writer, blocking).unwrap();
    (reader, writer)
}

/// Lines that cannot be written delay neither a stop nor an answer.
#[test]
fn a_standard_error_that_takes_nothing_delays_neither_a_stop_nor_an_answer() {
    let scene = Scene::new("cache");
    let (reader, writer) = full_pipe();
    let mut command = serving(&scene, &[&scene.backing("disk"), "--stop-timeout=900"]);
    let server = Server::spawn(command.stderr(writer));
    drop(command);
    for _ in 0..3 {
        kill_process(server.pid(), Signal::USR1).unwrap();
    }
    write_all(&scene, 3);
    let began = Instant::now();
    let (status, said) = server.stop(Signal::TERM);
    assert!(status.success() && said.contains("stopped"), "{status}: {said}");
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
    drop(reader);
    assert_kept(&scene, 3);
}

/// The deadline ends a server that waits for its standard output, and its lines are logged.
#[test]
fn a_standard_output_that_takes_nothing_is_within_the_deadline() {
    let scene = Scene::new("cache");
    let (reader, writer) = full_pipe();
    let mut command = serving(&scene, &[&scene.backing("disk"), "--stop-timeout=1"]);
    let server = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    drop(command);
    while !scene.path("socket").exists() {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    let output = server.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("SIGTERM: stopping") && said.contains("ended"), "{said}");
    drop(reader);
}

/// Standard output and the backing take no more: the server tells both.
#[test]
fn data_that_stays_in_the_pool_is_told_where_nothing_can_be_printed() {
    let scene = Scene::new("cache");
    let printed = std::fs::File::create_new(scene.path("printed")).unwrap();
    let mut command = serving(&scene, &[&scene.backing("disk"), "--mode=wb"]);
    let server = command.stdout(printed).stderr(Stdio::piped()).spawn().unwrap();
    while !std::fs::read_to_string(scene.path("printed")).unwrap().ends_with("ready\n") {
        std::thread::yield_now();
    }
    let (nothing, pid) = (Some(0), Pid::from_child(&server));
    let limit = Rlimit { current: nothing, maximum: nothing };
    prlimit(Some(pid), Resource::Fsize, limit).unwrap();
    write_all(&scene, 6);
    kill_process(pid, Signal::TERM).unwrap();
    let output = server.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot be destaged: it stays in the cache"), "{said}");
    assert!(said.contains("cannot write to standard output"), "{said}");
    assert_kept(&scene, 6);
}

/// A copy that takes some ten seconds: of a disk with data, each read of which is delayed.
fn slow_to_copy(engine: &str) -> Scene {
    let scene = Scene::new(engine);
    std::fs::write(scene.path("disk"), vec![1; 16 << 20]).unwrap();
    scene
}

fn start_copy(scene: &Scene) -> std::process::Child {
    let mut command: Command = tidegate();
    command.arg("snapshot").arg(scene.pool()).arg(scene.path("copy"));
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the instant of the copy has come: the file that `server` has open for it, which has
/// no name yet, has its size.
fn await_partial(scene: &Scene, server: &Server) {
    let descriptors = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    let is_there = || {
        let mut files = std::fs::read_dir(&descriptors).unwrap().map(|it| it.unwrap().path());
        files.any(|file| {
            let is_beside = file.read_link().is_ok_and(|it| it.starts_with(scene.path("")));
            let is_unnamed = |it: std::fs::Metadata| it.nlink() == 0 && it.len() > 0;
            is_beside && file.metadata().is_ok_and(is_unnamed)
        })
    };
    while !is_there() {
        std::thread::yield_now();
    }
}

/// A server that is killed leaves nothing of a copy.
#[test]
fn a_killed_server_leaves_nothing_of_its_copy() {
    let scene = slow_to_copy("cache");
    let server = serve(&scene, "delay:1s,", &[]);
    let copy = start_copy(&scene);
    await_partial(&scene, &server);
    kill(server);
    assert!(!copy.wait_with_output().unwrap().status.success());
    let names = std::fs::read_dir(scene.path("")).unwrap().map(|it| it.unwrap().file_name());
    let names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    assert!(
        names.iter().all(|name| ["disk", "other", "pool", "socket"].contains(&name.as_str())),
        "{names:?}"
    );
    no_copy_is_left(&scene);
}

fn no_copy_is_left(scene: &Scene) {
    let names = std::fs::read_dir(scene.path("")).unwrap().map(|it| it.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().contains("copy")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_stop_ends_a_copy() {
    for engine in ["cache", "log"] {
        let scene = slow_to_copy(engine);
        let server = serve(&scene, "delay:1s,", &[]);
        let copy = start_copy(&scene);
        await_partial(&scene, &server);
        kill_process(server.pid(), Signal::TERM).unwrap();
        let output = copy.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains("the server stops"), "{error}");
        let (code, said) = await_end(server);
        assert_eq!(code, Some(0), "{said}");
        no_copy_is_left(&scene);
    }
}

/// Writes go on beside a copy, which does not have them, and after it was interrupted.
#[test]
fn writes_go_on_beside_a_copy_and_an_interrupt_ends_it() {
    let scene = slow_to_copy("cache");
    let server = serve(&scene, "delay:300ms,", &["--mode=wb"]);
    let mut copy = start_copy(&scene);
    await_partial(&scene, &server);
    let mut client = scene.client();
    (0..BLOCKS).for_each(|block| write(&mut client, block * 200, 9));
    assert!(copy.try_wait().unwrap().is_none(), "the copy goes on");
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let copied = std::fs::read(scene.path("copy")).unwrap();
    assert!(copied == vec![1; 16 << 20], "what was written later is in the copy");
    std::fs::remove_file(scene.path("copy")).unwrap();

    let copy = start_copy(&scene);
    await_partial(&scene, &server);
    kill_process(Pid::from_child(&copy), Signal::INT).unwrap();
    assert!(!copy.wait_with_output().unwrap().status.success());
    (0..BLOCKS).for_each(|block| write(&mut client, block * 200, 10));
    drop(client);
    let (code, said) = {
        kill_process(server.pid(), Signal::TERM).unwrap();
        await_end(server)
    };
    assert_eq!(code, Some(0), "{said}");
    no_copy_is_left(&scene);
    assert_eq!(scene.in_file("disk", 200), 10);
}

/// The disk of the copy takes no more: an error, nothing is left, and writes go on.
#[test]
fn a_copy_that_does_not_fit_is_none() {
    let dir = scratch();
    let pool = dir.path().join("pool");
    ok(["create", pool.to_str().unwrap(), "--engine=btt", "--size=32M"]);
    let socket = dir.path().join("socket");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 64; exec \"$@\"", "sh"]).arg(tidegate().get_program());
    command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{}", socket.display()));
    let server = Server::spawn(&mut command);
    let mut client = crate::nbd::Client::connect(&socket).unwrap();
    write(&mut client, 3, 4);
    let (from, to) = (pool.to_str().unwrap(), dir.path().join("copy"));
    let output = crate::support::run(["snapshot", from, to.to_str().unwrap()]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("too large"), "{error}");
    assert!(error.contains(&format!("the copy of {from} cannot be written")), "{error}");
    write(&mut client, 3, 5);
    assert_eq!(read(&mut client, 3), 5);
    drop(client);
    assert!(server.stop(Signal::TERM).0.success());
    let names = std::fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["pool"]);
}
