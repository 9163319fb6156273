//! Pools and what the tests write to them: blocks that tell where, when and whether whole they were
//! written.

use std::path::Path;
use std::sync::Arc;

use tidegate::btt::{Btt, BttOptions, check, convert, create};
use tidegate::device::{BlockDevice, BlockDeviceExt, WriteFlags};
use tidegate::pmem::{Domain, Region, RegionOptions};

/// The least that holds a BTT 1.1: 4 KiB and an arena of 16 MiB.
pub(crate) const POOL_BYTES: u64 = (16 << 20) + 4096;

/// Makes a file of zeroes.
pub(crate) fn blank(path: &Path, bytes: u64) {
    let file = std::fs::File::create_new(path).and_then(|file| file.set_len(bytes));
    file.unwrap_or_else(|err| panic!("{}: {err}", path.display()));
}

/// Makes a BTT in a new sparse file.
pub(crate) fn create_pool(path: &Path, bytes: u64, options: &BttOptions) {
    blank(path, bytes);
    format_pool(path, options);
}

/// Makes a BTT in a file, whatever it holds.
pub(crate) fn format_pool(path: &Path, options: &BttOptions) {
    let region = map(path);
    create(&region, options).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
}

/// Converts the pool of libpmemblk in a file.
pub(crate) fn convert_pool(path: &Path) {
    convert(&Arc::new(map(path))).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
}

/// Opens the BTT in a file, which recovers it.
pub(crate) fn open_pool(path: &Path) -> Btt {
    Btt::open(Arc::new(map(path))).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

/// Asserts that a check finds nothing in a file.
pub(crate) fn assert_clean(path: &Path) {
    let report = check::check(&map(path), &mut |_| {})
        .unwrap_or_else(|err| panic!("{}: {err}", path.display()));
    assert!(report.clean(), "{}: {:?}", path.display(), report.findings);
}

/// The page cache is the medium here: it outlives the processes, so nothing is to be synced.
fn map(path: &Path) -> Region {
    let options = RegionOptions { domain: Some(Domain::Adr), ..RegionOptions::default() };
    Region::open(path, &options).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

/// All that a device holds.
pub(crate) fn read_all(device: &dyn BlockDevice) -> Vec<u8> {
    let size_bytes = device.geometry().size_bytes();
    let mut data = vec![0; usize::try_from(size_bytes).expect("test devices are small")];
    device.read(0, &mut data).expect("the device can be read");
    data
}

/// Writes stamped blocks to a part of a device.
pub(crate) fn write_stamped(
    device: &dyn BlockDevice,
    blocks: std::ops::Range<u64>,
    generation: u64,
) {
    let block_bytes = device.geometry().block_bytes;
    for block in blocks {
        let data = stamp(block, generation, block_bytes);
        let written = device.write(block * u64::from(block_bytes), &data, WriteFlags::default());
        written.expect("the device can be written");
    }
}

/// The bytes of a run of blocks in one generation.
pub(crate) fn stamped(blocks: std::ops::Range<u64>, generation: u64, block_bytes: u32) -> Vec<u8> {
    blocks.flat_map(|block| stamp(block, generation, block_bytes)).collect()
}

/// The bytes of a block in a generation: no two blocks and no two generations share a word but by
/// accident.
pub(crate) fn stamp(block: u64, generation: u64, block_bytes: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(block_bytes as usize);
    bytes.extend(block.to_le_bytes());
    bytes.extend(generation.to_le_bytes());
    let seed = mix(block ^ mix(generation));
    bytes.extend((2..u64::from(block_bytes) / 8).flat_map(|word| mix(seed ^ word).to_le_bytes()));
    bytes
}

/// The generation of a stamped block. A block that is torn or belongs elsewhere has none.
pub(crate) fn generation(block: u64, bytes: &[u8]) -> Option<u64> {
    let generation = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    let block_bytes = u32::try_from(bytes.len()).expect("blocks are small");
    (stamp(block, generation, block_bytes) == bytes).then_some(generation)
}

/// Asserts that `data` is what `generation_of` says of each block.
pub(crate) fn assert_stamped(
    name: &str,
    data: &[u8],
    block_bytes: u32,
    generation_of: impl Fn(u64) -> u64,
) {
    for (block, found) in (0..).zip(generations(name, data, block_bytes)) {
        assert_eq!(found, generation_of(block), "{name}: generation of block {block}");
    }
}

/// The generation of each block.
///
/// # Panics
/// Where a block is torn or belongs elsewhere.
pub(crate) fn generations(name: &str, data: &[u8], block_bytes: u32) -> Vec<u64> {
    let blocks = (0..).zip(data.chunks_exact(block_bytes as usize));
    let generation_of = |(block, bytes)| {
        let torn = || panic!("{name}: block {block} is not what was ever written to it");
        generation(block, bytes).unwrap_or_else(torn)
    };
    blocks.map(generation_of).collect()
}

/// A step of splitmix64.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
