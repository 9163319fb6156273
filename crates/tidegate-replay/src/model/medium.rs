//! Persistent memory in virtual time, by the same media model that delays real memory in `pmem`.
//!
//! Streaming stores and write-backs are posted: the thread continues while at most [`POSTED_BYTES`]
//! are in flight, and then keeps the pace of the medium. A fence returns one write latency after
//! the last posted byte. The shared bandwidth is reserved for one transfer after another.

use tidegate::pmem::MediaModel;

use super::costs::{Costs, transfer_ns};

/// Bytes of a thread in flight before its stores wait for the medium.
const POSTED_BYTES: u64 = 1024;

/// The medium, and the transfers in flight to it.
pub(super) struct Medium {
    model: MediaModel,
    stream_bytes_per_s: u64,
    fence_ns: u64,
    write_booked_until_ns: u64,
    read_booked_until_ns: u64,
    /// Arrival time of a thread's last posted store, by thread; 0 if the thread posted none since
    /// its last fence.
    due_ns: Vec<u64>,
}

impl Medium {
    pub(super) fn new(model: MediaModel, costs: &Costs) -> Self {
        Self {
            model,
            stream_bytes_per_s: costs.stream_bytes_per_s,
            fence_ns: costs.fence_ns,
            write_booked_until_ns: 0,
            read_booked_until_ns: 0,
            due_ns: Vec::new(),
        }
    }

    /// Streams `len` bytes at `offset` from `now_ns` on. Returns how long `thread` is busy.
    pub(super) fn stream(&mut self, thread: usize, now_ns: u64, offset: u64, len: u64) -> u64 {
        let copy_ns = transfer_ns(len, self.stream_bytes_per_s);
        self.post(thread, now_ns, offset, len).max(copy_ns)
    }

    /// Posts `len` bytes. Returns how long the thread waits until it may continue.
    pub(super) fn post(&mut self, thread: usize, now_ns: u64, offset: u64, len: u64) -> u64 {
        let on_medium = self.on_medium(offset, len);
        let MediaModel { thread_write_bytes_per_s, write_bytes_per_s, .. } = self.model;
        let (own, all) = (pace(thread_write_bytes_per_s), pace(write_bytes_per_s));
        let alone_ns = own(len).max(all(on_medium));
        if self.due_ns.len() <= thread {
            self.due_ns.resize(thread + 1, 0);
        }
        let booked_ns = &mut self.write_booked_until_ns;
        *booked_ns = (*booked_ns).max(now_ns) + all(on_medium);
        let due_ns = (self.due_ns[thread].max(now_ns) + alone_ns).max(*booked_ns);
        self.due_ns[thread] = due_ns;
        let ahead_ns = own(POSTED_BYTES).max(all(POSTED_BYTES));
        due_ns.saturating_sub(ahead_ns).saturating_sub(now_ns)
    }

    /// Fences the thread's posted stores. Returns how long that takes.
    pub(super) fn fence(&mut self, thread: usize, now_ns: u64) -> u64 {
        let due_ns = self.due_ns.get_mut(thread).map_or(0, std::mem::take);
        let arrives_ns = match due_ns {
            0 => 0,
            due_ns => due_ns + u64::from(self.model.write_latency_ns),
        };
        arrives_ns.saturating_sub(now_ns).max(self.fence_ns)
    }

    /// Reads `len` bytes at `offset`. Returns how long that takes.
    pub(super) fn read(&mut self, now_ns: u64, offset: u64, len: u64) -> u64 {
        let on_medium = self.on_medium(offset, len);
        let MediaModel { thread_read_bytes_per_s, read_bytes_per_s, .. } = self.model;
        let (own, all) = (pace(thread_read_bytes_per_s), pace(read_bytes_per_s));
        let booked_ns = &mut self.read_booked_until_ns;
        *booked_ns = (*booked_ns).max(now_ns) + all(on_medium);
        let alone_ns = own(len).max(all(on_medium));
        let arrives_ns = (now_ns + alone_ns).max(*booked_ns);
        arrives_ns - now_ns + u64::from(self.model.read_latency_ns)
    }

    /// Returns the bytes of whole media units that an access occupies.
    fn on_medium(&self, offset: u64, len: u64) -> u64 {
        let unit = u64::from(self.model.granularity_bytes);
        (offset + len).next_multiple_of(unit) - offset / unit * unit
    }
}

fn pace(bytes_per_s: Option<u64>) -> impl Fn(u64) -> u64 {
    move |bytes| bytes_per_s.map_or(0, |rate| transfer_ns(bytes, rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medium(media: &str) -> Medium {
        Medium::new(media.parse().unwrap(), &Costs { fence_ns: 5, ..Costs::optane() })
    }

    #[test]
    fn a_thread_keeps_the_pace_of_the_medium_and_its_fence_waits_for_the_rest() {
        let mut medium = medium("custom,write_latency_ns=80,thread_write_bytes_per_s=1000000000");
        assert_eq!(medium.stream(0, 100, 0, 4096), 4096 - 1024);
        let now_ns = 100 + 4096 - 1024;
        assert_eq!(medium.fence(0, now_ns), 1024 + 80);
        assert_eq!(medium.fence(0, now_ns), 5, "nothing is under way");
    }

    #[test]
    fn threads_share_what_the_medium_takes() {
        let mut medium = medium("custom,write_bytes_per_s=1000000000");
        assert_eq!(medium.stream(0, 0, 0, 4096), 3072);
        assert_eq!(medium.stream(1, 0, 0, 4096), 4096 + 3072, "behind the first");
        assert_eq!(medium.stream(2, 100_000, 0, 4096), 3072, "after a rest");
    }

    #[test]
    fn a_fast_medium_is_as_slow_as_the_copy() {
        assert_eq!(medium("dram").stream(0, 0, 0, 4000), 400);
        assert_eq!(medium("dram").fence(0, 0), 5);
    }

    #[test]
    fn an_access_takes_up_whole_units() {
        let mut medium = medium("custom,write_bytes_per_s=1000000000,granularity_bytes=256");
        assert_eq!(medium.post(0, 0, 250, 10), 0, "posted");
        assert_eq!(medium.fence(0, 0), 512);
        assert_eq!(medium.read(0, 0, 4096), 0, "reads are not limited");
    }
}
