//! The events that recorded programs report to `tidegate record`, through shared memory.
//!
//! - [`event`]: an [`event::Event`] has eight words, and paths behind them;
//! - [`rings`]: [`rings::Rings`] is memory that the recorder and all recorded processes map. Its
//!   content survives a process that is killed.
//!
//! The library that is preloaded into programs (`tidegate-record-preload`) and the recorder
//! (`tidegate-replay`) share only this crate.

pub mod event;
pub mod rings;
