//! The static HTML page: tables, throughput bars and latency curves, all in one file.

use maud::html;

use crate::cache::{is_cache, study};
use crate::chart::{Axis, Bar, Bars, Line, Lines, Plot, figures};
use crate::log;
use crate::look::Looks;
use crate::measure::{Key, Series};
use crate::page;
use crate::plots;
use crate::report::Report;

/// The percentiles of a latency curve.
const PERCENTILES: [&str; 5] = ["p50", "p99", "p99.9", "p99.99", "max"];

/// Renders the page of `report`.
pub(crate) fn page(report: &Report) -> String {
    let title = "Tidegate benchmarks";
    let looks = looks(report);
    let groups = groups(&report.series);
    let plots: Vec<Plot> = groups.iter().flat_map(|group| plots_of(group)).collect();
    let body = html! {
        h1 { (title) }
        @for line in report.machine.to_string().lines() { p { (line) } }
        @if report.tiers.paper { (plots::paper(report, &looks)) }
        @for table in report.tables() { (table.html()) }
        @if !report.tiers.paper {
            h2 { "Plots" }
            (plots::of_figures(&study::figures(), report, &looks))
            (figures(&plots, &looks))
        }
    };
    page::page(title, &body)
}

/// Assigns the looks of all names in the plots of `report`.
fn looks(report: &Report) -> Looks {
    let labels: Vec<String> = report.series.iter().map(|series| label(&series.key)).collect();
    let policies = report.series.iter().map(|series| series.key.policy.as_str());
    let names = labels.iter().map(String::as_str).chain(policies);
    Looks::new(names.chain(plots::TIMELINE_NAMES))
}

/// Groups series measured under the same conditions, in order, except series with own figures.
fn groups(series: &[Series]) -> Vec<Vec<&Series>> {
    let mut groups: Vec<Vec<&Series>> = Vec::new();
    for series in series.iter().filter(|series| !study::is_study(&series.key)) {
        match groups.iter_mut().find(|group| conditions(&group[0].key) == conditions(&series.key)) {
            Some(group) => group.push(series),
            None => groups.push(vec![series]),
        }
    }
    groups
}

fn conditions(key: &Key) -> String {
    let outside = ["nbd", log::LOG_PREFIX, log::RUN_PREFIX];
    let named = is_cache(key) || outside.iter().any(|prefix| key.case.starts_with(prefix));
    let place = if named { &key.case } else { "in process" };
    let (op, threads, depth) = (key.op.name(), key.threads, key.iodepth);
    format!("{place}: {op} of {} bytes, {threads} threads, depth {depth}", key.block_bytes)
}

fn plots_of(group: &[&Series]) -> [Plot; 2] {
    let title = conditions(&group[0].key);
    [Plot::Bars(bars(&title, group)), Plot::Lines(curves(&title, group))]
}

fn label(key: &Key) -> String {
    if key.policy == "copy" && !is_cache(key) { key.case.clone() } else { key.policy.clone() }
}

fn bars(title: &str, group: &[&Series]) -> Bars {
    let bar = |series: &&Series| {
        Bar::whole(label(&series.key), series.spread(|sample| sample.ops_per_s).median)
    };
    Bars {
        title: format!("Throughput, {title}"),
        label: "operations/s".to_owned(),
        bars: group.iter().map(bar).collect(),
    }
}

fn curves(title: &str, group: &[&Series]) -> Lines {
    let line =
        |series: &&Series| Line::of_columns(label(&series.key), &latencies_us(series).map(Some));
    Lines {
        title: format!("Latency, {title}"),
        x_label: "percentile".to_owned(),
        x: Axis::Columns(PERCENTILES.map(str::to_owned).into()),
        y_label: "µs".to_owned(),
        y: Axis::Log,
        lines: group.iter().map(line).collect(),
    }
}

fn latencies_us(series: &Series) -> [f64; 5] {
    let row = series.row();
    [row.p50_ns, row.p99_ns, row.p999_ns, row.p9999_ns, row.max_ns].map(|ns| ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn a_page_has_two_plots_for_each_group_and_no_failed_one() {
        let report = report();
        let page = page(&report);
        assert_eq!(page.matches("<svg class=\"plot\"").count(), 2 * groups(&report.series).len());
        assert!(page.contains("peer:libpmemblk"));
    }

    #[test]
    fn a_page_of_the_paper_has_its_plots_instead() {
        let mut report = report();
        for series in &mut report.series {
            series.key.case = "overrun-64M".to_owned();
        }
        report.tiers.paper = true;
        report.tiers.timelines.push(crate::timeline::TimelineRow {
            policy: "lru".to_owned(),
            case: "timeline-64M".to_owned(),
            tick_ns: 500_000,
            requests: vec![1, 0, 2],
            max_ns: vec![3000, 0, 90_000],
            mean_ns: vec![2000, 0, 4000],
        });
        let page = page(&report);
        assert_eq!(
            page.matches("<svg class=\"plot\"").count(),
            3,
            "5a, 5d and one policy over time"
        );
        assert!(page.contains("(5a)"), "{page}");
    }
}
