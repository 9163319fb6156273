//! Reports on standard error the current step and the remaining time.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Progress through a plan whose length is known in advance.
#[derive(Debug)]
pub struct Progress {
    planned: Duration,
    done: Duration,
    current: Duration,
    begun: Instant,
    terminal: bool,
}

impl Progress {
    /// Starts a plan that should take `planned`.
    pub fn new(planned: Duration) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let [done, current] = [Duration::ZERO; 2];
        Self { planned, done, current, begun: Instant::now(), terminal }
    }

    /// Ends the step before, and starts `what`, planned to take `cost`.
    pub fn step(&mut self, what: &str, cost: Duration) {
        self.done += self.current;
        self.current = cost;
        let share = self.done.as_secs_f64() / self.planned.as_secs_f64().max(1e-9);
        let left_s = self.left().as_secs();
        let line =
            format!("[{:3.0}%, {}:{:02} left] {what}", share * 100.0, left_s / 60, left_s % 60);
        let mut stderr = std::io::stderr().lock();
        // Progress is optional: if it cannot be written, measuring goes on.
        let _ = if self.terminal {
            write!(stderr, "\r\x1b[K{line}")
        } else {
            writeln!(stderr, "{line}")
        };
    }

    /// Returns the remaining time at the pace so far.
    fn left(&self) -> Duration {
        let rest = self.planned.saturating_sub(self.done);
        if self.done.is_zero() {
            return rest;
        }
        let pace = self.begun.elapsed().as_secs_f64() / self.done.as_secs_f64();
        rest.mul_f64(pace.min(100.0))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}
