//! The body of the fuzz target for log pools: any bytes yield an error or a plan, never a panic.

use std::io::IoSlice;
use std::sync::Arc;

use uuid::Uuid;
use zerocopy::IntoBytes;

use super::{Disk, DiskNames, plan_pool, replay};
use crate::log::pool::record::{Header, payload_checksum};
use crate::log::{LogOptions, LogPool, RecordKind, create};
use crate::pmem::Region;

const POOL_BYTES: u64 = 256 << 10;
const SALT: u64 = 42;
const KINDS: [RecordKind; 12] = [
    RecordKind::Write,
    RecordKind::Zero,
    RecordKind::SetSize,
    RecordKind::Define,
    RecordKind::End,
    RecordKind::Void,
    RecordKind::Mark,
    RecordKind::Make,
    RecordKind::Name,
    RecordKind::Decided,
    RecordKind::Done,
    RecordKind::Gap,
];

/// Opens and plans a pool whose memory is `bytes`.
///
/// # Panics
/// If recovery has a bug.
pub fn arbitrary_pool(bytes: &[u8]) {
    let Ok(region) = Region::anonymous((bytes.len() as u64).max(1)) else { return };
    region.write(0, bytes).expect("the bytes fit their region");
    plan(&Arc::new(region));
}

/// Makes a small pool, fills its log with valid records from `bytes`, patches it, and plans it. The
/// first byte is the share of records in the rest. The second byte selects patches of the ring or
/// of the areas before it.
///
/// # Panics
/// If recovery has a bug.
pub fn patched_pool(bytes: &[u8]) {
    let Some((&[share, form], rest)) = bytes.split_first_chunk::<2>() else { return };
    let region = Arc::new(Region::anonymous(POOL_BYTES).expect("a little memory can be had"));
    create(&region, &LogOptions { uuid: Uuid::nil(), salt: SALT }).expect("a small pool fits");
    let (records, patches) = rest.split_at(rest.len() * usize::from(share) / 256);
    {
        let pool = LogPool::open(Arc::clone(&region)).expect("a new pool opens");
        let head = put_records(&pool, records);
        pool.set_limit(head).expect("memory can be written");
        for patch in patches.chunks_exact(4) {
            let offset = u64::from(patch[0]) | u64::from(patch[1]) << 8;
            let ring = pool.region_offset(pool.ring_bytes());
            let at = if form & 1 == 0 { ring + offset } else { offset % ring };
            region.write(at + u64::from(patch[2]), &patch[3..]).expect("the offset is inside");
        }
    }
    plan(&region);
}

/// Stores records. Each one is a byte for its kind, one for its file, three for numbers, one for
/// the payload's length, and the payload. Returns the position behind the last record.
fn put_records(pool: &LogPool, mut bytes: &[u8]) -> u64 {
    let start = pool.tail().expect("memory can be read");
    let mut position = start;
    while let Some((&[kind, file, offset, len, aux, payload], rest)) = bytes.split_first_chunk() {
        let (payload, rest) = rest.split_at(usize::from(payload).min(rest.len()));
        bytes = rest;
        let header = Header {
            position,
            kind: KINDS[usize::from(kind) % KINDS.len()],
            file: number(file, start),
            offset: number(offset, start),
            len: number(len, start),
            wall_ns: number(len, start),
            aux: number(aux, start),
            payload_bytes: u32::try_from(payload.len()).unwrap_or(0),
            payload_checksum: payload_checksum(&[IoSlice::new(payload)]),
            grows: kind >= 128,
            finished: if aux >= 128 { number(len, start) } else { 0 },
        };
        if position + header.record_bytes() > start + pool.ring_bytes() {
            break;
        }
        let at = pool.region_offset(position);
        let region = pool.region();
        region.write(at, header.encode(SALT).as_bytes()).expect("the record fits");
        region.write(at + 64, payload).expect("the record fits");
        position += header.record_bytes();
    }
    position
}

/// Maps a byte to a small number, a position of a record, or a number at the end of a range.
fn number(byte: u8, start: u64) -> u64 {
    let low = u64::from(byte >> 2);
    match byte & 3 {
        0 => low,
        1 => start + low * 64,
        2 => i64::MAX.cast_unsigned() - low,
        _ => u64::MAX - low,
    }
}

/// A disk without files.
struct NoNames;

impl DiskNames<usize, u64> for NoNames {
    fn at(&self, _: &usize) -> Option<u64> {
        None
    }

    fn links(&self, _: &u64) -> u64 {
        0
    }

    fn is_unseen(&self, _: &u64) -> bool {
        true
    }
}

fn plan(region: &Arc<Region>) {
    let Ok(pool) = LogPool::open(Arc::clone(region)) else { return };
    let Ok((plan, _)) = plan_pool(&pool) else { return };
    // Every record has at least 64 bytes.
    let most = usize::try_from(pool.ring_bytes() / 64).unwrap_or(usize::MAX);
    let steps = plan.files().iter().map(|file| file.steps.len());
    assert!(plan.files().len() + steps.sum::<usize>() <= most, "the plan is larger than the log");
    let names = plan.names();
    assert!(names.places.len() <= 2 * most, "the plan has more names than the log");
    let decisions = names.stories.decide(&NoNames);
    let bits = names.stories.to_bits(&decisions);
    assert_eq!(names.stories.from_bits(&bits), Some(decisions), "decisions are read as written");
    let written = [0..500, 700..1000].into_iter().collect();
    let disk = Disk { size_bytes: 1000, written, block_bytes: 64 };
    for file in plan.files() {
        let target = replay(file, &disk);
        let apart = target.extents.windows(2).all(|pair| pair[0].end <= pair[1].start);
        assert!(apart, "extents of file {} overlap", file.id);
        let last = target.extents.last().map_or(0, |extent| extent.end);
        assert!(last <= target.size_bytes, "file {} ends before its last extent", file.id);
    }
}
