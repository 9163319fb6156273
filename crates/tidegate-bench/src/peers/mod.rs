//! Programs and libraries of others, measured by the same harness in the same run.

pub mod libpmemblk;
