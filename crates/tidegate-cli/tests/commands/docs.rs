//! What the documents name is there.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The words in backticks in `text`.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Each test that docs/security.md names is in the file that it names behind it.
#[test]
fn the_tests_of_the_threat_model_exist() {
    let words: Vec<String> =
        read("docs/security.md").split_whitespace().map(String::from).collect();
    let (page, mut names) = (words.join(" "), 0);
    // "`test`, `test` in FILE, `test` in FILE".
    for part in page.split_inclusive(".rs") {
        let Some((before, path)) = part.rsplit_once(" in crates/") else { continue };
        let file = read(&format!("crates/{path}"));
        let named = before.rsplit(['|', ';', ':', '(']).next().unwrap_or(before);
        for name in quoted(named) {
            assert!(file.contains(&format!("fn {name}(")), "crates/{path} has no test {name}");
            names += 1;
        }
    }
    assert!(names > 25, "{names} tests are named");
}

/// Each row of a table whose last column is what shows it names a test or a fuzz target.
#[test]
fn each_line_of_the_threat_model_names_what_shows_it() {
    let (page, mut rows) = (read("docs/security.md"), 0);
    let mut is_shown = false;
    for line in page.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        match cells[..] {
            [] | [_] => is_shown = false,
            [.., last] if last.starts_with("---") => {}
            [.., "shown by"] => is_shown = true,
            [.., last] if is_shown => {
                let is_named = last.contains(" in crates/") || last.contains("fuzz target");
                assert!(is_named, "nothing shows: {line}");
                rows += 1;
            }
            _ => {}
        }
    }
    assert!(rows > 25, "{rows} rows");
}

#[test]
fn the_fuzz_targets_of_the_threat_model_exist() {
    let (page, fuzz) = (read("docs/security.md"), read("fuzz/Cargo.toml"));
    let lines = page.lines().filter(|line| line.contains("fuzz target"));
    let named: Vec<&str> = lines
        .flat_map(|line| quoted(line.split_once("fuzz target").map_or("", |(_, rest)| rest)))
        .collect();
    assert!(named.len() >= 8, "{named:?}");
    for name in named {
        assert!(fuzz.contains(&format!("name = \"{name}\"")), "there is no fuzz target {name}");
    }
}
