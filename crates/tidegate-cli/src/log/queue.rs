//! Lines that wait for the thread that writes them. A full queue drops lines and counts them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Most lines that wait.
const LINES_MAX: usize = 1024;

/// Lines that wait to be written.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<String>,
    /// Lines dropped since the last line of the queue was taken.
    dropped: u64,
    /// Taken lines are being written.
    is_writing: bool,
}

/// Lines to write.
pub(super) struct Taken {
    pub(super) lines: VecDeque<String>,
    /// The number of lines dropped after these ones.
    pub(super) dropped: u64,
}

impl Queue {
    /// Adds `line` without waiting. Drops the line if the queue is full.
    pub(super) fn push(&self, line: String) {
        let mut state = self.state.lock();
        if state.lines.len() < LINES_MAX {
            state.lines.push_back(line);
            self.changed.notify_all();
        } else {
            state.dropped += 1;
        }
    }

    /// Waits for lines and takes them all. The caller writes them, and then calls
    /// [`note_written`](Self::note_written).
    pub(super) fn take(&self) -> Taken {
        let mut state = self.state.lock();
        while state.lines.is_empty() {
            self.changed.wait(&mut state);
        }
        state.is_writing = true;
        let lines = std::mem::take(&mut state.lines);
        Taken { lines, dropped: std::mem::take(&mut state.dropped) }
    }

    /// Notes that the taken lines are written.
    pub(super) fn note_written(&self) {
        self.state.lock().is_writing = false;
        self.changed.notify_all();
    }

    /// Waits until all lines are written, at most `timeout`. Returns whether they are.
    pub(super) fn wait_until_written(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.is_writing || !state.lines.is_empty() {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_and_counts_lines_and_never_waits() {
        let queue = Queue::default();
        (0..LINES_MAX + 3).for_each(|number| queue.push(number.to_string()));
        assert!(!queue.wait_until_written(Duration::from_millis(1)), "no thread writes");
        let taken = queue.take();
        assert_eq!((taken.lines.len(), taken.dropped), (LINES_MAX, 3));
        assert_eq!(taken.lines.back(), Some(&(LINES_MAX - 1).to_string()), "the oldest are kept");
        assert!(!queue.wait_until_written(Duration::from_millis(1)), "they are being written");
        queue.push("next".into());
        queue.note_written();
        let taken = queue.take();
        assert_eq!((taken.lines.len(), taken.dropped), (1, 0));
    }

    #[test]
    fn a_waiting_thread_goes_on_once_all_lines_are_written() {
        let queue = Queue::default();
        assert!(queue.wait_until_written(Duration::ZERO), "an empty queue");
        std::thread::scope(|scope| {
            queue.push("line".into());
            let waits = scope.spawn(|| queue.wait_until_written(Duration::from_secs(600)));
            drop(queue.take());
            queue.note_written();
            assert!(waits.join().unwrap());
        });
    }
}
