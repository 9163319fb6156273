//! The thread of one queue of a virtual machine.
//!
//! Invariants:
//! 1. The thread waits only for the guest's notification, and for its mailbox.
//! 2. The thread ends after [`Running::stop`], once each request that it has taken is answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};

use super::event::Event;
use super::ring::{Disk, Mail, Parts, Ring};
use crate::ServeError;
use crate::log::Log;

/// A queue that is served.
pub(super) struct Running {
    switch: Arc<Switch>,
    thread: JoinHandle<u16>,
}

struct Switch {
    mailbox: Arc<Mail>,
    is_leaving: AtomicBool,
}

/// The events of a queue beside its requests.
pub(super) struct Events {
    /// The guest notifies of requests.
    pub(super) kick: Arc<Event>,
    /// The monitor is told of faults.
    pub(super) fault: Option<Arc<Event>>,
}

impl Running {
    /// Starts a thread for the queue of `parts`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn start(
        disk: Arc<Disk>,
        parts: Parts,
        events: Events,
        log: Arc<Log>,
    ) -> Result<Self, ServeError> {
        let mailbox = Arc::clone(&parts.mailbox);
        let switch = Arc::new(Switch { mailbox, is_leaving: AtomicBool::new(false) });
        let number = parts.number;
        let of_thread = Arc::clone(&switch);
        let serve = move || serve(Ring::new(disk, parts), &of_thread, &events, number, &log);
        let thread = std::thread::Builder::new().name(format!("vhost-queue{number}"));
        let thread = thread.spawn(serve);
        let failed = |error| ServeError::io("cannot start a thread for a queue", error);
        Ok(Self { switch, thread: thread.map_err(failed)? })
    }

    /// Has the thread look at its queue and at the machine's memory anew.
    pub(super) fn wake(&self) {
        self.switch.mailbox.wake().wake();
    }

    /// Has the thread take no more requests.
    pub(super) fn leave(&self) {
        self.switch.is_leaving.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits until each request that the thread has taken is answered, and ends it. Returns the
    /// index of the next request, or `None` if the thread has panicked.
    pub(super) fn stop(self) -> Option<u16> {
        self.leave();
        self.thread.join().ok()
    }
}

/// Serves a queue until it is told to leave. Returns the index of the next request.
fn serve(mut ring: Ring, switch: &Switch, events: &Events, number: u16, log: &Log) -> u16 {
    let mut is_told = false;
    loop {
        let is_leaving = switch.is_leaving.load(Ordering::Acquire);
        ring.turn(is_leaving);
        if let (Some(fault), false) = (ring.fault(), is_told) {
            is_told = true;
            log.line(&format!("vhost-user: queue {number} takes no more requests: {fault}"));
            events.fault.iter().for_each(|fault| fault.signal());
        }
        if is_leaving && ring.in_flight() == 0 {
            return ring.finish();
        }
        if is_leaving || !ring.has_more() {
            wait(&ring, switch, events);
        }
    }
}

/// Waits for the next request, unless the ring can take none, and for the mailbox.
fn wait(ring: &Ring, switch: &Switch, events: &Events) {
    let wake = ring.wake();
    let mut ready = vec![PollFd::new(wake, PollFlags::IN)];
    if ring.may_take() && !switch.is_leaving.load(Ordering::Acquire) {
        ready.push(PollFd::new(&*events.kick, PollFlags::IN));
    }
    // An interrupted wait looks at the queue, and waits again.
    let _ = poll(&mut ready, None);
    if ready.get(1).is_some_and(|kick| !kick.revents().is_empty()) {
        events.kick.reset();
    }
    wake.reset();
}
