//! Files by name: lengths, and removal.

use rustc_hash::FxHashMap;

use super::bad::Result;
use super::event::{FileId, Op};
use super::fields::file_length;
use super::names::Names;
use super::out::Out;

/// The files of a trace with descriptors. A file is removed when it has no name and no open
/// descriptor any more.
#[derive(Debug)]
pub(super) struct Files {
    names: Names,
    states: FxHashMap<FileId, State>,
    /// Separates the names of directories in a path.
    separator: u8,
}

#[derive(Debug, Default)]
struct State {
    names: u32,
    descriptors: u32,
    is_folder: bool,
    /// The length, if the trace shows it.
    len_bytes: Option<u64>,
}

impl Files {
    pub(super) fn new(separator: u8) -> Self {
        Self { names: Names::default(), states: FxHashMap::default(), separator }
    }

    /// Returns the file named `name`, which is created if unknown.
    pub(super) fn named(&mut self, name: &[u8]) -> Result<FileId> {
        if let Some(file) = self.names.find(name) {
            return Ok(file);
        }
        let file = self.names.id(name)?;
        self.states.insert(file, State { names: 1, ..State::default() });
        Ok(file)
    }

    /// Creates a file without a name.
    pub(super) fn unnamed(&mut self) -> Result<FileId> {
        let file = self.names.number()?;
        self.states.insert(file, State { len_bytes: Some(0), ..State::default() });
        Ok(file)
    }

    /// Returns the file named `name`, if the trace has shown it.
    pub(super) fn known(&self, name: &[u8]) -> Option<FileId> {
        self.names.get(name)
    }

    /// Marks `file` as a directory.
    pub(super) fn set_folder(&mut self, file: FileId) {
        if let Some(state) = self.states.get_mut(&file) {
            state.is_folder = true;
        }
    }

    pub(super) fn len_bytes(&self, file: FileId) -> Option<u64> {
        self.states.get(&file)?.len_bytes
    }

    /// Sets the length of `file`; `None` if the length has changed to an unknown one.
    pub(super) fn set_len(&mut self, file: FileId, len_bytes: Option<u64>) {
        if let Some(state) = self.states.get_mut(&file) {
            state.len_bytes = len_bytes;
        }
    }

    /// Extends `file` to `end_bytes` after a write up to there.
    pub(super) fn reaches(&mut self, file: FileId, end_bytes: u64) {
        if let Some(len_bytes) = self.states.get_mut(&file).and_then(|it| it.len_bytes.as_mut()) {
            *len_bytes = end_bytes.max(*len_bytes);
        }
    }

    /// Sets the length of `file`, and emits the resize, which drops bytes behind the new end.
    pub(super) fn resize(&mut self, file: FileId, len: u64, out: &mut Out) -> Result<()> {
        let len_bytes = file_length(len)?;
        self.set_len(file, Some(len_bytes));
        out.push(Op::Resize { file, len_bytes });
        Ok(())
    }

    /// Renames a file or a directory. A file that had the new name is replaced.
    pub(super) fn rename(&mut self, from: &[u8], to: &[u8], out: &mut Out) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let Some(file) = self.names.get(from) else {
            // The trace has not shown this file, or the name is a directory's.
            self.unlink(to, out);
            return self.rename_below(from, to);
        };
        if self.names.get(to) == Some(file) {
            // Both names belong to one file: the kernel keeps both.
            return Ok(());
        }
        let replaced = self.names.insert(to, file)?;
        self.names.remove(from);
        if let Some(replaced) = replaced {
            self.drop_name(replaced, out);
        }
        let is_folder = self.states.get(&file).is_some_and(|state| state.is_folder);
        if is_folder { self.rename_below(from, to) } else { Ok(()) }
    }

    fn rename_below(&mut self, from: &[u8], to: &[u8]) -> Result<()> {
        for name in self.names.below(from, self.separator) {
            if let Some(file) = self.names.remove(&name) {
                let moved = [to, &name[from.len()..]].concat();
                self.names.insert(&moved, file)?;
            }
        }
        Ok(())
    }

    /// Swaps the names of two files, `RENAME_EXCHANGE`.
    pub(super) fn exchange(&mut self, one: &[u8], other: &[u8]) -> Result<()> {
        let files = (self.named(one)?, self.named(other)?);
        self.names.insert(one, files.1)?;
        self.names.insert(other, files.0)?;
        Ok(())
    }

    /// Adds the name `new` to the file named `name`.
    pub(super) fn link(&mut self, name: &[u8], new: &[u8]) -> Result<()> {
        let file = self.named(name)?;
        self.name(file, new)
    }

    /// Adds a name to `file`.
    pub(super) fn name(&mut self, file: FileId, new: &[u8]) -> Result<()> {
        if self.names.get(new).is_none() {
            self.names.insert(new, file)?;
            self.states.entry(file).or_default().names += 1;
        }
        Ok(())
    }

    pub(super) fn unlink(&mut self, name: &[u8], out: &mut Out) {
        if let Some(file) = self.names.remove(name) {
            self.drop_name(file, out);
        }
    }

    /// Removes a directory and all its content.
    pub(super) fn remove_tree(&mut self, folder: &[u8], out: &mut Out) {
        self.unlink(folder, out);
        for name in self.names.below(folder, self.separator) {
            self.unlink(&name, out);
        }
    }

    fn drop_name(&mut self, file: FileId, out: &mut Out) {
        self.release(file, |state| &mut state.names, out);
    }

    /// Counts a new description of `file`.
    pub(super) fn opened(&mut self, file: FileId) {
        self.states.entry(file).or_default().descriptors += 1;
    }

    /// Removes the description of `file` whose last descriptor was closed.
    pub(super) fn closed(&mut self, file: FileId, out: &mut Out) {
        self.release(file, |state| &mut state.descriptors, out);
    }

    /// Decrements a counter of `file`; removes the file when no name or descriptor is left.
    fn release(&mut self, file: FileId, count: fn(&mut State) -> &mut u32, out: &mut Out) {
        let Some(state) = self.states.get_mut(&file) else { return };
        let count = count(state);
        *count = count.saturating_sub(1);
        if state.names == 0 && state.descriptors == 0 {
            self.states.remove(&file);
            out.push(Op::Remove { file });
        }
    }
}
