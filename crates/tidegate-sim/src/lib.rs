//! Tidegate: sim.
