//! Tests of pools of libpmemblk, and of their conversion. The tests of the command line exchange
//! pools with the original.

use std::sync::Arc;

use parking_lot::Mutex;

use super::check::{Finding, check};
use super::create::create_arenas;
use super::info::read_info;
use super::layout::{ArenaPlan, LANES};
use super::*;
use crate::device::{BlockDeviceExt, DeviceErrorKind, ZeroFlags};
use crate::pmem::{Observer, Region};

const ARENA_BYTES: u64 = 16 << 20;
const BASE: u64 = 8192;
/// Bytes of the small pools, which have 8 lanes.
const SMALL_BYTES: u64 = 256 << 10;

fn region(len_bytes: u64) -> Arc<Region> {
    Arc::new(Region::anonymous(len_bytes).unwrap())
}

fn small(block_bytes: u32) -> (Arc<Region>, Btt) {
    let region = region(SMALL_BYTES);
    create(&region, &BttOptions { lanes: 8, ..BttOptions::libpmemblk(block_bytes) }).unwrap();
    (region.clone(), Btt::open(region).unwrap())
}

/// A pool as `pmemblk_create` leaves it: a header, and no BTT yet.
fn never_written() -> Arc<Region> {
    let region = region(ARENA_BYTES + BASE);
    create(&region, &BttOptions::libpmemblk(4096)).unwrap();
    let info = read_info(&region, BASE).unwrap();
    for (offset, len) in [
        (BASE, 4096),
        (BASE + info.logoff.get(), info.info2off.get() - info.logoff.get()),
        (BASE + info.info2off.get(), 4096),
    ] {
        region.zero_streaming(offset, len).unwrap();
    }
    region
}

fn write(btt: &Btt, block: u64, byte: u8) {
    let data = vec![byte; btt.summary().block_bytes as usize];
    btt.write_with_metadata(block, &data, &[]).unwrap();
}

fn read(btt: &Btt, block: u64) -> u8 {
    let mut data = vec![0xEE; btt.summary().block_bytes as usize];
    btt.read_with_metadata(block, &mut data, &mut []).unwrap();
    assert!(data.iter().all(|&byte| byte == data[0]), "block {block} is torn");
    data[0]
}

fn assert_clean(region: &Region) {
    assert_eq!(check(region, &mut |_| ()).unwrap().findings, []);
}

fn patch(region: &Region, offset: u64, byte: u8) {
    region.write(offset, &[byte]).unwrap();
}

#[test]
fn blocks_of_any_size_keep_what_is_written() {
    for block_bytes in [1, 511, 512, 520, 1000, 4096, 4104, 5000] {
        let (region, btt) = small(block_bytes);
        let last = btt.summary().blocks - 1;
        for (block, byte) in [(0, 1), (last, 2), (0, 3), (7, 4)] {
            write(&btt, block, byte);
        }
        drop(btt);
        let btt = Btt::open(region.clone()).unwrap();
        assert_eq!([0, last, 7, 8].map(|block| read(&btt, block)), [3, 2, 4, 0]);
        let summary = btt.summary();
        assert_eq!((summary.version, summary.block_bytes), (Version::Libpmemblk, block_bytes));
        assert_clean(&region);
    }
}

#[test]
fn blocks_in_zero_state_and_in_error_state_are_written_again() {
    let (region, btt) = small(1000);
    (0..4).for_each(|block| write(&btt, block, 7));
    btt.write_zeroes(1000, 1000, ZeroFlags::default()).unwrap();
    btt.set_error(2).unwrap();
    let lost = btt.read_with_metadata(2, &mut [0; 1000], &mut []).unwrap_err();
    assert_eq!(lost.kind(), DeviceErrorKind::Io);
    assert_eq!([0, 1, 3].map(|block| read(&btt, block)), [7, 0, 7]);
    (1..3).for_each(|block| write(&btt, block, 8));
    assert_eq!([0, 1, 2, 3].map(|block| read(&btt, block)), [7, 8, 8, 7]);
    let blocks = btt.summary().blocks;
    assert_eq!(btt.set_error(blocks).unwrap_err().kind(), DeviceErrorKind::OutOfRange);
    assert_clean(&region);
}

#[test]
fn a_pool_that_was_never_written_gets_its_btt_when_it_is_opened() {
    let region = never_written();
    let planned = Btt::summarize(&region).unwrap();
    assert_clean(&region);
    assert_eq!(probe(&region).unwrap(), Some(Version::Libpmemblk));
    let btt = Btt::open(region.clone()).unwrap();
    assert_eq!((planned.blocks, planned.block_bytes), (btt.summary().blocks, 4096));
    assert_eq!(read(&btt, 5), 0);
    write(&btt, 5, 6);
    drop(btt);
    assert_eq!(read(&Btt::open(region.clone()).unwrap(), 5), 6);
    assert_clean(&region);
}

/// libpmemblk writes the first info block before the second.
#[test]
fn a_first_write_that_a_crash_cut_off_leaves_a_pool_that_was_never_written() {
    let region = never_written();
    drop(Btt::open(region.clone()).unwrap());
    let info = read_info(&region, BASE).unwrap();
    region.zero_streaming(BASE + info.info2off.get(), 4096).unwrap();
    region.zero_streaming(BASE + 64, 4096 - 64).unwrap();
    assert_clean(&region);
    assert_eq!(read(&Btt::open(region).unwrap(), 5), 0);
}

/// Data that lost both info blocks is damage, and never an empty pool.
#[test]
fn a_pool_with_data_is_never_taken_for_an_empty_one() {
    let region = never_written();
    write(&Btt::open(region.clone()).unwrap(), 5, 6);
    let info = read_info(&region, BASE).unwrap();
    patch(&region, BASE, 0);
    assert!(matches!(Btt::open(region.clone()), Err(BttError::InfoDamaged { arena: 0, .. })));
    assert_eq!(repair(&region, &mut |_| ()).unwrap().repaired_info_blocks, 1);
    assert_eq!(read(&Btt::open(region.clone()).unwrap(), 5), 6);
    for copy in [BASE, BASE + info.info2off.get()] {
        region.zero_streaming(copy, 4096).unwrap();
    }
    assert!(Btt::open(region.clone()).is_err());
    assert!(check(&region, &mut |_| ()).is_err());
}

/// A write that was acknowledged, whose map entry a power cut took, is in the flog alone.
#[test]
fn a_pool_with_a_write_in_its_flog_is_never_taken_for_an_empty_one() {
    let region = never_written();
    write(&Btt::open(region.clone()).unwrap(), 5, 6);
    let info = read_info(&region, BASE).unwrap();
    region.store_u32(BASE + info.mapoff.get() + 5 * 4, 0).unwrap();
    region.zero_streaming(BASE, 4096).unwrap();
    assert!(matches!(Btt::open(region.clone()), Err(BttError::InfoDamaged { arena: 0, .. })));
    assert_eq!(repair(&region, &mut |_| ()).unwrap().repaired_info_blocks, 1);
    assert_eq!(read(&Btt::open(region).unwrap(), 5), 6);
}

#[test]
fn p6_a_btt_whose_making_a_crash_cut_off_is_made_again() {
    let mut image = vec![0; usize::try_from(ARENA_BYTES + BASE).unwrap()];
    never_written().read(0, &mut image).unwrap();
    let recorder = Arc::new(Recorder::default());
    let observed = Region::anonymous(ARENA_BYTES + BASE).unwrap();
    observed.write(0, &image).unwrap();
    drop(Btt::open(Arc::new(observed.observed(recorder.clone()))).unwrap());
    let epochs = std::mem::take(&mut *recorder.epochs.lock());
    assert!(epochs.len() > 4, "{} epochs", epochs.len());
    for epoch in &epochs {
        for share in [1, 2, 4] {
            let mut cut = image.clone();
            for (offset, word) in epoch.iter().step_by(share) {
                store(&mut cut, *offset, word);
            }
            let region = region(ARENA_BYTES + BASE);
            region.write(0, &cut).unwrap();
            assert_clean(&region);
            let btt = Btt::open(region.clone()).unwrap();
            write(&btt, 5, 6);
            assert_eq!([4, 5].map(|block| read(&btt, block)), [0, 6]);
            assert_clean(&region);
        }
        for (offset, word) in epoch {
            store(&mut image, *offset, word);
        }
    }
}

/// A pool made over the file of an older one, whose BTT has another parent.
#[test]
fn the_btt_of_an_older_pool_is_not_the_pools_own() {
    let region = never_written();
    write(&Btt::open(region.clone()).unwrap(), 5, 6);
    let older = read_info(&region, BASE).unwrap();
    pmemblk::write_header(&region, [9; 16], 4096).unwrap();
    // The flag for a file of zeroes, which this was not.
    patch(&region, 4100, 0);
    assert_clean(&region);
    let btt = Btt::open(region.clone()).unwrap();
    assert_eq!(read(&btt, 5), 0);
    assert_ne!(btt.summary().uuid.as_bytes(), &older.uuid);
}

#[test]
fn p7_headers_that_are_damaged_or_of_other_forms_are_refused() {
    let message = |offset, byte, resealed: bool| {
        let region = never_written();
        write(&Btt::open(region.clone()).unwrap(), 3, 4);
        patch(&region, offset, byte);
        if resealed {
            pmemblk::reseal(&region);
        }
        let findings = check(&region, &mut |_| ()).unwrap().findings;
        assert!(matches!(findings[..], [Finding::PoolDamaged { .. }]), "{findings:?}");
        Btt::open(region).err().expect("the header is refused").to_string()
    };
    for (offset, byte, resealed, part) in [
        (1000, 1, false, "checksum"),
        (8, 2, true, "major version is 2"),
        (16, 8, true, "features 0x8"),
        (20, 1, true, "features"),
        (56, 1, true, "pool set"),
        (137, 2, true, "byte order"),
        (4097, 8, false, "those of its BTT 4096"),
        (24, 1, true, "UUID of another pool"),
    ] {
        let found = message(offset, byte, resealed);
        assert!(found.contains(part) && found.contains("libpmemblk"), "{offset}: {found}");
    }
}

#[test]
fn a_converted_pool_is_a_btt_of_version_1_1_with_the_same_blocks() {
    for block_bytes in [512, 4096] {
        let (region, btt) = small(block_bytes);
        let blocks = btt.summary().blocks;
        (0..blocks - 3).for_each(|block| write(&btt, block, (block % 200) as u8 + 1));
        btt.write_zeroes(0, u64::from(block_bytes) * 2, ZeroFlags::default()).unwrap();
        drop(btt);
        assert!(!is_half_converted(&region));
        convert(&region).unwrap();
        let summary = Btt::summarize(&region).unwrap();
        assert_eq!((summary.version, summary.blocks), (Version::V1_1, blocks));
        assert!(summary.parent_uuid.is_nil(), "the kernel takes it in any namespace");
        let btt = Btt::open(region.clone()).unwrap();
        let expected = |block| match block {
            2.. if block < blocks - 3 => (block % 200) as u8 + 1,
            _ => 0,
        };
        (0..blocks).for_each(|block| assert_eq!(read(&btt, block), expected(block), "{block}"));
        assert_clean(&region);
        write(&btt, 3, 250);
        assert_clean(&region);
    }
}

#[test]
fn a_conversion_keeps_all_arenas() {
    let region = region(3 * ARENA_BYTES + BASE);
    let plans = [ArenaPlan::new(ARENA_BYTES, 4096, LANES).unwrap(); 3];
    let summary = create_arenas(&region, &BttOptions::libpmemblk(4096), &plans).unwrap();
    let lbas = u64::from(summary.arenas[0].lbas);
    let btt = Btt::open(region.clone()).unwrap();
    let edges = [0, lbas - 1, lbas, 2 * lbas - 1, 2 * lbas, 3 * lbas - 1];
    edges.into_iter().zip(1..).for_each(|(block, byte)| write(&btt, block, byte));
    drop(btt);
    convert(&region).unwrap();
    let btt = Btt::open(region.clone()).unwrap();
    assert_eq!(edges.map(|block| read(&btt, block)), [1, 2, 3, 4, 5, 6]);
    assert_clean(&region);
    for arena in &btt.summary().arenas {
        assert_eq!(read_info(&region, arena.offset_bytes).unwrap().parent_uuid, [0; 16]);
    }
}

#[test]
fn a_pool_that_was_never_written_converts_to_an_empty_btt() {
    let region = never_written();
    convert(&region).unwrap();
    let btt = Btt::open(region).unwrap();
    assert_eq!((btt.summary().version, read(&btt, 9)), (Version::V1_1, 0));
}

/// Keeps the stores between two fences.
#[derive(Default)]
struct Recorder {
    epochs: Mutex<Vec<Epoch>>,
}

/// Stored words, with their offsets.
type Epoch = Vec<(u64, Vec<u8>)>;

impl Observer for Recorder {
    fn store(&self, offset: u64, data: &[u8], _non_temporal: bool) {
        let mut epochs = self.epochs.lock();
        if epochs.is_empty() {
            epochs.push(Vec::new());
        }
        let words = data.chunks(8).zip((offset..).step_by(8));
        let words = words.map(|(word, offset)| (offset, word.to_vec()));
        epochs.last_mut().expect("one is there").extend(words);
    }

    fn write_back(&self, _offset: u64, _len: u64) {}

    fn fence(&self) {
        self.epochs.lock().push(Vec::new());
    }

    fn load(&self, _offset: u64, _len: u64) {}

    fn relax(&self) {}
}

/// Cuts a conversion off in each of its epochs, with any part of that epoch's words stored.
#[test]
fn p6_a_conversion_that_a_crash_cut_off_leaves_a_whole_pool_and_is_completed() {
    let (region, btt) = small(512);
    let blocks = btt.summary().blocks;
    (0..blocks).for_each(|block| write(&btt, block, (block % 200) as u8 + 1));
    btt.write_zeroes(0, 1024, ZeroFlags::default()).unwrap();
    drop(btt);
    let mut image = vec![0; usize::try_from(SMALL_BYTES).unwrap()];
    region.read(0, &mut image).unwrap();
    let recorder = Arc::new(Recorder::default());
    let observed = Region::anonymous(SMALL_BYTES).unwrap();
    observed.write(0, &image).unwrap();
    convert(&Arc::new(observed.observed(recorder.clone()))).unwrap();
    let epochs = std::mem::take(&mut *recorder.epochs.lock());
    assert!(epochs.len() > 8, "{} epochs", epochs.len());
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for epoch in &epochs {
        for share in [0, 1, 2, 3] {
            let mut cut = image.clone();
            for (offset, word) in epoch {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if share == 3 || random >> 62 < share {
                    store(&mut cut, *offset, word);
                }
            }
            assert_whole(&cut, blocks);
        }
        for (offset, word) in epoch {
            store(&mut image, *offset, word);
        }
    }
}

fn store(image: &mut [u8], offset: u64, word: &[u8]) {
    image[usize::try_from(offset).unwrap()..][..word.len()].copy_from_slice(word);
}

fn assert_whole(image: &[u8], blocks: u64) {
    let region = region(SMALL_BYTES);
    region.write(0, image).unwrap();
    let assert_blocks = || {
        let btt = Btt::open(region.clone()).unwrap();
        for block in 0..blocks {
            let expected = if block < 2 { 0 } else { (block % 200) as u8 + 1 };
            assert_eq!(read(&btt, block), expected, "{} block {block}", btt.summary().version);
        }
        btt.summary().version
    };
    if assert_blocks() == Version::V1_1 && !is_half_converted(&region) {
        return;
    }
    convert(&region).unwrap();
    assert_eq!(assert_blocks(), Version::V1_1);
    assert_clean(&region);
}
