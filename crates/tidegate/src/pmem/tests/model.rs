//! Random operations against a vector of bytes.

use proptest::prelude::*;

use crate::pmem::{Domain, PmemError, Region, RegionOptions};

/// Two pages and a bit, so that the end is in the middle of a page and of a line.
const REGION_BYTES: u64 = 8192 + 104;

#[derive(Debug, Clone)]
enum Op {
    Write(u64, Vec<u8>),
    Stream(u64, Vec<u8>),
    Zero(u64, u64),
    StoreU32(u64, u32),
    StoreU64(u64, u64),
    Read(u64, usize),
    LoadU32(u64),
    LoadU64(u64),
    WriteBack(u64, u64),
    Fence,
}

fn op() -> impl Strategy<Value = Op> {
    let offset = || prop_oneof![9 => 0..REGION_BYTES + 8, 1 => any::<u64>()];
    let len = || prop_oneof![4 => 0..200u64, 1 => 0..5000u64];
    let data = || len().prop_flat_map(|len| prop::collection::vec(any::<u8>(), len as usize));
    let word_at = |bytes: u64| prop_oneof![8 => (0..REGION_BYTES / bytes + 2).prop_map(move |at| at * bytes), 1 => offset()];
    prop_oneof![
        (offset(), data()).prop_map(|(at, data)| Op::Write(at, data)),
        (offset(), data()).prop_map(|(at, data)| Op::Stream(at, data)),
        (offset(), len()).prop_map(|(at, len)| Op::Zero(at, len)),
        (word_at(4), any::<u32>()).prop_map(|(at, value)| Op::StoreU32(at, value)),
        (word_at(8), any::<u64>()).prop_map(|(at, value)| Op::StoreU64(at, value)),
        (offset(), len()).prop_map(|(at, len)| Op::Read(at, len as usize)),
        word_at(4).prop_map(Op::LoadU32),
        word_at(8).prop_map(Op::LoadU64),
        (offset(), len()).prop_map(|(at, len)| Op::WriteBack(at, len)),
        Just(Op::Fence),
    ]
}

/// Returns the model's bytes at `offset`, or the error that the region must give.
fn slot(model: &mut [u8], offset: u64, len: u64, align: u64) -> Result<&mut [u8], &'static str> {
    if !offset.is_multiple_of(align) {
        return Err("misaligned");
    }
    let end = offset.checked_add(len).filter(|&end| end <= REGION_BYTES).ok_or("out of range")?;
    Ok(&mut model[offset as usize..end as usize])
}

fn kind(error: &PmemError) -> &'static str {
    match error {
        PmemError::Misaligned { .. } => "misaligned",
        PmemError::OutOfRange { .. } => "out of range",
        _ => "another error",
    }
}

fn same<T: PartialEq + std::fmt::Debug>(
    found: Result<T, PmemError>,
    expected: Result<T, &'static str>,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.map_err(|error| kind(&error)), expected);
    Ok(())
}

fn step(region: &Region, model: &mut [u8], op: &Op) -> Result<(), TestCaseError> {
    let put =
        |at: Result<&mut [u8], &'static str>, data: &[u8]| at.map(|at| at.copy_from_slice(data));
    match op {
        Op::Write(at, data) => {
            let expected = put(slot(model, *at, data.len() as u64, 1), data);
            same(region.write(*at, data), expected)
        }
        Op::Stream(at, data) => {
            let expected = put(slot(model, *at, data.len() as u64, 1), data);
            same(region.write_streaming(*at, data), expected)
        }
        Op::Zero(at, len) => {
            let expected = slot(model, *at, *len, 1).map(|at| at.fill(0));
            same(region.zero_streaming(*at, *len), expected)
        }
        Op::StoreU32(at, value) => {
            let expected = put(slot(model, *at, 4, 4), &value.to_le_bytes());
            same(region.store_u32(*at, *value), expected)
        }
        Op::StoreU64(at, value) => {
            let expected = put(slot(model, *at, 8, 8), &value.to_le_bytes());
            same(region.store_u64(*at, *value), expected)
        }
        Op::Read(at, len) => {
            let mut buf = vec![0xee; *len];
            let expected = slot(model, *at, *len as u64, 1).map(|at| at.to_vec());
            same(region.read(*at, &mut buf).map(|()| buf), expected)
        }
        Op::LoadU32(at) => {
            let expected =
                slot(model, *at, 4, 4).map(|at| u32::from_le_bytes(at.try_into().unwrap()));
            same(region.load_u32(*at), expected)
        }
        Op::LoadU64(at) => {
            let expected =
                slot(model, *at, 8, 8).map(|at| u64::from_le_bytes(at.try_into().unwrap()));
            same(region.load_u64(*at), expected)
        }
        Op::WriteBack(at, len) => {
            same(region.write_back(*at, *len), slot(model, *at, *len, 1).map(|_| ()))
        }
        Op::Fence => same(region.fence(), Ok(())),
    }
}

fn run(region: &Region, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut model = vec![0; REGION_BYTES as usize];
    for op in ops {
        step(region, &mut model, op)?;
    }
    let mut all = vec![0; model.len()];
    region.read(0, &mut all).unwrap();
    prop_assert!(all == model, "the region differs from the model at the end");
    Ok(())
}

proptest! {
    #[test]
    fn anonymous_memory_in_every_domain(
        ops in prop::collection::vec(op(), 1..60),
        domain in prop::sample::select(vec![Domain::Adr, Domain::Eadr, Domain::Msync, Domain::Volatile]),
    ) {
        let options = RegionOptions { domain: Some(domain), ..RegionOptions::default() };
        run(&Region::anonymous_with(REGION_BYTES, &options).unwrap(), &ops)?;
    }

    #[test]
    fn a_file_keeps_what_was_fenced(ops in prop::collection::vec(op(), 1..30)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let options = RegionOptions { create_bytes: Some(REGION_BYTES), ..RegionOptions::default() };
        let region = Region::open(&path, &options).unwrap();
        run(&region, &ops)?;
        let mut mapped = vec![0; REGION_BYTES as usize];
        region.read(0, &mut mapped).unwrap();
        drop(region);
        prop_assert!(std::fs::read(&path).unwrap() == mapped);
    }
}
