//! Drawings in the page: each is text, or says why there is none.

use maud::{Markup, PreEscaped, html};

/// Result of drawing into a string, which can only fail in the drawing library.
pub(crate) type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// What `draw` draws, or why it could not.
pub(crate) fn svg(draw: impl Fn(&mut String) -> Drawn) -> Markup {
    let mut text = String::new();
    match draw(&mut text) {
        Ok(()) => PreEscaped(text),
        Err(error) => html! { p { "No plot: " (error) } },
    }
}
