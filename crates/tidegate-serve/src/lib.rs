//! Tidegate: serve.
