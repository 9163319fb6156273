//! Merges several traces by time.

use rustc_hash::FxHashMap;

use super::event::{Event, FileId};
use super::whole::Trace;
use crate::error::Error;

/// The events of several traces in time order. Times count from the start of each trace; at equal
/// times, the first trace comes first. Files and streams of different traces are distinct.
pub struct Merged {
    traces: Vec<Part>,
    streams: FxHashMap<(usize, u32), u32>,
    /// The stream that was looked up last, and its number.
    last_stream: Option<((usize, u32), u32)>,
    next_file: u32,
}

struct Part {
    trace: Trace,
    /// The next event, read ahead.
    head: Option<Result<Event, Error>>,
    /// File numbers in the merged trace, by the number in this trace.
    files: Vec<Option<FileId>>,
}

/// Merges `traces` by time.
#[must_use]
pub fn merge(traces: Vec<Trace>) -> Merged {
    let part = |mut trace: Trace| Part { head: trace.next(), trace, files: Vec::new() };
    let traces = traces.into_iter().map(part).collect();
    Merged { traces, streams: FxHashMap::default(), last_stream: None, next_file: 0 }
}

impl Merged {
    /// Returns the traces, for their bad lines and progress.
    pub fn traces(&self) -> impl Iterator<Item = &Trace> {
        self.traces.iter().map(|part| &part.trace)
    }

    /// Returns the index of the trace with the earliest event; an error comes first.
    fn first(&self) -> Option<usize> {
        let time = |part: &Part| match part.head.as_ref()? {
            Ok(event) => Some(event.time_us),
            Err(_) => Some(0),
        };
        let times = self.traces.iter().enumerate().filter_map(|(at, part)| Some((time(part)?, at)));
        times.min().map(|(_, at)| at)
    }

    fn stream(&mut self, key: (usize, u32)) -> u32 {
        if let Some((last, number)) = self.last_stream
            && last == key
        {
            return number;
        }
        let next = u32::try_from(self.streams.len()).unwrap_or(u32::MAX);
        let number = *self.streams.entry(key).or_insert(next);
        self.last_stream = Some((key, number));
        number
    }

    fn file(&mut self, of: usize, file: FileId) -> FileId {
        let files = &mut self.traces[of].files;
        let at = file.0 as usize;
        if files.len() <= at {
            files.resize(at + 1, None);
        }
        *files[at].get_or_insert_with(|| {
            let new = FileId(self.next_file);
            self.next_file = self.next_file.saturating_add(1);
            new
        })
    }

    fn renumbered(&mut self, of: usize, mut event: Event) -> Event {
        if let Some(file) = event.op.file_mut() {
            *file = self.file(of, *file);
        }
        Event { stream: self.stream((of, event.stream)), ..event }
    }
}

impl Iterator for Merged {
    type Item = Result<Event, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let at = self.first()?;
        let part = &mut self.traces[at];
        let item = part.head.take()?;
        part.head = part.trace.next();
        Some(item.map(|event| self.renumbered(at, event)))
    }
}
