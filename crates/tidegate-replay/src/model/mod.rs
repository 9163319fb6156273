//! N cores in virtual time.
