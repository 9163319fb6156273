//! A program that replaces files on a file system until its disk is gone, and what must be there
//! afterwards.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use crate::stamped;

/// Files that a program replaces in turn.
pub(crate) const FILES: usize = 40;
/// More than a program replaces: what was lost never gets its generation back.
const GENERATIONS_A_PROGRAM: u64 = 1 << 20;

/// The generation of each file that was synced last; 0: it is new.
pub(crate) struct ReplacedFiles {
    synced: Vec<u64>,
    programs: u64,
}

/// A program that replaces files in a thread.
pub(crate) struct Program {
    thread: JoinHandle<io::Result<()>>,
    acknowledged: Receiver<u64>,
}

impl ReplacedFiles {
    pub(crate) fn new() -> Self {
        Self { synced: vec![0; FILES], programs: 0 }
    }

    /// Starts a program in `dir`, which is made if it is not there.
    pub(crate) fn replace_in(&mut self, dir: &Path) -> Program {
        fs::create_dir_all(dir).unwrap();
        let (acknowledge, acknowledged) = channel();
        let (dir, first) = (dir.to_owned(), self.programs * GENERATIONS_A_PROGRAM + 1);
        self.programs += 1;
        let thread = thread::spawn(move || replace_files(&dir, first, &acknowledge));
        Program { thread, acknowledged }
    }

    /// Waits until `program` has synced and acknowledged `count` files more.
    pub(crate) fn wait_for(&mut self, program: &Program, count: usize) {
        for _ in 0..count {
            let generation = program.acknowledged.recv().expect("the disk is there");
            self.synced[file_of(generation)] = generation;
        }
    }

    /// Waits for the end of a `program` whose disk is gone.
    pub(crate) fn collect(&mut self, program: Program) {
        program.thread.join().unwrap().unwrap_err();
        for generation in program.acknowledged.try_iter() {
            self.synced[file_of(generation)] = generation;
        }
    }

    /// Each file in `dir` is as it was synced, or a later generation that was not acknowledged:
    /// that is what is synced from now on.
    pub(crate) fn assert_in(&mut self, dir: &Path) {
        for (number, synced) in self.synced.iter_mut().enumerate() {
            let path = dir.join(number.to_string());
            if *synced == 0 && !path.exists() {
                continue;
            }
            let found = fs::read(&path).unwrap_or_else(|error| panic!("file {number}: {error}"));
            let generation = found.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
            assert!(generation >= *synced, "file {number}: {generation}, {synced} was synced");
            assert!(found == content(generation), "file {number} is no whole generation");
            *synced = generation;
        }
    }
}

/// Replaces one file after the other by the generations from `first` on, each of them synced before
/// it is acknowledged, until the disk is gone.
///
/// A commit of the journal that failed is over, so ext4 answers a sync that comes later with
/// success (`jbd2_complete_transaction`). An operation that needs the journal is what fails: no
/// generation is acknowledged before the next file was made.
fn replace_files(dir: &Path, first: u64, acknowledge: &Sender<u64>) -> io::Result<()> {
    let new = dir.join("new");
    for generation in first.. {
        let mut file = File::create(&new)?;
        if generation > first {
            acknowledge.send(generation - 1).expect("the test waits");
        }
        file.write_all(&content(generation))?;
        file.sync_all()?;
        fs::rename(&new, dir.join(file_of(generation).to_string()))?;
        File::open(dir)?.sync_all()?;
    }
    Ok(())
}

fn file_of(generation: u64) -> usize {
    usize::try_from(generation).unwrap() % FILES
}

/// A generation of a file: one to sixteen blocks.
fn content(generation: u64) -> Vec<u8> {
    stamped(file_of(generation), generation).repeat(1 + usize::try_from(generation % 16).unwrap())
}
