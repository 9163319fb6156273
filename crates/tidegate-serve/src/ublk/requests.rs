//! The requests of one queue, without the kernel: they arrive by tag, run on the device, and leave
//! as answers.
//!
//! Invariants:
//! 1. Each request that arrives gets exactly one answer, from [`Requests::arrive`] at once or later
//!    from [`Requests::collect`].
//! 2. Each tag has one request at a time, and a buffer for its data. The tag's request has the
//!    buffer while it runs.

use std::sync::Arc;

use rustix::io::Errno;
use tidegate::device::{BlockDevice, Context, IoBuffer, OwnedOperation, Result};

use super::abi::Descriptor;
use super::request::{answer, check, refusal};
use crate::mailbox::Mailbox;
use crate::queue::{DeviceQueue, Done, Then};
use crate::request::{Request, Rules};
use crate::statistics::{RequestCounters, Tally};

/// A request at the device, and its tag.
pub(super) type Tagged = (u16, Request);

/// The mailbox of a queue's complete requests.
pub(super) type Mail = Mailbox<Done<Tagged>>;

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) tag: u16,
    /// Bytes, 0, or a negative error number.
    pub(super) result: i32,
}

/// The requests of one queue.
pub(super) struct Requests {
    rules: Rules,
    device: DeviceQueue<Tagged>,
    buffers: Vec<Option<IoBuffer>>,
    done: Vec<Done<Tagged>>,
    tally: Tally,
    counters: Arc<RequestCounters>,
}

impl Requests {
    /// Returns the requests of queue `number` with `depth` tags. Returns `None` without memory for
    /// the buffers.
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        rules: Rules,
        (number, depth): (u16, u16),
        mailbox: Arc<Mail>,
        counters: Arc<RequestCounters>,
    ) -> Option<Self> {
        let buffer = |_| IoBuffer::try_new(rules.request_bytes_max as usize).map(Some);
        let buffers = (0..depth).map(buffer).collect::<Option<_>>()?;
        let context = Context { queue: number.into(), class: 0 };
        let device = DeviceQueue::new(device, context, mailbox);
        let (done, tally) = (Vec::new(), Tally::default());
        Some(Self { rules, device, buffers, done, tally, counters })
    }

    /// Returns the number of requests that are at the device.
    pub(super) fn in_flight(&self) -> usize {
        self.device.in_flight()
    }

    /// Returns the address of the tag's buffer, for the kernel; 0 while the device has the buffer.
    pub(super) fn address(&self, tag: u16) -> u64 {
        let buffer = self.buffers.get(usize::from(tag)).and_then(Option::as_ref);
        buffer.map_or(0, |buffer| buffer.data().as_ptr().expose_provenance() as u64)
    }

    /// Runs a request that has arrived. Returns the answer, or `None` if it comes later.
    pub(super) fn arrive(&mut self, tag: u16, descriptor: &Descriptor) -> Option<Answer> {
        let request = match check(descriptor, &self.rules) {
            Ok(request) => request,
            Err(error) => {
                self.tally.refused(None);
                return Some(Answer { tag, result: refusal(error) });
            }
        };
        let buffer = self.buffers.get_mut(usize::from(tag));
        let Some(mut operation) = buffer.and_then(|buffer| request.operation(buffer)) else {
            self.tally.refused(Some(request.kind()));
            return Some(Answer { tag, result: refusal(Errno::INVAL) });
        };
        if let Some(result) = self.device.attempt(&mut operation.borrow()) {
            return Some(self.answer((tag, request), operation, &result));
        }
        self.device.start((tag, request), operation, Then::Complete);
        None
    }

    /// Adds the answers of the requests that are complete to `answers`.
    pub(super) fn collect(&mut self, answers: &mut Vec<Answer>) {
        let mut done = std::mem::take(&mut self.done);
        self.device.collect(&mut done);
        for Done { tag, result, operation } in done.drain(..) {
            answers.push(self.answer(tag, operation, &result));
        }
        self.done = done;
    }

    /// Adds the counts since the last call to the device's counters.
    pub(super) fn publish_counts(&mut self) {
        self.counters.add(&mut self.tally);
    }

    fn answer(
        &mut self,
        (tag, request): Tagged,
        operation: OwnedOperation,
        result: &Result<()>,
    ) -> Answer {
        if let Some(buffer) = operation.into_buffer() {
            self.buffers[usize::from(tag)] = Some(buffer);
        }
        match result {
            Ok(()) => self.tally.done(Some(request.kind()), request.counted_bytes()),
            Err(error) => self.tally.ended_with(Some(request.kind()), error),
        }
        Answer { tag, result: answer(&request, result) }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use tidegate::device::fault::{Effect, Fault, Rule, When};
    use tidegate::device::memory::MemoryDevice;
    use tidegate::device::{BlockDeviceExt, DeviceErrorKind, Op, WriteFlags};

    use super::super::abi::op;
    use super::*;
    use crate::statistics::StatisticsSource;

    const BLOCK_BYTES: u32 = 4096;

    /// A queue of a device filled with ones, and the kernel's side of it.
    struct Scene {
        fault: Arc<Fault>,
        mailbox: Arc<Mail>,
        requests: Requests,
        counters: Arc<RequestCounters>,
    }

    impl Scene {
        fn new(depth: u16) -> Self {
            let device = MemoryDevice::new(BLOCK_BYTES, 64).expect("a device");
            device
                .write(0, &vec![1; 64 * BLOCK_BYTES as usize], WriteFlags::default())
                .expect("written");
            let fault = Arc::new(Fault::new(Arc::new(device), 0));
            let mailbox = Arc::new(Mail::new().expect("a mailbox"));
            let counters = Arc::<RequestCounters>::default();
            let device: Arc<dyn BlockDevice> = Arc::<Fault>::clone(&fault);
            let rules = Rules {
                geometry: device.geometry(),
                read_only: false,
                request_bytes_max: 4 * BLOCK_BYTES,
            };
            let (mail, counted) = (Arc::clone(&mailbox), Arc::clone(&counters));
            let requests = Requests::new(device, rules, (0, depth), mail, counted);
            Self { fault, mailbox, requests: requests.expect("memory"), counters }
        }

        fn arrive(&mut self, tag: u16, op_flags: u32, block: u64) -> Option<Answer> {
            let descriptor =
                Descriptor { op_flags, sectors: 8, first_sector: 8 * block, address: 0 };
            self.requests.arrive(tag, &descriptor)
        }

        /// Returns the next `count` answers, as the queue's thread gets them.
        fn await_answers(&mut self, count: usize) -> Vec<Answer> {
            let mut answers = Vec::new();
            while answers.len() < count {
                let mut woken = [PollFd::new(self.mailbox.wake(), PollFlags::IN)];
                poll(&mut woken, None).expect("it waits");
                self.mailbox.wake().reset();
                self.requests.collect(&mut answers);
            }
            answers
        }

        fn data(&self, tag: u16) -> &[u8] {
            self.requests.buffers[usize::from(tag)].as_ref().expect("the tag has its buffer").data()
        }

        /// Puts `byte` into the tag's buffer, as the kernel does before a write arrives.
        fn put(&mut self, tag: u16, byte: u8) {
            let buffer = self.requests.buffers[usize::from(tag)].as_mut();
            buffer.expect("the tag has its buffer").data_mut().fill(byte);
        }
    }

    #[test]
    fn data_goes_through_the_buffer_of_the_tag() {
        let mut scene = Scene::new(2);
        let address = scene.requests.address(1);
        assert_ne!(address, 0);
        scene.put(1, 7);
        let mut answers: Vec<_> = scene.arrive(1, op::WRITE, 3).into_iter().collect();
        if answers.is_empty() {
            answers = scene.await_answers(1);
        }
        assert_eq!(answers, [Answer { tag: 1, result: 4096 }]);
        assert_eq!(scene.requests.address(1), address, "the kernel copies the next data there");
        for (block, byte) in [(3, 7), (4, 1)] {
            if scene.arrive(0, op::READ, block).is_none() {
                scene.await_answers(1);
            }
            assert!(scene.data(0) == [byte; BLOCK_BYTES as usize], "block {block}");
        }
    }

    /// No request waits for another one, so a slow backing has as many requests as tags.
    #[test]
    fn all_tags_of_a_queue_are_at_the_device_at_once() {
        const DEPTH: u16 = 64;
        let mut scene = Scene::new(DEPTH);
        scene.fault.add(Rule::new(&[Op::Read], When::Always, Effect::Hang));
        for tag in 0..DEPTH {
            assert_eq!(scene.arrive(tag, op::READ, tag.into()), None);
            assert_eq!(scene.requests.address(tag), 0, "the device has the buffer");
        }
        scene.fault.wait_until_hung(DEPTH.into());
        assert_eq!(scene.requests.in_flight(), usize::from(DEPTH));
        scene.fault.heal();
        scene.fault.release();
        let mut answers = scene.await_answers(DEPTH.into());
        answers.sort_by_key(|answer| answer.tag);
        let expected: Vec<_> = (0..DEPTH).map(|tag| Answer { tag, result: 4096 }).collect();
        assert_eq!(answers, expected);
        assert_eq!(scene.requests.in_flight(), 0);
    }

    #[test]
    fn failures_are_answers_and_are_counted() {
        let mut scene = Scene::new(4);
        scene.fault.add(Rule::new(&[Op::Read], When::Nth(1), Effect::Fail(DeviceErrorKind::Io)));
        let no_space = Effect::Fail(DeviceErrorKind::NoSpace);
        scene.fault.add(Rule::new(&[Op::Write], When::Nth(1), no_space));
        let mut answers: Vec<_> =
            [(0, op::READ, 0), (1, op::WRITE, 0), (2, op::READ, 64), (3, 99, 0)]
                .into_iter()
                .filter_map(|(tag, op_flags, block)| scene.arrive(tag, op_flags, block))
                .collect();
        answers.extend(scene.await_answers(4 - answers.len()));
        answers.sort_by_key(|answer| answer.tag);
        assert_eq!(
            answers.iter().map(|answer| answer.result).collect::<Vec<_>>(),
            [-5, -28, -22, -95]
        );
        scene.requests.publish_counts();
        let found = StatisticsSource::of(scene.counters).snapshot();
        assert_eq!((found.errors, found.failures), (4, 2));
        // A tag whose request failed gets the next one.
        assert_ne!(scene.requests.address(0), 0);
    }

    #[test]
    fn a_tag_that_the_queue_lacks_is_refused() {
        let mut scene = Scene::new(1);
        let refused = scene.arrive(1, op::READ, 0);
        assert_eq!(refused, Some(Answer { tag: 1, result: -22 }));
        assert_eq!(scene.requests.address(1), 0);
    }
}
