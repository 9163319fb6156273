//! Lanes: the calls that threads make around the log at present.
//!
//! A write to a plain file takes no lock and leaves no record. A thread that begins a file's story
//! must therefore know that no such write is in flight: the real sync that follows might miss it.
//!
//! Invariants:
//! 1. A writer announces its write in its lane, and then looks whether the file has an entry. A
//!    thread that begins a story adds an entry to the table, and then looks at all lanes. Both
//!    store before they load, in one total order (`SeqCst`): the writer finds the entry, or the
//!    other thread sees the lane.
//! 2. A lane belongs to one thread until the thread has ended. A signal handler that interrupts a
//!    call of its thread announces [`ANY`], which includes that call.
//!
//! 3. The count of used lanes grows before a lane is taken: a look at all used lanes touches no
//!    page of the control memory that never had a lane.
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
/// Few, since loom explores each.
#[cfg(loom)]
const LANES: u64 = 2;
/// A change of names or attributes.
const METADATA: u64 = 1 << 62;
/// Writes to any files.
const ANY: u64 = 1 << 61;
/// How long a thread that begins a story sleeps between two looks at a busy lane.
const PAUSE: Duration = Duration::from_micros(50);

const _: () = assert!(LANES_AT + LANES * LANE_BYTES <= KINDS_AT);

thread_local! {
    /// The number of the thread's lane plus 1, and the owner that took it; 0: none yet.
    static OWN: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// A call around the log that a thread is about to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlainCall {
    /// A write to the file with these numbers.
    Write {
        /// Device number.
        device: u64,
        /// Inode number.
        inode: u64,
    },
    /// A change of names or attributes.
    Metadata,
}

/// A call around the log. Dropping this says that the call is over.
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

/// The calls that threads make around the log at present.
#[derive(Clone, Copy)]
pub struct Lanes<'a> {
    pub(super) log: &'a Log,
}

impl<'a> Lanes<'a> {
    /// Announces a call of the calling thread. Returns `None` if the thread has no lane; the caller
    /// must then add an entry for the file and mark it.
    #[inline]
    pub fn enter(self, call: PlainCall) -> Option<InFlight<'a>> {
        let word = self.own_lane()?.in_flight;
        let said = match call {
            PlainCall::Write { device, inode } => table::bucket_number(device, inode) + 1,
            PlainCall::Metadata => METADATA,
        };
        let before = word.load(Ordering::Relaxed);
        // A signal handler replaces the word of the call that it interrupts.
        let said = if before == 0 { said } else { said | before | ANY };
        store_before_loads(word, said);
        Some(InFlight { word, before })
    }

    #[inline]
    fn own_lane(self) -> Option<Lane<'a>> {
        let (number, of) = OWN.get();
        let lane = lane(&self.log.ring.control, number.checked_sub(1)?);
        // With another owner, this is a forked child, or the supervisor took the thread for dead.
        (of == owner() && lane.owner.load(Ordering::Relaxed) == of).then_some(lane)
    }

    /// Gives the calling thread a lane if it has none, after [`enter`](Self::enter) returned
    /// `None`. The thread stays without one if more threads live than there are lanes. `is_alive`
    /// takes the numbers of process and thread.
    #[cold]
    pub fn claim(self, is_alive: impl Fn(u32, u32) -> bool) {
        if self.own_lane().is_some() {
            return;
        }
        let own = owner();
        // The first free lane, since the beginning of a story looks at all up to the last used one.
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

    /// Clears the lane of a thread that has ended. Counts a metadata change that was in flight.
    fn reap_lane(self, lane: Lane<'_>) {
        if lane.in_flight.swap(0, Ordering::SeqCst) & METADATA != 0 {
            self.log.file_systems().note_change_everywhere();
        }
    }

    /// Returns the lanes that were ever used.
    fn used_lanes(self) -> impl Iterator<Item = Lane<'a>> {
        let used = self.log.ring.control.lanes_used().load(Ordering::SeqCst).min(LANES);
        (0..used).map(|number| lane(&self.log.ring.control, number))
    }

    /// Frees the lanes of a process that has ended. A change of names or attributes that was in
    /// flight counts as pending in all file systems.
    pub fn release_of(self, process: u32) {
        for lane in self.used_lanes() {
            let of = lane.owner.load(Ordering::Relaxed);
            if of != 0 && process_of(of) == process {
                self.reap_lane(lane);
                let _ = lane.owner.compare_exchange(of, 0, Ordering::SeqCst, Ordering::Relaxed);
            }
        }
    }

    /// Waits for the end of all plain writes that are in flight at the call, on this file or on one
    /// that shares its bucket. Returns `false` if one goes on after `timeout`.
    ///
    /// The file must have an entry by now: see the module's first invariant.
    pub fn wait_for_plain(self, device: u64, inode: u64, timeout: Duration) -> bool {
        let said = table::bucket_number(device, inode) + 1;
        let until_ns = now_ns().saturating_add(nanoseconds(timeout));
        let own = self.own_lane().map(|lane| std::ptr::from_ref(lane.in_flight));
        // A thread that takes a lane behind the last one raises the count before it announces a
        // write: if that lane is unseen here, the thread finds the entry.
        self.used_lanes().all(|lane| {
            // The own lane is idle, unless this handler interrupted a write, which cannot end
            // meanwhile.
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

/// Forgets the thread's lane: each run of a loom model has lanes of its own, on one thread.
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

/// Returns whether the call that `word` announces may be a write to a file of `bucket`.
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
        // An entry for the file makes no difference here.
        log.entry_for(&key(7)).unwrap();
    }
}
