//! One queue of a device: a thread that gets requests from the kernel, runs them, and answers.
//!
//! Invariants:
//! 1. The thread waits only in the queue's ring, for requests and for its mailbox.
//! 2. The thread ends once the kernel has ended all tags, or after [`Switch::leave`] once each
//!    request that was started is answered. It then leaves requests that it did not start to the
//!    kernel.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use rustix::fd::AsFd;
use rustix::io::Errno;
use tidegate::device::BlockDevice;

use super::requests::{Answer, Mail, Requests};
use super::ring::{Event, QueueRing};
use crate::ServeError;
use crate::request::Rules;
use crate::statistics::RequestCounters;

/// Tells a queue's thread to leave.
pub(super) struct Switch {
    mailbox: Arc<Mail>,
    is_leaving: AtomicBool,
}

impl Switch {
    /// Returns a switch for a queue's thread.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new() -> Result<Arc<Self>, ServeError> {
        let mailbox = Arc::new(Mail::new()?);
        Ok(Arc::new(Self { mailbox, is_leaving: AtomicBool::new(false) }))
    }

    /// Has the thread start no more requests, and end once it has answered those in progress.
    pub(super) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Release);
        self.mailbox.wake().wake();
    }

    fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }
}

/// The parts of a queue, for its thread.
pub(super) struct QueueParts {
    pub(super) file: File,
    pub(super) number: u16,
    pub(super) depth: u16,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) rules: Rules,
    pub(super) counters: Arc<RequestCounters>,
    pub(super) switch: Arc<Switch>,
}

/// A queue, on its thread.
struct Queue {
    /// Dropped before the buffers in `requests`, as `ring` wants.
    ring: QueueRing,
    requests: Requests,
    switch: Arc<Switch>,
    depth: u16,
    /// Tags that get no more requests.
    ended_tags: usize,
    events: Vec<Event>,
    answers: Vec<Answer>,
}

/// Serves a queue until it ends. Sends the result of its start to `started`.
///
/// # Errors
/// The kernel takes no more commands; requests then wait for another server, or fail.
pub(super) fn serve(
    parts: QueueParts,
    started: &Sender<Result<(), ServeError>>,
) -> Result<(), Errno> {
    let mut queue = match Queue::start(parts) {
        Ok(queue) => queue,
        Err(error) => {
            // The starting thread has given up if it does not listen.
            let _ = started.send(Err(error));
            return Ok(());
        }
    };
    let _ = started.send(Ok(()));
    queue.run()
}

impl Queue {
    fn start(parts: QueueParts) -> Result<Self, ServeError> {
        let QueueParts { file, number, depth, device, rules, counters, switch } = parts;
        let failed = |error: std::io::Error| {
            ServeError::io(&format!("cannot make queue {number} of a ublk device"), error)
        };
        let mailbox = Arc::clone(&switch.mailbox);
        let requests = Requests::new(device, rules, (number, depth), mailbox, counters);
        let requests = requests.ok_or_else(|| failed(Errno::NOMEM.into()))?;
        let ring = QueueRing::new(file, number, depth).map_err(failed)?;
        let (events, answers) = (Vec::new(), Vec::new());
        let mut queue = Self { ring, requests, switch, depth, ended_tags: 0, events, answers };
        queue.fetch_all().map_err(|error| failed(error.into()))?;
        Ok(queue)
    }

    /// Asks for the first request of each tag. The kernel refuses here or never.
    fn fetch_all(&mut self) -> Result<(), Errno> {
        for tag in 0..self.depth {
            self.ring.fetch(tag, self.requests.address(tag))?;
        }
        self.ring.watch(self.switch.mailbox.wake().as_fd())?;
        self.ring.submit()?;
        self.ring.events(&mut self.events);
        let refused = self.events.iter().find_map(|event| match event {
            Event::Tag(_, Err(error)) => Some(*error),
            _ => None,
        });
        refused.map_or(Ok(()), Err)
    }

    fn run(&mut self) -> Result<(), Errno> {
        loop {
            self.handle_events()?;
            self.requests.collect(&mut self.answers);
            self.send_answers()?;
            if self.is_over() {
                return self.ring.submit();
            }
            self.ring.wait()?;
            self.ring.events(&mut self.events);
        }
    }

    fn handle_events(&mut self) -> Result<(), Errno> {
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            match event {
                Event::Woken => {
                    self.switch.mailbox.wake().reset();
                    self.ring.watch(self.switch.mailbox.wake().as_fd())?;
                }
                Event::Tag(_, Err(_)) => self.ended_tags += 1,
                Event::Tag(_, Ok(())) if self.switch.is_leaving() => {}
                Event::Tag(tag, Ok(())) => {
                    let descriptor = self.ring.descriptor(tag);
                    self.answers.extend(self.requests.arrive(tag, &descriptor));
                }
            }
        }
        self.events = events;
        Ok(())
    }

    /// Counts before it answers: a user that has its answer finds it counted.
    fn send_answers(&mut self) -> Result<(), Errno> {
        if self.answers.is_empty() {
            return Ok(());
        }
        self.requests.publish_counts();
        for answer in self.answers.drain(..) {
            self.ring.commit(answer, self.requests.address(answer.tag))?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        let has_ended = self.switch.is_leaving() || self.ended_tags >= usize::from(self.depth);
        has_ended && self.requests.in_flight() == 0
    }
}
