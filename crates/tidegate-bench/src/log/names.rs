//! Typical uses of files and their syncs: deliveries of mail, replaced files, installed packages,
//! redo logs, transactions under a record lock, lines of logs.

use super::bed::Way;
use super::files::pool;
use super::{Bench, Part, RUN_PREFIX};
use crate::error::Result;
use crate::measure::{Key, Op};
use crate::programs::parse_sample;
use crate::source::{CC, Source};

/// The driver.
const DRIVER: Source =
    Source { name: "names", text: include_str!("../../programs/names.c"), options: &[] };
/// Patterns, and the bytes of each new file, or of each synced write.
const PATTERNS: [(&str, u64); 6] = [
    ("mail", 3000),
    ("replace", 1000),
    ("package", 20_000),
    ("redo", 512),
    ("locked", 12_408),
    ("lines", 79),
];

/// Returns the cases of all patterns.
pub(super) fn cases() -> [String; PATTERNS.len()] {
    PATTERNS.map(|(pattern, _)| case_of(pattern))
}

fn case_of(pattern: &str) -> String {
    format!("{RUN_PREFIX}names-{pattern}")
}

/// Measures all patterns.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let driver = DRIVER.compile(bench.bed.files(), CC)?;
    bench.prepare_pool(pool(bench.args))?;
    let ways = Way::all(&bench.args.policies, true);
    for (pattern, block_bytes) in PATTERNS {
        let name = |way: Way| format!("{} pattern {pattern}", way.policy());
        bench.in_turns(Part::Names, &ways, name, |bench, way| {
            let directory = bench.bed.empty_directory()?;
            let output = bench.run_driver(way, &driver, directory.path(), pattern)?;
            let sample = parse_sample(DRIVER.name, output.trim())?;
            Ok(Some((Key::new(way.policy(), case_of(pattern), Op::Write, block_bytes), sample)))
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::child::output_of;

    #[test]
    fn the_driver_does_every_pattern() {
        let dir = tempfile::tempdir().unwrap();
        let driver = DRIVER.compile(dir.path(), CC).unwrap();
        for (pattern, _) in PATTERNS {
            let directory = dir.path().join(pattern);
            std::fs::create_dir(&directory).unwrap();
            let mut command = Command::new(&driver);
            let output = output_of({
                command.arg(&directory).args([pattern, "off", "0.02"]);
                command
            });
            let sample = parse_sample(DRIVER.name, output.unwrap().trim()).unwrap();
            assert!(sample.ops > 0 && sample.p50_ns <= sample.max_ns, "{pattern}: {sample:?}");
        }
    }
}
