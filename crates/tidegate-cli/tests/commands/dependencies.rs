//! Holds the dependencies of the workspace to deny.toml, without the network.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use toml::de::{DeTable, DeValue};

/// The text of deny.toml.
fn deny_toml() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deny.toml");
    std::fs::read_to_string(path).expect("deny.toml is there")
}

/// The texts, or the values of `crate` or `id` in the tables, of the list `key` in `[section]` of
/// `text`, the text of a deny.toml.
fn listed(text: &str, section: &str, key: &str) -> Vec<String> {
    let document = DeTable::parse(text).expect("deny.toml is TOML").into_inner();
    let Some(DeValue::Table(section)) = document.get(section).map(toml::Spanned::get_ref) else {
        panic!("no [{section}]")
    };
    let Some(DeValue::Array(items)) = section.get(key).map(toml::Spanned::get_ref) else {
        panic!("no list {key}")
    };
    let text = |value: &DeValue<'_>| match value {
        DeValue::String(text) => text.clone().into_owned(),
        DeValue::Table(table) => {
            match table.get("crate").or(table.get("id")).map(toml::Spanned::get_ref) {
                Some(DeValue::String(text)) => text.clone().into_owned(),
                other => panic!("{other:?}"),
            }
        }
        other => panic!("{other:?}"),
    };
    items.iter().map(|item| text(item.get_ref())).collect()
}

/// What `text`, that of a deny.toml, says of packages.
struct Policy {
    licences: Vec<String>,
    banned: Vec<String>,
    registries: Vec<String>,
}

impl Policy {
    fn of(text: &str) -> Self {
        Self {
            licences: listed(text, "licenses", "allow"),
            banned: listed(text, "bans", "deny"),
            registries: listed(text, "sources", "allow-registry"),
        }
    }

    /// What is wrong with `package`, as `cargo metadata` describes it.
    fn faults(&self, package: &Value) -> Vec<String> {
        let name = package["name"].as_str().expect("a name");
        let licence = package["license"].as_str().unwrap_or("");
        let is_known = |url: &str| self.registries.iter().any(|it| url == format!("registry+{it}"));
        let mut faults = Vec::new();
        if !is_allowed(licence, &self.licences) {
            faults.push(format!("{name}: licence {licence:?}"));
        }
        if self.banned.iter().any(|banned| banned == name) {
            faults.push(format!("{name}: banned"));
        }
        if let Some(source) = package["source"].as_str().filter(|source| !is_known(source)) {
            faults.push(format!("{name}: from {source}"));
        }
        faults
    }
}

/// Those of `ignored` that have not the form of an advisory's number.
fn malformed_advisories(ignored: &[String]) -> Vec<&str> {
    let is_number = |part: &str| part.len() == 4 && part.bytes().all(|it| it.is_ascii_digit());
    let is_advisory = |text: &&str| match text.split('-').collect::<Vec<_>>()[..] {
        ["RUSTSEC", year, number] => is_number(year) && is_number(number),
        _ => false,
    };
    ignored.iter().map(String::as_str).filter(|text| !is_advisory(text)).collect()
}

/// The packages that a build for `target` takes in.
fn packages(target: &str) -> Vec<Value> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "metadata",
        "--format-version=1",
        "--locked",
        "--offline",
        "--filter-platform",
        target,
    ]);
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let resolved = metadata["resolve"]["nodes"].as_array().expect("nodes");
    let is_used = |package: &Value| resolved.iter().any(|node| node["id"] == package["id"]);
    let packages = metadata["packages"].as_array().expect("packages");
    packages.iter().filter(|package| is_used(package)).cloned().collect()
}

/// Whether `expression`, of SPDX, can be met with the licences of `allowed` alone.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut words = &words[..];
    let met = any(&mut words, allowed);
    met && words.is_empty()
}

fn any(words: &mut &[&str], allowed: &[String]) -> bool {
    let mut met = all(words, allowed);
    while words.first() == Some(&"OR") {
        *words = &words[1..];
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut &[&str], allowed: &[String]) -> bool {
    let mut met = one(words, allowed);
    while words.first() == Some(&"AND") {
        *words = &words[1..];
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut &[&str], allowed: &[String]) -> bool {
    let Some((first, rest)) = words.split_first() else { return false };
    *words = rest;
    if *first == "(" {
        let met = any(words, allowed);
        let closes = words.first() == Some(&")");
        *words = words.get(1..).unwrap_or_default();
        return met && closes;
    }
    let mut name = (*first).to_owned();
    if let ["WITH", exception, rest @ ..] = *words {
        name.extend([" WITH ", exception]);
        *words = rest;
    }
    allowed.contains(&name)
}

#[test]
fn dependencies_have_licences_sources_and_names_that_are_allowed() {
    let text = deny_toml();
    let policy = Policy::of(&text);
    let packages: Vec<Value> =
        listed(&text, "graph", "targets").iter().flat_map(|target| packages(target)).collect();
    assert!(packages.len() > 200, "{} packages", packages.len());
    let wrong: BTreeSet<_> = packages.iter().flat_map(|package| policy.faults(package)).collect();
    assert!(wrong.is_empty(), "deny.toml does not allow: {wrong:#?}");
}

#[test]
fn a_dependency_that_is_not_allowed_is_named() {
    let policy = Policy::of(&deny_toml());
    let crates_io = "registry+https://github.com/rust-lang/crates.io-index";
    let faults = |name: &str, licence: Option<&str>, source: Option<&str>| {
        policy.faults(&json!({"name": name, "license": licence, "source": source}))
    };
    let none: [&str; 0] = [];
    assert_eq!(faults("good", Some("MIT OR GPL-3.0-only"), Some(crates_io)), none);
    assert_eq!(faults("ours", Some("Apache-2.0 OR MIT"), None), none);
    assert_eq!(faults("viral", Some("GPL-3.0-only"), None), ["viral: licence \"GPL-3.0-only\""]);
    assert_eq!(faults("mute", None, Some(crates_io)), ["mute: licence \"\""]);
    assert_eq!(faults("openssl-sys", Some("MIT"), Some(crates_io)), ["openssl-sys: banned"]);
    for source in ["git+https://example.com/x", "registry+https://example.com/index"] {
        assert_eq!(faults("far", Some("MIT"), Some(source)), [format!("far: from {source}")]);
    }
}

/// The advisories themselves need the network; what is ignored of them has the form that
/// `cargo deny` reads.
#[test]
fn advisories_that_are_ignored_are_named_by_their_numbers() {
    let none: [&str; 0] = [];
    let ours = listed(&deny_toml(), "advisories", "ignore");
    assert_eq!(malformed_advisories(&ours), none);
    let made_up = "[advisories]\nignore = [\"RUSTSEC-2024-0001\", { id = \"RUSTSEC-2025-1234\", \
                   reason = \"none\" }, \"RUSTSEC-2024-1\", \"CVE-2024-0001\", { id = \"RUSTSEC-24-0001\" }, \
                   \"RUSTSEC-2024-0001-2\", \"RUSTSEC-+024-0001\", \"\"]";
    let ignored = listed(made_up, "advisories", "ignore");
    let wrong = [
        "RUSTSEC-2024-1",
        "CVE-2024-0001",
        "RUSTSEC-24-0001",
        "RUSTSEC-2024-0001-2",
        "RUSTSEC-+024-0001",
        "",
    ];
    assert_eq!(malformed_advisories(&ignored), wrong);
}

#[test]
fn expressions_of_licences_are_read() {
    let allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("Apache-2.0/MIT", true),
        ("MIT AND GPL-3.0-only", false),
        ("(MIT OR GPL-2.0) AND Zlib", true),
        ("MIT AND (GPL-2.0 OR Zlib)", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
        ("", false),
        ("(MIT", false),
        ("MIT Zlib", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), expected, "{expression:?}");
    }
}
