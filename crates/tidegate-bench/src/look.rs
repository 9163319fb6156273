//! The looks of policies and schemes in plots: one colour, one dash and one mark each, in all plots
//! of a page. Lines are distinct in black and white, and on light and dark pages.

use std::fmt::Write as _;

/// Colours on a light page and on a dark one.
const COLORS: [(&str, &str); 10] = [
    ("#0b62a8", "#6cb6ff"),
    ("#c2410c", "#ff9b5e"),
    ("#0f7a4f", "#4cd39b"),
    ("#a21caf", "#f08cf5"),
    ("#7c5c00", "#e2c044"),
    ("#0e7490", "#5fd4e8"),
    ("#b91c1c", "#ff7b7b"),
    ("#4d5763", "#b6c2cf"),
    ("#5b21b6", "#b9a0ff"),
    ("#3f6212", "#b5d66b"),
];
const DASHES: [&str; 6] = ["none", "7 3", "2 3", "10 3 2 3", "4 2", "12 4"];
/// Paths around the origin: circle, square, triangle, diamond, cross, plus, ring, inverted
/// triangle. Marks of strokes have no inside.
const MARKS: [&str; 8] = [
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-4.5l4.5 8h-9z",
    "M0-5l4.5 5l-4.5 5l-4.5-5z",
    "M-4-4l8 8M-4 4l8-8",
    "M0-5v10M-5 0h10",
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M0 4.5l4.5-8h-9z",
];
const RING: usize = 6;

/// Names with fixed looks on every page, in the order of their looks.
const KNOWN: [&str; 17] = [
    "dram",
    "sccm",
    "sfcm",
    "afcm",
    "tidegate",
    "log",
    "btt",
    "raw",
    "transit",
    "pmbd",
    "pmbd70",
    "lru",
    "coactive",
    "transit-no-eager",
    "transit-no-bypass",
    "copy",
    "peer:libpmemblk",
];

/// A colour, a dash and a mark, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look(usize);

impl Look {
    /// Returns the class of the colour.
    pub(crate) fn color_class(self) -> String {
        format!("c{}", self.0 % COLORS.len())
    }

    pub(crate) fn dash(self) -> &'static str {
        DASHES[self.0 % DASHES.len()]
    }

    pub(crate) fn mark(self) -> &'static str {
        MARKS[self.0 % MARKS.len()]
    }

    /// Returns whether the mark's inside shows the page.
    pub(crate) fn is_hollow(self) -> bool {
        self.0 % MARKS.len() == RING
    }
}

/// The looks of all names on a page.
#[derive(Debug, Clone, Default)]
pub struct Looks {
    /// Names other than the known ones, in order of appearance.
    others: Vec<String>,
}

impl Looks {
    /// Makes the looks of `names`; known names have the same look on every page.
    pub fn new<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        let mut looks = Self::default();
        for name in names {
            if !KNOWN.contains(&name) && !looks.others.iter().any(|other| other == name) {
                looks.others.push(name.to_owned());
            }
        }
        looks
    }

    /// Returns the look of `name`.
    pub fn of(&self, name: &str) -> Look {
        if let Some(known) = KNOWN.iter().position(|known| *known == name) {
            return Look(known);
        }
        let other = self.others.iter().position(|other| other == name);
        Look(KNOWN.len() + other.unwrap_or(self.others.len()))
    }
}

/// Strokes in a square of 6 by 6: they leave stripes of the page in an area.
const HATCHES: [&str; 5] = ["M-1 7l8-8", "M-1-1l8 8", "M0 3h6", "M3 0v6", "M3 3h.1"];

/// Returns the pattern drawn over part `index` of a bar; `None` for the first part.
pub(crate) fn hatch(index: usize) -> Option<String> {
    let hatch = index % (HATCHES.len() + 1);
    (hatch > 0).then(|| format!("url(#hatch{hatch})"))
}

/// Returns the patterns of areas, which a page has once.
pub(crate) fn patterns() -> String {
    let mut text = String::new();
    for (index, hatch) in HATCHES.iter().enumerate() {
        let id = index + 1;
        let _ = write!(
            text,
            r#"<pattern id="hatch{id}" width="6" height="6" patternUnits="userSpaceOnUse"><path class="hatch" d="{hatch}"/></pattern>"#
        );
    }
    text
}

/// Returns the colours as a style sheet, for a dark or a light page.
pub(crate) fn colors(is_dark: bool) -> String {
    let mut text = String::new();
    for (index, (light, dark)) in COLORS.iter().enumerate() {
        let _ = write!(text, ".c{index}{{--c:{}}}", if is_dark { dark } else { light });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_of_many_names_look_the_same() {
        let names: Vec<String> = (0..60).map(|n| format!("scheme {n}")).collect();
        let looks = Looks::new(names.iter().map(String::as_str).chain(KNOWN));
        let all: Vec<_> = names.iter().map(String::as_str).chain(KNOWN).collect();
        let shown: std::collections::BTreeSet<_> = all
            .iter()
            .map(|name| {
                let look = looks.of(name);
                (look.color_class(), look.dash(), look.mark(), look.is_hollow())
            })
            .collect();
        assert_eq!(shown.len(), all.len());
        assert_eq!(looks.of("afcm"), Looks::default().of("afcm"), "known names never change");
    }
}
