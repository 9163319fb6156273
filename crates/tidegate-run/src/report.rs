//! The messages of a launcher at work.

/// Prints the messages of a [`Session`](crate::Session) for its user.
pub trait Reporter: Sync {
    /// Prints one event for the user, in one line.
    fn notice(&self, message: &str);

    /// Reports that recovery has done `done` of `total` steps.
    fn progress(&self, done: u64, total: u64);

    /// Reports that recovery is over, or was interrupted.
    fn progress_ended(&self);
}

/// Joins the lines of a text into one.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
