//! Parses `POLICY:SIZE`, the choice of a DRAM tier on the command line.

use std::fmt;
use std::str::FromStr;

use strum::VariantArray;

use crate::size::{SizeError, parse_bytes};

/// How a DRAM tier decides which blocks to keep and when to write back.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    serde::Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[strum(parse_err_ty = SpecError, parse_err_fn = unknown_policy)]
pub enum Policy {
    /// No cache.
    None,
    /// I/O transit caching (Caiti): eager eviction, conditional bypass.
    Transit,
    /// Transit without eager eviction: blocks stay until a flush, and a full cache is bypassed.
    TransitNoEager,
    /// Transit without conditional bypass: a write to a full cache waits for a slot.
    TransitNoBypass,
    /// PMBD-like staging: a buffer is drained when it is full.
    Pmbd,
    /// PMBD with its syncer, which starts to drain at 70 %.
    Pmbd70,
    /// Staging that evicts the least recently used block when full.
    Lru,
    /// Co-Active: hot and cold by Bloom filter, proactive eviction while the device is idle.
    Coactive,
}

impl Policy {
    /// All policies, in the order of tables.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

fn unknown_policy(text: &str) -> SpecError {
    SpecError::UnknownPolicy(text.to_owned())
}

/// A policy and the size of its cache, parsed from `POLICY:SIZE`.
///
/// ```
/// use tidegate::dram::{Policy, TierSpec};
///
/// let spec: TierSpec = "transit:512M".parse()?;
/// assert_eq!((spec.policy, spec.bytes), (Policy::Transit, 512 << 20));
/// assert!("transit".parse::<TierSpec>().is_err(), "a cache has a size");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct TierSpec {
    /// The policy.
    pub policy: Policy,
    /// Capacity for data in bytes; 0 only for [`Policy::None`].
    pub bytes: u64,
}

/// Why a text is not a valid `POLICY:SIZE`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// The policy is unknown.
    #[error(
        "`{0}` is no DRAM policy; expected none, transit, transit-no-eager, transit-no-bypass, pmbd, pmbd70, lru or coactive"
    )]
    UnknownPolicy(String),
    /// A policy that caches needs a size.
    #[error("DRAM policy {0} needs a size, as in {0}:512M")]
    NoSize(Policy),
    /// `none` takes no size.
    #[error("DRAM policy none takes no size; leave `:{0}` out")]
    SizeOfNone(String),
    /// The size is invalid.
    #[error("`{text}` is no size of a cache, as 512M is one")]
    BadSize {
        /// The text in place of the size.
        text: String,
        /// The error of the size.
        source: SizeError,
    },
}

impl FromStr for TierSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (policy, size) = match text.split_once(':') {
            Some((policy, size)) => (policy.parse::<Policy>()?, Some(size)),
            None => (text.parse()?, None),
        };
        match (policy, size) {
            (Policy::None, None) => Ok(Self { policy, bytes: 0 }),
            (Policy::None, Some(size)) => Err(SpecError::SizeOfNone(size.to_owned())),
            (_, None) => Err(SpecError::NoSize(policy)),
            (_, Some(text)) => {
                let bad = |source| SpecError::BadSize { text: text.to_owned(), source };
                Ok(Self { policy, bytes: parse_bytes(text).map_err(bad)? })
            }
        }
    }
}

impl fmt::Display for TierSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.policy == Policy::None {
            return self.policy.fmt(f);
        }
        let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
        let exact = units.iter().find(|(_, shift)| self.bytes.trailing_zeros() >= *shift);
        let (unit, shift) = exact.copied().unwrap_or(("", 0));
        write!(f, "{}:{}{unit}", self.policy, self.bytes >> shift)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_policy_parses_from_its_name() {
        for &policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert_eq!("Transit".parse::<Policy>(), Err(SpecError::UnknownPolicy("Transit".into())));
    }

    #[test]
    fn specs_parse_and_print_back() {
        for text in ["none", "transit:512M", "lru:1G", "pmbd70:4096", "coactive:3K", "pmbd:5T"] {
            let shown = text.parse::<TierSpec>().unwrap().to_string();
            let expected = if text == "pmbd70:4096" { "pmbd70:4K" } else { text };
            assert_eq!(shown, expected);
        }
        assert_eq!("transit:64m".parse::<TierSpec>().unwrap().bytes, 64 << 20);
    }

    #[test]
    fn wrong_specs_say_what_is_wrong() {
        let error = |text: &str| text.parse::<TierSpec>().unwrap_err();
        assert_eq!(error("transit"), SpecError::NoSize(Policy::Transit));
        assert_eq!(error("none:1M"), SpecError::SizeOfNone("1M".into()));
        assert_eq!(error("fifo:1M"), SpecError::UnknownPolicy("fifo".into()));
        for (size, source) in
            [("", SizeError::Malformed), ("0", SizeError::Zero), ("16777216T", SizeError::TooLarge)]
        {
            let text = size.to_owned();
            assert_eq!(error(&format!("lru:{size}")), SpecError::BadSize { text, source });
        }
    }
}
