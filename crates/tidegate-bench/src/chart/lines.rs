//! Lines: for each name, a number at each position.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::axis::{Axis, Scale};
use crate::look::{Look, Looks};

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 40.0;
/// Above this number of points, a line has dots without marks.
const MOST_MARKS: usize = 100;
/// Approximate width of a letter of a label.
const LETTER: f64 = 6.5;

/// A plot of lines.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    /// The title of the plot.
    pub title: String,
    /// The varied parameter, with its unit.
    pub x_label: String,
    /// Layout of the horizontal axis.
    pub x: Axis,
    /// The measure, with its unit.
    pub y_label: String,
    /// Layout of the vertical axis.
    pub y: Axis,
    /// The lines.
    pub lines: Vec<Line>,
}

/// The numbers of one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// The name.
    pub name: String,
    /// Values of the varied parameter, and the measurements there.
    pub points: Vec<(f64, f64)>,
    /// Whether the points are joined: values between two points have a meaning.
    pub joined: bool,
}

impl Line {
    /// Makes a joined line with a point at each column that has a value.
    pub fn of_columns(name: impl Into<String>, values: &[Option<f64>]) -> Self {
        let columns = (0u32..).map(f64::from).zip(values);
        let points = columns.filter_map(|(at, value)| Some((at, (*value)?))).collect();
        Self { name: name.into(), points, joined: true }
    }
}

impl Lines {
    pub(super) fn figure(&self, looks: &Looks) -> Markup {
        html! {
            figure {
                figcaption { (self.title) }
                (self.svg(looks))
                ul.legend {
                    @for line in &self.lines {
                        @let look = looks.of(&line.name);
                        li { (swatch(look, line.joined)) (line.name) }
                    }
                }
            }
        }
    }

    fn svg(&self, looks: &Looks) -> Markup {
        let all = || self.lines.iter().flat_map(|line| line.points.iter());
        let x = Scale::new(&self.x, all().map(|point| point.0));
        let y = Scale::new(&self.y, all().map(|point| point.1));
        let label = format!("{}: {} by {}", self.title, self.y_label, self.x_label);
        html! {
            svg.plot viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(label) {
                @for (value, text) in y.ticks() {
                    @let at = y_at(&y, value).unwrap_or(0.0);
                    line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(round(at)) y2=(round(at)) {}
                    text.soft x=(LEFT - 6.0) y=(round(at + 4.0)) text-anchor="end" { (text) }
                }
                line.axis x1=(LEFT) x2=(WIDTH - RIGHT) y1=(HEIGHT - BOTTOM) y2=(HEIGHT - BOTTOM) {}
                @for (value, text) in x_ticks(&x) {
                    @let at = x_at(&x, value).unwrap_or(0.0);
                    text.soft x=(round(at)) y=(HEIGHT - BOTTOM + 16.0) text-anchor="middle" { (text) }
                }
                text.soft x="2" y="13" { (self.y_label) }
                text.soft x=((LEFT + WIDTH - RIGHT) / 2.0) y=(HEIGHT - 6.0) text-anchor="middle" {
                    (self.x_label)
                }
                @for line in &self.lines { (drawn(line, looks.of(&line.name), &x, &y)) }
            }
        }
    }
}

/// Returns the ticks below the plot, as many as fit.
fn x_ticks(x: &Scale<'_>) -> Vec<(f64, String)> {
    let ticks = x.ticks();
    let longest = ticks.iter().map(|(_, text)| text.chars().count()).max().unwrap_or(0);
    let fit = (WIDTH - LEFT - RIGHT) / ((longest as f64 + 1.5) * LETTER);
    let every = (ticks.len() as f64 / fit.max(1.0)).ceil().max(1.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    ticks.into_iter().step_by(every as usize).collect()
}

fn x_at(x: &Scale<'_>, value: f64) -> Option<f64> {
    x.share(value).map(|share| LEFT + share * (WIDTH - LEFT - RIGHT))
}

fn y_at(y: &Scale<'_>, value: f64) -> Option<f64> {
    y.share(value).map(|share| HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP))
}

/// Rounds to tenths of a unit, finer than a screen shows.
fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn drawn(line: &Line, look: Look, x: &Scale<'_>, y: &Scale<'_>) -> Markup {
    let place = |point: &(f64, f64)| Some((round(x_at(x, point.0)?), round(y_at(y, point.1)?)));
    let places: Vec<(f64, f64)> = line.points.iter().filter_map(place).collect();
    let is_dense = places.len() > MOST_MARKS;
    html! {
        g class=(look.color_class()) {
            @if line.joined {
                path.line d=(joined(&places)) stroke-dasharray=(look.dash()) {}
            }
            @if is_dense && !line.joined {
                path.dots d=(dots(&places)) {}
            } @else if !is_dense {
                @for (x, y) in places { (mark(look, x, y)) }
            }
        }
    }
}

fn joined(places: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (index, (x, y)) in places.iter().enumerate() {
        let _ = write!(path, "{}{x} {y}", if index == 0 { 'M' } else { 'L' });
    }
    path
}

fn dots(places: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (x, y) in places {
        let _ = write!(path, "M{x} {y}h0");
    }
    path
}

fn mark(look: Look, x: f64, y: f64) -> Markup {
    let class = if look.is_hollow() { "mark hollow" } else { "mark" };
    html! { path class=(class) d=(look.mark()) transform=(format!("translate({x} {y})")) {} }
}

/// Draws a piece of a line with its mark, for the legend.
fn swatch(look: Look, is_joined: bool) -> Markup {
    html! {
        svg viewBox="0 0 38 14" aria-hidden="true" {
            g class=(look.color_class()) {
                @if is_joined { path.line d="M1 7H37" stroke-dasharray=(look.dash()) {} }
                (mark(look, 19.0, 7.0))
            }
        }
    }
}
