//! Names of files and devices, and their numbers.

use rustc_hash::FxHashMap;

use super::bad::{Bad, Result};
use super::event::FileId;

/// Maximum number of names at a time.
const MAX_NAMES: usize = 1 << 22;
/// Maximum size of all names together.
const MAX_NAMES_BYTES: usize = 512 << 20;

/// The current names of files. A number is never reused.
#[derive(Debug, Default)]
pub(super) struct Names {
    ids: FxHashMap<Box<[u8]>, FileId>,
    /// The name that was looked up last, cached until names change: programs often use one file
    /// several times in a row.
    last: Option<(Vec<u8>, FileId)>,
    bytes: usize,
    next: u32,
}

impl Names {
    /// Returns the file named `name`, which is created if unknown.
    pub(super) fn id(&mut self, name: &[u8]) -> Result<FileId> {
        if let Some(id) = self.find(name) {
            return Ok(id);
        }
        let id = self.number()?;
        self.insert(name, id)?;
        Ok(id)
    }

    /// Returns the file named `name`, and caches the name for the next look-up.
    pub(super) fn find(&mut self, name: &[u8]) -> Option<FileId> {
        if let Some((last, id)) = &self.last
            && last == name
        {
            return Some(*id);
        }
        let id = self.get(name)?;
        let (last, last_id) = self.last.get_or_insert_with(|| (Vec::new(), id));
        *last_id = id;
        last.clear();
        last.extend_from_slice(name);
        Some(id)
    }

    /// Returns the file named `name`, if the trace has shown it.
    pub(super) fn get(&self, name: &[u8]) -> Option<FileId> {
        self.ids.get(name).copied()
    }

    /// Returns a new file number.
    pub(super) fn number(&mut self) -> Result<FileId> {
        let id = FileId(self.next);
        self.next = self.next.checked_add(1).ok_or(Bad::Tables)?;
        Ok(id)
    }

    /// Gives `id` the name `name`; returns the file that had this name.
    pub(super) fn insert(&mut self, name: &[u8], id: FileId) -> Result<Option<FileId>> {
        if self.ids.len() >= MAX_NAMES || self.bytes + name.len() > MAX_NAMES_BYTES {
            return Err(Bad::Tables);
        }
        self.last = None;
        let replaced = self.ids.insert(name.into(), id);
        self.bytes += if replaced.is_none() { name.len() } else { 0 };
        Ok(replaced)
    }

    /// Removes the name `name`; returns the file that had it.
    pub(super) fn remove(&mut self, name: &[u8]) -> Option<FileId> {
        let removed = self.ids.remove(name)?;
        self.last = None;
        self.bytes -= name.len();
        Some(removed)
    }

    /// Returns the names below the directory `folder`, sorted, so that the order of events is
    /// fixed. `separator` separates the names of directories in a path.
    pub(super) fn below(&self, folder: &[u8], separator: u8) -> Vec<Box<[u8]>> {
        let is_below = |name: &[u8]| {
            name.strip_prefix(folder).is_some_and(|rest| rest.first() == Some(&separator))
        };
        let mut below: Vec<_> = self.ids.keys().filter(|name| is_below(name)).cloned().collect();
        below.sort_unstable();
        below
    }
}
