//! Tests of the region as a whole.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "the numbers of the tests are small"
)]

mod calibration;
mod counts;
mod growing;
mod kinds;
mod model;
mod observed;
mod poisoned;
mod waiting;
