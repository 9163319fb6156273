//! One flipped bit, anywhere in the metadata: never wrong data in silence, and all that can be read
//! is read.
//!
//! The format has no checksum in map and flog, so that a few bits cannot be covered. The tests list
//! these bits:
//! - in a map entry, those whose change makes another valid entry with its own block: bit 30 tells
//!   data from a discarded block;
//! - in a flog, the lower two bits of the sequence numbers of a lane whose last two writes were to
//!   one lba, or whose last write a crash kept out of the map: with another number the lane looks
//!   as before its last write. The writes here never do the former.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use super::check::{Report, check};
use super::flog::{Flog, newest_of};
use super::info::read_info;
use super::layout::{MapEntry, MapState};
use super::*;
use crate::device::{BlockDevice, BlockDeviceExt, WriteFlags};
use crate::pmem::flips::scrambled;
use crate::pmem::{Region, RegionOptions, flips};

const POOL_BYTES: u64 = 256 << 10;
const LANES: u32 = 8;
const BLOCK_BYTES: usize = 4096;

/// A pool in a file, which is written through the file and mapped for reading.
struct Pool {
    file: std::fs::File,
    read_only: Arc<Region>,
    bytes: Vec<u8>,
    /// The byte of each block.
    blocks: Vec<u8>,
    map: std::ops::Range<usize>,
    flog: std::ops::Range<usize>,
    info: [std::ops::Range<usize>; 2],
    /// The slots of the lane whose last write is not in the map.
    unfinished: std::ops::Range<usize>,
    _dir: tempfile::TempDir,
}

fn region_of(bytes: &[u8]) -> Arc<Region> {
    let region = Region::anonymous(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    Arc::new(region)
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

impl Pool {
    /// Writes blocks in groups, so in all lanes, and discards some. `unfinished` leaves the map as
    /// before the last write of one block.
    fn new(unfinished: bool) -> Self {
        let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
        create(&region, &BttOptions { lanes: LANES, ..BttOptions::default() }).unwrap();
        let btt = Btt::open(region.clone()).unwrap();
        let count = usize::try_from(btt.geometry().blocks).unwrap();
        let mut blocks = vec![0; count];
        for (round, start) in [0, 8, 16, 3, 11, 20, 1].into_iter().enumerate() {
            let data: Vec<u8> =
                (0..8).flat_map(|at| [byte(round, start + at); BLOCK_BYTES]).collect();
            btt.write((start * BLOCK_BYTES) as u64, &data, WriteFlags::default()).unwrap();
            (start..start + 8).for_each(|block| blocks[block] = byte(round, block));
        }
        btt.discard(5 * 4096, 2 * 4096).unwrap();
        blocks[5..7].fill(0);
        let info = read_info(&region, 4096).unwrap();
        let map = 4096 + info.mapoff.get();
        let flog = 4096 + info.logoff.get();
        let mut unfinished_lane = None;
        if unfinished {
            let before = MapEntry(region.load_u32(map + 2 * 4).unwrap());
            btt.write(2 * 4096, &[77; BLOCK_BYTES], WriteFlags::default()).unwrap();
            blocks[2] = 77;
            region.store_u32(map + 2 * 4, before.0).unwrap();
            let slots = Flog::open(&region, flog, LANES, false).unwrap();
            unfinished_lane = (0..LANES).find(|&lane| {
                let group = slots.group(lane).unwrap();
                let newest = newest_of(&group, slots.slots).unwrap().entry;
                newest.lba.get() == 2 && newest.old_map.get() == before.block(2)
            });
            assert!(unfinished_lane.is_some());
        }
        let at = |offset: u64, len: usize| {
            let offset = usize::try_from(offset).unwrap();
            offset..offset + len
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        std::fs::write(&path, bytes_of(&region)).unwrap();
        let options = RegionOptions { read_only: true, ..RegionOptions::default() };
        Self {
            bytes: bytes_of(&region),
            blocks,
            map: at(map, count * 4),
            flog: at(flog, LANES as usize * 64),
            unfinished: unfinished_lane.map_or(0..0, |lane| at(flog + u64::from(lane) * 64, 64)),
            info: [at(4096, 4096), at(4096 + info.info2off.get(), 4096)],
            read_only: Arc::new(Region::open(&path, &options).unwrap()),
            file: std::fs::File::options().write(true).open(&path).unwrap(),
            _dir: dir,
        }
    }

    /// Flips bit `bit` of byte `at` in the pool and its file for the time of `see`. Returns its
    /// result.
    fn with_flip<T>(&mut self, at: usize, bit: u32, see: impl FnOnce(&Self) -> T) -> T {
        self.flip(at, bit);
        let seen = see(self);
        self.flip(at, bit);
        seen
    }

    fn flip(&mut self, at: usize, bit: u32) {
        self.bytes[at] ^= 1 << bit;
        self.file.write_all_at(&self.bytes[at..=at], at as u64).unwrap();
    }

    fn check(&self) -> Report {
        check(&self.read_only, &mut |_| ()).unwrap()
    }

    /// Asserts that a pool that opens for writing is right, and stays right under writes in all
    /// lanes. Returns whether it opens.
    fn assert_right_for_writing(&self, bytes: &[u8], flip: &str) -> bool {
        let region = region_of(bytes);
        let btt = match Btt::open(region.clone()) {
            Ok(btt) => btt,
            Err(
                BttError::Unwritable { .. } | BttError::InfoDamaged { .. } | BttError::NotFound,
            ) => {
                return false;
            }
            Err(error) => panic!("{flip}: {error}"),
        };
        assert_eq!(read_all(&btt, &self.blocks).1, 0, "{flip}");
        let data = vec![9; 8 * BLOCK_BYTES];
        for start in [24, 16, 32] {
            btt.write(start * 4096, &data, WriteFlags::default()).unwrap();
        }
        assert_eq!(read_all(&btt, &self.blocks[..16]).1, 0, "{flip}: after writes");
        true
    }

    /// Returns whether the flip turns a valid pool into another valid one.
    fn is_beyond_the_format(&self, at: usize, bit: u32) -> bool {
        if self.unfinished.contains(&at) && bit < 2 {
            return (at - self.unfinished.start) % 16 == 12;
        }
        if !self.map.contains(&at) {
            return false;
        }
        let start = at - (at - self.map.start) % 4;
        let entry = MapEntry(u32::from_le_bytes(self.bytes[start..start + 4].try_into().unwrap()));
        let changed = MapEntry(entry.0 ^ 1 << ((at - start) * 8 + bit as usize));
        let lba = u32::try_from((start - self.map.start) / 4).unwrap();
        matches!(
            (entry.state(), changed.state()),
            (MapState::Normal, MapState::Zero) | (MapState::Zero, MapState::Normal)
        ) || (entry.block(lba) == changed.block(lba)
            && entry.state() == MapState::Unwritten
            && changed.state() == MapState::Zero)
    }

    /// Returns every `step`-th bit of `bytes`.
    fn bits(bytes: &std::ops::Range<usize>, step: usize) -> Vec<(usize, u32)> {
        let bits = (bytes.start * 8..bytes.end * 8).step_by(step);
        bits.map(|bit| (bit / 8, u32::try_from(bit % 8).unwrap())).collect()
    }
}

/// Reads the first blocks of `btt`. Returns the number of failed blocks, and of blocks that differ
/// from `blocks`.
fn read_all(btt: &Btt, blocks: &[u8]) -> (usize, usize) {
    let (mut failed, mut wrong) = (0, 0);
    let mut data = vec![0; BLOCK_BYTES];
    for (block, &byte) in blocks.iter().enumerate() {
        match btt.read((block * BLOCK_BYTES) as u64, &mut data) {
            Ok(()) => wrong += usize::from(data.iter().any(|&found| found != byte)),
            Err(_) => failed += 1,
        }
    }
    (failed, wrong)
}

fn byte(round: usize, block: usize) -> u8 {
    u8::try_from(1 + (round * 31 + block * 7) % 250).unwrap()
}

/// Number of flips that a repair was tried on, by result.
#[derive(Debug, Default)]
struct Repairs {
    /// Flips after which the pool does not open for writing.
    refused: u32,
    /// Refused flips after which the pool opens once it is repaired.
    reopened: u32,
    /// Reopened flips for which the repair proved all of the lane's flog.
    proven_lanes: u32,
    /// Reopened flips for which the repair proved a map entry.
    proven_entries: u32,
}

impl Repairs {
    /// Asserts that a flip makes at most `failed_max` blocks unreadable. Then tries a repair.
    fn assert_served(&mut self, pool: &mut Pool, (at, bit): (usize, u32), failed_max: usize) {
        if pool.is_beyond_the_format(at, bit) {
            return;
        }
        let flip = format!("bit {bit} of byte {at}");
        pool.with_flip(at, bit, |pool| {
            let btt =
                Btt::open(pool.read_only.clone()).unwrap_or_else(|error| panic!("{flip}: {error}"));
            let (failed, wrong) = read_all(&btt, &pool.blocks);
            assert!(wrong == 0 && failed <= failed_max, "{flip}: {wrong} wrong, {failed} failed");
            if failed > 0 {
                assert!(pool.check().faults > 0, "{flip}");
            }
            let is_opened = pool.assert_right_for_writing(&pool.bytes, &flip);
            self.repair(pool, is_opened, &flip);
        });
    }

    fn repair(&mut self, pool: &Pool, was_opened: bool, flip: &str) {
        let repaired = region_of(&pool.bytes);
        let report = repair(&repaired, &mut |_| ()).unwrap();
        assert_eq!(report.faults, check(&repaired, &mut |_| ()).unwrap().faults, "{flip}");
        let is_opened =
            pool.assert_right_for_writing(&bytes_of(&repaired), &format!("{flip}, repaired"));
        assert!(is_opened || report.faults > 0, "{flip}: repaired without a fault, but not opened");
        if was_opened {
            return;
        }
        self.refused += 1;
        if is_opened {
            let is_proven = report.unproven.is_empty();
            self.reopened += 1;
            self.proven_lanes += u32::from(is_proven && report.repaired_lanes == 1);
            self.proven_entries += u32::from(is_proven && report.repaired_map_entries == 1);
        }
    }

    /// Tries the flips of bits of `bytes` that are `step` apart.
    fn of(pool: &mut Pool, bytes: &std::ops::Range<usize>, step: usize) -> Self {
        let mut repairs = Self::default();
        for flip in Pool::bits(bytes, step) {
            repairs.assert_served(pool, flip, 2);
        }
        println!("{repairs:?}");
        repairs
    }
}

#[test]
fn a_flipped_bit_of_the_flog_costs_at_most_two_blocks_and_never_lies() {
    for (unfinished, step, refused_min, proven_min) in
        [(false, 3, 1000, 950), (true, 1, 3000, 2850)]
    {
        let mut pool = Pool::new(unfinished);
        let flog = pool.flog.clone();
        let repairs = Repairs::of(&mut pool, &flog, step);
        assert!(repairs.refused >= refused_min, "{repairs:?}");
        assert!(repairs.proven_lanes >= proven_min, "{repairs:?}");
    }
}

#[test]
fn a_flipped_bit_of_the_map_costs_at_most_two_blocks_and_never_lies() {
    for (unfinished, step, refused_min, proven_min) in [(false, 3, 250, 200), (true, 1, 800, 600)] {
        let mut pool = Pool::new(unfinished);
        let map = pool.map.clone();
        let repairs = Repairs::of(&mut pool, &map, step);
        assert!(repairs.refused >= refused_min, "{repairs:?}");
        assert!(repairs.proven_entries >= proven_min, "{repairs:?}");
    }
}

/// Reads need no flog. Without it, a last write that is not yet in the map is unknown.
#[test]
fn a_pool_without_its_flog_is_read_all_the_same() {
    let random = |n: usize| scrambled(n as u64).to_le_bytes()[0];
    let fills: [(&str, &dyn Fn(usize) -> u8); 3] =
        [("zeroes", &|_| 0), ("ones", &|_| 0xFF), ("random bytes", &random)];
    for (name, fill) in fills {
        for unfinished in [false, true] {
            let mut pool = Pool::new(unfinished);
            let flog = pool.flog.clone();
            flog.clone().for_each(|at| pool.bytes[at] = fill(at));
            pool.file.write_all_at(&pool.bytes[flog.clone()], flog.start as u64).unwrap();
            if unfinished {
                // The content before the unfinished write.
                pool.blocks[2] = byte(6, 2);
            }
            let btt = Btt::open(pool.read_only.clone()).unwrap();
            assert_eq!(read_all(&btt, &pool.blocks), (0, 0), "{name}");
            let damage = btt.summary().damage.join("\n");
            assert!(damage.contains(&format!("the last writes of {LANES} lanes")), "{damage}");
            assert!(pool.check().faults >= LANES.into(), "{name}");
            assert!(!pool.assert_right_for_writing(&pool.bytes, name), "{name}: opened");
        }
    }
}

#[test]
fn a_flipped_bit_of_an_info_block_costs_nothing() {
    let mut pool = Pool::new(true);
    for (copy, refused_min) in pool.info.clone().into_iter().zip([300, 0]) {
        // All of the fields, some of the zeroes.
        let fields = copy.start..copy.start + 128;
        let rest = fields.end..copy.end;
        let flips = [Pool::bits(&fields, 3), Pool::bits(&rest, 1009)].concat();
        let mut repairs = Repairs::default();
        for flip in flips {
            repairs.assert_served(&mut pool, flip, 0);
        }
        assert!(repairs.refused >= refused_min, "{repairs:?}");
        assert_eq!(repairs.reopened, repairs.refused, "by the other copy");
    }
}

/// In map, flog and info blocks the check finds the bit, or the bit makes no difference.
#[test]
fn check_finds_random_flips_that_matter() {
    let mut pool = Pool::new(false);
    let whole = pool.check();
    assert_eq!(whole.findings, []);
    let ranges = [pool.map.clone(), pool.flog.clone(), pool.info[0].clone(), pool.info[1].clone()];
    let flips = flips::numbers(10_000);
    let (count, mut found, mut counted) = (flips.end - flips.start, 0, 0);
    for n in flips {
        let random = scrambled(n);
        let range = &ranges[usize::try_from(n).unwrap() % ranges.len()];
        let at = range.start + usize::try_from(random >> 8).unwrap() % range.len();
        let bit = u32::try_from(random % 8).unwrap();
        let (map, beyond) = (pool.map.contains(&at), pool.is_beyond_the_format(at, bit));
        let in_flog = pool.flog.contains(&at);
        pool.with_flip(at, bit, |pool| {
            let report = pool.check();
            if map && beyond {
                // These are counted, since nothing tells them apart.
                let counts = |it: &Report| (it.written_blocks, it.zero_blocks, it.dropped_blocks);
                let entry_is_first = at - pool.map.start < 4;
                assert!(counts(&report) != counts(&whole) || entry_is_first, "bit {bit} of {at}");
                counted += 1;
            } else if report.faults == 0 {
                assert!(in_flog, "bit {bit} of byte {at} is not found");
                assert!(pool.assert_right_for_writing(&pool.bytes, "a flip without a finding"));
            } else {
                found += 1;
            }
        });
    }
    let harmless = count - found - counted;
    println!("{found} found, {counted} counted, {harmless} make no difference");
    assert!(found >= count * 9 / 10, "{found} of {count} found");
}
