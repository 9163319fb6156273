//! Names of files and devices, and the numbers that stand for them.

use rustc_hash::FxHashMap;

use super::bad::{Bad, Result};
use super::event::FileId;

/// How many names are kept at a time.
const MAX_NAMES: usize = 1 << 22;
/// How many bytes they have together.
const MAX_NAMES_BYTES: usize = 512 << 20;

/// Which file has which name now. A number never stands for another file again.
#[derive(Debug, Default)]
pub(super) struct Names {
    ids: FxHashMap<Box<[u8]>, FileId>,
    /// The name that was looked up last, until a name is given or taken away: a program mostly
    /// asks for one file several times in a row.
    last: Option<(Vec<u8>, FileId)>,
    bytes: usize,
    next: u32,
}

impl Names {
    /// The file named `name`; a new one if none has that name.
    pub(super) fn id(&mut self, name: &[u8]) -> Result<FileId> {
        if let Some(id) = self.find(name) {
            return Ok(id);
        }
        let id = self.number()?;
        self.insert(name, id)?;
        Ok(id)
    }

    /// The file named `name`, which is likely to be looked up again at once.
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

    /// The file named `name`, if the trace has shown it.
    pub(super) fn get(&self, name: &[u8]) -> Option<FileId> {
        self.ids.get(name).copied()
    }

    /// A number for a file.
    pub(super) fn number(&mut self) -> Result<FileId> {
        let id = FileId(self.next);
        self.next = self.next.checked_add(1).ok_or(Bad::Tables)?;
        Ok(id)
    }

    /// Gives `id` the name `name`; returns the file that had it.
    pub(super) fn insert(&mut self, name: &[u8], id: FileId) -> Result<Option<FileId>> {
        if self.ids.len() >= MAX_NAMES || self.bytes + name.len() > MAX_NAMES_BYTES {
            return Err(Bad::Tables);
        }
        self.last = None;
        let replaced = self.ids.insert(name.into(), id);
        self.bytes += if replaced.is_none() { name.len() } else { 0 };
        Ok(replaced)
    }

    /// Takes the name `name` away; returns the file that had it.
    pub(super) fn remove(&mut self, name: &[u8]) -> Option<FileId> {
        let removed = self.ids.remove(name)?;
        self.last = None;
        self.bytes -= name.len();
        Some(removed)
    }

    /// The names below the folder `folder`, whose parts `separator` parts. Sorted, so that the
    /// order of events does not vary.
    pub(super) fn below(&self, folder: &[u8], separator: u8) -> Vec<Box<[u8]>> {
        let is_below = |name: &[u8]| {
            name.strip_prefix(folder).is_some_and(|rest| rest.first() == Some(&separator))
        };
        let mut below: Vec<_> = self.ids.keys().filter(|name| is_below(name)).cloned().collect();
        below.sort_unstable();
        below
    }
}
