//! `tidegate help backings`: the devices that can be behind a pool.

use std::fmt::Write;

use tidegate::backing::{SCHEMES, Scheme};

use crate::output::lines;

/// Returns the list that `tidegate help backings` prints.
pub(crate) fn help() -> String {
    let mut text = String::from("Backings, as `serve --backing` takes them:\n");
    for scheme in SCHEMES {
        let Scheme { syntax, about, example, identified_by, .. } = scheme;
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "\n  {syntax}\n      {about}\n      example:  {example}\n      identity: {identified_by}\n"
        );
    }
    text.push_str(
        "\nA pool remembers the identity of its backing, and refuses another one.\n\
         TIME is a number with us, ms, s or m: with timeout= how long a request may wait for a\n\
         server, with delay: how long it takes at least.\n",
    );
    text
}

/// Prints the list.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn run() -> anyhow::Result<()> {
    Ok(lines(help().trim_end())?)
}
