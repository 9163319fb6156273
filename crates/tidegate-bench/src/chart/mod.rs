//! Plots as SVG in a page: lines of numbers, and bars. Colours, dashes and marks come from
//! [`Looks`]; the page's style sheet draws them.

mod axis;
mod bars;
mod lines;

use maud::{Markup, html};

pub use axis::Axis;
pub use bars::{Bar, Bars};
pub use lines::{Line, Lines};

use crate::look::Looks;

/// A plot.
#[derive(Debug, Clone, PartialEq)]
pub enum Plot {
    /// One line for each name.
    Lines(Lines),
    /// One bar for each name.
    Bars(Bars),
}

impl Plot {
    /// Draws the plot as a figure of the page.
    pub fn figure(&self, looks: &Looks) -> Markup {
        match self {
            Self::Lines(lines) => lines.figure(looks),
            Self::Bars(bars) => bars.figure(looks),
        }
    }

    /// Returns the names in the plot.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Lines(plot) => plot.lines.iter().map(|line| line.name.as_str()).collect(),
            Self::Bars(plot) => plot.bars.iter().map(|bar| bar.name.as_str()).collect(),
        }
    }
}

/// Draws the figures of `plots`, side by side if the page is wide enough.
pub fn figures(plots: &[Plot], looks: &Looks) -> Markup {
    html! { div.plots { @for plot in plots { (plot.figure(looks)) } } }
}

/// Formats a number on a plot: three digits, with k, M, G or T for powers of 1000.
pub(crate) fn short(value: f64) -> String {
    let magnitude = value.abs();
    let (scaled, unit) = match magnitude {
        m if m >= 1e12 => (value / 1e12, "T"),
        m if m >= 1e9 => (value / 1e9, "G"),
        m if m >= 1e6 => (value / 1e6, "M"),
        m if m >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        m if m >= 100.0 || m == 0.0 => 0,
        m if m >= 10.0 => 1,
        m if m >= 1.0 => 2,
        m if m >= 0.1 => 3,
        _ => 5,
    };
    let text = format!("{scaled:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (1.234, "1.23"),
            (9999.0, "9999"),
            (12_345.0, "12.3k"),
            (2_000_000.0, "2M"),
            (1.5e9, "1.5G"),
            (100.0, "100"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
