//! A model of N cores in virtual time.
//!
//! The shipped DRAM tiers and engines run on a modelled machine (`machine`). Their code runs
//! unmodified; the model of clock, CPUs, locks, threads and memory answers their calls in virtual
//! time (docs/decisions/model-by-coroutines.md).
//!
//! Map: [`args`] the command line; [`case`] one run, `plan` many; [`costs`] the costs of
//! operations, which `calibrate` measures on this machine; `validate` compares the model with this
//! machine; `output` and `paper` show results. Below: `machine` threads and locks, `schedule` CPUs,
//! `medium` and `below` persistent memory and the engine on it.

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
