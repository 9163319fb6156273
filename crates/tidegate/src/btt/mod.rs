//! The block translation table (BTT): atomic blocks on persistent memory, in the Linux kernel's format.
