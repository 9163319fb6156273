//! Traces: files of many formats, one stream of events.

mod event;

pub use event::{Event, FileId, Op};
