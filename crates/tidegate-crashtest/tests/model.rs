//! The model against what file systems did: planted mistakes leave its set, what plain Linux may
//! leave does not.

use std::collections::BTreeSet;

use tidegate_crashtest::contents::{INITIAL_A, INITIAL_B, bytes};
use tidegate_crashtest::model::tree::Attributes;
use tidegate_crashtest::model::{
    A_BYTES, B_BYTES, Found, Kind, Model, Node, State, TimeRule, Times, Verdict, crowd,
};
use tidegate_crashtest::sequence::Sequence;

fn file(bytes: Vec<u8>) -> Found {
    Found { node: Node::File(bytes), attributes: Attributes::of_mode(0o644), links: 1, modified: 0 }
}

fn directory() -> Found {
    let attributes = Attributes::of_mode(0o755);
    Found { node: Node::Directory, attributes, links: 2, modified: 0 }
}

fn old_a() -> Vec<u8> {
    bytes(INITIAL_A, 0, A_BYTES)
}

/// The initial state.
fn initial() -> State {
    let directories = ["d0", "d1", "d3"].map(|path| (path.to_owned(), directory()));
    let files = [("d0/A", old_a()), ("d1/B", bytes(INITIAL_B, 0, B_BYTES))];
    let files = files.map(|(path, bytes)| (path.to_owned(), file(bytes)));
    directories.into_iter().chain(files).collect()
}

/// The initial state with other bytes in `d0/A`.
fn with_a(bytes: Vec<u8>) -> State {
    let mut state = initial();
    state.insert("d0/A".into(), file(bytes));
    state
}

/// `state` with a file moved.
fn moved(mut state: State, from: &str, to: &str) -> State {
    let found = state.remove(from).expect("it exists");
    state.insert(to.into(), found);
    state
}

/// `d0/A` with the bytes of step `number` in a range.
fn overwritten(number: u64, offset: u64, length: u64) -> Vec<u8> {
    let mut contents = old_a();
    let (start, end) =
        (usize::try_from(offset).unwrap(), usize::try_from(offset + length).unwrap());
    contents.resize(contents.len().max(end), 0);
    contents[start..end].copy_from_slice(&bytes(number, offset, length));
    contents
}

fn judge(kind: Kind, sequence: &str, state: &State) -> Verdict {
    let sequence: Sequence = sequence.parse().unwrap();
    Model::behind(kind, &sequence).unwrap().judge(state, false)
}

#[track_caller]
fn allowed(sequence: &str, state: &State) {
    for kind in [Kind::Ext4, Kind::Xfs] {
        assert_eq!(judge(kind, sequence, state), Verdict::Allowed, "{kind:?}: {sequence}");
    }
}

#[track_caller]
fn forbidden(sequence: &str, state: &State) {
    for kind in [Kind::Ext4, Kind::Xfs] {
        let verdict = judge(kind, sequence, state);
        assert!(matches!(verdict, Verdict::Forbidden(_)), "{kind:?}: {sequence}: {verdict}");
    }
}

#[track_caller]
fn misordered(sequence: &str, state: &State) {
    for kind in [Kind::Ext4, Kind::Xfs] {
        let verdict = judge(kind, sequence, state);
        assert!(matches!(verdict, Verdict::Misordered(_)), "{kind:?}: {sequence}: {verdict}");
    }
}

#[test]
fn a_dropped_fsync_is_seen() {
    let old = initial();
    for operation in
        ["append d0/A 3000", "write d0/A 1000 3000", "truncate d0/A 0", "chmod d0/A 600"]
    {
        allowed(operation, &old);
        forbidden(&format!("{operation}; fsync d0/A"), &old);
        forbidden(&format!("{operation}; sync"), &old);
    }
    forbidden("rename d0/A d0/B; fsync d0", &old);
    forbidden("osync d0/A 1000 3000", &old);
    forbidden("mmap d0/A 1000 3000; msync", &old);
}

#[test]
fn an_emptied_file_is_seen() {
    let empty = with_a(Vec::new());
    forbidden("write d0/A 1000 3000", &empty);
    forbidden("truncate d0/A 5000; fsync .", &empty);
    allowed("truncate-open d0/A 10", &empty);
    forbidden("truncate-open d0/A 10; fsync .", &empty);
}

#[test]
fn a_file_that_replaces_another_is_not_empty_on_ext4() {
    let sequence = "stdio d0/B 3000; rename d0/B d0/A";
    let (empty, new) = (with_a(Vec::new()), with_a(bytes(1, 0, 3000)));
    assert!(matches!(judge(Kind::Ext4, sequence, &empty), Verdict::Forbidden(_)));
    assert_eq!(judge(Kind::Xfs, sequence, &empty), Verdict::Allowed);
    allowed(sequence, &new);
    allowed(sequence, &initial());
    forbidden(&format!("{sequence}; fsync d0/A"), &initial());
}

#[test]
fn a_name_that_comes_back_is_seen() {
    let mut both = moved(initial(), "d0/A", "d0/B");
    forbidden("rename d0/A d0/B; fsync d0/B", &initial());
    allowed("rename d0/A d0/B; fsync d0/B", &both);
    both.insert("d0/A".into(), file(old_a()));
    forbidden("rename d0/A d0/B", &both);
    forbidden("unlink d0/A; fsync d0", &initial());
}

#[test]
fn older_bytes_are_seen() {
    let sequence = "write d0/A 1000 3000; fsync .; write d0/A 1000 3000";
    allowed(sequence, &with_a(overwritten(1, 1000, 3000)));
    allowed(sequence, &with_a(overwritten(3, 1000, 3000)));
    forbidden(sequence, &initial());
    forbidden(&format!("{sequence}; fdatasync ."), &with_a(overwritten(1, 1000, 3000)));
}

#[test]
fn new_bytes_before_old_ones_are_seen() {
    forbidden("truncate-open d0/A 10", &with_a(overwritten(1, 0, 10)));
    forbidden("truncate-open d0/A 10; fsync .", &with_a(overwritten(1, 0, 10)));
}

#[test]
fn the_order_of_changes_is_kept() {
    let renamed_only = moved(initial(), "d1/B", "d1/A");
    // An append that is synced has the rename before it; measured on ext4 and XFS, as the two
    // below.
    let grown = with_a(overwritten(2, 10_000, 3000));
    misordered_or_forbidden("rename d1/B d1/A; append d0/A 3000; fdatasync .", &grown);
    allowed(
        "rename d1/B d1/A; write d0/A 1000 3000; fdatasync .",
        &with_a(overwritten(2, 1000, 3000)),
    );
    misordered(
        "write d0/A 1000 3000; rename d1/B d1/A; fsync d0/A",
        &with_a(overwritten(1, 1000, 3000)),
    );
    forbidden("chmod d0/A 600; rename d1/B d1/A", &renamed_only);
    forbidden("rename d1/B d1/A; outside commit", &initial());
}

/// A write with `O_DSYNC` writes back what it wrote itself: data of earlier writes that has no
/// blocks yet makes no commit. Measured on ext4.
#[test]
fn a_write_that_syncs_itself_does_not_sync_earlier_ones() {
    let sequence = "append d0/A 8192; outside commit; rename d1/B d1/A; odsync d0/A 1000 3000";
    let written = with_a(overwritten(4, 1000, 3000));
    assert_eq!(judge(Kind::Ext4, sequence, &written), Verdict::Allowed);
    let whole = "outside commit; rename d1/B d1/A; odsync d0/A 12288 3000";
    let grown = with_a(overwritten(3, 12_288, 3000));
    assert_ne!(judge(Kind::Ext4, whole, &grown), Verdict::Allowed);
}

/// ext4 makes the file on the disk as long as the range that is allocated or zeroed, though it is
/// longer in memory.
#[test]
fn a_range_that_is_zeroed_makes_a_file_on_the_disk_longer() {
    let grown = "append d0/A 10000; outside commit; fallocate d0/A zero 11000 4000; outside commit";
    let mut zeroes = old_a();
    zeroes.resize(15_000, 0);
    assert_eq!(judge(Kind::Ext4, grown, &with_a(zeroes.clone())), Verdict::Allowed);
    zeroes.truncate(14_000);
    assert!(matches!(judge(Kind::Ext4, grown, &with_a(zeroes)), Verdict::Forbidden(_)));
}

/// XFS only writes zeroes there, and an `fdatasync` behind them commits nothing. On ext4 it does.
#[test]
fn a_punch_that_frees_no_block_is_an_overwrite_on_xfs() {
    let punched = |range: std::ops::Range<usize>| {
        let mut contents = bytes(INITIAL_B, 0, B_BYTES);
        let end = range.end.min(contents.len());
        contents[range.start..end].fill(0);
        let mut state = initial();
        state.insert("d1/B".into(), file(contents));
        state
    };
    let sequence = "rename d0/A d0/B; fallocate d1/B punch 2000 5000; fdatasync .";
    assert_eq!(judge(Kind::Xfs, sequence, &punched(2000..7000)), Verdict::Allowed);
    let verdict = judge(Kind::Ext4, sequence, &punched(2000..7000));
    assert!(matches!(verdict, Verdict::Forbidden(_)), "{verdict}");
    let renamed = moved(punched(2000..7000), "d0/A", "d0/B");
    allowed(sequence, &renamed);
    // Its own bytes are there.
    forbidden(sequence, &moved(initial(), "d0/A", "d0/B"));
    forbidden("rename d0/A d0/B; fallocate d1/B punch 0 4096; fdatasync .", &punched(0..4096));
}

/// ext4 journals the data of directories, and syncs all such data by a commit.
#[test]
fn a_sync_of_a_clean_directory_commits_on_ext4() {
    let sequence = "rename d0/A d0/B; fsync d1";
    assert!(matches!(judge(Kind::Ext4, sequence, &initial()), Verdict::Forbidden(_)));
    assert_eq!(judge(Kind::Xfs, sequence, &initial()), Verdict::Allowed);
    allowed("rename d0/A d0/B; fsync d1/B", &initial());
}

#[track_caller]
fn misordered_or_forbidden(sequence: &str, state: &State) {
    for kind in [Kind::Ext4, Kind::Xfs] {
        assert!(!judge(kind, sequence, state).is_allowed(), "{kind:?}: {sequence}");
    }
}

#[test]
fn an_fdatasync_under_run_may_commit_what_a_later_fsync_would_have() {
    let (written, kept) = ("write d0/A 1000 3000; fdatasync .", overwritten(1, 1000, 3000));
    let judge = |more: &str, is_under_run: bool| {
        let sequence: Sequence = format!("{written}; {more}").parse().unwrap();
        let model = Model::new(Kind::Ext4);
        let model = if is_under_run { model.under_run() } else { model };
        model.after(&sequence).unwrap().judge(&with_a(kept.clone()), is_under_run)
    };
    let later = "chmod d1/B 600; fsync d0/A";
    assert!(matches!(judge(later, false), Verdict::Misordered(_)));
    assert_eq!(judge(later, true), Verdict::Allowed);
    for durable in ["chmod d1/B 600; fsync d1/B", "chmod d1/B 600; append d0/A 10; fsync d0/A"] {
        assert!(!judge(durable, true).is_allowed(), "{durable}");
    }
}

#[test]
fn a_file_that_was_never_synced_is_unordered_under_run() {
    let sequence: Sequence = "create d0/B; append d0/A 3000; fsync .".parse().unwrap();
    let model = Model::behind(Kind::Ext4, &sequence).unwrap();
    let without = with_a(overwritten(2, 10_000, 3000));
    assert!(!model.judge(&without, false).is_allowed());
    assert_eq!(model.judge(&without, true), Verdict::Allowed);
    let synced: Sequence = "create d0/B; fsync d0; append d0/A 3000; fsync .".parse().unwrap();
    let model = Model::behind(Kind::Ext4, &synced).unwrap();
    assert!(!model.judge(&without, true).is_allowed());
}

#[test]
fn a_file_that_was_never_synced_is_unordered_until_a_rename_of_it_is_there() {
    let steps = "new d0/B 5000; fsync d1/B; unlink d1/B; rename d0/B d0/A";
    let mut unlinked = initial();
    unlinked.remove("d1/B");
    let judge = |steps: &str, state: &State| {
        let sequence: Sequence = steps.parse().unwrap();
        Model::behind(Kind::Ext4, &sequence).unwrap().judge(state, true)
    };
    assert_eq!(judge(steps, &unlinked), Verdict::Allowed);
    assert!(!judge(&format!("{steps}; fsync d0"), &unlinked).is_allowed());
    let mut lost = unlinked;
    lost.remove("d0/A");
    assert!(!judge(steps, &lost).is_allowed(), "the rename without the file");
}

#[test]
fn a_file_that_leaves_before_a_truncation_commits_what_a_later_fsync_would_have() {
    let judge = |steps: &str, is_under_run: bool| {
        let sequence: Sequence = steps.parse().unwrap();
        let model = Model::new(Kind::Xfs);
        let model = if is_under_run { model.under_run() } else { model };
        let renamed = moved(initial(), "d1/B", "d0/A");
        model.after(&sequence).unwrap().judge(&renamed, is_under_run)
    };
    let covered = "fsync d1/B; rename d1/B d0/A; truncate d0/A 11000; fsync d0";
    assert!(matches!(judge(covered, false), Verdict::Misordered(_)));
    assert_eq!(judge(covered, true), Verdict::Allowed);
    let plain = "rename d1/B d0/A; truncate d0/A 11000; fsync d0";
    assert!(!judge(plain, true).is_allowed(), "a plain file does not leave");
    assert!(!judge(&covered.replace("fsync d0", "fsync d0/A"), true).is_allowed());
}

#[test]
fn a_file_that_leaves_before_an_unseen_change_commits_what_a_later_sync_would_have() {
    for kind in [Kind::Ext4, Kind::Xfs] {
        let judge = |steps: &str, state: &State, is_under_run: bool| {
            let sequence: Sequence = steps.parse().unwrap();
            let model = Model::new(kind);
            let model = if is_under_run { model.under_run() } else { model };
            model.after(&sequence).unwrap().judge(state, is_under_run)
        };
        let mut written = initial();
        let mut contents = bytes(INITIAL_B, 0, B_BYTES);
        contents.extend(bytes(2, B_BYTES, 3000));
        contents[..3000].copy_from_slice(&bytes(3, 0, 3000));
        written.insert("d1/B".into(), file(contents));
        for unseen in ["mmap", "uring-write"] {
            let rest =
                format!("append d1/B 3000; {unseen} d1/B 0 3000; chmod d0/A 600; fdatasync d1/B");
            let covered = format!("fsync d1/B; {rest}");
            let before = judge(&covered, &written, false);
            assert!(matches!(before, Verdict::Misordered(_)), "{kind:?} {covered}: {before}");
            assert_eq!(judge(&covered, &written, true), Verdict::Allowed, "{kind:?} {covered}");
            let seen = covered.replace(unseen, "write");
            assert!(!judge(&seen, &written, true).is_allowed(), "{kind:?} {seen}");
            let lost = judge(&covered, &initial(), true);
            assert!(matches!(lost, Verdict::Forbidden(_)), "{kind:?} {covered}: {lost}");
        }
    }
}

#[test]
fn a_write_with_o_dsync_under_run_may_commit_what_a_later_fsync_would_have() {
    let kept = with_a(overwritten(1, 1000, 3000));
    let judge = |steps: &str, is_under_run: bool| {
        let sequence: Sequence = steps.parse().unwrap();
        let model = Model::new(Kind::Ext4);
        let model = if is_under_run { model.under_run() } else { model };
        model.after(&sequence).unwrap().judge(&kept, is_under_run)
    };
    let later = "odsync d0/A 1000 3000; chmod d1/B 600; fsync d0/A";
    assert!(matches!(judge(later, false), Verdict::Misordered(_)));
    assert_eq!(judge(later, true), Verdict::Allowed);
    assert!(!judge(&later.replace("fsync d0/A", "fsync d1/B"), true).is_allowed());
}

#[test]
fn what_a_killed_process_had_only_begun_is_made_by_a_recovery_or_by_nothing() {
    let judge = |steps: &str, state: &State, is_under_run: bool| {
        let sequence: Sequence = steps.parse().unwrap();
        let model = Model::new(Kind::Ext4);
        let model = if is_under_run { model.under_run() } else { model };
        model.after(&sequence).unwrap().judge(state, is_under_run).is_allowed()
    };
    let cases = [
        ("write d0/A 1000 3000", with_a(overwritten(2, 1000, 3000))),
        ("rename d0/A d0/B", moved(initial(), "d0/A", "d0/B")),
    ];
    for (operation, made) in cases {
        for kill in ["killed before", "killed at 3", "killed in 70"] {
            let steps = format!("fsync d0/A; {kill} {operation}");
            assert!(judge(&steps, &initial(), true) && judge(&steps, &initial(), false));
            assert!(judge(&steps, &made, true), "{steps}");
            assert!(!judge(&steps, &made, false), "{steps}");
            assert!(judge(&format!("{steps}; fsync d1/B"), &made, true), "{steps}");
            for later in ["fsync d0/A", "fsync d0", "sync", "utime d0/A", "outside retire"] {
                let steps = format!("{steps}; {later}");
                assert!(judge(&steps, &initial(), true), "{steps}");
                assert!(!judge(&steps, &made, true), "{steps}");
            }
        }
        for kill in ["killed", "killed behind 3", "killed past 70"] {
            let steps = format!("fsync d0/A; {kill} {operation}; sync");
            assert!(judge(&steps, &made, true) && !judge(&steps, &initial(), true), "{steps}");
        }
    }
}

#[test]
fn a_new_file_is_where_its_sync_and_its_rename_left_it() {
    let whole = bytes(1, 0, 5000);
    let mut delivered = initial();
    delivered.insert("d0/B".into(), file(whole.clone()));
    let replaced = with_a(whole);
    allowed("new d0/B 5000; fsync .", &delivered);
    forbidden("new d0/B 5000; fsync .", &initial());
    let sequence = "new d0/B 5000; fsync .; rename d0/B d0/A";
    allowed(sequence, &delivered);
    allowed(sequence, &replaced);
    forbidden(sequence, &with_a(Vec::new()));
    let synced = format!("{sequence}; fsync d0");
    allowed(&synced, &replaced);
    forbidden(&synced, &delivered);
    let unlinked = "new d0/B 5000; fsync .; unlink d0/B; fsync d0";
    allowed(unlinked, &initial());
    forbidden(unlinked, &delivered);
}

/// Under `run` or not, what was synced is there: by any way, of any program.
#[test]
fn a_dropped_sync_of_any_program_by_any_way_is_seen() {
    let old = initial();
    for change in [
        "append@deep d0/A 3000; fsync@libc d0/A",
        "write@own d0/A 1000 3000; fdatasync@number .",
        "chmod@new d0/A 600; fsync d0/A",
        "setxattr@new d0/A; fsync@version d0/A",
        "outside append d0/A 3000; outside fsync d0/A",
        "second truncate d0/A 0; second fsync d0/A",
        "kill both; append d0/A 3000; fsync .",
        "kill run; append d0/A 3000; fsync .",
    ] {
        forbidden(change, &old);
        assert!(!judge_under_run(change, &old).is_allowed(), "{change}");
    }
    for change in ["rename@space d0/A d0/B; fsync d0", "outside rename d0/A d0/B; outside fsync d0"]
    {
        forbidden(change, &old);
        allowed(change, &moved(initial(), "d0/A", "d0/B"));
    }
}

fn judge_under_run(sequence: &str, state: &State) -> Verdict {
    let sequence: Sequence = sequence.parse().unwrap();
    Model::new(Kind::Ext4).under_run().after(&sequence).unwrap().judge(state, true)
}

#[test]
fn older_bytes_over_newer_ones_of_another_program_are_seen() {
    let synced = "write d0/A 1000 3000; fdatasync .";
    for newer in ["outside", "second"] {
        let sequence = format!("{synced}; {newer} write d0/A 1000 3000; {newer} fsync d0/A");
        assert!(judge_under_run(&sequence, &with_a(overwritten(3, 1000, 3000))).is_allowed());
        let older = judge_under_run(&sequence, &with_a(overwritten(1, 1000, 3000)));
        assert!(matches!(older, Verdict::Forbidden(_)), "{sequence}: {older}");
    }
    let cut = format!("{synced}; outside truncate d0/A 0; outside fsync d0/A");
    assert!(!judge_under_run(&cut, &with_a(overwritten(1, 1000, 3000))).is_allowed());
    let plain = "write d0/A 1000 3000; fdatasync .; kill run; write d0/A 1000 3000; fsync .";
    assert!(!judge_under_run(plain, &with_a(overwritten(1, 1000, 3000))).is_allowed());
    assert!(judge_under_run(plain, &with_a(overwritten(4, 1000, 3000))).is_allowed());
}

/// An `fdatasync` of overwrites commits no time: recovery may put the session's bytes there, and
/// nothing else. So it may where the session's own writes were not synced, or came later.
#[test]
fn what_no_time_tells_may_be_as_the_session_had_it() {
    let write = "write d0/A 1000 3000";
    let (first, ours) = (overwritten(2, 1000, 3000), overwritten(4, 1000, 3000));
    let before = "fsync d0/A; write d0/A 1000 3000; fdatasync d0/A; write d0/A 1000 3000";
    for (sequence, is_unnoticed) in [
        (format!("{before}; fdatasync d0/A; kill run; {write}; fdatasync d0/A"), true),
        (format!("{before}; fdatasync d0/A; outside {write}; outside fdatasync d0/A"), true),
        (format!("{before}; fdatasync d0/A; outside {write}; outside fsync d0/A"), false),
        (format!("{before}; outside {write}; outside fsync d0/A"), true),
        (
            format!(
                "{before}; fdatasync d0/A; outside {write}; outside fsync d0/A; write d0/A 5000 9"
            ),
            true,
        ),
        (format!("{before}; fdatasync d0/A; kill run; {write}; fdatasync d0/A; sync"), false),
    ] {
        let left = |bytes: &[u8]| judge_under_run(&sequence, &with_a(bytes.to_vec())).is_allowed();
        assert_eq!(left(&ours), is_unnoticed, "{sequence}");
        assert!(!left(&first) && !left(&old_a()), "{sequence}: older than what the log has");
    }
}

/// A change that its program did not sync may be lost though the session has synced another file.
#[test]
fn what_another_program_did_not_sync_is_not_ordered_with_syncs_of_the_session() {
    let old = with_new_at(initial(), "d1/A", 0);
    for (change, is_unordered) in [
        ("outside unlink d0/A; create d1/A; fsync d1/A", true),
        ("second truncate d0/A 0; create d1/A; fsync d1/A", true),
        ("outside unlink d0/A; outside fsync d1/B; create d1/A; fsync d1/A", false),
        ("outside truncate d0/A 0; outside fsync d0/A; create d1/A; fsync d1/A", false),
        ("outside unlink d0/A; outside commit; create d1/A; fsync d1/A", false),
        ("outside truncate d0/A 0; fsync d0/A; create d1/A; fsync d1/A", false),
        ("unlink d0/A; create d1/A; fsync d1/A", false),
    ] {
        // Dirty, so that the sync of another program commits.
        let sequence = format!("outside chmod d1/B 644; {change}");
        assert_eq!(judge_under_run(&sequence, &old).is_allowed(), is_unordered, "{sequence}");
        forbidden(&sequence, &old);
    }
}

/// `state` with an empty file at `path`.
fn with_new_at(mut state: State, path: &str, size: usize) -> State {
    state.insert(path.into(), file(vec![0; size]));
    state
}

#[test]
fn a_write_into_a_copy_of_the_file_system_changes_nothing_here() {
    let sequence = "clone write d0/A 1000 3000; clone fdatasync d0/A";
    assert!(judge_under_run(sequence, &initial()).is_allowed());
    assert!(!judge_under_run(sequence, &with_a(overwritten(1, 1000, 3000))).is_allowed());
}

/// A recovery may refuse a file that another program changed, and no other.
#[test]
fn what_a_recovery_refuses_is_of_other_programs_and_nothing_else_is_lost_by_that() {
    let sequence: Sequence = "append d1/B 10; fsync .; append d0/A 10; fsync .; \
                              outside write d0/A 1000 3000; outside fsync d0/A"
        .parse()
        .unwrap();
    let model = Model::new(Kind::Ext4).under_run().after(&sequence).unwrap();
    let of_others: Vec<&String> = model.of_others().iter().collect();
    assert_eq!(of_others, ["d0/A"]);
    let refusing = model.refusing(["d0/A".to_owned()].into());
    let mut grown = bytes(INITIAL_B, 0, B_BYTES);
    grown.extend(bytes(1, B_BYTES, 10));
    let mut state = initial();
    assert!(!refusing.judge(&state, true).is_allowed(), "d1/B is not what was synced");
    state.insert("d1/B".into(), file(grown));
    assert!(refusing.judge(&state, true).is_allowed());
    let lost = "append d0/A 10; fsync .; kill run; append d1/B 10; outside chmod d0/A 600";
    let model = Model::behind(Kind::Xfs, &lost.parse().unwrap()).unwrap();
    assert_eq!(model.of_others().len(), 2);
}

#[test]
fn attributes_that_were_synced_are_not_dropped() {
    let with = |attributes: Attributes| {
        let mut state = initial();
        state.insert("d0/A".into(), Found { attributes, ..file(old_a()) });
        state
    };
    let plain = || Attributes::of_mode(0o644);
    let cases = [
        ("setcap d0/A", Attributes { has_capability: true, ..plain() }),
        ("setfacl d0/A", Attributes { has_acl: true, ..plain() }),
        ("append-only d0/A", Attributes { is_append_only: true, ..plain() }),
        ("chmod d0/A 4755", Attributes::of_mode(0o4755)),
    ];
    for (change, attributes) in cases {
        let synced = format!("{change}; fsync d0/A");
        allowed(&synced, &with(attributes.clone()));
        forbidden(&synced, &initial());
        allowed(change, &initial());
    }
    // The kernel takes them.
    let written = "setcap d0/A; fsync d0/A; write d0/A 1000 3000; fsync d0/A";
    allowed(written, &with_a(overwritten(3, 1000, 3000)));
    allowed("chmod d0/A 4755; chown d0/A; fsync d0/A", &with(Attributes::of_mode(0o755)));
    let appended: Sequence = "append-only d0/A; write d0/A 0 10".parse().unwrap();
    assert!(Model::behind(Kind::Ext4, &appended).is_err());
}

#[test]
fn times_that_no_file_has_shown_are_seen() {
    let sequence: Sequence = "write d0/A 1000 3000; fsync .; write d0/A 1000 3000".parse().unwrap();
    let shown: Vec<Times> = [10, 11, 11, 12]
        .map(|time| Times::from([("d0/A".to_owned(), time), ("d1/B".to_owned(), 5)]))
        .to_vec();
    let judge = |rule, modified| {
        let mut state = with_a(overwritten(1, 1000, 3000));
        state.get_mut("d0/A").unwrap().modified = modified;
        state.get_mut("d1/B").unwrap().modified = 5;
        let model = Model::new(Kind::Ext4).with_times(rule, shown.as_slice().into());
        model.after(&sequence).unwrap().judge(&state, false).is_allowed()
    };
    let shown_of = |rule| (9..14).filter(|time| judge(rule, *time)).collect::<Vec<i128>>();
    assert_eq!(shown_of(TimeRule::Shown), [10, 11, 12]);
    assert_eq!(shown_of(TimeRule::Synced), [11, 12]);
}

/// The kernel may commit a new file before its first write, with the time of its creation.
#[test]
fn an_empty_new_file_may_have_the_time_of_its_creation() {
    let sequence: Sequence = "new d1/A 5000".parse().unwrap();
    let shown = [Times::new(), Times::from([("d1/A".to_owned(), 1 << 40)])];
    let judge = |content: Vec<u8>, modified| {
        let mut state = initial();
        state.insert("d1/A".into(), Found { modified, ..file(content) });
        let model = Model::new(Kind::Ext4).with_times(TimeRule::Synced, shown.as_slice().into());
        model.after(&sequence).unwrap().judge(&state, false).is_allowed()
    };
    assert!(judge(Vec::new(), (1 << 40) - 1_000_000) && judge(Vec::new(), 1 << 40));
    assert!(!judge(Vec::new(), (1 << 40) + 1), "later than the file ever showed");
    assert!(!judge(Vec::new(), 1), "long before it was created");
    assert!(!judge(bytes(1, 0, 5000), (1 << 40) - 1_000_000), "with what was written later");
}

/// Files of a crowd were synced one by one.
#[test]
fn a_file_of_a_crowd_that_is_older_is_seen() {
    let sequence: Sequence = "crowd 3; crowd 2".parse().unwrap();
    let state = |numbers: [u64; 3]| {
        let mut state = initial();
        for (index, number) in numbers.into_iter().enumerate() {
            state.insert(format!("crowd.{index}"), file(bytes(number, 0, 3000)));
        }
        state
    };
    let none = BTreeSet::new();
    let mut whole = state([2, 2, 1]);
    assert!(crowd::objections(&sequence, &mut whole, &none, false).is_empty());
    assert_eq!(whole, initial());
    assert_eq!(crowd::objections(&sequence, &mut state([2, 1, 1]), &none, true).len(), 1);
    let refused = BTreeSet::from(["crowd.1".to_owned()]);
    assert!(crowd::objections(&sequence, &mut state([2, 1, 1]), &refused, false).is_empty());
}

/// Without its run the program overwrites them with an `fdatasync`, which commits no time.
#[test]
fn a_file_of_a_crowd_may_be_as_the_lost_session_had_it() {
    let count = |text: &str, number: u64, has_log| {
        let mut state = initial();
        state.insert("crowd.0".into(), file(bytes(number, 0, 3000)));
        let sequence: Sequence = text.parse().unwrap();
        crowd::objections(&sequence, &mut state, &BTreeSet::new(), has_log).len()
    };
    let lost = "crowd 1; crowd 1; kill run; crowd 1";
    assert_eq!([1, 2, 3, 4].map(|number| count(lost, number, true)), [1, 0, 1, 0]);
    assert_eq!(count(lost, 2, false), 1, "without a log");
    assert_eq!(count(&format!("{lost}; sync"), 2, true), 1, "committed");
    assert_eq!(count("crowd 1; kill run; crowd 1; crowd 1", 3, true), 1, "not the session's");
}
