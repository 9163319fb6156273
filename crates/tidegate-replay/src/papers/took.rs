//! Writes the duration of `make papers` into a section of docs/papers.md.

use std::path::Path;
use std::str::FromStr;

use crate::error::Result;

/// Intended maximum duration of all parts, in seconds.
const MOST_S: u64 = 3600;

/// The duration of a part of `make papers`, or of all parts under the name `all`.
///
/// Written as text: `PART=SECONDS`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Took {
    /// The part's name, in lower-case letters.
    part: String,
    seconds: u64,
}

impl FromStr for Took {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}`: expected PART=SECONDS, such as traces=900");
        let (part, seconds) = text.split_once('=').ok_or_else(wrong)?;
        if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_lowercase()) {
            return Err(wrong());
        }
        Ok(Self { part: part.to_owned(), seconds: seconds.parse().map_err(|_| wrong())? })
    }
}

/// Replaces the section of the page `path` with the durations of `parts` on this machine.
///
/// # Errors
/// The page cannot be read or written, or has no such section.
pub(crate) fn update(path: &Path, parts: &[Took]) -> Result<()> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    super::update(path, "took", |_| Ok(section(parts, cpus)))
}

fn section(parts: &[Took], cpus: usize) -> String {
    let text = |Took { part, seconds }: &Took| match part.as_str() {
        "all" => format!("all {seconds} of {MOST_S}"),
        part => format!("{part} {seconds}"),
    };
    let parts: Vec<_> = parts.iter().map(text).collect();
    let plural = if cpus == 1 { "" } else { "s" };
    // The page allows 100 columns at most.
    format!("`make papers` on {cpus} CPU{plural}, seconds: {}.\n", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_how_long_each_part_took() {
        let parts = ["build=3", "traces=900", "all=1000"].map(|text| text.parse().unwrap());
        assert_eq!(
            section(&parts, 2),
            "`make papers` on 2 CPUs, seconds: build 3, traces 900, all 1000 of 3600.\n"
        );
        let longest = ["build=999", "traces=9999", "model=999", "bench=9999", "all=9999"];
        let line = section(&longest.map(|text| text.parse().unwrap()), 128);
        assert!(line.trim_end().len() <= 100, "{line}");
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("papers.md");
        std::fs::write(&page, "a\n<!-- took:begin -->\nold\n<!-- took:end -->\nb\n").unwrap();
        update(&page, &parts).unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        assert!(text.contains("traces 900") && !text.contains("old"), "{text}");
        assert!(text.starts_with("a\n") && text.ends_with("\nb\n"), "{text}");
    }

    #[test]
    fn what_is_no_part_with_seconds_is_refused() {
        for wrong in ["", "traces", "traces=", "traces=-1", "=5", "a|b=5", "traces=1.5"] {
            assert!(wrong.parse::<Took>().is_err(), "{wrong}");
        }
    }
}
