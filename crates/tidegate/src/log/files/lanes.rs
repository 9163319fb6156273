//! Lanes: what a thread does to files around the log at this moment.
//!
//! A write to a plain file takes no lock and leaves no record. So the thread that begins a file's
//! story has to know that no such write is in flight, which the real sync that follows might miss.
//!
//! Invariants:
//! 1. A writer says in its lane what it is about to write, and then looks whether the file has an
//!    entry. A story begins with an entry in the table, and then looks at all lanes. Both do the
//!    store before the load, in one total order (`SeqCst`): the writer finds the entry, or the lane
//!    is seen.
//! 2. A lane is one thread's until the thread has ended. A signal handler that writes while its
//!    thread does says [`ANY`]: what it hides is among that.
//!
//! 3. How many lanes were ever used is noted before one of them is taken: a look at all of them
//!    touches no page of the control memory that no lane was ever in.
//!
//! Entry points: [`Lanes::enter`]; [`Lanes::wait_for_plain`]; [`Lanes::release_of`] for the
//! supervisor.

use std::cell::Cell;
use std::time::Duration;

use super::Log;
use crate::log::control::owner::{owner, process_of, thread_of};
use crate::log::control::table;
use crate::log::control::{Control, KINDS_AT, LANES_AT};
use crate::sync::{AtomicU64, Ordering, store_before_loads};
use crate::tier::clock::now_ns;

const LANE_BYTES: u64 = 64;
#[cfg(not(loom))]
const LANES: u64 = 8192;
/// Few, for loom looks at each.
#[cfg(loom)]
const LANES: u64 = 2;
/// A change of names or attributes.
const METADATA: u64 = 1 << 62;
/// Writes to any files.
const ANY: u64 = 1 << 61;
/// How long the beginning of a story sleeps between two looks at a lane that is in use.
const PAUSE: Duration = Duration::from_micros(50);

const _: () = assert!(LANES_AT + LANES * LANE_BYTES <= KINDS_AT);

thread_local! {
    /// The thread's lane plus 1; 0: none yet.
    static OWN: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// What a thread is about to do around the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlainCall {
    /// It writes to the file with these numbers.
    Write {
        /// Device number.
        device: u64,
        /// Inode number.
        inode: u64,
    },
    /// It changes names or attributes.
    Metadata,
}

/// A call around the log; dropping it says that the call is over.
pub struct InFlight<'a> {
    word: &'a AtomicU64,
    before: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.word.store(self.before, Ordering::Release);
    }
}

#[derive(Clone, Copy)]
struct Lane<'a> {
    owner: &'a AtomicU64,
    in_flight: &'a AtomicU64,
}

fn lane(control: &Control, number: u64) -> Lane<'_> {
    let at = LANES_AT + number % LANES * LANE_BYTES;
    Lane { owner: control.memory().word(at), in_flight: control.memory().word(at + 8) }
}

/// What threads do around the log at this moment.
#[derive(Clone, Copy)]
pub struct Lanes<'a> {
    pub(super) log: &'a Log,
}

impl<'a> Lanes<'a> {
    /// Says what the calling thread is about to do around the log. None: there is no lane for it;
    /// the caller then has to give the file an entry and mark it.
    #[inline]
    pub fn enter(self, call: PlainCall) -> Option<InFlight<'a>> {
        let word = self.own_lane()?.in_flight;
        let said = match call {
            PlainCall::Write { device, inode } => table::bucket_number(device, inode) + 1,
            PlainCall::Metadata => METADATA,
        };
        let before = word.load(Ordering::Relaxed);
        // A handler that interrupted a call on this thread hides what that said.
        let said = if before == 0 { said } else { said | before | ANY };
        store_before_loads(word, said);
        Some(InFlight { word, before })
    }

    #[inline]
    fn own_lane(self) -> Option<Lane<'a>> {
        let (number, of) = OWN.get();
        let lane = lane(&self.log.ring.control, number.checked_sub(1)?);
        // Another owner: this is a forked child, or the supervisor took the thread for dead.
        (of == owner() && lane.owner.load(Ordering::Relaxed) == of).then_some(lane)
    }

    /// Gives the calling thread a lane if it has none. To be called where [`enter`](Self::enter)
    /// says that there is none; the thread has one afterwards unless more threads live than there
    /// are lanes.
    #[cold]
    pub fn claim(self, is_alive: impl Fn(u32, u32) -> bool) {
        if self.own_lane().is_some() {
            return;
        }
        let own = owner();
        // The first free one: the beginning of a story looks at all up to the last one ever used.
        let is_free =
            |number: &u64| lane(&self.log.ring.control, *number).owner.load(Ordering::Relaxed) == 0;
        let free = (0..LANES).find(|number| is_free(number) && self.take_lane(*number, 0, own));
        let taken = free.or_else(|| {
            (0..LANES).find(|number| {
                let of = lane(&self.log.ring.control, *number).owner.load(Ordering::Relaxed);
                !is_alive(process_of(of), thread_of(of)) && self.take_lane(*number, of, own)
            })
        });
        if let Some(number) = taken {
            OWN.set((number + 1, own));
        }
    }

    fn take_lane(self, number: u64, from: u64, own: u64) -> bool {
        // Before the lane is used: see `wait_for_plain`.
        self.log.ring.control.lanes_used().fetch_max(number + 1, Ordering::SeqCst);
        let lane = lane(&self.log.ring.control, number);
        let taken = lane.owner.compare_exchange(from, own, Ordering::SeqCst, Ordering::Relaxed);
        if taken.is_ok() && from != 0 {
            self.reap_lane(lane);
        }
        taken.is_ok()
    }

    /// Clears the lane of a thread that has ended; a change of names that it was killed in is
    /// counted.
    fn reap_lane(self, lane: Lane<'_>) {
        if lane.in_flight.swap(0, Ordering::SeqCst) & METADATA != 0 {
            self.log.file_systems().note_change_everywhere();
        }
    }

    /// The lanes that were ever used.
    fn used_lanes(self) -> impl Iterator<Item = Lane<'a>> {
        let used = self.log.ring.control.lanes_used().load(Ordering::SeqCst).min(LANES);
        (0..used).map(|number| lane(&self.log.ring.control, number))
    }

    /// Frees the lanes of a process that has ended. A change of names or attributes that it was
    /// killed in counts as pending in all file systems.
    pub fn release_of(self, process: u32) {
        for lane in self.used_lanes() {
            let of = lane.owner.load(Ordering::Relaxed);
            if of != 0 && process_of(of) == process {
                self.reap_lane(lane);
                let _ = lane.owner.compare_exchange(of, 0, Ordering::SeqCst, Ordering::Relaxed);
            }
        }
    }

    /// Waits until each plain write that was in flight when this was called, on this file or on one
    /// that shares its bucket, has ended. False: one goes on after `timeout`.
    ///
    /// The file must have an entry by now: see the module's first invariant.
    pub fn wait_for_plain(self, device: u64, inode: u64, timeout: Duration) -> bool {
        let said = table::bucket_number(device, inode) + 1;
        let until_ns = now_ns().saturating_add(nanoseconds(timeout));
        let own = self.own_lane().map(|lane| std::ptr::from_ref(lane.in_flight));
        // A thread that takes a lane behind the last one notes that before it says what it writes:
        // unseen here, it finds the entry.
        self.used_lanes().all(|lane| {
            // The caller's own lane hides nothing, unless a handler interrupted a write: that never
            // ends.
            let is_own = own == Some(std::ptr::from_ref(lane.in_flight));
            let is_over = || !is_about(lane.in_flight.load(Ordering::SeqCst), said);
            while !is_over() {
                if is_own || now_ns() >= until_ns {
                    return false;
                }
                pause();
            }
            true
        })
    }
}

/// The threads of loom's models are one of the kernel's, and each run of a model has lanes of its
/// own.
#[cfg(all(test, loom))]
pub(in crate::log) fn forget_own_lane() {
    OWN.set((0, 0));
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[expect(
    clippy::disallowed_methods,
    reason = "a writer that told of its end would pay with each plain write for a story that seldom begins"
)]
fn pause() {
    std::thread::sleep(PAUSE);
}

/// Whether a lane that says `word` may be about the bucket.
fn is_about(word: u64, bucket: u64) -> bool {
    word & ANY != 0 || word & !METADATA == bucket
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::log::tests::{key, log};

    const FILE: PlainCall = PlainCall::Write { device: 1, inode: 7 };
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn a_write_in_flight_is_waited_for_and_one_of_another_file_is_not() {
        let log = log();
        log.lanes().claim(|_, _| true);
        assert!(log.lanes().wait_for_plain(1, 7, SHORT));
        std::thread::scope(|scope| {
            let (entered, is_entered) = std::sync::mpsc::channel();
            let (leave, may_leave) = std::sync::mpsc::channel::<()>();
            let log = &log;
            scope.spawn(move || {
                assert!(log.lanes().enter(FILE).is_none(), "a thread without a lane");
                log.lanes().claim(|_, _| true);
                let write = log.lanes().enter(FILE).unwrap();
                entered.send(()).unwrap();
                let _ = may_leave.recv();
                drop(write);
            });
            is_entered.recv().unwrap();
            assert!(!log.lanes().wait_for_plain(1, 7, SHORT));
            assert!(log.lanes().wait_for_plain(1, 8, SHORT));
            drop(leave);
            assert!(log.lanes().wait_for_plain(1, 7, Duration::from_secs(10)));
        });
    }

    #[test]
    fn a_handler_inside_a_write_hides_nothing() {
        let log = log();
        log.lanes().claim(|_, _| true);
        let outer = log.lanes().enter(FILE).unwrap();
        let inner = log.lanes().enter(PlainCall::Write { device: 1, inode: 9 }).unwrap();
        std::thread::scope(|scope| {
            let both = || {
                (log.lanes().wait_for_plain(1, 7, SHORT), log.lanes().wait_for_plain(1, 9, SHORT))
            };
            assert_eq!(scope.spawn(both).join().unwrap(), (false, false));
            drop(inner);
            let both = || {
                (log.lanes().wait_for_plain(1, 7, SHORT), log.lanes().wait_for_plain(1, 9, SHORT))
            };
            assert_eq!(scope.spawn(both).join().unwrap(), (false, true));
        });
        drop(outer);
        assert!(log.lanes().wait_for_plain(1, 7, SHORT));
    }

    #[test]
    fn a_thread_that_died_in_a_change_of_names_leaves_it_pending() {
        let log = log();
        let fs = log.file_systems().find_or_add(77, true).unwrap();
        log.file_systems().committed(fs, log.file_systems().changes(fs));
        std::thread::scope(|scope| {
            let dying = || {
                log.lanes().claim(|_, _| true);
                std::mem::forget(log.lanes().enter(PlainCall::Metadata).unwrap());
            };
            scope.spawn(dying).join().unwrap();
        });
        assert!(!log.file_systems().is_pending(fs));
        log.lanes().release_of(crate::log::current_process());
        assert!(log.file_systems().is_pending(fs));
        assert!(log.lanes().wait_for_plain(1, 7, SHORT), "and is in flight no more");
        // An entry for the file does not matter here.
        log.entry_for(&key(7)).unwrap();
    }
}
