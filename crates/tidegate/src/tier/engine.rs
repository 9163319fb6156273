//! The entry of an engine in the registry: all that commands need to know of an engine.
//!
//! An engine implements [`Engine`] once, in its own folder, and the registry
//! ([`stack`](crate::stack)) lists it. The options, the shape of pools and the findings of checks
//! are data, so that no command has a special case for an engine.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::{Line, Tier};
use crate::device::BlockDevice;
use crate::pmem::Region;

/// An engine of the tier on persistent memory.
pub trait Engine: Sync {
    /// Returns the engine's name and the abilities of its pools.
    fn traits(&self) -> &'static Traits;

    /// Returns the name on the command line.
    fn name(&self) -> &'static str {
        self.traits().name
    }

    /// Parses the options of a new pool.
    ///
    /// # Errors
    /// [`EngineError::Usage`] if a value is not allowed, or options contradict each other.
    fn plan(&self, options: &Options) -> Result<Box<dyn Plan>, EngineError>;

    /// Returns whether `region` begins like a pool in this engine's own format, even a damaged one.
    ///
    /// # Errors
    /// Fails if the memory fails.
    fn recognizes(&self, region: &Region) -> Result<bool, EngineError> {
        let _ = region;
        Ok(false)
    }

    /// Returns whether a region without a recognizable pool has enough left of one for
    /// [`check`](Self::check).
    fn is_traceable(&self, region: &Region) -> bool {
        let _ = region;
        false
    }

    /// Describes the pool in `region` without changing anything.
    ///
    /// # Errors
    /// Fails if the pool's header is damaged.
    fn describe(&self, region: &Arc<Region>) -> Result<Description, EngineError>;

    /// Returns the URL of the backing that the pool in `region` remembers, or for which it has
    /// writes; `None` if there is no such backing.
    ///
    /// # Errors
    /// Fails if the pool's header is damaged.
    fn backing_of(&self, region: &Arc<Region>) -> Result<Option<String>, EngineError> {
        let _ = region;
        Ok(None)
    }

    /// Opens the pool as a tier, which recovers it. A read-only region is not changed.
    ///
    /// # Errors
    /// Fails if the pool is damaged, or cannot be opened like this.
    fn open(&self, opening: Opening) -> Result<Opened, EngineError>;

    /// Converts the pool in `region`, which another program made, to the engine's own form. The
    /// data stays where it is. A crash during the call leaves a pool of one form or the other; the
    /// next call then completes the conversion.
    ///
    /// # Errors
    /// Fails if there is nothing to convert, or the pool is damaged.
    fn convert(&self, region: &Arc<Region>) -> Result<(), EngineError> {
        let _ = region;
        Err(EngineError::Refused(format!(
            "a {} pool is Tidegate's own: there is nothing to convert",
            self.name()
        )))
    }

    /// Verifies the pool in `region`. `repair` restores all that the format's redundancy allows.
    ///
    /// # Errors
    /// Fails if there is no pool to check, or the memory fails.
    fn check(
        &self,
        region: Region,
        repair: bool,
        progress: OnProgress<'_>,
    ) -> Result<Checked, EngineError>;

    /// Returns the command that uses a new pool.
    fn next_command(&self, pool: &Path) -> String {
        format!("tidegate serve {} --nbd unix:/tmp/tidegate.sock", pool.display())
    }
}

/// The name of an engine, and the abilities of its pools.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is one thing that an engine can do")]
pub struct Traits {
    /// The name on the command line.
    pub name: &'static str,
    /// A few words about the engine's data.
    pub about: &'static str,
    /// The options of `create` that the engine takes.
    pub options: &'static [OptionSpec],
    /// The number of this engine in superblocks; `None` if its pools have their own format.
    pub code: Option<EngineCode>,
    /// Whether the engine serves blocks only over a backing.
    pub needs_backing: bool,
    /// Whether the engine can make the writes of one flush durable as a whole or not at all.
    pub has_atomic_flush: bool,
    /// Whether a server can exit and leave data for the backing in the engine's pools.
    pub keeps_dirty: bool,
    /// Whether the engine's tiers have the setting `mode`.
    pub has_modes: bool,
    /// Whether the engine's pools keep pages that the backing has too, and that a purge can remove.
    pub has_clean_pages: bool,
    /// Whether the engine's pools keep changes of files by programs under `tidegate run`. The
    /// supervisor then reports on such a pool.
    pub keeps_files: bool,
    /// Whether the engine's pools know their backing: `flush`, `recover` and `set` need not name
    /// it.
    pub remembers_backing: bool,
}

impl Traits {
    /// Returns the traits of a device without a backing, with its own format and without options.
    pub const fn of(name: &'static str, about: &'static str) -> Self {
        Self {
            name,
            about,
            options: &[],
            code: None,
            needs_backing: false,
            has_atomic_flush: false,
            keeps_dirty: false,
            has_modes: false,
            has_clean_pages: false,
            keeps_files: false,
            remembers_backing: false,
        }
    }
}

impl fmt::Debug for dyn Engine + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for dyn Engine + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The number of an engine in superblocks, declared in its folder. (The BTT has its own format.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(transparent)]
pub struct EngineCode(pub u32);

impl std::fmt::Display for EngineCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "number {}", self.0)
    }
}

/// An option of `create`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionSpec {
    /// The name, without leading dashes.
    pub name: &'static str,
    /// The placeholder for the value in help texts.
    pub value_name: &'static str,
    /// One sentence.
    pub help: &'static str,
}

/// The option for the size of a block, which several engines take.
pub const BLOCK_SIZE: OptionSpec =
    OptionSpec { name: "block-size", value_name: "BYTES", help: "Size of a block in bytes" };

/// Options of `create` as the user gave them: names and texts.
pub type Options = BTreeMap<&'static str, String>;

/// Parses the block size among `options`. Returns `None` if none is given.
///
/// # Errors
/// [`EngineError::Usage`] if the size is not one of `allowed`.
pub fn block_bytes_of(options: &Options, allowed: &[u32]) -> Result<Option<u32>, EngineError> {
    options.get(BLOCK_SIZE.name).map(|text| one_of(BLOCK_SIZE.name, text, allowed)).transpose()
}

/// Parses a size in bytes that must be one of `allowed`.
///
/// # Errors
/// [`EngineError::Usage`] if the size is not one of `allowed`.
pub fn one_of(name: &str, text: &str, allowed: &[u32]) -> Result<u32, EngineError> {
    let bytes = crate::size::parse_bytes(text).ok().and_then(|bytes| u32::try_from(bytes).ok());
    bytes.filter(|bytes| allowed.contains(bytes)).ok_or_else(|| {
        let allowed = allowed.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        EngineError::Usage(format!("--{name} is {text}; expected one of {allowed}"))
    })
}

/// A pool to be created.
pub trait Plan {
    /// Returns the size of the smallest possible pool in bytes.
    fn smallest_bytes(&self) -> u64;

    /// Returns the size of the largest pool of at most `bytes` without bytes that the engine could
    /// not use. By default, that is whole pages.
    fn largest_fit_bytes(&self, bytes: u64) -> u64 {
        bytes - bytes % 4096
    }

    /// Formats all of `region` as the pool. Previous content is lost.
    ///
    /// # Errors
    /// Fails if the memory fails.
    fn create(&self, region: &Region) -> Result<(), EngineError>;
}

/// The description of a pool, according to its header.
#[derive(Debug, Clone)]
pub struct Description {
    /// Usable bytes: the size of the device, or of the log in the pool.
    pub size_bytes: u64,
    /// Size of a block in bytes and number of blocks, if the pool is a device by itself.
    pub blocks: Option<(u32, u64)>,
    /// The header, for scripts.
    pub header: Value,
    /// Further facts, for people.
    pub lines: Vec<Line>,
}

/// A device behind an engine. No other program uses it.
pub struct Backing {
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// Distinguishes the device from all others, even after a rename or a restart; never 0.
    pub identity: u64,
    /// The absolute path or the URL.
    pub name: Vec<u8>,
    /// Existing content that writes would destroy, in words, such as `a raw pool`.
    pub holds: Option<String>,
    /// Why the backing may have changed since the engine's pool left it, if it may have. The pool's
    /// data may then be older than the backing's.
    pub doubt: Option<String>,
}

/// The arguments for opening a pool.
pub struct Opening {
    /// Continue without damaged data, if the engine can.
    pub salvage: bool,
    /// The memory of the pool.
    pub region: Arc<Region>,
    /// The device behind the pool, if one is named.
    pub backing: Option<Backing>,
    /// Use the backing even if that may be a mistake: data for another backing is pending, or the
    /// backing holds a pool. Write to a pool even if its damage makes that dangerous.
    pub force: bool,
    /// Make the writes of one flush durable as a whole or not at all, if the engine
    /// [can](Traits::has_atomic_flush).
    pub atomic_flush: bool,
}

/// An opened pool.
pub struct Opened {
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// The findings of recovery, in words.
    pub recovered: String,
}

/// The progress of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Steps done.
    pub done: u64,
    /// Steps in all.
    pub total: u64,
}

/// Called repeatedly with the progress of a check.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress);

/// The result of a check.
#[derive(Debug, Clone)]
pub struct Checked {
    /// Number of remaining faults.
    pub faults: u64,
    /// For scripts: an object with the findings.
    pub report: Value,
    /// For people: a line each.
    pub lines: Vec<String>,
}

/// An error of an engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The command was used wrongly.
    #[error("{0}")]
    Usage(String),
    /// The pool cannot be used like this. The text says how it can be.
    #[error("{0}")]
    Refused(String),
    /// The pool or its memory failed.
    #[error(transparent)]
    Pool(Box<dyn Error + Send + Sync>),
}

impl EngineError {
    /// Returns the error of a pool with the cause `source`.
    pub fn pool(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Pool(source.into())
    }
}
