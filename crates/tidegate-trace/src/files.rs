//! Files by name, with their lengths, and whether they are still there.

use rustc_hash::FxHashMap;

use super::bad::Result;
use super::event::{FileId, Op};
use super::fields::file_length;
use super::names::Names;
use super::out::Out;

/// The files of a trace with descriptors. A file whose last name was taken away is gone when its
/// last descriptor is closed.
#[derive(Debug)]
pub(super) struct Files {
    names: Names,
    states: FxHashMap<FileId, State>,
    /// What parts the names of folders in a path.
    separator: u8,
}

#[derive(Debug, Default)]
struct State {
    names: u32,
    descriptors: u32,
    is_folder: bool,
    /// Its length, where the trace shows it.
    len_bytes: Option<u64>,
}

impl Files {
    pub(super) fn new(separator: u8) -> Self {
        Self { names: Names::default(), states: FxHashMap::default(), separator }
    }

    /// The file named `name`.
    pub(super) fn named(&mut self, name: &[u8]) -> Result<FileId> {
        if let Some(file) = self.names.find(name) {
            return Ok(file);
        }
        let file = self.names.id(name)?;
        self.states.insert(file, State { names: 1, ..State::default() });
        Ok(file)
    }

    /// A file that has no name yet.
    pub(super) fn unnamed(&mut self) -> Result<FileId> {
        let file = self.names.number()?;
        self.states.insert(file, State { len_bytes: Some(0), ..State::default() });
        Ok(file)
    }

    /// The file named `name`, if the trace has shown it.
    pub(super) fn known(&self, name: &[u8]) -> Option<FileId> {
        self.names.get(name)
    }

    /// The trace shows that `file` is a folder.
    pub(super) fn set_folder(&mut self, file: FileId) {
        if let Some(state) = self.states.get_mut(&file) {
            state.is_folder = true;
        }
    }

    pub(super) fn len_bytes(&self, file: FileId) -> Option<u64> {
        self.states.get(&file)?.len_bytes
    }

    /// The trace shows that `file` has this length; none: that it has another one than before.
    pub(super) fn set_len(&mut self, file: FileId, len_bytes: Option<u64>) {
        if let Some(state) = self.states.get_mut(&file) {
            state.len_bytes = len_bytes;
        }
    }

    /// Bytes up to `end_bytes` were written.
    pub(super) fn reaches(&mut self, file: FileId, end_bytes: u64) {
        if let Some(len_bytes) = self.states.get_mut(&file).and_then(|it| it.len_bytes.as_mut()) {
            *len_bytes = end_bytes.max(*len_bytes);
        }
    }

    /// Gives `file` a length, and drops what lies behind it.
    pub(super) fn resize(&mut self, file: FileId, len: u64, out: &mut Out) -> Result<()> {
        let len_bytes = file_length(len)?;
        self.set_len(file, Some(len_bytes));
        out.push(Op::Resize { file, len_bytes });
        Ok(())
    }

    /// Renames a file or a folder. A file that had the new name is replaced.
    pub(super) fn rename(&mut self, from: &[u8], to: &[u8], out: &mut Out) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let Some(file) = self.names.get(from) else {
            // A file that the trace has not shown, or a folder.
            self.unlink(to, out);
            return self.rename_below(from, to);
        };
        if self.names.get(to) == Some(file) {
            // Two names of one file: the kernel leaves both.
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

    /// Gives the file named `name` another name.
    pub(super) fn link(&mut self, name: &[u8], new: &[u8]) -> Result<()> {
        let file = self.named(name)?;
        self.name(file, new)
    }

    /// Gives `file` a name, or one more.
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

    /// Removes a folder and all that is in it.
    pub(super) fn remove_tree(&mut self, folder: &[u8], out: &mut Out) {
        self.unlink(folder, out);
        for name in self.names.below(folder, self.separator) {
            self.unlink(&name, out);
        }
    }

    fn drop_name(&mut self, file: FileId, out: &mut Out) {
        self.release(file, |state| &mut state.names, out);
    }

    /// A descriptor of `file` was made.
    pub(super) fn opened(&mut self, file: FileId) {
        self.states.entry(file).or_default().descriptors += 1;
    }

    /// The last use of a descriptor of `file` is over.
    pub(super) fn closed(&mut self, file: FileId, out: &mut Out) {
        self.release(file, |state| &mut state.descriptors, out);
    }

    /// One of what `count` counts is gone, and with the last of all the file.
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
