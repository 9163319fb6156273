//! The machine that tiers run on: the real one, or a model in virtual time.
//!
//! A model runs the shipped tiers on a simulated machine with its own threads, CPUs and clock, and
//! executes these threads on one thread of the system. That thread [`enter`]s the model. From then
//! on the functions below ask the model instead of the system.
//!
//! Invariants:
//! 1. Without a model in the process, a call costs one load of a word that never changes.
//! 2. A model is the machine only of the thread that entered it.
//! 3. A model switches between its threads only inside the calls of [`Machine`] that say so. Code
//!    between two such calls is atomic for its other threads.
//!
//! Entry points: a model implements [`Machine`], and [`enter`] makes it the thread's machine.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A modelled machine. "May switch" means that other threads of the model may run during a call.
///
/// Addresses identify locks and events.
pub trait Machine {
    /// Returns the number of CPUs.
    fn cpus(&self) -> u32;

    /// Returns the virtual time in nanoseconds. May switch, since reading a clock takes time.
    fn now_ns(&self) -> u64;

    /// Returns the nanoseconds that the calling thread has spent on a CPU.
    fn thread_cpu_ns(&self) -> u64;

    /// Returns the nanoseconds that all threads have spent on CPUs.
    fn process_cpu_ns(&self) -> u64;

    /// Starts a thread and returns its number.
    fn spawn(&self, body: Box<dyn FnOnce() + Send>) -> u64;

    /// Returns the number of the calling thread.
    fn current(&self) -> u64;

    /// Waits until `thread` has ended. May switch.
    fn join(&self, thread: u64);

    /// Lets other threads run that wait for a CPU. May switch.
    fn yield_now(&self);

    /// Pauses for one turn of a loop that polls for another thread's change. May switch.
    fn pause(&self);

    /// Waits until another thread unlocks `lock`. May switch.
    fn await_unlock(&self, lock: usize);

    /// Notes that the calling thread has taken `lock`. May switch.
    fn locked(&self, lock: usize);

    /// Notes that the calling thread is about to unlock `lock`.
    fn unlocked(&self, lock: usize);

    /// Waits for a notification of `event`, at most until `until_ns`. Returns `false` if none came
    /// by then. The thread has just unlocked `lock` and will take it next. May switch, but only
    /// once it waits.
    fn wait(&self, event: usize, lock: usize, until_ns: Option<u64>) -> bool;

    /// Wakes one thread that waits for `event`, or all such threads.
    fn notify(&self, event: usize, all: bool);

    /// Notes that the calling thread has copied `bytes` bytes from memory to memory. May switch.
    fn copied(&self, bytes: usize);
}

/// Whether a thread of this process has ever entered a model.
static IS_ANY_MODELLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static MODEL: RefCell<Option<Rc<dyn Machine>>> = const { RefCell::new(None) };
}

/// Keeps the thread that called [`enter`] in the model. Dropping it leaves the model.
pub struct Entered(());

/// Makes `machine` the machine of the calling thread.
#[must_use = "the thread leaves the model when this is dropped"]
pub fn enter(machine: Rc<dyn Machine>) -> Entered {
    IS_ANY_MODELLED.store(true, Ordering::Relaxed);
    MODEL.replace(Some(machine));
    Entered(())
}

impl Drop for Entered {
    fn drop(&mut self) {
        MODEL.replace(None);
    }
}

/// Returns the model that the calling thread has entered.
#[inline]
pub(crate) fn modelled() -> Option<Rc<dyn Machine>> {
    if IS_ANY_MODELLED.load(Ordering::Relaxed) { model() } else { None }
}

#[cold]
fn model() -> Option<Rc<dyn Machine>> {
    // Also `None` while the thread's locals are destroyed.
    MODEL.try_with(|model| model.borrow().clone()).ok().flatten()
}

/// Returns how many threads of this process can run at once.
pub(crate) fn cpus() -> u32 {
    modelled().map_or_else(
        || std::thread::available_parallelism().map_or(1, |cpus| saturated(cpus.get())),
        |machine| machine.cpus(),
    )
}

fn saturated(cpus: usize) -> u32 {
    u32::try_from(cpus).unwrap_or(u32::MAX)
}

/// Lets other threads run that wait for a CPU.
pub(crate) fn yield_now() {
    match modelled() {
        Some(machine) => machine.yield_now(),
        None => std::thread::yield_now(),
    }
}

/// Pauses for one turn of a loop that polls for another thread's change.
pub(crate) fn pause() {
    const SPINS: u32 = 16;
    match modelled() {
        Some(machine) => machine.pause(),
        None => (0..SPINS).for_each(|_| std::hint::spin_loop()),
    }
}

/// Notes that the calling thread has copied `bytes` bytes from memory to memory.
#[inline]
pub(crate) fn copied(bytes: usize) {
    if let Some(machine) = modelled() {
        machine.copied(bytes);
    }
}

/// A thread of the system or of a model.
pub(crate) enum Thread {
    System(JoinHandle<()>),
    Modelled(u64),
}

impl Thread {
    /// Starts a thread.
    ///
    /// # Errors
    /// Fails if the system refuses another thread.
    pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        match modelled() {
            Some(machine) => Ok(Self::Modelled(machine.spawn(Box::new(body)))),
            None => std::thread::Builder::new().name(name).spawn(body).map(Self::System),
        }
    }

    /// Returns whether this is the calling thread.
    pub(crate) fn is_current(&self) -> bool {
        match self {
            Self::System(thread) => thread.thread().id() == std::thread::current().id(),
            Self::Modelled(thread) => {
                modelled().is_some_and(|machine| machine.current() == *thread)
            }
        }
    }

    /// Waits until the thread has ended. A thread that panicked has already printed why.
    pub(crate) fn join(self) {
        match self {
            Self::System(thread) => drop(thread.join()),
            Self::Modelled(thread) => {
                if let Some(machine) = modelled() {
                    machine.join(thread);
                }
            }
        }
    }
}
