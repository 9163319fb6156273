//! Random requests on every device, with faults below, against a map of blocks.

use std::sync::Arc;

use proptest::prelude::*;

use super::conformance::{Model, fill};
use super::delay::{Delay, Delays};
use super::fault::{Effect, Fault, Rule, When};
use super::file::{FileDevice, FileOptions, Transfer};
use super::memory::MemoryDevice;
use super::{
    BlockDevice, BlockDeviceExt, DeviceErrorKind, Op, Operation, Request, WriteFlags, ZeroFlags,
};

const BLOCKS: u64 = 64;
const BLOCK_BYTES: u64 = 4096;

#[derive(Debug, Clone)]
enum Step {
    Write {
        first: u64,
        count: u64,
        seed: u64,
        fua: bool,
    },
    Read {
        first: u64,
        count: u64,
    },
    Zero {
        first: u64,
        count: u64,
        may_unmap: bool,
        fua: bool,
    },
    Discard {
        first: u64,
        count: u64,
    },
    Flush,
    /// Writes of every `stride`-th block from `first`, as one batch.
    Batch {
        first: u64,
        stride: u64,
        seed: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let run = || (0..BLOCKS).prop_flat_map(|first| (Just(first), 1..=(BLOCKS - first).min(20)));
    prop_oneof![
        (run(), any::<u64>(), any::<bool>()).prop_map(|((first, count), seed, fua)| Step::Write {
            first,
            count,
            seed,
            fua
        }),
        run().prop_map(|(first, count)| Step::Read { first, count }),
        (run(), any::<bool>(), any::<bool>()).prop_map(|((first, count), may_unmap, fua)| {
            Step::Zero { first, count, may_unmap, fua }
        }),
        run().prop_map(|(first, count)| Step::Discard { first, count }),
        Just(Step::Flush),
        (0..BLOCKS, 1u64..9, any::<u64>()).prop_map(|(first, stride, seed)| Step::Batch {
            first,
            stride,
            seed
        }),
    ]
}

fn effect() -> impl Strategy<Value = Effect> {
    prop_oneof![
        Just(Effect::Fail(DeviceErrorKind::Io)),
        Just(Effect::Fail(DeviceErrorKind::NoSpace)),
        (0u64..8).prop_map(|blocks| Effect::Short { blocks, kind: DeviceErrorKind::Io }),
    ]
}

fn data_of(count: u64, seed: u64) -> Vec<u8> {
    let mut data = vec![0; bytes(count)];
    fill(&mut data, seed);
    data
}

fn bytes(blocks: u64) -> usize {
    usize::try_from(blocks * BLOCK_BYTES).unwrap()
}

fn take(device: &dyn BlockDevice, model: &mut Model, step: &Step) {
    match *step {
        Step::Write { first, count, seed, fua } => {
            let (offset, data) = (first * BLOCK_BYTES, data_of(count, seed));
            let result = device.write(offset, &data, WriteFlags { fua });
            model.wrote(offset, &data, &result);
        }
        Step::Read { first, count } => read(device, model, first, count),
        Step::Zero { first, count, may_unmap, fua } => {
            let flags = ZeroFlags { fua, may_unmap, fast_only: false };
            let offset = first * BLOCK_BYTES;
            let result = device.write_zeroes(offset, count * BLOCK_BYTES, flags);
            model.wrote(offset, &vec![0; bytes(count)], &result);
        }
        Step::Discard { first, count } => {
            let _ = device.discard(first * BLOCK_BYTES, count * BLOCK_BYTES);
            model.discarded(first * BLOCK_BYTES, count * BLOCK_BYTES);
        }
        Step::Flush => {
            let _ = device.flush();
        }
        Step::Batch { first, stride, seed } => batch(device, model, first, stride, seed),
    }
}

fn read(device: &dyn BlockDevice, model: &mut Model, first: u64, count: u64) {
    let mut found = vec![0xEE; bytes(count)];
    if device.read(first * BLOCK_BYTES, &mut found).is_ok() {
        model.read(first * BLOCK_BYTES, &found);
    }
}

fn batch(device: &dyn BlockDevice, model: &mut Model, first: u64, stride: u64, seed: u64) {
    let writes: Vec<_> = (first..BLOCKS)
        .step_by(usize::try_from(stride).unwrap())
        .map(|place| (place * BLOCK_BYTES, data_of(1, seed ^ place)))
        .collect();
    let mut requests: Vec<_> = writes
        .iter()
        .map(|(offset, data)| {
            let flags = WriteFlags::default();
            Request::new(Operation::Write { offset: *offset, data, flags })
        })
        .collect();
    device.submit(&mut requests);
    let results: Vec<_> = requests.iter_mut().map(|it| it.take_result().unwrap()).collect();
    for ((offset, data), result) in writes.iter().zip(&results) {
        model.wrote(*offset, data, result);
    }
}

fn compare(device: &dyn BlockDevice, steps: &[Step]) {
    let mut model = Model::of(device);
    for step in steps {
        take(device, &mut model, step);
    }
}

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(4096, BLOCKS).unwrap())
}

fn file(transfer: Transfer) -> (tempfile::TempDir, FileDevice) {
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions {
        transfer,
        block_bytes: Some(4096),
        create_bytes: Some(BLOCKS * BLOCK_BYTES),
        ..FileOptions::default()
    };
    let device = FileDevice::open(&dir.path().join("file"), &options).unwrap();
    (dir, device)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_a_map_of_blocks(steps in steps()) {
        compare(&*memory(), &steps);
    }

    #[test]
    fn layers_with_faults_below_leave_blocks_old_or_new(
        steps in steps(),
        seed in any::<u64>(),
        effects in proptest::collection::vec(effect(), 1..4),
    ) {
        let fault = Arc::new(Fault::new(memory(), seed));
        for effect in effects {
            fault.add(Rule::new(
                &[Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes],
                When::Chance(150_000),
                effect,
            ));
        }
        let delays = Delays { write_ns: 10, ..Delays::default() };
        let top = Delay::new(Arc::clone(&fault) as _, delays);
        let mut model = Model::of(&top);
        for step in &steps {
            take(&top, &mut model, step);
        }
        fault.heal();
        read(&top, &mut model, 0, BLOCKS);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_buffered_file_is_a_map_of_blocks(steps in steps()) {
        let (_dir, device) = file(Transfer::Buffered);
        compare(&device, &steps);
    }

    #[test]
    fn a_direct_file_is_a_map_of_blocks(steps in steps()) {
        let (_dir, device) = file(Transfer::Direct);
        compare(&device, &steps);
    }
}
