//! Readers of traces: files of many formats as a stream of events.
//!
//! [`open`] detects the compression and the [`Format`] of a file. It returns a [`Trace`], an
//! iterator over its [`Event`]s. [`merge`] joins several traces by time. Memory use depends not on
//! the length of a trace, but on the number of files and descriptors at a time. The exception is
//! [`Format::Mobigen`], whose lines must be sorted; their size is limited.
//!
//! A write passes these modules: `input` decompresses, `lines` splits lines, the format's `reader`
//! parses the line, `descriptors` resolves file and offset, `out` adds the time since the start. A
//! line that cannot be parsed, or whose file or offset the trace does not show, is counted in
//! [`BadLines`] and gives no event.

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
