//! The counts of each operation, on which the tests of engines rest.

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

/// Stores through a buffer, since there are several parts.
#[test]
fn streaming_store_of_parts_with_a_checksum() {
    let data: Vec<u8> = (0..1300_u32).map(|number| (number % 251) as u8).collect();
    let region = Region::anonymous(8192).unwrap();
    let (first, rest) = data.split_at(700);
    let parts = [first, &[], rest].map(IoSlice::new);
    let stored = region.write_streaming_crc32c::<512>(128, &parts);
    // The lines are whole, so that none is written back.
    let expected = Counters { stores: 3, bytes_streamed: 1344, ..Counters::default() };
    assert_eq!(region.counters(), expected);
    expect_stored(&region, &data, stored);
    let misaligned = region.write_streaming_crc32c::<512>(100, &parts);
    assert!(matches!(misaligned, Err(PmemError::Misaligned { .. })));
}

/// Stores in one step, or through a buffer if the CPU cannot take the CRC.
#[test]
fn streaming_store_of_one_part_with_a_checksum() {
    let data: Vec<u8> = (0..4133_u32).map(|number| (number % 241) as u8).collect();
    for len in [0, 1, 63, 64, 65, 127, 200, 256, 320, 511, 512, 577, 4096, 4133] {
        let region = Region::anonymous(8192).unwrap();
        region.write(128, &[0xff; 5000]).unwrap();
        let part = &data[data.len() - len..];
        let stored = region.write_streaming_crc32c::<8192>(128, &[IoSlice::new(part)]);
        expect_stored(&region, part, stored);
        assert_eq!(region.counters().bytes_streamed, len.next_multiple_of(64) as u64);
    }
}

/// Expects that `data` was stored from byte 128 on, with zeroes to the end of its last line, and
/// that `stored` is its checksum.
fn expect_stored(region: &Region, data: &[u8], stored: Result<u32, PmemError>) {
    let wanted = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, data);
    assert_eq!(stored.map(u64::from).unwrap(), wanted, "{} bytes", data.len());
    let mut found = vec![0; data.len().next_multiple_of(64)];
    region.read(128, &mut found).unwrap();
    assert_eq!(&found[..data.len()], data);
    assert!(found[data.len()..].iter().all(|byte| *byte == 0));
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
