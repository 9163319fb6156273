//! Durability domains: what a store needs to become durable.

use std::fmt;
use std::str::FromStr;

use super::ParseError;

/// What a store needs to become durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Domain {
    /// Power failure keeps what reached the memory controller: write lines back, then fence.
    Adr,
    /// Power failure keeps the CPU caches too: a fence is enough.
    Eadr,
    /// An ordinary file: a fence is an `msync` of what was written back.
    Msync,
    /// Nothing survives: tests and trials only.
    Volatile,
}

impl Domain {
    const ALL: [(Self, &str); 4] = [
        (Self::Adr, "adr"),
        (Self::Eadr, "eadr"),
        (Self::Msync, "msync"),
        (Self::Volatile, "volatile"),
    ];
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(domain, _)| domain == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Domain {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(domain, _)| *domain).ok_or_else(
            || {
                ParseError::new(format!(
                    "unknown durability domain `{text}`: expected adr, eadr, msync or volatile"
                ))
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (domain, name) in Domain::ALL {
            assert_eq!(name.parse::<Domain>().unwrap(), domain);
            assert_eq!(domain.to_string(), name);
        }
    }

    #[test]
    fn unknown_name_lists_the_known_ones() {
        let error = "ADR".parse::<Domain>().unwrap_err().to_string();
        assert_eq!(error, "unknown durability domain `ADR`: expected adr, eadr, msync or volatile");
    }
}
