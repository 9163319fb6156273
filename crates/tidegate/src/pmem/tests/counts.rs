//! What each operation counts: an engine's tests rest on these.

use std::io::IoSlice;

use crate::pmem::{Counters, Domain, PmemError, Region, RegionOptions};

const DOMAINS: [Domain; 4] = [Domain::Adr, Domain::Eadr, Domain::Msync, Domain::Volatile];

fn counted(region: &Region, op: impl FnOnce(&Region)) -> Counters {
    let before = region.counters();
    op(region);
    region.counters() - before
}

/// Runs `op` in every domain and expects the same counts in each.
fn expect_counts(expected: Counters, op: impl Fn(&Region)) {
    for domain in DOMAINS {
        let options = RegionOptions { domain: Some(domain), ..RegionOptions::default() };
        let region = Region::anonymous_with(1 << 16, &options).unwrap();
        assert_eq!(counted(&region, &op), expected, "domain {domain}");
    }
}

#[test]
fn cached_store() {
    let expected = Counters { stores: 1, bytes_stored: 100, ..Counters::default() };
    expect_counts(expected, |region| region.write(3, &[1; 100]).unwrap());
}

#[test]
fn streaming_store() {
    let expected = Counters { stores: 1, bytes_streamed: 4096, ..Counters::default() };
    expect_counts(expected, |region| region.write_streaming(64, &[1; 4096]).unwrap());
}

#[test]
fn streaming_store_seen() {
    let data: Vec<u8> = (0..1300_u32).map(|number| (number % 251) as u8).collect();
    // Whole lines: none is written back.
    let expected = Counters { stores: 3, bytes_streamed: 1344, ..Counters::default() };
    expect_counts(expected, |region| {
        let mut seen = Vec::new();
        let (first, rest) = data.split_at(700);
        let parts = [first, &[], rest].map(IoSlice::new);
        region
            .write_streaming_seen::<512>(128, &parts, |chunk| seen.extend_from_slice(chunk))
            .unwrap();
        assert_eq!(seen, data);
        for at in (0..1344).step_by(8) {
            let wanted = std::array::from_fn(|next| data.get(at + next).copied().unwrap_or(0));
            assert_eq!(region.load_u64(128 + at as u64).unwrap(), u64::from_le_bytes(wanted));
        }
        let misaligned = region.write_streaming_seen::<512>(100, &parts, |_| ());
        assert!(matches!(misaligned, Err(PmemError::Misaligned { .. })));
    });
}

#[test]
fn words() {
    let expected = Counters { stores: 2, bytes_stored: 12, ..Counters::default() };
    expect_counts(expected, |region| {
        region.store_u64(8, 1).unwrap();
        region.store_u32(4, 1).unwrap();
        assert_eq!(region.load_u64(8).unwrap(), 1);
        assert_eq!(region.load_u32(4).unwrap(), 1);
    });
}

#[test]
fn write_back_counts_each_line_touched() {
    for (offset, len, lines) in [
        (0, 0, 0),
        (63, 0, 0),
        (0, 1, 1),
        (63, 1, 1),
        (63, 2, 2),
        (0, 64, 1),
        (1, 64, 2),
        (0, 4096, 64),
    ] {
        let expected = Counters { lines_written_back: lines, ..Counters::default() };
        expect_counts(expected, |region| region.write_back(offset, len).unwrap());
    }
}

#[test]
fn persist_is_one_write_back_and_one_fence() {
    let expected = Counters { lines_written_back: 2, fences: 1, ..Counters::default() };
    expect_counts(expected, |region| region.persist(60, 8).unwrap());
}

#[test]
fn read() {
    let expected = Counters { bytes_read: 4096, ..Counters::default() };
    expect_counts(expected, |region| region.read(5, &mut [0; 4096]).unwrap());
}

#[test]
fn refused_operations_count_nothing() {
    expect_counts(Counters::default(), |region| {
        region.write(1 << 16, &[1]).unwrap_err();
        region.write_streaming(u64::MAX, &[1; 2]).unwrap_err();
        region.write_back((1 << 16) - 1, 2).unwrap_err();
        region.store_u64((1 << 16) - 4, 1).unwrap_err();
        region.zero_streaming(0, u64::MAX).unwrap_err();
    });
}
