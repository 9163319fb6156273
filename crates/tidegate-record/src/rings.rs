//! Rings of events in memory that the recorder and all recorded processes map.
//!
//! Invariants:
//! 1. A writer holds a ring's lock while it appends, and never waits for a lock: it takes another
//!    ring instead. So neither a signal handler that interrupts a writer nor a killed writer blocks
//!    others.
//! 2. An event exists once the ring's head is behind it: a writer that dies earlier leaves no part
//!    of an event.
//! 3. A writer takes the time of an event under the ring's lock: a ring is in time order.
//! 4. The memory may hold any bytes, because programs can overwrite it. The recorder reads each
//!    word once, checks every length, and counts invalid events.
//!
//! Entry points: [`Rings::create`], [`drain`](Rings::drain), [`wait`](Rings::wait),
//! [`close`](Rings::close) for the recorder; [`Rings::open`], [`append`](Rings::append),
//! [`file_number`](Rings::file_number) for programs.

use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

use rustix::process::Pid;
use rustix::time::ClockId;
use tidegate::pmem::{PmemError, SharedMemory};

use crate::event::{EVENT_BYTES, Event, TEXT_BYTES_MAX, WORDS};

/// Number of rings. A writer tries the ring of its CPU first.
const RINGS: u64 = 32;
/// Cells of a ring. An event takes one cell, and its text as many more as it fills.
const CELLS: u64 = 2048;
const RING_BYTES: u64 = 2 * LINE_BYTES + CELLS * EVENT_BYTES;
const LINE_BYTES: u64 = 64;
const LEN_BYTES: u64 = HEADER_BYTES + RINGS * RING_BYTES;

/// The first word of the memory; identifies the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"tdgrec01");
const HEADER_BYTES: u64 = 4 * LINE_BYTES;
const MAGIC_AT: u64 = 0;
/// The recorder's process; 0 after recording has ended.
const RECORDER: u64 = 8;
/// The number of the next file.
const NEXT_FILE: u64 = LINE_BYTES;
/// Number of events that were lost.
const LOST: u64 = 2 * LINE_BYTES;
/// Futex words: `FILLED` is incremented when a ring becomes half full or all rings are full,
/// `EMPTIED` when the recorder has drained all rings.
const FILLED: u64 = 3 * LINE_BYTES;
const EMPTIED: u64 = 3 * LINE_BYTES + 4;

/// Words of a ring: the thread that appends, the number of cells written, the number of cells read.
const OWNER: u64 = 0;
const HEAD: u64 = 8;
const TAIL: u64 = LINE_BYTES;

/// Time that a writer waits for drained rings before it checks whether the recorder lives.
const EMPTIED_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that the recorder waits for a writer that may append, as the writer may be descheduled.
const OWNER_TIMEOUT: Duration = Duration::from_millis(20);

/// A handle to the shared rings.
pub struct Rings {
    memory: SharedMemory,
}

/// An event and its text, as drained from a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The event.
    pub event: Event,
    /// The text: paths, separated by NUL bytes.
    pub text: Box<[u8]>,
}

impl Rings {
    /// Creates the rings in a new file at `path`, which only this user may open.
    ///
    /// # Errors
    /// [`PmemError::Os`]: the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, PmemError> {
        let memory = SharedMemory::create(path, LEN_BYTES)?;
        memory.word(NEXT_FILE).store(1, Relaxed);
        memory.word(RECORDER).store(u64::from(std::process::id()), Relaxed);
        memory.word(MAGIC_AT).store(MAGIC, Release);
        Ok(Self { memory })
    }

    /// Maps the rings of another process. Returns `None` if `path` has no rings of this layout, or
    /// if this user may not open them.
    #[must_use]
    pub fn open(path: &Path) -> Option<Self> {
        let memory = SharedMemory::open(path).ok().filter(|it| it.len_bytes() == LEN_BYTES)?;
        (memory.word(MAGIC_AT).load(Acquire) == MAGIC).then_some(Self { memory })
    }

    /// Returns a new file number, which is not 0.
    #[must_use]
    pub fn file_number(&self) -> u32 {
        u32::try_from(self.memory.word(NEXT_FILE).fetch_add(1, Relaxed)).unwrap_or(u32::MAX)
    }

    /// Returns whether recording is on.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.memory.word(RECORDER).load(Relaxed) != 0
    }

    /// Appends an event of the calling thread, with the current time and a text of `parts`, joined
    /// by NUL bytes. Waits while all rings are full and the recorder lives. Counts an event that
    /// cannot be appended as lost.
    pub fn append(&self, event: Event, parts: &[&[u8]]) {
        let bytes = parts.iter().map(|part| part.len() + 1).sum::<usize>().saturating_sub(1);
        if bytes > TEXT_BYTES_MAX {
            self.memory.word(LOST).fetch_add(1, Relaxed);
            return;
        }
        while self.is_open() {
            let emptied = self.memory.half(EMPTIED).load(Acquire);
            if self.append_to_any(event, parts, bytes) {
                return;
            }
            self.tell(FILLED);
            self.memory.wait(EMPTIED, emptied, Some(EMPTIED_TIMEOUT));
            if self.memory.half(EMPTIED).load(Acquire) == emptied {
                self.look_for_recorder();
            }
        }
        self.memory.word(LOST).fetch_add(1, Relaxed);
    }

    fn append_to_any(&self, event: Event, parts: &[&[u8]], bytes: usize) -> bool {
        let first = u64::try_from(rustix::thread::sched_getcpu()).unwrap_or(0);
        (0..RINGS).any(|next| self.ring((first + next) % RINGS).append(event, parts, bytes))
    }

    /// Closes the rings if the recorder's process no longer exists.
    fn look_for_recorder(&self) {
        let recorder = i32::try_from(self.memory.word(RECORDER).load(Relaxed)).unwrap_or(0);
        let found = Pid::from_raw(recorder).map(rustix::process::test_kill_process);
        if found == Some(Err(rustix::io::Errno::SRCH)) {
            self.close();
        }
    }

    /// Ends the recording: later events are dropped.
    pub fn close(&self) {
        self.memory.word(RECORDER).store(0, Relaxed);
        self.tell(FILLED);
        self.tell(EMPTIED);
    }

    /// Waits until a ring is half full, `timeout` has elapsed, or the rings are closed. `filled` is
    /// the value of [`filled`](Self::filled) before the rings were drained.
    pub fn wait(&self, filled: u32, timeout: Duration) {
        self.memory.wait(FILLED, filled, Some(timeout));
    }

    /// Returns a counter of the events that end [`wait`](Self::wait).
    #[must_use]
    pub fn filled(&self) -> u32 {
        self.memory.half(FILLED).load(Acquire)
    }

    /// Wakes a thread in [`wait`](Self::wait).
    pub fn interrupt(&self) {
        self.tell(FILLED);
    }

    /// Returns the number of lost events.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.memory.word(LOST).load(Relaxed)
    }

    /// Passes all events to `take`, ring by ring, and removes them. Returns a time: later drains
    /// return only newer events, unless a writer was descheduled for too long while it appended.
    pub fn drain(&self, mut take: impl FnMut(Told)) -> u64 {
        let until_ns = now_ns();
        for number in 0..RINGS {
            let ring = self.ring(number);
            ring.wait_for_owner();
            let bad = ring.drain(&mut take);
            self.memory.word(LOST).fetch_add(bad, Relaxed);
        }
        self.tell(EMPTIED);
        until_ns
    }

    fn tell(&self, what: u64) {
        self.memory.half(what).fetch_add(1, AcqRel);
        self.memory.wake(what, i32::MAX);
    }

    fn ring(&self, number: u64) -> Ring<'_> {
        Ring { rings: self, at: HEADER_BYTES + number * RING_BYTES }
    }
}

/// A view of one ring.
struct Ring<'a> {
    rings: &'a Rings,
    /// Offset of the ring in the memory.
    at: u64,
}

impl Ring<'_> {
    fn word(&self, offset: u64) -> &std::sync::atomic::AtomicU64 {
        self.rings.memory.word(self.at + offset)
    }

    /// Returns a word of cell number `cell`, counted from the creation of the ring.
    fn cell(&self, cell: u64, word: usize) -> &std::sync::atomic::AtomicU64 {
        let offset = 2 * LINE_BYTES + cell % CELLS * EVENT_BYTES;
        self.word(offset + 8 * u64::try_from(word % WORDS).unwrap_or(0))
    }

    /// Appends an event. Returns `false` if another writer holds the lock or the ring is full.
    fn append(&self, mut event: Event, parts: &[&[u8]], bytes: usize) -> bool {
        let owner = self.word(OWNER);
        if owner.compare_exchange(0, u64::from(event.thread), Acquire, Relaxed).is_err() {
            return false;
        }
        let (head, tail) = (self.word(HEAD).load(Relaxed), self.word(TAIL).load(Acquire));
        let used = head.wrapping_sub(tail);
        let cells = 1 + cells_of(bytes);
        let fits = used.saturating_add(cells) <= CELLS;
        if fits {
            event.time_ns = now_ns();
            for (at, word) in event.words(bytes).into_iter().enumerate() {
                self.cell(head, at).store(word, Relaxed);
            }
            self.store_text(head.wrapping_add(1), parts);
            self.word(HEAD).store(head.wrapping_add(cells), Release);
        }
        owner.store(0, Release);
        if fits && used < CELLS / 2 && used + cells >= CELLS / 2 {
            self.rings.tell(FILLED);
        }
        fits
    }

    fn store_text(&self, first: u64, parts: &[&[u8]]) {
        let joined = parts.iter().enumerate().flat_map(|(at, part)| {
            let between = if at == 0 { &b""[..] } else { &b"\0"[..] };
            between.iter().chain(part.iter()).copied()
        });
        let (mut word, mut filled, mut at) = ([0_u8; 8], 0, 0);
        for byte in joined {
            word[filled] = byte;
            filled += 1;
            if filled == word.len() {
                self.text_word(first, at).store(u64::from_le_bytes(word), Relaxed);
                (word, filled, at) = ([0; 8], 0, at + 1);
            }
        }
        if filled > 0 {
            self.text_word(first, at).store(u64::from_le_bytes(word), Relaxed);
        }
    }

    /// Returns word `at` of a text that begins in cell `first`.
    fn text_word(&self, first: u64, at: usize) -> &std::sync::atomic::AtomicU64 {
        let cells = u64::try_from(at / WORDS).unwrap_or(0);
        self.cell(first.wrapping_add(cells), at % WORDS)
    }

    /// Waits until a writer that may have taken a time has appended its event, for
    /// [`OWNER_TIMEOUT`] at most. Releases the lock of a dead writer.
    fn wait_for_owner(&self) {
        let owner = self.word(OWNER).load(Acquire);
        let until_ns = now_ns() + u64::try_from(OWNER_TIMEOUT.as_nanos()).unwrap_or(0);
        while owner != 0 && self.word(OWNER).load(Acquire) == owner {
            if now_ns() > until_ns {
                if !Path::new(&format!("/proc/{owner}")).exists() {
                    let _ = self.word(OWNER).compare_exchange(owner, 0, Release, Relaxed);
                }
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Passes all events to `take`; returns the number of invalid cells.
    fn drain(&self, take: &mut impl FnMut(Told)) -> u64 {
        let head = self.word(HEAD).load(Acquire);
        let mut tail = self.word(TAIL).load(Relaxed);
        let mut bad = 0;
        if head.wrapping_sub(tail) > CELLS {
            (tail, bad) = (head, 1);
        }
        while tail != head {
            let left = head.wrapping_sub(tail);
            let words = std::array::from_fn(|at| self.cell(tail, at).load(Relaxed));
            let event = Event::of_words(words).filter(|(_, bytes)| cells_of(*bytes) < left);
            let Some((event, bytes)) = event else {
                (tail, bad) = (tail.wrapping_add(1), bad + 1);
                continue;
            };
            take(Told { event, text: self.text(tail.wrapping_add(1), bytes) });
            tail = tail.wrapping_add(1 + cells_of(bytes));
        }
        self.word(TAIL).store(tail, Release);
        bad
    }

    fn text(&self, first: u64, bytes: usize) -> Box<[u8]> {
        let words = (0..bytes.div_ceil(8)).map(|at| self.text_word(first, at).load(Relaxed));
        words.flat_map(u64::to_le_bytes).take(bytes).collect()
    }
}

/// Returns the number of cells that a text of `bytes` takes.
fn cells_of(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX).div_ceil(EVENT_BYTES)
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + rest.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Kind;

    fn anonymous() -> Rings {
        let memory = SharedMemory::anonymous(LEN_BYTES).unwrap();
        memory.word(RECORDER).store(u64::from(std::process::id()), Relaxed);
        Rings { memory }
    }

    fn event(number: u64) -> Event {
        Event { thread: 7, ..Event::new(Kind::Write) }.with([number])
    }

    fn drained(rings: &Rings) -> Vec<Told> {
        let mut all = Vec::new();
        rings.drain(|told| all.push(told));
        all.sort_by_key(|told| told.event.time_ns);
        all
    }

    #[test]
    fn events_come_out_as_they_went_in_over_many_laps() {
        let rings = anonymous();
        let mut next = 0;
        for lap in 0..20_usize {
            for at in 0..500_usize {
                let text = vec![b'x'; (lap * 31 + at) % 200];
                rings.append(event(at as u64), &[b"a", &text]);
            }
            let found = drained(&rings);
            assert_eq!(found.len(), 500);
            for (at, told) in found.iter().enumerate() {
                assert_eq!(told.event.arguments[0], at as u64);
                assert_eq!(told.text.len(), 2 + (lap * 31 + at) % 200);
                assert!(told.text.starts_with(b"a\0") && told.event.time_ns >= next);
                next = told.event.time_ns;
            }
        }
        assert_eq!(rings.lost(), 0);
    }

    #[test]
    fn writers_that_are_faster_than_the_recorder_lose_nothing() {
        const EVENTS: u64 = 3 * RINGS * CELLS;
        let rings = anonymous();
        let mut found = Vec::new();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (0..EVENTS).for_each(|at| rings.append(event(at), &[])));
            while !writer.is_finished() {
                let filled = rings.filled();
                rings.drain(|told| found.push(told.event));
                rings.wait(filled, Duration::from_millis(10));
            }
        });
        rings.drain(|told| found.push(told.event));
        found.sort_by_key(|event| event.time_ns);
        let numbers = found.iter().map(|event| event.arguments[0]);
        assert!(numbers.eq(0..EVENTS), "{} of {EVENTS} events, in order", found.len());
    }

    #[test]
    fn a_lock_whose_owner_died_hides_no_event_and_is_freed() {
        let rings = anonymous();
        for number in 0..RINGS - 1 {
            // No process has this number.
            rings.ring(number).word(OWNER).store(u64::from(u32::MAX), Relaxed);
        }
        rings.append(event(1), &[]);
        assert_eq!(drained(&rings).len(), 1);
        assert!((0..RINGS).all(|number| rings.ring(number).word(OWNER).load(Relaxed) == 0));
    }

    #[test]
    fn any_bytes_are_no_events_and_do_no_harm() {
        let rings = anonymous();
        for offset in (HEADER_BYTES..LEN_BYTES).step_by(8) {
            rings.memory.word(offset).store(offset.wrapping_mul(0x9e37_79b9_7f4a_7c15), Relaxed);
        }
        drained(&rings);
        assert!(rings.lost() > 0);
        rings.append(event(5), &[]);
        assert_eq!(drained(&rings).len(), 1);
    }

    #[test]
    fn without_a_recorder_events_are_counted_and_no_writer_waits() {
        let rings = anonymous();
        rings.close();
        rings.append(event(1), &[]);
        rings.append(event(2), &[&vec![b'x'; TEXT_BYTES_MAX + 1]]);
        assert_eq!((rings.lost(), drained(&rings).len()), (2, 0));
    }
}
