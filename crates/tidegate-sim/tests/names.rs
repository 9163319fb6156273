//! New files and names under `tidegate run`, as the rules of stage B have them, by histories at
//! random, each cut, recovered and judged; then planted bugs, each of which the same budget finds.
//!
//! `TIDEGATE_SIM_SEED` replays one history, `TIDEGATE_SIM_ROUNDS` multiplies their number.

use tidegate_sim::names::{NamesFault, play};
use tidegate_sim::random::seeds;

const HISTORIES: usize = 16_000;
/// The rarest fault shows in one history of some 40,000.
const HISTORIES_FOR_A_FAULT: usize = 200_000;

#[test]
fn p0_p1_names_are_as_a_kernel_with_real_syncs_could_leave_them() {
    let histories = seeds("p0_p1_names", HISTORIES);
    for seed in &histories {
        play(*seed, NamesFault::None).unwrap_or_else(|what| panic!("{what}"));
    }
    println!("{} histories", histories.len());
}

/// Some history fails with the fault, and does not without it: so it is the fault that fails it.
fn caught(fault: NamesFault) {
    let fails = |seed| {
        let what = play(seed, fault).err()?;
        play(seed, NamesFault::None).is_ok().then_some(what)
    };
    let mut found = seeds("p0_p1_names", HISTORIES_FOR_A_FAULT).into_iter().enumerate();
    let found = found.find_map(|(at, seed)| Some((at, fails(seed)?)));
    let (at, what) = found.unwrap_or_else(|| panic!("{fault:?} went unnoticed"));
    println!("after {at} histories: {what}");
}

macro_rules! planted {
    ($($name:ident: $fault:ident;)*) => {$(
        #[test]
        fn $name() {
            caught(NamesFault::$fault);
        }
    )*};
}

planted! {
    p0_with_a_name_recorded_of_a_plain_file: NameOfPlainFile;
    p0_with_a_name_recorded_while_another_is_pending: NameWhilePending;
    p1_with_a_file_recorded_while_a_name_is_pending: MadeWhilePending;
    p0_with_a_file_recorded_that_was_renamed: MadeAfterRename;
    p0_with_a_file_renamed_over_that_has_another_name: ReplacedLives;
    p0_with_an_unrecorded_change_of_recorded_names: TouchedWithoutLeave;
    p0_with_attributes_recorded_while_a_name_is_pending: AttributesWhilePending;
    p1_with_a_sync_behind_recorded_attributes_answered: AttributesForgotten;
    p1_with_a_real_sync_taken_for_a_commit: CommitAssumed;
    p1_with_a_file_that_leaves_unsynced: LeftUnsynced;
    p1_with_a_seal_that_is_ignored: SealIgnored;
    p1_with_a_file_covered_without_what_its_stream_wrote: UnsealedUnseen;
    p1_with_a_mapped_file_recorded: MadeThoughMapped;
    p1_with_a_file_recorded_though_its_writes_are_not_seen: MadeThoughUnseen;
    p0_with_a_file_recorded_that_has_more_than_a_record_says: MadeThoughSpecial;
    p1_with_a_directory_answered_despite_a_creation: DirectoryIgnoresCreation;
    p1_with_records_retired_before_the_commit: RetiredWithoutCommit;
    p0_with_an_unlinked_file_made_again: UnlinkIgnored;
    p0_with_records_from_before_a_file_left: LeaveIgnored;
    p0_with_a_taken_name_replaced: TakenNameReplaced;
    p0_with_a_removed_file_made_again: MadeAgainAfterCommit;
    p6_with_decisions_made_twice: DecidedTwice;
    p6_with_a_file_named_before_it_is_whole: NamedBeforeWhole;
}
