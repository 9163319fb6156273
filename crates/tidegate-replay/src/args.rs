//! The command line of `tidegate-replay`.

use crate::error::Error;

/// What is asked for.
#[derive(Debug, clap::Subcommand)]
pub enum Command {}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// As the command's own.
    pub fn run(&self) -> Result<(), Error> {
        match *self {}
    }
}
