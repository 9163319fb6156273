//! The content of a file or disk, guessed from its first and last bytes, for files and disks that
//! cannot be mapped or must not be locked.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;

use super::content::Content;
use super::error::PoolError;
use super::layout::PAGE_BYTES;
use super::superblock::{CopyFault, look, page_floor, read_copy};
use crate::btt::{self, Version};
use crate::device::{BlockDevice, BlockDeviceExt, DeviceError, DeviceErrorKind};
use crate::pmem::Region;
use crate::tier::EngineCode;

/// All headers and signatures lie below this offset, or in the last page.
const START_BYTES: u64 = 128 << 10;
/// The superblock and the info block of a block translation table lie below this offset.
const HEADER_BYTES: u64 = 2 * PAGE_BYTES;

/// The content of a file or disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Glance {
    /// A block translation table.
    Btt(Version),
    /// A pool with a Tidegate superblock; `None` if the superblock is damaged.
    Tidegate(Option<EngineCode>),
    /// No pool, but other content.
    Unknown(Content),
}

/// Identifies the content of the file or block device `file`. Only opening a pool shows whether it
/// is complete.
///
/// # Errors
/// Fails if `file` cannot be read.
pub fn glance(file: &File) -> io::Result<Glance> {
    let size = rustix::fs::seek(file, SeekFrom::End(0))?;
    look_at_ends(size, |bytes, at| file.read_exact_at(bytes, at), io::Error::other)
}

/// Identifies the content of `device`, like [`glance`] for a file.
///
/// # Errors
/// Fails if `device` cannot be read.
pub fn glance_device(device: &dyn BlockDevice) -> Result<Glance, DeviceError> {
    let size = device.geometry().size_bytes();
    let context = "cannot tell what the device holds";
    let failed = |error| DeviceError::with_source(DeviceErrorKind::Io, context, error);
    look_at_ends(size, |bytes, at| device.read(at, bytes), failed)
}

/// Identifies content of `size` bytes by its ends. `read` reads bytes at an offset, and `failed`
/// converts other errors to errors of `read`.
fn look_at_ends<E>(
    size: u64,
    read: impl Fn(&mut [u8], u64) -> Result<(), E>,
    failed: impl Fn(PoolError) -> E,
) -> Result<Glance, E> {
    let copy = |at: u64, len: u64, ends: &Region, to: u64| {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        read(&mut bytes, at)?;
        ends.write(to, &bytes).map_err(|error| failed(error.into()))
    };
    let ends = Region::anonymous(START_BYTES + PAGE_BYTES).map_err(|error| failed(error.into()))?;
    // Most often the content is a Tidegate pool, and the rest need not be read.
    let header_bytes = size.min(HEADER_BYTES);
    copy(0, header_bytes, &ends, 0)?;
    if let Some(found) = tell_by_header(&ends).map_err(&failed)? {
        return Ok(found);
    }
    copy(header_bytes, size.min(START_BYTES) - header_bytes, &ends, header_bytes)?;
    if size >= PAGE_BYTES {
        copy(page_floor(size) - PAGE_BYTES, PAGE_BYTES, &ends, START_BYTES)?;
    }
    tell(&ends).map_err(failed)
}

/// Identifies content that the first bytes determine by themselves.
fn tell_by_header(ends: &Region) -> Result<Option<Glance>, PoolError> {
    if let Some(version) = btt::probe(ends)? {
        return Ok(Some(Glance::Btt(version)));
    }
    let copy = read_copy(ends, 0)?.ok();
    Ok(copy.map(|copy| Glance::Tidegate(Some(EngineCode(copy.engine.get())))))
}

/// Identifies content like [`identify`](super::identify), but without the bytes between the ends.
/// The header was not recognized before.
fn tell(ends: &Region) -> Result<Glance, PoolError> {
    let found = look(ends)?;
    Ok(match (read_copy(ends, 0)?, read_copy(ends, START_BYTES)?) {
        // A second copy may outlive its pool.
        (Err(CopyFault::NoMagic), _) if found.is_foreign() => Glance::Unknown(found),
        (_, Ok(copy)) => Glance::Tidegate(Some(EngineCode(copy.engine.get()))),
        (Err(CopyFault::NoMagic), Err(CopyFault::NoMagic)) => Glance::Unknown(found),
        (_, Err(_)) => Glance::Tidegate(None),
    })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::btt::BttOptions;
    use crate::pmem::RegionOptions;
    use crate::pool::{Superblock, erase};

    #[test]
    fn pools_are_recognized_without_a_mapping() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let seen = || glance(file.as_file()).unwrap();
        assert_eq!(seen(), Glance::Unknown(Content::Zeroes), "an empty file");
        file.as_file().set_len((20 << 20) + 100).unwrap();
        assert_eq!(seen(), Glance::Unknown(Content::Zeroes));
        let region = Region::open(file.path(), &RegionOptions::default()).unwrap();
        btt::create(&region, &BttOptions::default()).unwrap();
        assert_eq!(seen(), Glance::Btt(Version::V1_1));
        erase(&region).unwrap();
        for engine in [1, 2].map(EngineCode) {
            Superblock::plan(&region, engine, Uuid::nil(), 4096).unwrap().write(&region).unwrap();
            assert_eq!(seen(), Glance::Tidegate(Some(engine)));
        }
        region.write(500, &[1]).unwrap();
        assert_eq!(seen(), Glance::Tidegate(Some(EngineCode(2))), "by the second superblock");
        region.write((20 << 20) - 500, &[1]).unwrap();
        assert_eq!(seen(), Glance::Tidegate(None));
    }

    #[test]
    fn a_second_superblock_under_foreign_data_is_no_pool() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let region = Region::open(file.path(), &RegionOptions::default()).unwrap();
        Superblock::plan(&region, EngineCode(2), Uuid::nil(), 4096)
            .unwrap()
            .write(&region)
            .unwrap();
        region.write(0, &[0; 4096]).unwrap();
        region.write(1080, b"\x53\xef").unwrap();
        assert!(matches!(glance(file.as_file()).unwrap(), Glance::Unknown(Content::Known(_))));
    }
}
