//! Pages: which slots hold them, their locks, and what is stored of a write.

pub(super) mod cleaner;
pub(super) mod cluster;
pub(super) mod content;
pub(super) mod group;
pub(super) mod index;
pub(super) mod merge;
pub(super) mod orders;
pub(super) mod table;
pub(super) mod write;
