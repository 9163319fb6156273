//! The interfaces of tiers, beyond that of a block device, and of engines, and parts that tiers
//! share:
//!
//! - [`Tier`]: state, drain, settings and metrics of an open tier;
//! - [`background`]: work in steps, run by threads or by a simulator's scheduler;
//! - `clock`: the clock of costs and rests;
//! - `ledger`: failed write-backs, until a flush reports them;
//! - [`list`]: lists of slots over one array of links;
//! - [`memory`]: metrics of the persistent memory under a tier;
//! - `set_locks`: sets behind locks, and waiting for a set to change;
//! - `version_locks`: versions for readers without a lock, and the locks of their writers;
//! - [`engine`]: the entry of an engine in the registry: options, and how pools are created,
//!   opened, described and checked.

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

use crate::device::{BlockDevice, BlockDeviceExt, DeviceError, DeviceErrorKind, Operation, Result};
use crate::stats::{Collector, RequestKind, Requests, Running};

/// Counts `operation` from now on. A status query is in no statistics.
#[inline]
pub(crate) fn begin<'a>(requests: &'a Requests, operation: &Operation<'_>) -> Option<Running<'a>> {
    let kind = match operation {
        Operation::Read { .. } => RequestKind::Read,
        Operation::Write { .. } => RequestKind::Write,
        Operation::Flush => RequestKind::Flush,
        Operation::Discard { .. } | Operation::WriteZeroes { .. } => RequestKind::Zero,
        Operation::Status { .. } => return None,
    };
    Some(requests.begin(kind, operation.range().1))
}

/// One tier of a stack: a block device that reports its state and has settings.
pub trait Tier: BlockDevice {
    /// Returns the tier's identity and present content.
    fn state(&self) -> State;

    /// Writes all data that the tier holds to the tier below, flushes that, and stops the tier's
    /// threads. The tier stays usable and keeps every promise, but works only on demand.
    ///
    /// Dropping a tier stops its threads too, but cannot report a failure.
    ///
    /// # Errors
    /// Fails as [`Operation::Flush`] does. Data that could not be written stays in the tier, and
    /// another call tries again.
    fn drain(&self) -> Result<()>;

    /// Stops destaging, except when a write needs the space. Ends the tier's threads without
    /// waiting for their end. The tier's data stays in it, and a flush need not reach the tier
    /// below if this tier keeps acknowledged data. No request may be under way, and later requests
    /// may come only from the tier above, which is drained.
    ///
    /// Only engines that [keep dirty data](Traits::keeps_dirty) stop. Other tiers go on.
    fn stop_destaging(&self) {}

    /// Writes all data that the tier holds to the tier below, and then drops the data that the tier
    /// below has too. Requests go on meanwhile: data that they write or read may stay.
    ///
    /// # Errors
    /// Fails if the tier [has no clean pages](Traits::has_clean_pages), and as [`Operation::Flush`]
    /// does. Data that could not be written stays in the tier.
    fn purge(&self) -> Result<Purged> {
        let message = "the tier keeps nothing that the tier below has too";
        Err(DeviceError::new(DeviceErrorKind::Unsupported, message))
    }

    /// Writes all data that the tier held when the call began to the tier below, and flushes that.
    /// Requests and the tier's threads go on meanwhile. Returns how many bytes stay with atomic
    /// flush because no flush has committed them: the tier below never gets a part of a group.
    ///
    /// # Errors
    /// Fails as [`Operation::Flush`] does. Data that could not be written stays in the tier.
    fn destage(&self) -> Result<u64> {
        self.flush().map(|()| 0)
    }

    /// Lets reads of the block at `offset` fail until it is written; durable on return.
    ///
    /// # Errors
    /// Fails as [`DeviceErrorKind::Unsupported`] if the tier's format has no such mark, and as
    /// [`Operation::Write`] does.
    fn set_error(&self, offset: u64) -> Result<()> {
        let message =
            format!("the block at offset {offset} cannot be marked: only a BTT can do so");
        Err(DeviceError::new(DeviceErrorKind::Unsupported, message))
    }

    /// Checks that the tier holds no writes that no flush has committed: such a content could not
    /// be the result of a crash. No change may be under way.
    ///
    /// # Errors
    /// Fails as [`DeviceErrorKind::Unsupported`] if there are such writes.
    fn check_committed(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the content that a file needs to be a pool with the present data, or `None` if the
    /// tier below has a part of the data or the engine cannot tell. No change may be under way.
    ///
    /// # Errors
    /// Fails if the memory fails.
    fn image(&self) -> Result<Option<Image>> {
        Ok(None)
    }

    /// Returns the tier's settings with their present values.
    fn settings(&self) -> Vec<Setting> {
        Vec::new()
    }

    /// Checks whether `settings`, pairs of key and value, could all be set now. Changes nothing.
    ///
    /// # Errors
    /// Fails with the [`SettingError`] of the first setting that could not be set.
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
    /// Fails as [`SettingError`] if the setting cannot be changed. Nothing has changed then.
    fn set(&self, key: &str, value: &str) -> std::result::Result<(), SettingError> {
        let _ = value;
        Err(SettingError::of(key, &self.settings()))
    }

    /// Adds the tier's metrics to `collector`, without any label for the tier.
    fn metrics(&self, collector: &mut Collector);
}

/// The content of a pool at one instant, as its file would hold it. Bytes outside of `parts` and
/// blocks do not matter.
pub struct Image {
    /// The bytes that describe the pool, with their offsets.
    pub parts: Vec<(u64, Vec<u8>)>,
    /// Size of a block in the pool, in bytes.
    pub stored_bytes: u64,
    /// Returns the offset of a block, by its number. `None`: the block reads as zeroes or is lost.
    pub place: Box<dyn Fn(u64) -> Option<u64> + Send + Sync>,
}

/// The result of a purge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Bytes of the pages that were removed.
    pub freed_bytes: u64,
    /// Bytes of the pages that stayed: pages written or read meanwhile, or waiting for a commit.
    pub left_bytes: u64,
}

/// The level of a tier in the stack.
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
    /// Returns the name in labels of metrics.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The identity and the content of a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The level in the stack.
    pub level: Level,
    /// The engine or the policy.
    pub name: String,
    /// Bytes that only this tier holds, and that [`Tier::drain`] would write to the tier below.
    pub pending_bytes: u64,
    /// Further facts, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<Line>,
    /// For scripts: an object with keys that the tier defines, with units in their names.
    pub details: serde_json::Value,
}

/// A label and a text, for people.
pub type Line = (Cow<'static, str>, String);

/// Returns a line with `label` and `text`.
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
    /// One sentence: the effect and the range.
    pub help: String,
    /// Why the setting cannot be changed while the tier is open; absent if it can be.
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
    /// The setting cannot be changed while the tier is open.
    #[error("`{key}` cannot be changed now: {reason}")]
    Fixed {
        /// The name of the setting.
        key: String,
        /// Why, and what to do instead.
        reason: String,
    },
    /// The value is not allowed.
    #[error("`{value}` is no value for `{key}`; expected {expected}")]
    Value {
        /// The name of the setting.
        key: String,
        /// The value asked for.
        value: String,
        /// The values that are allowed.
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
    /// Returns the error for a `value` that `key` does not allow.
    pub fn value(key: &str, value: &str, expected: impl Into<String>) -> Self {
        Self::Value { key: key.to_owned(), value: value.to_owned(), expected: expected.into() }
    }

    /// Returns the error for a setting `key` that is fixed in `settings`, or not among them.
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

/// Formats `number` and the noun `thing`, in the plural unless `number` is 1.
pub fn counted(number: u64, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}
