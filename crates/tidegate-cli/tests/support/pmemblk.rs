//! A program in C that drives a libpmemblk by its functions.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part of this module")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The name of Debian's library, the package `libpmemblk1`.
pub const ORIGINAL: &str = "libpmemblk.so.1";

/// A program with a libpmemblk; killed when dropped.
pub struct Driver {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Driver {
    /// Compiles the program in `dir` and starts it with `library`.
    pub fn start(dir: &Path, library: &str) -> Self {
        let program = dir.join("driver");
        if !program.exists() {
            let source =
                concat!(env!("CARGO_MANIFEST_DIR"), "/../tidegate-cli/tests/support/pmemblk.c");
            let compiled = Command::new("cc")
                .args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
                .arg(&program)
                .args([source, "-ldl", "-lpthread"])
                .status();
            assert!(compiled.expect("cc runs").success(), "{source} is compiled");
        }
        // Without the variable, libpmem calls msync for each store off a DAX file system.
        let child = Command::new(program)
            .arg(library)
            .env("PMEM_IS_PMEM_FORCE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.expect("the driver starts");
        let stdin = child.stdin.take().expect("its input is piped");
        let stdout = BufReader::new(child.stdout.take().expect("its output is piped"));
        Self { child, stdin, stdout }
    }

    /// Runs `command`. Returns its number, or errno and message.
    pub fn call(&mut self, command: &str) -> Result<i64, (i32, String)> {
        writeln!(self.stdin, "{command}").expect("the driver reads");
        let mut answer = String::new();
        self.stdout.read_line(&mut answer).expect("the driver answers");
        let words: Vec<_> = answer.trim_end().splitn(3, ' ').collect();
        match words[..] {
            ["ok", number] => Ok(number.parse().expect("a number")),
            ["error", errno, message] => {
                Err((errno.parse().expect("a number"), message.to_owned()))
            }
            _ => panic!("{command}: {answer:?}"),
        }
    }

    /// Lets `threads` threads write until `writes` of their writes have returned, and then kills
    /// the program. Returns the number of writes of each thread that have returned.
    pub fn storm(mut self, threads: usize, writes: usize) -> Vec<usize> {
        writeln!(self.stdin, "storm {threads}").expect("the driver reads");
        let mut done = vec![0; threads];
        let mut line = String::new();
        while self.stdout.read_line(&mut line).expect("the driver answers") > 0 {
            let thread = line.strip_prefix("did ").expect(&line).trim_end();
            done[thread.parse::<usize>().expect("a number")] += 1;
            if done.iter().sum::<usize>() == writes {
                self.child.kill().expect("it runs");
            }
            line.clear();
        }
        done
    }

    /// Runs `command`, which must succeed.
    #[track_caller]
    pub fn ok(&mut self, command: &str) -> i64 {
        self.call(command).unwrap_or_else(|error| panic!("{command}: {error:?}"))
    }

    /// Runs `command`, which must fail. Returns its errno.
    #[track_caller]
    pub fn errno(&mut self, command: &str) -> i32 {
        match self.call(command) {
            Ok(number) => panic!("{command}: {number}"),
            Err((errno, _)) => errno,
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
