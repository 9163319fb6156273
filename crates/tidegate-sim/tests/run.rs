//! Bytes and sizes of files under `tidegate run`, by histories at random, each cut, recovered and
//! judged; then planted bugs, each of which the same budget finds.
//!
//! `TIDEGATE_SIM_SEED` replays one history, `TIDEGATE_SIM_ROUNDS` multiplies their number.

use tidegate_sim::random::seeds;
use tidegate_sim::run::{Extra, RunFault, play};

const HISTORIES: usize = 8000;
/// The rarest fault shows in one history of some 20,000.
const HISTORIES_FOR_A_FAULT: usize = 100_000;

#[test]
fn p0_p1_p6_files_are_as_a_kernel_with_real_syncs_could_leave_them() {
    let histories = seeds("p0_p1_p6_files", HISTORIES);
    for seed in &histories {
        play(*seed, Extra::Nothing, RunFault::None).unwrap_or_else(|what| panic!("{what}"));
    }
    println!("{} histories", histories.len());
}

#[test]
fn p0_p1_p6_files_with_shared_blocks_unseen_and_synchronous_writes_are_so_too() {
    let histories = seeds("p0_p1_p6_files_beside", HISTORIES);
    for seed in &histories {
        let extra = match seed % 3 {
            0 => Extra::Shared,
            1 => Extra::Unseen,
            _ => Extra::Synchronous,
        };
        play(*seed, extra, RunFault::None).unwrap_or_else(|what| panic!("{what}"));
    }
    println!("{} histories", histories.len());
}

/// Some history fails with the fault, and does not without it: so it is the fault that fails it.
fn caught(fault: RunFault) {
    let fails = |seed| {
        let what = play(seed, fault.extra(), fault).err()?;
        play(seed, fault.extra(), RunFault::None).is_ok().then_some(what)
    };
    let found = seeds("p0_p1_p6_files", HISTORIES_FOR_A_FAULT).into_iter().find_map(fails);
    println!("{}", found.unwrap_or_else(|| panic!("{fault:?} went unnoticed")));
}

#[test]
fn p0_with_a_file_covered_before_its_sync() {
    caught(RunFault::CoveredBeforeSync);
}

#[test]
fn p0_with_a_story_replayed_that_was_never_covered() {
    caught(RunFault::UnconfirmedReplayed);
}

#[test]
fn p0_with_growth_applied_without_a_mark() {
    caught(RunFault::GrowthWithoutMark);
}

#[test]
fn p1_with_the_tail_moved_before_the_sync() {
    caught(RunFault::TailBeforeSync);
}

#[test]
fn p1_with_the_mark_before_the_record() {
    caught(RunFault::MarkBeforeRecord);
}

#[test]
fn p0_with_a_sync_marked_while_names_are_pending() {
    caught(RunFault::MarkWhilePending);
}

#[test]
fn p0_with_growth_behind_a_cut_while_names_are_pending() {
    caught(RunFault::GrowthAfterCut);
}

#[test]
fn p0_with_a_file_covered_while_its_blocks_are_shared() {
    caught(RunFault::CoveredWhileShared);
}

#[test]
fn p0_with_shared_blocks_taken_for_those_of_the_file_alone() {
    caught(RunFault::SharedTakenForDense);
}

#[test]
fn p1_with_a_sync_of_a_file_that_was_read_answered() {
    caught(RunFault::ReadNotCommitted);
}

#[test]
fn p1_with_a_file_covered_though_its_writes_are_not_seen() {
    caught(RunFault::AdmittedThoughUnseen);
}

#[test]
fn p1_with_journaled_data_taken_for_overwritten_in_place() {
    caught(RunFault::JournaledTakenForInPlace);
}

#[test]
fn p1_with_a_synchronous_write_to_a_position_by_another_descriptor() {
    caught(RunFault::SplitAtPosition);
}
