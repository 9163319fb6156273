//! The machine that tiers run on: this one, or one that is modelled in virtual time.
//!
//! A model runs the shipped tiers on a machine that is not there: it has threads, CPUs and a clock
//! of its own, and plays all of them on one thread of the system. That thread [`enter`]s the model;
//! from then on what tiers ask of their machine below is asked of the model.
//!
//! Invariants:
//! 1. Without a model in the process, a question costs one load of a word that never changes.
//! 2. A model is the machine of the thread that entered it, and of no other one.
//! 3. A model switches between its threads only inside the calls of [`Machine`] that say so: what
//!    runs between two of those is atomic to its other threads.
//!
//! Entry points: [`Machine`] is what a model implements, [`enter`] makes it the thread's machine.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A modelled machine. "May switch" says that other threads of the model may run during a call.
///
/// Locks and events are named by their address.
pub trait Machine {
    /// Number of CPUs.
    fn cpus(&self) -> u32;

    /// The virtual time in nanoseconds. May switch: a reading of a clock takes time too.
    fn now_ns(&self) -> u64;

    /// Nanoseconds that the calling thread has spent on a CPU.
    fn thread_cpu_ns(&self) -> u64;

    /// Nanoseconds that all threads have spent on CPUs.
    fn process_cpu_ns(&self) -> u64;

    /// Starts a thread and returns its number.
    fn spawn(&self, body: Box<dyn FnOnce() + Send>) -> u64;

    /// The number of the calling thread.
    fn current(&self) -> u64;

    /// Returns when `thread` has ended. May switch.
    fn join(&self, thread: u64);

    /// Lets other threads run that wait for a CPU. May switch.
    fn yield_now(&self);

    /// One turn of a loop that looks for what another thread does. May switch.
    fn pause(&self);

    /// Waits until `lock`, which another thread holds, was unlocked. May switch.
    fn await_unlock(&self, lock: usize);

    /// The calling thread has taken `lock`. May switch.
    fn locked(&self, lock: usize);

    /// The calling thread is about to unlock `lock`.
    fn unlocked(&self, lock: usize);

    /// Waits for a notification of `event`, until `until_ns` at most. False where that time came
    /// first. The thread will take `lock` next, which it has just unlocked. May switch, and only
    /// after the thread waits.
    fn wait(&self, event: usize, lock: usize, until_ns: Option<u64>) -> bool;

    /// Wakes one thread that waits for `event`, or all of them.
    fn notify(&self, event: usize, all: bool);

    /// The calling thread has copied `bytes` bytes from memory to memory. May switch.
    fn copied(&self, bytes: usize);
}

/// A thread of this process has entered a model.
static IS_ANY_MODELLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static MODEL: RefCell<Option<Rc<dyn Machine>>> = const { RefCell::new(None) };
}

/// The thread that called [`enter`] leaves the model when this is dropped.
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

/// The model that the calling thread has entered.
#[inline]
pub(crate) fn modelled() -> Option<Rc<dyn Machine>> {
    if IS_ANY_MODELLED.load(Ordering::Relaxed) { model() } else { None }
}

#[cold]
fn model() -> Option<Rc<dyn Machine>> {
    // None too while the locals of the thread are destroyed.
    MODEL.try_with(|model| model.borrow().clone()).ok().flatten()
}

/// Number of threads of this process that can run at once.
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

/// One turn of a loop that looks for what another thread does.
pub(crate) fn pause() {
    const SPINS: u32 = 16;
    match modelled() {
        Some(machine) => machine.pause(),
        None => (0..SPINS).for_each(|_| std::hint::spin_loop()),
    }
}

/// The calling thread has copied `bytes` bytes from memory to memory.
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
    /// The system refuses another one.
    pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        match modelled() {
            Some(machine) => Ok(Self::Modelled(machine.spawn(Box::new(body)))),
            None => std::thread::Builder::new().name(name).spawn(body).map(Self::System),
        }
    }

    /// It is the calling thread.
    pub(crate) fn is_current(&self) -> bool {
        match self {
            Self::System(thread) => thread.thread().id() == std::thread::current().id(),
            Self::Modelled(thread) => {
                modelled().is_some_and(|machine| machine.current() == *thread)
            }
        }
    }

    /// Returns when it has ended. One that panicked has already printed why.
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
