//! The errors of creating, opening, describing or checking a pool.

use crate::backing::BackingError;
use crate::device::DeviceError;
use crate::dram::TierSpec;
use crate::pool::{Content, PoolError};
use crate::tier::{EngineCode, EngineError};

/// An error of the registry or of a stack.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// No engine has this name.
    #[error("the engine `{name}` is not in this release; expected {known}")]
    UnknownEngine {
        /// The name asked for.
        name: String,
        /// The engines that exist.
        known: String,
    },
    /// The pool's superblock names an engine that this program does not have.
    #[error("pool {pool}: the superblock names the engine with {code}: use a later Tidegate")]
    UnknownCode {
        /// The pool.
        pool: String,
        /// The engine's number.
        code: EngineCode,
    },
    /// The region holds no pool.
    #[error(
        "{pool} holds no pool: it starts with {content}, the header of a pool is expected; make a pool with `tidegate create`"
    )]
    NoPool {
        /// Where one was expected.
        pool: String,
        /// The content that was found.
        content: Content,
    },
    /// The pool's superblock cannot be used.
    #[error("pool {pool}")]
    Pool {
        /// The pool.
        pool: String,
        /// Why.
        source: PoolError,
    },
    /// The engine refused or failed.
    #[error("pool {pool}")]
    Engine {
        /// The pool.
        pool: String,
        /// Why.
        source: EngineError,
    },
    /// An option of `create` has an unusable value: wrong usage.
    #[error(transparent)]
    Options(EngineError),
    /// An option of `create` belongs to other engines: wrong usage.
    #[error("--{option} is an option of {owners}; leave it out for --engine {engine}")]
    ForeignOption {
        /// The option, without dashes.
        option: &'static str,
        /// The engines that take it.
        owners: String,
        /// The engine asked for.
        engine: &'static str,
    },
    /// A backing was named for an engine that holds all blocks itself.
    #[error("{pool} is a {engine} pool, which needs no --backing: it holds all blocks itself")]
    NoBackingNeeded {
        /// The pool.
        pool: String,
        /// Its engine.
        engine: &'static str,
    },
    /// The pool, or its backing, cannot be read for a copy.
    #[error("{pool} cannot be copied")]
    Uncopied {
        /// The pool, or its backing.
        pool: String,
        /// Why.
        source: DeviceError,
    },
    /// The copy of the pool, or of its backing, cannot be written.
    #[error("the copy of {original} cannot be written")]
    CopyNotWritten {
        /// The pool, or its backing.
        original: String,
        /// Why.
        source: std::io::Error,
    },
    /// The engine does not make flushes atomic.
    #[error("{pool} is a {engine} pool, --atomic-flush needs a cache pool: leave it out")]
    NoAtomicFlush {
        /// The pool.
        pool: String,
        /// Its engine.
        engine: &'static str,
    },
    /// The engine holds nothing for a backing that a server could leave in it.
    #[error("{pool} is a {engine} pool, --keep-dirty needs a cache or a log pool: leave it out")]
    KeepsNothing {
        /// The pool.
        pool: String,
        /// Its engine.
        engine: &'static str,
    },
    /// The engine has no modes.
    #[error("{pool} is a {engine} pool, --mode needs a cache pool: leave it out")]
    NoModes {
        /// The pool.
        pool: String,
        /// Its engine.
        engine: &'static str,
    },
    /// A DRAM tier was asked for before a pool with atomic flush.
    #[error(
        "--atomic-flush and --dram exclude each other: a DRAM tier writes back in its own order, leave one of them out"
    )]
    NotBelowDram,
    /// The backing cannot be used.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// The system refused to start a thread.
    #[error("the thread that looks at the backing cannot be started")]
    Thread(#[source] std::io::Error),
    /// The DRAM tier before the pool cannot be made.
    #[error("the DRAM tier {spec} cannot be made")]
    Dram {
        /// The tier asked for.
        spec: TierSpec,
        /// Why.
        source: DeviceError,
    },
    /// A volatile tier cannot write its data back.
    #[error("{pending_bytes} bytes in the {tier} tier of {pool} cannot be written back: lost")]
    Lost {
        /// Bytes that only this tier held.
        pending_bytes: u64,
        /// The tier.
        tier: String,
        /// The pool.
        pool: String,
        /// Why.
        source: DeviceError,
    },
    /// A tier cannot write its data to the tier below.
    #[error("what the {tier} of {pool} holds cannot be destaged, and stays there")]
    NotDestaged {
        /// The tier.
        tier: String,
        /// The pool.
        pool: String,
        /// Why.
        source: DeviceError,
    },
    /// The pool cannot give up all pages that the backing has.
    #[error("{pool} cannot be purged: what the backing lacks stays in it")]
    NotPurged {
        /// The pool.
        pool: String,
        /// Why.
        source: DeviceError,
    },
    /// A persistent tier cannot write its data to the tier below.
    #[error("what {pool} holds cannot be destaged: it stays in the {tier}, serve it again")]
    Kept {
        /// The tier.
        tier: String,
        /// The pool.
        pool: String,
        /// Why.
        source: DeviceError,
    },
}

impl StackError {
    /// Returns whether the command was used wrongly, so that nothing was tried.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::UnknownEngine { .. }
                | Self::ForeignOption { .. }
                | Self::Options(EngineError::Usage(_))
        )
    }
}
