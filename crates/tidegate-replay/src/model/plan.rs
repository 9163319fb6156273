//! Many cases, as many at once as this machine has CPUs: each is a function of its inputs, so their
//! order means nothing.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use tidegate::device::DeviceError;

use super::case::{Case, Outcome};
use super::costs::Costs;
use crate::error::Error;

/// A case and what came of it.
#[derive(Debug, Clone)]
pub(super) struct Ran {
    pub(super) case: Case,
    pub(super) outcome: Outcome,
}

/// Runs all `cases`; the results are in their order. A bar on a terminal tells how far it is.
///
/// # Errors
/// The first error of a case.
pub(super) fn run(cases: &[Case], costs: &Costs) -> Result<Vec<Ran>, Error> {
    let media = costs.media()?;
    let bar = ProgressBar::new(cases.len() as u64).with_style(style());
    let next = AtomicUsize::new(0);
    let outcomes: Vec<Mutex<Option<Result<Outcome, DeviceError>>>> =
        cases.iter().map(|_| Mutex::default()).collect();
    let work = || {
        while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(in_range(cases)) {
            let case = &cases[index];
            let Case { jobs, cores, .. } = case;
            bar.set_message(format!("{}, {jobs} jobs, {cores} cores", case.policy.name()));
            let outcome = case.run(costs, &media);
            *outcomes[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            bar.inc(1);
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(cases.len());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(std::thread::ScopedJoinHandle::join)
    })
    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    bar.finish_and_clear();
    let collect = |(case, outcome): (&Case, Mutex<Option<_>>)| {
        let outcome = outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
        let outcome: Result<Outcome, DeviceError> = outcome.expect("all cases have run");
        let outcome = outcome.map_err(|error| Error::Usage(describe(case, &error)))?;
        Ok(Ran { case: case.clone(), outcome })
    };
    cases.iter().zip(outcomes).map(collect).collect()
}

fn in_range(cases: &[Case]) -> impl Fn(&usize) -> bool {
    |&index| index < cases.len()
}

fn describe(case: &Case, error: &DeviceError) -> String {
    format!("{} with {} bytes of cache: {error}", case.policy.name(), case.cache_bytes)
}

fn style() -> ProgressStyle {
    let template = "[{pos}/{len}, {elapsed} of {duration}] {wide_bar} {msg}";
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
