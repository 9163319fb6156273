//! Tests of the region as a whole.

#![expect(clippy::cast_possible_truncation, reason = "the numbers of the tests are small")]

mod counts;
mod kinds;
mod model;
mod poisoned;
