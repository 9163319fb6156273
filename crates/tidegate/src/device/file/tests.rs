//! Tests of files as devices: the promises of both transfers, and the failures of files.

use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::device::conformance::{self, LEAST_BLOCKS, Promises};
use crate::device::{Context, IoBuffer, OwnedOperation};

const BOTH: [Transfer; 2] = [Transfer::Buffered, Transfer::Direct];

fn options(transfer: Transfer) -> FileOptions {
    FileOptions { transfer, ..FileOptions::default() }
}

fn sized(transfer: Transfer, block_bytes: u32, bytes: u64) -> FileOptions {
    FileOptions { block_bytes: Some(block_bytes), create_bytes: Some(bytes), ..options(transfer) }
}

#[test]
fn both_transfers_conform() {
    for transfer in BOTH {
        for block_bytes in [512, 4096] {
            let dir = tempfile::tempdir().unwrap();
            let options = sized(transfer, block_bytes, 1 << 20);
            let device = FileDevice::open(&dir.path().join("file"), &options).unwrap();
            conformance::check(&device, Promises::default());
            let device: Arc<dyn BlockDevice> = Arc::new(device);
            conformance::check_started(&device, Promises::default());
        }
    }
}

#[test]
fn a_read_only_file_refuses_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    for transfer in BOTH {
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let options = FileOptions { read_only: true, ..options(transfer) };
        conformance::check_read_only(&FileDevice::open(&path, &options).unwrap());
    }
}

#[test]
fn what_one_transfer_writes_the_other_reads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let direct = FileDevice::open(&path, &sized(Transfer::Direct, 4096, 1 << 20)).unwrap();
    let buffered = FileDevice::open(&path, &options(Transfer::Buffered)).unwrap();
    for (one, other, byte) in [(&direct, &buffered, 3), (&buffered, &direct, 4)] {
        one.write(8192, &[byte; 8192], WriteFlags { fua: true }).unwrap();
        let mut now = vec![0; 8192];
        other.read(8192, &mut now).unwrap();
        assert!(now.iter().all(|found| *found == byte));
    }
}

#[test]
fn the_tail_of_a_file_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 4096 * 3 + 100]).unwrap();
    let device = FileDevice::open(&path, &options(Transfer::Buffered)).unwrap();
    assert_eq!(device.geometry().size_bytes(), 4096 * 3);
    device.write_zeroes(0, 4096 * 3, ZeroFlags::default()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[4096 * 3..], [7; 100]);
}

#[test]
fn a_batch_longer_than_a_ring_runs_whole() {
    let dir = tempfile::tempdir().unwrap();
    let blocks = 1000;
    let options = sized(Transfer::Direct, 4096, blocks * 4096);
    let device = FileDevice::open(&dir.path().join("file"), &options).unwrap();
    let data: Vec<_> = (0..blocks).map(|index| vec![index.to_le_bytes()[0] | 1; 4096]).collect();
    let mut batch: Vec<_> = (0..)
        .zip(&data)
        .map(|(index, data)| {
            let (offset, flags) = (index * 4096, WriteFlags::default());
            Request::new(crate::device::Operation::Write { offset, data, flags })
        })
        .collect();
    device.submit(&mut batch);
    assert!(batch.iter().all(|request| matches!(request.result(), Some(Ok(())))));
    let mut now = vec![0; 4096 * usize::try_from(blocks).unwrap()];
    device.read(0, &mut now).unwrap();
    assert!(now == data.concat());
}

#[test]
fn holes_are_found_and_made() {
    let dir = tempfile::tempdir().unwrap();
    for (transfer, name) in BOTH.into_iter().zip(["one", "other"]) {
        let options = sized(transfer, 4096, LEAST_BLOCKS * 4096);
        let device = FileDevice::open(&dir.path().join(name), &options).unwrap();
        let all = device.geometry().size_bytes();
        let hole = |offset, len| Extent { offset, len, hole: true, zero: true };
        assert_eq!(device.status(0, all, 9).unwrap(), [hole(0, all)]);
        device.write(4096 * 4, &[1; 8192], WriteFlags { fua: true }).unwrap();
        let data = Extent::data(4096 * 4, 8192);
        let rest = hole(4096 * 6, all - 4096 * 6);
        assert_eq!(device.status(0, all, 9).unwrap(), [hole(0, 4096 * 4), data, rest]);
        assert_eq!(device.status(0, all, 2).unwrap(), [hole(0, 4096 * 4), data]);
        device.discard(4096 * 4, 8192).unwrap();
        assert_eq!(device.status(0, all, 9).unwrap(), [hole(0, all)]);
    }
}

#[test]
fn a_file_that_was_cut_short_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for (transfer, name) in BOTH.into_iter().zip(["one", "other"]) {
        let path = dir.path().join(name);
        let device = FileDevice::open(&path, &sized(transfer, 4096, 1 << 20)).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8192).unwrap();
        let error = device.read(4096, &mut [0; 8192]).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Io);
        assert!(error.to_string().contains("stopped at offset 8192"), "{error}");
    }
}

#[test]
fn what_is_no_file_is_refused() {
    for path in ["/dev/null", "/dev/full", "/proc"] {
        let error = FileDevice::open(Path::new(path), &options(Transfer::Buffered));
        assert!(error.is_err(), "{path} was opened");
    }
    let missing = FileDevice::open(Path::new("/nonexistent/pool"), &FileOptions::default());
    let error = missing.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Io);
    assert!(error.to_string().contains("/nonexistent/pool"), "{error}");
}

#[test]
fn impossible_block_sizes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (index, block_bytes) in [0, 1, 520, 8192].into_iter().enumerate() {
        let path = dir.path().join(index.to_string());
        let opened = FileDevice::open(&path, &sized(Transfer::Buffered, block_bytes, 1 << 20));
        assert_eq!(opened.map(|_| ()).unwrap_err().kind(), DeviceErrorKind::Unsupported);
        assert!(!path.exists(), "a file was left behind");
    }
}

#[test]
fn an_existing_file_is_not_created_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(FileDevice::open(&path, &sized(Transfer::Buffered, 4096, 1 << 20)).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

/// A device over a file that cannot be written: `/dev/full` answers every write with ENOSPC.
fn full(direct: bool) -> FileDevice {
    let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    let geometry = Geometry::in_memory(4096, 1024).unwrap();
    let path = PathBuf::from("/dev/full");
    let (file, gate) = (RwLock::new(Arc::new(file)), FlushGate::default());
    let backing = Arc::new(Backing { file, path, geometry, gate, reopening: None });
    let direct = direct.then(|| Direct::new(&backing).unwrap());
    FileDevice { engine: OnceLock::new(), backing, direct }
}

#[test]
fn a_full_disk_is_told_and_closes_nothing() {
    for direct in [false, true] {
        let device = full(direct);
        for fua in [false, true] {
            let error = device.write(4096, &[1; 4096], WriteFlags { fua }).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::NoSpace, "{error}");
            let text = error.to_string();
            assert!(text.contains("/dev/full") && text.contains("OS error 28"), "{text}");
        }
        let gate = &device.backing.gate;
        assert_eq!(gate.pass(Call::Flush, gate.now(), || Ok(())), Ok(()));
    }
}

/// `/dev/full` cannot be synced (EINVAL): a real failed `fdatasync`.
#[test]
fn a_failed_flush_is_never_forgotten() {
    for direct in [false, true] {
        let device = full(direct);
        let first = device.flush().unwrap_err().to_string();
        assert!(first.contains("flush of /dev/full failed"), "{first}");
        let again = device.flush().unwrap_err().to_string();
        assert!(again.contains("an earlier flush") && again.contains("reopen"), "{again}");
    }
}

/// Starts `operation` on `device`; the receiver gets the result.
fn start(device: &Arc<FileDevice>, operation: OwnedOperation) -> Receiver<Result<()>> {
    let (told, result) = channel();
    let completion = move |_, result| told.send(result).unwrap();
    Arc::clone(device).start(AsyncRequest::new(operation, Context::default(), completion));
    result
}

fn write_of(offset: u64, byte: u8, fua: bool) -> OwnedOperation {
    let mut buffer = IoBuffer::new(4096);
    buffer.data_mut().fill(byte);
    OwnedOperation::Write { offset, buffer, flags: WriteFlags { fua } }
}

#[test]
fn what_was_started_completes_though_the_device_is_dropped() {
    for transfer in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let device = Arc::new(FileDevice::open(&path, &sized(transfer, 4096, 4 << 20)).unwrap());
        let results: Vec<_> = (0..300)
            .map(|index| start(&device, write_of(index * 4096, 7, index % 9 == 0)))
            .collect();
        drop(device);
        for result in results {
            result.recv().unwrap().unwrap();
        }
        assert!(std::fs::read(&path).unwrap()[..300 * 4096].iter().all(|byte| *byte == 7));
    }
}

/// A completion that drops the last reference drops the device on the thread that ran it.
#[test]
fn the_last_completion_may_drop_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let options = sized(Transfer::Buffered, 4096, 1 << 20);
    let device = Arc::new(FileDevice::open(&dir.path().join("file"), &options).unwrap());
    let (told, result) = channel();
    let last = Arc::clone(&device);
    let completion = move |_, result: Result<()>| {
        drop(last);
        told.send(result).unwrap();
    };
    let request = AsyncRequest::new(write_of(0, 1, false), Context::default(), completion);
    Arc::clone(&device).start(request);
    drop(device);
    result.recv().unwrap().unwrap();
}

#[test]
fn a_failing_disk_fails_each_started_request_and_later_flushes() {
    for direct in [false, true] {
        let device = Arc::new(full(direct));
        let writes: Vec<_> =
            (0..100).map(|index| start(&device, write_of(index * 4096, 1, false))).collect();
        for result in writes {
            assert_eq!(result.recv().unwrap().unwrap_err().kind(), DeviceErrorKind::NoSpace);
        }
        let first = start(&device, OwnedOperation::Flush).recv().unwrap().unwrap_err();
        assert!(first.to_string().contains("flush of /dev/full failed"), "{first}");
        let again = start(&device, OwnedOperation::Flush).recv().unwrap().unwrap_err();
        assert!(again.to_string().contains("an earlier flush"), "{again}");
        let blocking = device.flush().unwrap_err();
        assert!(blocking.to_string().contains("an earlier flush"), "{blocking}");
    }
}

/// Makes a device that opens its file again, and has met a failure.
fn failed_once(path: &Path, options: &FileOptions) -> FileDevice {
    let options = FileOptions { reopens: true, ..options.clone() };
    let device = FileDevice::open(path, &options).unwrap();
    device.backing.gate.fail(Errno::IO);
    let error = device.flush().unwrap_err().to_string();
    assert!(error.contains("an earlier flush"), "{error}");
    device
}

#[test]
fn a_failure_is_told_and_the_file_is_opened_again() {
    for transfer in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let device = failed_once(&path, &sized(transfer, 4096, 1 << 20));
        device.flush().unwrap();
        // This handle cannot be written.
        *device.backing.file.write() = Arc::new(File::open(&path).unwrap());
        device.write(0, &[7; 4096], WriteFlags::default()).unwrap_err();
        device.write(0, &[7; 4096], WriteFlags { fua: true }).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[..4096], [7; 4096]);
    }
}

#[test]
fn another_file_or_a_shorter_one_does_not_take_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("file"), dir.path().join("other"));
    let device = failed_once(&path, &sized(Transfer::Buffered, 4096, 1 << 20));
    std::fs::rename(&path, &other).unwrap();
    let reopening = device.backing.reopening.as_ref().unwrap();
    device.flush().expect_err("there is none");
    device.flush().expect_err("it is not looked for twice in a second");
    reopening.forget_failed();
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    device.flush().expect_err("it is another one");
    reopening.forget_failed();
    std::fs::rename(&other, &path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    device.flush().expect_err("it was cut");
    reopening.forget_failed();
    File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    device.flush().unwrap();
}

/// Replaces the file of `device` by a handle that the kernel flushes with `EBADF`.
fn fail_flushes(device: &FileDevice, path: &Path) {
    let handle = rustix::fs::open(path, OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    *device.backing.file.write() = Arc::new(File::from(handle));
}

/// Flushes by a call or by a started request.
fn flush_by(device: &Arc<FileDevice>, is_started: bool) -> Result<()> {
    if is_started { start(device, OwnedOperation::Flush).recv().unwrap() } else { device.flush() }
}

/// Runs `meanwhile` while a flush of the device runs, which fails then.
fn fail_a_flush(device: &Arc<FileDevice>, meanwhile: impl Fn()) {
    let backing = &device.backing;
    let fails = || {
        meanwhile();
        Err(Errno::IO)
    };
    let failure = backing.gate.pass(Call::Flush, backing.gate.now(), fails).unwrap_err();
    drop(backing.flush_failed(failure));
}

fn opens_again(path: &Path, transfer: Transfer) -> Arc<FileDevice> {
    let options = FileOptions { reopens: true, ..sized(transfer, 4096, 1 << 20) };
    Arc::new(FileDevice::open(path, &options).unwrap())
}

/// The kernel drops what a failed flush could not write, and tells that flush alone.
#[test]
fn a_write_beside_a_failing_flush_fails_the_next_flush_although_the_file_was_reopened() {
    for transfer in BOTH {
        for is_started in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let device = opens_again(&dir.path().join("file"), transfer);
            fail_a_flush(&device, || {
                let write = write_of(4096, 7, false);
                if is_started {
                    start(&device, write).recv().unwrap().unwrap();
                } else {
                    device.write(4096, &[7; 4096], WriteFlags::default()).unwrap();
                }
            });
            let error = flush_by(&device, is_started).unwrap_err().to_string();
            assert!(error.contains("may be lost"), "{error}");
            device.write(4096, &[7; 4096], WriteFlags::default()).unwrap();
            flush_by(&device, is_started).unwrap();
        }
    }
}

#[test]
fn zeroes_beside_a_failing_flush_fail_the_next_flush() {
    for transfer in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let device = opens_again(&dir.path().join("file"), transfer);
        fail_a_flush(&device, || device.write_zeroes(0, 4096, ZeroFlags::default()).unwrap());
        device.flush().expect_err("the zeroes may be lost");
        device.flush().unwrap();
    }
}

#[test]
fn a_write_that_is_under_way_while_a_flush_fails_fails_the_next_flush() {
    let dir = tempfile::tempdir().unwrap();
    let device = opens_again(&dir.path().join("file"), Transfer::Buffered);
    let (begun, _file) = device.backing.begin_write();
    fail_a_flush(&device, || ());
    device.backing.end_write(begun, false).unwrap();
    device.flush().expect_err("it was acknowledged after the failure");
    device.flush().unwrap();
}

/// The data of a forced write is dropped between its write and its flush.
#[test]
fn a_forced_write_whose_data_a_failing_flush_dropped_fails() {
    let dir = tempfile::tempdir().unwrap();
    let device = opens_again(&dir.path().join("file"), Transfer::Buffered);
    let (begun, _file) = device.backing.begin_write();
    fail_a_flush(&device, || ());
    device.backing.end_write(begun, true).expect_err("its data may be lost");
    device.write(0, &[7; 4096], WriteFlags { fua: true }).unwrap();
}

#[test]
fn forced_writes_that_wait_for_a_failing_flush_fail() {
    for is_started in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let device = opens_again(&dir.path().join("file"), Transfer::Buffered);
        let (told, result) = channel();
        fail_a_flush(&device, || {
            let (told, device) = (told.clone(), Arc::clone(&device));
            let waiting = device.backing.gate.asked() + 1;
            let writer = Arc::clone(&device);
            std::thread::spawn(move || {
                let written = if is_started {
                    start(&writer, write_of(0, 7, true)).recv().unwrap()
                } else {
                    writer.write(0, &[7; 4096], WriteFlags { fua: true })
                };
                told.send(written).unwrap();
            });
            while device.backing.gate.asked() < waiting {
                std::thread::yield_now();
            }
        });
        result.recv().unwrap().expect_err("the flush dropped its data");
        flush_by(&device, is_started).unwrap();
    }
}

/// A sync that really fails, and a write that comes before it is told.
#[test]
fn flushes_that_the_kernel_fails_lose_the_writes_before_them() {
    for transfer in BOTH {
        for is_started in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            let device = opens_again(&path, transfer);
            device.write(0, &[7; 4096], WriteFlags::default()).unwrap();
            let called = device.backing.gate.now();
            fail_flushes(&device, &path);
            let error = flush_by(&device, is_started).unwrap_err().to_string();
            assert!(error.contains("flush of"), "{error}");
            device.backing.flush(called).expect_err("it was called before the failure");
            flush_by(&device, is_started).unwrap();
        }
    }
}

/// A loop device, which stands for a disk.
pub(crate) struct LoopDisk(pub(crate) String);

impl LoopDisk {
    pub(crate) fn attach(file: &Path) -> Self {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let made = made.expect("losetup is installed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Self(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// Puts `disk` at the path `link`.
fn plug_in(disk: &LoopDisk, link: &Path) {
    let _ = std::fs::remove_file(link);
    std::os::unix::fs::symlink(&disk.0, link).unwrap();
}

/// Returns the last bytes of a disk, which stand for its own number; zeroes for none.
fn number_on(disk: &File) -> Option<u64> {
    let mut number = [0; 8];
    disk.read_exact_at(&mut number, (1 << 20) - 8).ok()?;
    Some(u64::from_le_bytes(number)).filter(|number| *number != 0)
}

/// Makes disks with the `numbers`.
fn loop_disks(dir: &Path, numbers: &[u64]) -> Vec<LoopDisk> {
    let with_number = |(index, number): (usize, &u64)| {
        let path = dir.join(index.to_string());
        let mut bytes = vec![0; 1 << 20];
        bytes[(1 << 20) - 8..].copy_from_slice(&number.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        LoopDisk::attach(&path)
    };
    numbers.iter().enumerate().map(with_number).collect()
}

#[test]
fn a_disk_that_is_attached_again_is_known_by_its_identity_and_has_lost_unflushed_writes() {
    let dir = tempfile::tempdir().unwrap();
    let disks = loop_disks(dir.path(), &[7, 8, 0, 7]);
    let link = dir.path().join("disk");
    plug_in(&disks[0], &link);
    let options = FileOptions { identify: Some(number_on), ..options(Transfer::Buffered) };
    let device = failed_once(&link, &options);
    device.flush().expect("the disk is there");
    for other in &disks[1..3] {
        plug_in(other, &link);
        device.backing.gate.fail(Errno::IO);
        device.backing.suspect();
        device.flush().expect_err("it is another disk");
        device.backing.reopening.as_ref().unwrap().forget_failed();
    }
    device.backing.gate.reopen();
    plug_in(&disks[3], &link);
    device.backing.gate.wrote(device.backing.gate.now());
    let error = device.flush().unwrap_err().to_string();
    assert!(error.contains("may be lost"), "{error}");
    device.write(0, &[9; 4096], WriteFlags { fua: true }).unwrap();
    assert_eq!(std::fs::read(dir.path().join("3")).unwrap()[..4096], [9; 4096]);
    assert_eq!(std::fs::read(dir.path().join("0")).unwrap()[..4096], [0; 4096]);
}

#[test]
fn a_disk_without_an_identity_is_not_taken_back_under_another_number() {
    let dir = tempfile::tempdir().unwrap();
    let disks = loop_disks(dir.path(), &[0, 0]);
    let link = dir.path().join("disk");
    for identify in [None, Some(number_on as fn(&File) -> Option<u64>)] {
        plug_in(&disks[0], &link);
        let device = failed_once(&link, &FileOptions { identify, ..options(Transfer::Buffered) });
        plug_in(&disks[1], &link);
        device.flush().expect_err("nothing tells that it is the same");
        device.backing.reopening.as_ref().unwrap().forget_failed();
        plug_in(&disks[0], &link);
        device.flush().unwrap();
    }
}
