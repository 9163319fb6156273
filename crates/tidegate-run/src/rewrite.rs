//! Writes a file's logged changes to it again, as the kernel may have dropped unwritten pages.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use tidegate::log::{
    Definition, FileGuard, FileRef, Header, LockError, Log, RecordKind, Ticket, copy_to_file,
};

use super::locate::open_for_writing;

/// Bytes copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Writes all logged changes of the file of `entry` to it again; `kept` is open for reading.
///
/// # Errors
/// Fails if the file cannot be written now.
pub(crate) fn rewrite(log: &Log, entry: FileRef, kept: &File) -> io::Result<()> {
    let guard = log.lock(entry).map_err(io::Error::other)?;
    if guard.is_sealed() {
        // The later writes of its stream must not be overwritten. The record stays in the log.
        return Err(io::Error::other(LockError::Busy));
    }
    let records = story_of(log, log.id_of(guard.file()))?;
    if records.is_empty() {
        return Ok(());
    }
    let file = open_for_writing(kept)?;
    // Held until the file is written.
    let _ticket = announce(log, &guard)?;
    // The file does not grow: bytes behind its end were cut off.
    let mut newest = Newest::below(file.metadata()?.len());
    let mut buffer = vec![0; COPY_BYTES];
    for record in records.iter().rev() {
        if record.kind == RecordKind::SetSize {
            newest.take(record.offset, u64::MAX);
            continue;
        }
        let (data, len) = data_of(log, record)?;
        for (start, end) in newest.take(record.offset, record.offset.saturating_add(len)) {
            let position = data + (start - record.offset);
            copy_to_file(
                log.ring().pool(),
                position,
                end - start,
                file.as_fd(),
                start,
                &mut buffer,
            )?;
        }
    }
    Ok(())
}

/// Appends an empty record of a write before the file is written. So recovery does not take the
/// file's new time for that of a change from outside.
///
/// Without log space for the record, a crash before the next heartbeat may have that effect:
/// recovery then names the file, and leaves it unchanged. The caller's next steps free log space.
fn announce<'g>(log: &Log, guard: &'g FileGuard<'_>) -> io::Result<Ticket<'g>> {
    let mut ticket = guard.begin().map_err(io::Error::other)?;
    let payload = log.definition_of(guard.file());
    let definition = payload.as_deref().and_then(Definition::decode);
    let is_defined = !ticket.needs_define()
        || definition.is_some_and(|it| guard.define_again(&mut ticket, &it).is_ok());
    if is_defined {
        let _ = ticket.write(0, &[], false);
    }
    Ok(ticket)
}

/// Returns position and length of a record's data in the log.
fn data_of(log: &Log, record: &Header) -> io::Result<(u64, u64)> {
    if record.kind != RecordKind::Make {
        return Ok((record.data_position(), record.payload_bytes.into()));
    }
    let content = log.ring().pool().content_of(record).map_err(io::Error::other)?;
    content.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns the changes in the present story of the file with this id, in order, unless voided.
///
/// # Errors
/// Fails if a part of the log cannot be read: the file may have records there.
fn story_of(log: &Log, id: u64) -> io::Result<Vec<Header>> {
    let mut changes = Vec::new();
    let mut voided = HashSet::new();
    let mut records = log.ring().records(log.ring().tail(), log.ring().head());
    for header in records.by_ref().filter(|header| header.file == id) {
        match header.kind {
            RecordKind::Write | RecordKind::SetSize => changes.push(header),
            RecordKind::End => changes.clear(),
            // The record has the whole file.
            RecordKind::Make => changes = vec![header],
            RecordKind::Void => {
                voided.insert(header.aux);
            }
            RecordKind::Zero
            | RecordKind::Define
            | RecordKind::Mark
            | RecordKind::Name
            | RecordKind::Decided
            | RecordKind::Done
            | RecordKind::Begun
            | RecordKind::Restored
            | RecordKind::Gap => {}
        }
    }
    if records.unreadable_bytes() > 0 {
        return Err(io::Error::other("a part of the log cannot be read"));
    }
    changes.retain(|header| !voided.contains(&header.position));
    Ok(changes)
}

/// The bytes of a file that no newer record has changed.
struct Newest {
    /// Ranges that newer records have changed, in order and disjoint.
    taken: Vec<(u64, u64)>,
}

impl Newest {
    /// Starts with all bytes below `size`.
    fn below(size: u64) -> Self {
        Self { taken: vec![(size, u64::MAX)] }
    }

    /// Takes the bytes from `start` to `end`. Returns the ranges that were not taken before.
    fn take(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut free, mut from) = (Vec::new(), start);
        for &(taken_start, taken_end) in &self.taken {
            if taken_end <= from {
                continue;
            }
            if taken_start >= end {
                break;
            }
            if taken_start > from {
                free.push((from, taken_start));
            }
            from = taken_end;
        }
        if from < end {
            free.push((from, end));
        }
        self.taken.extend_from_slice(&free);
        self.taken.sort_unstable();
        self.taken.dedup_by(|next, last| {
            let touches = next.0 <= last.1;
            if touches {
                last.1 = last.1.max(next.1);
            }
            touches
        });
        free
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    fn rewritten(trial: &Trial, file: &File, name: &str) -> Vec<u8> {
        let entry = trial.lock(file).file();
        rewrite(&trial.log, entry, &File::open(trial.path(name)).unwrap()).unwrap();
        std::fs::read(trial.path(name)).unwrap()
    }

    #[test]
    fn what_the_kernel_may_have_dropped_is_written_once_more() {
        let trial = Trial::new();
        let file = trial.file("file", b"..........");
        for (offset, data) in [(0, &b"aaaa"[..]), (2, b"bb"), (8, b"cccc")] {
            trial.write(&file, "file", offset, data);
        }
        // The file does not grow.
        assert_eq!(rewritten(&trial, &file, "file"), b"aabb....cc");
    }

    #[test]
    fn what_was_cut_off_has_failed_or_ended_is_not_written_again() {
        let trial = Trial::new();
        let file = trial.file("file", b"..........");
        trial.write(&file, "file", 0, b"old");
        trial.lock(&file).end_story().unwrap();
        trial.write(&file, "file", 2, b"abcdef");
        trial.record(&file, "file", |ticket| {
            ticket.set_size(4, false).unwrap();
        });
        trial.write(&file, "file", 6, b"gh");
        trial.record(&file, "file", |ticket| {
            let failed = ticket.write(3, &[std::io::IoSlice::new(b"XX")], false).unwrap();
            ticket.void(failed).unwrap();
        });
        assert_eq!(rewritten(&trial, &file, "file"), b"..ab..gh..");
    }

    #[test]
    fn bytes_are_taken_once() {
        let mut newest = Newest::below(100);
        assert_eq!(newest.take(90, 110), [(90, 100)]);
        assert_eq!(newest.take(10, 20), [(10, 20)]);
        assert_eq!(newest.take(0, 200), [(0, 10), (20, 90)]);
        assert_eq!(newest.take(0, 200), []);
    }
}
