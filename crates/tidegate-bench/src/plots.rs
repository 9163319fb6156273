//! The plots of the Caiti paper.

use maud::{Markup, html};

use crate::chart::{self, Axis, Bar, Bars, Line, Lines, Plot};
use crate::figures::{Figure, Line as Numbers, Style, figures};
use crate::look::Looks;
use crate::measure::Spread;
use crate::report::Report;
use crate::tiers::{Breakdown, REQUEST_PHASES};
use crate::timeline::TimelineRow;

/// The lines of a plot over time.
pub(crate) const TIMELINE_NAMES: [&str; 2] = ["slowest", "mean"];

/// Draws all plots of `report` that have data.
pub(crate) fn paper(report: &Report, looks: &Looks) -> Markup {
    let breakdowns: Vec<&Breakdown> =
        report.tiers.breakdowns.iter().filter(|breakdown| breakdown.shown).collect();
    let groups = breakdowns.chunk_by(|one, other| one.place.case == other.place.case);
    let stacks: Vec<Plot> = groups.map(|group| Plot::Bars(stacks(group))).collect();
    let timelines: Vec<Plot> =
        report.tiers.timelines.iter().map(|row| Plot::Lines(timeline(row))).collect();
    html! {
        (of_figures(&figures(), report, looks))
        (chart::figures(&stacks, looks))
        h2 { "Write latency over time (3, 5b): a flush after each 64 MiB" }
        p { "Of each half millisecond the slowest write and the mean." }
        (chart::figures(&timelines, looks))
    }
}

/// Draws a plot of each of `figures` that has data.
pub(crate) fn of_figures(figures: &[Figure], report: &Report, looks: &Looks) -> Markup {
    let plot = |figure: &Figure| {
        let (title, lines) = figure.plotted(&report.series);
        (!lines.is_empty()).then(|| Plot::Lines(curves(title, figure, &lines)))
    };
    chart::figures(&figures.iter().filter_map(plot).collect::<Vec<_>>(), looks)
}

/// Draws a figure: a line for each policy, with a position for every column.
fn curves(title: String, figure: &Figure, lines: &[Numbers]) -> Lines {
    let line = |numbers: &Numbers| {
        let median = |spread: &Option<Spread>| spread.map(|spread| spread.median);
        let values: Vec<Option<f64>> = numbers.values.iter().map(median).collect();
        let joined = figure.style != Style::Dots;
        Line { joined, ..Line::of_columns(numbers.policy.clone(), &values) }
    };
    Lines {
        title,
        x_label: figure.axis.to_owned(),
        x: Axis::Columns(figure.columns.iter().map(|column| column.label.clone()).collect()),
        y_label: unit(figure).to_owned(),
        y: Axis::Log,
        lines: lines.iter().map(line).collect(),
    }
}

/// Returns the unit of a figure's numbers: the part of its title behind the comma.
fn unit(figure: &Figure) -> &'static str {
    if figure.style == Style::Ratios {
        return "ratio to btt";
    }
    let unit = figure.title.split_once(", ").map_or("", |(_, unit)| unit);
    unit.split(" (").next().unwrap_or(unit)
}

/// Draws figure 6a: the mean time of a write, by phase, a bar for each policy.
fn stacks(group: &[&Breakdown]) -> Bars {
    let bar = |breakdown: &&Breakdown| Bar {
        name: breakdown.place.policy.clone(),
        parts: REQUEST_PHASES
            .into_iter()
            .map(|(phase, name)| (name.to_owned(), breakdown.ns_a_write(phase) / 1e3))
            .collect(),
    };
    Bars {
        title: format!("Time of a write by phase (6a): {}", group[0].place.case),
        label: "µs".to_owned(),
        bars: group.iter().map(bar).collect(),
    }
}

/// Draws the slowest write and the mean of each tick; ticks without writes are left out.
fn timeline(row: &TimelineRow) -> Lines {
    let tick_ms = row.tick_ns as f64 / 1e6;
    let [slowest, mean] = TIMELINE_NAMES;
    let line = |name: &str, values: &[u64]| {
        let written = (0u32..).map(f64::from).zip(values).filter(|(_, ns)| **ns > 0);
        let points = written.map(|(tick, &ns)| ((tick + 0.5) * tick_ms, ns as f64 / 1e3));
        Line { name: name.to_owned(), points: points.collect(), joined: false }
    };
    Lines {
        title: row.policy.clone(),
        x_label: "time, ms".to_owned(),
        x: Axis::Linear,
        y_label: "µs".to_owned(),
        y: Axis::Log,
        lines: vec![line(slowest, &row.max_ns), line(mean, &row.mean_ns)],
    }
}
