//! What `bench block` compares: engines, DRAM tiers over one of them, and a peer.

use std::str::FromStr;

use tidegate::dram;

/// What is measured.
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
    /// All that can be compared, in the order of tables and messages.
    pub(crate) const ALL: [Self; 11] = [
        Self::Raw,
        Self::Btt,
        Self::Tier(dram::Policy::Transit),
        Self::Tier(dram::Policy::TransitNoEager),
        Self::Tier(dram::Policy::TransitNoBypass),
        Self::Tier(dram::Policy::Pmbd),
        Self::Tier(dram::Policy::Pmbd70),
        Self::Tier(dram::Policy::Lru),
        Self::Tier(dram::Policy::Coactive),
        Self::Copy,
        Self::Libpmemblk,
    ];

    /// The name on the command line and in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Btt => "btt",
            Self::Tier(policy) => policy.name(),
            Self::Copy => "copy",
            Self::Libpmemblk => "peer:libpmemblk",
        }
    }

    /// It has a DRAM tier.
    pub fn has_tier(self) -> bool {
        matches!(self, Self::Tier(_))
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("policy {text} is not known; known are {known}")
        })
    }
}
