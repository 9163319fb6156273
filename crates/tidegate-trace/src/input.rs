//! A trace's file, decompressed, and the number of bytes that were read.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const BUFFER_BYTES: usize = 128 << 10;
/// Memory limit of the xz decoder, whose highest preset takes 65 MiB.
const XZ_MEMORY_BYTES: u64 = 128 << 20;

const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];

/// Decompressed bytes of a trace.
pub(super) type Input = Box<dyn Read + Send>;

/// Number of bytes of a trace that were read, and the total, as compressed.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    read_bytes: Arc<AtomicU64>,
    pub(super) total_bytes: u64,
}

impl Progress {
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Relaxed)
    }

    /// Opens the file at `path`, and decompresses it.
    pub(super) fn open(&self, path: &Path) -> io::Result<Input> {
        self.read(File::open(path)?)
    }

    /// Decompresses `bytes`, whose total is unknown.
    pub(super) fn read(&self, bytes: impl Read + Send + 'static) -> io::Result<Input> {
        decompressed(Counted { inner: bytes, read_bytes: Arc::clone(&self.read_bytes) })
    }
}

/// Counts the bytes that are read.
struct Counted<R> {
    inner: R,
    read_bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.read_bytes.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

/// Decompresses `raw` by its first bytes. The window of a zstd file is limited to 128 MiB.
fn decompressed(raw: impl Read + Send + 'static) -> io::Result<Input> {
    let (magic, raw) = magic(raw)?;
    let raw = BufReader::with_capacity(BUFFER_BYTES, raw);
    Ok(match &magic {
        magic if magic.starts_with(ZSTD) => Box::new(zstd::Decoder::with_buffer(raw)?),
        magic if magic.starts_with(GZIP) => Box::new(flate2::bufread::MultiGzDecoder::new(raw)),
        magic if magic.starts_with(XZ) => Box::new(xz(raw)?),
        _ => Box::new(raw),
    })
}

fn xz(raw: impl BufRead) -> io::Result<impl Read> {
    let flags = liblzma::stream::CONCATENATED;
    let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_BYTES, flags)?;
    Ok(liblzma::bufread::XzDecoder::new_stream(raw, stream))
}

/// Returns the first bytes of `raw`, and a reader of all bytes. A pipe may return single bytes.
fn magic(mut raw: impl Read) -> io::Result<(Vec<u8>, impl Read)> {
    let mut first = Vec::with_capacity(XZ.len());
    raw.by_ref().take(XZ.len() as u64).read_to_end(&mut first)?;
    Ok((first.clone(), io::Cursor::new(first).chain(raw)))
}
