//! The registry of engines, and the stack of tiers that a pool is served as.
//!
//! [`REGISTRY`] lists the engines, a line each; every command finds an engine through it and has no
//! case for one. [`Stack`] is an open pool with the tiers before it. [`PoolDescription`] describes
//! a pool or a stack, for `info`, `serve` and `stat`. `docs/engines.md` shows how an engine is
//! added.

mod claim;
mod close;
mod copy;
mod description;
mod error;
mod judge;
mod open;
mod witness;

use std::sync::Arc;

pub use copy::Original;
pub use description::PoolDescription;
pub use error::StackError;
pub use open::{Stack, StackOptions, Stat};

use crate::btt::{BttEngine, Version};
use crate::cache::CacheEngine;
use crate::dram::{self, Policy, TierSpec};
use crate::log::LogEngine;
use crate::pmem::Region;
use crate::pool::{Glance, PoolError, Superblock};
use crate::raw::RawEngine;
use crate::tier::{Checked, Engine, EngineCode, OnProgress, Opening, OptionSpec, Options, Plan};

/// The engines of this release.
pub static REGISTRY: Registry = Registry::new(&[&BttEngine, &RawEngine, &LogEngine, &CacheEngine]);

type Result<T> = std::result::Result<T, StackError>;

/// Engines, found by name or by the header of a pool.
pub struct Registry {
    engines: &'static [&'static dyn Engine],
}

impl Registry {
    /// Makes a registry of these engines.
    pub const fn new(engines: &'static [&'static dyn Engine]) -> Self {
        Self { engines }
    }

    /// Returns all engines, in the order of messages.
    pub fn engines(&self) -> &'static [&'static dyn Engine] {
        self.engines
    }

    /// Returns the engine called `name`.
    ///
    /// # Errors
    /// [`StackError::UnknownEngine`].
    pub fn engine(&self, name: &str) -> Result<&'static dyn Engine> {
        self.engines.iter().copied().find(|engine| engine.name() == name).ok_or_else(|| {
            let known: Vec<_> = self
                .engines
                .iter()
                .map(|it| format!("{} ({})", it.name(), it.traits().about))
                .collect();
            StackError::UnknownEngine { name: name.to_owned(), known: known.join(", ") }
        })
    }

    /// Returns every option of `create` once, with the names of the engines that take it.
    pub fn options(&self) -> Vec<(OptionSpec, Vec<&'static str>)> {
        let mut options: Vec<(OptionSpec, Vec<&'static str>)> = Vec::new();
        for engine in self.engines {
            for spec in engine.traits().options {
                match options.iter_mut().find(|(known, _)| known.name == spec.name) {
                    Some((_, engines)) => engines.push(engine.name()),
                    None => options.push((*spec, vec![engine.name()])),
                }
            }
        }
        options
    }

    /// Parses the options of a new pool of `engine`.
    ///
    /// # Errors
    /// An option belongs to other engines, or has an unusable value: wrong usage.
    pub fn plan(&self, engine: &'static dyn Engine, options: &Options) -> Result<Box<dyn Plan>> {
        for (spec, engines) in self.options() {
            if options.contains_key(spec.name) && !engines.contains(&engine.name()) {
                let (option, owners) = (spec.name, engines.join(", "));
                return Err(StackError::ForeignOption { option, owners, engine: engine.name() });
            }
        }
        engine.plan(options).map_err(StackError::Options)
    }

    /// Finds the engine of the pool in `region`; the rest of the pool may be damaged.
    ///
    /// # Errors
    /// There is no pool, its header cannot be used, or its engine is unknown.
    pub fn identify(&self, region: &Region) -> Result<&'static dyn Engine> {
        for engine in self.engines.iter().copied() {
            let failed = |source| StackError::Engine { pool: name(region), source };
            if engine.recognizes(region).map_err(failed)? {
                return Ok(engine);
            }
        }
        let code = match Superblock::read(region) {
            Ok(found) => found.superblock.engine,
            Err(PoolError::NotAPool { found: content }) => {
                return Err(StackError::NoPool { pool: name(region), content });
            }
            Err(source) => return Err(StackError::Pool { pool: name(region), source }),
        };
        let unknown = || StackError::UnknownCode { pool: name(region), code };
        self.of_code(code).ok_or_else(unknown)
    }

    /// Finds the engine of the pool in `region`, even if only a part of the pool's headers is left.
    fn trace(&self, region: &Region) -> Result<&'static dyn Engine> {
        let traced = || self.engines.iter().copied().find(|engine| engine.is_traceable(region));
        match self.identify(region) {
            Err(error @ StackError::NoPool { .. }) => traced().ok_or(error),
            identified => identified,
        }
    }

    /// Finds the engine of a pool to open. For reading, a part of the pool's headers is enough.
    fn identify_to_open(&self, region: &Region) -> Result<&'static dyn Engine> {
        if region.read_only() { self.trace(region) } else { self.identify(region) }
    }

    /// Returns the engine of a file's content, if that is a pool with a superblock.
    pub fn of_glance(&self, found: Glance) -> Option<&'static dyn Engine> {
        match found {
            Glance::Tidegate(Some(code)) => self.of_code(code),
            _ => None,
        }
    }

    fn of_code(&self, code: EngineCode) -> Option<&'static dyn Engine> {
        self.engines.iter().copied().find(|engine| engine.traits().code == Some(code))
    }

    /// Verifies the pool in `region`, even if only a part of its headers is left. `repair` restores
    /// all that the format's redundancy allows.
    ///
    /// # Errors
    /// There is no pool to check, or the memory failed.
    pub fn check(
        &self,
        region: Region,
        repair: bool,
        progress: OnProgress<'_>,
    ) -> Result<(&'static dyn Engine, Checked)> {
        let engine = self.trace(&region)?;
        let pool = name(&region);
        let checked = engine.check(region, repair, progress);
        Ok((engine, checked.map_err(|source| StackError::Engine { pool, source })?))
    }

    /// Converts the pool in `region`, which another program made, in place to the form of its
    /// engine.
    ///
    /// # Errors
    /// There is no pool, there is nothing to convert, or the pool is damaged.
    pub fn convert(&self, region: &Arc<Region>) -> Result<()> {
        let converted = self.identify(region)?.convert(region);
        converted.map_err(|source| StackError::Engine { pool: name(region), source })
    }

    /// Describes the pool in `region`, with the DRAM tier `dram` before it. Changes nothing.
    ///
    /// # Errors
    /// There is no pool, its header is damaged, or there is no such DRAM tier.
    pub fn describe(&self, region: &Arc<Region>, dram: TierSpec) -> Result<PoolDescription> {
        let engine = self.identify_to_open(region)?;
        let failed = |source| StackError::Engine { pool: name(region), source };
        let mut description =
            PoolDescription::new(engine, region, engine.describe(region).map_err(failed)?);
        if dram.policy != Policy::None {
            let opening = Opening {
                region: Arc::clone(region),
                backing: None,
                force: false,
                salvage: false,
                atomic_flush: false,
            };
            let geometry = engine.open(opening).map_err(failed)?.tier.geometry();
            let summary = dram::describe(dram.policy, dram.bytes, geometry);
            let failed = |source| StackError::Dram { spec: dram, source };
            description.dram = Some(summary.map_err(failed)?);
        }
        Ok(description)
    }

    /// Describes the content of a file or disk in words.
    pub fn words(&self, found: Glance) -> String {
        match found {
            Glance::Btt(Version::Libpmemblk) => "a libpmemblk pool".into(),
            Glance::Btt(_) => "a btt pool".into(),
            Glance::Tidegate(Some(code)) => match self.of_code(code) {
                Some(engine) => format!("a {engine} pool"),
                None => format!("a pool of the engine with {code}"),
            },
            Glance::Tidegate(None) => "a damaged pool".into(),
            Glance::Unknown(content) => content.to_string(),
        }
    }
}

fn name(region: &Region) -> String {
    region.name().display().to_string()
}
