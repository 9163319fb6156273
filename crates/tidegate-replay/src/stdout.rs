//! Standard output.

use std::io::{ErrorKind, Write, stdout};
use std::path::Path;

use crate::error::{Error, Result};

/// Prints `text` on standard output. A pipe that its reader has closed is no failure.
///
/// # Errors
/// Standard output is full, say.
pub(crate) fn print(text: &str) -> Result<()> {
    match stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::io(Path::new("standard output"))(error))
        }
        _ => Ok(()),
    }
}
