//! Sequential cutoff: a stream of requests that each begin at the end of the one before goes around
//! the cache once it is long (Open CAS).
//!
//! Invariants:
//! - A stream is known by its direction and its end. Reads never continue writes.
//! - The streams of a queue are its own, so that a decision takes no lock. A stream that stays on
//!   its queue for some requests moves to the shared streams, where each queue finds it: clients
//!   spread long streams over queues.
//! - A request that continues no stream is never cut off, whatever its size. It begins a stream in
//!   the queue, in place of the least recently continued one.
//! - Streams are followed even while the policy does not cut them off, except with `never`.

use std::ops::DerefMut;

use super::Request;
use super::settings::{Settings, Spec, Unit};
use crate::tier::list::{Links, List};

const POLICY: usize = 0;
const THRESHOLD: usize = 1;
const PROMOTION: usize = 2;
const PROMOTE_ON_THRESHOLD: usize = 3;

/// Positions of the values of `cutoff`.
const NEVER: u64 = 0;
const FULL: u64 = 1;

/// The settings. Ranges and defaults are from Open CAS, except the default of `cutoff`, which is
/// `full` there: data that is written around a cache is durable only when the backing is flushed.
pub const SPECS: &[Spec] = &[
    Spec::choice("cutoff", &["never", "full", "always"], NEVER)
        .about("when long streams go around the cache: never, while it is full, or always"),
    Spec::number("cutoff.threshold", Unit::Bytes, 1..=4_194_181 << 10, 1 << 20)
        .about("length of a stream, with the request that is decided on"),
    Spec::number("cutoff.promotion", Unit::Count, 1..=65_535, 8)
        .about("requests of a stream on one queue before other queues can continue it"),
    Spec::choice("cutoff.promote-on-threshold", &["no", "yes"], 0)
        .about("other queues can also continue a stream that has reached the threshold"),
];

/// Streams of a queue, as in Open CAS.
const QUEUE_STREAMS: u32 = 64;
/// Shared streams, as in Open CAS.
const SHARED_STREAMS: u32 = 128;

/// The key of no stream: an offset of 2^63 - 1 does not exist.
const NO_KEY: u64 = u64::MAX;

/// The decision.
pub struct Cutoff {
    /// The settings.
    pub settings: Settings,
}

/// Streams that requests may continue.
pub struct Streams {
    /// Twice the end of each stream in bytes, plus 1 for writes. In an array apart, because every
    /// request searches all keys.
    keys: Box<[u64]>,
    lengths: Box<[Length]>,
    links: Links,
    /// The streams, the least recently continued one first.
    order: List,
    /// Number of keys that are not `NO_KEY`.
    used: u32,
}

/// Length of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Length {
    bytes: u64,
    requests: u64,
}

impl Streams {
    /// Returns the streams of one queue.
    pub fn of_queue() -> Self {
        Self::new(QUEUE_STREAMS)
    }

    /// Returns the streams that all queues share.
    pub fn shared() -> Self {
        Self::new(SHARED_STREAMS)
    }

    fn new(count: u32) -> Self {
        let (mut links, mut order) = (Links::new(count), List::EMPTY);
        (0..count).for_each(|stream| order.push_last(&mut links, stream));
        let lengths = vec![Length { bytes: 0, requests: 0 }; count as usize].into();
        Self { keys: vec![NO_KEY; count as usize].into(), lengths, links, order, used: 0 }
    }

    /// Adds `request` to the stream that it continues. Returns the stream and its new length.
    fn continued(&mut self, request: &Request) -> Option<(u32, Length)> {
        if self.used == 0 {
            return None;
        }
        let key = key(request.offset_bytes, request.is_write)?;
        let stream = u32::try_from(self.keys.iter().position(|&it| it == key)?).ok()?;
        let length = self.lengths[stream as usize];
        let length = Length {
            bytes: length.bytes.saturating_add(request.len_bytes),
            requests: length.requests + 1,
        };
        self.store(stream, request, length);
        Some((stream, length))
    }

    /// Adds a stream of `length` that ends with `request`, in place of the least recently continued
    /// one.
    fn add(&mut self, request: &Request, length: Length) {
        if let Some(stream) = self.order.first() {
            self.store(stream, request, length);
        }
    }

    fn store(&mut self, stream: u32, request: &Request, length: Length) {
        let end = request.offset_bytes.checked_add(request.len_bytes);
        let end = end.and_then(|end| key(end, request.is_write));
        self.set_key(stream, end.unwrap_or(NO_KEY));
        self.lengths[stream as usize] = length;
        self.order.move_last(&mut self.links, stream);
    }

    fn set_key(&mut self, stream: u32, key: u64) {
        let before = std::mem::replace(&mut self.keys[stream as usize], key);
        self.used += u32::from(key != NO_KEY);
        self.used -= u32::from(before != NO_KEY);
    }
}

/// Returns the key of a stream that ends at `end_bytes`; `None` if no device has that offset.
fn key(end_bytes: u64, is_write: bool) -> Option<u64> {
    (end_bytes < 1 << 62).then_some(end_bytes << 1 | u64::from(is_write))
}

impl Cutoff {
    /// Returns whether the policy looks at no request.
    pub fn is_off(&self) -> bool {
        self.settings.get(POLICY) == NEVER
    }

    /// Counts `request`, whose queue has the streams `queue`. Returns whether it goes around the
    /// cache.
    ///
    /// `is_full`: the cache has no more free slots than the engine keeps in reserve (in Open CAS:
    /// at most 640). `shared` locks the shared streams; it is called only for a request that
    /// continues no stream of the queue, or whose stream moves there.
    pub fn is_cut_off<G: DerefMut<Target = Streams>>(
        &self,
        request: &Request,
        is_full: bool,
        queue: &mut Streams,
        shared: impl FnOnce() -> G,
    ) -> bool {
        if self.is_off() {
            return false;
        }
        let bytes = if let Some((stream, length)) = queue.continued(request) {
            if self.is_promoted(length) {
                queue.set_key(stream, NO_KEY);
                shared().add(request, length);
            }
            length.bytes
        } else if let Some((_, length)) = shared().continued(request) {
            length.bytes
        } else {
            queue.add(request, Length { bytes: request.len_bytes, requests: 1 });
            return false;
        };
        bytes >= self.settings.get(THRESHOLD) && (is_full || self.settings.get(POLICY) != FULL)
    }

    fn is_promoted(&self, length: Length) -> bool {
        length.requests >= self.settings.get(PROMOTION)
            || (self.settings.get(PROMOTE_ON_THRESHOLD) == 1
                && length.bytes >= self.settings.get(THRESHOLD))
    }
}

impl Default for Cutoff {
    fn default() -> Self {
        Self { settings: Settings::new(SPECS) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::RefCell;

    use proptest::collection::vec;
    use proptest::prelude::any;
    use proptest::{prop_assert_eq, proptest};

    use super::*;

    /// A cutoff with the streams of two queues.
    struct Fixture {
        cutoff: Cutoff,
        queues: [Streams; 2],
        shared: RefCell<Streams>,
        is_full: bool,
    }

    impl Fixture {
        fn new(settings: &[(&str, &str)]) -> Self {
            let mut cutoff = Cutoff::default();
            cutoff.settings.set("cutoff", "full").unwrap();
            for (key, value) in settings {
                cutoff.settings.set(key, value).unwrap();
            }
            let queues = [Streams::of_queue(), Streams::of_queue()];
            Self { cutoff, queues, shared: RefCell::new(Streams::shared()), is_full: true }
        }

        fn write(&mut self, queue: u16, offset_bytes: u64, len_bytes: u64) -> bool {
            self.request(Request { queue, offset_bytes, len_bytes, is_write: true })
        }

        fn request(&mut self, request: Request) -> bool {
            let queue = &mut self.queues[usize::from(request.queue)];
            self.cutoff.is_cut_off(&request, self.is_full, queue, || self.shared.borrow_mut())
        }
    }

    const BLOCK: u64 = 64 << 10;

    #[test]
    fn the_request_that_reaches_the_threshold_is_the_first_to_be_cut_off() {
        let mut fixture = Fixture::new(&[]);
        let cut_off = (0..20).map(|block| fixture.write(0, block * BLOCK, BLOCK));
        assert_eq!(cut_off.collect::<Vec<_>>(), (1..=20).map(|n| n >= 16).collect::<Vec<_>>());
    }

    #[test]
    fn policies_differ_in_when() {
        for (policy, is_full, expected) in [
            ("full", true, true),
            ("full", false, false),
            ("always", false, true),
            ("never", true, false),
        ] {
            let mut fixture = Fixture::new(&[("cutoff", policy), ("cutoff.threshold", "128K")]);
            fixture.is_full = is_full;
            fixture.write(0, 0, BLOCK);
            assert_eq!(fixture.write(0, BLOCK, BLOCK), expected, "{policy}, full: {is_full}");
        }
    }

    #[test]
    fn a_stream_that_filled_the_cache_is_cut_off_at_once_when_it_is_full() {
        let mut fixture = Fixture::new(&[("cutoff.threshold", "128K")]);
        fixture.is_full = false;
        assert!((0..4).all(|block| !fixture.write(0, block * BLOCK, BLOCK)));
        fixture.is_full = true;
        assert!(fixture.write(0, 4 * BLOCK, BLOCK));
    }

    #[test]
    fn reads_do_not_continue_writes_and_one_large_request_is_no_stream() {
        let mut fixture = Fixture::new(&[]);
        assert!(!fixture.write(0, 0, 32 << 20));
        let read = Request { queue: 0, offset_bytes: 32 << 20, len_bytes: 4096, is_write: false };
        assert!(!fixture.request(read));
        assert!(fixture.write(0, 32 << 20, 4096));
    }

    #[test]
    fn other_queues_continue_a_stream_after_its_promotion() {
        let settings = [("cutoff.threshold", "128K"), ("cutoff.promotion", "3")];
        for (before, expected) in [(2, false), (3, true)] {
            let mut fixture = Fixture::new(&settings);
            for block in 0..before {
                assert_eq!(fixture.write(0, block * BLOCK, BLOCK), block > 0);
            }
            assert_eq!(fixture.write(1, before * BLOCK, BLOCK), expected, "after {before}");
            assert_eq!(fixture.write(0, (before + 1) * BLOCK, BLOCK), expected);
        }
    }

    #[test]
    fn a_stream_at_the_threshold_is_promoted_where_that_is_set() {
        for (text, expected) in [("no", false), ("yes", true)] {
            let mut fixture = Fixture::new(&[
                ("cutoff.threshold", "128K"),
                ("cutoff.promote-on-threshold", text),
            ]);
            fixture.write(0, 0, BLOCK);
            fixture.write(0, BLOCK, BLOCK);
            assert_eq!(fixture.write(1, 2 * BLOCK, BLOCK), expected);
        }
    }

    #[test]
    fn the_stream_continued_least_recently_is_forgotten_first() {
        let mut fixture = Fixture::new(&[("cutoff.threshold", "8K")]);
        let start = |number: u64| number << 30;
        (0..64).for_each(|number| assert!(!fixture.write(0, start(number), 4096)));
        assert!(fixture.write(0, 4096, 4096), "stream 0 is now the newest");
        assert!(!fixture.write(0, start(64), 4096), "in place of stream 1");
        assert!(!fixture.write(0, start(1) + 4096, 4096), "in place of stream 2");
        assert!(fixture.write(0, 8192, 4096));
        assert!(!fixture.write(0, start(2) + 4096, 4096), "in place of stream 3");
        assert!(fixture.write(0, start(4) + 4096, 4096));
    }

    proptest! {
        /// One queue: the length of a stream is the sum of the requests that end where the next one
        /// begins.
        #[test]
        fn lengths_are_sums_of_what_meets(requests in vec((0..6_u64, 0..4_u64, any::<bool>()), 0..200)) {
            let mut fixture = Fixture::new(&[("cutoff.threshold", "6"), ("cutoff.promotion", "4")]);
            // Ends, bytes and requests of the streams.
            let mut own: Vec<((u64, bool), u64, u64)> = Vec::new();
            let mut shared = own.clone();
            for (offset_bytes, len_bytes, is_write) in requests {
                let (begin, end) = ((offset_bytes, is_write), (offset_bytes + len_bytes, is_write));
                // Of two streams that end in one place either may be continued.
                if len_bytes > 0 && own.iter().chain(&shared).any(|it| it.0 == end) {
                    continue;
                }
                let mut expected = false;
                if let Some(at) = own.iter().position(|it| it.0 == begin) {
                    let (_, bytes, count) = own.remove(at);
                    expected = bytes + len_bytes >= 6;
                    let list = if count + 1 >= 4 { &mut shared } else { &mut own };
                    list.push((end, bytes + len_bytes, count + 1));
                } else if let Some(at) = shared.iter().position(|it| it.0 == begin) {
                    let (_, bytes, count) = shared.remove(at);
                    expected = bytes + len_bytes >= 6;
                    shared.push((end, bytes + len_bytes, count + 1));
                } else {
                    own.push((end, len_bytes, 1));
                }
                let request = Request { queue: 0, offset_bytes, len_bytes, is_write };
                prop_assert_eq!(fixture.request(request), expected, "{:?}", request);
            }
        }

        #[test]
        fn no_request_panics(requests in vec((any::<u64>(), any::<u64>(), any::<bool>()), 0..50)) {
            let mut fixture = Fixture::new(&[("cutoff.promotion", "1")]);
            for (offset_bytes, len_bytes, is_write) in requests {
                fixture.request(Request { queue: 0, offset_bytes, len_bytes, is_write });
            }
        }
    }
}
