//! Programs and libraries of other projects, measured by the same harness in the same run.

pub mod libpmemblk;
