//! Notices a signal that asks this process to end, so that the process can clean up first.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::process::Signal;
use signal_hook::flag;
use tidegate_run::caught_of;

/// Signals of terminals, shells and service managers.
const ENDING: [i32; 3] = [Signal::INT.as_raw(), Signal::TERM.as_raw(), Signal::HUP.as_raw()];

/// Catches the first such signal; the second one ends the process. After the drop the first one
/// does.
pub(super) struct Interrupt {
    was_asked: Arc<AtomicBool>,
}

impl Interrupt {
    /// Catches the signals, except those that this process ignores, as under `nohup`.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn watch() -> io::Result<Self> {
        let was_asked = Arc::new(AtomicBool::new(false));
        for signal in caught_of(&ENDING) {
            flag::register_conditional_default(signal, Arc::clone(&was_asked))?;
            flag::register(signal, Arc::clone(&was_asked))?;
        }
        Ok(Self { was_asked })
    }

    /// Returns whether a signal came.
    pub(super) fn was_asked(&self) -> bool {
        self.was_asked.load(Relaxed)
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.was_asked.store(true, Relaxed);
    }
}
