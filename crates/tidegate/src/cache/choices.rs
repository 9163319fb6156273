//! The settings of a cache, in one table that the cache header keeps: the engine's own settings,
//! and the settings of every policy, even while another policy is in use.
//!
//! The header has a line `KEY=VALUE` for each setting that is not at its default.

use super::error::CacheError;
use super::pages::cleaner::Cleaner;
use super::pages::comparing::CHOICES as BY_CONTENT_CHOICES;
use super::policy::classes::Classes;
use super::policy::cleaning::{CLEANING_NAMES, CLEANINGS, CleaningEntry, Part};
use super::policy::cutoff;
use super::policy::promotion::{PROMOTION_NAMES, PROMOTIONS, PromotionEntry};
use super::policy::settings::{Settings, Spec, Unit};
use super::policy::{REPLACEMENT_NAMES, REPLACEMENTS, ReplacementEntry};
use super::router::admission::Admission;
use super::router::by_cost::CHOICES as COST_CHOICES;
use super::router::classes::mode_against_groups;
use super::router::mode::Mode;
use super::store::header::CacheHeader;
use super::store::layout::{PAGE_BYTES, SETTINGS_BYTES_MAX};
use super::{CacheDeviceOptions, Core};
use crate::sync::Ordering;
use crate::tier::{Setting, SettingError};

const EVICTION: usize = 0;
const CLEANING: usize = 1;
const CLEANING_RATE: usize = 2;
const PROMOTION: usize = 3;
const FALLBACK: usize = 4;
const GRANULARITY: usize = 5;
const BY_CONTENT: usize = 6;
const COST: usize = 7;

/// Names of the granularities: a write of a part of an uncached page stores the page, or a record.
const GRANULARITIES: [&str; 2] = ["page", "record"];
const RECORD: u64 = 1;

/// The engine's own settings.
const SPECS: &[Spec] = &[
    Spec::choice("eviction", &REPLACEMENT_NAMES, 0)
        .about("which pages a full cache gives up first"),
    Spec::choice("cleaning", &CLEANING_NAMES, 0)
        .about("which dirty pages are written to the backing ahead of need"),
    Spec::number("cleaning-rate", Unit::Bytes, 0..=1 << 40, 0)
        .about("most bytes that are cleaned in a second ahead of need, or 0 for no limit"),
    Spec::choice("promotion", &PROMOTION_NAMES, 0).about("which pages that miss are cached"),
    Spec::number("pt-error-threshold", Unit::Count, 0..=1_000_000, 0)
        .about("errors of the memory from which on all passes through, or 0 for no number"),
    Spec::choice("granularity", &GRANULARITIES, RECORD)
        .about("what a write of a part of a page that is not cached stores"),
    Spec::choice("by-content", &BY_CONTENT_CHOICES, 0)
        .about("whether a write stores only what it changes; auto measures what that saves"),
    Spec::choice("cost", &COST_CHOICES, 0)
        .about("whether the backing serves what it is quicker at; auto measures both devices"),
];

/// The setting that holds the table of IO classes: the lines of the table, joined by semicolons.
const CLASSES: &str = "io-classes";
/// Value of the setting `io-classes` for class 0 alone.
const NO_CLASSES: &str = "none";

/// The settings with their present values.
#[derive(Debug, Clone)]
pub(super) struct Choices {
    own: Settings,
    /// In the order of [`CLEANINGS`].
    cleanings: [Settings; CLEANINGS.len()],
    /// In the order of [`PROMOTIONS`].
    promotions: [Settings; PROMOTIONS.len()],
    cutoff: Settings,
    pub(super) classes: Classes,
}

impl Choices {
    fn new() -> Self {
        let cleanings = std::array::from_fn(|at| Settings::new(CLEANINGS[at].specs));
        let promotions = std::array::from_fn(|at| Settings::new(PROMOTIONS[at].specs));
        let cutoff = Settings::new(cutoff::SPECS);
        let (own, classes) = (Settings::new(SPECS), Classes::default());
        Self { own, cleanings, promotions, cutoff, classes }
    }

    /// Reads the settings in `header`.
    ///
    /// # Errors
    /// [`CacheError::Setting`]: this program does not know one of the settings.
    pub(super) fn of(header: &CacheHeader) -> Result<Self, CacheError> {
        let (choices, unknown) = Self::parse(&header.settings);
        match unknown.into_iter().next() {
            Some(setting) => Err(CacheError::Setting { setting }),
            None => Ok(choices),
        }
    }

    /// Reads lines `KEY=VALUE`. Also returns the lines that cannot be used.
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

    /// Returns the lines that [`parse`](Self::parse) reads.
    pub(super) fn text(&self) -> String {
        let classes = (!self.classes.is_default()).then(|| (CLASSES, self.classes_in_line()));
        let changed = self.tables().flat_map(Settings::changed).chain(classes);
        changed.map(|(key, value)| format!("{key}={value}\n")).collect::<Vec<_>>().concat()
    }

    /// Applies the settings in `options`, which the header keeps only once another one changes.
    pub(super) fn override_by(&mut self, options: &CacheDeviceOptions) {
        if let Some(pct) = options.clean_from_pct {
            let _ = self.set("clean-from-pct", &pct.min(100).to_string());
        }
    }

    fn tables(&self) -> impl Iterator<Item = &Settings> {
        let Self { own, cleanings, promotions, cutoff, .. } = self;
        [own, cutoff].into_iter().chain(cleanings).chain(promotions)
    }

    fn tables_mut(&mut self) -> impl Iterator<Item = &mut Settings> {
        let Self { own, cleanings, promotions, cutoff, .. } = self;
        [own, cutoff].into_iter().chain(cleanings).chain(promotions)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), SettingError> {
        if key == CLASSES {
            return self.set_classes(value);
        }
        if let Some(table) = self.tables_mut().find(|table| table.has(key)) {
            return table.set(key, value);
        }
        Err(SettingError::of(key, &self.list()))
    }

    /// Returns all settings, as a tier lists them.
    pub(super) fn list(&self) -> Vec<Setting> {
        let help = "IO classes, as lines of a table with `;` between them, or none".into();
        let (key, value) = (CLASSES.into(), self.classes_in_line());
        let classes = Setting { key, value, help, fixed: None };
        self.tables().flat_map(Settings::list).chain([classes]).collect()
    }

    fn set_classes(&mut self, value: &str) -> Result<(), SettingError> {
        if value == NO_CLASSES {
            self.classes = Classes::default();
            return Ok(());
        }
        let text = value.replace(';', "\n");
        let modes: Vec<_> = Mode::ALL.iter().map(|mode| mode.name()).collect();
        self.classes = Classes::parse(&text, &modes).map_err(|error| {
            let line = text.lines().nth(error.line.saturating_sub(1)).unwrap_or_default();
            SettingError::value(CLASSES, line, format!("a table: {error}"))
        })?;
        Ok(())
    }

    fn classes_in_line(&self) -> String {
        if self.classes.is_default() {
            return NO_CLASSES.to_owned();
        }
        self.classes.to_string().trim_end().replace('\n', ";")
    }

    /// Returns the position of the policy that `setting` chooses, in the list of its policies.
    fn chosen(&self, setting: usize) -> usize {
        usize::try_from(self.own.get(setting)).unwrap_or_default()
    }

    /// Returns the eviction policy.
    pub(super) fn replacement(&self) -> &'static ReplacementEntry {
        &REPLACEMENTS[self.chosen(EVICTION)]
    }

    /// Returns the promotion policy and its settings.
    fn promotion(&self) -> (&'static PromotionEntry, &Settings) {
        let at = self.chosen(PROMOTION);
        (&PROMOTIONS[at], &self.promotions[at])
    }

    /// Returns whether writes of parts of pages become records.
    fn makes_records(&self) -> bool {
        self.own.get(GRANULARITY) == RECORD
    }

    /// Returns the name of the granularity.
    pub(super) fn granularity(&self) -> &'static str {
        GRANULARITIES[usize::from(self.makes_records())]
    }

    /// Returns the admission policies for a cache of `slots` slots.
    pub(super) fn admission(&self, slots: u32) -> Admission {
        let (promotion, settings) = self.promotion();
        Admission::new(promotion, settings, &self.cutoff, slots)
    }

    /// Returns the cleaning policy and its settings.
    fn cleaning(&self) -> (&'static CleaningEntry, &Settings) {
        let at = self.chosen(CLEANING);
        (&CLEANINGS[at], &self.cleanings[at])
    }
}

impl Core {
    /// Changes setting `key` to `value`, in the header too.
    ///
    /// # Errors
    /// [`SettingError`]: nothing has changed.
    pub(super) fn choose(&self, key: &str, value: &str) -> Result<(), SettingError> {
        let mut choices = self.choices.lock();
        let changed = self.with(&choices, &[(key, value)])?;
        self.keep(&changed).map_err(|expected| SettingError::value(key, value, expected))?;
        let before = std::mem::replace(&mut *choices, changed);
        self.apply(&before, &choices);
        if key == SPECS[FALLBACK].key {
            // Even if the value did not change: so users reset the count of errors.
            self.router.fallback.set_threshold(choices.own.get(FALLBACK), &self.pages.failures);
        }
        Ok(())
    }

    /// Returns the present choices with `settings` applied.
    ///
    /// # Errors
    /// [`SettingError`] of the first setting that cannot be set.
    pub(super) fn changed_by(&self, settings: &[(&str, &str)]) -> Result<Choices, SettingError> {
        self.with(&self.choices.lock(), settings)
    }

    fn with(&self, choices: &Choices, settings: &[(&str, &str)]) -> Result<Choices, SettingError> {
        let mut changed = choices.clone();
        for (key, value) in settings {
            changed.set(key, value)?;
            let against =
                self.pages.groups.as_ref().and_then(|_| mode_against_groups(&changed.classes));
            if let Some(mode) = against {
                let expected = "classes of the modes wb and wo with --atomic-flush";
                return Err(SettingError::value(key, &mode.to_string(), expected));
            }
            let (most, len) = (SETTINGS_BYTES_MAX, changed.text().len());
            if len > most {
                let expected = format!("at most {most} bytes of settings, these are {len}");
                return Err(SettingError::value(key, value, expected));
            }
        }
        Ok(changed)
    }

    /// Writes `choices` to the header. An error says which expectation was not met.
    fn keep(&self, choices: &Choices) -> Result<(), String> {
        let text = choices.text();
        let mut header = self.store.header.lock();
        let before = std::mem::replace(&mut header.settings, text);
        header.write(&self.store.region).map_err(|error| {
            header.settings = before;
            format!("memory that works: {error}")
        })
    }

    /// Applies the choices to a cache that was opened.
    pub(super) fn begin(&self) {
        let choices = self.choices.lock();
        self.writer.makes_records.store(choices.makes_records(), Ordering::Relaxed);
        self.writer.comparing.set(choices.own.get(BY_CONTENT));
        self.router.by_cost.set(choices.own.get(COST));
        self.router.fallback.set_threshold(choices.own.get(FALLBACK), &self.pages.failures);
        self.begin_cleaning(&choices);
        if !choices.classes.is_default() {
            self.router.set_classes(&choices.classes);
        }
    }

    fn apply(&self, before: &Choices, now: &Choices) {
        if before.own.get(EVICTION) != now.own.get(EVICTION) {
            self.pages.each_shard(|shard| shard.set_replacement(now.replacement()));
        }
        if before.own.get(CLEANING) != now.own.get(CLEANING) {
            self.begin_cleaning(now);
        } else if before.cleaning().1 != now.cleaning().1 {
            self.pages.each_shard(|shard| shard.cleaner.set_settings(now.cleaning().1));
        }
        self.writer.makes_records.store(now.makes_records(), Ordering::Relaxed);
        if before.own.get(BY_CONTENT) != now.own.get(BY_CONTENT) {
            self.writer.comparing.set(now.own.get(BY_CONTENT));
        }
        if before.own.get(COST) != now.own.get(COST) {
            self.router.by_cost.set(now.own.get(COST));
        }
        if before.classes != now.classes {
            self.router.set_classes(&now.classes);
        }
        self.backing.pace.set_rate(now.own.get(CLEANING_RATE));
        self.apply_admission(before, now);
        self.pages.waker.wake_another();
    }

    fn apply_admission(&self, before: &Choices, now: &Choices) {
        let (_, settings) = now.promotion();
        if before.own.get(PROMOTION) != now.own.get(PROMOTION) {
            self.restart_promotion(now);
        } else if before.promotion().1 != settings {
            self.router.admission.change(|it| it.promotion.set_settings(settings));
        }
        if before.cutoff != now.cutoff {
            self.router.admission.change(|it| it.cutoff.settings.clone_from(&now.cutoff));
        }
    }

    /// Starts the cleaning policy of `choices`.
    fn begin_cleaning(&self, choices: &Choices) {
        let (entry, settings) = choices.cleaning();
        self.backing.pace.hears.store(entry.hears, Ordering::Relaxed);
        self.backing.pace.set_rate(choices.own.get(CLEANING_RATE));
        let pages = self.backing.geometry.size_bytes() / PAGE_BYTES;
        let parts = u32::try_from(self.pages.shards.count()).unwrap_or(1);
        self.pages.each_shard(|shard| {
            let part = Part { slots: shard.capacity(), pages, parts };
            shard.set_cleaner(Cleaner::new(entry, part, settings));
        });
    }

    /// Restarts promotion, for the present number of slots.
    pub(super) fn restart_promotion(&self, choices: &Choices) {
        let (entry, settings) = choices.promotion();
        self.router.admission.set_promotion(entry, settings, self.store.slots());
    }
}
