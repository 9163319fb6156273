//! Copies of sparse files in memory: the disk and the pools at one moment.

use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::{Errno, pwritev};

/// Granularity of a copy: pages of zeroes are not kept.
const PAGE_BYTES: usize = 4096;
const ZEROES: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
/// Bytes that are read at once: the allocator has a buffer of this size at hand.
const READ_BYTES: usize = 16 * PAGE_BYTES;
/// Pages that are written at once: the kernel takes no more.
const WRITE_PAGES: usize = 1024;

/// Bytes at an offset.
#[derive(Debug, Clone, Eq)]
struct Page {
    offset: u64,
    bytes: Arc<[u8]>,
}

impl Page {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

impl PartialEq for Page {
    /// Compares the addresses first: most equal pages are shared.
    fn eq(&self, other: &Self) -> bool {
        let are_bytes_equal =
            || Arc::ptr_eq(&self.bytes, &other.bytes) || self.bytes == other.bytes;
        self.offset == other.offset && are_bytes_equal()
    }
}

/// The bytes of a file that are not zero.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    size: u64,
    /// In the order of their offsets.
    pages: Vec<Page>,
}

impl Image {
    /// Copies a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(file: &File) -> Result<Self> {
        Self::read_since(file, &Self::default())
    }

    /// Copies a file. The copy shares the pages that have not changed since `earlier`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_since(file: &File, earlier: &Self) -> Result<Self> {
        let mut image = Self { size: file.metadata()?.len(), pages: Vec::new() };
        each_page(file, image.size, |offset, bytes| {
            let known = earlier.find(offset).ok().map(|at| &earlier.pages[at].bytes);
            match known.filter(|known| known[..] == *bytes) {
                Some(known) => image.add(offset, Arc::clone(known)),
                None if bytes == &ZEROES[..bytes.len()] => {}
                None => image.add(offset, bytes.into()),
            }
        })?;
        Ok(image)
    }

    fn add(&mut self, offset: u64, bytes: Arc<[u8]>) {
        self.pages.push(Page { offset, bytes });
    }

    /// Returns the index of the page at an offset, or the index to insert it at.
    fn find(&self, offset: u64) -> Result<usize, usize> {
        self.pages.binary_search_by_key(&offset, |page| page.offset)
    }

    /// Makes a file with any contents equal to this image. Does not write equal pages.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, file: &File) -> Result<()> {
        file.set_len(self.size)?;
        let (mut is_equal, mut odd) = (vec![false; self.pages.len()], Vec::new());
        each_page(file, self.size, |offset, bytes| match self.find(offset) {
            Ok(at) => is_equal[at] = self.pages[at].bytes[..] == *bytes,
            Err(_) => odd.push(offset),
        })?;
        for run in odd.chunk_by(|this, next| this + PAGE_BYTES as u64 == *next) {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, hole, run[0], (run.len() * PAGE_BYTES) as u64)?;
        }
        let differing = self.pages.iter().zip(is_equal).filter(|(_, is_equal)| !is_equal);
        let differing: Vec<&Page> = differing.map(|(page, _)| page).collect();
        differing.chunk_by(|this, next| this.end() == next.offset).try_for_each(|run| {
            run.chunks(WRITE_PAGES).try_for_each(|pages| write_adjacent(file, pages))
        })
    }
}

/// Writes adjacent pages.
fn write_adjacent(file: &File, pages: &[&Page]) -> Result<()> {
    let bytes: Vec<IoSlice<'_>> = pages.iter().map(|page| IoSlice::new(&page.bytes)).collect();
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Ok(()) };
    let (written, wanted) = (pwritev(file, &bytes, first.offset)?, last.end() - first.offset);
    ensure!(written as u64 == wanted, "wrote {written} of {wanted} bytes");
    Ok(())
}

/// Reads the pages of a file that are no holes.
fn each_page(file: &File, size: u64, mut take: impl FnMut(u64, &[u8])) -> Result<()> {
    let (mut start, mut buffer) = (0, vec![0; READ_BYTES]);
    while let Some((data, end)) = next_data(file, start, size)? {
        for offset in (data..end).step_by(READ_BYTES) {
            let length = usize::try_from(end - offset)?.min(READ_BYTES);
            let bytes = &mut buffer[..length];
            file.read_exact_at(bytes, offset).context("the image changes its size")?;
            let offsets = (offset..).step_by(PAGE_BYTES);
            offsets.zip(bytes.chunks(PAGE_BYTES)).for_each(|(offset, page)| take(offset, page));
        }
        start = end;
    }
    Ok(())
}

/// Returns the next range of a file that is no hole.
fn next_data(file: &File, start: u64, size: u64) -> Result<Option<(u64, u64)>> {
    if start >= size {
        return Ok(None);
    }
    match seek(file, SeekFrom::Data(start)) {
        Ok(data) => Ok(Some((data, seek(file, SeekFrom::Hole(data))?.min(size)))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_without_name(name: &str) -> File {
        let name = format!("crashtest-image-{name}.{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file
    }

    #[test]
    fn an_image_brings_a_file_back() {
        let file = file_without_name("back");
        file.write_all_at(b"here", 8190).unwrap();
        file.write_all_at(&[0; 9000], 100_000).unwrap();
        let image = Image::read(&file).unwrap();
        assert_eq!(image.pages.len(), 2);
        file.write_all_at(b"later", 500_000).unwrap();
        file.write_all_at(b"other", 8190).unwrap();
        file.set_len(2 << 20).unwrap();
        assert_ne!(Image::read(&file).unwrap(), image);
        image.write(&file).unwrap();
        assert_eq!(Image::read(&file).unwrap(), image);
        let other = file_without_name("other");
        image.write(&other).unwrap();
        assert_eq!(Image::read(&other).unwrap(), image);
    }

    #[test]
    fn a_later_image_shares_what_did_not_change() {
        let file = file_without_name("later");
        file.write_all_at(&[1; 2 * PAGE_BYTES], 0).unwrap();
        let earlier = Image::read(&file).unwrap();
        file.write_all_at(&[2; 1], 5000).unwrap();
        let later = Image::read_since(&file, &earlier).unwrap();
        assert_eq!(later, Image::read(&file).unwrap());
        let is_shared = |at: usize| Arc::ptr_eq(&earlier.pages[at].bytes, &later.pages[at].bytes);
        assert!(is_shared(0) && !is_shared(1));
    }
}
