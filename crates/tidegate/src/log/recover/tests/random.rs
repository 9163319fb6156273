//! Random histories, crashed at random, recovered, with crashes and faults in recovery.

use std::collections::HashMap;
use std::io;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use rustix::io::Errno;
use uuid::Uuid;

use super::history::{History, Leftovers, Step};
use super::journal::{Bug, Journal};
use super::test_files::{TestFiles, Trouble};
use crate::log::recover::{ApplyOptions, NewIdentity, Outcome, apply};

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (any::<[u8; 3]>(), any::<u16>(), any::<u8>(), prop::bool::weighted(0.15)).prop_map(
        |([kind, which, other], offset, len, fails)| Step {
            kind,
            which,
            other,
            offset,
            len,
            fails,
        },
    );
    prop::collection::vec(step, 1..40)
}

fn leftovers() -> impl Strategy<Value = Leftovers> {
    any::<(u16, u64)>().prop_map(|(names, data)| Leftovers { names, data })
}

/// A recovery: what it said, the log after it, and how many operations it took.
struct Run {
    outcome: Outcome,
    journal: Journal,
    operations: u64,
}

fn recover(
    journal: &Journal,
    identities: &HashMap<u64, u64>,
    trouble: Trouble,
    workers: usize,
    bug: Bug,
) -> Run {
    let mut files = TestFiles::new(trouble);
    files.identities.clone_from(identities);
    let mut noted = journal.clone();
    let plan = journal.plan_with(bug);
    let mut note = |new: NewIdentity<'_>| -> io::Result<()> {
        files.step()?;
        noted.note(&new);
        Ok(())
    };
    let options = ApplyOptions { pool: Uuid::nil(), workers };
    let outcome = apply(&plan, journal, &files, options, &|_| (), &mut note);
    Run { outcome, journal: noted, operations: files.operations() }
}

/// Says what is wrong after a recovery that says that it is complete; and that this one is.
fn check(history: &History, identities: &HashMap<u64, u64>, run: &Run) -> Result<(), String> {
    if !run.outcome.is_complete() {
        return Err(format!("not complete: {:?}", run.outcome.failures));
    }
    // What recovery made has its own identity in the journal.
    let mut all = identities.clone();
    for file in run.journal.plan().files() {
        if let [newest, .., first] = file.identities[..] {
            all.insert(newest, first);
        }
    }
    history.difference(&all).map_or(Ok(()), Err)
}

fn recovered(
    history: &History,
    leftovers: &Leftovers,
    workers: usize,
    bug: Bug,
) -> Result<(), String> {
    let identities = history.crash(leftovers);
    let run = recover(&history.journal, &identities, Trouble::None, workers, bug);
    check(history, &identities, &run)?;
    // Once more changes nothing.
    let again = recover(&run.journal, &identities, Trouble::None, workers, bug);
    check(history, &identities, &again)?;
    let changed = again.outcome.names_placed + again.outcome.names_removed;
    if changed + again.outcome.files_created > 0 {
        return Err("a second recovery changed names".into());
    }
    Ok(())
}

/// Recovers with trouble, then without; how many operations the first took.
fn troubled(history: &History, leftovers: &Leftovers, trouble: Trouble) -> Result<u64, String> {
    let identities = history.crash(leftovers);
    let first = recover(&history.journal, &identities, trouble, 1, Bug::None);
    if first.outcome.is_complete() {
        check(history, &identities, &first)
            .map_err(|difference| format!("{trouble:?}, said to be complete: {difference}"))?;
    }
    let second = recover(&first.journal, &identities, Trouble::None, 1, Bug::None);
    check(history, &identities, &second)
        .map_err(|difference| format!("{trouble:?}, then recovered: {difference}"))?;
    Ok(first.operations)
}

fn config() -> Config {
    Config { cases: 300, ..Config::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn all_that_was_logged_is_there_after_recovery(steps in steps(), leftovers in leftovers()) {
        let history = History::run(&steps);
        prop_assert_eq!(recovered(&history, &leftovers, 4, Bug::None), Ok(()));
    }

    #[test]
    fn a_recovery_that_was_cut_off_is_done_by_the_next(
        steps in steps(), leftovers in leftovers(), at in any::<u64>(),
    ) {
        let history = History::run(&steps);
        let operations = troubled(&history, &leftovers, Trouble::None);
        prop_assert!(operations.is_ok(), "{:?}", operations);
        let at = at % operations.unwrap_or(1).max(1);
        for trouble in [
            Trouble::CrashAt(at),
            Trouble::FailAt(at, Errno::NOSPC),
            Trouble::FailAt(at, Errno::IO),
        ] {
            let done = troubled(&history, &leftovers, trouble);
            prop_assert!(done.is_ok(), "{:?}", done);
        }
    }
}

/// Samples of histories, always the same.
fn samples(count: usize) -> Vec<(History, Leftovers)> {
    let mut runner = TestRunner::deterministic();
    let strategy = (steps(), leftovers());
    let sample = |_| {
        let (steps, leftovers) = strategy.new_tree(&mut runner).expect("it can be had").current();
        (History::run(&steps), leftovers)
    };
    (0..count).map(sample).collect()
}

#[test]
fn recovery_may_be_cut_off_or_fail_at_every_operation() {
    for (history, leftovers) in samples(12) {
        let operations = troubled(&history, &leftovers, Trouble::None).expect("no trouble");
        for at in 0..operations {
            for trouble in [Trouble::CrashAt(at), Trouble::FailAt(at, Errno::IO)] {
                troubled(&history, &leftovers, trouble).expect("the next recovery does it");
            }
        }
    }
}

#[test]
fn planted_bugs_are_noticed() {
    for bug in [Bug::NamesOutOfOrder, Bug::VoidIgnored, Bug::RetireIgnored] {
        let noticed = samples(100)
            .into_iter()
            .filter(|(history, leftovers)| recovered(history, leftovers, 1, bug).is_err())
            .count();
        assert!(noticed > 5, "{bug:?} was noticed in {noticed} of 100 histories");
    }
}
