//! Tests that the planner counts the right records.

use zerocopy::IntoBytes;

use crate::log::recover::{Finding, Operation, Payload, Plan, Planner};
use crate::log::{Definition, FileHandle, Header, RecordKind};

/// Gives a planner records in the order of their positions.
#[derive(Default)]
struct Log {
    planner: Planner,
    position: u64,
}

impl Log {
    fn header(&mut self, kind: RecordKind, file: u64) -> Header {
        self.position += 64;
        Header { position: self.position, file, ..Header::of(kind) }
    }

    fn put(&mut self, header: &Header) -> u64 {
        self.planner.add(header, Payload::Whole(&[]));
        header.position
    }

    fn define(&mut self, file: u64, identity: u64, starts: bool, covered: bool) -> u64 {
        self.define_marked(file, identity, (starts, covered), 0)
    }

    fn define_marked(&mut self, file: u64, identity: u64, flags: (bool, bool), aux: u64) -> u64 {
        let (starts, covered) = flags;
        let handle = FileHandle::new(1, &identity.to_le_bytes()).expect("it is short");
        let (file_system, size_bytes, device, inode) = ([7; 16], 0, 1, identity);
        let path = b"/a";
        let definition = Definition {
            identity,
            file_system,
            handle,
            covered,
            starts,
            size_bytes,
            device,
            inode,
            path,
        };
        let payload = [definition.encode().as_bytes(), handle.bytes(), path].concat();
        let header = Header { aux, ..self.header(RecordKind::Define, file) };
        self.planner.add(&header, Payload::Whole(&payload));
        header.position
    }

    /// Begins a story of the file and covers it.
    fn cover(&mut self, file: u64) {
        self.define(file, file, true, false);
        self.define(file, file, false, true);
    }

    fn write(&mut self, file: u64) -> u64 {
        let header = self.header(RecordKind::Write, file);
        self.put(&Header { offset: 5, payload_bytes: 3, ..header })
    }

    fn torn_write(&mut self, file: u64) -> u64 {
        let header = self.header(RecordKind::Write, file);
        self.planner.add(&header, Payload::Torn);
        header.position
    }

    fn simple(&mut self, kind: RecordKind, file: u64) -> u64 {
        let header = self.header(kind, file);
        self.put(&header)
    }

    fn void(&mut self, file: u64, aux: u64) {
        let header = self.header(RecordKind::Void, file);
        self.put(&Header { aux, ..header });
    }

    fn finish(self) -> Plan {
        self.planner.finish()
    }
}

/// Returns the positions of the counted steps, by file.
fn steps(plan: &Plan) -> Vec<(u64, Vec<u64>)> {
    let positions = |file: &crate::log::recover::FilePlan| {
        (file.id, file.steps.iter().map(|step| step.position).collect())
    };
    plan.files().iter().map(positions).collect()
}

#[test]
fn a_story_counts_only_once_it_is_covered() {
    let mut log = Log::default();
    log.define(1, 1, true, false);
    log.write(1);
    assert!(log.finish().is_empty());
    let mut log = Log::default();
    log.define(1, 1, true, false);
    let early = log.write(1);
    log.define(1, 1, false, true);
    let late = log.write(1);
    let plan = log.finish();
    assert_eq!(steps(&plan), [(1, vec![early, late])]);
    let write = Operation::Write { offset: 5, len: 3, data: early + 64, grows: false };
    assert_eq!(plan.files()[0].steps[0].operation, write);
}

#[test]
fn an_end_and_a_new_story_drop_what_was_before() {
    let mut log = Log::default();
    log.cover(1);
    log.write(1);
    log.simple(RecordKind::End, 1);
    // The record of a stopped writer, appended late.
    log.write(1);
    log.cover(2);
    log.write(2);
    log.define(2, 2, true, false);
    log.write(2);
    log.cover(3);
    log.write(3);
    log.cover(3);
    let last = log.write(3);
    assert_eq!(steps(&log.finish()), [(3, vec![last])]);
}

#[test]
fn a_story_of_the_same_file_under_another_id_drops_the_older_one() {
    let mut log = Log::default();
    log.cover(1);
    log.write(1);
    log.define(2, 1, true, false);
    log.define(2, 1, false, true);
    let new = log.write(2);
    log.write(1);
    assert_eq!(steps(&log.finish()), [(2, vec![new])]);
}

#[test]
fn a_definition_may_follow_what_it_is_about() {
    let mut log = Log::default();
    let first = log.write(1);
    log.define(1, 1, false, true);
    let second = log.write(1);
    assert_eq!(steps(&log.finish()), [(1, vec![first, second])]);
}

#[test]
fn marks_and_definitions_say_what_is_promised() {
    let mut log = Log::default();
    log.cover(1);
    log.write(1);
    let mark = log.simple(RecordKind::Mark, 1);
    log.write(1);
    log.cover(2);
    let write = log.write(2);
    log.define_marked(2, 2, (false, true), write + 64);
    log.define_marked(2, 2, (false, true), write);
    let plan = log.finish();
    let marked: Vec<_> = plan.files().iter().map(|file| file.marked_until).collect();
    assert_eq!(marked, [mark, write + 64]);
}

#[test]
fn voided_operations_do_not_count() {
    let mut log = Log::default();
    log.cover(1);
    let failed = log.write(1);
    let done = log.write(1);
    log.void(1, failed);
    assert_eq!(steps(&log.finish()), [(1, vec![done])]);
}

#[test]
fn a_torn_record_is_damage_only_where_its_story_goes_on() {
    for (goes_on, expected) in [(false, 0), (true, 1)] {
        let mut log = Log::default();
        log.cover(1);
        log.write(1);
        let torn = log.torn_write(1);
        log.cover(2);
        log.write(2);
        if goes_on {
            log.simple(RecordKind::Mark, 1);
        }
        let damaged: Vec<_> = log.finish().files.iter().filter_map(|file| file.damaged).collect();
        let damaged: Vec<_> = damaged.iter().map(|it| it.position).collect();
        assert_eq!(damaged, vec![torn; expected]);
    }
}

#[test]
fn damage_of_ended_or_voided_records_does_not_count() {
    let mut log = Log::default();
    log.cover(1);
    log.torn_write(1);
    log.write(1);
    log.simple(RecordKind::End, 1);
    log.cover(2);
    let torn = log.torn_write(2);
    log.void(2, torn);
    log.write(2);
    let plan = log.finish();
    assert_eq!((plan.files().len(), plan.files()[0].damaged), (1, None));
}

#[test]
fn unreadable_records_are_damage_at_once() {
    let mut log = Log::default();
    log.cover(1);
    let header = log.header(RecordKind::Write, 1);
    log.planner.add(&header, Payload::Unreadable);
    assert_eq!(log.finish().files()[0].damaged.map(|it| it.position), Some(header.position));
}

#[test]
fn records_of_undefined_files_are_counted_unless_they_ended() {
    let mut log = Log::default();
    log.write(1);
    log.write(2);
    log.simple(RecordKind::End, 2);
    log.simple(RecordKind::Mark, 3);
    let plan = log.finish();
    assert_eq!((plan.undefined_records, plan.files().len()), (1, 0));
}

#[test]
fn what_makes_no_sense_is_ignored_with_a_line() {
    let mut log = Log::default();
    log.cover(1);
    let header = log.header(RecordKind::Define, 1);
    let undecodable = log.put(&header);
    let other = log.define(1, 9, true, false);
    let zero = log.simple(RecordKind::Zero, 1);
    let header = log.header(RecordKind::SetSize, 1);
    let long = log.put(&Header { offset: 1 << 63, ..header });
    let plan = log.finish();
    let expected = [
        Finding::Payload { position: undecodable },
        Finding::Redefined { position: other, file: 1 },
        Finding::Payload { position: zero },
        Finding::Range { position: long },
    ];
    assert_eq!(plan.findings().kept(), expected);
}
