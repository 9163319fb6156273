//! Clusters: what a read that misses loads, what cleaning takes along, and what neither may
//! change.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use super::{NO_THREAD, PAGES, SHARDED, binding, memory, open, pool_of_lines, read, work, write};
use crate::cache::pages::cluster::Cluster;
use crate::cache::store::layout::{CacheHeaderBytes, PAGE_BYTES};
use crate::device::Result as Answer;
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceErrorKind, Op};
use crate::pool::{CLUSTERS, NEIGHBOURS, Superblock};
use crate::tier::Tier;
use crate::tier::set_locks::locked_by_this_thread;

const LINE_BYTES: u32 = 16 << 10;
const LINE_PAGES: u64 = 4;

/// A backing that keeps which pages it was asked to read and to write.
struct Noted {
    inner: Arc<MemoryDevice>,
    reads: Mutex<Vec<Range<u64>>>,
    writes: Mutex<Vec<Range<u64>>>,
}

impl Noted {
    /// Page n has bytes n.
    fn new() -> Arc<Self> {
        let inner = memory();
        for page in 0..PAGES {
            let byte = u8::try_from(page).unwrap();
            inner.write(page * PAGE_BYTES, &[byte; 4096], WriteFlags::default()).unwrap();
        }
        Arc::new(Self { inner, reads: Mutex::default(), writes: Mutex::default() })
    }

    /// The first page of each request, and how many pages it has, in order.
    fn take(kept: &Mutex<Vec<Range<u64>>>) -> Vec<(u64, u64)> {
        let taken = std::mem::take(&mut *kept.lock().unwrap());
        let mut taken: Vec<_> = taken.iter().map(|it| (it.start, it.end - it.start)).collect();
        taken.sort_unstable();
        taken
    }
}

impl BlockDevice for Noted {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Answer<()> {
        let kept = match operation {
            Operation::Read { .. } => Some(&self.reads),
            Operation::Write { .. } => Some(&self.writes),
            _ => None,
        };
        let (offset, len) = operation.range();
        if let Some(kept) = kept {
            kept.lock().unwrap().push(pages_of(offset, len));
        }
        self.inner.run(operation)
    }
}

fn byte_of(page: u64) -> u8 {
    u8::try_from(page).unwrap()
}

fn cached(device: &CacheDevice) -> Vec<u64> {
    (0..PAGES).filter(|page| device.core.pages.find(*page).is_some()).collect()
}

#[test]
fn a_read_that_misses_brings_in_its_cluster_by_one_read_after_the_answer() {
    let backing = Noted::new();
    let device = open(&pool_of_lines(64, LINE_BYTES), &backing);
    Noted::take(&backing.reads);
    assert_eq!(read(&device, 5), 5);
    assert_eq!(Noted::take(&backing.reads), [(5, 1)], "the client waits for its page alone");
    work(&device);
    assert_eq!(Noted::take(&backing.reads), [(4, 4)]);
    assert_eq!((cached(&device), device.core.pages.usage().dirty), (vec![4, 5, 6, 7], 0));
    (4..8).for_each(|page| assert_eq!(read(&device, page), byte_of(page)));
    assert_eq!(Noted::take(&backing.reads), []);
}

#[test]
fn the_ends_of_a_long_read_are_filled_and_whole_clusters_are_read_once() {
    let backing = Noted::new();
    let device = open(&pool_of_lines(64, LINE_BYTES), &backing);
    Noted::take(&backing.reads);
    let mut data = vec![0; 8 * 4096];
    device.read(3 * PAGE_BYTES, &mut data).unwrap();
    assert_eq!(Noted::take(&backing.reads), [(3, 8)]);
    work(&device);
    assert_eq!(Noted::take(&backing.reads), [(0, 3), (11, 1)], "of each what is not cached yet");
    assert_eq!(cached(&device), (0..12).collect::<Vec<_>>());
}

#[test]
fn a_cluster_of_a_page_brings_in_nothing_else() {
    let backing = Noted::new();
    let device = open(&pool_of_lines(64, 4096), &backing);
    Noted::take(&backing.reads);
    assert_eq!(read(&device, 5), 5);
    work(&device);
    assert_eq!((Noted::take(&backing.reads), cached(&device)), (vec![(5, 1)], vec![5]));
}

#[test]
fn what_is_written_meanwhile_is_newer_than_what_is_brought_in() {
    let backing = Noted::new();
    let device = open(&pool_of_lines(64, LINE_BYTES), &backing);
    assert_eq!(read(&device, 5), 5);
    write(&device, 6, 99);
    work(&device);
    assert_eq!((read(&device, 6), device.core.pages.find(6).unwrap().dirty), (99, true));
    assert_eq!(cached(&device), [4, 5, 6, 7]);
    // Around the cache: the backing may lose it, so its bucket is not filled before a flush.
    device.set_mode(Mode::WriteInvalidate).unwrap();
    assert_eq!(read(&device, 13), 13);
    write(&device, 14, 98);
    work(&device);
    assert_eq!((device.core.pages.find(14), read(&device, 14)), (None, 98));
}

#[test]
fn a_backing_that_fails_to_bring_in_a_cluster_fails_no_client() {
    let fault = Arc::new(Fault::new(memory(), 1));
    let device = open(&pool_of_lines(64, LINE_BYTES), &fault);
    assert_eq!(read(&device, 5), 0);
    fault.add(Rule::new(&[Op::Read], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    work(&device);
    assert_eq!(cached(&device), [5]);
    device.flush().unwrap();
    fault.heal();
    assert_eq!(read(&device, 6), 0);
    work(&device);
    assert_eq!(cached(&device), [4, 5, 6, 7]);
}

/// Pages in an order in which no two neighbours follow each other.
fn scattered() -> impl Iterator<Item = u64> {
    (0..PAGES).map(|at| at * 37 % PAGES)
}

#[test]
fn cleaning_writes_whole_clusters() {
    for slots in [2 * PAGES, SHARDED] {
        let backing = Noted::new();
        let device = open(&pool_of_lines(slots, LINE_BYTES), &backing);
        scattered().for_each(|page| write(&device, page, 9));
        device.clean_all().unwrap();
        let writes = Noted::take(&backing.writes);
        let is_whole = |(first, count): &(u64, u64)| {
            first.is_multiple_of(LINE_PAGES) && count.is_multiple_of(LINE_PAGES)
        };
        assert!(writes.iter().all(is_whole), "{writes:?}");
        assert_eq!(writes.iter().map(|(_, count)| count).sum::<u64>(), PAGES);
    }
}

#[test]
fn a_full_cache_cleans_the_clusters_of_its_victims_and_evicts_the_victims() {
    let backing = Noted::new();
    let device = open(&pool_of_lines(32, LINE_BYTES), &backing);
    device.set("eviction", "lru").unwrap();
    device.set("cleaning", "nop").unwrap();
    (0..32).for_each(|at| write(&device, at % 8 * LINE_PAGES + at / 8, 9));
    write(&device, 64, 9);
    let writes = Noted::take(&backing.writes);
    assert!(writes.iter().any(|(_, count)| *count > 1), "{writes:?}");
    let usage = device.core.pages.usage();
    let cleaned: u64 = writes.iter().map(|(_, count)| count).sum();
    assert!(usage.live > 33 - cleaned, "what was cleaned beside victims stays: {usage:?}");
}

#[test]
fn pages_of_all_clusters_are_there_after_a_crash_in_every_shard() {
    for line_bytes in Cluster::SIZES_BYTES {
        let (region, backing) = (pool_of_lines(SHARDED, line_bytes), memory());
        let device = open(&region, &backing);
        assert!(device.core.pages.shards.count() > 2);
        scattered().for_each(|page| write(&device, page, byte_of(page)));
        drop(device);
        assert_eq!(CacheHeader::read(&region).unwrap().line_bytes(), u64::from(line_bytes));
        assert_eq!(check::check(&region).unwrap().findings, Vec::<String>::new());
        let device = open(&region, &backing);
        assert_eq!(device.recovered().dirty_pages, PAGES);
        (0..PAGES).for_each(|page| assert_eq!(read(&device, page), byte_of(page)));
    }
}

/// What a program that knows no clusters refuses: an incompatible feature of the pool.
#[test]
fn clusters_of_several_pages_are_an_incompatible_feature() {
    for line_bytes in Cluster::SIZES_BYTES {
        let features = if line_bytes == 4096 { 0 } else { CLUSTERS };
        let (region, backing) = (pool_of_lines(SHARDED, line_bytes), memory());
        let superblock = || Superblock::read(&region).unwrap().superblock;
        assert_eq!(superblock().incompatible, features | NEIGHBOURS, "{line_bytes}");
        // A pool of an earlier program gets the feature when it is opened.
        Superblock { incompatible: 0, ..superblock() }.write(&region).unwrap();
        drop(open(&region, &backing));
        assert_eq!(superblock().incompatible, features, "{line_bytes}");
    }
}

/// A pool of a program that knew no neighbourhoods keeps its pages where that program finds them.
#[test]
fn a_pool_without_neighbourhoods_stays_one() {
    let (region, backing) = (pool_of_lines(SHARDED, 4096), memory());
    let superblock = || Superblock::read(&region).unwrap().superblock;
    Superblock { incompatible: 0, ..superblock() }.write(&region).unwrap();
    let device = open(&region, &backing);
    (0..PAGES).for_each(|page| write(&device, page, byte_of(page)));
    drop(device);
    assert_eq!(superblock().incompatible, 0);
    assert_eq!(check::check(&region).unwrap().findings, Vec::<String>::new());
    let device = open(&region, &backing);
    assert_eq!(device.recovered().dirty_pages, PAGES);
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), byte_of(page)));
    // Under the other rule, pages are in wrong shards: that is noticed.
    drop(device);
    Superblock { incompatible: NEIGHBOURS, ..superblock() }.write(&region).unwrap();
    assert!(!check::check(&region).unwrap().findings.is_empty());
}

/// A large write locks a shard twice for all its pages of a neighbourhood: to take their slots, and
/// to make them visible.
#[test]
fn a_write_of_1_mib_locks_shards_32_times() {
    const WRITE: usize = 1 << 20;
    let region = Arc::new(Region::anonymous(140 << 20).unwrap());
    create(&region, &CacheOptions::default()).unwrap();
    let backing = Arc::new(MemoryDevice::new(4096, 4096).unwrap());
    let device = open(&region, &backing);
    device.set("by-content", "off").unwrap();
    assert_eq!(device.core.pages.shards.count(), 16);
    for (offset, most) in [(0, 32), (0, 32), (3 << 20, 32), (7 << 12, 34)] {
        let before = locked_by_this_thread();
        device.write(offset, &vec![7; WRITE], WriteFlags::default()).unwrap();
        let locked = locked_by_this_thread() - before;
        assert!(locked <= most, "{locked} locks for 1 MiB at {offset}");
    }
    let before = locked_by_this_thread();
    device.write(9 << 20, &[7; 4096], WriteFlags::default()).unwrap();
    assert_eq!(locked_by_this_thread() - before, 2, "a page");
}

/// Stores `line_bytes` into both copies of the header of `region`.
fn store_line_bytes(region: &Region, line_bytes: u32) {
    let data_offset = Superblock::read(region).unwrap().superblock.data_offset;
    for at in [0, PAGE_BYTES] {
        let offset = data_offset + at;
        let mut bytes = Box::new(CacheHeaderBytes::new_zeroed());
        region.read(offset, bytes.as_mut_bytes()).unwrap();
        bytes.line_bytes = U32::new(line_bytes);
        bytes.seal();
        region.write(offset, bytes.as_bytes()).unwrap();
    }
}

#[test]
fn pools_without_a_size_of_lines_have_pages_and_other_sizes_are_refused() {
    let (region, backing) = (pool_of_lines(SHARDED, 4096), memory());
    let device = open(&region, &backing);
    scattered().for_each(|page| write(&device, page, 3));
    drop(device);
    store_line_bytes(&region, 0);
    assert_eq!(CacheHeader::read(&region).unwrap().line_bytes(), 4096);
    let device = open(&region, &backing);
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 3));
    drop(device);
    for line_bytes in [1, 512, 12 << 10, 128 << 10, u32::MAX] {
        store_line_bytes(&region, line_bytes);
        let error = CacheHeader::read(&region).unwrap_err();
        assert!(matches!(error, CacheError::LineSize { found_bytes } if found_bytes == line_bytes));
        CacheDevice::open(Arc::clone(&region), memory(), binding(), NO_THREAD)
            .map(drop)
            .unwrap_err();
        let options = CacheOptions { line_bytes, ..CacheOptions::default() };
        create(&Region::anonymous(1 << 20).unwrap(), &options).unwrap_err();
    }
}
