//! The facts that sysfs and the partition table tell of a disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use uuid::Uuid;

use super::areas::Areas;
use super::facts::{Facts, Partition, said};
use super::loops;
use super::sysfs::{SECTOR_BYTES, folder_of, number, open, whole_of};

/// Collects the facts about the disk `file`.
pub(super) fn facts_of(file: &File) -> io::Result<Facts> {
    let size_bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
    let folder = folder_of(&file.metadata()?);
    let (is_partition, whole) = (folder.join("partition").exists(), whole_of(&folder));
    Ok(Facts {
        said: said(|name| std::fs::read(whole.join(name)).ok()),
        looped: loops::looped(file, &whole),
        partition: is_partition.then(|| partition(&folder, &whole)),
        content: Areas::of_file(file, size_bytes)?.content(),
        size_bytes,
    })
}

/// Describes the partition in `folder` of the disk in `whole`.
fn partition(folder: &Path, whole: &Path) -> Partition {
    let number_of = |name| number(&folder.join(name)).unwrap_or_default();
    let partition = u32::try_from(number_of("partition")).unwrap_or_default();
    let uuid = event_value(folder, "PARTUUID").or_else(|| uuid_in_table(whole, partition));
    Partition { number: partition, start: number_of("start") * SECTOR_BYTES, uuid }
}

/// Returns the PARTUUID of the partition `number`, from the table on the disk in `whole`. Kernels
/// before 6.12 do not tell it in sysfs.
fn uuid_in_table(whole: &Path, number: u32) -> Option<String> {
    let sector = self::number(&whole.join("queue/logical_block_size"))?;
    let file = open(&Path::new("/dev").join(event_value(whole, "DEVNAME")?))?;
    let found = file.metadata().ok().filter(|it| it.file_type().is_block_device())?;
    if folder_of(&found).canonicalize().ok()? != whole.canonicalize().ok()? {
        return None;
    }
    let mut header = [0; 92];
    file.read_exact_at(&mut header, sector).ok()?;
    if header.starts_with(b"EFI PART") {
        uuid_in_gpt(&file, &header, sector, number)
    } else {
        number_in_mbr(&file, number)
    }
}

fn uuid_in_gpt(file: &File, header: &[u8; 92], sector: u64, number: u32) -> Option<String> {
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
    let first = u64::from_le_bytes(header[72..80].try_into().ok()?);
    let (entries, entry_bytes) = (word(80), word(84));
    let index = number.checked_sub(1).filter(|index| *index < entries)?;
    let at = first.checked_mul(sector)?;
    let at = at.checked_add(u64::from(index) * u64::from(entry_bytes))?.checked_add(16)?;
    let mut uuid = [0; 16];
    file.read_exact_at(&mut uuid, at).ok()?;
    (uuid != [0; 16]).then(|| Uuid::from_bytes_le(uuid).to_string())
}

fn number_in_mbr(file: &File, number: u32) -> Option<String> {
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, 0).ok()?;
    let disk = u32::from_le_bytes(sector[440..444].try_into().ok()?);
    (sector.ends_with(b"\x55\xaa") && disk != 0).then(|| format!("{disk:08x}-{number:02x}"))
}

/// Returns the value of `key` in the event that the kernel sent for the disk in `folder`.
fn event_value(folder: &Path, key: &str) -> Option<String> {
    let event = std::fs::read_to_string(folder.join("uevent")).ok()?;
    let of_line = |line: &str| line.strip_prefix(key)?.strip_prefix('=').map(str::to_owned);
    event.lines().find_map(of_line)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_of_a_partition_is_read_from_its_table() {
        for sector in [512, 4096] {
            let file = tempfile::tempfile().unwrap();
            let mut header = [0; 92];
            header[..8].copy_from_slice(b"EFI PART");
            header[72..80].copy_from_slice(&2_u64.to_le_bytes());
            header[80..84].copy_from_slice(&4_u32.to_le_bytes());
            header[84..88].copy_from_slice(&128_u32.to_le_bytes());
            let uuid = Uuid::from_u128(0x0fc6_3daf_8483_4772_8e79_3d69_d847_7de4);
            file.set_len(1 << 20).unwrap();
            file.write_all_at(&uuid.to_bytes_le(), 2 * sector + 128 + 16).unwrap();
            let read = |number| uuid_in_gpt(&file, &header, sector, number);
            assert_eq!(read(2).as_deref(), Some("0fc63daf-8483-4772-8e79-3d69d8477de4"));
            assert_eq!((read(1), read(0), read(5)), (None, None, None));
            header[72..80].fill(0xFF);
            assert_eq!(uuid_in_gpt(&file, &header, sector, 2), None, "a hostile table");
        }
    }

    #[test]
    fn the_number_of_a_partition_is_read_from_an_mbr_that_has_one() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(512).unwrap();
        file.write_all_at(b"\x55\xaa", 510).unwrap();
        assert_eq!(number_in_mbr(&file, 1), None);
        file.write_all_at(&0xdead_beef_u32.to_le_bytes(), 440).unwrap();
        assert_eq!(number_in_mbr(&file, 1).as_deref(), Some("deadbeef-01"));
    }
}
