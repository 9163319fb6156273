//! Lines about misbehaving clients, bounded in length and rate: no client can fill disks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Takes one line, without its end.
pub type LogSink = Arc<dyn Fn(&str) + Send + Sync>;

/// Lines that may come at once.
const BURST: u32 = 20;
/// Time after which one more line may come.
const REFILL: Duration = Duration::from_millis(500);
/// The longest line, in characters.
const MAX_LINE_CHARS: usize = 300;

struct Bucket {
    lines: u32,
    filled: Instant,
    suppressed: u64,
}

/// A log with a limited rate.
pub(crate) struct Log {
    sink: LogSink,
    bucket: Mutex<Bucket>,
}

impl Log {
    pub(crate) fn new(sink: LogSink) -> Self {
        let bucket = Bucket { lines: BURST, filled: Instant::now(), suppressed: 0 };
        Self { sink, bucket: Mutex::new(bucket) }
    }

    /// Writes a line, unless there were too many; the next line then tells how many are missing.
    pub(crate) fn line(&self, text: &str) {
        let Some(suppressed) = self.bucket.lock().take(Instant::now()) else { return };
        let text: String = text.chars().take(MAX_LINE_CHARS).collect();
        match suppressed {
            0 => (self.sink)(&text),
            _ => (self.sink)(&format!("{text} (and {suppressed} lines like this before)")),
        }
    }
}

impl Bucket {
    /// Takes a line out. Returns the number of lines suppressed since the last one, or `None` if
    /// this line must be suppressed.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let steps = now.duration_since(self.filled).as_millis() / REFILL.as_millis();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.filled += REFILL.saturating_mul(steps);
        self.lines = self.lines.saturating_add(steps).min(BURST);
        if self.lines == 0 {
            self.suppressed += 1;
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_limited_and_the_missing_are_counted() {
        let start = Instant::now();
        let mut bucket = Bucket { lines: BURST, filled: start, suppressed: 0 };
        let taken = (0..100).filter(|_| bucket.take(start).is_some()).count();
        assert_eq!(taken, BURST as usize);
        assert_eq!(bucket.take(start + REFILL), Some(80));
        assert_eq!(bucket.take(start + REFILL), None);
    }

    #[test]
    fn a_long_line_is_cut() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        Log::new(Arc::new(move |line| sink.lock().push(line.to_owned()))).line(&"ä".repeat(10_000));
        assert_eq!(lines.lock()[0].chars().count(), MAX_LINE_CHARS);
    }
}
