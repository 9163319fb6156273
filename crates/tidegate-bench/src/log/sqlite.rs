//! `SQLite` with one insert in each transaction, in all journal modes.

use super::bed::Way;
use super::files::pool;
use super::{Bench, Part, RUN_PREFIX};
use crate::error::Result;
use crate::measure::{Key, Op};
use crate::programs::parse_sample;
use crate::source::{CC, Source};

/// The driver.
const DRIVER: Source = Source {
    name: "sqlite",
    text: include_str!("../../programs/sqlite.c"),
    options: &["-l:libsqlite3.so.0"],
};
/// Journal modes.
pub(super) const MODES: [&str; 4] = ["delete", "truncate", "persist", "wal"];
/// Size of a row's text.
const ROW_BYTES: u64 = 100;

/// Returns the case of a journal mode.
pub(super) fn case_of(mode: &str) -> String {
    format!("{RUN_PREFIX}sqlite-{mode}")
}

/// Measures all journal modes.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let driver = DRIVER.compile(bench.bed.files(), CC)?;
    bench.prepare_pool(pool(bench.args))?;
    let ways = Way::all(&bench.args.policies, true);
    for mode in MODES {
        let name = |way: Way| format!("{} sqlite, journal_mode {mode}", way.policy());
        bench.in_turns(Part::Sqlite, &ways, name, |bench, way| {
            let directory = bench.bed.empty_directory()?;
            let database = directory.path().join("rows.db");
            let output = bench.run_driver(way, &driver, &database, mode)?;
            let sample = parse_sample(DRIVER.name, output.trim())?;
            Ok(Some((Key::new(way.policy(), case_of(mode), Op::Write, ROW_BYTES), sample)))
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
    fn the_driver_inserts_in_every_journal_mode() {
        let dir = tempfile::tempdir().unwrap();
        let driver = DRIVER.compile(dir.path(), CC).unwrap();
        for mode in MODES {
            let database = dir.path().join(format!("{mode}.db"));
            let mut command = Command::new(&driver);
            command.arg(&database).args([mode, "off", "0.02"]);
            let output = output_of(command).unwrap();
            let sample = parse_sample(DRIVER.name, output.trim()).unwrap();
            assert!(sample.ops > 0 && sample.p50_ns <= sample.max_ns, "{mode}: {sample:?}");
        }
    }
}
