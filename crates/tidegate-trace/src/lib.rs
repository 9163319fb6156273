//! Traces: files of many formats, one stream of events.
//!
//! [`open`] finds out how a file is compressed and which [`Format`] it has. It returns a [`Trace`],
//! which is an iterator over its [`Event`]s. [`merge`] joins several by time. Memory does not grow
//! with the length of a trace, only with the files and descriptors that there are at a time. The
//! exception is [`Format::Mobigen`], whose lines must be sorted; its text is limited.
//!
//! A write goes through the modules so: `input` decompresses, `lines` finds the line, the format's
//! `reader` understands it, `descriptors` says which file and offset it is, `out` gives it the time
//! since the start. A line that cannot be understood, or whose file or offset the trace does not
//! show, is counted in [`BadLines`] and gives no event.

mod bad;
mod by_time;
mod descriptors;
mod error;
mod event;
mod fields;
mod files;
mod format;
#[doc(hidden)]
pub mod fuzzing;
mod input;
mod lines;
mod merge;
mod names;
mod out;
mod reader;
mod source;
mod storage;
#[cfg(test)]
mod tests;
mod whole;

pub use bad::BadLines;
pub use error::Error;
pub use event::{Event, FileId, Op};
pub use format::Format;
pub use merge::{Merged, merge};
pub use storage::is_storage;
pub use whole::{Trace, open, read};
