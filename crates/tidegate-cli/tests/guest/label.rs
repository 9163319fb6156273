//! The label area of an NVDIMM: an empty index, so that the kernel lets namespaces be made.
//!
//! Only a labelled namespace can hold a BTT 2.0 for the kernel (UEFI 2.7, section 13.19): the label
//! names the version. The index has two copies; one valid copy is enough.

use std::fs::OpenOptions;
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Size of the label area in bytes: the least that QEMU takes.
pub(crate) const LABEL_AREA_BYTES: u64 = 128 * 1024;
const INDEX_BYTES: u64 = 256;
const LABEL_BYTES: u64 = 256;
const CHECKSUM_OFFSET: usize = 64;

/// Writes an index without labels to the end of the NVDIMM's file.
pub(crate) fn initialise(nvdimm: &Path) -> Result<()> {
    let file = OpenOptions::new().write(true).open(nvdimm)?;
    file.write_all_at(&index(), file.metadata()?.len() - LABEL_AREA_BYTES)
}

/// The first copy of the index, version 1.2, all labels free.
fn index() -> Vec<u8> {
    let labels = (LABEL_AREA_BYTES - 2 * INDEX_BYTES) / LABEL_BYTES;
    let mut index = b"NAMESPACE_INDEX\0".to_vec();
    index.extend([0, 0, 0, 1]); // flags; labels of 128 << 1 bytes
    index.extend(1_u32.to_le_bytes()); // sequence
    for field in [0, INDEX_BYTES, INDEX_BYTES, 2 * INDEX_BYTES] {
        index.extend(field.to_le_bytes()); // own offset and size, other copy's offset, labels' offset
    }
    index.extend(u32::try_from(labels).expect("a few hundred").to_le_bytes());
    index.extend([1, 0, 2, 0]); // version 1.2
    index.extend(0_u64.to_le_bytes()); // checksum
    index.extend((0..labels.div_ceil(8)).map(|byte| free_bits(labels - byte * 8)));
    index.resize(usize::try_from(INDEX_BYTES).expect("small"), 0);
    let checksum = fletcher64(&index);
    index[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
    index
}

/// A byte of the free bitmap, of which `left` bits are labels.
fn free_bits(left: u64) -> u8 {
    u8::MAX >> (8 - left.min(8))
}

fn fletcher64(bytes: &[u8]) -> u64 {
    let (mut low, mut high) = (0_u32, 0_u32);
    for word in bytes.chunks_exact(4) {
        low = low.wrapping_add(u32::from_le_bytes(word.try_into().expect("four bytes")));
        high = high.wrapping_add(low);
    }
    u64::from(high) << 32 | u64::from(low)
}
