//! What others wrote, under `tidegate run`: each workload is done plain and under `run`, in the
//! same place, and must print the same and leave the same files. Then with crashes: kill -9 of the
//! whole tree, a power cut, faults of the file system below.
//!
//! What takes long is behind the feature `soak`. How often things are done is short by default; the
//! long versions (scripts/soak) set `TIDEGATE_KILL_ROUNDS`, `TIDEGATE_POWER_ROUNDS`,
//! `TIDEGATE_POSTGRES_ROUNDS`, `TIDEGATE_STORE_ROUNDS`, `TIDEGATE_FSX_SEEDS`,
//! `TIDEGATE_FSX_OPERATIONS`, `TIDEGATE_SQLITE_TESTS=all`. A failure prints its seed;
//! `TIDEGATE_SEED` makes the same choices again.

#![cfg_attr(
    not(feature = "soak"),
    allow(dead_code, unused_imports, reason = "used by the long tests")
)]

mod bed;
mod causes;
mod charge;
mod commits;
mod copies;
mod counts;
mod crash;
mod faults;
mod findings;
mod fio;
mod frozen;
mod fsx;
mod identity;
mod kernel_path;
mod left;
mod new_files;
mod outside;
mod posix;
mod postgres;
mod power;
mod process_tree;
mod programs;
mod resources;
mod rights;
mod signals;
mod sqlite;
mod stores;
#[path = "../support/mod.rs"]
mod support;
mod traced;
mod tree;
mod unknown;
mod usage;
mod utilities;
mod volatile;
mod ways;
