//! What the documents name is there.

use std::collections::BTreeSet;
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

/// All pages of the repository, by their paths in it.
fn pages() -> Vec<PathBuf> {
    let listed = succeed(tool("git", "git").args(["ls-files", "*.md"]).current_dir(root()));
    listed.lines().map(PathBuf::from).collect()
}

/// The text of a page without its blocks of code.
fn prose(page: &str) -> String {
    page.split("```").step_by(2).collect()
}

/// The anchors of a page's headings, as a forge makes them.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
        let text = line.trim_start_matches('#').trim().to_lowercase();
        text.chars().filter(kept).collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Each link of each page leads to a file of the repository, and to a heading in it.
#[test]
fn links_lead_somewhere() {
    let mut links = 0;
    for page in pages() {
        let text = prose(&read(page.to_str().unwrap()));
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let folder = page.parent().unwrap();
            let to = if path.is_empty() { page.clone() } else { folder.join(path) };
            let place = root().join(&to);
            assert!(place.exists(), "{}: {target} is not there", page.display());
            if !anchor.is_empty() {
                let found = anchors(&prose(&std::fs::read_to_string(place).unwrap()));
                let is_there = found.iter().any(|found| found == anchor);
                assert!(is_there, "{}: {target} is not among {found:?}", page.display());
            }
            links += 1;
        }
    }
    assert!(links > 200, "{links} links");
}

/// The commands of `tidegate` in a page, each with one of its options: `bench log`, `--parts`.
fn options_in(page: &str) -> impl Iterator<Item = (Vec<String>, String)> {
    let lines = page.lines().map(|line| line.trim_start().trim_start_matches("$ "));
    let written = lines.flat_map(|line| {
        let typed = line.starts_with("tidegate ").then_some(line);
        typed.into_iter().chain(quoted(line).filter(|text| text.starts_with("tidegate ")))
    });
    written.flat_map(|line| {
        // Behind these are words of another program, a comment, or another command.
        let own = [" -- ", " #", " |", "`"]
            .iter()
            .fold(line, |line, end| line.split_once(end).map_or(line, |(before, _)| before));
        let words: Vec<&str> = own.split_whitespace().skip(1).collect();
        let depth = if words.first() == Some(&"bench") { 2 } else { 1 };
        let command: Vec<String> = words.iter().take(depth).map(|&word| word.into()).collect();
        let is_option = |word: &&str| word.starts_with("--") && word.len() > 2;
        let options = words.into_iter().filter(is_option);
        let name = |word: &str| {
            word.split(['=', ']', ',', '.', ':', ';', ')']).next().unwrap_or(word).to_owned()
        };
        options.map(move |option| (command.clone(), name(option))).collect::<Vec<_>>()
    })
}

/// Each option in each page is one that its command takes. The changelog has former ones, too.
#[test]
fn commands_take_the_options_of_the_pages() {
    let read_all = |page: &PathBuf| read(page.to_str().unwrap());
    let current = pages().into_iter().filter(|page| page != Path::new("CHANGELOG.md"));
    let texts: Vec<String> = current.map(|page| read_all(&page)).collect();
    let all: BTreeSet<_> = texts.iter().flat_map(|text| options_in(text)).collect();
    for (command, option) in &all {
        let said = run(command.iter().chain([option, &"--help".to_owned()])).stderr;
        let said = String::from_utf8_lossy(&said);
        assert!(!said.contains("unexpected argument"), "{command:?}: {said}");
        assert!(!said.contains("unrecognized subcommand"), "{command:?}: {said}");
    }
    assert!(all.len() > 60, "{all:?}");
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
