//! The thread that cleans: ahead of need from half a log on, asleep without a timeout where there is nothing to do.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Core, LogDeviceError};
use crate::sync::Ordering;

/// After a failure: when to try again, unless somebody asks before.
const RETRY: Duration = Duration::from_secs(1);
/// When to look again at a write that is in the middle.
const MOMENT: Duration = Duration::from_millis(1);

/// The cleaner's thread.
pub(super) struct Thread(JoinHandle<()>);

impl Thread {
    pub(super) fn start(core: &Arc<Core>) -> Result<Self, LogDeviceError> {
        core.has_thread.store(true, Ordering::Release);
        let own = Arc::clone(core);
        let name = "log-cleaner".to_owned();
        let spawned =
            std::thread::Builder::new().name(name).spawn(move || own.clean_until_stopped());
        spawned.map(Self).map_err(LogDeviceError::Thread)
    }

    /// Ends the thread once it has finished what it is at.
    pub(super) fn stop(self, core: &Core) {
        core.stopping.store(true, Ordering::SeqCst);
        core.log.wake_cleaner();
        // A panic of it was printed when it happened.
        let _ = self.0.join();
    }
}

impl Core {
    fn clean_until_stopped(&self) {
        loop {
            let seen = self.log.work();
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            self.resume_blocked();
            let head = self.log.head();
            if !self.is_filling() {
                let full_enough = self.log.tail() + self.clean_from_bytes;
                self.log.wait_for_work(seen, full_enough.max(head) + 1, None);
                continue;
            }
            match self.clean(&mut self.cleaning.lock()) {
                Ok(true) => {}
                Ok(false) => self.log.wait_for_work(seen, u64::MAX, Some(MOMENT)),
                Err(_) => {
                    // Every writer that waits for free space hears of it.
                    self.fail_blocked();
                    self.log.announce_room();
                    self.log.wait_for_work(seen, u64::MAX, Some(RETRY));
                }
            }
        }
    }

    fn is_filling(&self) -> bool {
        self.used_bytes() > self.clean_from_bytes && self.has_work()
    }
}
