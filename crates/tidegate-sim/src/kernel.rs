//! The recovery and reads of a BTT by other implementations: second judges of our images.
//!
//! Written from the format and from the behavior of `drivers/nvdimm/btt.c` of Linux 6.x and
//! libpmemblk 1.12; it shares no code with the engine. It supports one arena.
//!
//! Where they differ: Linux compares map and flog without flag bits and, when it completes a map
//! entry, marks it normal. libpmemblk compares and stores entries including flags, so that a flog
//! entry without flags never matches a map entry: libpmemblk cannot complete interrupted writes in
//! the BTTs of Linux. Tidegate writes the flags in a pool of libpmemblk only.

use std::ops::Range;

const PAGE: usize = 4096;
const ZERO: u32 = 1 << 31;
const ERROR: u32 = 1 << 30;
const NORMAL: u32 = ZERO | ERROR;
const BLOCK: u32 = !NORMAL;

/// The implementation whose rules are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// The Linux kernel.
    Linux,
    /// libpmemblk of PMDK 1.
    Libpmemblk,
}

/// The parts of an arena, in bytes from the start of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The data blocks.
    pub data: Range<usize>,
    /// The map.
    pub map: Range<usize>,
    /// The flog.
    pub flog: Range<usize>,
    block_bytes: usize,
    stride_bytes: usize,
    lbas: u32,
    blocks: u32,
    lanes: u32,
}

/// A flog slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    lba: u32,
    old_map: u32,
    new_map: u32,
    seq: u32,
}

fn u32_at(image: &[u8], at: usize) -> Result<u32, String> {
    let bytes = image.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_le_bytes).ok_or_else(|| format!("offset {at} is outside the image"))
}

fn size_at(image: &[u8], at: usize) -> Result<usize, String> {
    let (low, high) = (u32_at(image, at)?, u32_at(image, at + 4)?);
    usize::try_from(u64::from(high) << 32 | u64::from(low)).map_err(|error| error.to_string())
}

fn fletcher64(page: &[u8]) -> u64 {
    let (words, _) = page[..PAGE - 8].as_chunks::<4>();
    let (lo, hi) = words.iter().chain(&[[0; 4]; 2]).fold((0_u32, 0_u32), |(lo, hi), word| {
        let lo = lo.wrapping_add(u32::from_le_bytes(*word));
        (lo, hi.wrapping_add(lo))
    });
    u64::from(hi) << 32 | u64::from(lo)
}

impl Layout {
    /// Finds the arena: version 1.1 at 4 KiB, else version 2.0 at 0, or at 8 KiB in a pool of
    /// libpmemblk.
    ///
    /// # Errors
    /// Describes the first field that does not fit the format.
    pub fn find(image: &[u8]) -> Result<Self, String> {
        let is_libpmemblk = image.starts_with(b"PMEMBLK\0");
        let in_libpmemblk = &[(2 * PAGE, (1, 1))];
        let others = &[(PAGE, (1, 1)), (0, (2, 0))];
        let candidates = if is_libpmemblk { &in_libpmemblk[..] } else { &others[..] };
        let mut found = candidates.iter().filter_map(|&(base, version)| {
            let page = image.get(base..base + PAGE)?;
            page.starts_with(b"BTT_ARENA_INFO\0\0").then_some((base, page, version))
        });
        let (base, page, version) = found.next().ok_or("no arena")?;
        let numbers =
            (u16::from_le_bytes([page[52], page[53]]), u16::from_le_bytes([page[54], page[55]]));
        if numbers != version {
            return Err(format!("version {numbers:?} where {version:?} is expected"));
        }
        if size_at(page, PAGE - 8)? as u64 != fletcher64(page) {
            return Err("the info block's checksum is wrong".to_owned());
        }
        let layout = Self::parse(page, base)?;
        let lba_bytes = u32_at(page, 56)? as usize;
        let block_bytes = if is_libpmemblk { lba_bytes } else { layout.block_bytes };
        Ok(Self { block_bytes, ..layout })
    }

    fn parse(page: &[u8], base: usize) -> Result<Self, String> {
        let field = |at| u32_at(page, at);
        let part = |at, bytes: usize| {
            let start = base + size_at(page, at)?;
            Ok::<_, String>(start..start + bytes)
        };
        let (lbas, stride, blocks, lanes) = (field(60)?, field(64)?, field(68)?, field(72)?);
        let stride_bytes = stride as usize;
        Ok(Self {
            data: part(88, blocks as usize * stride_bytes)?,
            map: part(96, lbas as usize * 4)?,
            flog: part(104, lanes as usize * 64)?,
            block_bytes: if field(56)? >= 4096 { 4096 } else { 512 },
            stride_bytes,
            lbas,
            blocks,
            lanes,
        })
    }

    fn map_entry(&self, image: &[u8], lba: u32) -> Result<u32, String> {
        if lba >= self.lbas {
            return Err(format!("lba {lba} is outside the {} lbas", self.lbas));
        }
        u32_at(image, self.map.start + lba as usize * 4)
    }

    /// Returns the map entry with the initial state resolved; a normal entry has both flags set.
    fn resolved(&self, image: &[u8], lba: u32) -> Result<u32, String> {
        let entry = self.map_entry(image, lba)?;
        Ok(if entry & NORMAL == 0 { lba | NORMAL } else { entry })
    }

    fn slot(&self, image: &[u8], lane: u32, index: usize) -> Result<Slot, String> {
        let at = self.flog.start + lane as usize * 64 + index * 16;
        let field = |number: usize| u32_at(image, at + number * 4);
        Ok(Slot { lba: field(0)?, old_map: field(1)?, new_map: field(2)?, seq: field(3)? })
    }

    /// Finds the two slots in use of each group as the kernel does: those that are not zero.
    fn slots_in_use(&self, image: &[u8]) -> Result<[usize; 2], String> {
        let mut pair = None;
        for lane in 0..self.lanes {
            let mut used = [false; 4];
            for (index, used) in used.iter_mut().enumerate() {
                let Slot { lba, old_map, new_map, seq } = self.slot(image, lane, index)?;
                *used = [lba, old_map, new_map, seq] != [0; 4];
            }
            let second = match used {
                [true, false, false, false] => continue,
                [true, true, false, false] => 1,
                [true, false, true, false] => 2,
                _ => return Err(format!("flog of lane {lane}: slots in use: {used:?}")),
            };
            if *pair.get_or_insert(second) != second {
                return Err(format!("flog of lane {lane} is padded unlike the lanes before it"));
            }
        }
        Ok([0, pair.unwrap_or(1)])
    }

    fn newest(&self, image: &[u8], lane: u32, slots: [usize; 2]) -> Result<Slot, String> {
        let [first, second] =
            [self.slot(image, lane, slots[0])?, self.slot(image, lane, slots[1])?];
        match (first.seq, second.seq) {
            (1..=3, 0) | (2, 1) | (3, 2) | (1, 3) => Ok(first),
            (0, 1..=3) | (1, 2) | (2, 3) | (3, 1) => Ok(second),
            pair => Err(format!("flog of lane {lane}: sequence numbers {pair:?}")),
        }
    }
}

/// Recovers `image` in place as `dialect` does, and returns the free block of each lane.
fn recover(image: &mut [u8], layout: &Layout, dialect: Dialect) -> Result<Vec<u32>, String> {
    let slots = layout.slots_in_use(image)?;
    let mut free = Vec::new();
    for lane in 0..layout.lanes {
        let newest = layout.newest(image, lane, slots)?;
        free.push(newest.old_map & BLOCK);
        if newest.old_map & BLOCK != newest.new_map & BLOCK {
            complete(image, layout, newest, dialect)?;
        }
    }
    Ok(free)
}

/// Completes the map entry of a write whose flog entry is valid, if the map still holds the old
/// one.
fn complete(
    image: &mut [u8],
    layout: &Layout,
    newest: Slot,
    dialect: Dialect,
) -> Result<(), String> {
    let entry = layout.resolved(image, newest.lba)?;
    let seen = |value: u32| if dialect == Dialect::Linux { value & BLOCK } else { value };
    if seen(newest.old_map) == seen(entry) && seen(newest.new_map) != seen(entry) {
        let completed = match dialect {
            Dialect::Linux => newest.new_map & BLOCK | NORMAL,
            Dialect::Libpmemblk => newest.new_map,
        };
        let at = layout.map.start + newest.lba as usize * 4;
        image[at..at + 4].copy_from_slice(&completed.to_le_bytes());
    }
    Ok(())
}

/// Rewrites the flog of `image` as libpmemblk would have written it: with the flag bits of the map
/// entries.
///
/// # Errors
/// Describes the first field that does not fit the format.
pub fn add_flags_to_flog(image: &mut [u8]) -> Result<(), String> {
    let layout = Layout::find(image)?;
    for lane in 0..layout.lanes {
        for index in layout.slots_in_use(image)? {
            let Slot { lba, old_map, new_map, seq } = layout.slot(image, lane, index)?;
            if seq == 0 || old_map == new_map {
                continue;
            }
            let entry = layout.resolved(image, lba)?;
            let replaced = if entry & BLOCK == old_map & BLOCK { entry } else { old_map | NORMAL };
            let at = layout.flog.start + lane as usize * 64 + index * 16;
            image[at + 4..at + 8].copy_from_slice(&replaced.to_le_bytes());
            image[at + 8..at + 12].copy_from_slice(&(new_map | NORMAL).to_le_bytes());
        }
    }
    Ok(())
}

/// Checks that every block belongs to one lba or is free in one lane.
fn audit(image: &[u8], layout: &Layout, free: &[u32]) -> Result<(), String> {
    let mut owned = vec![false; layout.blocks as usize];
    for lba in 0..layout.lbas {
        own(&mut owned, layout.resolved(image, lba)? & BLOCK)
            .map_err(|fault| format!("lba {lba}: {fault}"))?;
    }
    for (lane, &block) in free.iter().enumerate() {
        own(&mut owned, block).map_err(|fault| format!("lane {lane}: {fault}"))?;
    }
    match owned.iter().position(|owned| !owned) {
        None => Ok(()),
        Some(block) => Err(format!("block {block} belongs to no lba and no lane")),
    }
}

fn own(owned: &mut [bool], block: u32) -> Result<(), String> {
    let blocks = owned.len();
    let owned = owned
        .get_mut(block as usize)
        .ok_or_else(|| format!("block {block} is outside the {blocks} blocks"))?;
    if std::mem::replace(owned, true) {
        return Err(format!("block {block} belongs to an earlier lba or lane, too"));
    }
    Ok(())
}

/// Recovers `image` in place as `dialect` does, and returns the blocks that a reader sees.
///
/// # Errors
/// Describes a fault that the implementation would refuse, and blocks that are lost or owned twice.
pub fn recover_and_read(image: &mut [u8], dialect: Dialect) -> Result<Vec<u8>, String> {
    let layout = Layout::find(image)?;
    let free = recover(image, &layout, dialect)?;
    audit(image, &layout, &free)?;
    let mut blocks = Vec::with_capacity(layout.lbas as usize * layout.block_bytes);
    (0..layout.lbas).try_for_each(|lba| read(image, &layout, lba, &mut blocks))?;
    Ok(blocks)
}

fn read(image: &[u8], layout: &Layout, lba: u32, blocks: &mut Vec<u8>) -> Result<(), String> {
    let entry = layout.resolved(image, lba)?;
    let start = layout.data.start + (entry & BLOCK) as usize * layout.stride_bytes;
    match entry & NORMAL {
        ZERO => blocks.resize(blocks.len() + layout.block_bytes, 0),
        ERROR => return Err(format!("lba {lba} is marked as lost")),
        _ => blocks.extend_from_slice(
            image
                .get(start..start + layout.block_bytes)
                .ok_or_else(|| format!("lba {lba} points outside the image"))?,
        ),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tidegate::btt::{FlogSlots, Version};

    use super::*;
    use crate::explore::Pool;
    use crate::history::stamp_of;
    use crate::subject::BttSubject;

    fn image(version: Version, slots: FlogSlots) -> (Vec<u8>, Layout) {
        let subject = BttSubject::new(20, 3, version, slots);
        let image = Pool::prepare(&subject, &[0, 1, 2, 0, 1, 1, 0]).unwrap().image;
        let layout = Layout::find(&image).unwrap();
        (image, layout)
    }

    fn put(image: &mut [u8], at: usize, value: u32) {
        image[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    #[test]
    fn both_versions_and_paddings_are_read() {
        for version in [Version::V1_1, Version::V2_0] {
            for slots in [FlogSlots::ZeroOne, FlogSlots::ZeroTwo] {
                let (mut image, _) = image(version, slots);
                let blocks = recover_and_read(&mut image, Dialect::Linux).unwrap();
                let stamps: Vec<_> = (0..4)
                    .zip(blocks.chunks(512))
                    .map(|(lba, block)| stamp_of(lba, block))
                    .collect();
                assert_eq!(stamps, [7, 6, 3, 0].map(Some), "{version} {slots:?}");
            }
        }
    }

    /// Reverts the map entry of the newest write: block 0, stamp 7; the one before had stamp 4.
    fn cut_off(image: &mut [u8], layout: &Layout) {
        let slots = layout.slots_in_use(image).unwrap();
        let newest = (0..layout.lanes).map(|lane| layout.newest(image, lane, slots).unwrap());
        let entry = layout.map_entry(image, 0).unwrap() & BLOCK;
        let write = newest.into_iter().find(|slot| slot.new_map & BLOCK == entry).unwrap();
        put(image, layout.map.start, write.old_map | NORMAL);
    }

    #[test]
    fn an_interrupted_write_is_completed_by_who_understands_its_flog() {
        let (mut cut, layout) = image(Version::V1_1, FlogSlots::ZeroOne);
        cut_off(&mut cut, &layout);
        let first = |mut image: Vec<u8>, dialect| {
            recover_and_read(&mut image, dialect).map(|blocks| stamp_of(0, &blocks[..512]))
        };
        assert_eq!(first(cut.clone(), Dialect::Linux), Ok(Some(7)));
        first(cut.clone(), Dialect::Libpmemblk).unwrap_err();
        add_flags_to_flog(&mut cut).unwrap();
        assert_eq!(first(cut.clone(), Dialect::Linux), Ok(Some(7)));
        assert_eq!(first(cut, Dialect::Libpmemblk), Ok(Some(7)));
    }

    #[test]
    fn blocks_owned_twice_or_outside_are_told() {
        let (good, layout) = image(Version::V1_1, FlogSlots::ZeroOne);
        for wrong in [layout.map_entry(&good, 1).unwrap(), NORMAL | layout.blocks] {
            let mut image = good.clone();
            put(&mut image, layout.map.start, wrong);
            recover_and_read(&mut image, Dialect::Linux).unwrap_err();
        }
    }

    #[test]
    fn a_damaged_flog_or_info_block_is_told() {
        let (good, layout) = image(Version::V1_1, FlogSlots::ZeroOne);
        for at in [layout.flog.start + 12, layout.flog.start + 60, PAGE + 60] {
            let mut image = good.clone();
            put(&mut image, at, 9);
            recover_and_read(&mut image, Dialect::Linux).unwrap_err();
        }
    }
}
