//! `SQLite`, one insert a transaction, in all journal modes.

use std::path::{Path, PathBuf};

use super::bed::Way;
use super::files::pool;
use super::{Bench, Part, RUN_PREFIX};
use crate::error::Result;
use crate::measure::{Key, Op, Sample};
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

/// The case of a journal mode.
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
            let sample = insert(bench, way, &driver, mode)?;
            bench.add(Key::new(way.policy(), case_of(mode), Op::Write, ROW_BYTES), sample);
            Ok(())
        })?;
    }
    Ok(())
}

fn insert(bench: &Bench<'_>, way: Way, driver: &Path, mode: &str) -> Result<Sample> {
    let database = Database(bench.bed.file("rows.db"));
    database.remove();
    bench.bed.sync_disk()?;
    parse_sample(DRIVER.name, bench.run_driver(way, driver, &database.0, mode)?.trim())
}

/// A database with the files beside it.
struct Database(PathBuf);

impl Database {
    fn remove(&self) {
        for ending in ["", "-journal", "-wal", "-shm"] {
            let mut path = self.0.clone().into_os_string();
            path.push(ending);
            // Where one is left behind, the next to make the table fails, and says so.
            let _ = std::fs::remove_file(Path::new(&path));
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::child::output_of;

    #[test]
    fn the_driver_inserts_in_every_journal_mode() {
        let dir = tempfile::tempdir().unwrap();
        let (driver, path) = (DRIVER.compile(dir.path(), CC).unwrap(), dir.path().join("rows.db"));
        for mode in MODES {
            let database = Database(path.clone());
            let mut command = Command::new(&driver);
            command.arg(&database.0).args([mode, "off", "0.02"]);
            let output = output_of(command).unwrap();
            let sample = parse_sample(DRIVER.name, output.trim()).unwrap();
            assert!(sample.ops > 0 && sample.p50_ns <= sample.max_ns, "{mode}: {sample:?}");
        }
    }
}
