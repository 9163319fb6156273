//! What the documents name is there.

use std::path::{Path, PathBuf};

use crate::support::{directory_in, ok, run, scratch, succeed, tidegate, tool};

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

/// The smallest BTT that the documents name is the smallest that `create` makes.
#[test]
fn the_smallest_btt_has_the_size_of_the_documents() {
    let dir = scratch();
    let pool = dir.path().join("pool");
    for (version, smallest) in [("--btt-version=1.1", "16388K"), ("--btt-version=2.0", "16M")] {
        let engine = ["create", pool.to_str().unwrap(), "--engine=btt", version];
        let output = run(engine.iter().chain(&["--size=1M"]));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(&format!("the smallest is {smallest}\n")), "{error}");
        ok(engine.iter().chain(&[format!("--size={smallest}").as_str(), "--force"]));
    }
    let limits = read("docs/operations/serve.md");
    let named = "| pool size | 16388 KiB (16 MiB with `--btt-version 2.0`) to many TiB for `btt`";
    assert!(limits.contains(named), "docs/operations/serve.md does not name them");
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

/// Checks a repository of one page and one crate, then plants sentences and comments that exceed
/// a limit.
#[test]
fn language_above_its_limits_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let (page, code) = ("docs/glossary.md", "crates/toy/src/lib.rs");
    let git = |arguments: &[&str]| {
        succeed(tool("git", "git").args(arguments).current_dir(dir.path()));
    };
    git(&["init", "-q"]);
    let checked = |pages: &str, source: &str| {
        write(page, pages);
        write(code, source);
        git(&["add", "."]);
        let mut check = tool("python3", "python3");
        let check = check.arg(root().join("scripts/check-text")).current_dir(dir.path());
        let output = check.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (good_page, good_code) =
        ("# Words\n", "/// Returns one.\npub fn one() -> u8 {\n    1\n}\n");
    let (status, told) = checked(good_page, good_code);
    assert_eq!(status, Some(0), "{told}");
    for (planted_page, planted_code, expected) in [
        ("# Words\n\nThe log keeps what is\nnew.\n", good_code, "docs: what_is is "),
        ("# Words\n\nA log, of which a part is new.\n", good_code, "docs: of_which is "),
        ("# Words\n\nThe log keeps a part of it.\n", good_code, "docs: of_it is "),
        (good_page, "/// One of those.\nfn one() {}\n", "toy: verb_first_pct is 0.00; expected"),
        (good_page, "// Keeps what was\n// written.\n", "toy: what_is is "),
    ] {
        let (status, told) = checked(planted_page, planted_code);
        assert!(status == Some(1) && told.contains(expected), "{expected:?} is not in {told}");
    }
}

/// Runs `lines` of a shell, one after the other as a user types them, on a machine that is fresh as
/// far as they can see: an empty directory, /dev/shm without a file, no HOME. Hands back
/// what they print.
fn typed(lines: &[String]) -> String {
    // A job is killed before the next line is typed.
    const END_OF_JOB: &str = "wait $(jobs -p) 2>/dev/null || true";
    const READY: &str = "until grep -qs ^ready served; do kill -0 $!; sleep 0.05; done; cat served";
    let mut script = String::from(
        "set -em\nmount -t tmpfs none /dev/shm\ntrap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT\n",
    );
    for line in lines {
        let command = match line.strip_suffix(" &") {
            Some(command) => format!("rm -f served; {command} >served 2>&1 &\n{READY}"),
            None if line.starts_with("kill ") => format!("{line}\n{END_OF_JOB}"),
            None => line.clone(),
        };
        script += &command;
        script.push('\n');
    }
    let (place, program) = (directory_in(env!("CARGO_TARGET_TMPDIR").into()), tidegate());
    let programs = Path::new(program.get_program()).parent().unwrap().display().to_string();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let mut shell = tool("unshare", "util-linux");
    shell.args(["--mount", "bash", "-c", &script]).current_dir(place.path());
    succeed(shell.env("PATH", path).env_remove("HOME"))
}

/// The lines of `text` behind a heading that says that they run on any machine.
fn for_any_machine(text: &str) -> Vec<String> {
    let behind = text.lines().skip_while(|line| !line.starts_with("Examples: on any machine"));
    let examples = behind.skip(1).take_while(|line| line.starts_with("  "));
    examples.map(|line| line.trim().to_owned()).collect()
}

/// Where help has examples, it says what they need; those that need nothing run as printed.
#[test]
fn the_examples_of_help_run_as_printed() {
    let mut ran = 0;
    for command in [&[][..], &["create"], &["run"]] {
        let help = ok([command, &["--help"]].concat());
        let examples = for_any_machine(&help);
        typed(&examples);
        ran += examples.len();
    }
    assert!(ran >= 5, "{ran} examples");
    for command in ["serve", "info", "check", "set", "flush", "stat", "top", "snapshot", "recover"]
    {
        let help = ok([command, "--help"]);
        let heading = help.lines().find(|line| line.starts_with("Examples")).unwrap();
        assert!(heading.contains("/mnt/pmem"), "{command}: {heading}");
    }
}

/// The blocks of README run as printed, and print what stands there, but for those that name
/// persistent memory.
#[test]
fn the_examples_of_the_readme_run_as_printed() {
    let page = read("README.md");
    let blocks = page.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    let is_for_all = |block: &&str| !block.contains("/mnt/pmem") && !block.contains("replay");
    let mut ran = 0;
    for block in blocks.filter(is_for_all) {
        let typed_lines = block.lines().filter_map(|line| line.strip_prefix("$ "));
        let printed = typed(&typed_lines.map(str::to_owned).collect::<Vec<_>>());
        let is_told = |line: &&str| !line.starts_with("$ ") && !line.starts_with("tidegate: ");
        for line in block.lines().filter(is_told).filter(|line| *line != "...") {
            assert!(printed.lines().any(|it| it == line), "{line:?} is not in {printed}");
        }
        ran += 1;
    }
    assert!(ran >= 3, "{ran} blocks");
}
