//! fsx (random operations on a file, each read verified) and pjdfstest (POSIX conformance of names
//! and modes). scripts/install-deps puts both into target/tools.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::bed::{Bed, Runner, transcript};
use crate::support::setting;

/// A program that scripts/install-deps has built into target/tools.
pub(crate) fn built_tool(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is below target");
    let path = root.join("tools/bin").join(name);
    assert!(path.exists(), "no {}: run scripts/install-deps test", path.display());
    path
}

/// All that fsx can do, and how often. Of no bytes at all, it takes the error of `posix_fallocate`
/// for a fault.
const WEIGHTS: &str = "[opsize]\nmin = 1\n[weights]
close_open = 1\nread = 10\nwrite = 20\nmapread = 5\nmapwrite = 2\ntruncate = 5\ninvalidate = 0\nfsync = 5\nfdatasync = 5
posix_fallocate = 1\npunch_hole = 2\nsendfile = 2\ncopy_file_range = 1\nposix_fadvise = 1\n";

#[test]
fn fsx_finds_the_bytes_it_wrote() {
    let operations = setting("TIDEGATE_FSX_OPERATIONS", 5000).to_string();
    let first = setting("TIDEGATE_SEED", 1);
    for seed in first..first + setting("TIDEGATE_FSX_SEEDS", 2) {
        println!("seed {seed}, {operations} operations");
        let printed = Bed::new().same(|runner, dir| {
            std::fs::write(dir.join("fsx.toml"), WEIGHTS).expect("there is free space");
            let mut fsx = runner.command(built_tool("fsx"), dir);
            fsx.args(["-f", "fsx.toml", "-N", &operations, "-S", &seed.to_string(), "file"]);
            transcript(&mut fsx)
        });
        assert!(
            printed.contains("All operations completed A-OK!"),
            "fails without Tidegate too:\n{printed}"
        );
    }
}

/// As root, since most of it is about owners and permissions.
#[test]
fn pjdfstest_has_the_results_it_has_without() {
    assert!(rustix::process::geteuid().is_root(), "pjdfstest needs root");
    let printed = Bed::new().same(pjdfstest);
    assert!(printed.lines().filter(|line| line.ends_with(" ok")).count() > 300, "{printed}");
}

/// The result of each test, in order of names.
fn pjdfstest(runner: Runner<'_>, dir: &Path) -> String {
    let config = "[features]\nposix_fallocate = {}\nutime_now = {}\nutimensat = {}\n[settings]\nnaptime = 0.05\n\
                  allow_remount = false\n[dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n";
    std::fs::write(dir.join("config.toml"), config).expect("there is free space");
    crate::bed::open_to_all(dir);
    let mut command = runner.command(built_tool("pjdfstest"), dir);
    let printed = transcript(command.args(["-c", "config.toml", "-p", "."]));
    let mut results: Vec<_> = printed
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (name, result) = (words.next()?, words.next()?);
            name.contains("::")
                .then_some(())
                .filter(|()| ["ok", "skipped", "FAILED"].contains(&result))?;
            Some((name, result))
        })
        .collect();
    results.sort_unstable();
    results.iter().fold(String::new(), |mut text, (name, result)| {
        writeln!(text, "{name} {result}").expect("a string takes it");
        text
    })
}
