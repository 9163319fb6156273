//! Memory of a virtual machine that is mapped here.
//!
//! Invariants:
//! 1. All access is by copies to and from checked addresses: there are no references to memory
//!    that a guest changes.
//! 2. A file that is shortened while it is mapped ends no process.

use std::fs::File;
use std::io;

use rustix::fs::fstatfs;
use tidegate::pmem::FaultWatch;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// The file system of huge pages: `HUGETLBFS_MAGIC`.
const HUGE_PAGES: i64 = 0x9584_58f6;

/// A part of a file that is memory of the machine.
pub(super) struct Part {
    pub(super) file: File,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Address for the guest.
    pub(super) guest_address: u64,
    /// Address for the machine's monitor.
    pub(super) user_address: u64,
}

/// The memory of a machine.
pub(super) struct Guest {
    /// Dropped first: the mappings outlive the watches.
    watches: Vec<FaultWatch>,
    memory: GuestMemoryMmap,
    /// User address, size and guest address of each part.
    places: Vec<(u64, u64, u64)>,
}

impl Guest {
    /// Maps all `parts`.
    ///
    /// # Errors
    /// Parts overlap, or are longer than their files, or the system refuses.
    pub(super) fn map(mut parts: Vec<Part>) -> io::Result<Self> {
        parts.sort_by_key(|part| part.guest_address);
        let place = |part: &Part| (part.user_address, part.bytes, part.guest_address);
        let places = parts.iter().map(place).collect();
        let (mut watches, mut regions) = (Vec::new(), Vec::new());
        for part in parts {
            let (watch, region) = map_part(part)?;
            watches.push(watch);
            regions.push(region);
        }
        let memory = GuestMemoryMmap::from_regions(regions).map_err(io::Error::other)?;
        Ok(Self { watches, memory, places })
    }

    /// Returns the memory, for access by guest addresses.
    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Returns whether each access so far has found its page.
    pub(super) fn is_whole(&self) -> bool {
        self.watches.iter().all(FaultWatch::is_whole)
    }

    /// Returns the guest's address for an address of the machine's monitor.
    pub(super) fn guest_address(&self, user_address: u64) -> Option<GuestAddress> {
        self.places.iter().find_map(|(user, bytes, guest)| {
            let offset = user_address.checked_sub(*user).filter(|offset| offset < bytes)?;
            guest.checked_add(offset).map(GuestAddress)
        })
    }
}

fn map_part(part: Part) -> io::Result<(FaultWatch, GuestRegionMmap)> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
    let metadata = part.file.metadata()?;
    let end = part.offset.checked_add(part.bytes).ok_or_else(|| invalid("a part is too long"))?;
    if metadata.is_file() && metadata.len() < end {
        return Err(invalid("a part of the memory is behind the end of its file"));
    }
    let page_bytes = page_bytes(&part.file)?;
    let len = usize::try_from(part.bytes).map_err(io::Error::other)?;
    let region = MmapRegion::from_file(FileOffset::new(part.file, part.offset), len);
    let region = region.map_err(io::Error::other)?;
    let watch = FaultWatch::new(region.as_ptr().addr(), len, page_bytes);
    let watch = watch.ok_or_else(|| io::Error::other("too many mappings are watched"))?;
    let region = GuestRegionMmap::new(region, GuestAddress(part.guest_address));
    Ok((watch, region.ok_or_else(|| invalid("a part is behind the last address"))?))
}

/// Returns the size of the file's pages in memory.
fn page_bytes(file: &File) -> io::Result<usize> {
    let found = fstatfs(file)?;
    if found.f_type == HUGE_PAGES {
        return usize::try_from(found.f_bsize).map_err(io::Error::other);
    }
    Ok(rustix::param::page_size())
}
