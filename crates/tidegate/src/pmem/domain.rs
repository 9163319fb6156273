//! Durability domains: the steps that make a store durable.

use super::ParseError;

/// The steps that make a store durable.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, strum::Display, strum::EnumString,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = ParseError, parse_err_fn = unknown)]
pub enum Domain {
    /// A power cut keeps all that reached the memory controller: write lines back, then fence.
    Adr,
    /// A power cut keeps the CPU caches too: a fence is enough.
    Eadr,
    /// An ordinary file: a fence is an `msync` of the pages written back.
    Msync,
    /// Nothing survives: for tests and trials only.
    Volatile,
}

fn unknown(text: &str) -> ParseError {
    ParseError::new(format!(
        "unknown durability domain `{text}`: expected adr, eadr, msync or volatile"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (domain, name) in [
            (Domain::Adr, "adr"),
            (Domain::Eadr, "eadr"),
            (Domain::Msync, "msync"),
            (Domain::Volatile, "volatile"),
        ] {
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
