//! Bars: a number for each name, whole or in parts.

use maud::{Markup, html};

use super::short;
use crate::look::{Looks, hatch};

const WIDTH: f64 = 460.0;
const ROW: f64 = 30.0;
const BAR: f64 = 12.0;

/// A plot of bars, one below the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// The title of the plot.
    pub title: String,
    /// The measure, with its unit.
    pub label: String,
    /// The bars.
    pub bars: Vec<Bar>,
}

/// The numbers of one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// The name.
    pub name: String,
    /// The named parts of the bar; a whole bar has one part, whose name is not shown.
    pub parts: Vec<(String, f64)>,
}

impl Bar {
    /// Makes a bar of one number.
    pub fn whole(name: impl Into<String>, value: f64) -> Self {
        Self { name: name.into(), parts: vec![(String::new(), value)] }
    }

    fn total(&self) -> f64 {
        self.parts.iter().map(|(_, value)| shown(*value)).sum()
    }
}

fn shown(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

impl Bars {
    /// Returns the names of the parts, in order; empty if all bars are whole.
    fn parts(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in self.bars.iter().flat_map(|bar| &bar.parts) {
            if !name.is_empty() && !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names
    }

    pub(super) fn figure(&self, looks: &Looks) -> Markup {
        let parts = self.parts();
        html! {
            figure {
                figcaption { (self.title) }
                (self.svg(looks, &parts))
                @if !parts.is_empty() {
                    ul.legend {
                        @for (index, part) in parts.iter().enumerate() {
                            li { (swatch(index)) (part) }
                        }
                    }
                }
            }
        }
    }

    fn svg(&self, looks: &Looks, parts: &[&str]) -> Markup {
        let height = ROW * self.bars.len() as f64 + 24.0;
        let most = self.bars.iter().map(Bar::total).fold(0.0, f64::max);
        let scale = if most > 0.0 { WIDTH / most } else { 0.0 };
        let label = format!("{}: {}", self.title, self.label);
        html! {
            svg.plot viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(label) {
                text.soft x="0" y="13" { (self.label) }
                @for (row, bar) in (0u32..).map(f64::from).zip(&self.bars) {
                    @let top = 22.0 + row * ROW;
                    text x="0" y=(top + 11.0) { (bar.name) }
                    text x=(WIDTH) y=(top + 11.0) text-anchor="end" { (short(bar.total())) }
                    g class=(looks.of(&bar.name).color_class()) {
                        @for (part, x, width) in pieces(bar, parts, scale) {
                            (area(part, x, width, top + 15.0))
                        }
                    }
                }
            }
        }
    }
}

/// Returns number, begin and width of each part of `bar`.
fn pieces(bar: &Bar, parts: &[&str], scale: f64) -> Vec<(usize, f64, f64)> {
    let mut from = 0.0;
    let mut pieces = Vec::new();
    for (name, value) in &bar.parts {
        let part = parts.iter().position(|part| part == name).unwrap_or(0);
        let width = shown(*value) * scale;
        pieces.push((part, from, width));
        from += width;
    }
    pieces
}

/// Draws a piece of a bar, in the colour of the bar and with the hatching of the part.
fn area(part: usize, x: f64, width: f64, y: f64) -> Markup {
    let (x, width) = ((x * 10.0).round() / 10.0, (width * 10.0).round() / 10.0);
    html! {
        rect.bar x=(x) y=(y) width=(width) height=(BAR) {}
        @if let Some(hatch) = hatch(part) {
            rect x=(x) y=(y) width=(width) height=(BAR) fill=(hatch) {}
        }
    }
}

/// Draws a part in the colour of text: all bars have the part.
fn swatch(part: usize) -> Markup {
    html! { svg.plain viewBox="0 0 38 14" aria-hidden="true" { (area(part, 0.0, 38.0, 1.0)) } }
}
