//! Holds the imports of the core against the direction that docs/architecture.md gives.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the core and which others each may name.
const ALLOWED: &[(&str, &[&str])] = &[
    ("sync", &[]),
    ("size", &[]),
    ("stats", &["sync"]),
    ("pmem", &["sync"]),
    ("device", &["pmem", "sync"]),
    ("tier", &["device", "pmem", "size", "stats"]),
    ("btt", &["device", "pmem", "stats", "sync", "tier"]),
    ("pool", &["btt", "device", "pmem", "tier"]),
    ("raw", &["device", "pmem", "pool", "stats", "tier"]),
    ("dram", &["device", "pmem", "size", "stats", "sync", "tier"]),
    ("log", &["device", "pmem", "pool", "size", "stats", "sync", "tier"]),
    ("backing", &["device", "log", "pool", "size"]),
    (
        "stack",
        &[
            "backing", "btt", "device", "dram", "log", "pmem", "pool", "raw", "size", "stats",
            "tier",
        ],
    ),
];

#[test]
fn no_module_names_a_layer_above_it() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let mut files = Vec::new();
    collect(&source, &mut files);
    assert!(files.len() > 10, "the sources are not where this test looks: {}", source.display());
    for file in files {
        let relative = file.strip_prefix(&source).expect("found below the sources");
        let first =
            relative.components().next().expect("a file has a name").as_os_str().to_string_lossy();
        let module = first.trim_end_matches(".rs");
        if module == "lib" {
            continue;
        }
        let may_name = allowed.get(module).unwrap_or_else(|| {
            panic!("module {module} is not in this test's list: say what it may name")
        });
        for named in named_modules(&fs::read_to_string(&file).expect("a source file is readable")) {
            let fine = named == module || may_name.contains(&named.as_str());
            assert!(fine, "{}: {module} may not name crate::{named}", relative.display());
        }
    }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a source folder is readable") {
        let path = entry.expect("a folder entry is readable").path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(path);
        }
    }
}

/// The `x` of every `crate::x` in code; comments and doc links may point anywhere.
fn named_modules(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split("crate::").skip(1))
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        .collect()
}
