//! Programs of ours in C and C++, compiled on the measured machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result};

/// A compiler and its package.
pub(crate) type Compiler = (&'static str, &'static str);
/// The default compiler of the machine.
pub(crate) const CC: Compiler = ("cc", "gcc");

/// A program of ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// Options of the compiler, such as libraries to link.
    pub(crate) options: &'static [&'static str],
}

/// The header that all programs include.
const TIMES: &str = include_str!("../programs/times.h");

impl Source {
    /// Compiles into `dir`, unless the program exists there.
    pub(crate) fn compile(self, dir: &Path, compiler: Compiler) -> Result<PathBuf> {
        let program = dir.join(self.name);
        if program.exists() {
            return Ok(program);
        }
        let (text, header) = (program.with_extension("c"), dir.join("times.h"));
        for (path, content) in [(&text, self.text), (&header, TIMES)] {
            std::fs::write(path, content).map_err(BenchError::os("write", path))?;
        }
        let mut command = Command::new(find_program(compiler.0, compiler.1)?);
        command.args(["-O2", "-Wall", "-Werror", "-o"]).args([&program, &text]);
        command.args(self.options);
        output_of(command)?;
        Ok(program)
    }
}
