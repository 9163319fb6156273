//! Signals of a server: none ends it before its tiers are drained, or the time for that is over.
//!
//! A signal that by default ends a process stops the server in good order, is ignored, or, for
//! SIGHUP, makes the server read files again; each signal is logged in one line. The exceptions are
//! signals that a fault of the process itself raises, and signals that cannot be caught.
//!
//! SIGABRT is both, since another process may send it and `abort` raises it. It is caught, so that
//! it stops the server in good order if another process sends it. `abort` takes the handler away
//! and raises the signal again: a process that aborts itself still ends at once.

use anyhow::{Context, Result};
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGSYS, SIGTERM, SIGTRAP, SIGUSR1,
    SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;
use tidegate_serve::nbd::StopHandle;

use crate::deadline::Deadline;
use crate::log::{Level, say};
use crate::notify::notify;

/// Power is about to fail. The library for signals does not know this signal.
const SIGPWR: i32 = rustix::process::Signal::POWER.as_raw();
/// Only other processes send this signal. The library for signals does not know it either.
const SIGSTKFLT: i32 = rustix::process::Signal::STKFLT.as_raw();
const STOPPING: [i32; 9] =
    [SIGTERM, SIGINT, SIGQUIT, SIGPWR, SIGXCPU, SIGSTKFLT, SIGTRAP, SIGSYS, SIGABRT];
const IGNORED: [i32; 7] = [SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGXFSZ];
/// The real-time signals, except the two that the C library uses.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

/// The caught signals of this process.
pub(crate) struct Caught(Signals);

/// Catches the signals, except signals that were ignored when the process started. SIGHUP is always
/// caught: under `nohup` it ends nothing either.
///
/// # Errors
/// The system refuses.
pub(crate) fn catch() -> Result<Caught> {
    let ignored = ignored_from_the_start();
    let wanted = STOPPING.into_iter().chain(IGNORED).chain(REAL_TIME);
    let caught = wanted.filter(|signal| ignored & 1 << (signal - 1) == 0).chain([SIGHUP]);
    Ok(Caught(Signals::new(caught).context("cannot catch signals")?))
}

/// Returns a bit for each signal that was ignored at the start, the lowest for signal 1.
fn ignored_from_the_start() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

impl Caught {
    /// Runs `serve`. Meanwhile signals stop it by `stop`, until `deadline` at most, and SIGHUP
    /// calls `reload`. Later signals do nothing.
    pub(crate) fn during<R>(
        self,
        stop: &StopHandle,
        deadline: &Deadline,
        reload: &(dyn Fn() + Sync),
        serve: impl FnOnce() -> R,
    ) -> R {
        let Self(mut signals) = self;
        let handle = signals.handle();
        std::thread::scope(|scope| {
            scope.spawn(move || handle_each(&mut signals, stop, deadline, reload));
            let served = serve();
            handle.close();
            served
        })
    }
}

fn handle_each(signals: &mut Signals, stop: &StopHandle, deadline: &Deadline, reload: &dyn Fn()) {
    signals.forever().for_each(|signal| handle(signal, stop, deadline, reload));
    // Handles the signals that came with the one that stopped the server.
    signals.pending().for_each(|signal| handle(signal, stop, deadline, reload));
}

fn handle(signal: i32, stop: &StopHandle, deadline: &Deadline, reload: &dyn Fn()) {
    if signal == SIGHUP {
        return reload();
    }
    let stops = STOPPING.contains(&signal);
    let does = if stops { "stopping" } else { "ignored" };
    if stops {
        // First: a log or a service manager that takes no messages must not delay the stop.
        deadline.signalled();
        stop.stop();
    }
    say(Level::Info, format_args!("{}: {does}", name_of(signal)));
    if stops {
        notify("STOPPING=1\nSTATUS=writing back");
    }
}

fn name_of(signal: i32) -> String {
    match signal_name(signal) {
        Some(name) => name.to_owned(),
        None if signal == SIGPWR => "SIGPWR".to_owned(),
        None if signal == SIGSTKFLT => "SIGSTKFLT".to_owned(),
        None => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn what_a_process_ignores_from_the_start_is_seen() {
        // The runtime ignores this signal.
        assert_ne!(ignored_from_the_start() & 1 << (signal_hook::consts::SIGPIPE - 1), 0);
        assert_eq!(ignored_from_the_start() & 1 << (SIGTERM - 1), 0);
    }

    /// The library raises SIGABRT again after the handler, so the process still ends by it.
    #[test]
    fn a_process_that_aborts_itself_ends_as_crashed() {
        const MARK: &str = "TIDEGATE_TEST_ABORTS";
        if std::env::var_os(MARK).is_some() {
            let _caught = catch().unwrap();
            std::process::abort();
        }
        let name = "signals::tests::a_process_that_aborts_itself_ends_as_crashed";
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let output = again.args([name, "--exact"]).env(MARK, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(SIGABRT), "{output:?}");
    }
}
