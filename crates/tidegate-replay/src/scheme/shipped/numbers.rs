//! Maps pages of files to pages of one device: pieces of 1 MiB in the order of their first use.

use rustc_hash::FxHashMap;

use crate::scheme::page::PageId;
use crate::trace::FileId;

/// Pages of a piece.
const PIECE_PAGES: u64 = 256;

/// Maps pages of files to pages of a device, and back. Memory use grows with the pieces in use.
#[derive(Default)]
pub(super) struct Numbers {
    pieces: FxHashMap<(FileId, u64), u64>,
    files: Vec<(FileId, u64)>,
}

impl Numbers {
    /// Returns the number of `id`, which is assigned at its first use.
    pub(super) fn number(&mut self, id: PageId) -> u64 {
        let key = (id.file, id.page / PIECE_PAGES);
        let files = &mut self.files;
        let piece = *self.pieces.entry(key).or_insert_with(|| {
            files.push(key);
            files.len() as u64 - 1
        });
        piece * PIECE_PAGES + id.page % PIECE_PAGES
    }

    /// Returns the page with `number`, which must be assigned.
    pub(super) fn id(&self, number: u64) -> PageId {
        let at = usize::try_from(number / PIECE_PAGES).unwrap_or(usize::MAX);
        let (file, piece) = self.files.get(at).copied().unwrap_or((FileId(0), 0));
        PageId { file, page: piece * PIECE_PAGES + number % PIECE_PAGES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_a_piece_stay_neighbours() {
        let mut numbers = Numbers::default();
        let id = |file, page| PageId { file: FileId(file), page };
        let ids = [id(3, 700), id(0, 0), id(3, 701), id(3, 0)];
        let found = ids.map(|id| numbers.number(id));
        assert_eq!(found, [188, 256, 189, 512]);
        assert_eq!(found.map(|number| numbers.id(number)), ids);
    }
}
