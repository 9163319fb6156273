//! Copies of sparse files in memory: the disk and the pool as they were at a moment.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Granularity of what is kept: pages of zeroes are not.
const PAGE_BYTES: usize = 4096;
const ZEROES: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// The bytes of a file that are not zero.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    size: u64,
    pages: Vec<(u64, Vec<u8>)>,
}

impl Image {
    /// Copies a file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(file: &File) -> Result<Self> {
        let size = file.metadata()?.len();
        let mut image = Self { size, pages: Vec::new() };
        let mut start = 0;
        while let Some((data, end)) = next_data(file, start, size)? {
            let mut bytes = vec![0; usize::try_from(end - data)?];
            file.read_exact_at(&mut bytes, data).context("the image changes its size")?;
            image.add(data, &bytes);
            start = end;
        }
        Ok(image)
    }

    fn add(&mut self, start: u64, bytes: &[u8]) {
        for (offset, page) in (start..).step_by(PAGE_BYTES).zip(bytes.chunks(PAGE_BYTES)) {
            if page == &ZEROES[..page.len()] {
                continue;
            }
            match self.pages.last_mut() {
                Some((at, run)) if *at + run.len() as u64 == offset => run.extend_from_slice(page),
                _ => self.pages.push((offset, page.to_vec())),
            }
        }
    }

    /// Makes a file, which may have other contents, equal to this one.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, file: &File) -> Result<()> {
        file.set_len(self.size)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, hole, 0, self.size)?;
        self.pages.iter().try_for_each(|(offset, bytes)| Ok(file.write_all_at(bytes, *offset)?))
    }
}

/// The next range of a file that is no hole.
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

    #[test]
    fn an_image_brings_a_file_back() {
        let path = std::env::temp_dir().join(format!("crashtest-image.{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(b"here", 8190).unwrap();
        file.write_all_at(&[0; 9000], 100_000).unwrap();
        let image = Image::read(&file).unwrap();
        assert_eq!(image.pages.len(), 1);
        file.write_all_at(b"later", 500_000).unwrap();
        assert_ne!(Image::read(&file).unwrap(), image);
        image.write(&file).unwrap();
        assert_eq!(Image::read(&file).unwrap(), image);
    }
}
