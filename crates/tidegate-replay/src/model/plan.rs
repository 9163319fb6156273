//! Runs many cases, as many in parallel as this machine has CPUs. Each case depends only on its
//! inputs, so that the order does not matter.

use indicatif::{ProgressBar, ProgressStyle};
use tidegate::device::DeviceError;

use super::case::{Case, Outcome};
use super::costs::Costs;
use crate::error::{Error, Result};
use crate::parallel;

/// A case and its outcome.
#[derive(Debug, Clone)]
pub(super) struct Ran {
    pub(super) case: Case,
    pub(super) outcome: Outcome,
}

/// Runs all `cases` and returns the results in the same order. Shows a progress bar on a terminal.
///
/// # Errors
/// The first case that fails.
pub(super) fn run(cases: &[Case], costs: &Costs) -> Result<Vec<Ran>> {
    let media = costs.media()?;
    let bar = ProgressBar::new(cases.len() as u64).with_style(style());
    let run = |case: &Case| {
        let Case { jobs, cores, .. } = case;
        bar.set_message(format!("{}, {jobs} jobs, {cores} cores", case.policy.name()));
        let outcome = case.run(costs, &media);
        bar.inc(1);
        outcome
    };
    let outcomes = parallel::map(cases, run);
    bar.finish_and_clear();
    let collect = |(case, outcome): (&Case, Result<Outcome, DeviceError>)| {
        let outcome = outcome.map_err(|error| {
            let (policy, bytes) = (case.policy.name(), case.cache_bytes);
            Error::Usage(format!("{policy} with {bytes} bytes of cache: {error}"))
        })?;
        Ok(Ran { case: case.clone(), outcome })
    };
    cases.iter().zip(outcomes).map(collect).collect()
}

fn style() -> ProgressStyle {
    let template = "[{pos}/{len}, {elapsed} of {duration}] {wide_bar} {msg}";
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
