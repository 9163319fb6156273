//! What a launcher says to people while it works.

/// Prints for people what a [`Session`](crate::Session) has to say.
pub trait Reporter: Sync {
    /// One event that people should know of, in one line.
    fn notice(&self, message: &str);

    /// Recovery has done `done` of `total` steps.
    fn progress(&self, done: u64, total: u64);

    /// Recovery is over, or was broken off.
    fn progress_ended(&self);
}

/// One line out of what may be several.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
