//! What every tier can say and do beside being a block device, how an engine offers itself, and the
//! parts that are the same whatever a tier caches and wherever it keeps it.
//!
//! - [`Tier`]: state, drain, settings and metrics of an open tier;
//! - [`background`]: work in steps, run by threads or by a simulator's scheduler;
//! - `clock`: the clock of costs and rests;
//! - `ledger`: write-backs that failed, until a flush reports them;
//! - [`list`]: lists of slots over one array of links;
//! - [`memory`]: metrics of the persistent memory under a tier;
//! - `set_locks`: sets behind locks, and waiting for a set to change;
//! - `version_locks`: versions for readers without a lock, and the locks of their writers;
//! - [`engine`]: the entry of an engine in the registry: it parses options, creates, opens,
//!   describes and checks a pool.

pub mod background;
pub(crate) mod clock;
pub mod engine;
pub(crate) mod ledger;
pub mod list;
pub mod memory;
pub(crate) mod set_locks;
pub(crate) mod version_locks;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

pub use engine::{
    Backing, Checked, Description, Engine, EngineCode, EngineError, OnProgress, Opened, Opening,
    OptionSpec, Options, Plan, Progress, Traits,
};

use crate::device::{BlockDevice, DeviceError, DeviceErrorKind, Result};
use crate::stats::Collector;

/// One tier of a stack: a block device that can tell what it is and be asked to change.
pub trait Tier: BlockDevice {
    /// What the tier is and what it holds now.
    fn state(&self) -> State;

    /// Writes all that the tier holds to the tier below, flushes that, and stops the tier's
    /// threads. The tier stays usable and keeps every promise, but works only on demand.
    ///
    /// Dropping a tier stops its threads too, but cannot say what failed.
    ///
    /// # Errors
    /// As for [`BlockDevice::flush`]; what could not be written stays in the tier, and another call
    /// tries again.
    fn drain(&self) -> Result<()>;

    /// Destages nothing more, but where a write needs the space: ends the tier's threads and does
    /// not wait for them. What the tier holds stays in it, and a flush ends in the tier as far as
    /// the tier keeps what it acknowledged. No request is under way, and those that come are of
    /// the tier above, which is drained.
    ///
    /// Only where the engine [keeps what is dirty](Traits::keeps_dirty); other tiers go on.
    fn stop_destaging(&self) {}

    /// Writes all that the tier holds to the tier below, and then gives up all that the tier below
    /// has too. Requests go on meanwhile: what they write or read anew may stay.
    ///
    /// # Errors
    /// The tier [has no clean pages](Traits::has_clean_pages); or as for
    /// [`BlockDevice::flush`]. What could not be written stays in the tier.
    fn purge(&self) -> Result<Purged> {
        let message = "the tier keeps nothing that the tier below has too";
        Err(DeviceError::new(DeviceErrorKind::Unsupported, message))
    }

    /// Writes all that the tier held when this began to the tier below, and flushes that. Requests
    /// and the tier's threads go on meanwhile. Returns the bytes that stay with atomic flush, since
    /// no flush has committed them: the tier below never has a part of them.
    ///
    /// # Errors
    /// As for [`BlockDevice::flush`]; what could not be written stays in the tier.
    fn destage(&self) -> Result<u64> {
        self.flush().map(|()| 0)
    }

    /// Fails where the tier holds writes that no flush has committed: what readers see now is no
    /// state that a crash could leave. No change is under way.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unsupported`].
    fn check_committed(&self) -> Result<()> {
        Ok(())
    }

    /// What a file has to hold to be a pool with the present content; None where the tier below has
    /// a part of that, or the engine cannot tell. No change is under way.
    ///
    /// # Errors
    /// The memory failed.
    fn image(&self) -> Result<Option<Image>> {
        Ok(None)
    }

    /// The settings that the tier has, with their present values.
    fn settings(&self) -> Vec<Setting> {
        Vec::new()
    }

    /// Returns whether `settings`, keys with values, could all be set now. Changes nothing.
    ///
    /// # Errors
    /// [`SettingError`] of the first that could not.
    fn check(&self, settings: &[(&str, &str)]) -> std::result::Result<(), SettingError> {
        let own = self.settings();
        let changes = |key: &str| own.iter().any(|it| it.key == key && it.fixed.is_none());
        match settings.iter().find(|(key, _)| !changes(key)) {
            Some((key, _)) => Err(SettingError::of(key, &own)),
            None => Ok(()),
        }
    }

    /// Changes setting `key` to `value`.
    ///
    /// # Errors
    /// [`SettingError`]; nothing has changed then.
    fn set(&self, key: &str, value: &str) -> std::result::Result<(), SettingError> {
        let _ = value;
        Err(SettingError::of(key, &self.settings()))
    }

    /// Adds the tier's metrics to `collector`, without any label for the tier.
    fn metrics(&self, collector: &mut Collector);
}

/// The content of a pool at one instant, as its file would hold it. Bytes that are neither in the
/// parts nor in a block's place mean nothing.
pub struct Image {
    /// What describes the pool, with its offsets.
    pub parts: Vec<(u64, Vec<u8>)>,
    /// Bytes that a block takes in the pool.
    pub stored_bytes: u64,
    /// Where the pool has the block with this number; None: nowhere, it reads as zeroes or is lost.
    pub place: Box<dyn Fn(u64) -> Option<u64> + Send + Sync>,
}

/// What became of a purge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Bytes of the pages that were given up.
    pub freed_bytes: u64,
    /// Bytes of the pages that are left: written or read meanwhile, or waiting for a commit.
    pub left_bytes: u64,
}

/// Which place of the stack a tier has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Level {
    /// A volatile cache.
    Dram,
    /// Persistent memory.
    Pmem,
}

impl Level {
    /// The name in labels of metrics.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What a tier is and what it holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Its place in the stack.
    pub level: Level,
    /// The engine or the policy.
    pub name: String,
    /// Bytes that only this tier holds and that [`Tier::drain`] would write to the tier below.
    pub pending_bytes: u64,
    /// For people: what is worth knowing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<Line>,
    /// For scripts: an object whose keys are the tier's own, with units in their names.
    pub details: serde_json::Value,
}

/// A label and a text, for people.
pub type Line = (Cow<'static, str>, String);

/// A line of `text` with the label `label`.
pub fn line(label: &'static str, text: impl std::fmt::Display) -> Line {
    (Cow::Borrowed(label), text.to_string())
}

/// A setting of a tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its name on the command line.
    pub key: String,
    /// Its present value.
    pub value: String,
    /// One sentence: what it does, and its range.
    pub help: String,
    /// Why it cannot be changed while the tier is open; absent where it can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed: Option<String>,
}

/// Why a setting was not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// There is no such setting.
    #[error("there is no setting `{key}`; there are {}", known_or_none(known))]
    Unknown {
        /// The name asked for.
        key: String,
        /// The settings that exist.
        known: Vec<String>,
    },
    /// It cannot be changed while the tier is open.
    #[error("`{key}` cannot be changed now: {reason}")]
    Fixed {
        /// Its name.
        key: String,
        /// Why, and what to do instead.
        reason: String,
    },
    /// The value does not do.
    #[error("`{value}` is no value for `{key}`; expected {expected}")]
    Value {
        /// Its name.
        key: String,
        /// The value asked for.
        value: String,
        /// What would do.
        expected: String,
    },
    /// A later one of several settings failed, and earlier ones could not be taken back.
    #[error("{source}; taking the others back failed, so that {} stays changed", kept.join(", "))]
    Kept {
        /// The failure.
        source: Box<Self>,
        /// The names of the settings that stay changed.
        kept: Vec<String>,
    },
}

fn known_or_none(known: &[String]) -> String {
    if known.is_empty() { "none".into() } else { known.join(", ") }
}

impl SettingError {
    /// The error for a `value` of `key` that does not do.
    pub fn value(key: &str, value: &str, expected: impl Into<String>) -> Self {
        Self::Value { key: key.to_owned(), value: value.to_owned(), expected: expected.into() }
    }

    /// The error for `key` where `settings` has it as fixed, or not at all.
    pub fn of(key: &str, settings: &[Setting]) -> Self {
        let key = key.to_owned();
        let fixed = settings.iter().find(|it| it.key == key).and_then(|it| it.fixed.clone());
        match fixed {
            Some(reason) => Self::Fixed { key, reason },
            None => {
                Self::Unknown { key, known: settings.iter().map(|it| it.key.clone()).collect() }
            }
        }
    }
}

/// `number` of the things that `thing` names one of, in words.
pub fn counted(number: u64, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}
