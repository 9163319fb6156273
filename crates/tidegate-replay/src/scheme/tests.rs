//! Checks schemes with traces that were computed by hand, and with a model of durable data.

mod model;

use proptest::prelude::*;
use tidegate::pmem::MediaModel;

use super::{Pmem, Requests, SCHEMES, Scheme, SchemeEntry, Sizes, scheme};
use crate::model::costs::Costs;
use crate::time::{DRAM_BYTES_PER_S, Meter};
use crate::trace::{FileId, Op};
use model::{Model, Planted};

const FILE: FileId = FileId(0);
const KIB: u64 = 1024;

const fn write(offset_bytes: u64, len_bytes: u64) -> Op {
    Op::Write { file: FILE, offset_bytes, len_bytes }
}

const fn read(offset_bytes: u64, len_bytes: u64) -> Op {
    Op::Read { file: FILE, offset_bytes, len_bytes }
}

const SYNC: Op = Op::Sync { file: FILE };

fn sizes(dram_pages: u64, pmem_pages: u64) -> Sizes {
    Sizes {
        dram_pages,
        pmem_bytes: pmem_pages * 4 * KIB,
        pmem_media: MediaModel::dram(),
        costs: Costs::optane(),
        footprint_pages: 128,
        atomic: false,
    }
}

/// Returns the schemes with flash.
fn with_flash() -> impl Iterator<Item = &'static SchemeEntry> {
    SCHEMES.iter().filter(|entry| entry.pmem != Pmem::AllData)
}

/// Returns the schemes with all data on persistent memory.
fn without_flash() -> impl Iterator<Item = &'static SchemeEntry> {
    SCHEMES.iter().filter(|entry| entry.pmem == Pmem::AllData)
}

fn create(name: &str, sizes: &Sizes) -> Box<dyn Scheme> {
    (scheme(name).unwrap().create)(sizes).unwrap()
}

/// Plays `ops` through the scheme called `name` over devices that check it.
fn play(name: &str, sizes: &Sizes, ops: &[Op]) -> (Model, Requests, u64) {
    play_over(Model::default(), name, sizes, ops)
}

fn play_over(mut model: Model, name: &str, sizes: &Sizes, ops: &[Op]) -> (Model, Requests, u64) {
    let mut scheme = create(name, sizes);
    for op in ops {
        model.begin(op);
        scheme.play(op, &mut model).unwrap();
        model.end(op);
    }
    (model, scheme.requests(), scheme.index_bytes_peak())
}

/// Returns pages read from and written to flash, and bytes of data and metadata stored in
/// persistent memory.
fn traffic(name: &str, sizes: &Sizes, ops: &[Op]) -> (u64, u64, u64, u64) {
    let (model, ..) = play(name, sizes, ops);
    let (data_bytes, metadata_bytes) = model.traffic();
    (model.ssd_reads, model.ssd_writes, data_bytes, metadata_bytes)
}

#[test]
fn reads_hit_what_dram_has() {
    // Pages 0, 1, 0: a hit; 2 replaces 1, and 1 replaces 0.
    let ops = [read(0, 4096), read(4096, 1), read(100, 5), read(8192, 4096), read(4096, 9)];
    for entry in with_flash() {
        let (model, requests, _) = play(entry.name, &sizes(2, 8), &ops);
        assert_eq!((requests.reads, requests.read_hits), (5, 1), "{}", entry.name);
        assert_eq!((model.ssd_reads, model.ssd_writes), (4, 0), "{}", entry.name);
    }
}

#[test]
fn dram_writes_each_synced_page_to_flash() {
    // Two pages, then one of these pages again, then a sync without dirty pages.
    let ops = [write(0, 8192), SYNC, write(10, 5), SYNC, SYNC];
    let (model, requests, index_bytes) = play("dram", &sizes(4, 0), &ops);
    assert_eq!((model.ssd_writes, model.ssd_flushes, model.traffic()), (3, 2, (0, 0)));
    let expected = Requests { reads: 0, read_hits: 0, writes: 3, syncs: 3, synced_pages: 3 };
    assert_eq!((requests, index_bytes), (expected, 0));
}

#[test]
fn dirty_pages_that_dram_gives_up_go_to_flash_once() {
    // Page 0 is dirty when page 1 replaces it; page 1 is clean when page 2 replaces it.
    let ops = [write(0, 4096), read(4096, 4096), read(8192, 4096), SYNC];
    for entry in
        SCHEMES.iter().filter(|entry| ["dram", "sccm", "sfcm", "afcm"].contains(&entry.name))
    {
        assert_eq!(traffic(entry.name, &sizes(1, 8), &ops), (2, 1, 0, 0), "{}", entry.name);
    }
}

#[test]
fn sccm_stores_whole_pages_and_overwrites_them_in_place() {
    // 3 pages of memory: one is the map, 2 are slots.
    // Sync of one line of page 0: 4096 bytes, 8 of the map and 8 of state. Again: in place.
    let ops = [write(0, 64), SYNC, write(0, 64), SYNC];
    assert_eq!(traffic("sccm", &sizes(8, 3), &ops), (0, 0, 2 * 4096, 16));
    // Pages 0, 1, and 0 again; page 2 takes the slot of 1, synced least recently: one flash write,
    // 8 bytes to release, 16 to take. Page 1 stays in DRAM: its read is a hit.
    let ops = [
        write(0, 64),
        SYNC,
        write(4096, 64),
        SYNC,
        write(0, 64),
        SYNC,
        write(8192, 64),
        SYNC,
        read(4096, 64),
    ];
    assert_eq!(traffic("sccm", &sizes(8, 3), &ops), (0, 1, 4 * 4096, 3 * 16 + 8));
    // Page 1 is clean now: DRAM evicts it without a write. Pages 0 and 2 are only in persistent
    // memory, and are written.
    let (model, ..) = play(
        "sccm",
        &sizes(3, 3),
        &[
            write(0, 64),
            SYNC,
            write(4096, 64),
            SYNC,
            write(0, 64),
            SYNC,
            write(8192, 64),
            SYNC,
            read(3 * 4096, 1),
        ],
    );
    assert_eq!(model.ssd_writes, 1);
}

#[test]
fn sfcm_stores_dirty_lines_packed() {
    // One slot of 56 lines. 2 lines of page 0: 128 bytes; a word to begin the slot, two entries and
    // a bitmap: 8 + 16 + 8. One of the lines again: 64 bytes in place.
    let ops = [write(0, 128), SYNC, write(64, 1), SYNC];
    assert_eq!(traffic("sfcm", &sizes(8, 1), &ops), (0, 0, 192, 32));
    // 40 lines of page 0, 16 of page 1: full. 1 line of page 2: page 0 leaves, one flash write, one
    // bitmap; then an entry and a bitmap.
    let ops = [write(0, 40 * 64), SYNC, write(4096, 16 * 64), SYNC, write(8192, 64), SYNC];
    let metadata_bytes = (8 + 40 * 8 + 8) + (16 * 8 + 8) + 8 + (8 + 8);
    assert_eq!(traffic("sfcm", &sizes(8, 1), &ops), (0, 1, 57 * 64, metadata_bytes));
    // A whole page does not fit into one slot: it goes to flash.
    assert_eq!(traffic("sfcm", &sizes(8, 1), &[write(0, 4096), SYNC]), (0, 1, 0, 0));
}

#[test]
fn sfcm_indexes_extents() {
    // Lines 0 to 1 and 5 lie together in a slot, but are two extents of the page.
    let (.., index_bytes) = play("sfcm", &sizes(8, 1), &[write(0, 128), write(320, 1), SYNC]);
    assert_eq!(index_bytes, 40 + 2 * 32);
}

#[test]
fn afcm_chooses_by_dirty_lines_and_merges_lines_into_a_page() {
    // 4 pages: one is the map. 55 lines are fine, 56 make a page: 4096 bytes, 16 of map and state,
    // and 8 to release the lines.
    let ops = [write(0, 55 * 64), SYNC, write(0, 56 * 64), SYNC];
    let fine_bytes = 8 + 55 * 8 + 8;
    let expected = (0, 0, 55 * 64 + 4096, fine_bytes + 16 + 8);
    assert_eq!(traffic("afcm", &sizes(8, 4), &ops), expected);
    // One line of a page that has a slot: 64 bytes in place.
    let ops = [write(0, 4096), SYNC, write(64, 64), SYNC];
    assert_eq!(traffic("afcm", &sizes(8, 4), &ops), (0, 0, 4096 + 64, 16));
}

#[test]
fn afcm_evicts_all_pages_of_the_slot_with_most_of_the_victim() {
    // 2 pages: the map and one slot, with lines of pages 0, 1 and 2. Page 3 is whole: all leave.
    let ops = [
        write(0, 64),
        SYNC,
        write(4096, 64),
        SYNC,
        write(8192, 64),
        SYNC,
        write(12288, 4096),
        SYNC,
    ];
    let metadata_bytes = (8 + 16) + 16 + 16 + 3 * 8 + 16;
    assert_eq!(traffic("afcm", &sizes(8, 2), &ops), (0, 3, 3 * 64 + 4096, metadata_bytes));
}

#[test]
fn removed_files_are_never_written() {
    let ops = [write(0, 8192), SYNC, write(0, 4096), Op::Remove { file: FILE }, write(0, 64), SYNC];
    for name in ["sccm", "sfcm", "afcm"] {
        let (model, ..) = play(name, &sizes(8, 8), &ops);
        assert_eq!((model.ssd_writes, model.ssd_reads), (0, 0), "{name}");
    }
    let ops = [write(0, 8192), Op::Resize { file: FILE, len_bytes: 4096 }, SYNC];
    assert_eq!(play("dram", &sizes(8, 0), &ops).0.ssd_writes, 1);
}

#[test]
fn an_atomic_sync_of_a_page_costs_a_log_entry_and_seven_words() {
    // The first time: entry 32, head 8, page and state 8, tail 8; map and state 16. The second time
    // also: old version 8, state 8, and the old version's release 8.
    let of = |ops: &[Op]| {
        let sizes = Sizes { atomic: true, ..sizes(8, 5) };
        let (model, ..) = play("sccm", &sizes, ops);
        (model.ssd_writes, model.traffic())
    };
    let first = 32 + 8 + 8 + 8 + 8 + 16;
    assert_eq!(of(&[write(0, 64), SYNC]), (0, (4096, first)));
    let second = first + 8 + 8 + 8;
    assert_eq!(of(&[write(0, 64), SYNC, write(0, 64), SYNC]), (0, (2 * 4096, first + second)));
}

#[test]
fn a_sync_without_dirty_pages_costs_nothing() {
    for entry in SCHEMES {
        for atomic in [false, true] {
            let (model, ..) =
                play(entry.name, &Sizes { atomic, ..sizes(4, 8) }, &[SYNC, Op::SyncAll]);
            assert_eq!((model.ssd_writes, model.traffic()), (0, (0, 0)), "{}", entry.name);
        }
    }
}

/// Returns whether the model detects the mistake `planted` below the scheme called `name`.
fn is_found(planted: Planted, name: &str) -> bool {
    // Lines are synced, evicted from a small memory and from DRAM, and then read. In 24 pages the
    // shipped cache has about ten slots, and the shipped log a ring of 72 KiB.
    let pages = (0..100).flat_map(|page| [write(page * 4096, 500), SYNC]);
    let ops: Vec<_> = pages.chain((0..100).map(|page| read(page * 4096, 500))).collect();
    let play = || play_over(Model::with(planted), name, &sizes(4, 24), &ops);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(play)).is_err()
}

#[test]
fn the_model_finds_planted_mistakes() {
    for entry in SCHEMES {
        if entry.pmem != Pmem::AllData {
            assert!(is_found(Planted::SsdWriteLost, entry.name), "{}", entry.name);
        }
        if entry.pmem != Pmem::None {
            assert!(is_found(Planted::LinesLost, entry.name), "{}", entry.name);
            assert!(is_found(Planted::NoFence, entry.name), "{}", entry.name);
        }
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    let file = (0_u32..3).prop_map(FileId);
    let lines = (0_u64..16 * 64, 1_u64..200);
    let op = move |kind: u8, file, (first, count): (u64, u64)| match kind {
        0..=7 => Op::Write { file, offset_bytes: first * 64 + 7, len_bytes: count * 50 },
        8..=11 => Op::Read { file, offset_bytes: first * 64, len_bytes: count * 60 },
        12..=16 => Op::Sync { file },
        17 => Op::SyncAll,
        18 => Op::Resize { file, len_bytes: first * 64 },
        _ => Op::Remove { file },
    };
    (0_u8..20, file, lines).prop_map(move |(kind, file, lines)| op(kind, file, lines))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Synced lines stay in persistent memory or on flash, and reads return the last written
    /// version.
    #[test]
    fn nothing_synced_is_lost(
        ops in prop::collection::vec(any_op(), 1..120),
        dram_pages in 1_u64..20,
        pmem_pages in 0_u64..24,
        atomic in any::<bool>(),
    ) {
        let sizes = Sizes { atomic, ..sizes(dram_pages, pmem_pages) };
        for entry in with_flash() {
            play(entry.name, &sizes, &ops);
        }
    }

    /// LRU hits equal the hits of a list that is searched linearly.
    #[test]
    fn hits_are_those_of_an_exact_lru(
        pages in prop::collection::vec(0_u64..12, 1..200),
        dram_pages in 1_usize..12,
    ) {
        let (mut list, mut hits) = (Vec::new(), 0);
        for page in &pages {
            match list.iter().position(|other| other == page) {
                Some(at) => {
                    hits += 1;
                    list.remove(at);
                }
                None if list.len() == dram_pages => drop(list.remove(0)),
                None => {}
            }
            list.push(*page);
        }
        let ops: Vec<_> = pages.iter().map(|page| read(page * 4096, 1)).collect();
        let (_, requests, _) = play("dram", &sizes(dram_pages as u64, 0), &ops);
        prop_assert_eq!(requests.read_hits, hits);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]

    /// Nothing that was synced is lost, with all data on persistent memory.
    #[test]
    fn nothing_synced_is_lost_by_a_dram_tier(
        ops in prop::collection::vec(any_op(), 1..120),
        dram_pages in 1_u64..40,
    ) {
        for entry in without_flash() {
            play(entry.name, &sizes(dram_pages, 0), &ops);
        }
    }
}

#[test]
fn the_log_stores_a_record_of_the_dirty_blocks() {
    // Bytes 10 to 110 are in one block, 600 to 1200 in two: each sync is one record with a header
    // of 64 bytes. When the evicted page is read again, three blocks come from the log, and the
    // others from flash.
    let ops = [write(10, 100), SYNC, write(600, 600), SYNC, read(4096, 1), read(0, 4096)];
    let (model, requests, _) = play("log", &sizes(1, 64), &ops);
    assert_eq!(model.traffic(), (3 * 512, 2 * 64));
    assert_eq!((model.ssd_reads, model.ssd_writes, requests.read_hits), (2, 0, 0));
    // A page that is all in the log is a hit.
    let ops = [write(0, 4096), SYNC, read(4096, 1), read(0, 4096)];
    let (model, requests, index_bytes) = play("log", &sizes(1, 64), &ops);
    assert_eq!((model.ssd_reads, requests.read_hits, index_bytes), (1, 1, 8 * 25));
}

#[test]
fn the_log_destages_the_newest_version_of_a_block() {
    // 64 pages of memory are a ring of less than 240 KiB. 400 records of 4160 bytes fill half of
    // the ring several times. Each time the oldest records are destaged, only the version of each
    // page without a newer record.
    let ops: Vec<Op> = (0..400).flat_map(|at| [write(at % 2 * 4096, 4096), SYNC]).collect();
    let (model, ..) = play("log", &sizes(8, 64), &ops);
    assert_eq!((model.data_bytes, model.fences >= 400), (400 * 4096, true));
    assert_eq!(model.ssd_writes, 0);
    let ops: Vec<Op> = (0..100).flat_map(|page| [write(page * 4096, 4096), SYNC]).collect();
    let (model, ..) = play("log", &sizes(8, 64), &ops);
    assert!((60..100).contains(&model.ssd_writes), "{}", model.ssd_writes);
    assert!(model.ssd_flushes < 20, "batches: {}", model.ssd_flushes);
}

#[test]
fn the_table_stores_whole_pages_and_what_says_where_they_are() {
    // A write: 16 bytes of the flog and 4 of the map.
    let ops = [write(10, 100), SYNC, write(5000, 1), SYNC, SYNC];
    let (model, requests, _) = play("btt", &sizes(8, 0), &ops);
    assert_eq!(model.traffic(), (2 * 4096, 2 * 20));
    assert_eq!((model.fences, requests.syncs, model.ssd_writes), (4, 3, 0));
}

/// Returns the seconds that the scheme called `name` takes for `ops`.
fn seconds(name: &str, dram_pages: u64, ops: &[Op]) -> f64 {
    let media: MediaModel = "optane".parse().unwrap();
    let sizes = Sizes { pmem_media: media.clone(), ..sizes(dram_pages, 0) };
    let mut scheme = create(name, &sizes);
    let mut meter = Meter::new("nvme".parse().unwrap(), media, DRAM_BYTES_PER_S);
    for op in ops {
        scheme.play(op, &mut meter).unwrap();
        meter.end_operation();
    }
    meter.seconds()
}

#[test]
fn a_dram_tier_takes_writes_back_from_the_program() {
    // DRAM evicts 400 dirty pages; one sync at the end. Caiti writes back at once in the
    // background. With the table alone, the program waits for each page.
    let writes = (0..400).map(|page| write(page * 4096, 4096));
    let ops: Vec<Op> = writes.chain([SYNC]).collect();
    let (btt, transit) = (seconds("btt", 128, &ops), seconds("transit", 128, &ops));
    assert!(transit < 0.9 * btt, "transit {transit} s, btt {btt} s");
    // A sync after each write leaves nothing to do in the background.
    let ops: Vec<Op> = (0..400).flat_map(|page| [write(page * 4096, 4096), SYNC]).collect();
    let (btt, transit) = (seconds("btt", 128, &ops), seconds("transit", 128, &ops));
    assert!(transit > 0.9 * btt, "transit {transit} s, btt {btt} s");
}

#[test]
fn each_half_of_transit_can_be_left_out() {
    // As above. Without eager eviction the tier fills, and later pages go directly to the table.
    let writes = (0..400).map(|page| write(page * 4096, 4096));
    let ops: Vec<Op> = writes.chain([SYNC]).collect();
    let names = ["btt", "transit", "transit-no-eager", "transit-no-bypass"];
    let [btt, transit, no_eager, no_bypass] = names.map(|name| seconds(name, 128, &ops));
    assert!(no_eager > 0.9 * btt && no_eager > transit, "{no_eager} s, transit {transit} s");
    assert!(no_bypass < 0.9 * btt, "{no_bypass} s, btt {btt} s");
}
