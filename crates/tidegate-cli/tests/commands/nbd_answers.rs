//! What the NBD standard demands of each answer about zeroes, holes and block status, whatever
//! engine serves the export.
//!
//! | the standard | here |
//! |---|---|
//! | block status: one extent or more, each of whole minimum blocks | [`expect_status`] |
//! | with `REQ_ONE` exactly one extent, no longer than the request | [`expect_status`] |
//! | what is said to be zero reads as zeroes | [`expect_status`] |
//! | write zeroes: the range reads as zeroes, with each flag that is offered | [`expect_zeroes`] |
//! | with `NO_HOLE` no hole is made | [`expect_zeroes`], and on the disk in a test of its own |
//! | with `FAST_ZERO` zeroes are quick, or `ENOTSUP` and nothing has changed | [`expect_zeroes`] |
//! | `FAST_ZERO` is not offered without write zeroes | [`expect_flags`] |
//! | FUA is taken on writes, zeroes and trims where it is offered | [`expect_zeroes`] |
//! | trim: other bytes stay as they are | [`expect_trim`] |
//! | changes of a read-only export are `EPERM` | [`expect_refusals`] |
//! | ranges behind the end, no blocks, unknown flags are errors | [`expect_refusals`] |

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::nbd::{
    BLOCK_STATUS, CACHE, Client, FAST_ZERO, FLUSH, FUA, NO_HOLE, READ, REQ_ONE, StatusClient, TRIM,
    WRITE_ZEROES,
};
use crate::support::random::Random;
use crate::support::{Server, ok, scratch};

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const HAS_READ_ONLY: u16 = 1 << 1;
const HAS_TRIM: u16 = 1 << 5;
const HAS_ZEROES: u16 = 1 << 6;
const HAS_CACHE: u16 = 1 << 10;
const HAS_FAST_ZERO: u16 = 1 << 11;
const HOLE: u32 = 1;
const ZERO: u32 = 2;
const MIB: u32 = 1 << 20;

/// An export, and a client that keeps what it should hold.
struct Scene {
    dir: TempDir,
    server: Server,
    client: StatusClient,
    reader: Client,
    model: Vec<u8>,
}

impl Scene {
    /// A new pool of `create`'s arguments, served with those of `serve`.
    fn new(dir: TempDir, create: &[&str], serve: &[&str]) -> Self {
        let path = |name| dir.path().join(name);
        let pool = path("pool");
        ok([&["create", pool.to_str().unwrap(), "--size=24M"], create].concat());
        let server = Server::start(&pool, &path("socket"), serve);
        let client = StatusClient::connect(&path("socket")).unwrap();
        let mut reader = Client::connect(&path("socket")).unwrap();
        let size = usize::try_from(client.told.size_bytes).unwrap();
        let model = reader.read(0, size.min(32 << 20)).unwrap();
        Self { dir, server, client, reader, model }
    }

    fn block(&self) -> usize {
        self.client.told.block_bytes as usize
    }

    fn len(&self) -> u32 {
        u32::try_from(self.model.len()).unwrap()
    }

    fn has(&self, flag: u16) -> bool {
        self.client.told.flags & flag != 0
    }

    /// A run of up to `most` blocks.
    fn some_blocks(&self, random: &mut Random, most: usize) -> std::ops::Range<usize> {
        let count = self.model.len() / self.block();
        let first = random.below(count);
        let blocks = 1 + random.below(most.min(count - first));
        first * self.block()..(first + blocks) * self.block()
    }

    fn expect_content(&mut self) {
        let found = self.reader.read(0, self.model.len()).unwrap();
        let differs = found.iter().zip(&self.model).position(|(one, other)| one != other);
        assert_eq!(differs, None, "the first byte that differs");
    }
}

/// `range` as offset and length of a request.
fn request(range: &std::ops::Range<usize>) -> (u64, u32) {
    (range.start as u64, u32::try_from(range.len()).unwrap())
}

fn expect_flags(scene: &Scene) {
    let is_read_only = scene.has(HAS_READ_ONLY);
    assert_eq!(scene.has(HAS_TRIM), !is_read_only);
    assert_eq!(scene.has(HAS_ZEROES), !is_read_only);
    assert!(scene.has(HAS_ZEROES) || !scene.has(HAS_FAST_ZERO));
    assert!(scene.has(HAS_CACHE));
}

/// All of the export by its block status.
fn expect_status(scene: &mut Scene) {
    let (mut at, end) = (0, scene.len());
    while at < end {
        let extents = scene.client.status(0, at.into(), end - at);
        assert!(!extents.is_empty());
        let one = scene.client.status(REQ_ONE, at.into(), end - at);
        assert_eq!(one.len(), 1, "{one:?}");
        assert!(one[0].0 <= end - at);
        for (len, state) in extents {
            assert!(len > 0 && (len as usize).is_multiple_of(scene.block()), "{len} at {at}");
            if state & ZERO != 0 {
                let bytes = &scene.model[at as usize..(at + len) as usize];
                assert!(bytes.iter().all(|byte| *byte == 0), "{len} bytes at {at} are not zero");
            }
            at += len;
        }
    }
    assert_eq!(at, end);
}

/// The block status of a range that was made zero with `NO_HOLE` has no hole.
fn expect_no_hole(scene: &mut Scene, range: &std::ops::Range<usize>) {
    let (offset, len) = request(range);
    let mut done = 0;
    while done < len {
        for (len, state) in scene.client.status(0, offset + u64::from(done), len - done) {
            assert_eq!(state & HOLE, 0, "a hole of {len} bytes behind {done} of {range:?}");
            done += len;
        }
    }
}

fn expect_zeroes(scene: &mut Scene, random: &mut Random) {
    for round in 0..48_u16 {
        let most = if round % 3 == 0 { 4 << 20 } else { 64 << 10 };
        let range = scene.some_blocks(random, most / scene.block());
        let data = vec![7; range.len().min(100 * scene.block())];
        scene.client.write(range.start as u64, &data);
        scene.model[range.start..range.start + data.len()].copy_from_slice(&data);
        let mut flags = [0, FUA, NO_HOLE, FUA | NO_HOLE][usize::from(round % 4)];
        if scene.has(HAS_FAST_ZERO) && random.below(2) == 0 {
            flags |= FAST_ZERO;
        }
        let (offset, len) = request(&range);
        match scene.client.ask(WRITE_ZEROES, flags, offset, len) {
            0 => scene.model[range.clone()].fill(0),
            ENOTSUP if flags & FAST_ZERO != 0 => continue,
            error => panic!("zeroes with the flags {flags}: {error}"),
        }
        if flags & NO_HOLE != 0 {
            expect_no_hole(scene, &range);
        }
    }
    scene.expect_content();
    if !scene.has(HAS_FAST_ZERO) {
        let block = u32::try_from(scene.block()).unwrap();
        let error = scene.client.ask(WRITE_ZEROES, FAST_ZERO, 0, block);
        assert_eq!(error, ENOTSUP, "fast zeroes that are not offered");
    }
}

fn expect_trim(scene: &mut Scene, random: &mut Random) {
    for flags in [0, FUA, 0, FUA] {
        let range = scene.some_blocks(random, 300);
        let (offset, len) = request(&range);
        assert_eq!(scene.client.ask(TRIM, flags, offset, len), 0);
        // Zeroes, or what was there.
        let found = scene.reader.read(offset, range.len()).unwrap();
        let block = scene.block();
        for (found, old) in found.chunks(block).zip(scene.model[range.clone()].chunks(block)) {
            assert!(found == old || found.iter().all(|byte| *byte == 0));
        }
        scene.model[range].copy_from_slice(&found);
    }
    scene.expect_content();
}

fn expect_refusals(scene: &mut Scene) {
    let (block, size) = (u32::try_from(scene.block()).unwrap(), scene.client.told.size_bytes);
    let client = &mut scene.client;
    for command in [TRIM, WRITE_ZEROES, BLOCK_STATUS, CACHE] {
        let behind = client.ask(command, 0, size, block);
        if client.told.flags & HAS_READ_ONLY != 0 && [TRIM, WRITE_ZEROES].contains(&command) {
            assert_eq!(behind, EPERM);
            continue;
        }
        let expected = if command == WRITE_ZEROES { ENOSPC } else { EINVAL };
        assert_eq!(behind, expected, "command {command}");
        assert_eq!(client.ask(command, 0, 0, 0), EINVAL, "no bytes");
        assert_eq!(client.ask(command, 0, 1, block), EINVAL, "no blocks");
        assert_eq!(client.ask(command, 1 << 9, 0, block), EINVAL, "a flag that no command has");
        if command != WRITE_ZEROES {
            assert_eq!(client.ask(command, NO_HOLE, 0, block), EINVAL, "the flag of another");
        }
    }
    assert_eq!(client.ask(CACHE, 0, 0, block), 0);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert_eq!(client.ask(READ, 1 << 9, 0, block), EINVAL);
}

fn expect_standard(scene: &mut Scene) {
    let mut random = Random(7);
    expect_flags(scene);
    expect_refusals(scene);
    expect_status(scene);
    if scene.has(HAS_READ_ONLY) {
        return;
    }
    expect_zeroes(scene, &mut random);
    expect_status(scene);
    expect_trim(scene, &mut random);
    expect_status(scene);
}

/// A disk with data and holes that end at no block of 4096 bytes.
fn disk(dir: &Path) -> String {
    let path = dir.join("disk");
    let file = File::create(&path).unwrap();
    file.set_len(u64::from(24 * MIB)).unwrap();
    let mut random = Random(3);
    for _ in 0..200 {
        let at = random.below(24 << 20);
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 700], at as u64).unwrap();
    }
    file.set_len(u64::from(24 * MIB)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_pool_by_itself_answers_as_the_standard_says() {
    for (create, serve) in [
        (&["--engine=btt"][..], &[][..]),
        (&["--engine=btt", "--block-size=512"], &[]),
        (&["--engine=btt"], &["--dram=transit:2M"]),
        (&["--engine=btt", "--block-size=512"], &["--dram=lru:2M"]),
        (&["--engine=raw"], &[]),
        (&["--engine=raw", "--block-size=512"], &["--dram=pmbd:2M"]),
        (&["--engine=btt"], &["--read-only"]),
    ] {
        println!("{create:?} {serve:?}");
        expect_standard(&mut Scene::new(scratch(), create, serve));
    }
}

#[test]
fn a_pool_before_a_disk_answers_as_the_standard_says() {
    for (create, serve) in [
        (&["--engine=log"][..], &[][..]),
        (&["--engine=log"], &["--dram=transit:2M"]),
        (&["--engine=cache"], &[]),
        (&["--engine=cache", "--block-size=512"], &[]),
        (&["--engine=cache"], &["--mode=wt"]),
        (&["--engine=cache", "--block-size=512"], &["--mode=pt"]),
        (&["--engine=cache"], &["--atomic-flush"]),
        (&["--engine=cache"], &["--dram=lru:2M"]),
    ] {
        println!("{create:?} {serve:?}");
        let dir = scratch();
        let backing = format!("--backing={}", disk(dir.path()));
        expect_standard(&mut Scene::new(dir, create, &[serve, &[backing.as_str()]].concat()));
    }
}

/// A server behind one of ours answers as the one before it.
#[test]
fn a_pool_before_an_export_answers_as_the_standard_says() {
    for (inner, engine) in [
        (&["--engine=btt"][..], "--engine=cache"),
        (&["--engine=btt", "--block-size=512"], "--engine=log"),
    ] {
        let behind = Scene::new(scratch(), inner, &[]);
        let socket = behind.dir.path().join("socket");
        let backing = format!("--backing=nbd+unix:///?socket={}", socket.display());
        let mut scene = Scene::new(scratch(), &[engine], &[&backing]);
        expect_standard(&mut scene);
        assert!(scene.server.stop(Signal::TERM).0.success());
    }
}

/// Bytes of the disk that file holds.
fn allocated_bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Space that a client wants to keep is kept: by zeroes in long and short ranges, over a crash, and
/// beside zeroes that give space back.
#[test]
fn zeroes_without_holes_keep_the_space_of_the_disk() {
    for (create, mode) in [
        (&["--engine=log"][..], None),
        (&["--engine=cache"], None),
        (&["--engine=cache"], Some("--mode=wt")),
    ] {
        let dir = scratch();
        let disk: PathBuf = dir.path().join("disk");
        let file = File::create(&disk).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, (24 * MIB).into()).unwrap();
        let before = allocated_bytes(&disk);
        let backing = format!("--backing={}", disk.display());
        let serve: Vec<&str> = mode.into_iter().chain([backing.as_str()]).collect();
        let mut scene = Scene::new(dir, create, &serve);
        assert_eq!(scene.client.ask(WRITE_ZEROES, NO_HOLE, 0, 8 * MIB), 0);
        for block in 0..64 {
            let at = u64::from(8 * MIB) + block * 3 * 4096;
            // First a hole to be, then zeroes that keep the space.
            assert_eq!(scene.client.ask(WRITE_ZEROES, 0, at, 2 * 4096), 0);
            assert_eq!(scene.client.ask(WRITE_ZEROES, NO_HOLE, at, 2 * 4096), 0);
        }
        let Scene { dir, server, .. } = scene;
        let _ = server.stop(Signal::KILL);
        let (pool, socket) = (dir.path().join("pool"), dir.path().join("socket"));
        let server = Server::start(&pool, &socket, &serve);
        assert!(server.stop(Signal::TERM).0.success());
        assert_eq!(allocated_bytes(&disk), before, "{create:?} {mode:?}");
        // And with the flag left out the space is given back.
        let server = Server::start(&pool, &socket, &serve);
        let mut client = StatusClient::connect(&socket).unwrap();
        assert_eq!(client.ask(WRITE_ZEROES, 0, 0, 8 * MIB), 0);
        assert!(server.stop(Signal::TERM).0.success());
        assert!(allocated_bytes(&disk) <= before - u64::from(8 * MIB), "{create:?} {mode:?}");
    }
}
