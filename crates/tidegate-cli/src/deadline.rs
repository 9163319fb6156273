//! The deadline of a stop: a server that waits for a backing, a client, a disk or its standard
//! output without an answer would not end by itself. The process then ends as if it were killed,
//! which harms no pool.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::{Condvar, Mutex};
use tidegate::device::BlockDeviceExt;
use tidegate::dram::Policy;
use tidegate::size::Size;

use crate::devices::Devices;
use crate::log::{self, Level, say};
use crate::served::Served;

/// Time that a server has after a second signal.
const AFTER_SECOND: Duration = Duration::from_secs(5);
/// Time that the tiers of a pool have to tell their pending bytes.
const TELL: Duration = Duration::from_secs(2);
/// Time that standard error has to take the last lines.
const LOG: Duration = Duration::from_secs(1);

/// Deadline for the end of a server that was told to stop.
pub(crate) struct Deadline {
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The time of the first signal.
    began: Option<Instant>,
    /// `None` before the first signal.
    at: Option<Instant>,
    is_met: bool,
    devices: Option<Arc<Devices>>,
}

impl State {
    /// Returns the pools that are open.
    fn served(&self) -> Vec<Served> {
        self.devices.as_ref().map_or_else(Vec::new, |devices| devices.served())
    }
}

impl Deadline {
    /// Starts a thread that ends the process `timeout` after the first signal, or sooner after a
    /// second one, and logs the pending data of the pools that are open among its
    /// [devices](Self::serves).
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn watch(timeout: Duration) -> Result<Arc<Self>> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let deadline = Arc::new(Self { timeout, state, changed });
        let watched = Arc::clone(&deadline);
        let run = move || {
            if let Some((waited, served)) = watched.wait() {
                give_up(waited, served);
            }
        };
        let thread = std::thread::Builder::new().name("stop-timeout".into()).spawn(run);
        thread.context("cannot start a thread")?;
        Ok(deadline)
    }

    /// Notes the devices of the server.
    pub(crate) fn serves(&self, devices: &Arc<Devices>) {
        self.state.lock().devices = Some(Arc::clone(devices));
    }

    /// Notes a signal that stops the server.
    pub(crate) fn signalled(&self) {
        let mut state = self.state.lock();
        let limit = if state.at.is_none() { self.timeout } else { AFTER_SECOND };
        let now = Instant::now();
        let until = now + limit;
        if state.began.is_none() {
            state.served().iter().for_each(save);
        }
        state.began.get_or_insert(now);
        state.at = Some(state.at.map_or(until, |at| at.min(until)));
        self.changed.notify_all();
    }

    /// Notes that the server has ended in good order, and has printed all that it prints.
    pub(crate) fn meet(&self) {
        let mut state = self.state.lock();
        state.is_met = true;
        let devices = state.devices.take();
        drop(state);
        self.changed.notify_all();
        drop(devices);
    }

    /// Waits for the deadline. Returns the time since the first signal and the pools, or `None` if
    /// the deadline was met.
    fn wait(&self) -> Option<(Duration, Vec<Served>)> {
        let mut state = self.state.lock();
        while !state.is_met {
            let Some((began, at)) = state.began.zip(state.at) else {
                self.changed.wait(&mut state);
                continue;
            };
            if Instant::now() >= at {
                return Some((began.elapsed(), state.served()));
            }
            self.changed.wait_until(&mut state, at);
        }
        None
    }
}

/// Starts a thread that makes the pool hold what only the DRAM tier has. The server itself does so
/// once its clients' requests have ended, and one of these may wait for a backing that hangs.
fn save(one: &Served) {
    if one.plan.args.dram.policy == Policy::None {
        return;
    }
    let stack = Arc::clone(&one.stack);
    let save = move || {
        // A failure is told when the pool is closed, or at the deadline.
        let _ = stack.top().flush();
    };
    // Without the thread, the stop saves the data in its turn.
    drop(std::thread::Builder::new().name("save".into()).spawn(save));
}

/// Logs the data that stays in the pools and the data that is lost, and ends the process.
fn give_up(waited: Duration, served: Vec<Served>) -> ! {
    let pools: Vec<_> = served.iter().map(|one| one.plan.pool.display().to_string()).collect();
    let (tell, told) = channel();
    // A tier may be stuck, and then its state cannot be read either.
    let look = move || served.iter().for_each(|one| drop(tell.send(held_by(one))));
    // Without the thread, the pending data stays unknown.
    let _ = std::thread::Builder::new().spawn(look);
    let waited = waited.as_secs();
    if pools.is_empty() {
        say(
            Level::Error,
            format_args!("not opened after {waited} s, ended: pools keep what they hold"),
        );
    }
    for pool in pools {
        let held = told.recv_timeout(TELL).unwrap_or_else(|_| {
            format!("what {pool} holds stays in it; what a DRAM tier held is lost")
        });
        let line = format!("not stopped in good order after {waited} s, ended: {held}");
        say(Level::Error, line);
    }
    log::flush(LOG);
    std::process::exit(1);
}

fn held_by(served: &Served) -> String {
    let pool = served.plan.pool.display();
    let (lost_bytes, kept_bytes) = served.stack.pending_bytes();
    let lost = match lost_bytes {
        0 => String::new(),
        bytes => format!("{} in the DRAM tier are lost; ", Size { bytes }),
    };
    let kept = match kept_bytes {
        0 if served.stack.description().backing.is_none() => {
            format!("{pool} has all other data, durable")
        }
        0 => format!("{pool} holds nothing that the backing lacks"),
        bytes => format!(
            "{} that the backing lacks stay in {pool}: `tidegate flush {pool}` writes them to it; \
             or serve the pool again",
            Size { bytes }
        ),
    };
    format!("{lost}{kept}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_is_told_is_not_below_the_timeout() {
        let timeout = Duration::from_millis(20);
        let deadline = Deadline { timeout, state: Mutex::default(), changed: Condvar::new() };
        deadline.signalled();
        // The thread may see the signal late.
        std::thread::sleep(timeout / 2);
        let (waited, _) = deadline.wait().expect("it was not met");
        assert!(waited >= timeout, "{waited:?}");
    }
}
