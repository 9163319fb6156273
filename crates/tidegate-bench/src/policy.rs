//! The policies that `bench block` compares: engines, DRAM tiers over an engine, and a peer.

use std::str::FromStr;

use clap::ValueEnum;
use tidegate::dram;

/// A device under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The bare memory: blocks may tear.
    Raw,
    /// The block translation table.
    Btt,
    /// A DRAM tier over the block translation table.
    Tier(dram::Policy),
    /// Bare streaming copies: the floor.
    Copy,
    /// PMDK's block translation table.
    Libpmemblk,
}

impl Policy {
    /// Returns all policies, in the order of tables and messages.
    pub(crate) fn all() -> Vec<Self> {
        let tiers = dram::Policy::ALL.iter().filter(|policy| **policy != dram::Policy::None);
        let tiers = tiers.map(|policy| Self::Tier(*policy));
        let engines = [Self::Raw, Self::Btt].into_iter();
        engines.chain(tiers).chain([Self::Copy, Self::Libpmemblk]).collect()
    }

    /// Returns the name on the command line and in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Btt => "btt",
            Self::Tier(policy) => policy.name(),
            Self::Copy => "copy",
            Self::Libpmemblk => "peer:libpmemblk",
        }
    }

    /// Returns whether the policy has a DRAM tier.
    pub fn has_tier(self) -> bool {
        matches!(self, Self::Tier(_))
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        by_name("policy", &Self::all(), Self::name, text)
    }
}

/// Finds the value in `all` whose name is `text`.
///
/// # Errors
/// No name matches: the message calls the value `what`, and lists all names.
pub(crate) fn by_name<T: Copy>(
    what: &str,
    all: &[T],
    name: fn(T) -> &'static str,
    text: &str,
) -> std::result::Result<T, String> {
    let found = all.iter().copied().find(|&one| name(one) == text);
    found.ok_or_else(|| {
        let known: Vec<_> = all.iter().copied().map(name).collect();
        format!("{what} {text} is not known; known are {}", known.join(", "))
    })
}

/// Returns the name of a value on the command line.
pub(crate) fn name_of<V: ValueEnum + Copy>(value: V) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}
