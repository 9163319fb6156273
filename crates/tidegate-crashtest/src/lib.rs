//! Bounded exhaustive crash testing of `tidegate run`, after `CrashMonkey` and ACE (Mohan et al.,
//! OSDI 2018).
//!
//! A *sequence* is a few file operations and syncs in one small file system, with actions of other
//! programs between them. The harness runs it under the shipped `tidegate` binary, copies disk and
//! pool at the cut, kills everything, mounts the copy, runs `tidegate recover`, and compares names,
//! sizes, contents and attributes with what the [`model`] allows. The model is checked in the same
//! way without Tidegate, with real syncs.
//!
//! 1. [`operation`], [`sequence`]: what is done, as text. `programs/interpreter.c` does it.
//! 2. [`generator`], [`variation`]: which sequences there are.
//! 3. [`machine`]: a disk, a pool and a program whose power can be cut.
//! 4. [`model`]: what a cut may leave on ext4 and XFS.
//! 5. [`promise`]: what it leaves on any file system, which is all that is known of btrfs.
//! 6. [`worker`], [`campaign`]: many of them at once.
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
