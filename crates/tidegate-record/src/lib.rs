//! What recorded programs tell the recorder of `tidegate record`, and the memory that they tell it
//! through.
//!
//! - [`event`]: what is told: an [`event::Event`] of eight words, and paths behind it;
//! - [`rings`]: [`rings::Rings`], memory that the recorder and all recorded processes map. What is
//!   in it outlives a process that is killed.
//!
//! The library that is preloaded into programs (`tidegate-record-preload`) and the recorder
//! (`tidegate-replay`) share this and nothing else.

pub mod event;
pub mod rings;
