//! Programs that never sync: they pay the cost of `run` without a gain.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::files::pool;
use super::{Bench, Part, RUN_PREFIX, Runner};
use crate::child::{find_program, seconds_of};
use crate::error::{BenchError, Result};
use crate::measure::{Key, Op, Sample};
use crate::programs::call;

/// Files of the tree that is unpacked and copied.
const FILES: u64 = 12_000;
/// Files in each directory of the tree.
const FILES_A_DIRECTORY: u64 = 100;
/// Bytes of a file.
const FILE_BYTES: usize = 16 << 10;
/// Files that are compiled.
const UNITS: u64 = 12;
/// The source that is compiled.
const UNIT: &str = include_str!("../../programs/names.c");
const UNIT_HEADER: &str = include_str!("../../programs/times.h");

/// Programs, each with the Debian package that has it.
const PROGRAMS: [(&str, &str); 3] = [("tar", "tar"), ("cp", "coreutils"), ("cc", "gcc")];

/// Returns the cases of all programs.
pub(super) fn cases() -> [String; PROGRAMS.len()] {
    PROGRAMS.map(|(name, _)| case_of(name))
}

fn case_of(name: &str) -> String {
    format!("{RUN_PREFIX}unsynced-{name}")
}

/// Checks that all programs are installed.
pub(super) fn find_programs() -> Result<()> {
    PROGRAMS.iter().try_for_each(|(name, package)| find_program(name, package).map(drop))
}

/// Measures all programs.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    bench.prepare_pool(pool(bench.args))?;
    let input = Input::new(bench)?;
    for (program, package) in PROGRAMS {
        let path = find_program(program, package)?;
        let runners = bench.args.policies.clone();
        let name = |runner: Runner| format!("{} {program}, no syncs", runner.name());
        bench.in_turns(Part::Unsynced, &runners, name, |bench, runner| {
            let output = bench.bed.empty_directory()?;
            let mut command = bench.bed.command(runner, pool(bench.args), &path);
            command.args(input.words(program)).current_dir(output.path());
            let sample = Sample::single(seconds_of(command)?);
            let key = Key::new(runner.name(), case_of(program), Op::Write, input.bytes);
            Ok(Some((key, sample)))
        })?;
    }
    std::fs::remove_dir_all(&input.dir).map_err(BenchError::os("remove", &input.dir))
}

/// The input of the programs.
struct Input {
    dir: PathBuf,
    units: u64,
    /// Size of the tree in bytes.
    bytes: u64,
}

impl Input {
    fn new(bench: &Bench<'_>) -> Result<Self> {
        let (dir, files) = (bench.bed.file("unsynced"), bench.args.scaled(FILES, 100));
        let units = bench.args.scaled(UNITS, 1);
        for number in 0..files {
            let parent = dir.join("tree").join((number / FILES_A_DIRECTORY).to_string());
            if number % FILES_A_DIRECTORY == 0 {
                std::fs::create_dir_all(&parent).map_err(BenchError::os("create", &parent))?;
            }
            let content = number.to_string().repeat(FILE_BYTES);
            write(&parent.join(number.to_string()), &content[..FILE_BYTES])?;
        }
        for number in 0..units {
            write(&dir.join(format!("unit-{number}.c")), UNIT)?;
        }
        write(&dir.join("times.h"), UNIT_HEADER)?;
        let [archive, at] = [dir.join("tree.tar"), dir.clone()].map(|it| it.display().to_string());
        call("tar", "tar", &["-C", &at, "-cf", &archive, "tree"])?;
        Ok(Self { dir, units, bytes: files * FILE_BYTES as u64 })
    }

    fn words(&self, program: &str) -> Vec<OsString> {
        match program {
            "tar" => vec!["-xf".into(), self.dir.join("tree.tar").into()],
            "cp" => vec!["-r".into(), self.dir.join("tree").into(), ".".into()],
            _ => {
                let unit = |number| self.dir.join(format!("unit-{number}.c")).into();
                let options = ["-O2", "-c"].map(OsString::from).into_iter();
                options.chain((0..self.units).map(unit)).collect()
            }
        }
    }
}

fn write(path: &Path, content: &str) -> Result<()> {
    std::fs::write(path, content).map_err(BenchError::os("write", path))
}
