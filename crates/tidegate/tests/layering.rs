//! Holds the imports of the core against the direction that docs/architecture.md gives, and finds
//! circles of imports between the modules of every crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the core and which others each may name.
const ALLOWED: &[(&str, &[&str])] = &[
    ("sync", &[]),
    ("durable", &[]),
    ("glob", &[]),
    ("locking", &[]),
    ("opening", &[]),
    ("size", &[]),
    ("stats", &["sync"]),
    ("pmem", &["locking", "opening", "sync"]),
    ("device", &["durable", "opening", "pmem", "sync"]),
    ("tier", &["device", "pmem", "size", "stats", "sync"]),
    ("btt", &["device", "pmem", "stats", "sync", "tier"]),
    ("pool", &["btt", "device", "pmem", "tier"]),
    ("raw", &["device", "pmem", "pool", "stats", "tier"]),
    ("dram", &["device", "pmem", "size", "stats", "sync", "tier"]),
    ("log", &["device", "durable", "pmem", "pool", "size", "stats", "sync", "tier"]),
    ("cache", &["device", "pmem", "pool", "size", "stats", "sync", "tier"]),
    ("backing", &["device", "locking", "log", "opening", "pool", "size"]),
    (
        "stack",
        &[
            "backing", "btt", "cache", "device", "dram", "log", "pmem", "pool", "raw", "size",
            "stats", "sync", "tier",
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

/// A module: the names on the way to it from the root of its crate.
type Module = Vec<String>;

/// Parent and child may name each other, and so may a module and the module of its errors. All
/// other circles keep files from being read, tested and moved one at a time.
#[test]
fn no_modules_import_each_other_in_a_circle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates have a folder");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(crates).expect("the folder of crates is readable") {
        let path = entry.expect("a folder entry is readable").path();
        if path.ends_with("tidegate-loom") {
            // The core's sources once more.
            continue;
        }
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        for circle in circles(&imports(&path.join("src"))) {
            found.entry(name.clone()).or_insert_with(Vec::new).push(circle);
        }
    }
    assert!(found.is_empty(), "modules that import each other in circles: {found:#?}");
}

#[test]
fn circles_are_found_and_natural_ones_are_not() {
    let imports = |edges: &[(&str, &str)]| {
        let module = |name: &str| name.split("::").map(str::to_owned).collect::<Module>();
        let mut imports = BTreeMap::<Module, BTreeSet<Module>>::new();
        for (from, to) in edges {
            imports.entry(module(from)).or_default().insert(module(to));
        }
        circles(&imports).len()
    };
    assert_eq!(imports(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]), 1);
    assert_eq!(imports(&[("a", "b"), ("b", "c")]), 0);
    assert_eq!(imports(&[("a", "a::b"), ("a::b", "a"), ("a::b::c", "a")]), 0);
    assert_eq!(imports(&[("a", "error"), ("error", "a")]), 0);
    let text = "use super::{b, c::{self, D}, e::f};\nfn g() { crate::h::i() } // crate::j\n";
    let mut paths = Vec::new();
    named_paths(text, &["x".to_owned(), "a".to_owned()], &mut paths);
    let shown: BTreeSet<_> = paths.iter().map(|path| path.join("::")).collect();
    let expected = ["x::b", "x::c::self", "x::c::D", "x::e::f", "h::i"];
    assert_eq!(shown, expected.map(str::to_owned).into());
}

/// Which modules each module below `source` names, tests left out.
fn imports(source: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut files = Vec::new();
    collect(source, &mut files);
    let files: BTreeMap<Module, PathBuf> = files
        .into_iter()
        .filter_map(|file| Some((module_of(file.strip_prefix(source).ok()?)?, file)))
        .collect();
    let mut imports = BTreeMap::new();
    for (module, file) in &files {
        let text = fs::read_to_string(file).expect("a source file is readable");
        let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let shipped = shipped.split("#[cfg(all(test, not(loom)))]\nmod tests {").next();
        let mut paths = Vec::new();
        named_paths(shipped.unwrap_or_default(), module, &mut paths);
        let named = paths.iter().filter_map(|path| {
            (0..=path.len()).rev().map(|len| &path[..len]).find(|it| files.contains_key(*it))
        });
        imports.insert(module.clone(), named.map(<[String]>::to_vec).collect());
    }
    imports
}

/// The module in the file at `path`; none for tests.
fn module_of(path: &Path) -> Option<Module> {
    let names = path.with_extension("");
    let mut names: Module =
        names.components().map(|it| it.as_os_str().to_string_lossy().into_owned()).collect();
    if names.last().is_some_and(|it| ["mod", "lib", "main"].contains(&it.as_str())) {
        names.pop();
    }
    let is_test = |name: &String| {
        ["tests", "suite", "fuzzing", "testing", "interleavings"].contains(&name.as_str())
            || name.ends_with("_tests")
    };
    (path.extension()? == "rs" && !names.iter().any(is_test)).then_some(names)
}

/// The paths in `text`, code of `module`, that begin with `crate::` or `super::`, from the root of
/// the crate on.
fn named_paths(text: &str, module: &[String], paths: &mut Vec<Module>) {
    let code: Vec<_> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    for (at, word) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        let before = code[..at].chars().next_back().unwrap_or(' ');
        if before.is_alphanumeric() || "_:$".contains(before) {
            continue;
        }
        let (mut base, mut rest) = (Module::new(), &code[at + word.len()..]);
        if word == "super::" {
            base = module[..module.len().saturating_sub(1)].to_vec();
            while let Some(further) = rest.strip_prefix("super::") {
                base.pop();
                rest = further;
            }
        }
        expand(rest, &base, paths);
    }
}

/// Adds the paths that `text` begins with, each behind `base`; returns what follows them.
fn expand<'a>(text: &'a str, base: &[String], paths: &mut Vec<Module>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        while let Some(item) = rest.trim_start().chars().next() {
            match item {
                '}' => return &rest.trim_start()[1..],
                ',' => rest = &rest.trim_start()[1..],
                _ => rest = expand(rest, base, paths),
            }
        }
        return rest;
    }
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    let end = text.find(|letter| !is_name(letter)).unwrap_or(text.len());
    if end == 0 {
        // A glob or the like names nothing by itself.
        paths.push(base.to_vec());
        return text.get(text.chars().next().map_or(0, char::len_utf8)..).unwrap_or_default();
    }
    let path = [base, &[text[..end].to_owned()]].concat();
    if let Some(rest) = text[end..].strip_prefix("::") {
        return expand(rest, &path, paths);
    }
    paths.push(path);
    // `a as b` is one item.
    let rest = &text[end..];
    let alias = rest.trim_start().strip_prefix("as ");
    alias.map_or(rest, |alias| alias.trim_start().trim_start_matches(is_name))
}

/// The sets of modules that import each other in circles, but for natural ones.
fn circles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<BTreeSet<String>> {
    let is_natural = |from: &Module, to: &Module| {
        let is_error = |it: &Module| it.last().is_some_and(|name| name == "error");
        from.starts_with(to) || to.starts_with(from) || is_error(from) || is_error(to)
    };
    let reached = |from: &Module| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = next.pop() {
            let named = imports.get(&module).into_iter().flatten();
            for to in named.filter(|to| !is_natural(&module, to)) {
                if seen.insert(to.clone()) {
                    next.push(to.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = imports.keys().map(|it| (it, reached(it))).collect();
    let mut circles = BTreeSet::new();
    for (module, from_it) in &reached {
        if from_it.contains(*module) {
            let back = |it: &&Module| reached.get(*it).is_some_and(|all| all.contains(*module));
            circles.insert(from_it.iter().filter(back).map(|it| it.join("::")).collect());
        }
    }
    circles.into_iter().collect()
}
