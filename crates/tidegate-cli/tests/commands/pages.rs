//! Man pages and completions: one page a command, without a complaint of the formatter.

use std::collections::BTreeSet;
use std::process::Command;

use crate::support::{ok, succeed, tool};

/// The commands that `tidegate --help` lists.
fn commands() -> Vec<String> {
    let help = ok(["--help"]);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
}

#[test]
fn every_command_has_a_page_that_is_set_without_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    ok(["pages", dir.path().to_str().unwrap()]);
    let pages = dir.path().join("man/man1");
    let commands = commands();
    assert!(commands.len() > 12, "{commands:?}");
    for command in commands.iter().filter(|name| *name != "help") {
        let page = pages.join(format!("tidegate-{command}.1"));
        let text = std::fs::read_to_string(&page).unwrap_or_else(|e| panic!("{command}: {e}"));
        assert!(text.contains(".SH SYNOPSIS"), "{command}");
    }
    for entry in std::fs::read_dir(&pages).unwrap() {
        let page = entry.unwrap().path();
        let mut groff = tool("groff", "groff");
        let set = groff.args(["-man", "-Tutf8", "-ww", "-b"]).arg(&page).output().unwrap();
        let said = String::from_utf8_lossy(&set.stderr);
        assert!(set.status.success() && said.is_empty(), "{}: {said}", page.display());
    }
}

#[test]
fn completions_know_commands_and_options() {
    let dir = tempfile::tempdir().unwrap();
    ok(["pages", dir.path().to_str().unwrap()]);
    let script = dir.path().join("bash-completion/completions/tidegate");
    let offered = |words: &str| -> BTreeSet<String> {
        let count = words.split(' ').count() - 1;
        let ask = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={count}; \
             _tidegate tidegate \"${{COMP_WORDS[-1]}}\" \"\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let said = succeed(Command::new("bash").args(["-c", &ask]));
        said.lines().map(str::to_owned).collect()
    };
    assert!(offered("tidegate s").is_superset(&["serve", "stat"].map(str::to_owned).into()));
    assert!(offered("tidegate serve --at").contains("--atomic-flush"));
    for file in ["zsh/site-functions/_tidegate", "fish/vendor_completions.d/tidegate.fish"] {
        assert!(dir.path().join(file).is_file(), "{file}");
    }
}
