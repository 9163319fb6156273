//! Damage of the log while it is served, and backings that do not take single blocks.

use super::super::{LogOptions, create};
use super::*;
use crate::device::WriteFlags;
use crate::device::memory::MemoryDevice;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::pmem::Region;
use crate::tier::Tier;

const BLOCK: usize = 4096;

fn region(bytes: u64) -> Arc<Region> {
    let region = Arc::new(Region::anonymous(bytes).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    region
}

fn backing() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(4096, 1024).unwrap())
}

fn try_open(
    region: &Arc<Region>,
    backing: Arc<dyn BlockDevice>,
) -> std::result::Result<LogDevice, LogDeviceError> {
    let pool = LogPool::open(Arc::clone(region)).unwrap();
    let options = LogDeviceOptions { no_thread: true, ..LogDeviceOptions::default() };
    LogDevice::open(pool, backing, Binding::unnamed(1), options)
}

fn write(device: &dyn BlockDevice, lba: usize, byte: u8) -> Result<()> {
    device.write((lba * BLOCK) as u64, &[byte; BLOCK], WriteFlags::default())
}

fn read(device: &dyn BlockDevice, lba: usize) -> u8 {
    let mut block = [0; BLOCK];
    device.read((lba * BLOCK) as u64, &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]), "a torn block");
    block[0]
}

/// Returns the position of the newest data of a block in the log.
fn data_of(device: &LogDevice, lba: u64) -> u64 {
    match device.core.index.find(lba, device.core.ring.tail()) {
        index::Location::Log(at) => at,
        other => panic!("block {lba} is at {other:?}"),
    }
}

fn damage(device: &LogDevice, position: u64) {
    let pool = device.core.ring.pool();
    pool.region().write(pool.region_offset(position), b"\x5a\xa5FLIPPED\x5a\xa5").unwrap();
}

#[test]
fn a_record_without_its_header_is_not_passed() {
    for newer in [0, 1] {
        let (region, backing) = (region(1 << 20), backing());
        let device = try_open(&region, backing.clone()).unwrap();
        write(&device, 1, 1).unwrap();
        write(&device, 2, 2).unwrap();
        // The last record, or one before another.
        (0..newer).for_each(|_| write(&device, 3, 3).unwrap());
        let lost = data_of(&device, 2) - RECORD_ALIGN_BYTES;
        damage(&device, lost);
        for _ in 0..2 {
            let error = device.drain().unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::Corrupt);
            assert!(error.to_string().contains(&format!("position {lost} ")), "{error}");
            device.flush().expect_err("what was acknowledged is lost");
            assert!(device.core.ring.tail() <= lost);
        }
        drop(device);
        let refused = try_open(&region, backing).err().unwrap();
        assert!(matches!(refused, LogDeviceError::Lost { .. }), "{refused}");
    }
}

#[test]
fn damaged_bytes_do_not_reach_the_backing() {
    let (region, backing) = (region(1 << 20), backing());
    let device = try_open(&region, backing.clone()).unwrap();
    device.write(0, &[2; 3 * BLOCK], WriteFlags::default()).unwrap();
    write(&device, 3, 3).unwrap();
    damage(&device, data_of(&device, 1) + 100);
    let error = device.drain().unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Corrupt);
    assert!(error.to_string().contains("12288 bytes at offset 0"), "{error}");
    device.flush().expect_err("what was acknowledged is damaged");
    assert_eq!(read(backing.as_ref(), 1), 0);
    // Newer versions of all of its blocks make the record needless.
    device.write(0, &[4; 3 * BLOCK], WriteFlags::default()).unwrap();
    device.drain().unwrap();
    assert_eq!([0, 1, 2, 3].map(|lba| read(backing.as_ref(), lba)), [4, 4, 4, 3]);
}
