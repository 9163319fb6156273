//! Recovery against hand-made and random histories.

mod applying;
mod history;
mod journal;
mod planning;
mod pool;
mod random;
mod test_files;
