//! The static HTML page: tables, throughput bars and latency curves, all in one file.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use plotters::prelude::*;

use crate::cache::{is_cache, study};
use crate::log;
use crate::measure::{Key, Series};
use crate::plots;
use crate::report::Report;
use crate::svg::{Drawn, svg};

const STYLE: &str = "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;color:#222}\
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}\
td,th{padding:.25em .6em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}\
td:first-child,th:first-child{text-align:left}\
.plots{display:flex;flex-wrap:wrap;gap:1em}svg{max-width:100%;height:auto}";

const PLOT_SIZE: (u32, u32) = (530, 300);

/// The percentiles of a latency curve.
const PERCENTILES: [&str; 5] = ["p50", "p99", "p99.9", "p99.99", "max"];

/// The page of `report`.
pub(crate) fn page(report: &Report) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { "Tidegate benchmarks" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Tidegate benchmarks" }
                @for line in report.machine.to_string().lines() { p { (line) } }
                @if report.tiers.paper { (plots::paper(report)) }
                @for table in report.tables() { (table.html()) }
                @if !report.tiers.paper {
                    h2 { "Plots" }
                    (plots::of_figures(&study::figures(), report))
                    @for group in groups(&report.series) { (plots_of(&group)) }
                }
            }
        }
    };
    markup.into_string()
}

/// Series measured under the same conditions, in order, but those with figures of their own.
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

fn plots_of(group: &[&Series]) -> Markup {
    let title = conditions(&group[0].key);
    html! {
        div class="plots" {
            (svg(|text| bars(text, &format!("ops/s, {title}"), group)))
            (svg(|text| curves(text, &format!("latency µs, {title}"), group)))
        }
    }
}

fn label(key: &Key) -> String {
    if key.policy == "copy" && !is_cache(key) { key.case.clone() } else { key.policy.clone() }
}

fn bars(text: &mut String, title: &str, group: &[&Series]) -> Drawn {
    let root = SVGBackend::with_string(text, PLOT_SIZE).into_drawing_area();
    let values: Vec<f64> =
        group.iter().map(|series| series.spread(|sample| sample.ops_per_s).median).collect();
    let most = values.iter().copied().fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 13))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(8)
        .build_cartesian_2d(0.0..most * 1.3, 0.0..group.len() as f64)?;
    chart.configure_mesh().disable_y_mesh().y_labels(0).x_labels(5).draw()?;
    for (number, (series, value)) in group.iter().zip(&values).enumerate() {
        let low = (group.len() - 1 - number) as f64;
        let bar = [(0.0, low + 0.15), (*value, low + 0.85)];
        chart.draw_series([Rectangle::new(bar, Palette99::pick(number).mix(0.6).filled())])?;
        let words = format!("{}  {:.0}k", label(&series.key), value / 1e3);
        chart.draw_series([Text::new(words, (most * 0.01, low + 0.6), ("sans-serif", 12))])?;
    }
    Ok(root.present()?)
}

fn curves(text: &mut String, title: &str, group: &[&Series]) -> Drawn {
    let root = SVGBackend::with_string(text, PLOT_SIZE).into_drawing_area();
    let lines: Vec<[f64; 5]> = group.iter().map(|series| latencies_us(series)).collect();
    let all = || lines.iter().flatten().copied();
    let range = all().fold(f64::MAX, f64::min) * 0.8..all().fold(0.001, f64::max) * 1.5;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 13))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..4.0, range.log_scale())?;
    chart.configure_mesh().x_labels(5).x_label_formatter(&|x| percentile_name(*x)).draw()?;
    for (number, (series, line)) in group.iter().zip(&lines).enumerate() {
        let color = Palette99::pick(number).to_rgba();
        let points = (0u32..).map(f64::from).zip(line.iter().copied());
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(label(&series.key))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(root.present()?)
}

/// The name at `x` on the axis of a latency curve: its ticks are whole.
fn percentile_name(x: f64) -> String {
    let tick = (0u32..).map(f64::from).zip(PERCENTILES).find(|(tick, _)| (tick - x).abs() < 0.01);
    tick.map_or(String::new(), |(_, name)| name.to_owned())
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
        assert_eq!(page.matches("<svg").count(), 2 * groups(&report.series).len());
        assert!(!page.contains("No plot"), "{page}");
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
            max_ns: vec![3000, 0, 90_000],
            mean_ns: vec![2000, 0, 4000],
        });
        let page = page(&report);
        assert_eq!(page.matches("<svg").count(), 3, "5a, 5d and one policy over time");
        assert!(!page.contains("No plot") && page.contains("(5a)"), "{page}");
    }
}
