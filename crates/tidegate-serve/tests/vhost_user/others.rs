//! The same requests by vhost-user and over NBD have the same answers, data and counts.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tidegate::device::fault::{Effect, Fault, Rule, When};
use tidegate::device::nbd::{NbdAddress, NbdDevice, NbdOptions};
use tidegate::device::{
    BlockDevice, BlockDeviceExt, DeviceErrorKind, Op, Result, WriteFlags, ZeroFlags,
};
use tidegate_serve::nbd::{Export, ListenAddress, ServerBuilder, Statistics, StopHandle};

use crate::machine::MachineDisk;
use crate::{SERVED, Scene, blocks};

const BLOCKS: u64 = 64;

/// A request of a test.
#[derive(Debug, Clone)]
enum Step {
    Read {
        block: u64,
        blocks: u64,
    },
    Write {
        block: u64,
        blocks: u64,
        byte: u8,
    },
    Discard {
        block: u64,
        blocks: u64,
    },
    Zero {
        block: u64,
        blocks: u64,
        may_unmap: bool,
    },
    Flush,
    /// The next request of this kind fails.
    Fail(Op),
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..BLOCKS).prop_flat_map(|block| (Just(block), 1..=(BLOCKS - block).min(9)));
    let ops = prop_oneof![Just(Op::Read), Just(Op::Write), Just(Op::Flush)];
    prop_oneof![
        range.clone().prop_map(|(block, blocks)| Step::Read { block, blocks }),
        (range.clone(), any::<u8>()).prop_map(|((block, blocks), byte)| Step::Write {
            block,
            blocks,
            byte
        }),
        range.clone().prop_map(|(block, blocks)| Step::Discard { block, blocks }),
        (range, any::<bool>()).prop_map(|((block, blocks), may_unmap)| Step::Zero {
            block,
            blocks,
            may_unmap
        }),
        Just(Step::Flush),
        ops.prop_map(Step::Fail),
    ]
}

/// Runs `step`. Returns what was read.
fn run(step: &Step, disk: &dyn BlockDevice, fault: &Fault) -> Result<Vec<u8>> {
    let bytes = |blocks: u64| blocks * 512;
    let mut data = Vec::new();
    match *step {
        Step::Read { block, blocks } => {
            data = vec![0; usize::try_from(bytes(blocks)).expect("short")];
            disk.read(bytes(block), &mut data)?;
        }
        Step::Write { block, blocks, byte } => {
            let data = vec![byte; usize::try_from(bytes(blocks)).expect("short")];
            disk.write(bytes(block), &data, WriteFlags::default())?;
        }
        Step::Discard { block, blocks } => disk.discard(bytes(block), bytes(blocks))?,
        Step::Zero { block, blocks, may_unmap } => {
            let flags = ZeroFlags { may_unmap, ..ZeroFlags::default() };
            disk.write_zeroes(bytes(block), bytes(blocks), flags)?;
        }
        Step::Flush => disk.flush()?,
        Step::Fail(op) => {
            fault.add(Rule::new(&[op], When::Nth(1), Effect::Fail(DeviceErrorKind::Io)));
        }
    }
    Ok(data)
}

/// The outcome of all steps, the content of the device, and the counts of the front end.
type Outcome = (Vec<std::result::Result<Vec<u8>, DeviceErrorKind>>, Vec<u8>, Statistics);

fn outcome(
    steps: &[Step],
    disk: &dyn BlockDevice,
    fault: &Fault,
    counts: impl FnOnce() -> Statistics,
) -> Outcome {
    let answers = steps.iter().map(|step| run(step, disk, fault).map_err(|error| error.kind()));
    let answers = answers.collect();
    fault.heal();
    let mut content = vec![0; usize::try_from(BLOCKS * 512).expect("short")];
    disk.read(0, &mut content).expect("read");
    let counted = counts();
    // Connections are NBD's alone.
    let (connections, connections_open) = (0, 0);
    (answers, content, Statistics { connections, connections_open, ..counted })
}

fn by_vhost_user(steps: &[Step]) -> Outcome {
    let fault = Arc::new(Fault::new(blocks(512, BLOCKS * 512), 0));
    let device: Arc<dyn BlockDevice> = Arc::<Fault>::clone(&fault);
    let scene = Scene::new(&device, SERVED);
    let disk = MachineDisk::new(&scene.socket(), &device.geometry());
    let source = scene.served.as_ref().expect("it is served").statistics();
    outcome(steps, &disk, &fault, || source.snapshot())
}

fn over_nbd(steps: &[Step]) -> Outcome {
    let fault = Arc::new(Fault::new(blocks(512, BLOCKS * 512), 0));
    let device: Arc<dyn BlockDevice> = Arc::<Fault>::clone(&fault);
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("nbd.sock");
    let builder = ServerBuilder::new().export(Export::new("", device));
    let server = builder.bind(&[ListenAddress::Unix(socket.clone())]).expect("it listens");
    let (stop, source) = (StopHandle::new().expect("a handle"), server.statistics());
    std::thread::scope(|threads| {
        let running = threads.spawn(|| server.run(&stop));
        let options = NbdOptions {
            address: NbdAddress::Unix(socket),
            export: String::new(),
            name: "the disk".into(),
            timeout: Duration::from_secs(30),
            block_bytes: Some(512),
        };
        let disk = NbdDevice::open(&options).expect("the server is ready");
        let found = outcome(steps, &disk, &fault, || source.snapshot());
        drop(disk);
        stop.stop();
        running.join().expect("no panic").expect("it ends");
        found
    })
}

#[test]
fn the_same_requests_have_the_same_answers_as_over_nbd() {
    let mut runner = TestRunner::new(Config::with_cases(60));
    runner
        .run(&prop::collection::vec(step(), 1..30), |steps| {
            let (answers, content, counted) = by_vhost_user(&steps);
            let (wanted, wanted_content, wanted_counts) = over_nbd(&steps);
            prop_assert_eq!(answers, wanted);
            prop_assert!(content == wanted_content, "the content differs");
            prop_assert_eq!(counted, wanted_counts);
            Ok(())
        })
        .expect("no case fails");
}
