//! Tidegate: bench.
