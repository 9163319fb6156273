//! Tests that every block device must pass: they try the invariants of [`device`](super) from
//! outside.
//!
//! [`check`] runs all tests on a device of at least [`LEAST_BLOCKS`] blocks, and leaves other
//! content in it; [`check_started`] runs them by requests that are started. [`Model`] is a device
//! that cannot fail: a map of blocks to compare with, which knows that after an error each block of
//! a request is old or new. For tests only (feature `test-support`): everything here panics on a
//! finding.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;

use super::{
    AsyncRequest, BlockDevice, BlockDeviceExt, Context, DeviceErrorKind, Geometry, IoBuffer,
    Operation, OwnedOperation, Request, Result, WriteFlags, ZeroFlags,
};

/// The least number of blocks of a device under [`check`].
pub const LEAST_BLOCKS: u64 = 64;

/// The promises of a device beyond its geometry.
#[derive(Debug, Clone, Copy)]
pub struct Promises {
    /// A read returns the written data: true of every device but the null device.
    pub keeps_data: bool,
    /// Writers and readers of one block at the same time see it whole. Expected anyway of a device
    /// whose geometry says [`atomic_block`](super::Geometry::atomic_block).
    pub whole_blocks: bool,
}

impl Default for Promises {
    fn default() -> Self {
        Self { keeps_data: true, whole_blocks: false }
    }
}

/// Tests every promise of a writable device.
///
/// # Panics
/// Panics if the device breaks an invariant.
pub fn check(device: &dyn BlockDevice, promises: Promises) {
    let geometry = device.geometry();
    assert!(super::is_block_bytes(geometry.block_bytes), "{geometry:?}");
    assert!(geometry.blocks >= LEAST_BLOCKS, "{geometry:?}: too small to try");
    assert!(geometry.preferred_bytes >= geometry.block_bytes, "{geometry:?}");
    assert!(!geometry.read_only, "{geometry:?}: use check_read_only");
    refusals(device);
    empty_requests(device);
    status_covers(device);
    if promises.keeps_data {
        reads_what_was_written(device);
        unaligned_memory(device);
        zeroes(device);
        discards(device);
        batches(device);
        writers_side_by_side(device);
    }
    if promises.whole_blocks || geometry.atomic_block {
        one_block_many_threads(device);
    }
}

/// Runs [`check`] by [`BlockDevice::start`], and again with [`BlockDevice::attempt`] before it.
///
/// # Panics
/// Panics if the device breaks an invariant.
pub fn check_started(device: &Arc<dyn BlockDevice>, promises: Promises) {
    for attempts in [false, true] {
        check(&Started { device: Arc::clone(device), attempts }, promises);
    }
    started_together(device, promises);
}

/// Checks that a request started on `layer` runs on another thread, though the device below is as
/// fast as memory. Callers go on receiving meanwhile and rely on that.
#[cfg(test)]
pub(crate) fn check_work_is_elsewhere(layer: &Arc<dyn BlockDevice>) {
    let (told, done_by) = channel();
    let operation = OwnedOperation::Write {
        offset: 0,
        buffer: IoBuffer::new(layer.geometry().block_bytes as usize),
        flags: WriteFlags::default(),
    };
    let request = AsyncRequest::new(operation, Context::default(), move |_, result| {
        told.send(result.map(|()| std::thread::current().id())).expect("the caller waits");
    });
    Arc::clone(layer).start(request);
    let done_by = done_by.recv().expect("a started request completes").expect("it is sound");
    assert_ne!(done_by, std::thread::current().id(), "the caller did the work");
}

/// A device that starts every request on the device below and waits for its end.
struct Started {
    device: Arc<dyn BlockDevice>,
    /// Whether each request is first tried at once.
    attempts: bool,
}

impl Started {
    fn wait_for(&self, operation: OwnedOperation) -> (OwnedOperation, Result<()>) {
        let (told, result) = channel();
        let request = AsyncRequest::new(operation, Context::default(), move |operation, result| {
            told.send((operation, result)).expect("the caller waits");
        });
        if self.attempts {
            request.start_on(&self.device);
        } else {
            Arc::clone(&self.device).start(request);
        }
        result.recv().expect("a started request completes")
    }
}

impl BlockDevice for Started {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let (ended, result) = self.wait_for(OwnedOperation::like(operation));
        ended.give_back(operation);
        result
    }
}

/// Checks many concurrent writes, flushes and reads: each completes once, with its data.
fn started_together(device: &Arc<dyn BlockDevice>, promises: Promises) {
    let block = u64::from(device.geometry().block_bytes);
    let run = |operations: Vec<OwnedOperation>| -> Vec<OwnedOperation> {
        let (told, ended) = channel();
        for operation in operations {
            let told = told.clone();
            AsyncRequest::new(operation, Context::default(), move |operation, result| {
                told.send((operation, result)).expect("the caller waits");
            })
            .start_on(device);
        }
        drop(told);
        ended
            .iter()
            .map(|(operation, result)| (operation, result.expect("it succeeds")).0)
            .collect()
    };
    let writes = (0..LEAST_BLOCKS).map(|index| {
        let mut buffer = IoBuffer::new(to_usize(block));
        fill(buffer.data_mut(), 900 + index);
        let flags = WriteFlags { fua: index % 16 == 7 };
        OwnedOperation::Write { offset: index * block, buffer, flags }
    });
    assert_eq!(run(writes.collect()).len(), to_usize(LEAST_BLOCKS));
    assert_eq!(run((0..8).map(|_| OwnedOperation::Flush).collect()).len(), 8);
    let reads = (0..LEAST_BLOCKS).map(|index| OwnedOperation::Read {
        offset: index * block,
        buffer: IoBuffer::new(to_usize(block)),
    });
    let reads = run(reads.collect());
    assert_eq!(reads.len(), to_usize(LEAST_BLOCKS));
    for read in reads.iter().filter(|_| promises.keeps_data) {
        let OwnedOperation::Read { offset, buffer } = read else { panic!("{read:?} of a read") };
        assert!(buffer.data() == block_of(&**device, 900 + offset / block), "block at {offset}");
    }
}

/// Checks that a read-only device reads and refuses every change.
///
/// # Panics
/// Panics if the device fails a read or accepts a change.
pub fn check_read_only(device: &dyn BlockDevice) {
    assert!(device.geometry().read_only);
    let block = u64::from(device.geometry().block_bytes);
    let mut buf = block_of(device, 1);
    device.read(0, &mut buf).expect("a read-only device reads");
    for (name, result) in changes(device, 0, block, &buf) {
        assert_eq!(kind(&result), Some(DeviceErrorKind::ReadOnly), "{name}: {result:?}");
    }
    device.flush().expect("nothing to flush");
    let mut after = block_of(device, 2);
    device.read(0, &mut after).expect("a read-only device reads");
    assert!(buf == after, "a refused change changed the device");
}

fn changes(
    device: &dyn BlockDevice,
    offset: u64,
    len: u64,
    data: &[u8],
) -> [(&'static str, Result<()>); 3] {
    [
        ("write", device.write(offset, data, WriteFlags::default())),
        ("discard", device.discard(offset, len)),
        ("write_zeroes", device.write_zeroes(offset, len, ZeroFlags::default())),
    ]
}

fn kind(result: &Result<()>) -> Option<DeviceErrorKind> {
    result.as_ref().err().map(super::DeviceError::kind)
}

fn refusals(device: &dyn BlockDevice) {
    use DeviceErrorKind::{Misaligned, OutOfRange};
    let geometry = device.geometry();
    let (block, size) = (u64::from(geometry.block_bytes), geometry.size_bytes());
    for (offset, len, expected) in [
        (1, block, Misaligned),
        (0, block - 1, Misaligned),
        (block / 2, block, Misaligned),
        (size - block, 2 * block, OutOfRange),
        (size, block, OutOfRange),
        (size + block, 0, OutOfRange),
        (u64::MAX - (u64::MAX % block), block, OutOfRange),
    ] {
        let mut data = vec![0x5A; usize::try_from(len).expect("small")];
        let what = format!("{len} bytes at {offset}");
        assert_eq!(kind(&device.read(offset, &mut data)), Some(expected), "read of {what}");
        for (name, result) in changes(device, offset, len, &data) {
            assert_eq!(kind(&result), Some(expected), "{name} of {what}");
        }
        let status = device.status(offset, len, 1).map(|_| ());
        assert_eq!(kind(&status), Some(expected), "status of {what}");
    }
}

fn empty_requests(device: &dyn BlockDevice) {
    for offset in [0, device.geometry().size_bytes()] {
        device.read(offset, &mut []).expect("reading nothing");
        for (name, result) in changes(device, offset, 0, &[]) {
            assert!(result.is_ok(), "{name} of nothing at {offset}: {result:?}");
        }
    }
}

fn status_covers(device: &dyn BlockDevice) {
    let geometry = device.geometry();
    let (block, size) = (u64::from(geometry.block_bytes), geometry.size_bytes());
    for (offset, len, most) in
        [(0, size, 1), (0, size, usize::MAX), (block, size - block, 3), (size - block, block, 1)]
    {
        let extents = device.status(offset, len, most).expect("status");
        assert!((1..=most).contains(&extents.len()), "{extents:?} where at most {most}");
        let mut at = offset;
        for extent in &extents {
            assert_eq!(extent.offset, at, "{extents:?} are not adjacent");
            assert!(extent.len > 0 && extent.len.is_multiple_of(block), "{extents:?}");
            at += extent.len;
        }
        assert!(at <= offset + len, "{extents:?} pass the end of {len} bytes at {offset}");
    }
}

fn reads_what_was_written(device: &dyn BlockDevice) {
    let geometry = device.geometry();
    let block = u64::from(geometry.block_bytes);
    let last = geometry.size_bytes() - block;
    for (round, fua) in [(1, false), (2, true)] {
        let long = filled(device, 9, round);
        device.write(block, &long, WriteFlags { fua }).expect("a long write");
        let one = block_of(device, round + 100);
        device.write(last, &one, WriteFlags { fua }).expect("a write of the last block");
        device.flush().expect("flush");
        expect(device, block, &long, "a long write");
        expect(device, last, &one, "the last block");
        let extents = device.status(block, block, 1).expect("status");
        assert!(!extents[0].zero && !extents[0].hole, "{extents:?} where data was written");
    }
}

/// Checks buffers at odd addresses, which a device that needs aligned memory has to copy.
fn unaligned_memory(device: &dyn BlockDevice) {
    let block = device.geometry().block_bytes as usize;
    for shift in [1, 8, 513] {
        let mut memory = vec![0; 3 * block + shift];
        fill(&mut memory, shift as u64);
        device.write(0, &memory[shift..], WriteFlags::default()).expect("write from odd memory");
        let mut back = vec![0; 3 * block + shift];
        device.read(0, &mut back[shift..]).expect("read into odd memory");
        assert!(back[shift..] == memory[shift..], "odd memory (+{shift}) was garbled");
    }
}

fn zeroes(device: &dyn BlockDevice) {
    let block = u64::from(device.geometry().block_bytes);
    for flags in zero_flags() {
        let around = filled(device, 8, 7);
        device.write(0, &around, WriteFlags::default()).expect("write");
        let done = device.write_zeroes(2 * block, 3 * block, flags);
        let mut expected = around;
        match kind(&done) {
            None => expected[to_usize(2 * block)..to_usize(5 * block)].fill(0),
            Some(DeviceErrorKind::Unsupported) if flags.fast_only => {}
            Some(_) => panic!("{flags:?}: {done:?}"),
        }
        expect(device, 0, &expected, "the blocks in and around zeroes");
    }
}

fn zero_flags() -> impl Iterator<Item = ZeroFlags> {
    (0..8).map(|bits| ZeroFlags {
        fua: bits & 1 != 0,
        may_unmap: bits & 2 != 0,
        fast_only: bits & 4 != 0,
    })
}

fn discards(device: &dyn BlockDevice) {
    let block = device.geometry().block_bytes as usize;
    let old = filled(device, 8, 21);
    device.write(0, &old, WriteFlags::default()).expect("write");
    device.discard(2 * block as u64, 3 * block as u64).expect("discard");
    let mut now = vec![0; old.len()];
    device.read(0, &mut now).expect("read");
    for (index, (now, old)) in now.chunks(block).zip(old.chunks(block)).enumerate() {
        let gone = (2..5).contains(&index) && now.iter().all(|byte| *byte == 0);
        assert!(now == old || gone, "block {index} is neither its old bytes nor zeroes");
    }
}

fn batches(device: &dyn BlockDevice) {
    let block = u64::from(device.geometry().block_bytes);
    let data: Vec<_> = (0..32).map(|index| block_of(device, 300 + index)).collect();
    let mut batch: Vec<_> = (0..)
        .zip(&data)
        .map(|(index, data)| write_of(index * block, data, index % 8 == 7))
        .collect();
    batch.push(Request::new(Operation::Flush));
    let mut seen = block_of(device, 0);
    batch.push(Request::new(Operation::Read { offset: 5 * block, buf: &mut seen }));
    batch.push(write_of(1, &data[0], false));
    batch.push(Request::new(Operation::WriteZeroes {
        offset: 40 * block,
        len: block,
        flags: ZeroFlags::default(),
    }));
    device.submit(&mut batch);
    let results: Vec<_> = batch.iter_mut().map(|it| it.take_result().expect("a result")).collect();
    for (index, result) in results.iter().enumerate() {
        let expected = (index == 34).then_some(DeviceErrorKind::Misaligned);
        assert_eq!(kind(result), expected, "request {index} of a batch");
    }
    assert!(seen == data[5], "a read after a flush of the same batch is older than the flush");
    for (index, data) in (0..).zip(&data) {
        expect(device, index * block, data, "a block of a batch");
    }
    expect(device, 40 * block, &vec![0; to_usize(block)], "zeroes of a batch");
}

fn write_of(offset: u64, data: &[u8], fua: bool) -> Request<'_> {
    Request::new(Operation::Write { offset, data, flags: WriteFlags { fua } })
}

fn writers_side_by_side(device: &dyn BlockDevice) {
    const THREADS: u64 = 4;
    let block = u64::from(device.geometry().block_bytes);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for round in 0..20 {
                    for index in (thread..LEAST_BLOCKS).step_by(to_usize(THREADS)) {
                        let data = block_of(device, round * 1000 + index);
                        device.write(index * block, &data, WriteFlags::default()).expect("write");
                        expect(device, index * block, &data, "a block of one writer among many");
                    }
                    device.flush().expect("flush");
                }
            });
        }
    });
    for index in 0..LEAST_BLOCKS {
        expect(device, index * block, &block_of(device, 19_000 + index), "the last write");
    }
}

/// Checks that readers of a block always find the data of one of its concurrent writers, whole.
fn one_block_many_threads(device: &dyn BlockDevice) {
    const WRITERS: u64 = 3;
    let choices: Vec<_> = (0..WRITERS).map(|writer| block_of(device, 7000 + writer)).collect();
    device.write(0, &choices[0], WriteFlags::default()).expect("write");
    let look = || {
        let mut now = block_of(device, 0);
        device.read(0, &mut now).expect("read");
        assert!(choices.contains(&now), "a block holds parts of two writes");
    };
    std::thread::scope(|scope| {
        for data in &choices {
            scope.spawn(move || {
                for _ in 0..200 {
                    device.write(0, data, WriteFlags::default()).expect("write");
                }
            });
        }
        scope.spawn(|| (0..400).for_each(|_| look()));
    });
    look();
}

fn expect(device: &dyn BlockDevice, offset: u64, expected: &[u8], what: &str) {
    let mut found = vec![0xEE; expected.len()];
    device.read(offset, &mut found).expect("read");
    if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
        let (found, expected) = (found[at], expected[at]);
        panic!("{what} at {offset}: byte {at} is {found:#04x}, expected {expected:#04x}");
    }
}

fn block_of(device: &dyn BlockDevice, seed: u64) -> Vec<u8> {
    filled(device, 1, seed)
}

fn filled(device: &dyn BlockDevice, blocks: usize, seed: u64) -> Vec<u8> {
    let mut data = vec![0; blocks * device.geometry().block_bytes as usize];
    fill(&mut data, seed);
    data
}

/// Fills `data` with bytes that depend on `seed` and offset; no eight bytes in a row are zero.
pub fn fill(data: &mut [u8], seed: u64) {
    for (index, word) in (0u64..).zip(data.chunks_mut(8)) {
        let mixed = (seed ^ (index << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        word.copy_from_slice(&mixed.to_le_bytes()[..word.len()]);
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("the suite uses small sizes")
}

/// The possible contents of each block of a device: one, or several after an error.
#[derive(Debug)]
pub struct Model {
    block_bytes: usize,
    /// The possible contents by index of the block; a block without an entry holds zeroes.
    blocks: BTreeMap<u64, Vec<Vec<u8>>>,
}

impl Model {
    /// Makes the model of a device full of zeroes.
    pub fn of(device: &dyn BlockDevice) -> Self {
        Self { block_bytes: device.geometry().block_bytes as usize, blocks: BTreeMap::new() }
    }

    /// Notes a write of `data` at `offset` that ended in `result`: afterwards each block is new or,
    /// after an error, old or new.
    pub fn wrote(&mut self, offset: u64, data: &[u8], result: &Result<()>) {
        let first = offset / self.block_bytes as u64;
        for (index, block) in (first..).zip(data.chunks(self.block_bytes)) {
            let old = self.candidates(index);
            let mut now = if result.is_err() { old } else { Vec::new() };
            now.push(block.to_vec());
            self.blocks.insert(index, now);
        }
    }

    /// Notes a discard of `len` bytes at `offset`: afterwards each block is old or zeroes.
    pub fn discarded(&mut self, offset: u64, len: u64) {
        let first = offset / self.block_bytes as u64;
        for index in first..first + len / self.block_bytes as u64 {
            let mut now = self.candidates(index);
            now.push(vec![0; self.block_bytes]);
            self.blocks.insert(index, now);
        }
    }

    /// Checks `data`, read at `offset`, against the possible contents, and keeps only the found
    /// one.
    ///
    /// # Panics
    /// Panics if a block has another content.
    pub fn read(&mut self, offset: u64, data: &[u8]) {
        let first = offset / self.block_bytes as u64;
        for (index, block) in (first..).zip(data.chunks(self.block_bytes)) {
            let may_be = self.candidates(index);
            assert!(
                may_be.iter().any(|one| one == block),
                "block {index} holds none of the {} contents it may hold",
                may_be.len()
            );
            self.blocks.insert(index, vec![block.to_vec()]);
        }
    }

    fn candidates(&self, index: u64) -> Vec<Vec<u8>> {
        self.blocks.get(&index).cloned().unwrap_or_else(|| vec![vec![0; self.block_bytes]])
    }
}
