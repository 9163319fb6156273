//! Tests of policies that are more than units.

mod replacement;
