//! N cores in virtual time.
//!
//! The shipped DRAM tiers and engines run on a machine that is not there (`machine`): their code is
//! what runs, and what it asks of the machine, its clock, CPUs, locks, threads and memory, is
//! answered in virtual time (docs/decisions/model-by-coroutines.md).
//!
//! Map: [`args`] the command line; [`case`] one run, `plan` many; [`costs`] what things take,
//! `calibrate` measures them here; `validate` holds the model against this machine; `output` and
//! `paper` show results. Below: `machine` threads and locks, `schedule` CPUs, `medium` and `below`
//! persistent memory and the engine on it.

pub mod args;
pub(crate) mod below;
mod calibrate;
pub mod case;
pub mod costs;
mod disk;
pub(crate) mod machine;
mod medium;
mod output;
mod page;
mod paper;
mod plan;
mod schedule;
#[cfg(test)]
mod tests;
mod validate;
