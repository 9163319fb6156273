//! The entry of an engine: all that the registry, and through it every command, needs to know of
//! one.
//!
//! An engine implements [`Engine`] once, in its own folder, and the registry
//! ([`stack`](crate::stack)) lists it. The engine's options, its pools' shape and its findings
//! travel as data, so that no command has a case for an engine.

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
    /// What it is called, and what its pools can do.
    fn traits(&self) -> &'static Traits;

    /// The name on the command line.
    fn name(&self) -> &'static str {
        self.traits().name
    }

    /// Parses the options of a new pool.
    ///
    /// # Errors
    /// [`EngineError::Usage`]: a value does not do, or options contradict each other.
    fn plan(&self, options: &Options) -> Result<Box<dyn Plan>, EngineError>;

    /// Whether `region` begins as a pool in this engine's own format does; the rest may be damaged.
    ///
    /// # Errors
    /// The memory failed.
    fn recognizes(&self, region: &Region) -> Result<bool, EngineError> {
        let _ = region;
        Ok(false)
    }

    /// Whether a region in which no pool is recognized has enough left of one of this engine's for
    /// [`check`](Self::check).
    fn is_traceable(&self, region: &Region) -> bool {
        let _ = region;
        false
    }

    /// Describes the pool in `region` and changes nothing.
    ///
    /// # Errors
    /// Its header is damaged.
    fn describe(&self, region: &Arc<Region>) -> Result<Description, EngineError>;

    /// Returns the URL of the backing that the pool in `region` remembers, or for which it has
    /// writes; `None` where there is no such backing.
    ///
    /// # Errors
    /// Its header is damaged.
    fn backing_of(&self, region: &Arc<Region>) -> Result<Option<String>, EngineError> {
        let _ = region;
        Ok(None)
    }

    /// Opens the pool as a tier, and so recovers it. A read-only region is not changed.
    ///
    /// # Errors
    /// The pool is damaged, or cannot be opened like this.
    fn open(&self, opening: Opening) -> Result<Opened, EngineError>;

    /// Verifies the pool in `region`; `repair` restores what the format's redundancy allows.
    ///
    /// # Errors
    /// There is no pool to check, or the memory failed.
    fn check(
        &self,
        region: Region,
        repair: bool,
        progress: OnProgress<'_>,
    ) -> Result<Checked, EngineError>;

    /// The command that uses a new pool.
    fn next_command(&self, pool: &Path) -> String {
        format!("tidegate serve {} --nbd unix:/tmp/tidegate.sock", pool.display())
    }
}

/// What an engine is called, and what its pools can do.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is one thing that an engine can do")]
pub struct Traits {
    /// The name on the command line.
    pub name: &'static str,
    /// What it keeps, in a few words.
    pub about: &'static str,
    /// The options of `create` that it takes.
    pub options: &'static [OptionSpec],
    /// The number of this engine in superblocks; none where its pools have a format of their own.
    pub code: Option<EngineCode>,
    /// The engine serves blocks only over a backing.
    pub needs_backing: bool,
    /// The engine can make what one flush covers durable as a whole or not at all.
    pub has_atomic_flush: bool,
    /// A server of the engine's pools can end and leave what they hold for the backing in them.
    pub keeps_dirty: bool,
    /// The engine's pools keep pages that the backing has too, which can be given up.
    pub has_clean_pages: bool,
    /// The engine's pools keep what programs do to files under `tidegate run`, whose supervisor
    /// tells of them.
    pub keeps_files: bool,
    /// The engine's pools know their backing by themselves: `flush`, `recover` and `set` open them
    /// without being told which one.
    pub remembers_backing: bool,
}

impl Traits {
    /// Those of a device by itself, with a format of its own and without options.
    pub const fn of(name: &'static str, about: &'static str) -> Self {
        Self {
            name,
            about,
            options: &[],
            code: None,
            needs_backing: false,
            has_atomic_flush: false,
            keeps_dirty: false,
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

/// The number of an engine in superblocks; each engine's folder declares its own. (The BTT has a
/// format of its own.)
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
    /// The name, without dashes before it.
    pub name: &'static str,
    /// What stands for its value in help texts.
    pub value_name: &'static str,
    /// One sentence.
    pub help: &'static str,
}

/// Size of a block, which several engines take.
pub const BLOCK_SIZE: OptionSpec =
    OptionSpec { name: "block-size", value_name: "BYTES", help: "Size of a block in bytes" };

/// Options of `create` as they were given: names and texts.
pub type Options = BTreeMap<&'static str, String>;

/// Parses the block size among `options`; 4096 where none is given.
///
/// # Errors
/// [`EngineError::Usage`]: it is not one of `allowed`.
pub fn block_bytes_of(options: &Options, allowed: &[u32]) -> Result<Option<u32>, EngineError> {
    options.get(BLOCK_SIZE.name).map(|text| one_of(BLOCK_SIZE.name, text, allowed)).transpose()
}

/// Parses a size in bytes that must be one of `allowed`.
///
/// # Errors
/// [`EngineError::Usage`]: it is another.
pub fn one_of(name: &str, text: &str, allowed: &[u32]) -> Result<u32, EngineError> {
    let bytes = crate::size::parse_bytes(text).ok().and_then(|bytes| u32::try_from(bytes).ok());
    bytes.filter(|bytes| allowed.contains(bytes)).ok_or_else(|| {
        let allowed = allowed.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        EngineError::Usage(format!("--{name} is {text}; expected one of {allowed}"))
    })
}

/// A pool to be made.
pub trait Plan {
    /// The smallest pool that it can be, in bytes.
    fn smallest_bytes(&self) -> u64;

    /// The largest pool of at most `bytes` that has no bytes that the engine could not use:
    /// one of whole pages, unless the engine says otherwise.
    fn largest_fit_bytes(&self, bytes: u64) -> u64 {
        bytes - bytes % 4096
    }

    /// Makes the pool of all of `region`; what was there is lost.
    ///
    /// # Errors
    /// The memory failed.
    fn create(&self, region: &Region) -> Result<(), EngineError>;
}

/// What a pool is, by its header.
#[derive(Debug, Clone)]
pub struct Description {
    /// Bytes for users: of the device that the pool makes, or of its log.
    pub size_bytes: u64,
    /// Size of a block in bytes and number of blocks, where the pool is a device by itself.
    pub blocks: Option<(u32, u64)>,
    /// The header, for scripts.
    pub header: Value,
    /// What is worth knowing, for people.
    pub lines: Vec<Line>,
}

/// A device behind an engine, that no other program uses.
pub struct Backing {
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// What tells it from all others, after a rename or a restart too; never 0.
    pub identity: u64,
    /// Its absolute path, or its URL.
    pub name: Vec<u8>,
    /// What lies on it that writes would destroy, in words, such as `a raw pool`.
    pub holds: Option<String>,
    /// Why it may not be as the engine's pool left it, if so: what the pool has of it may be old.
    pub doubt: Option<String>,
}

/// What a pool is opened with.
pub struct Opening {
    /// Go on without what is damaged, where the engine can.
    pub salvage: bool,
    /// The memory of the pool.
    pub region: Arc<Region>,
    /// The device behind the pool, where one is named.
    pub backing: Option<Backing>,
    /// Use the backing also where that may not be meant: another one's data is pending, or the
    /// backing holds a pool. Write to a pool also where its damage makes that dangerous.
    pub force: bool,
    /// What one flush covers is durable as a whole or not at all; only where the engine
    /// [has that](Traits::has_atomic_flush).
    pub atomic_flush: bool,
}

/// A pool that was opened.
pub struct Opened {
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// What recovery found, in words.
    pub recovered: String,
}

/// How far a check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Steps done.
    pub done: u64,
    /// Steps in all.
    pub total: u64,
}

/// Is told now and then how far a check is.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress);

/// What a check found.
#[derive(Debug, Clone)]
pub struct Checked {
    /// Number of faults that are left.
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
    /// The pool cannot be used like this; the text says what would do.
    #[error("{0}")]
    Refused(String),
    /// The pool or its memory failed.
    #[error(transparent)]
    Pool(Box<dyn Error + Send + Sync>),
}

impl EngineError {
    /// The error of a pool that `source` tells.
    pub fn pool(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Pool(source.into())
    }
}
