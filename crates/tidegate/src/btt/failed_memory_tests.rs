//! Memory that fails while a BTT is open.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;

use super::info::read_info;
use super::layout::MapEntry;
use super::*;
use crate::device::{BlockDevice, BlockDeviceExt, DeviceErrorKind, WriteFlags};
use crate::pmem::{Observer, Region, RegionOptions};

const PAGE: u64 = 4096;
/// An lba whose map entry is not in the first page of the map.
const FAR: u64 = 5000;

/// Tells when a thread waits for another one.
struct Waits(Mutex<Sender<()>>);

impl Observer for Waits {
    fn store(&self, _: u64, _: &[u8], _: bool) {}
    fn write_back(&self, _: u64, _: u64) {}
    fn fence(&self) {}
    fn load(&self, _: u64, _: u64) {}
    fn relax(&self) {
        self.0.lock().send(()).unwrap();
    }
}

struct Pool {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Pool {
    /// Makes a BTT with lbas of 512 bytes: a page of its map has 1024 entries.
    fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("pool");
        let create_bytes = Some(8 << 20);
        let region =
            Region::open(&path, &RegionOptions { create_bytes, ..RegionOptions::default() })
                .unwrap();
        create(&region, &BttOptions { lba_bytes: 512, lanes: 8, ..BttOptions::default() }).unwrap();
        Self { path, _dir: dir }
    }

    fn region(&self) -> Region {
        Region::open(&self.path, &RegionOptions::default()).unwrap()
    }

    /// Lets the memory of the page at `offset` fail: an access behind the end of a file raises the
    /// signal of failed memory. The file has all of its bytes again afterwards.
    fn fail_page(&self, region: &Region, offset: u64) {
        let bytes = std::fs::read(&self.path).unwrap();
        let start = offset - offset % PAGE;
        let file = std::fs::File::options().write(true).open(&self.path).unwrap();
        file.set_len(start).unwrap();
        region.load_u64(start).unwrap_err();
        file.set_len(bytes.len() as u64).unwrap();
        let tail = &bytes[usize::try_from(start).unwrap()..];
        std::os::unix::fs::FileExt::write_all_at(&file, tail, start).unwrap();
    }
}

fn write(btt: &Btt, lba: u64, byte: u8) -> crate::device::Result<()> {
    btt.write(lba * 512, &[byte; 512], WriteFlags::default())
}

fn read(btt: &Btt, lba: u64) -> crate::device::Result<u8> {
    let mut block = [0; 512];
    btt.read(lba * 512, &mut block).map(|()| block[0])
}

/// A reader finds failed memory. Before it can mark the block, a writer replaces it.
#[test]
fn a_write_that_replaces_a_failed_block_is_not_marked_as_lost() {
    let pool = Pool::new();
    let (told, waits) = channel();
    let region = Arc::new(pool.region().observed(Arc::new(Waits(Mutex::new(told)))));
    let btt = Btt::open(Arc::clone(&region)).unwrap();
    write(&btt, 10, 1).unwrap();
    let arena = &btt.arenas[0];
    let (_, failed) = arena.map().load_block(10).unwrap();
    // The writer's block must be in another page.
    let mut lane = arena
        .lanes
        .free_from(0)
        .find(|lane| {
            let page = |block| arena.block_offset(block) / PAGE;
            page(lane.free_block()) != page(failed)
        })
        .unwrap();
    pool.fail_page(&region, arena.block_offset(failed));
    let mut guard = arena.lba_locks.lock(10_u32, || ());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&btt, 10));
        waits.recv().unwrap();
        region.write(arena.block_offset(lane.free_block()), &[2; 512]).unwrap();
        arena.map().store(10, MapEntry::normal(lane.free_block())).unwrap();
        lane.advance(10, failed);
        guard.set_holder(lane.number);
        drop(guard);
        assert_eq!(reader.join().unwrap().unwrap(), 2);
    });
    drop(lane);
    assert_eq!(read(&btt, 10).unwrap(), 2);
}

#[test]
fn a_failed_block_is_lost_until_it_is_written() {
    let pool = Pool::new();
    let region = Arc::new(pool.region());
    let btt = Btt::open(Arc::clone(&region)).unwrap();
    write(&btt, 10, 1).unwrap();
    let (_, failed) = btt.arenas[0].map().load_block(10).unwrap();
    pool.fail_page(&region, btt.arenas[0].block_offset(failed));
    read(&btt, 10).unwrap_err();
    assert_eq!(check::check(&region, &mut |_| ()).unwrap().findings.len(), 1);
    write(&btt, 10, 3).unwrap();
    assert_eq!(read(&btt, 10).unwrap(), 3);
}

/// The lanes that wrote to lbas of the failed page last cannot be used any more, and the rest can.
#[test]
fn a_failed_page_of_the_map_fails_only_its_own_lbas() {
    let pool = Pool::new();
    let region = Arc::new(pool.region());
    let btt = Btt::open(Arc::clone(&region)).unwrap();
    // Three lanes have their last writes in the page.
    btt.write(10 * 512, &[1; 3 * 512], WriteFlags::default()).unwrap();
    let map = 4096 + read_info(&region, 4096).unwrap().mapoff.get();
    pool.fail_page(&region, map);
    for lba in FAR..FAR + 300 {
        write(&btt, lba, 2).unwrap();
    }
    // All lbas, and so those too that share a bucket with one of the page.
    for lba in (1024..btt.geometry().blocks).step_by(8) {
        let blocks = 8.min(btt.geometry().blocks - lba);
        let data = vec![3; usize::try_from(blocks).unwrap() * 512];
        btt.write(lba * 512, &data, WriteFlags::default()).unwrap();
    }
    assert_eq!(write(&btt, 20, 2).unwrap_err().kind(), DeviceErrorKind::Io);
    assert_eq!(read(&btt, FAR).unwrap(), 3);
    drop((btt, region));
    // The page's content is whole here: the acknowledged writes to it are there.
    let btt = Btt::open(Arc::new(pool.region())).unwrap();
    assert_eq!([10, 11, 12, FAR].map(|lba| read(&btt, lba).unwrap()), [1, 1, 1, 3]);
}
