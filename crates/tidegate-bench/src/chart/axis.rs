//! Axes: from numbers to positions on a plot, and the positions of the ticks.

use super::short;

/// The layout of an axis.
#[derive(Debug, Clone, PartialEq)]
pub enum Axis {
    /// A column for each label; the number of a point counts the columns from 0.
    Columns(Vec<String>),
    /// Evenly, from 0 or the smallest number.
    Linear,
    /// By powers of ten: only numbers above 0 are shown.
    Log,
}

/// An axis over a range of numbers.
pub(super) struct Scale<'a> {
    axis: &'a Axis,
    low: f64,
    high: f64,
}

impl<'a> Scale<'a> {
    /// Makes a scale of `axis` for all of `values`.
    pub(super) fn new(axis: &'a Axis, values: impl Iterator<Item = f64> + Clone) -> Self {
        let shown = values.filter(|value| is_shown(axis, *value));
        let most = shown.clone().fold(f64::MIN, f64::max);
        let least = shown.fold(f64::MAX, f64::min);
        let (low, high) = match axis {
            Axis::Columns(labels) => (-0.5, labels.len().max(1) as f64 - 0.5),
            _ if most < least => (0.0, 1.0),
            Axis::Linear if least >= 0.0 => (0.0, if most > 0.0 { most * 1.05 } else { 1.0 }),
            Axis::Linear => (least, most.max(0.0) + (most - least) * 0.05),
            Axis::Log => (least / 1.3, most * 1.3),
        };
        Self { axis, low, high }
    }

    /// Returns the position of `value` on the axis, from 0 to 1, or `None` if it cannot be shown.
    pub(super) fn share(&self, value: f64) -> Option<f64> {
        is_shown(self.axis, value).then(|| match self.axis {
            Axis::Log => (value / self.low).ln() / (self.high / self.low).ln(),
            _ => (value - self.low) / (self.high - self.low),
        })
    }

    /// Returns the numbers and labels of the ticks.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        match self.axis {
            Axis::Columns(labels) => (0u32..).map(f64::from).zip(labels.iter().cloned()).collect(),
            Axis::Linear => labelled(linear_ticks(self.low, self.high)),
            Axis::Log => labelled(log_ticks(self.low, self.high)),
        }
    }
}

fn is_shown(axis: &Axis, value: f64) -> bool {
    value.is_finite() && (*axis != Axis::Log || value > 0.0)
}

fn labelled(ticks: Vec<f64>) -> Vec<(f64, String)> {
    ticks.into_iter().map(|tick| (tick, short(tick))).collect()
}

/// Returns four to ten round numbers.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power);
    let step = step.into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power);
    let first = (low / step).ceil();
    (0u32..20)
        .map(|number| (first + f64::from(number)) * step)
        .take_while(|tick| *tick <= high)
        .collect()
}

/// Returns powers of ten, with their double and fivefold if there are few.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let decades = (high / low).log10();
    let digits: &[f64] = if decades < 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let every = if decades > 8.0 { 2 } else { 1 };
    let (first, last) = (low.log10().floor(), high.log10().ceil());
    let powers = (0u32..40).step_by(every).map(|number| first + f64::from(number));
    powers
        .take_while(|power| *power <= last)
        .flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powf(power)))
        .filter(|tick| (low..=high).contains(tick))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(linear_ticks(0.0, 10.5), [0.0, 5.0, 10.0]);
        assert_eq!(linear_ticks(0.0, 3.0), [0.0, 1.0, 2.0, 3.0]);
        let log = |low, high| log_ticks(low, high).into_iter().map(short).collect::<Vec<_>>();
        assert_eq!(log(0.9, 60.0), ["1", "2", "5", "10", "20", "50"]);
        assert_eq!(log(0.5, 1e5).len(), 6);
    }

    #[test]
    fn numbers_that_cannot_be_shown_are_left_out() {
        let values = [0.0, 1.0, 100.0, f64::NAN, f64::INFINITY];
        let scale = Scale::new(&Axis::Log, values.into_iter());
        assert_eq!(scale.share(0.0), None);
        assert_eq!(scale.share(f64::NAN), None);
        assert!(scale.share(10.0).is_some_and(|share| (share - 0.5).abs() < 1e-9));
        let nothing = Scale::new(&Axis::Linear, std::iter::empty());
        assert_eq!(nothing.share(0.5), Some(0.5));
    }
}
