//! Splits the bytes of requests into whole pages and parts of pages.

use std::ops::Range;

use super::store::layout::{PAGE, PAGE_BYTES};

/// The data of a page of zeroes.
pub(super) static ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// The bytes of a request that lie in one page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) page: u64,
    /// First byte, in the page.
    pub(super) from: usize,
    /// Position of the bytes in the request's data.
    pub(super) at: Range<usize>,
}

impl Part {
    /// Returns whether the part is a whole page.
    pub(super) fn is_whole(&self) -> bool {
        self.at.len() == PAGE
    }
}

/// Returns the pages that hold `len` bytes at `offset`.
pub(super) fn pages_of(offset: u64, len: u64) -> Range<u64> {
    let first = offset / PAGE_BYTES;
    if len == 0 { first..first } else { first..(offset + len).div_ceil(PAGE_BYTES) }
}

/// Returns the pages that hold `bytes`.
pub(super) fn pages_in(bytes: &Range<u64>) -> Range<u64> {
    pages_of(bytes.start, bytes.end - bytes.start)
}

/// Returns the bytes of `pages`.
pub(super) fn bytes_of(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE_BYTES..pages.end * PAGE_BYTES
}

/// Returns the number of bytes of `pages` pages.
pub(super) fn page_bytes(pages: u64) -> u64 {
    pages * PAGE_BYTES
}

/// Returns the bytes of the backing for `len` bytes of data at `offset`.
pub(super) fn bytes_at(offset: u64, len: usize) -> Range<u64> {
    offset..offset + len as u64
}

/// Returns whether `bytes` are whole pages.
pub(super) fn is_whole(bytes: &Range<u64>) -> bool {
    bytes.start.is_multiple_of(PAGE_BYTES) && bytes.end.is_multiple_of(PAGE_BYTES)
}

/// Splits `len` bytes at `offset` by page.
pub(super) fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let byte = offset + at as u64;
        let from = usize::try_from(byte % PAGE_BYTES).unwrap_or_default();
        let end = len.min(at + PAGE - from);
        let part = Part { page: byte / PAGE_BYTES, from, at: at..end };
        at = end;
        (!part.at.is_empty()).then_some(part)
    })
}

/// Splits `bytes` into pieces: each is up to `pages_max` whole pages, or a part of one page.
pub(super) fn pieces(bytes: Range<u64>, pages_max: u64) -> impl Iterator<Item = Range<u64>> {
    let Range { mut start, end } = bytes;
    let whole_end = end - end % PAGE_BYTES;
    std::iter::from_fn(move || {
        let from = start;
        start = if from.is_multiple_of(PAGE_BYTES) && from < whole_end {
            whole_end.min(from.saturating_add(pages_max.saturating_mul(PAGE_BYTES)))
        } else {
            end.min((from / PAGE_BYTES + 1) * PAGE_BYTES)
        };
        (from < end).then_some(from..start)
    })
}

/// Most pages of a write that go to the backing at once.
pub(super) const PIECE_PAGES: u64 = 256;

/// Data or zeroes for some bytes of the backing.
pub(super) struct Content<'a> {
    pub(super) bytes: Range<u64>,
    /// `None` for zeroes.
    pub(super) data: Option<&'a [u8]>,
}

impl<'a> Content<'a> {
    /// Returns the content `data` at `offset`.
    pub(super) fn of(offset: u64, data: &'a [u8]) -> Self {
        Self { bytes: bytes_at(offset, data.len()), data: Some(data) }
    }

    /// Returns the part for `bytes`.
    pub(super) fn part(&self, bytes: Range<u64>) -> Self {
        let at = |byte: u64| usize::try_from(byte - self.bytes.start).unwrap_or(usize::MAX);
        let data = self.data.map(|data| &data[at(bytes.start)..at(bytes.end)]);
        Self { bytes, data }
    }

    /// Splits the content into pieces that are written at once.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Self> {
        pieces(self.bytes.clone(), PIECE_PAGES).map(|piece| self.part(piece))
    }

    pub(super) fn pages(&self) -> Range<u64> {
        pages_in(&self.bytes)
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Returns whether these are too many zeroes for slots, so that the backing has to zero them.
    pub(super) fn is_many_zeroes(&self) -> bool {
        self.data.is_none() && self.len_bytes() > PIECE_PAGES * PAGE_BYTES
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_pages_or_lie_in_one() {
        let of = |bytes, most| -> Vec<(u64, u64)> {
            pieces(bytes, most).map(|it| (it.start, it.end)).collect()
        };
        assert_eq!(of(512..1024, 9), [(512, 1024)]);
        assert_eq!(of(512..4608, 9), [(512, 4096), (4096, 4608)]);
        assert_eq!(of(0..4608, 9), [(0, 4096), (4096, 4608)]);
        assert_eq!(of(3584..20480, 2), [(3584, 4096), (4096, 12288), (12288, 20480)]);
        assert_eq!(of(4096..16384, u64::MAX), [(4096, 16384)]);
        assert_eq!(of(512..512, 1), []);
    }

    #[test]
    fn parts_cover_a_request_page_by_page() {
        let found: Vec<_> = parts(3584, 5120).map(|it| (it.page, it.from, it.at)).collect();
        assert_eq!(found, [(0, 3584, 0..512), (1, 0, 512..4608), (2, 0, 4608..5120)]);
        assert_eq!(parts(4096, 0).count(), 0);
        assert_eq!((pages_of(3584, 5120), pages_of(512, 0)), (0..3, 0..0));
    }
}
