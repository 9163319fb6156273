//! The end of a server that does not come to one by itself: a backing, a client or a disk does not
//! answer. The process ends then as if it were killed, which no pool suffers from.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::{Condvar, Mutex};
use tidegate::size::Size;

use crate::log::{Level, say};
use crate::served::Served;

/// How long a server has from a second signal on.
const AFTER_SECOND: Duration = Duration::from_secs(5);
/// How long a tier may take to tell what it holds.
const TELL: Duration = Duration::from_secs(2);

/// When a server that was told to stop ends at the latest.
pub(crate) struct Deadline {
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// None before the first signal.
    at: Option<Instant>,
    is_met: bool,
    /// None of them while pools are being opened.
    served: Vec<Served>,
}

impl Deadline {
    /// Has a thread end the process `timeout` after the first signal, or sooner after a second one,
    /// and say what the pools hold that are [served](Self::serves).
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

    /// The pools are open.
    pub(crate) fn serves(&self, served: &[Served]) {
        self.state.lock().served = served.to_vec();
    }

    /// A signal came that stops the server.
    pub(crate) fn signalled(&self) {
        let mut state = self.state.lock();
        let limit = if state.at.is_none() { self.timeout } else { AFTER_SECOND };
        let until = Instant::now() + limit;
        state.at = Some(state.at.map_or(until, |at| at.min(until)));
        self.changed.notify_all();
    }

    /// The server has ended in good order.
    pub(crate) fn meet(&self) {
        let mut state = self.state.lock();
        state.is_met = true;
        let served = std::mem::take(&mut state.served);
        drop(state);
        self.changed.notify_all();
        drop(served);
    }

    /// Returns when the deadline has passed: how long the server had, and what it served. None: it
    /// was met.
    fn wait(&self) -> Option<(Duration, Vec<Served>)> {
        let mut state = self.state.lock();
        let mut began = None;
        while !state.is_met {
            let Some(at) = state.at else {
                self.changed.wait(&mut state);
                continue;
            };
            let began = *began.get_or_insert_with(Instant::now);
            if Instant::now() >= at {
                return Some((began.elapsed(), std::mem::take(&mut state.served)));
            }
            self.changed.wait_until(&mut state, at);
        }
        None
    }
}

/// Says what stays in the pools and what is lost, and ends the process.
fn give_up(waited: Duration, served: Vec<Served>) -> ! {
    let pools: Vec<_> = served.iter().map(|one| one.plan.pool.display().to_string()).collect();
    let (tell, told) = channel();
    // A tier may be stuck in what is told of it.
    let look = move || served.iter().for_each(|one| drop(tell.send(held_by(one))));
    // Without a thread nothing is known.
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
            format!("what {pool} holds for its backing stays in it; what a DRAM tier held is lost")
        });
        let line = format!("not stopped in good order after {waited} s, ended: {held}");
        say(Level::Error, line);
    }
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
        0 => format!("{pool} holds nothing that the backing lacks"),
        bytes => format!(
            "{} that the backing lacks stay in {pool}: `tidegate flush {pool}` writes them to it; \
             or serve the pool again",
            Size { bytes }
        ),
    };
    format!("{lost}{kept}")
}
