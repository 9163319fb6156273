//! The table of a policy's settings: name, unit, range and default, and the present values.

use std::fmt;
use std::ops::RangeInclusive;

use crate::size::{Size, parse_bytes};
use crate::tier::{Setting, SettingError};

/// A setting as a policy declares it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Name on the command line. The name of a number that is not of bytes ends in its unit.
    pub key: &'static str,
    /// Type and range.
    pub kind: Kind,
    /// The default: a number in the kind's unit, or the position of a choice.
    pub default: u64,
    /// Help in a few words.
    pub help: &'static str,
}

impl Spec {
    /// Declares a number of `unit` in `range`.
    pub const fn number(
        key: &'static str,
        unit: Unit,
        range: RangeInclusive<u64>,
        default: u64,
    ) -> Self {
        Self { key, kind: Kind::Number(unit, *range.start(), *range.end()), default, help: "" }
    }

    /// Declares a choice of one of `words`; `default` is a position.
    pub const fn choice(key: &'static str, words: &'static [&'static str], default: u64) -> Self {
        Self { key, kind: Kind::Choice(words), default, help: "" }
    }

    /// Returns the setting with `help`.
    #[must_use]
    pub const fn about(self, help: &'static str) -> Self {
        Self { help, ..self }
    }
}

/// Type and range of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number from the first to the second, both included.
    Number(Unit, u64, u64),
    /// One of these words; its value is the word's position.
    Choice(&'static [&'static str]),
}

/// Unit of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Pages, streams, requests: see the help.
    Count,
    /// Bytes, written as [`Size`].
    Bytes,
    /// Hundredths.
    Percent,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
}

impl Kind {
    /// Parses `text`. Returns `None` if it is no value in range.
    fn parse(self, text: &str) -> Option<u64> {
        match self {
            Self::Choice(words) => words.iter().position(|word| *word == text).map(|at| at as u64),
            Self::Number(unit, min, max) => {
                let number = match unit {
                    Unit::Bytes if text != "0" => parse_bytes(text).ok(),
                    _ => text.parse().ok(),
                };
                number.filter(|number| (min..=max).contains(number))
            }
        }
    }

    /// Returns `number` in the form that [`parse`](Self::parse) reads.
    fn show(self, number: u64) -> String {
        match self {
            Self::Choice(words) => {
                let word = usize::try_from(number).ok().and_then(|at| words.get(at));
                word.copied().unwrap_or_default().to_owned()
            }
            Self::Number(Unit::Bytes, ..) => Size { bytes: number }.exact(),
            Self::Number(..) => number.to_string(),
        }
    }
}

/// Writes the range, for users.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Choice(words) => write!(f, "one of {}", words.join(", ")),
            Self::Number(unit, min, max) => {
                let unit = match unit {
                    Unit::Count => "",
                    Unit::Bytes => " bytes",
                    Unit::Percent => " percent",
                    Unit::Seconds => " seconds",
                    Unit::Milliseconds => " milliseconds",
                };
                write!(f, "{} to {}{unit}", self.show(*min), self.show(*max))
            }
        }
    }
}

/// The settings of one policy with their present values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    specs: &'static [Spec],
    values: Box<[u64]>,
}

impl Settings {
    /// Returns the settings that `specs` declares, with their defaults.
    pub fn new(specs: &'static [Spec]) -> Self {
        Self { specs, values: specs.iter().map(|spec| spec.default).collect() }
    }

    /// Returns the present value of the setting at position `at` of the table.
    pub fn get(&self, at: usize) -> u64 {
        self.values[at]
    }

    /// Returns whether there is a setting `key`.
    pub fn has(&self, key: &str) -> bool {
        self.specs.iter().any(|spec| spec.key == key)
    }

    /// Returns the settings that are not at their defaults, with their values.
    pub fn changed(&self) -> impl Iterator<Item = (&'static str, String)> {
        let changed = self.specs.iter().zip(&self.values).filter(|(spec, it)| spec.default != **it);
        changed.map(|(spec, value)| (spec.key, spec.kind.show(*value)))
    }

    /// Returns the settings, as a tier lists them.
    pub fn list(&self) -> Vec<Setting> {
        let shown = |(spec, &value): (&Spec, &u64)| Setting {
            key: spec.key.to_owned(),
            value: spec.kind.show(value),
            help: format!("{}: {}; default {}", spec.help, spec.kind, spec.kind.show(spec.default)),
            fixed: None,
        };
        self.specs.iter().zip(&self.values).map(shown).collect()
    }

    /// Changes setting `key` to `text`.
    ///
    /// # Errors
    /// [`SettingError`]: nothing has changed.
    pub fn set(&mut self, key: &str, text: &str) -> Result<(), SettingError> {
        let Some(at) = self.specs.iter().position(|spec| spec.key == key) else {
            return Err(SettingError::of(key, &self.list()));
        };
        let kind = self.specs[at].kind;
        let refused = || SettingError::value(key, text, kind.to_string());
        self.values[at] = kind.parse(text).ok_or_else(refused)?;
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SPECS: &[Spec] = &[
        Spec {
            key: "size",
            kind: Kind::Number(Unit::Bytes, 0, 4 << 30),
            default: 1 << 20,
            help: "how large",
        },
        Spec { key: "mood", kind: Kind::Choice(&["calm", "keen"]), default: 1, help: "which" },
        Spec { key: "share-pct", kind: Kind::Number(Unit::Percent, 1, 90), default: 80, help: "s" },
    ];

    #[test]
    fn values_begin_as_defaults_and_change_within_their_range() {
        let mut settings = Settings::new(SPECS);
        assert_eq!([0, 1, 2].map(|at| settings.get(at)), [1 << 20, 1, 80]);
        for (key, text) in [("size", "2M"), ("mood", "calm"), ("share-pct", "1"), ("size", "0")] {
            settings.set(key, text).unwrap();
        }
        assert_eq!([0, 1, 2].map(|at| settings.get(at)), [0, 0, 1]);
        let wrong = [("size", "5G"), ("size", "-1"), ("mood", "1"), ("share-pct", "91"), ("", "")];
        for (key, text) in wrong {
            let before = settings.clone();
            assert!(settings.set(key, text).is_err(), "{key}={text}");
            assert_eq!(settings, before);
        }
    }

    #[test]
    fn what_is_listed_can_be_set_and_says_its_range() {
        let mut settings = Settings::new(SPECS);
        settings.set("size", "4097").unwrap();
        assert_eq!(settings.changed().collect::<Vec<_>>(), [("size", "4097".to_owned())]);
        let list = settings.list();
        for Setting { key, value, .. } in &list {
            settings.set(key, value).unwrap();
        }
        assert_eq!(list, settings.list());
        assert_eq!(list[0].value, "4097");
        assert_eq!(list[0].help, "how large: 0 to 4G bytes; default 1M");
        assert_eq!(list[1].help, "which: one of calm, keen; default keen");
        let error = settings.set("share-pct", "all").unwrap_err().to_string();
        assert_eq!(error, "`all` is no value for `share-pct`; expected 1 to 90 percent");
    }
}
