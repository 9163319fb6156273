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
    /// `make_durable` sets the lane, the batch, the group and the data's checksum.
    pub(in crate::cache) header: SlotHeader,
    /// The data; `None` for a page of zeroes.
    pub(in crate::cache) data: Option<&'a [u8]>,
    pub(in crate::cache) class: u8,
    pub(in crate::cache) taken: Taken,
}

impl Member<'_> {
    /// Returns how many bytes of memory the member takes, including its header.
    pub(in crate::cache) fn stored_bytes(&self) -> u64 {
        HEADER_BYTES + self.data.map_or(0, |data| data.len() as u64)
    }

    /// Returns the stored version.
    pub(in crate::cache) fn found(&self) -> Found {
        Found { verified: true, ..Found::of_header(self.taken.slot, &self.header) }
    }
}

impl Store {
    /// Stores data and headers, and fences them.
    ///
    /// Data and header of a page may become durable in any order. After a crash, recovery compares
    /// the data with the header's checksum for each lane's newest batch. Older batches need no
    /// comparison: they were fenced before the lane's next batch began.
    ///
    /// The header that splits a slot is in the same batch as the slot's first part. Recovery reads
    /// headers of parts only in a slot with a split header, and all other part headers are void by
    /// then. No other batch uses a part of the slot before this one is fenced.
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
        // Fences even after a failure, because the lane's next batch relies on the fence.
        let stored = members.iter().try_for_each(store);
        stored.and(self.region.fence())
    }

    /// Voids, durably, the headers of all parts in slots that are about to be split. Otherwise the
    /// split header would make stale part headers, or data that resembles them, count.
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
