//! What users choose of the policies, in one table that the cache header keeps: the settings of the
//! engine, and of every policy, also while another one is in use.
//!
//! The header has a line `KEY=VALUE` for each setting that is not at its default.

use super::error::CacheError;
use super::header::CacheHeader;
use super::layout::SETTINGS_BYTES_MAX;
use super::policy::settings::{Kind, Settings, Spec, Unit};
use super::policy::{REPLACEMENT_NAMES, REPLACEMENTS, ReplacementEntry};
use super::{CacheDeviceOptions, Core};
use crate::sync::Ordering;
use crate::tier::{Setting, SettingError};

const EVICTION: usize = 0;
const CLEAN_FROM: usize = 1;

/// The engine's own settings.
const SPECS: &[Spec] = &[
    Spec {
        key: "eviction",
        kind: Kind::Choice(&REPLACEMENT_NAMES),
        default: 0,
        help: "which pages a full cache gives up first",
    },
    Spec {
        key: "clean-from-pct",
        kind: Kind::Number(Unit::Percent, 0, 100),
        default: 50,
        help: "which part of the cache may be dirty before it is cleaned",
    },
];

/// The settings with their present values.
#[derive(Debug, Clone)]
pub(super) struct Choices {
    own: Settings,
}

impl Choices {
    fn new() -> Self {
        Self { own: Settings::new(SPECS) }
    }

    /// Those of the pool with `header`.
    ///
    /// # Errors
    /// [`CacheError::Setting`]: the header has one that this program does not know.
    pub(super) fn of(header: &CacheHeader) -> Result<Self, CacheError> {
        let (choices, unknown) = Self::parse(&header.settings);
        match unknown.into_iter().next() {
            Some(setting) => Err(CacheError::Setting { setting }),
            None => Ok(choices),
        }
    }

    /// Reads lines `KEY=VALUE`; also returns those that cannot be used.
    pub(super) fn parse(text: &str) -> (Self, Vec<String>) {
        let (mut choices, mut unknown) = (Self::new(), Vec::new());
        for line in text.lines() {
            let setting = line.split_once('=');
            if setting.is_none_or(|(key, value)| choices.set(key, value).is_err()) {
                unknown.push(line.to_owned());
            }
        }
        (choices, unknown)
    }

    /// The lines that [`parse`](Self::parse) reads.
    pub(super) fn text(&self) -> String {
        let changed = self.tables().into_iter().flat_map(Settings::changed);
        changed.map(|(key, value)| format!("{key}={value}\n")).collect::<Vec<_>>().concat()
    }

    /// What `options` say, which is kept only with another change.
    pub(super) fn override_by(&mut self, options: &CacheDeviceOptions) {
        if let Some(pct) = options.clean_from_pct {
            let _ = self.set("clean-from-pct", &pct.min(100).to_string());
        }
    }

    fn tables(&self) -> [&Settings; 1] {
        [&self.own]
    }

    fn tables_mut(&mut self) -> [&mut Settings; 1] {
        [&mut self.own]
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), SettingError> {
        if let Some(table) = self.tables_mut().into_iter().find(|table| table.has(key)) {
            return table.set(key, value);
        }
        Err(SettingError::of(key, &self.list()))
    }

    /// All settings, as a tier shows them.
    pub(super) fn list(&self) -> Vec<Setting> {
        self.tables().into_iter().flat_map(Settings::list).collect()
    }

    /// The policy of eviction.
    pub(super) fn replacement(&self) -> &'static ReplacementEntry {
        let at = usize::try_from(self.own.get(EVICTION)).unwrap_or_default();
        REPLACEMENTS.get(at).unwrap_or(&REPLACEMENTS[0])
    }

    /// The part of the cache that may be dirty, in percent.
    pub(super) fn clean_from_pct(&self) -> u32 {
        u32::try_from(self.own.get(CLEAN_FROM)).unwrap_or_default()
    }
}

impl Core {
    /// Changes setting `key` to `value`, in the header too.
    ///
    /// # Errors
    /// [`SettingError`]; nothing has changed then.
    pub(super) fn choose(&self, key: &str, value: &str) -> Result<(), SettingError> {
        let mut choices = self.choices.lock();
        let mut changed = choices.clone();
        changed.set(key, value)?;
        self.keep(&changed).map_err(|expected| {
            let (key, value) = (key.to_owned(), value.to_owned());
            SettingError::Value { key, value, expected }
        })?;
        let before = std::mem::replace(&mut *choices, changed);
        self.apply(&before, &choices);
        Ok(())
    }

    /// Writes `choices` to the header; the error says what is wanted.
    fn keep(&self, choices: &Choices) -> Result<(), String> {
        let text = choices.text();
        if text.len() > SETTINGS_BYTES_MAX {
            let most = SETTINGS_BYTES_MAX;
            return Err(format!("at most {most} bytes of settings, these are {}", text.len()));
        }
        let mut header = self.header.lock();
        let before = std::mem::replace(&mut header.settings, text);
        header.write(&self.region).map_err(|error| {
            header.settings = before;
            format!("memory that works: {error}")
        })
    }

    fn apply(&self, before: &Choices, now: &Choices) {
        if before.own.get(EVICTION) != now.own.get(EVICTION) {
            // One shard at a time: requests wait for one list of pages at most.
            for number in 0..self.shards.count() {
                self.shards.lock(number).set_replacement(now.replacement());
            }
        }
        self.clean_from_pct.store(now.clean_from_pct(), Ordering::Relaxed);
        self.waker.wake_another();
    }
}
