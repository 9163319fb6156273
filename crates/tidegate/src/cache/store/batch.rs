//! Batches: data and headers of several slots, durable with one fence.

use std::io::IoSlice;

use super::Store;
use super::layout::{
    ALL_PART_HEADERS, HEADER_BYTES, PAGE, SlotHeader, part_of, split_header, whole_slot,
};
use crate::cache::PmemResult;
use crate::cache::pages::index::{Found, Taken};

/// A page, or a record of one, with its slot.
pub(in crate::cache) struct Member<'a> {
    /// Without what is known only when it is stored: lane, batch, group, and the data's checksum.
    pub(in crate::cache) header: SlotHeader,
    /// Its bytes; none for zeroes.
    pub(in crate::cache) data: Option<&'a [u8]>,
    pub(in crate::cache) class: u8,
    pub(in crate::cache) taken: Taken,
}

impl Member<'_> {
    /// Bytes of memory that it takes, with its header.
    pub(in crate::cache) fn stored_bytes(&self) -> u64 {
        HEADER_BYTES + self.data.map_or(0, |data| data.len() as u64)
    }

    /// What was stored.
    pub(in crate::cache) fn found(&self) -> Found {
        Found { verified: true, ..Found::of_header(self.taken.slot, &self.header) }
    }
}

impl Store {
    /// Stores data and headers, and fences them.
    ///
    /// Data and header of a page go in any order: the header has the data's checksum, and after a
    /// crash that decides for a lane's newest batch. For older batches it need not: their fence
    /// came before the lane's next batch began.
    ///
    /// A slot that is split gets its header in the same batch as its first part: without the one
    /// the other is not looked at, and the parts beside it are void by then. No other batch has a
    /// part of it before this one is fenced.
    pub(in crate::cache) fn make_durable(&self, members: &[Member<'_>], group: u64) -> PmemResult {
        self.clear_parts(members)?;
        let lane = self.lanes.take(&self.region);
        let store = |it: &Member<'_>| {
            if it.taken.splits {
                let whole = whole_slot(it.taken.slot);
                let bytes = split_header(self.salt, whole);
                self.region.write_streaming(self.places.header(whole), &bytes)?;
            }
            let (lane, batch) = (lane.number, lane.batch);
            let mut header = SlotHeader { lane, batch, group, ..it.header };
            if let Some(data) = it.data {
                let at = self.places.data(it.taken.slot);
                let parts = [IoSlice::new(data)];
                header.data_check = self.region.write_streaming_crc32c::<PAGE>(at, &parts)?;
            }
            let bytes = header.encode(self.salt, it.taken.slot);
            self.region.write_streaming(self.places.header(it.taken.slot), &bytes)
        };
        // The fence also after a failure: the lane's next batch relies on it.
        let stored = members.iter().try_for_each(store);
        stored.and(self.region.fence())
    }

    /// Makes the headers of all parts void of slots that are to be split, durably: the header that
    /// splits the slot would else make an older one count, or other data that looks like one.
    fn clear_parts(&self, members: &[Member<'_>]) -> PmemResult {
        let mut has_cleared = false;
        for taken in members.iter().map(|it| it.taken).filter(|it| it.splits) {
            let headers = self.places.header(part_of(whole_slot(taken.slot), 0));
            self.region.write_streaming(headers, &[0; ALL_PART_HEADERS])?;
            has_cleared = true;
        }
        if has_cleared { self.region.fence() } else { Ok(()) }
    }
}
