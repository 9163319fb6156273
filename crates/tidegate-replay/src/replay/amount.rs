//! Parses amounts of memory: a share of the workload, or bytes.

use std::fmt;
use std::str::FromStr;

use tidegate::size::Size;

use crate::scheme::page::PAGE_BYTES;

/// An amount of memory: `20` or `20%` of the pages that a workload touches, or `64M`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// Percent of the footprint.
    Pct(f64),
    /// Bytes.
    Bytes(Size),
}

impl Amount {
    /// Returns the amount in bytes, for a workload that touches `footprint_pages` pages.
    pub fn bytes(self, footprint_pages: u64) -> u64 {
        match self {
            Self::Bytes(size) => size.bytes,
            Self::Pct(pct) => {
                #[expect(clippy::cast_precision_loss, reason = "a percentage of it is meant")]
                let pages = (footprint_pages as f64 * pct / 100.0).round();
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "checked"
                )]
                let pages = pages as u64;
                pages.saturating_mul(PAGE_BYTES)
            }
        }
    }

    /// Returns the amount in pages of DRAM, at least one page.
    pub fn pages(self, footprint_pages: u64) -> u64 {
        (self.bytes(footprint_pages) / PAGE_BYTES).max(1)
    }
}

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text);
        if let Ok(pct) = number.parse::<f64>() {
            let is_pct = pct.is_finite() && (0.0..=10_000.0).contains(&pct);
            return if is_pct { Ok(Self::Pct(pct)) } else { Err(expected()) };
        }
        text.parse().map(Self::Bytes).map_err(|_| expected())
    }
}

fn expected() -> String {
    "expected a percentage of the workload from 0 to 10000, as in 20 or 20%, or a size with its \
     unit, as in 64M"
        .to_owned()
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pct(pct) => write!(f, "{pct}%"),
            Self::Bytes(size) => write!(f, "{size}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_percentages_or_sizes() {
        let of = |text: &str| text.parse::<Amount>().map(|amount| amount.bytes(1000));
        assert_eq!((of("20"), of("2.55%"), of("0")), (Ok(200 * 4096), Ok(26 * 4096), Ok(0)));
        assert_eq!((of("1M"), of("100%")), (Ok(1 << 20), Ok(1000 * 4096)));
        for wrong in ["", "-1", "inf", "nan", "10001", "5X", "%"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        assert_eq!("7.5".parse::<Amount>().unwrap().to_string(), "7.5%");
    }
}
