//! The plots of the Caiti paper, as SVG.

use maud::{Markup, html};
use plotters::coord::ranged1d::{KeyPointHint, Ranged};
use plotters::prelude::*;

use crate::figures::{Figure, Line, Style, figures};
use crate::report::Report;
use crate::svg::{Drawn, svg};
use crate::tiers::{Breakdown, REQUEST_PHASES};
use crate::timeline::TimelineRow;

const FIGURE_SIZE: (u32, u32) = (540, 330);
const TIMELINE_SIZE: (u32, u32) = (540, 190);
/// Pixels beside a plot for the names of its lines.
const LEGEND_WIDTH: u32 = 125;

/// All plots of `report` that have data.
pub(crate) fn paper(report: &Report) -> Markup {
    let breakdowns: Vec<&Breakdown> =
        report.tiers.breakdowns.iter().filter(|breakdown| breakdown.shown).collect();
    html! {
        (of_figures(&figures(), report))
        @for group in breakdowns.chunk_by(|one, other| one.place.case == other.place.case) {
            div class="plots" { (svg(|text| stacks(text, group))) }
        }
        h2 { "Write latency over time, µs (3, 5b): a flush after each 64 MiB" }
        p { "Of each half millisecond the slowest write (dark) and the mean (light)." }
        div class="plots" {
            @for row in &report.tiers.timelines { (svg(|text| timeline(text, row, top_us(report)))) }
        }
    }
}

/// A plot of each of `figures` that has data.
pub(crate) fn of_figures(figures: &[Figure], report: &Report) -> Markup {
    html! {
        div class="plots" {
            @for figure in figures {
                @let (title, lines) = figure.plotted(&report.series);
                @if !lines.is_empty() { (svg(|text| curves(text, &title, figure, &lines))) }
            }
        }
    }
}

/// A figure: a line for each policy, each with a place of its own for every column.
fn curves(text: &mut String, title: &str, figure: &Figure, lines: &[Line]) -> Drawn {
    let root = SVGBackend::with_string(text, FIGURE_SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(FIGURE_SIZE.0 - LEGEND_WIDTH);
    let spreads = || lines.iter().flat_map(|line| line.values.iter().flatten());
    let low = spreads().map(|spread| spread.min).fold(f64::MAX, f64::min);
    let high = spreads().map(|spread| spread.max).fold(f64::MIN_POSITIVE, f64::max);
    let last = figure.columns.len().saturating_sub(1) as f64;
    let y = (low.max(1e-6) * 0.8..high * 1.25).log_scale();
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(38)
        .y_label_area_size(56)
        .build_cartesian_2d(Columns { last }, y)?;
    chart
        .configure_mesh()
        .x_labels(figure.columns.len())
        .x_label_formatter(&|x| column_name(figure, *x))
        .y_label_formatter(&|y| number(*y))
        .x_desc(figure.axis)
        .light_line_style(WHITE)
        .draw()?;
    for (index, line) in lines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let apart = if figure.style == Style::Dots { 0.03 * index as f64 - 0.12 } else { 0.0 };
        let points: Vec<(f64, f64)> = (0u32..)
            .zip(&line.values)
            .filter_map(|(column, value)| Some((f64::from(column) + apart, value.as_ref()?.median)))
            .collect();
        if figure.style != Style::Dots {
            chart.draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))?;
        }
        chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, color.filled())))?;
    }
    names(&legend, lines.iter().map(|line| line.policy.as_str()))?;
    Ok(root.present()?)
}

/// Whole numbers from 0 with a margin on both sides: a figure's columns.
struct Columns {
    last: f64,
}

impl Ranged for Columns {
    type FormatOption = plotters::coord::ranged1d::NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value + 0.3) / (self.last + 0.6);
        let pixels = share * f64::from(limit.1 - limit.0);
        #[expect(clippy::cast_possible_truncation, reason = "a place on a small plot")]
        let offset = pixels.round() as i32;
        limit.0 + offset
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small count"
        )]
        let last = self.last as u32;
        (0..=last).map(f64::from).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        0.0..self.last
    }
}

impl plotters::coord::ranged1d::ValueFormatter<f64> for Columns {
    fn format(value: &f64) -> String {
        value.to_string()
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// What each color stands for.
fn names<'n>(area: &Area<'_>, names: impl Iterator<Item = &'n str>) -> Drawn {
    for (index, name) in names.enumerate() {
        let y = 40 + 17 * i32::try_from(index)?;
        let color = Palette99::pick(index).to_rgba();
        area.draw(&Rectangle::new([(2, y), (14, y + 8)], color.filled()))?;
        area.draw(&Text::new(name.to_owned(), (19, y - 2), ("sans-serif", 12)))?;
    }
    Ok(())
}

fn column_name(figure: &Figure, x: f64) -> String {
    let mut columns = (0u32..).map(f64::from).zip(&figure.columns);
    let found = columns.find(|(index, _)| (index - x).abs() < 0.01);
    found.map_or(String::new(), |(_, column)| column.label.clone())
}

/// As many digits as a label needs.
fn number(value: f64) -> String {
    let digits = match value {
        value if value >= 10.0 => 0,
        value if value >= 1.0 => 1,
        value if value >= 0.01 => 2,
        value if value > 0.0 => 4,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// Figure 6a: the mean time of a write, by phase, a bar for each policy.
fn stacks(text: &mut String, group: &[&Breakdown]) -> Drawn {
    let height = 110 + 24 * u32::try_from(group.len())?;
    let root = SVGBackend::with_string(text, (2 * FIGURE_SIZE.0, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(2 * FIGURE_SIZE.0 - LEGEND_WIDTH);
    let most = group.iter().map(|breakdown| total_us(breakdown)).fold(0.001, f64::max);
    let count = group.len() as f64;
    let title = format!("Time of a write by phase, µs (6a): {}", group[0].place.case);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(30)
        .y_label_area_size(120)
        .build_cartesian_2d(0.0..most * 1.02, 0.0..count)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE)
        .y_labels(0)
        .x_label_formatter(&|x| number(*x))
        .draw()?;
    for (row, breakdown) in (0u32..).map(f64::from).zip(group) {
        let (low, mut from) = (count - 1.0 - row, 0.0);
        for (index, (phase, _)) in REQUEST_PHASES.into_iter().enumerate() {
            let to = from + breakdown.ns_a_write(phase) / 1e3;
            let color = Palette99::pick(index).to_rgba().filled();
            let bar = [(from, low + 0.15), (to, low + 0.85)];
            chart.draw_series([Rectangle::new(bar, color)])?;
            from = to;
        }
        let (_, y) = chart.backend_coord(&(0.0, low + 0.5));
        plot.draw(&Text::new(breakdown.place.policy.clone(), (8, y - 6), ("sans-serif", 12)))?;
    }
    names(&legend, REQUEST_PHASES.into_iter().map(|(_, name)| name))?;
    Ok(root.present()?)
}

fn total_us(breakdown: &Breakdown) -> f64 {
    REQUEST_PHASES.into_iter().map(|(phase, _)| breakdown.ns_a_write(phase) / 1e3).sum()
}

/// The longest latency of all timelines: they share their axis.
fn top_us(report: &Report) -> f64 {
    let all = report.tiers.timelines.iter().flat_map(|row| &row.max_ns);
    all.max().map_or(1.0, |&ns| ns as f64 / 1e3)
}

fn timeline(text: &mut String, row: &TimelineRow, top_us: f64) -> Drawn {
    let root = SVGBackend::with_string(text, TIMELINE_SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let tick_ms = row.tick_ns as f64 / 1e6;
    let end_ms = row.max_ns.len() as f64 * tick_ms;
    let mut chart = ChartBuilder::on(&root)
        .caption(&row.policy, ("sans-serif", 14))
        .margin(6)
        .x_label_area_size(30)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..end_ms, (0.1..top_us * 1.5).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("ms")
        .light_line_style(WHITE)
        .y_label_formatter(&|y| number(*y))
        .draw()?;
    for (values, color) in
        [(&row.max_ns, RGBColor(30, 70, 140)), (&row.mean_ns, RGBColor(120, 180, 230))]
    {
        let points = (0u32..).map(f64::from).zip(values).filter(|(_, ns)| **ns > 0);
        let dot = |(tick, &ns): (f64, &u64)| {
            Circle::new(((tick + 0.5) * tick_ms, ns as f64 / 1e3), 2, color.filled())
        };
        chart.draw_series(points.map(dot))?;
    }
    Ok(root.present()?)
}
