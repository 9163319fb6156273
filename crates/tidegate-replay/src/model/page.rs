//! Builds a page of the model's results that can be sent to other people.

#![allow(clippy::cast_precision_loss, reason = "numbers of a plot")]

use super::costs::Costs;
use super::output;
use super::plan::Ran;
use crate::report::{Axis, Line, Lines, Plot, Report, Section, command_line, distinct};

/// Returns the page.
pub(super) fn page(results: &[Ran], costs: &Costs) -> Report {
    let fastest = results
        .iter()
        .max_by(|one, other| one.outcome.ops_per_s().total_cmp(&other.outcome.ops_per_s()));
    let verdict = fastest.map_or_else(String::new, |ran| {
        format!(
            "{} has the most writes a second: {:.0} thousand, by {} jobs on {} cores.",
            ran.case.policy.name(),
            ran.outcome.ops_per_s() / 1e3,
            ran.case.jobs,
            ran.case.cores,
        )
    });
    let tables = output::tables(results)
        .into_iter()
        .map(|table| Section { table: Some(table), ..Section::default() });
    Report {
        title: "A model of machines with many cores".to_owned(),
        asked: format!(
            "Uniform writes of each job, through the tiers as they ship, in virtual time.\n\
             Costs of {}, media {}.",
            costs.name, costs.media
        ),
        command_line: command_line(),
        verdict,
        sections: machines(results).into_iter().chain(tables).collect(),
    }
}

/// Returns a section with plots for each machine and size of the DRAM tiers.
fn machines(results: &[Ran]) -> Vec<Section> {
    let of = |ran: &Ran| (ran.case.cores, ran.case.cache_bytes);
    let each = distinct(results.iter().map(of));
    let section = |(cores, cache_bytes)| {
        let here: Vec<&Ran> =
            results.iter().filter(|ran| of(ran) == (cores, cache_bytes)).collect();
        Section {
            title: format!("{cores} cores, DRAM tiers of {}", output::size(cache_bytes)),
            plots: vec![by_jobs(&here), by_depth(&here)],
            ..Section::default()
        }
    };
    each.into_iter().map(section).collect()
}

fn by_jobs(here: &[&Ran]) -> Plot {
    let jobs = distinct(here.iter().map(|ran| ran.case.jobs));
    let policies = distinct(here.iter().map(|ran| ran.case.policy.name()));
    let line = |policy: &'static str| {
        let at = |jobs: &u32| {
            let is_it = |ran: &&&Ran| ran.case.policy.name() == policy && ran.case.jobs == *jobs;
            here.iter().find(is_it).map(|ran| ran.outcome.ops_per_s() / 1e3)
        };
        Line::of_columns(policy, &jobs.iter().map(at).collect::<Vec<_>>())
    };
    Plot::Lines(Lines {
        title: "Throughput".to_owned(),
        x_label: "jobs".to_owned(),
        x: Axis::Columns(jobs.iter().map(ToString::to_string).collect()),
        y_label: "thousands of writes a second".to_owned(),
        y: Axis::Linear,
        lines: policies.into_iter().map(line).collect(),
    })
}

/// Plots the latency by depth, for the runs with the fewest jobs.
fn by_depth(here: &[&Ran]) -> Plot {
    let fewest = here.iter().map(|ran| ran.case.jobs).min().unwrap_or(1);
    let here: Vec<&Ran> = here.iter().copied().filter(|ran| ran.case.jobs == fewest).collect();
    let depths = here.first().map_or(&[][..], |ran| &ran.case.depths);
    let line = |ran: &&Ran| {
        let means = ran.outcome.latencies.iter().map(|it| Some(it.mean() / 1e3));
        Line::of_columns(ran.case.policy.name(), &means.collect::<Vec<_>>())
    };
    Plot::Lines(Lines {
        title: format!("Mean latency with {fewest} jobs"),
        x_label: "requests issued at once".to_owned(),
        x: Axis::Columns(depths.iter().map(ToString::to_string).collect()),
        y_label: "µs".to_owned(),
        y: Axis::Log,
        lines: here.iter().map(line).collect(),
    })
}
