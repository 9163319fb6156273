//! Bounded exhaustive crash testing of `tidegate run`, after `CrashMonkey` and ACE (Mohan et al.,
//! OSDI 2018).
//!
//! A *sequence* is a few file operations and syncs in one small file system, with actions of other
//! programs between them. The harness runs it under the shipped `tidegate` binary, copies disk and
//! pool at the cut, kills everything, mounts the copy, and runs `tidegate recover`. It then
//! compares names, sizes, contents and attributes with the outcomes that the [`model`] allows. The
//! model itself is checked in the same way without Tidegate, with real syncs.
//!
//! 1. [`operation`], [`sequence`]: the steps as text, which `programs/interpreter.c` executes.
//! 2. [`generator`], [`variation`]: make sequences.
//! 3. [`machine`]: a disk, a pool and a program whose power can be cut.
//! 4. [`model`]: the allowed outcomes of a cut on ext4 and XFS.
//! 5. [`promise`]: the allowed outcomes on any file system; for btrfs no more is known.
//! 6. [`worker`], [`campaign`]: run many tests at once.
//!
//! README.md says how to use it.

pub mod campaign;
pub mod contents;
pub mod file_system;
pub mod generator;
pub mod machine;
pub mod model;
pub mod operation;
pub mod promise;
pub mod random;
pub mod sequence;
pub mod variation;
pub mod worker;
