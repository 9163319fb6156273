//! Schemes: which of DRAM, persistent memory and flash hold what, for the events of a trace.
