//! Tests of the engine as a whole. The crash simulator has its own crate.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::check::{Finding, check};
use super::create::create_arenas;
use super::flog::newest_of;
use super::info::read_info;
use super::layout::{ArenaPlan, FlogSlot, LANES, MapEntry};
use super::*;
use crate::device::conformance::{self, Promises};
use crate::device::{BlockDevice, BlockDeviceExt, DeviceErrorKind, WriteFlags, ZeroFlags};
use crate::pmem::Region;

const ARENA_BYTES: u64 = 16 << 20;

fn region(len_bytes: u64) -> Arc<Region> {
    Arc::new(Region::anonymous(len_bytes).unwrap())
}

fn options(lba_bytes: u32) -> BttOptions {
    BttOptions { lba_bytes, ..BttOptions::default() }
}

/// A BTT of 8 lanes in 256 KiB.
fn small(lba_bytes: u32) -> (Arc<Region>, Btt) {
    let region = region(256 << 10);
    create(&region, &BttOptions { lanes: 8, ..options(lba_bytes) }).unwrap();
    (region.clone(), Btt::open(region).unwrap())
}

fn write(btt: &Btt, block: u64, byte: u8) {
    let block_bytes = u64::from(btt.geometry().block_bytes);
    let data = vec![byte; usize::try_from(block_bytes).unwrap()];
    btt.write(block * block_bytes, &data, WriteFlags::default()).unwrap();
}

/// Returns the byte that fills the block. A block with different bytes is torn.
fn read(btt: &Btt, block: u64) -> u8 {
    let block_bytes = u64::from(btt.geometry().block_bytes);
    let mut data = vec![0xEE; usize::try_from(block_bytes).unwrap()];
    btt.read(block * block_bytes, &mut data).unwrap();
    assert!(data.iter().all(|&byte| byte == data[0]), "block {block} is torn");
    data[0]
}

fn faults(region: &Region) -> Vec<Finding> {
    check(region, &mut |_| ()).unwrap().findings
}

fn copy_of(region: &Region) -> Arc<Region> {
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    let copy = Region::anonymous(region.len_bytes()).unwrap();
    copy.write(0, &bytes).unwrap();
    Arc::new(copy)
}

fn flip(region: &Region, offset: u64, mask: u8) {
    let mut byte = [0];
    region.read(offset, &mut byte).unwrap();
    region.write(offset, &[byte[0] ^ mask]).unwrap();
}

#[test]
fn every_lba_size_and_version_keeps_what_is_written() {
    for lba_bytes in LBA_SIZES {
        for version in [Version::V1_1, Version::V2_0] {
            for flog_slots in [FlogSlots::ZeroOne, FlogSlots::ZeroTwo] {
                let region = region(ARENA_BYTES + 4096);
                let summary =
                    create(&region, &BttOptions { version, flog_slots, ..options(lba_bytes) })
                        .unwrap();
                assert_eq!((summary.version, summary.lba_bytes), (version, lba_bytes));
                let btt = Btt::open(region.clone()).unwrap();
                let last = btt.geometry().blocks - 1;
                for (block, byte) in [(0, 1), (last, 2), (0, 3), (7, 4)] {
                    write(&btt, block, byte);
                }
                drop(btt);
                let btt = Btt::open(region.clone()).unwrap();
                assert_eq!([0, last, 7, 8].map(|block| read(&btt, block)), [3, 2, 4, 0]);
                assert_eq!(btt.summary().arenas[0].flog_slots, flog_slots);
                assert_eq!(faults(&region), []);
            }
        }
    }
}

#[test]
fn behaves_as_every_block_device_must() {
    for lba_bytes in LBA_SIZES {
        let (region, btt) = small(lba_bytes);
        if btt.geometry().blocks < conformance::LEAST_BLOCKS {
            let region = self::region(ARENA_BYTES + 4096);
            create(&region, &options(lba_bytes)).unwrap();
            conformance::check(&Btt::open(region).unwrap(), Promises::default());
        } else {
            conformance::check(&btt, Promises::default());
            conformance::check_started(&(Arc::new(btt) as _), Promises::default());
        }
        assert_eq!(faults(&region), []);
    }
}

/// The exact price of durability: a fence or a write-back that is lost or new fails here.
#[test]
fn p1_a_write_costs_two_fences_however_many_blocks_it_has() {
    let (region, btt) = small(4096);
    let cost = |work: &dyn Fn()| {
        let before = region.counters();
        work();
        region.counters() - before
    };
    write(&btt, 0, 1);
    let one = cost(&|| write(&btt, 1, 2));
    // The flog line twice, and the map line of the lane's previous write.
    assert_eq!((one.fences, one.lines_written_back, one.bytes_streamed), (2, 3, 4096));
    let group = cost(&|| btt.write(0, &[3; 4 * 4096], WriteFlags::default()).unwrap());
    assert_eq!((group.fences, group.bytes_streamed), (2, 4 * 4096));
    let flush = cost(&|| btt.flush().unwrap());
    assert_eq!((flush.fences, flush.lines_written_back), (0, 0));
    let zeroes = cost(&|| btt.write_zeroes(0, 4 * 4096, ZeroFlags::default()).unwrap());
    assert_eq!((zeroes.fences, zeroes.lines_written_back, zeroes.bytes_streamed), (1, 1, 0));
}

#[test]
fn metadata_travels_with_its_block() {
    let (_, btt) = small(520);
    btt.write_with_metadata(3, &[7; 512], &[9; 8]).unwrap();
    let (mut data, mut metadata) = ([0; 512], [0; 8]);
    btt.read_with_metadata(3, &mut data, &mut metadata).unwrap();
    assert_eq!((data, metadata), ([7; 512], [9; 8]));
    // A plain write leaves no stale metadata in the block that its lane reuses.
    for byte in 0..20 {
        write(&btt, 3, byte);
    }
    btt.read_with_metadata(3, &mut data, &mut metadata).unwrap();
    assert_eq!((data, metadata), ([19; 512], [0; 8]));
    let wrong = btt.write_with_metadata(3, &[7; 512], &[9; 7]).unwrap_err();
    assert_eq!(wrong.kind(), DeviceErrorKind::Misaligned);
}

#[test]
fn a_write_goes_to_the_right_arena() {
    let region = region(3 * ARENA_BYTES + 4096);
    let plans = [ArenaPlan::new(ARENA_BYTES, 4096, LANES).unwrap(); 3];
    let summary = create_arenas(&region, &options(4096), &plans).unwrap();
    assert_eq!(summary.arenas.len(), 3);
    let btt = Btt::open(region.clone()).unwrap();
    let lbas = u64::from(summary.arenas[0].lbas);
    let edges = [0, lbas - 1, lbas, 2 * lbas - 1, 2 * lbas, 3 * lbas - 1];
    for (block, byte) in edges.into_iter().zip(1..) {
        write(&btt, block, byte);
    }
    assert_eq!(edges.map(|block| read(&btt, block)), [1, 2, 3, 4, 5, 6]);
    btt.write_zeroes((lbas - 1) * 4096, 2 * 4096, ZeroFlags::default()).unwrap();
    assert_eq!(edges.map(|block| read(&btt, block)), [1, 0, 0, 4, 5, 6]);
    assert_eq!(faults(&region), []);
    // The middle arena's header is lost: the error has its number, and the second copy repairs it.
    region.zero_streaming(4096 + ARENA_BYTES, 4096).unwrap();
    assert!(matches!(Btt::open(region.clone()), Err(BttError::InfoDamaged { arena: 1, .. })));
    assert_eq!(repair(&region, &mut |_| ()).unwrap().repaired_info_blocks, 1);
    assert_eq!(read(&Btt::open(region).unwrap(), 2 * lbas), 5);
}

#[test]
fn p4_a_discarded_block_reads_as_zeroes_and_keeps_its_storage() {
    let (region, btt) = small(4096);
    (0..6).for_each(|block| write(&btt, block, 5));
    btt.discard(4096, 2 * 4096).unwrap();
    btt.write_zeroes(4 * 4096, 4096, ZeroFlags { fast_only: true, ..ZeroFlags::default() })
        .unwrap();
    assert_eq!([0, 1, 2, 3, 4, 5].map(|block| read(&btt, block)), [5, 0, 0, 5, 0, 5]);
    let extents = btt.status(0, 7 * 4096, 16).unwrap();
    let runs: Vec<_> = extents.iter().map(|extent| (extent.len / 4096, extent.zero)).collect();
    assert!(extents.iter().all(|extent| !extent.hole), "{extents:?}");
    assert_eq!(runs, [(1, false), (2, true), (1, false), (1, true), (1, false), (1, true)]);
    assert_eq!(btt.status(0, 7 * 4096, 2).unwrap().len(), 2);
    write(&btt, 1, 8);
    assert_eq!(read(&Btt::open(region.clone()).unwrap(), 1), 8);
    assert_eq!(faults(&region), []);
}

/// The kernel reads a page of 512-byte blocks only up to its first block in zero state, so no block
/// may be in it.
#[test]
fn blocks_of_512_bytes_are_zeroed_by_writing() {
    let (region, btt) = small(512);
    (0..4).for_each(|block| write(&btt, block, 5));
    let fast = ZeroFlags { fast_only: true, ..ZeroFlags::default() };
    let refused = btt.write_zeroes(512, 512, fast).unwrap_err();
    assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
    btt.write_zeroes(512, 512, ZeroFlags::default()).unwrap();
    btt.discard(2 * 512, 512).unwrap();
    assert_eq!([0, 1, 2, 3].map(|block| read(&btt, block)), [5, 0, 5, 5]);
    assert_eq!(check(&region, &mut |_| ()).unwrap().written_blocks, 4);
}

#[test]
fn p2_concurrent_readers_and_writers_see_whole_blocks() {
    let (region, btt) = small(4096);
    let blocks = btt.geometry().blocks.min(3);
    let barrier = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for writer in 0..2_u8 {
            let (btt, barrier) = (&btt, &barrier);
            scope.spawn(move || {
                barrier.wait();
                (0..20_000_u64)
                    .for_each(|n| write(btt, n % blocks, writer * 100 + (n % 100) as u8));
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                barrier.wait();
                (0..20_000_u64).for_each(|n| {
                    read(&btt, n % blocks);
                });
            });
        }
    });
    assert_eq!(faults(&region), []);
}

#[test]
fn requests_outside_the_device_are_refused_before_anything_changes() {
    let (_, btt) = small(4096);
    let size = btt.geometry().size_bytes();
    let kind = |result: crate::device::Result<()>| result.unwrap_err().kind();
    let flags = WriteFlags::default();
    assert_eq!(kind(btt.write(1, &[1; 4096], flags)), DeviceErrorKind::Misaligned);
    assert_eq!(kind(btt.write(0, &[1; 100], flags)), DeviceErrorKind::Misaligned);
    assert_eq!(kind(btt.write(size - 4096, &[1; 8192], flags)), DeviceErrorKind::OutOfRange);
    assert_eq!(kind(btt.read(u64::MAX - 4095, &mut [1; 4096])), DeviceErrorKind::OutOfRange);
    assert_eq!(kind(btt.discard(0, size + 4096)), DeviceErrorKind::OutOfRange);
    assert_eq!(read(&btt, size / 4096 - 1), 0);
}

#[test]
fn each_flipped_byte_of_an_info_block_is_told_and_repaired() {
    let (region, btt) = small(512);
    write(&btt, 1, 9);
    drop(btt);
    for offset in 0..4096 {
        flip(&region, 4096 + offset, 1 << (offset % 8));
        let opened = Btt::open(region.clone());
        assert!(
            matches!(
                opened,
                Err(BttError::NotFound | BttError::InfoDamaged { arena: 0, offset: 4096, .. })
            ),
            "byte {offset}"
        );
        let findings = faults(&region);
        let expected = matches!(
            findings[..],
            [Finding::InfoDamaged { arena: 0, copy: 1, other_copy_whole: true, .. }]
        );
        assert!(expected, "byte {offset}: {findings:?}");
        assert_eq!(repair(&region, &mut |_| ()).unwrap().repaired_info_blocks, 1, "byte {offset}");
    }
    assert_eq!(read(&Btt::open(region).unwrap(), 1), 9);
}

#[test]
fn a_damaged_second_copy_is_found_and_restored() {
    let (region, _) = small(512);
    let info2 = 4096 + read_info(&region, 4096).unwrap().info2off.get();
    flip(&region, info2 + 60, 4);
    assert!(matches!(
        faults(&region)[..],
        [Finding::InfoDamaged { copy: 2, other_copy_whole: true, .. }]
    ));
    assert!(repair(&region, &mut |_| ()).unwrap().clean());
    let mut other = read_info(&region, 4096).unwrap();
    other.uuid = [1; 16];
    other.checksum = other.fletcher64().into();
    region.write(info2, other.as_bytes()).unwrap();
    assert_eq!(faults(&region), [Finding::InfoCopiesDiffer { arena: 0 }]);
}

#[test]
fn check_names_shared_lost_and_wild_blocks_and_bad_flogs() {
    let (region, btt) = small(512);
    (0..4).for_each(|block| write(&btt, block, 1));
    let arena = read_info(&region, 4096).unwrap();
    let map = 4096 + arena.mapoff.get();
    let flog = 4096 + arena.logoff.get();
    let damaged = |offset: u64, value: u32| {
        let copy = copy_of(&region);
        copy.store_u32(offset, value).unwrap();
        copy
    };
    let block_of_1 = MapEntry(region.load_u32(map + 4).unwrap()).block(1);
    let block_of_2 = MapEntry(region.load_u32(map + 8).unwrap()).block(2);
    assert_eq!(
        faults(&damaged(map + 8, MapEntry::normal(block_of_1).0)),
        [
            Finding::BlockLost { arena: 0, block: block_of_2 },
            Finding::BlockShared {
                arena: 0,
                block: block_of_1,
                owners: vec!["lba 1".into(), "lba 2".into()]
            },
        ]
    );
    let wild = damaged(map + 8, MapEntry::normal(0x3FFF_FFFF).0);
    assert!(faults(&wild).contains(&Finding::MapOutOfRange {
        arena: 0,
        lba: 2,
        block: 0x3FFF_FFFF
    }));
    assert!(matches!(Btt::open(wild.clone()), Err(BttError::Unwritable { faults: 1, .. })));
    let opened = Btt::open_forced(wild).unwrap();
    assert_eq!(opened.read(2 * 512, &mut [0; 512]).unwrap_err().kind(), DeviceErrorKind::Corrupt);
    let zeroed_lane = copy_of(&region);
    zeroed_lane.zero_streaming(flog + 5 * 64, 64).unwrap();
    assert!(
        faults(&zeroed_lane)
            .iter()
            .any(|finding| matches!(finding, Finding::FlogDamaged { lane: 5, .. }))
    );
    assert!(matches!(Btt::open(zeroed_lane.clone()), Err(BttError::Unwritable { faults: 1, .. })));
    let repaired = repair(&zeroed_lane, &mut |_| ()).unwrap();
    assert_eq!((repaired.repaired_lanes, repaired.unproven.len(), repaired.faults), (1, 1, 0));
    write(&Btt::open(zeroed_lane).unwrap(), 0, 2);
}

#[test]
fn p6_an_unfinished_write_is_completed_and_a_read_only_open_changes_nothing() {
    let (region, btt) = small(512);
    write(&btt, 3, 1);
    write(&btt, 3, 2);
    drop(btt);
    let arena = read_info(&region, 4096).unwrap();
    let map_3 = 4096 + arena.mapoff.get() + 12;
    let flog = super::flog::Flog::open(&region, 4096 + arena.logoff.get(), 8, false).unwrap();
    let newest: FlogSlot = (0..8)
        .map(|lane| newest_of(&flog.group(lane).unwrap(), flog.slots).unwrap().entry)
        .find(|entry| entry.lba.get() == 3 && entry.old_map != entry.new_map)
        .unwrap();
    // As libpmemblk leaves it: with flag bits in the flog. The map is as it was before the write.
    region.store_u32(map_3, MapEntry::normal(newest.old_map.get()).0).unwrap();
    assert_eq!(check(&region, &mut |_| ()).unwrap().unfinished_writes, 1);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    let read_only = crate::pmem::RegionOptions { read_only: true, ..Default::default() };
    let opened = Btt::open(Arc::new(Region::open(&path, &read_only).unwrap())).unwrap();
    assert_eq!((read(&opened, 3), opened.summary().recovered_lanes), (2, 1));
    assert_eq!(
        opened.write(0, &[0; 512], WriteFlags::default()).unwrap_err().kind(),
        DeviceErrorKind::ReadOnly
    );
    drop(opened);
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let opened = Btt::open(region.clone()).unwrap();
    assert_eq!((read(&opened, 3), opened.summary().recovered_lanes), (2, 1));
    assert_eq!(Btt::open(region).unwrap().summary().recovered_lanes, 0);
}

#[test]
fn create_says_what_fits() {
    let region = region(ARENA_BYTES);
    let refused = create(&region, &options(4096)).unwrap_err().to_string();
    assert!(refused.contains("16781312 bytes (17 MiB will do)"), "{refused}");
    assert!(create(&region, &options(1000)).unwrap_err().to_string().contains("4224"));
    assert!(create(&region, &BttOptions { lanes: 257, ..options(512) }).is_err());
    assert_eq!(smallest_bytes(&options(4096)), ARENA_BYTES + 4096);
    assert_eq!(largest_fit_bytes(&options(4096), ARENA_BYTES + 4096 + 5000), ARENA_BYTES + 8192);
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u8),
    Zero(u64, u64),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..40_u64, 1..=255_u8).prop_map(|(block, byte)| Step::Write(block, byte)),
        2 => (0..40_u64, 1..8_u64).prop_map(|(block, count)| Step::Zero(block, count)),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn p3_behaves_as_a_map_of_blocks(steps in steps()) {
        let (region, mut btt) = small(512);
        let mut model = BTreeMap::new();
        for step in steps {
            match step {
                Step::Write(block, byte) => {
                    write(&btt, block, byte);
                    model.insert(block, byte);
                }
                Step::Zero(block, count) => {
                    btt.write_zeroes(block * 512, count * 512, ZeroFlags::default()).unwrap();
                    (block..block + count).for_each(|block| { model.remove(&block); });
                }
                Step::Reopen => btt = Btt::open(region.clone()).unwrap(),
            }
        }
        for block in 0..50 {
            prop_assert_eq!(read(&btt, block), model.get(&block).copied().unwrap_or(0));
        }
        prop_assert_eq!(faults(&region), []);
    }

    #[test]
    fn p7_patched_pools_give_errors_not_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzzing::patched_pool(&bytes);
    }

    #[test]
    fn p7_any_bytes_give_errors_not_panics(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..20_000),
        signed in any::<bool>(),
    ) {
        if signed && bytes.len() > 4096 + 16 {
            bytes[4096..4096 + 16].copy_from_slice(&super::layout::SIGNATURE);
        }
        fuzzing::arbitrary_pool(&bytes);
    }
}

/// Reading needs one whole copy of an arena's info block. If an arena has none, the arenas before
/// it are read, and the damage tells which one is missing.
#[test]
fn a_reader_has_all_arenas_before_one_that_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let file = crate::pmem::RegionOptions {
        create_bytes: Some(3 * ARENA_BYTES + 4096),
        domain: Some(crate::pmem::Domain::Volatile),
        sparse: true,
        ..Default::default()
    };
    let region = Arc::new(Region::open(&path, &file).unwrap());
    let plan = ArenaPlan::new(ARENA_BYTES, 4096, LANES).unwrap();
    let summary = create_arenas(&region, &options(4096), &[plan; 3]).unwrap();
    let lbas = u64::from(summary.arenas[0].lbas);
    let btt = Btt::open(region).unwrap();
    (0..3_u8).for_each(|arena| write(&btt, u64::from(arena) * lbas + 7, 10 + arena));
    drop(btt);
    let opened = |read_only| {
        let options = crate::pmem::RegionOptions { read_only, ..Default::default() };
        Arc::new(Region::open(&path, &options).unwrap())
    };
    let lose = |arena: u8, offset| {
        opened(false).zero_streaming(4096 + u64::from(arena) * ARENA_BYTES + offset, 4096).unwrap();
    };
    let assert_read = |arenas: u8, damaged: &str| {
        assert!(matches!(Btt::open(opened(false)), Err(BttError::InfoDamaged { .. })));
        let btt = Btt::open(opened(true)).unwrap();
        assert!(btt.geometry().read_only && btt.geometry().blocks == u64::from(arenas) * lbas);
        (0..arenas)
            .for_each(|arena| assert_eq!(read(&btt, u64::from(arena) * lbas + 7), 10 + arena));
        let damage = &btt.summary().damage;
        assert!(damage.len() == 1 && damage[0].starts_with(damaged), "{damage:?}");
    };
    lose(1, 0);
    assert_read(3, "arena 1: info block 1");
    assert_eq!(repair(&opened(false), &mut |_| ()).unwrap().repaired_info_blocks, 1);
    for arena in [2, 1] {
        lose(arena, 0);
        lose(arena, plan.info2_offset);
        assert_read(arena, &format!("arena {arena}: info block 1"));
    }
}

#[test]
fn check_reports_an_arena_whose_copies_are_both_gone() {
    let region = region(2 * ARENA_BYTES + 4096);
    let plans = [ArenaPlan::new(ARENA_BYTES, 4096, LANES).unwrap(); 2];
    create_arenas(&region, &options(4096), &plans).unwrap();
    let second = 4096 + ARENA_BYTES;
    region.zero_streaming(second, 4096).unwrap();
    region.zero_streaming(second + plans[1].info2_offset, 4096).unwrap();
    let findings = faults(&region);
    let expected = matches!(
        findings[..],
        [Finding::InfoDamaged { arena: 1, copy: 1, other_copy_whole: false, .. }]
    );
    assert!(expected, "{findings:?}");
    region.zero_streaming(4096 + plans[0].info2_offset, 4096).unwrap();
    flip(&region, 4096 + 50, 1);
    assert!(matches!(check(&region, &mut |_| ()), Err(BttError::InfoLost { arena: 0, .. })));
}

/// Returns the resident bytes of the mapping of the file at `path`, in this process.
fn resident_bytes(path: &std::path::Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut own = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let size = own.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// A check keeps a bit of the map for each block, and releases the pages that it has read. So 512
/// GiB, with a map of 512 MiB, take 16 MiB.
#[test]
fn a_check_keeps_no_more_than_a_part_of_the_map_in_memory() {
    const MAP_BYTES: u64 = 16 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let options = crate::pmem::RegionOptions {
        create_bytes: Some(MAP_BYTES / 4 * 4096),
        domain: Some(crate::pmem::Domain::Volatile),
        sparse: true,
        ..Default::default()
    };
    create(&Region::open(&path, &options).unwrap(), &self::options(4096)).unwrap();
    let read_only = crate::pmem::RegionOptions { read_only: true, ..Default::default() };
    let region = Region::open(&path, &read_only).unwrap();
    let mut most_bytes = 0;
    let report = check(&region, &mut |_| most_bytes = most_bytes.max(resident_bytes(&path)));
    assert!(report.unwrap().clean());
    assert!(most_bytes > 0 && most_bytes < MAP_BYTES / 3, "{most_bytes} bytes are resident");
}
