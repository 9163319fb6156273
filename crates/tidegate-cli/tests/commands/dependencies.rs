//! Holds the dependencies of the workspace to deny.toml, without the network.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use toml::de::{DeTable, DeValue};

/// The texts, or the values of `crate` in the tables, of the list `key` in `[section]`.
fn listed(section: &str, key: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deny.toml");
    let text = std::fs::read_to_string(path).expect("deny.toml is there");
    let document = DeTable::parse(&text).expect("deny.toml is TOML").into_inner();
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
    let (licences, banned) = (listed("licenses", "allow"), listed("bans", "deny"));
    let registries = listed("sources", "allow-registry");
    let packages: Vec<Value> =
        listed("graph", "targets").iter().flat_map(|target| packages(target)).collect();
    assert!(packages.len() > 200, "{} packages", packages.len());
    let mut wrong = BTreeSet::new();
    for package in &packages {
        let name = package["name"].as_str().expect("a name");
        let licence = package["license"].as_str().unwrap_or("");
        if !is_allowed(licence, &licences) {
            wrong.insert(format!("{name}: licence {licence:?}"));
        }
        if banned.iter().any(|banned| banned == name) {
            wrong.insert(format!("{name}: banned"));
        }
        let source = package["source"].as_str();
        let is_known = |url: &str| registries.iter().any(|it| url == format!("registry+{it}"));
        if !source.is_none_or(is_known) {
            wrong.insert(format!("{name}: from {}", source.unwrap_or_default()));
        }
    }
    assert!(wrong.is_empty(), "deny.toml does not allow: {wrong:#?}");
}

/// The advisories themselves need the network; what is ignored of them has the form that
/// `cargo deny` reads.
#[test]
fn advisories_that_are_ignored_are_named_by_their_numbers() {
    for advisory in listed("advisories", "ignore") {
        let parts: Vec<&str> = advisory.split('-').collect();
        let is_number = |part: &str| part.len() == 4 && part.parse::<u32>().is_ok();
        let ["RUSTSEC", year, number] = parts[..] else { panic!("{advisory}") };
        assert!(is_number(year) && is_number(number), "{advisory}");
    }
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
