//! What single histories make of the plan.

use proptest::prelude::*;

use super::journal::Journal;
use crate::log::recover::plan::Taken;
use crate::log::recover::{Content, Extent, Fate, FilePlan, Finding, Plan, Planner};
use crate::log::{Header, RecordKind};

fn names(plan: &Plan, file: &FilePlan) -> Vec<String> {
    let mut names: Vec<_> = file.names.iter().map(|name| path(plan, name.path)).collect();
    names.sort();
    names
}

fn path(plan: &Plan, path: usize) -> String {
    String::from_utf8(plan.paths()[path].path.to_vec()).expect("paths in tests are text")
}

/// The paths that lose the file with this index.
fn taken(plan: &Plan, file: usize) -> Vec<String> {
    let paths = (0..plan.paths().len())
        .filter(|index| plan.paths()[*index].taken.contains(&Taken::File(file)));
    paths.map(|index| path(plan, index)).collect()
}

#[test]
fn a_rename_over_another_file_kills_its_name() {
    let mut log = Journal::default();
    log.define(1, 11, false, "/a");
    log.define(2, 12, true, "/t");
    log.rename(2, "/t", "/a", 11);
    let plan = log.plan();
    assert_eq!(plan.files()[0].fate, Fate::Dead);
    assert_eq!(names(&plan, &plan.files()[1]), ["/a"]);
    assert_eq!((taken(&plan, 0), taken(&plan, 1)), (vec!["/a".into()], vec!["/t".into()]));
    assert_eq!(plan.findings().total(), 0);
}

#[test]
fn a_file_has_all_its_links_and_dies_with_the_last() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    log.link(1, "/b");
    log.link(1, "/c");
    log.unlink(1, "/a");
    assert_eq!(names(&log.plan(), &log.plan().files()[0]), ["/b", "/c"]);
    log.unlink(1, "/b");
    log.unlink(1, "/c");
    assert_eq!(log.plan().files()[0].fate, Fate::Dead);
}

#[test]
fn a_rename_between_two_names_of_a_file_changes_nothing() {
    let mut log = Journal::default();
    log.define(1, 11, false, "/a");
    log.rename(1, "/a", "/b", 11);
    log.rename(1, "/a", "/a", 0);
    let plan = log.plan();
    assert_eq!(names(&plan, &plan.files()[0]), ["/a"]);
    assert_eq!(taken(&plan, 0), Vec::<String>::new());
}

#[test]
fn a_void_record_never_was() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    let write = log.write(1, 0, b"data");
    let unlink = log.unlink(1, "/a");
    log.write(1, 100, b"more");
    log.void(1, unlink);
    log.void(1, write);
    let plan = log.plan();
    assert_eq!(names(&plan, &plan.files()[0]), ["/a"]);
    assert_eq!(plan.files()[0].extents.len(), 1);
    assert_eq!(plan.files()[0].extents[0].start, 100);
}

#[test]
fn a_record_cannot_void_a_later_one() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    // Behind this record, which has no payload, and a hole.
    let next = log.next() + 128;
    log.void(1, next);
    assert_eq!(log.write(1, 0, b"data"), next);
    assert_eq!(log.plan().files()[0].extents.len(), 1);
}

#[test]
fn what_is_retired_is_not_repeated_but_counts_for_others() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/t");
    log.define(2, 12, true, "/a");
    log.write(1, 0, b"old");
    log.rename(1, "/t", "/a", 12);
    log.retire(1);
    log.write(1, 50, b"new");
    let plan = log.plan();
    let (file, other) = (&plan.files()[0], &plan.files()[1]);
    assert_eq!(other.fate, Fate::Dead);
    assert!(!file.born, "what was retired could not be made again");
    assert!(!file.has_made_names());
    assert_eq!((taken(&plan, 0), taken(&plan, 1)), (vec![], vec![]));
    assert_eq!((file.extents.len(), file.extents[0].start), (1, 50));
}

#[test]
fn sizes_cut_and_grow() {
    let mut log = Journal::default();
    log.define(1, 11, false, "/a");
    log.write(1, 0, &[1; 100]);
    log.set_size(1, 500);
    log.set_size(1, 40);
    log.set_size(1, 200);
    let at = log.write(1, 250, &[2; 10]);
    let plan = log.plan();
    let file = &plan.files()[0];
    assert_eq!((file.cut, file.size), (Some(40), Some(260)));
    assert_eq!(file.extents.len(), 2);
    assert_eq!(file.extents[0].end, 40);
    let content = Content::Log(at + 64);
    assert_eq!(file.extents[1], Extent { start: 250, end: 260, content });
    assert_eq!(plan.data_bytes(), 50);
}

#[test]
fn a_file_that_something_outside_replaced_is_not_dead() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    log.define(2, 12, true, "/a");
    let plan = log.plan();
    assert_eq!(plan.files()[0].fate, Fate::Displaced);
    assert_eq!(taken(&plan, 0), Vec::<String>::new());
    assert!(matches!(plan.findings().kept(), [Finding::Displaced { .. }]));
}

#[test]
fn a_path_that_a_writer_remembered_is_only_where_the_file_was() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/log");
    log.rename(1, "/log", "/log.1", 0);
    log.define(2, 12, true, "/log");
    log.define(1, 11, false, "/log");
    let plan = log.plan();
    assert_eq!(names(&plan, &plan.files()[0]), ["/log.1"]);
    assert_eq!(names(&plan, &plan.files()[1]), ["/log"]);
    assert_eq!(plan.findings().total(), 0);
}

#[test]
fn ids_with_one_identity_are_one_file() {
    let mut log = Journal::default();
    log.define(1, 11, false, "/a");
    log.write(1, 0, b"old!");
    log.define(2, 11, false, "/b");
    log.write(2, 0, b"new");
    let plan = log.plan();
    assert_eq!(plan.files().len(), 1);
    assert_eq!(plan.files()[0].extents.len(), 2);
}

#[test]
fn a_file_that_was_made_again_has_both_identities_the_newest_first() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    log.define(1, 99, true, "/a");
    let plan = log.plan();
    assert_eq!(plan.files()[0].identities, [99, 11]);
    assert!(plan.files()[0].born);
}

#[test]
fn a_file_whose_birth_is_retired_is_not_made_again() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    log.write(1, 0, b"old");
    log.define(1, 11, true, "/a");
    log.write(1, 10, b"new");
    assert!(log.plan().files()[0].born);
    log.records.drain(..2);
    let plan = log.plan();
    assert!(!plan.files()[0].born && !plan.files()[0].has_made_names());
}

#[test]
fn an_id_that_becomes_another_known_file_is_refused() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    log.define(2, 12, true, "/b");
    let position = log.define(1, 12, true, "/b");
    let plan = log.plan();
    assert_eq!(plan.findings().kept(), [Finding::Redefined { position, file: log.id(1) }]);
    assert_eq!(plan.files()[0].identities, [11]);
}

#[test]
fn a_definition_may_come_after_the_records_that_need_it() {
    let mut log = Journal::default();
    log.write(1, 0, b"data");
    log.rename(1, "/a", "/b", 0);
    log.define(1, 11, false, "/b");
    let plan = log.plan();
    assert_eq!(plan.files()[0].extents.len(), 1);
    assert_eq!(names(&plan, &plan.files()[0]), ["/b"]);
    assert_eq!(taken(&plan, 0), ["/a"]);
}

#[test]
fn records_of_undefined_files_are_lost_not_forgotten() {
    let mut log = Journal::default();
    let position = log.write(7, 0, b"data");
    let plan = log.plan();
    assert_eq!(plan.findings().kept(), [Finding::Undefined { position, file: 7 }]);
    assert!(!plan.is_empty());
}

#[test]
fn an_unknown_file_that_was_removed_may_be_removed() {
    let mut log = Journal::default();
    log.unlink_unknown(11, "/a");
    log.define(1, 12, true, "/a");
    let plan = log.plan();
    assert!(plan.paths()[0].taken.contains(&Taken::Identity(11)));
    assert_eq!(plan.paths()[0].binding, Some(0));
    assert_eq!(plan.findings().total(), 0);
}

#[test]
fn what_no_file_can_have_is_ignored() {
    let mut log = Journal::default();
    log.define(1, 11, true, "/a");
    let most = i64::MAX.cast_unsigned();
    let mut bad = vec![
        log.write(1, most, b"x"),
        log.write(1, u64::MAX, b"x"),
        log.zero(1, u64::MAX, u64::MAX),
        log.set_size(1, most + 1),
    ];
    for path in ["relative", "/a/../b", "/nul\0", "/", "", "/.tidegate-recover-x"] {
        bad.push(log.link(1, path));
        bad.push(log.rename(1, "/a", path, 0));
    }
    bad.push(log.append(RecordKind::Define, 1, [0; 3], vec![0; 39]));
    bad.push(log.append(
        RecordKind::Rename,
        1,
        [0; 3],
        b"\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
    ));
    log.set_size(1, most);
    log.write(1, most - 1, b"x");
    let plan = log.plan();
    let positions = plan.findings().kept().iter().map(|finding| match finding {
        Finding::Payload { position } | Finding::Range { position } => *position,
        other => panic!("{other}"),
    });
    assert_eq!(positions.collect::<Vec<_>>(), bad);
    assert_eq!(plan.files()[0].size, Some(most));
}

fn header() -> impl Strategy<Value = Header> {
    use RecordKind as Kind;
    let kinds = [
        Kind::Write,
        Kind::Zero,
        Kind::SetSize,
        Kind::Define,
        Kind::Link,
        Kind::Rename,
        Kind::Unlink,
        Kind::Retire,
        Kind::Void,
        Kind::Settle,
    ];
    let number = || prop_oneof![0..4u64, any::<u64>(), Just(i64::MAX.cast_unsigned())];
    (
        prop::sample::select(kinds.to_vec()),
        [number(), number(), number(), number(), number()],
        any::<u32>(),
    )
        .prop_map(|(kind, [position, file, offset, len, aux], payload_bytes)| Header {
            position,
            kind,
            file,
            offset,
            len,
            aux,
            payload_bytes,
            payload_checksum: 0,
            absorbed: false,
        })
}

proptest! {
    #[test]
    fn any_records_make_a_plan(
        records in prop::collection::vec((header(), prop::collection::vec(any::<u8>(), 0..60)), 0..60),
    ) {
        let mut planner = Planner::new();
        for (header, payload) in &records {
            planner.add(header, payload);
        }
        let plan = planner.finish();
        for file in plan.files() {
            let ends = file.extents.windows(2).all(|pair| pair[0].end <= pair[1].start);
            prop_assert!(ends, "extents overlap: {:?}", file.extents);
        }
    }
}
