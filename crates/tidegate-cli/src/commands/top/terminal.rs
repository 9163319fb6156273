//! A terminal to draw on, which is restored at the end.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};
use signal_hook::low_level::pipe;

/// Switches to another screen than the shell's, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The event that ended a wait.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    Key(u8),
    /// A signal, or the end of the terminal: the command ends now.
    End,
    /// The terminal has another size.
    Resized,
    /// The time is over.
    Tick,
}

/// Standard output and standard input, which are one terminal, in raw mode until this is dropped.
pub(super) struct Terminal {
    found: Termios,
    ending: std::os::unix::net::UnixStream,
    resized: std::os::unix::net::UnixStream,
}

impl Terminal {
    /// Takes over the terminal. Returns `None` if standard input or output is no terminal.
    ///
    /// # Errors
    /// The terminal does not take the mode, or the system has no descriptors.
    pub(super) fn open() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let ending = caught(&[SIGTERM, SIGINT, SIGHUP, SIGQUIT])?;
        let resized = caught(&[SIGWINCH])?;
        let found = tcgetattr(io::stdin())?;
        let mut raw = found.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        let terminal = Self { found, ending, resized };
        write(ENTER)?;
        Ok(Some(terminal))
    }

    /// Returns the terminal's columns and rows.
    fn size() -> (usize, usize) {
        let size = tcgetwinsize(io::stdout());
        let found = size.map(|it| (usize::from(it.ws_col), usize::from(it.ws_row)));
        found.ok().filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or((80, 24))
    }

    /// Shows `lines` from the top, cut to the size of the terminal.
    ///
    /// # Errors
    /// The terminal is gone.
    #[expect(clippy::unused_self, reason = "the terminal is drawn on while it is held")]
    pub(super) fn show(&self, lines: &[String]) -> io::Result<()> {
        let (columns, rows) = Self::size();
        let mut text = String::from("\x1b[H");
        for (row, line) in lines.iter().take(rows).enumerate() {
            let end = if row == 0 { "" } else { "\r\n" };
            let shown: String = line.chars().take(columns).collect();
            text.extend([end, &shown, "\x1b[K"]);
        }
        write(&(text + "\x1b[J"))
    }

    /// Waits for a key, a signal, or `until`.
    ///
    /// # Errors
    /// The system cannot wait.
    pub(super) fn wait(&self, until: Instant) -> io::Result<Event> {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let stdin = io::stdin();
        let mut ready = [
            PollFd::new(&self.ending, PollFlags::IN),
            PollFd::new(&stdin, PollFlags::IN),
            PollFd::new(&self.resized, PollFlags::IN),
        ];
        match poll(&mut ready, Some(&left)) {
            Err(Errno::INTR) | Ok(0) => return Ok(Event::Tick),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let [ending, keys, resized] = ready.map(|it| !it.revents().is_empty());
        if ending {
            return Ok(Event::End);
        }
        if keys {
            // Keys are read one at a time: the next wait finds the others.
            let mut key = [0];
            let read = rustix::io::read(&stdin, &mut key)?;
            return Ok(if read == 0 { Event::End } else { Event::Key(key[0]) });
        }
        if resized {
            rustix::io::read(&self.resized, &mut [0; 64])?;
            return Ok(Event::Resized);
        }
        Ok(Event::Tick)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Both fail if the terminal is gone, which needs neither.
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.found);
    }
}

/// Returns a stream that is readable once one of `signals` came.
fn caught(signals: &[i32]) -> io::Result<std::os::unix::net::UnixStream> {
    let (read, written) = std::os::unix::net::UnixStream::pair()?;
    for signal in signals {
        pipe::register(*signal, written.try_clone()?)?;
    }
    Ok(read)
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
